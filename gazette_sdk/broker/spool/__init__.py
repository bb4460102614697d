"""Spools: the fragments that are being written, as files that survive the process.

- `spool`: the fragment that is being written.
- `content_file`, `commit_log`: its files; `compression`, `chunk_queue`: work beside the event loop.
- `directory`: all spools of a broker.
"""
