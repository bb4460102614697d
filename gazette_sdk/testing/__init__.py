"""Test tools for users of the SDK.

- ``plugin``: the pytest fixtures ``gazette``, ``gazette_cluster`` and ``etcd``
- ``cluster``: :func:`gazette_cluster`, a cluster of processes that can be killed and paused
- ``etcd``: a real Etcd for tests
- ``framings``: contract tests of a :class:`~gazette_sdk.framing.Framing`
- ``transports``: contract tests of a :class:`~gazette_sdk.transport.base.Transport`
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gazette_sdk.testing.cluster import gazette_cluster

__all__ = ["gazette_cluster"]

_MODULES = {
    "gazette_cluster": "gazette_sdk.testing.cluster",
}


def __getattr__(name: str) -> object:
    """Import a name when it is first used: pytest loads this package in every run."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = found
    return found
