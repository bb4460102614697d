"""Commands of ``gazctl shards`` (cli section 8).

In reading order:

- ``commands``: Table of the commands of ``gazctl shards``: names, help, and functions.
- ``list``: ``gazctl shards list``, and what the commands of shards share.
- ``logs``: ``gazctl shards prune``, ``recover`` and ``unassign``.
- ``reset``: ``gazctl shards reset`` and ``delete``.
- ``skip``: ``gazctl shards skip``.
- ``specs``: ``gazctl shards apply``, ``edit`` and ``generate``.
"""
