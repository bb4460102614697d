"""Publishing: from messages to acknowledged appends (message sections 10 and 11).

In reading order:

- ``publisher``: :class:`~gazette_sdk.message.Publisher`; ``transaction``, and its ``ending``;
  ``intents``: the acknowledgements of a transaction that is decided.
- ``sender``: validates, maps, stamps and encodes messages, over ``outbox`` (messages of one
  journal), ``producer`` (producers of transactions) and ``deferred`` (calls that wait for a
  listing).
- ``bulk`` and ``rows``: batches of messages, and of columns.
- ``receipt``: journal and offsets of what was acknowledged.
- ``connection``: transport, event loop, appenders and listings of a publisher; ``partitions``:
  journals of a mapping.
"""
