"""Columns: messages as Arrow record batches. Needs the extra ``arrow``.

In reading order:

- ``batches``: Record batches of the messages of journals, for plain code and coroutines.
- ``schema``: Schemas of columns, and the conversion of parsed columns to their types.
- ``layout``: JSON lines of one layout to columns, without parsing each line.
- ``json``: JSON lines to columns, a block at a time.
- ``decoders``: Decoders of journals to rows of record batches, by the form of their messages.
"""
