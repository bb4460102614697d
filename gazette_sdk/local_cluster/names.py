"""Names of brokers over a data directory."""

from __future__ import annotations

from pathlib import Path

__all__ = ["broker_name"]


def broker_name(spools: Path, index: int) -> str:
    """Return the id of a broker, ``broker-0`` and so on, which is also the name of its spools.

    Directories of earlier versions have names such as ``broker-000``. Such a broker keeps its
    name, because spools belong to an id.

    Args:
        spools: directory of all spools.
        index: number of the broker, from 0.
    """
    earlier = f"broker-{index:03d}"
    return earlier if (spools / earlier).is_dir() else f"broker-{index}"
