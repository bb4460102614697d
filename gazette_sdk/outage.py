"""Log of an outage: one line when it begins, and one with its duration when it is over."""

from __future__ import annotations

import asyncio
import logging
import time


class Outage:
    """Log of the failures of one operation that is tried again until it succeeds.

    The first failure is logged as a warning, with its reason. Further failures are counted. The
    next success is logged with the duration of the outage and the number of failures.

    Args:
        log: the logger.
        operation: name of the operation, a noun phrase such as ``read of a/journal``.
    """

    __slots__ = ("_begun_s", "_failures", "_log", "_operation")

    def __init__(self, log: logging.Logger, operation: str) -> None:
        self._log = log
        self._operation = operation
        self._begun_s = 0.0
        self._failures = 0

    @property
    def is_open(self) -> bool:
        """True from the first failure to the next success."""
        return self._failures > 0

    def failed(self, error: object) -> None:
        """Note a failed attempt."""
        self._failures += 1
        if self._failures == 1:
            self._begun_s = time.monotonic()
            self._log.warning(
                "%s failed, and is tried again until it succeeds: %s", self._operation, error
            )
        else:
            self._log.debug("%s failed again: %s", self._operation, error)

    async def pause(self, pause_s: float) -> None:
        """Wait before the next attempt.

        Args:
            pause_s: for how long.

        Raises:
            CancelledError: the task was cancelled. Before Python 3.13 a task group that fails at
                that moment raises its errors in place of the cancellation, which would be lost.
        """
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError
        await asyncio.sleep(pause_s)

    def ended(self) -> None:
        """Note a success, or any other end of the outage. Without an outage it does nothing."""
        if self._failures:
            self._log.warning(
                "%s works again after an outage of %.1f s (%d failure%s)",
                self._operation,
                time.monotonic() - self._begun_s,
                self._failures,
                "" if self._failures == 1 else "s",
            )
            self._failures = 0
