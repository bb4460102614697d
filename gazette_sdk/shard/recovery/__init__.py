"""Recovery logs: the journals that replicate the local files of a shard's store."""
