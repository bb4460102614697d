"""Columns: messages as Arrow record batches. Needs the extra ``arrow``.

In reading order:

- ``blocks``: a block of whole frames to one record batch
- ``record_batches``: what ``Reader.arrow`` returns, over ``decoders`` (of content as it arrives)
  and ``rows`` (references to rows, while the Sequencer decides on them)
- ``json_columns``, over ``lines`` (and their UUIDs) and ``layout`` (lines written alike, which
  need no parsing); ``csv_columns``, ``protobuf_columns``; ``metadata``: columns about messages
"""
