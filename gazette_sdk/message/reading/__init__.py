"""Reading: from journals to envelopes, in batches (message sections 12 and 14).

In reading order:

- ``reader``: :class:`~gazette_sdk.message.Reader`; ``plan``: its arguments
- ``fetcher``: coroutines that fetch content ahead of the consumer; ``content_queue``: the bounded
  queue between them; ``positions``: where the reads of journals begin
- ``batch_reader``: batches of messages for the consumer, over ``journal_decoder`` (content to
  envelopes) and ``delivery`` (which messages are delivered, and the reader's position);
  ``list_delivery``: the same in lists, for shards
- ``since``: messages since a time
"""
