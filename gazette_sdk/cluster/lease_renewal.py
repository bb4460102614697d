"""Schedule of the renewals of a lease: a pure state machine.

Rules:

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

:func:`step` is the table. The driver is :func:`gazette_sdk.cluster.etcd_lease.keep_alive`.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace

__all__ = [
    "OWNER_SILENT_TTLS",
    "Answered",
    "Effect",
    "Ended",
    "Failed",
    "Input",
    "Renewal",
    "Tick",
    "begin",
    "step",
]

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
class Answered:
    """A renewal was answered: sent at ``sent_at``, for ``ttl_s`` from the receipt on."""

    sent_at: float
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The renewal sent at ``sent_at`` failed: its connection broke, or Etcd refused it."""

    sent_at: float


@dataclass(frozen=True, slots=True)
class Ended:
    """Etcd answered that the lease does not exist."""


Input = Tick | Answered | Failed | Ended


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
        case Ended():
            return state, Effect.LOST
        case Answered(sent_at, ttl_s):
            is_last = sent_at >= state.sent_at
            return replace(
                state,
                alive_until=max(state.alive_until, sent_at + ttl_s),
                is_pending=state.is_pending and not is_last,
                pending_until=None if sent_at + ttl_s > now else state.pending_until,
            ), Effect.WAIT
        case Failed(sent_at):
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
