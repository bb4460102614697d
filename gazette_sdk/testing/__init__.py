"""Test tools for users of the SDK.

- ``plugin``: the pytest fixtures ``gazette``, ``gazette_cluster`` and ``etcd``
- ``cluster``: :func:`gazette_cluster`, a cluster of processes that can be killed and paused
- ``etcd``: a real Etcd for tests
- ``framings``: contract tests of a :class:`~gazette_sdk.framing.Framing`
- ``transports``: contract tests of a :class:`~gazette_sdk.transport.base.Transport`
- ``journal_checker``: :class:`JournalChecker` of what journals promise, with ``append_pieces``;
  ``journal_copies`` reads the journals of running brokers and their stores for it
- ``store_faults``: :class:`FaultyStore`, a fragment store with injected faults; ``faulty_process``
  runs a program with them
- ``transport_faults``: :class:`FaultyTransport`, a transport with injected faults
- ``tcp_proxy``: :class:`TcpProxy`, which cuts and delays connections of processes
- ``shards``: :func:`run_shards`, shards of an application in processes that can be killed and
  paused; ``shard_process`` crashes one at a step of a commit, with ``commit_faults``
- ``handler_runs``: :func:`run_handler`, which runs an application over messages without a cluster
- ``chance``: random decisions that are derived from one seed

The names below are imported when they are first used: importing the package is cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gazette_sdk.shard.transaction.machine import CommitStep
    from gazette_sdk.testing.cluster import gazette_cluster
    from gazette_sdk.testing.handler_runs import HandlerRun, run_handler
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
    "handler_runs": ("HandlerRun", "run_handler"),
    "commit_faults": ("CommitStep",),
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
    "store_faults": ("FaultyStore", "StoreFaultInjector", "StoreFaults", "save_store_faults"),
    "tcp_proxy": ("TcpProxy",),
    "transport_faults": ("FaultyTransport", "TransportFaults"),
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
