"""Staged files: the files of a store while they are played back.

Each is named by its fnode, below ``.fnodes``. When playback ends they get their paths. Blocking:
call it on a worker thread, one call at a time.
"""

from __future__ import annotations

import os
import shutil
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

from gazette_sdk.errors import RecoveryError
from gazette_sdk.shard.recovery.fsm import FSM
from gazette_sdk.shard.recovery.operation import clean_path
from gazette_sdk.shard.recovery.player import CreateNode, NodeChange, RemoveNode, WriteNode

__all__ = ["STAGING", "StagedFiles"]

STAGING = ".fnodes"
"""Directory of staged files, below the store's."""

OPEN_FILES_MAX = 16
"""Files that are kept open. Stores write few files at a time."""


class StagedFiles:
    """Files of one store during playback.

    Args:
        directory: of the store. Its content is deleted.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._open: OrderedDict[int, int] = OrderedDict()  # descriptors by fnode, oldest use first

    def path(self, fnode: int) -> Path:
        """Return the path of a staged file."""
        return self.directory / STAGING / str(fnode)

    def begin(self) -> None:
        """Delete all content of the directory, and create what staging needs."""
        if self.directory.exists():
            for entry in self.directory.iterdir():
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()
        (self.directory / STAGING).mkdir(parents=True)

    def apply(self, changes: Iterable[NodeChange]) -> None:
        """Perform changes, in order.

        Raises:
            OSError: a file cannot be created or written.
        """
        for change in changes:
            match change:
                case WriteNode(fnode, offset, content):
                    _write(self._descriptor(fnode), content, offset)
                case CreateNode(fnode):
                    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                    self._keep(fnode, os.open(self.path(fnode), flags, 0o644))
                case RemoveNode(fnode):
                    self._close(fnode)
                    self.path(fnode).unlink()

    def make_live(self, fsm: FSM) -> None:
        """Give all files their paths, and write properties.

        Raises:
            RecoveryError: the staged files are not those of the history, or two have one path.
            OSError: a file cannot be linked.
        """
        self.close()
        staged = {int(entry.name) for entry in (self.directory / STAGING).iterdir()}
        if staged != set(fsm.live_nodes):
            raise RecoveryError(
                f"staged files {sorted(staged)} are not the live ones {sorted(fsm.live_nodes)}"
            )
        for fnode, node in sorted(fsm.live_nodes.items()):
            for path in sorted(node.links):
                os.link(self.path(fnode), self._target(path))
            self.path(fnode).unlink()
        (self.directory / STAGING).rmdir()
        for path, content in sorted(fsm.properties.items()):
            with self._target(path).open("xb") as file:
                file.write(content.encode())

    def destroy(self) -> None:
        """Delete the directory."""
        self.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def close(self) -> None:
        """Close all files."""
        for fnode in list(self._open):
            self._close(fnode)

    # ------------------------------------------------------------------ parts

    def _target(self, path: str) -> Path:
        """Return the local path of a recorded one, which cannot be outside of the directory."""
        target = self.directory / clean_path(path).lstrip("/")
        if target.relative_to(self.directory).parts[0] == STAGING:
            raise RecoveryError(f"a recorded file has the path {path}, which is reserved")
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def _descriptor(self, fnode: int) -> int:
        descriptor = self._open.get(fnode)
        if descriptor is None:
            descriptor = os.open(self.path(fnode), os.O_RDWR | os.O_CLOEXEC)
            self._keep(fnode, descriptor)
        else:
            self._open.move_to_end(fnode)
        return descriptor

    def _keep(self, fnode: int, descriptor: int) -> None:
        self._open[fnode] = descriptor
        if len(self._open) > OPEN_FILES_MAX:
            os.close(self._open.popitem(last=False)[1])

    def _close(self, fnode: int) -> None:
        descriptor = self._open.pop(fnode, None)
        if descriptor is not None:
            os.close(descriptor)


def _write(descriptor: int, content: bytes, offset: int) -> None:
    written = 0
    while written < len(content):
        written += os.pwrite(
            descriptor, content[written:] if written else content, offset + written
        )
