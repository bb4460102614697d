"""Retries: calls that are made again, the waits between attempts, and the log of an outage.

Waits between attempts of a call (client section 1), and between dials of a broker. Most are for
topology to converge, which takes some tens of milliseconds; so the first waits are short, and the
schedule soon rises to what is polite toward a cluster in trouble.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeAlias, TypeVar

from gazette_sdk.errors import GazetteError

T = TypeVar("T")

Pause: TypeAlias = Callable[[int], Awaitable[None]]
"""Function that waits before the attempt after attempt number N; tests put virtual time here."""

_DELAYS_S = (0.05, 0.05, 0.1, 0.1, 1.0, 1.0)
DELAY_S_MAX = 5.0
"""Every further attempt."""

_APPEND_DELAY_S = 0.2
"""Bound of the schedule of appends while they fail for a few seconds only."""

_APPEND_ATTEMPTS = 20
"""Attempts under that bound: about four seconds."""

_APPEND_DELAY_S_MAX = 1.0
"""Every further attempt of an append."""

FAILURES_MAX = 30
"""Failed dials that are counted: the back-off has reached its bound long before."""


def delay_s(attempt: int) -> float:
    """Return the seconds to wait after attempt number ``attempt`` failed; -1 means at once."""
    if attempt < 0:
        return 0.0
    return _DELAYS_S[attempt] if attempt < len(_DELAYS_S) else DELAY_S_MAX


def append_delay_s(attempt: int) -> float:
    """Return the seconds to wait after attempt number ``attempt`` of an append failed.

    The journal has a new primary within a second of the death of the old one, and an application
    waits for the append: so the schedule rises later, and not as far.
    """
    if attempt < _APPEND_ATTEMPTS:
        return min(delay_s(attempt), _APPEND_DELAY_S)
    return _APPEND_DELAY_S_MAX


async def pause_append(attempt: int) -> None:
    """Wait as the schedule of appends says. Cancellable."""
    await asyncio.sleep(append_delay_s(attempt))


async def pause(attempt: int) -> None:
    """Wait as the schedule says. Cancellable."""
    await asyncio.sleep(delay_s(attempt))


RESOLUTION_S = 1.0
"""Those of :class:`Waits` that end within this time end together."""

SHARED_S_MIN = 10.0
"""Shorter waits have timers of their own: they are those of retries, which should stay apart."""


class Waits:
    """Waits with a timeout, of which those that end within one second share a timer of the loop.

    For processes in which thousands of things wait for minutes: the process wakes once for all that
    are due, and the loop's heap stays short.
    """

    __slots__ = ("_by_end",)

    def __init__(self) -> None:
        self._by_end: dict[float, set[Wait]] = {}

    def add(
        self,
        ended: asyncio.Future[bool],
        timeout_s: float,
        renew: Callable[[], float] | None = None,
    ) -> Wait:
        """Let a wait return False after a timeout; where timers are shared, up to a second earlier.

        Args:
            ended: what the caller waits for.
            timeout_s: seconds until it ends.
            renew: called when it would end, on the loop: returns the seconds until it ends,
                or 0 for now. So what is only looked at costs no turn of a task.

        Returns:
            the wait. One that has ended before is removed by :meth:`Wait.discard`.
        """
        wait = Wait(ended, renew)
        self._put(wait, timeout_s)
        return wait

    def _put(self, wait: Wait, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        if timeout_s < SHARED_S_MIN:
            wait.group = {wait}
            timer = loop.call_later(timeout_s, self._expire, wait.group)
            wait.ended.add_done_callback(lambda _: timer.cancel())
            return
        at = math.floor((loop.time() + timeout_s) / RESOLUTION_S) * RESOLUTION_S
        group = self._by_end.get(at)
        if group is None:
            group = self._by_end[at] = set()
            loop.call_at(at, self._end, at)
        wait.group = group
        group.add(wait)

    def _end(self, at: float) -> None:
        self._expire(self._by_end.pop(at))

    def _expire(self, group: set[Wait]) -> None:
        for wait in group:
            if wait.ended.done():
                continue
            try:
                left_s = wait.renew() if wait.renew is not None else 0.0
            except Exception as error:  # noqa: BLE001 - that of the waiting task
                wait.ended.set_exception(error)
                continue
            if left_s > 0:
                self._put(wait, left_s)
            else:
                wait.ended.set_result(False)


class Wait:
    """Wait with a timeout, one of :class:`Waits`.

    Args:
        ended: what its caller waits for.
        renew: returns, at its end, the seconds until another end, or 0; ``None`` for no other.

    Attributes:
        group: waits that end with it.
    """

    __slots__ = ("ended", "group", "renew")

    def __init__(self, ended: asyncio.Future[bool], renew: Callable[[], float] | None) -> None:
        self.ended = ended
        self.renew = renew
        self.group: set[Wait] = set()

    def discard(self) -> None:
        """Remove it from the waits that end with it."""
        self.group.discard(self)


async def run_together(*work: Coroutine[Any, Any, T]) -> list[T]:
    """Run coroutines until all have returned, or one fails: it cancels the others.

    It leaves its caller able to try again. A task group does not, before Python 3.13: after a
    failure its caller stays marked as cancelled, or a cancellation of the caller is lost.

    Returns:
        The results, in order.

    Raises:
        BaseException: the first failure.
    """
    tasks = [asyncio.ensure_future(each) for each in work]
    if not tasks:
        return []
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    failed = [task for task in tasks if not task.cancelled() and task.exception() is not None]
    for task in failed:
        if task in done:
            task.result()
    return [task.result() for task in tasks]


class DialPolicy:
    """Back-off of dials of one broker. Pure. It doubles with each failure in a row, up to a bound.

    Args:
        first_s: seconds to wait after the first failure.
        max_s: greatest wait.

    Attributes:
        dial_after: monotonic seconds before which the broker is not to be dialled.
        failure: why the last dial failed; None after a success, and before the first dial.
    """

    __slots__ = ("_failures", "_first_s", "_max_s", "dial_after", "failure")

    def __init__(self, first_s: float, max_s: float) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._failures = 0
        self.dial_after = 0.0
        self.failure: GazetteError | None = None

    def may_dial(self, now: float) -> bool:
        """Return True if the broker may be dialled at the time ``now``."""
        return now >= self.dial_after

    def wait_s(self, now: float) -> float:
        """Return the seconds until the broker may be dialled; 0 if it may be now."""
        return max(0.0, self.dial_after - now)

    def failed(self, now: float, failure: GazetteError) -> None:
        """Note that a dial failed."""
        self.dial_after = now + min(self._first_s * 2.0**self._failures, self._max_s)
        self._failures = min(self._failures + 1, FAILURES_MAX)
        self.failure = failure

    def succeeded(self) -> None:
        """Note that a dial succeeded: the next failure is a first one."""
        self._failures = 0
        self.dial_after = 0.0
        self.failure = None


class Outage:
    """Log of the failures of one operation that is tried again until it succeeds.

    The first failure is logged as a warning, with its reason. Further failures are counted. The
    next success is logged with the duration of the outage and the number of failures.

    Args:
        log: the logger.
        operation: name of the operation, a noun phrase such as ``read of a/journal``.

    Attributes:
        is_open: True from the first failure to the next success.
    """

    __slots__ = ("_begun_s", "_failures", "_log", "_operation", "is_open")

    def __init__(self, log: logging.Logger, operation: str) -> None:
        self._log = log
        self._operation = operation
        self._begun_s = 0.0
        self._failures = 0
        self.is_open = False

    def failed(self, error: object) -> None:
        """Note a failed attempt."""
        self._failures += 1
        if not self.is_open:
            self.is_open = True
            self._begun_s = time.monotonic()
            self._log.warning(
                "%s failed, and is tried again until it succeeds: %s", self._operation, error
            )
        else:
            self._log.debug("%s failed again: %s", self._operation, error)

    def ended(self) -> None:
        """Note a success, or any other end of the outage. Without an outage it does nothing."""
        if self.is_open:
            self._log.warning(
                "%s works again after an outage of %.1f s (%d failure%s)",
                self._operation,
                time.monotonic() - self._begun_s,
                self._failures,
                "" if self._failures == 1 else "s",
            )
            self._failures, self.is_open = 0, False


async def retrying(
    call: Callable[[], Awaitable[T]],
    retried: tuple[type[BaseException], ...],
    *,
    final: tuple[type[BaseException], ...] = (),
    outage: Outage | None = None,
    patience_s: float = math.inf,
    pause: Pause = pause,
) -> T:
    """Return the result of a call, which is made again while it fails.

    Args:
        call: makes the call.
        retried: errors after which it is made again.
        final: those of them after which it is not.
        outage: its log; None for none.
        patience_s: longest time from the first failure to the last attempt.
        pause: waits between attempts.

    Raises:
        BaseException: the call failed for so long, or by another error.
    """
    ends_at = math.inf
    for attempt in itertools.count():
        try:
            found = await call()
        except final:
            raise
        except retried as error:
            now = time.monotonic()
            ends_at = min(ends_at, now + patience_s)
            if now >= ends_at:
                raise
            if outage is not None:
                outage.failed(str(error) or "no answer in time")
        else:
            if outage is not None:
                outage.ended()
            return found
        await pause(attempt)
    raise AssertionError
