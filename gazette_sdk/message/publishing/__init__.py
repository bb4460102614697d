"""Publishing: from messages to acknowledged appends (message sections 10 and 11).

In reading order:

- ``publisher``: :class:`~gazette_sdk.message.Publisher`; ``transaction``; ``intents``: what a
  transaction stores of its end
- ``dispatch``: what is published, validated and mapped, over ``routes`` (from messages to
  outboxes), ``partitions`` (the journals a mapping chooses among) and ``deferred`` (what cannot be
  mapped yet)
- ``bulk`` and ``rows``: batches of messages, and of columns
- ``sender``: from stamp to acknowledgement, over ``producer`` and ``producers`` (of transactions),
  ``outbox`` (what is on its way to one journal), ``appends`` (the loop that appends it), ``batch``
  and ``receipt``, and ``link`` (what it holds on the event loop)
- ``direct``: appends by the thread that waits for the receipt; ``handover``: the pure machine that
  says who appends
"""
