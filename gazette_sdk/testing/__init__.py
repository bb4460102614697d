"""Test tools for users of the SDK.

- ``framings``: Contract tests of framings: the behaviour that readers and publishers require.
- ``handler_runs``: Runs of an application over messages in memory, without a cluster.
- ``store_contract``: The contract of stores, as a check that any store can run on itself.
- ``store_faults``: Faults of fragment stores: a store around any other that delays, fails, breaks
  and lags.
- ``tcp_proxy``: A TCP proxy on loopback whose connections are cut, reset, refused and delayed.
- ``transports``: Contract tests of transports: the behaviour that the layers above require.
- ``cluster``: Cluster of real processes, for tests of what happens when brokers die.
- ``faulty_process``: A Python program with faulty fragment stores, such as a broker in a process
  of its own.
- ``journal_checker``: Checker of a journal's promises. Pure: it gets what happened, and given the
  content.
- ``shards``: Shards of an application in real processes, for tests of what happens when they die.
- ``transport_faults``: Faults of transports: a transport around any other that drops, delays,
  duplicates and is cut.
- ``journal_copies``: Content of a journal as each of its brokers and each of its stores has it.
- ``plugin``: Pytest plugin with fixtures of a real cluster.

The names below are imported when they are first used: importing the package is cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gazette_sdk.shard.transaction.machine import CommitStep
    from gazette_sdk.testing.cluster import gazette_cluster
    from gazette_sdk.testing.handler_runs import Advance, HandlerRun, run_handler
    from gazette_sdk.testing.journal_checker import (
        Copy,
        JournalChecker,
        JournalPromiseError,
        Promise,
        Violation,
        raise_violations,
    )
    from gazette_sdk.testing.journal_copies import check_journals
    from gazette_sdk.testing.shards import run_shards
    from gazette_sdk.testing.store_faults import (
        FaultyStore,
        StoreFaultInjector,
        StoreFaults,
        save_store_faults,
    )
    from gazette_sdk.testing.tcp_proxy import TcpProxy
    from gazette_sdk.testing.transport_faults import FaultyTransport, TransportFaults

__all__ = [
    "Advance",
    "CommitStep",
    "Copy",
    "FaultyStore",
    "FaultyTransport",
    "HandlerRun",
    "JournalChecker",
    "JournalPromiseError",
    "Promise",
    "StoreFaultInjector",
    "StoreFaults",
    "TcpProxy",
    "TransportFaults",
    "Violation",
    "check_journals",
    "gazette_cluster",
    "raise_violations",
    "run_handler",
    "run_shards",
    "save_store_faults",
]

_MODULES = {
    "handler_runs": ("Advance", "HandlerRun", "run_handler"),
    "shards": ("run_shards",),
    "cluster": ("gazette_cluster",),
    "journal_checker": (
        "Copy",
        "JournalChecker",
        "JournalPromiseError",
        "Promise",
        "Violation",
        "raise_violations",
    ),
    "journal_copies": ("check_journals",),
    "store_faults": (
        "CommitStep",
        "FaultyStore",
        "StoreFaultInjector",
        "StoreFaults",
        "save_store_faults",
    ),
    "tcp_proxy": ("TcpProxy",),
    "transport_faults": ("FaultyTransport", "TransportFaults"),
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
