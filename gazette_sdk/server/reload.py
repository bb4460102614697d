"""Files that a running server reads again: keys and certificates.

A file is read again when its time of modification, its size or its inode has changed, which is
checked periodically, and at SIGHUP. Orchestrators replace mounted secrets without any signal.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from gazette_sdk.errors import ConfigurationError

__all__ = ["CHECK_PERIOD_S", "ReloadedFiles"]

CHECK_PERIOD_S = 10.0
"""Seconds between two checks of the files."""

_log = logging.getLogger(__name__)

_Stamps = tuple[tuple[int, int, int] | None, ...]


class ReloadedFiles:
    """Files to read again when they change, in the main thread of a server process.

    Args:
        period_s: seconds between two checks.
    """

    def __init__(self, *, period_s: float = CHECK_PERIOD_S) -> None:
        self._period_s = period_s
        self._entries: list[tuple[str, Sequence[str], Callable[[], None], list[_Stamps]]] = []
        self._wake = asyncio.Event()
        self._is_forced = False

    def add(self, subject: str, paths: Sequence[str], reload: Callable[[], None]) -> None:
        """Call ``reload`` when one of the files has changed. Empty paths are ignored.

        If it raises ConfigurationError, the error is logged, and the server goes on with what it
        has. The next change is another attempt.
        """
        paths = [path for path in paths if path]
        if paths:
            self._entries.append((subject, paths, reload, [_stamps(paths)]))

    async def run(self) -> None:
        """Check the files until cancelled. Without files it returns at once."""
        if not self._entries:
            return
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self._force)
        try:
            while True:
                self._wake.clear()
                try:
                    async with asyncio.timeout(self._period_s):
                        await self._wake.wait()
                except TimeoutError:
                    pass
                is_forced, self._is_forced = self._is_forced, False
                self._check(is_forced=is_forced)
        finally:
            loop.remove_signal_handler(signal.SIGHUP)

    def _force(self) -> None:
        self._is_forced = True
        self._wake.set()

    def _check(self, *, is_forced: bool) -> None:
        for subject, paths, reload, known in self._entries:
            stamps = _stamps(paths)
            if stamps == known[0] and not is_forced:
                continue
            known[0] = stamps
            try:
                reload()
            except ConfigurationError as error:
                _log.error(
                    "%s cannot be read again, and the earlier ones stay in use: %s", subject, error
                )
            else:
                _log.warning("%s were read again from %s", subject, ", ".join(paths))


def _stamps(paths: Sequence[str]) -> _Stamps:
    return tuple(_stamp(Path(path)) for path in paths)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
