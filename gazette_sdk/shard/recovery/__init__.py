"""Recovery logs: the journals that replicate the local files of a shard's store.

Read in this order:

- ``hints``: Segments: stretches of a log's operations of one author, and sets of them (recovery
  log 3).
- ``log``: Recovery log of a primary: appends of the log's current author only, and pruning.
- ``fsm``: State machine of a recovery log: which operations are part of its history (recovery log
  2).
- ``player``: Player: content of recovery logs becomes changes of staged files (recovery log 6).
  Pure.
- ``recorder``: Recorder: changes of files become numbered operations of a recovery log (recovery
  log 4). Pure.
"""
