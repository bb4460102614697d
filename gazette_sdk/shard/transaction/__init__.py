"""Transactions of a shard: messages consumed, state and outputs committed together.

- ``machine``: Machine of a shard's transactions: when to consume, to wait and to commit. Pure.
- ``transaction``: Transaction of a shard, as its handler sees it.
- ``timers``: Timers of a shard, each of which fires once, and the event time that fires those of
  its clock.
- ``windows``: Windows of event time: messages gathered by key and time, until the watermark closes
  them.
- ``tables``: Tables: the newest message of each key of a topic, which is joined.
- ``input``: Input of a shard: the committed messages of its sources, from a checkpoint on.
- ``failure``: Handling of a record for which the handler raises.
- ``metrics``: Metrics of a shard's transactions (operations section 3).
- ``traces``: Traces of a shard: spans of its transactions, and of the messages that they consume.
- ``consume``: Consumption of a transaction's messages and timers: the calls of its hooks.
- ``async_consume``: Consumption of a transaction's messages by hooks that are coroutine functions.
- ``runner``: Runner of the transactions of one shard: the shell of the machine.
"""
