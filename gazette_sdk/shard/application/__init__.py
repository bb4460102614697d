"""Declarations of an application: its messages, store, sources, hooks and endpoints.

- ``application``: :class:`Application`, the class-based form, and the rules for its hooks
- ``handler``: :func:`handler`, which makes an application of one function
- ``handles``: :class:`Shard` and :class:`Process`, as hooks see them
- ``endpoints``: declared HTTP endpoints and gRPC methods over a shard's state
- ``sources``: the shards and recovery logs of the journals that an application reads (pure)
- ``generator``: creates those shards and logs while its process leads
"""
