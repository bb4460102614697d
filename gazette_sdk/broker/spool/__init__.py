"""Spools: the fragments that are being written, as files that survive the process.

- ``files``: Files of a spool: content, commit log and compressed form, and the queue of large
  chunks.
- ``directory``: The directory in which a broker keeps its spools, so that they survive the
  process.
- ``spool``: Spool: the fragment of a journal that is being written (broker section 7).
"""
