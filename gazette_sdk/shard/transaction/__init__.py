"""Transactions of a shard: messages consumed, state and outputs committed together.

- ``machine``: Machine of a shard's transactions: when to consume, to wait and to commit. Pure.
- ``transaction``: Transaction of a shard, as its handler sees it.
- ``failure``: Handling of a record for which the handler raises.
- ``metrics``: Metrics of a shard's transactions (operations section 3).
- ``consume``: Consumption of a transaction's messages: its input, and the calls of its hooks.
- ``runner``: Runner of the transactions of one shard: the shell of the machine.
"""
