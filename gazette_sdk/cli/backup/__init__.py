"""Backups of a cluster's Etcd, and the rebuilding of a cluster that lost it.

Content of journals is in fragment stores and in spool directories of brokers. What Etcd alone has
is small: specs of journals and shards, hints of recovery logs, and offsets at which journals are
suspended. A backup has these, and the heads of journals, so that no offset is given twice.

In reading order:

- ``archive``: Backup: what it has, and the file that holds it.
- ``capture``: Capture of a backup, from a cluster or from its stores, and its check against them.
- ``stores``: Backup that is gathered from fragment stores, where there is no other one.
- ``restore``: Restore of a cluster into an empty Etcd, which continues after an interruption.
- ``commands``: ``gazctl backup create``, ``show`` and ``verify``, and ``gazctl restore cluster``.
"""
