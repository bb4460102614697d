"""Declarations of an application: its messages, store, sources, hooks and endpoints.

- ``endpoints``: Declarations of HTTP endpoints and gRPC methods over the state of shards.
- ``sources``: Sources of an application: the journals that its shards read, and which of them one
  shard reads.
- ``application``: Applications: what is declared of a group of shards, and the hooks that are
  called for them.
- ``handler``: Applications of one function.
- ``generator``: Generator of an application's shards.
"""
