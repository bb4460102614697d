"""Columns: messages as Arrow record batches. Needs the extra ``arrow``.

In reading order:

- ``record_batches``: the result of ``Reader.arrow``, over ``decoders`` (content to rows) and
  ``rows`` (references to rows, which are sequenced)
- ``json_columns``, over ``lines`` (and their UUIDs) and ``layout`` (lines of one layout, which
  need no parsing); ``csv_columns``, ``protobuf_columns``; ``metadata``: columns about messages
"""
