"""Stores: the durable state of a shard's application, committed with its checkpoint.

- ``base``: the protocol ``Store``
- ``codec``: keys and values as bytes
- ``json_store``: one value of any type, written to a file with each commit
- ``rocks_store``, ``rocks_family``: keys and values in RocksDB; ``rocks_options``: its options;
  ``rocks_files``: its files, recorded by directory scan
- ``sqlite_store``: SQL in the handler; ``sqlite_pages``: the pages that each commit changes
- ``sql_store``: a remote database, fenced by its checkpoint row

A commit returns the changes of files that the recovery log must hold. RocksDB, SQLite's pages and
SQLAlchemy are imported by the module that needs them (extra ``shards``).
"""
