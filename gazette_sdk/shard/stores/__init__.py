"""Stores: the durable state of a shard's application, committed with its checkpoint.

- ``base``: The protocol of stores, and what they share.
- ``codec``: Codecs: keys and values of a store as bytes.
- ``json_store``: State of one value, in a JSON file.
- ``rocks_store``: State as keys and values in RocksDB.
- ``sqlite_store``: State in an SQLite database, with SQL in the handler.
- ``sql_store``: State in a remote SQL database, fenced by a row for each shard.

A commit returns the changes of files that the recovery log must hold. RocksDB, SQLite's pages and
SQLAlchemy are imported by the module that needs them (extra ``shards``).
"""
