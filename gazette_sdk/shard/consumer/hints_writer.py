"""HintsWriter: when a primary stores the hints of what it recorded."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from gazette_sdk.errors import EtcdError
from gazette_sdk.protocol import recoverylog_pb2 as pb
from gazette_sdk.shard.recovery.recorder import Recorder
from gazette_sdk.shard.recovery.rerecord import HINTS_PAUSE_S, HintsSchedule

__all__ = ["HintsWriter"]

_log = logging.getLogger(__name__)


class HintsWriter:
    """Writer of the primary hints of one run. On the event loop.

    Args:
        recorder: of the run.
        store: stores hints in Etcd.
    """

    def __init__(self, recorder: Recorder, store: Callable[[pb.FSMHints], Awaitable[None]]) -> None:
        self._recorder = recorder
        self._store = store
        self._schedule = HintsSchedule(time.monotonic(), recorder.write_head)
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None

    def consider(self, *, is_idle: Callable[[], bool]) -> None:
        """Store hints if they are due, between two transactions; and once the shard is idle.

        Args:
            is_idle: returns True if no transaction is open or under way, and no worker runs.
        """
        self._write_if_due(is_idle=False)
        if self._timer is None:
            self._set_timer(is_idle)

    def _set_timer(self, is_idle: Callable[[], bool]) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(HINTS_PAUSE_S, self._timer_fired, is_idle)

    def _timer_fired(self, is_idle: Callable[[], bool]) -> None:
        self._timer = None
        if is_idle():
            self._write_if_due(is_idle=True)
        if self._schedule.is_due(time.monotonic() + HINTS_PAUSE_S, self._head, 0, is_idle=True):
            # Not written, as the shard is busy, or the last ones were too recent: later then.
            self._set_timer(is_idle)

    @property
    def _head(self) -> int:
        return self._recorder.write_head

    def _write_if_due(self, *, is_idle: bool) -> None:
        recorder = self._recorder
        if self._writing is not None or not recorder.is_committed:
            return
        if self._schedule.is_due(
            time.monotonic(), self._head, recorder.bytes_live, is_idle=is_idle
        ):
            work = self._write(recorder.hints(), self._head)
            self._writing = asyncio.get_running_loop().create_task(work, name="hints")

    async def _write(self, hints: pb.FSMHints, head: int) -> None:
        try:
            await self._store(hints)
        except EtcdError as error:
            # They are advice: without them recovery reads more. The next ones are soon due.
            self._schedule.failed(time.monotonic())
            _log.warning("hints of %s are not stored: %s", hints.log, error)
        else:
            self._schedule.stored(time.monotonic(), head)
        finally:
            self._writing = None

    async def aclose(self) -> None:
        """Store nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
        if self._writing is not None:
            writing = self._writing
            writing.cancel()
            await asyncio.wait([writing])
