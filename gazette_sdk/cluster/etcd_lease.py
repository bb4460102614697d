"""Renewal of a lease over the connections of an Etcd client, on a thread beside its event loop.

:func:`keep_alive` drives the state machine of :mod:`~gazette_sdk.cluster.lease_renewal`. Each
renewal is a task of its own, so that a second one can go over another connection while the first
has no answer. :func:`run_beside` gives it a thread with an event loop, so that no work of the
client's loop delays a renewal; the thread sees if that loop is alive.

Times are those of :func:`boot_s`: Etcd counts on while this machine is suspended, and the clock of
an event loop does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from gazette_sdk.cluster.etcd_connections import Connection, Connections
from gazette_sdk.cluster.lease_renewal import (
    OWNER_SILENT_TTLS,
    Answered,
    Effect,
    Ended,
    Failed,
    Input,
    Tick,
    begin,
    step,
)
from gazette_sdk.errors import ConfigurationError, EtcdError, LeaseLostError
from gazette_sdk.outage import Outage

__all__ = ["BOOT_CLOCK", "LeaseLife", "boot_s", "keep_alive", "run_beside"]

STOP_S = 5.0
"""Longest wait for the end of the thread after its work was cancelled."""

Renew = Callable[[Connection, int, float], Awaitable[float]]
"""Renews a lease over a connection within a time, and returns its new time to live."""

BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Clock of the time since boot: suspensions count where the system knows of them."""

_log = logging.getLogger(__name__)


def boot_s() -> float:
    """Return seconds since boot, with those of suspensions where the system counts them."""
    return time.clock_gettime(BOOT_CLOCK)


class LeaseLife:
    """Knowledge that the owner of a lease and the thread that renews it have of each other.

    Attributes:
        owner_at: time of the last sign of life of the owner, which is an event loop. Of one that
            renews the lease itself it is always now.
        alive_until: time until which the lease is alive by the answers of Etcd.
    """

    def __init__(self) -> None:
        self.owner_at = math.inf
        self.alive_until = math.inf


async def run_beside(work: Coroutine[Any, Any, None], life: LeaseLife, *, sign_s: float) -> None:
    """Run a coroutine on a thread with an event loop of its own, and wait for its end.

    Args:
        work: the coroutine, which is cancelled with this one.
        life: gets the signs of life of the running loop.
        sign_s: their period.
    """
    loop = asyncio.get_running_loop()
    life.owner_at = boot_s()
    beside = asyncio.SelectorEventLoop()
    task = beside.create_task(work)
    ended: asyncio.Future[None] = loop.create_future()

    def finish(error: BaseException | None) -> None:
        if ended.done():
            return
        if error is None:
            ended.set_result(None)
        else:
            ended.set_exception(error)
            ended.exception()  # retrieved: it is of no interest after a cancellation

    def run() -> None:
        failure: BaseException | None = None
        try:
            beside.run_until_complete(task)
        except asyncio.CancelledError:
            pass
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            failure = error
        finally:
            beside.close()
            with contextlib.suppress(RuntimeError):  # the owner is closed
                loop.call_soon_threadsafe(finish, failure)

    thread = threading.Thread(target=run, name="gazette-lease", daemon=True)
    thread.start()
    try:
        while not ended.done():
            life.owner_at = boot_s()
            await asyncio.wait([ended], timeout=sign_s)
    finally:
        with contextlib.suppress(RuntimeError):  # it has ended
            beside.call_soon_threadsafe(task.cancel)
        await asyncio.wait([ended], timeout=STOP_S)
        if ended.done():
            thread.join(STOP_S)  # its report is its last act
        else:
            _log.warning("the thread that renews a lease does not end within %g s", STOP_S)
    ended.result()


async def keep_alive(
    connections: Connections,
    renew: Renew,
    lease: int,
    ttl_s: float,
    *,
    granted_at: float,
    life: LeaseLife,
) -> None:
    """Renew a lease until cancelled.

    Args:
        connections: of the client.
        renew: renews it once.
        lease: its id.
        ttl_s: its time to live.
        granted_at: time at which its grant was requested.
        life: gets the time until which it is alive, and has that of its owner.

    Raises:
        LeaseLostError: it ran out, or was revoked.
    """
    renewals = _Renewals(connections, renew, lease, ttl_s, life)
    try:
        await renewals.run(granted_at)
    finally:
        await renewals.aclose()


class _Renewals:
    """Renewals of one lease that are on their way, and their answers."""

    def __init__(
        self, connections: Connections, renew: Renew, lease: int, ttl_s: float, life: LeaseLife
    ) -> None:
        self._life = life
        self._connections = connections
        self._renew = renew
        self._lease = lease
        self._ttl_s = ttl_s
        self._loop = asyncio.get_running_loop()
        self._inputs: asyncio.Queue[Input] = asyncio.Queue()
        self._sent: set[asyncio.Task[None]] = set()
        self._unanswered: Connection | None = None
        self._answered_at = -math.inf
        self._ending: Exception | None = None
        self._outage = Outage(_log, "renewal of the lease")

    async def run(self, granted_at: float) -> None:
        now = boot_s()
        state = begin(self._ttl_s, granted_at)
        happened: Input = Tick(self._life.owner_at)
        while True:
            state, effect = step(state, happened, now)
            self._life.alive_until = state.alive_until
            if effect is Effect.LOST:
                raise self._ending or self._lost(now)
            if effect is not Effect.WAIT:
                self._send(state.sent_at, elsewhere=effect is Effect.SEND_ELSEWHERE)
            try:
                async with asyncio.timeout(state.wake_at - boot_s()):
                    happened = await self._inputs.get()
            except TimeoutError:
                happened = Tick(self._life.owner_at)
            now = boot_s()

    def _lost(self, now: float) -> LeaseLostError:
        silent_s = now - self._life.owner_at
        if silent_s >= OWNER_SILENT_TTLS * self._ttl_s:
            return LeaseLostError(
                "unable to keep the lease alive: the event loop gave no sign of life for "
                f"{silent_s:.1f} s; the process was stopped, or its loop is blocked"
            )
        return LeaseLostError(
            f"unable to keep the lease alive: no renewal within {self._ttl_s:g} s"
        )

    async def aclose(self) -> None:
        """Cancel the renewals that are on their way, and wait for their ends."""
        for task in self._sent:
            task.cancel()
        await asyncio.gather(*self._sent, return_exceptions=True)

    def _send(self, sent_at: float, *, elsewhere: bool) -> None:
        task = self._loop.create_task(self._renew_once(sent_at, elsewhere=elsewhere))
        self._sent.add(task)
        task.add_done_callback(self._sent.discard)

    async def _renew_once(self, sent_at: float, *, elsewhere: bool) -> None:
        """Send one renewal, and queue its outcome."""
        suspect = self._unanswered if elsewhere else None
        connection: Connection | None = None
        try:
            if suspect is not None:
                connection = await self._connections.dial_other(suspect)
            else:
                left_s = sent_at + self._ttl_s - boot_s()
                connection = await self._connections.current(self._loop.time() + left_s)
                self._unanswered = connection
            # Connecting took time, and Etcd counts from the receipt.
            ttl_s = await self._renew(connection, self._lease, self._ttl_s)
        except (EtcdError, ConfigurationError) as error:
            if isinstance(error, LeaseLostError):
                self._ending = error
                self._inputs.put_nowait(Ended())
            else:
                if sent_at > self._answered_at:  # else a later one was answered
                    self._outage.failed(error)
                self._inputs.put_nowait(Failed(sent_at))
        except Exception as error:  # noqa: BLE001 -- raised by `run`: a closed client, or a defect
            self._ending = error
            self._inputs.put_nowait(Ended())
        else:
            self._outage.ended()
            self._answered_at = max(self._answered_at, sent_at)
            if self._unanswered is connection:
                self._unanswered = None
            elif suspect is not None and self._unanswered is suspect:
                # Etcd answers here, and still not there.
                self._connections.adopt(connection, suspect)
                self._unanswered = None
            self._inputs.put_nowait(Answered(sent_at, ttl_s))
        finally:
            if suspect is not None and connection is not None:
                self._connections.discard(connection)
