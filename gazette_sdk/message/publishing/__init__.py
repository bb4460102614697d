"""Publishing: from messages to acknowledged appends (message sections 10 and 11).

In reading order:

- ``publisher``: :class:`~gazette_sdk.message.Publisher`; ``transaction``; ``intents``: the
  acknowledgements of a transaction that is decided.
- ``dispatch``: validates and maps messages, over ``routes`` (from messages to outboxes),
  ``partitions`` (journals of a mapping) and ``deferred`` (calls that wait for a listing).
- ``bulk`` and ``rows``: batches of messages, and of columns.
- ``sender``: stamps and encodes messages, over ``producer`` (producers of transactions) and
  ``outbox`` (messages of one journal).
- ``receipt``: journal and offsets of what was acknowledged.
- ``connection``: transport, event loop, appenders and listings of a publisher.
"""
