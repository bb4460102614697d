"""Spools: the fragments that are being written, as files that survive the process.

- `spool`: the fragment that is being written.
- `commit_log`, `content_file`, `compression`, `write_behind`: its files.
- `directory`: all spools of a broker.
"""
