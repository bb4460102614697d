"""Shards: stateful consumers whose effects are committed exactly once.

::

    from gazette_sdk import shard

    @shard.handler(message=Order, store=shard.RocksStore[str, int], sources="topic=orders")
    def totals(txn: shard.Transaction, order: Order) -> None:
        txn.store[order.customer] = txn.store.get(order.customer, 0) + order.cents

- ``recovery``: Recovery logs: the journals that replicate the local files of a shard's store.
- ``stores``: Stores: the durable state of a shard's application, committed with its checkpoint.
- ``application``: Declarations of an application: its messages, store, sources, hooks and
  endpoints.
- ``transaction``: Transactions of a shard: messages consumed, state and outputs committed
  together.
- ``consumer``: Consumer processes: shards that are assigned to this process, and the service to
  ask for them.

The names below are imported when they are first used: none needs the packages of the extra
``shards`` before that.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gazette_sdk.protocol.authorization import Capability
    from gazette_sdk.shard.application.application import Application, Method, Query, dead_letters
    from gazette_sdk.shard.application.handler import handler
    from gazette_sdk.shard.application.sources import broadcast, partitions
    from gazette_sdk.shard.consumer.embedded import EmbeddedConsumer
    from gazette_sdk.shard.stores import codec
    from gazette_sdk.shard.stores.base import Store
    from gazette_sdk.shard.stores.json_store import JsonStore
    from gazette_sdk.shard.stores.rocks_store import RocksStore
    from gazette_sdk.shard.stores.sql_store import SqlStore
    from gazette_sdk.shard.stores.sqlite_store import SqliteStore
    from gazette_sdk.shard.transaction import windows
    from gazette_sdk.shard.transaction.tables import Table, table
    from gazette_sdk.shard.transaction.timers import Timer
    from gazette_sdk.shard.transaction.transaction import Process, Shard, Transaction
    from gazette_sdk.shard.transaction.windows import Window

__all__ = [
    "Application",
    "Capability",
    "EmbeddedConsumer",
    "JsonStore",
    "Method",
    "Process",
    "Query",
    "RocksStore",
    "Shard",
    "SqlStore",
    "SqliteStore",
    "Store",
    "Table",
    "Timer",
    "Transaction",
    "Window",
    "broadcast",
    "codec",
    "dead_letters",
    "handler",
    "partitions",
    "table",
    "windows",
]

_MODULES = {
    "Application": "application.application",
    "Capability": "application.application",
    "EmbeddedConsumer": "consumer.embedded",
    "JsonStore": "stores.json_store",
    "Method": "application.application",
    "Process": "transaction.transaction",
    "Query": "application.application",
    "RocksStore": "stores.rocks_store",
    "Shard": "transaction.transaction",
    "SqlStore": "stores.sql_store",
    "SqliteStore": "stores.sqlite_store",
    "Store": "stores.base",
    "Table": "transaction.tables",
    "Timer": "transaction.timers",
    "Transaction": "transaction.transaction",
    "Window": "transaction.windows",
    "broadcast": "application.sources",
    "codec": "stores.codec",
    "dead_letters": "application.application",
    "handler": "application.handler",
    "partitions": "application.sources",
    "table": "transaction.tables",
    "windows": "transaction.windows",
}

_WHOLE = "codec", "windows"
"""Names of modules."""


def __getattr__(name: str) -> object:
    """Import a name when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    found: object = module if name in _WHOLE else getattr(module, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
