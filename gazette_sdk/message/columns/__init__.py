"""Columns: messages as Arrow record batches. Needs the extra ``arrow``.

In reading order:

- ``record_batches``: the result of ``Reader.arrow``, over ``decoders`` (content to rows) and
  ``rows`` (references to rows, which are sequenced)
- ``message_schema``: the schema of a class of messages
- ``json_columns``, over ``lines`` (and their UUIDs), ``layout`` (lines of one layout, which need
  no parsing), ``json_objects`` (types that pyarrow does not parse) and ``conversion`` (parsed
  columns to the types of the schema)
- ``csv_columns``, ``protobuf_columns``; ``metadata``: columns about messages
"""
