"""Disks that get full: a small file system of their own or, where none may be mounted, a limit."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SIZE_BYTES = 8 << 20

LIMIT_BYTES = 64 << 10
"""What still fits into a file of a full disk, where fullness is a limit to the size of files."""


@dataclass
class SmallDisk:
    """A directory whose disk can be filled up and emptied again.

    Attributes:
        path: the directory.
        is_mounted: whether it really is a disk of its own. Otherwise, while it is "full", no file
            of this process may grow beyond :data:`LIMIT_BYTES`.
    """

    path: Path
    is_mounted: bool

    def fill(self) -> None:
        """Take all the room; writes of more than :data:`LIMIT_BYTES` fail from now on."""
        if not self.is_mounted:
            _limit(LIMIT_BYTES)
            return
        with (
            (self.path / "ballast").open("wb", buffering=0) as ballast,
            pytest.raises(OSError, match="No space left"),
        ):
            _write_for_ever(ballast)

    def make_room(self) -> None:
        """Give the room back."""
        if self.is_mounted:
            (self.path / "ballast").unlink()
        else:
            _limit(resource.RLIM_INFINITY)


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[SmallDisk]:
    """A disk at a directory, which is made."""
    path.mkdir()
    disk = SmallDisk(path, is_mounted=_mounted(path))
    try:
        yield disk
    finally:
        if disk.is_mounted:
            subprocess.run(["umount", "--lazy", str(path)], check=True)
        else:
            _limit(resource.RLIM_INFINITY)


def _mounted(path: Path) -> bool:
    if sys.platform != "linux" or os.geteuid() != 0:
        return False
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_BYTES}", "tmpfs", str(path)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _limit(size_bytes: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    soft = hard if size_bytes == resource.RLIM_INFINITY else size_bytes
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _write_for_ever(file):
    while True:
        file.write(bytes(4096))
