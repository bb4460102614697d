"""Transactions of a shard: messages consumed, state and outputs committed together.

- ``machine``: when to consume, to wait, to commit (pure)
- ``transaction``: :class:`Transaction`, what a handler gets
- ``base``: interfaces of what a runner works with: inputs, outputs, recorder and log
- ``input``: :class:`Input`, the committed messages of the sources
- ``output``: :class:`Output`, what is published, and its acknowledgements
- ``steps``: the steps of a commit, at which tests crash
- ``consume``: consumes with ``def`` hooks, on a worker thread
- ``async_consume``: consumes with ``async def`` hooks, on the event loop
- ``failure``: what becomes of a record for which the handler raises
- ``progress``: offsets that committed transactions have read through, and waiting for them
- ``metrics``: metrics of transactions
- ``runner``: runs the transactions of one shard
"""
