"""Declarations of an application: its messages, store, sources, hooks and endpoints.

- ``endpoints``: Declarations of HTTP endpoints and gRPC methods over the state of shards.
- ``application``: Applications: what is declared of a group of shards, and the hooks that are
  called for them.
- ``handler``: Applications of one function, and the generator of an application's shards.
"""
