"""Declarations of an application: its messages, store, sources, hooks and endpoints.

- ``sources``: Sources of an application: the journals that its shards read, and which of them one
  shard reads.
- ``application``: Applications: what is declared of a group of shards, their hooks and endpoints.
- ``handler``: Applications of one function.
- ``generator``: Generator of an application's shards.
"""
