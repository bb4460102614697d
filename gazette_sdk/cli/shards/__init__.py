"""Commands of ``gazctl shards``, ``consumers`` and ``topics`` (cli section 8).

In reading order:

- ``commands``: Table of the commands of ``gazctl shards``, ``consumers`` and ``topics``: names,
  functions.
- ``consumers``: ``gazctl consumers list`` and ``describe``: applications, their processes and their
  shards.
- ``list``: ``gazctl shards list``, and what the commands of shards share.
- ``logs``: ``gazctl shards prune``, ``recover``, ``state`` and ``unassign``.
- ``reset``: ``gazctl shards reset``, ``skip`` and ``delete``.
- ``specs``: ``gazctl shards apply``, ``edit`` and ``generate``.
- ``topics``: ``gazctl topics grow``: more partitions of a topic, which its readers allow.
"""
