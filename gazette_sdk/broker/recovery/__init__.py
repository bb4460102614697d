"""Recovery of heads and spools after the end of a process.

In reading order:

- ``routes``: Routes that Etcd holds for recovery: recorded ones, the last ones, and their
  recorder.
- ``states``: State machine of recovery, as two tables: one for a journal's head, one for a
  recovered spool.
- ``etcd_history``: Etcd history: heads that are still valid by it, and spools of another one, which
  are withheld.
- ``spools``: Recovery of the spools that an earlier process left in one journal's directory.
- ``peers``: Peers in a recovery: what they hold of a journal, and journals that wait for them.
- ``quarantine``: Quarantine of recovered spools, until it is known how much of them is valid.
- ``custody``: Custody of the last bytes of journals, at one broker.

Words, of a journal's spools and of its head:

- *quarantine*: spools of an earlier process that are in no index and not uploaded yet.
- *contested*: others may have continued the journal since the spool was written.
- *unconfirmed*: it is not known whether all replicas have the spool's content.
- *covered*: contested, and others have every byte of it.
- *superseded*: others have written other bytes there: the files are set aside.
- *unverified*: a head that is used once no one else has bytes after it.
- *withheld*: of a journal, or a history, that Etcd does not have any more.
- *waiting*: a journal of whose last route no broker is there.
"""
