"""Recovery of heads and spools after the end of a process.

In reading order:

- ``routes``: Routes that Etcd holds for recovery: recorded ones, the last ones, and their
  recorder.
- ``states``: State machine of recovery, as two tables: one for a journal's head, one for a
  recovered spool.
- ``etcd_history``: Etcd history: heads are valid only if no one continued their journals without
  this broker.
- ``spools``: Recovery of the spools that an earlier process left in one journal's directory.
- ``peers``: Peers in a recovery: what they hold of a journal, and journals that wait for them.
- ``withheld``: Withheld spools: those of a history that Etcd does not have any more.
- ``quarantine``: Quarantine of recovered spools, until it is known how much of them is valid.
"""
