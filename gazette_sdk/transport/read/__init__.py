"""Reads of journals.

Read in this order:

- `reader`: one read, from a broker or straight from a stored fragment.
- `retry_reader`: content without end, across failures.
- `metadata`: begin and write head of a journal, without its content.
- `read_ahead`: content of a stored fragment, decompressed in a thread.
"""
