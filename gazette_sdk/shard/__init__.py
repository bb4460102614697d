"""Shards: stateful consumers whose effects are committed exactly once."""
