"""Recovery logs: the journals that replicate the local files of a shard's store.

Read in this order:

- `file_change`: changes of files, as a store tells them.
- `operation`: recorded operations, their frames, and the chain of checksums.
- `segments`: stretches of a log by one author, and sets of them.
- `fsm`: which operations are part of a log's history.
- `hints`: where the operations of live files are, as Etcd holds them.
"""
