"""Disks of the simulation: what a power failure leaves of a broker's spool directory.

Files are real. The simulation notes what was forced to disk, and when. At a power failure each file
may fall back to what was forced: content and names that were not are lost, or kept, as the kernel
may have written them or not.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

__all__ = ["Disks", "watch_syncs"]


class Disks:
    """Content of all files that was forced to disk.

    Args:
        rng: decides what else a power failure leaves.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        # Of each inode. A file system in memory does not give their numbers again.
        self._content: dict[tuple[int, int], bytes] = {}
        self._names: dict[str, dict[str, tuple[int, int]]] = {}  # of each directory

    def synced(self, fd: int) -> None:
        """Note that a file or a directory was forced to disk."""
        status = os.fstat(fd)
        path = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115 - called for each commit
        if os.path.isdir(path):  # noqa: PTH112 - called for each commit
            self._names[path] = {
                entry.name: (entry.stat().st_dev, entry.stat().st_ino) for entry in os.scandir(path)
            }
        else:
            # Read anew: the descriptor may be for writing only.
            self._content[status.st_dev, status.st_ino] = Path(path).read_bytes()

    def fail(self, directory: Path) -> None:
        """Lose what a power failure loses of a broker's spool directory."""
        revision = directory / "revision"
        if revision.exists() and not self._is_forced(revision) and self._rng.random() < 0.3:
            revision.write_bytes(b"")
        journals = directory / "journals"
        if not journals.is_dir():
            return
        known = self._names.get(str(journals), {})
        for path in sorted(journals.iterdir()):
            if path.name not in known and self._rng.random() < 0.5:
                shutil.rmtree(path)
                continue
            self._fail_journal(path)

    def _is_forced(self, path: Path) -> bool:
        status = path.stat()
        return self._content.get((status.st_dev, status.st_ino)) == path.read_bytes()

    def _fail_journal(self, directory: Path) -> None:
        known = self._names.get(str(directory), {})
        for path in sorted(directory.iterdir()):
            status = path.stat()
            inode = (status.st_dev, status.st_ino)
            is_named = known.get(path.name) == inode
            if not is_named and self._rng.random() < 0.5:
                former = self._content.get(known.get(path.name, (0, 0)))
                if former is None:
                    path.unlink()
                else:  # it was replaced, and the new name was not forced
                    path.write_bytes(former)
                continue
            data = path.read_bytes()
            forced = self._content.get(inode, b"")
            if data == forced:
                continue
            match self._rng.randrange(3):
                case 0:  # all was written
                    kept = data
                case 1:  # nothing more than what was forced
                    kept = forced
                case _:  # the length was written, and not all of the bytes
                    kept = forced[: len(data)] + bytes(max(0, len(data) - len(forced)))
            # In place: the names of what was forced refer to this inode.
            with path.open("r+b") as file:
                file.write(kept)
                file.truncate(len(kept))


def watch_syncs(disks: Disks) -> None:
    """Note all syncs of this process, which then cost no time."""

    def noted(sync: Callable[[int], None]) -> Callable[[int], None]:
        del sync
        return disks.synced

    os.fsync = noted(os.fsync)
    os.fdatasync = noted(os.fdatasync)
