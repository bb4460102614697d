"""Reading: from journals to envelopes, in batches (message sections 12 and 14).

In reading order:

- ``reader``: :class:`~gazette_sdk.message.Reader`; ``plan``: what it was asked to read
- ``pump``: from content to batches of what is delivered, over ``journal_decoder`` (content to
  envelopes) and ``delivery`` (which are delivered, and where a reader stands)
- ``prefetch``: reads ahead, on the event loop; ``flow`` and ``mailbox``: from there to the consumer
"""
