"""Recovery logs: the journals that replicate the local files of a shard's store.

Read in this order:

- `file_change`: changes of files, as a store tells them.
- `operation`: recorded operations, their frames, and the chain of checksums.
- `segments`: stretches of a log by one author, and sets of them.
- `fsm`: which operations are part of a log's history.
- `hints`: where the operations of live files are, as Etcd holds them.
- `recorder`: changes of files become numbered operations.
- `rerecord`: which file to record anew, and when to store hints.
- `player`: content of logs becomes changes of staged files.
- `staged_files`: the files while they are played back.
- `playback`: the shell of the player, over a transport.
- `log`: appends that only the log's current author may make.
- `prune`: which fragments no hints need any more.
"""
