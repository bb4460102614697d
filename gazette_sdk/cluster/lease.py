"""Lease of a process in Etcd: its life on the clock since boot, and its renewals.

The schedule of the renewals is a pure state machine; :func:`step` is its table. Its rules:

* Renewals are sent every third of the lease's time to live, counted from the *sending* of the last
  one. A process that was paused sends the next one as soon as it runs again.
* A renewal without an answer after that time is followed by one on another connection. Its own
  answer still counts if it arrives later.
* The lease is alive until its time to live after the sending of the last renewal that was
  answered. Etcd counts from the receipt, so it never deletes the keys before.
* A process that was paused beyond that time has not read the answers that arrived meanwhile. It
  waits for them, and for that of one more renewal, for a short time. Then the lease is lost.
* The lease belongs to an event loop, its owner, and is renewed on a thread beside it. No renewal is
  sent while the owner's last sign of life is too old: the lease of a loop that is stuck ends.

:func:`keep_alive` drives it over the connections of an Etcd client. Each renewal is a task of its
own, so that a second one can go over another connection while the first has no answer.
:func:`run_beside` gives it a thread with an event loop, so that no work of the client's loop delays
a renewal; the thread sees if that loop is alive.

Times are those of :func:`boot_s`: Etcd counts on while this machine is suspended, and the clock of
an event loop does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import math
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from gazette_sdk.cluster.etcd_connections import Connections, EtcdConnection
from gazette_sdk.errors import ConfigurationError, EtcdError, LeaseLostError
from gazette_sdk.retries import Outage

STOP_S = 5.0
"""Longest wait for the end of the thread after its work was cancelled."""

Renew = Callable[[EtcdConnection, int, float], Awaitable[float]]
"""Renews a lease over a connection within a time, and returns its new time to live."""

BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Clock of the time since boot: suspensions count where the system knows of them."""

_log = logging.getLogger(__name__)


def boot_s() -> float:
    """Return seconds since boot, with those of suspensions where the system counts them."""
    return time.clock_gettime(BOOT_CLOCK)


def wall_ahead_s() -> float:
    """Return wall time less the time since boot.

    It grows with suspensions that the system does not count, and where wall time is set.
    """
    return time.time() - boot_s()


class LeaseLife:
    """Knowledge that the owner of a lease and the thread that renews it have of each other.

    Attributes:
        owner_at: time of the last sign of life of the owner, which is an event loop. Of one that
            renews the lease itself it is always now.
        alive_until: time until which the lease is alive by the answers of Etcd.
        ahead_s: :func:`wall_ahead_s` when the renewal was sent from which that time is counted, or
            the grant.
    """

    def __init__(self) -> None:
        self.owner_at = math.inf
        self.alive_until = math.inf
        self.ahead_s = wall_ahead_s()


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
        self._unanswered: EtcdConnection | None = None
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
        task = self._loop.create_task(
            self._renew_once(sent_at, wall_ahead_s(), elsewhere=elsewhere)
        )
        self._sent.add(task)
        task.add_done_callback(self._sent.discard)

    async def _renew_once(self, sent_at: float, ahead_s: float, *, elsewhere: bool) -> None:
        """Send one renewal, and queue its outcome."""
        suspect = self._unanswered if elsewhere else None
        connection: EtcdConnection | None = None
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
                self._inputs.put_nowait(LeaseEnded())
            else:
                if sent_at > self._answered_at:  # else a later one was answered
                    self._outage.failed(error)
                self._inputs.put_nowait(RenewalFailed(sent_at))
        except Exception as error:  # noqa: BLE001 -- raised by `run`: a closed client, or a defect
            self._ending = error
            self._inputs.put_nowait(LeaseEnded())
        else:
            self._note_answer(sent_at, ahead_s)
            if self._unanswered is connection:
                self._unanswered = None
            elif suspect is not None and self._unanswered is suspect:
                # Etcd answers here, and still not there.
                self._connections.adopt(connection, suspect)
                self._unanswered = None
            self._inputs.put_nowait(RenewalAnswered(sent_at, ttl_s))
        finally:
            if suspect is not None and connection is not None:
                self._connections.discard(connection)

    def _note_answer(self, sent_at: float, ahead_s: float) -> None:
        self._outage.ended()
        if sent_at > self._answered_at:
            self._answered_at, self._life.ahead_s = sent_at, ahead_s


OWNER_SILENT_TTLS = 2
"""Longest time since the owner's last sign of life after which a renewal is sent, in times to live
of the lease. An event loop that answers no request for that long does not work, but is stuck. Other
members take over after one more time to live at most."""

RETRY_S = 0.5
"""Longest pause between a failed renewal and the next one."""

PAUSED_S = 0.1
"""A timer that fires later than this shows that the process was paused."""

PENDING_ANSWERS_S = 0.25
"""Least time to wait for answers after a pause."""


class Effect(enum.Enum):
    """Action of the driver."""

    WAIT = "wait"
    """Wait until :attr:`Renewal.wake_at`, or for the next input."""
    SEND = "send"
    """Send a renewal over the current connection, and note it with :attr:`Renewal.sent_at`."""
    SEND_ELSEWHERE = "send elsewhere"
    """The same over another connection."""
    LOST = "lost"
    """End: the lease is lost."""


@dataclass(frozen=True, slots=True)
class Renewal:
    """State of the renewals of one lease. All times are of one clock, in seconds.

    Attributes:
        ttl_s: time to live of the lease.
        alive_until: the lease is alive until then.
        next_at: when the next renewal is due.
        sent_at: when the last renewal was sent.
        is_pending: True while the last renewal has no answer.
        pending_until: end of the wait for answers after a pause; ``None`` outside of it.
    """

    ttl_s: float
    alive_until: float
    next_at: float
    sent_at: float
    is_pending: bool = False
    pending_until: float | None = None

    @property
    def wake_at(self) -> float:
        """Time of the next tick."""
        if self.pending_until is not None:
            return self.pending_until
        return min(self.next_at, self.alive_until)


@dataclass(frozen=True, slots=True)
class Tick:
    """The time :attr:`Renewal.wake_at` has come, or a tick was due for another reason.

    Attributes:
        owner_at: time of the owner's last sign of life. By default it is always alive.
    """

    owner_at: float = math.inf


@dataclass(frozen=True, slots=True)
class RenewalAnswered:
    """A renewal was answered: sent at ``sent_at``, for ``ttl_s`` from the receipt on."""

    sent_at: float
    ttl_s: float


@dataclass(frozen=True, slots=True)
class RenewalFailed:
    """The renewal sent at ``sent_at`` failed: its connection broke, or Etcd refused it."""

    sent_at: float


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """Etcd answered that the lease does not exist."""


Input = Tick | RenewalAnswered | RenewalFailed | LeaseEnded


def begin(ttl_s: float, now: float) -> Renewal:
    """Return the state of a lease that is granted or renewed now; its first renewal is due."""
    return Renewal(ttl_s, alive_until=now + ttl_s, next_at=now, sent_at=now)


def step(state: Renewal, happened: Input, now: float) -> tuple[Renewal, Effect]:
    """Return the next state, and the action to take.

    Args:
        state: the state.
        happened: what happened.
        now: the time.
    """
    match happened:
        case LeaseEnded():
            return state, Effect.LOST
        case RenewalAnswered(sent_at, ttl_s):
            is_last = sent_at >= state.sent_at
            return replace(
                state,
                alive_until=max(state.alive_until, sent_at + ttl_s),
                is_pending=state.is_pending and not is_last,
                pending_until=None if sent_at + ttl_s > now else state.pending_until,
            ), Effect.WAIT
        case RenewalFailed(sent_at):
            if sent_at < state.sent_at or not state.is_pending:
                return state, Effect.WAIT  # a later one is on its way, or was answered
            next_at = min(state.next_at, _retry_at(state, now))
            return replace(state, next_at=next_at), Effect.WAIT
        case Tick(owner_at):
            return _tick(state, owner_at + OWNER_SILENT_TTLS * state.ttl_s, now)


def _tick(state: Renewal, owner_until: float, now: float) -> tuple[Renewal, Effect]:
    if now < state.alive_until:
        if now < state.next_at:
            return state, Effect.WAIT
        if now >= owner_until:
            # It may be alive again before the lease has ended.
            return replace(state, next_at=_retry_at(state, now)), Effect.WAIT
        return _send(state, now)
    if state.pending_until is not None:
        return state, Effect.WAIT if now < state.pending_until else Effect.LOST
    # After a pause of the process its owner had no time for a sign of life, so only an older
    # silence counts.
    if now - state.alive_until <= PAUSED_S or state.alive_until >= owner_until:
        return state, Effect.LOST
    return _send(replace(state, pending_until=now + max(PENDING_ANSWERS_S, state.ttl_s / 10)), now)


def _retry_at(state: Renewal, now: float) -> float:
    return now + min(RETRY_S, state.ttl_s / 10)


def _send(state: Renewal, now: float) -> tuple[Renewal, Effect]:
    effect = Effect.SEND_ELSEWHERE if state.is_pending else Effect.SEND
    sent = replace(state, sent_at=now, next_at=now + state.ttl_s / 3, is_pending=True)
    return sent, effect
