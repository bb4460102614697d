"""Liveness of the peer of a stream connection: when to send PING, and when to drop it. Pure.

A peer that sends nothing for 2.5 s during a call gets a PING. One that sends nothing for 5 s is
dropped: so a client gives up a frozen broker when a short lease ends. It has 60 s while more than
64 KiB of our data is unread: it may be slow, and yet alive.
The caller passes monotonic seconds as ``now``.
"""

from __future__ import annotations

import enum

__all__ = [
    "PING_AFTER_S",
    "SILENCE_MAX_S",
    "STALLED_BYTES",
    "STALL_MAX_S",
    "Liveness",
    "Verdict",
]

PING_AFTER_S = 2.5
"""A PING is sent after so much silence during a call, and each time as much passes again."""

SILENCE_MAX_S = 5.0
"""A peer is dropped after so much silence during a call."""

STALL_MAX_S = 60.0
"""The same, while more than :data:`STALLED_BYTES` that we sent may be unread."""

STALLED_BYTES = 64 << 10


class Verdict(enum.Enum):
    """Result of a check."""

    WAIT = "check again at the deadline"
    PING = "send PING, and check again at the deadline"
    DROP = "the peer is dead: drop the connection"


class Liveness:
    """Clock of one connection's silence. It runs while calls are open.

    Args:
        now: the time at which the first call begins.

    Attributes:
        deadline: when to call :meth:`check` next. Hearing from the peer does not move it: a check
            that comes early says WAIT.
        heard_at: when the peer was last heard.
        unread_bytes: what was sent since.
    """

    __slots__ = ("deadline", "heard_at", "unread_bytes")

    def __init__(self, now: float) -> None:
        self.begin(now)

    def begin(self, now: float) -> None:
        """Begin anew: the first call begins, and everything sent before it was read."""
        self.heard_at = now
        self.unread_bytes = 0
        self.deadline = now + PING_AFTER_S

    def heard(self, now: float) -> None:
        """Note that data of the peer arrived."""
        self.heard_at = now
        self.unread_bytes = 0

    def restart(self, now: float) -> None:
        """Count the silence from now on: a call begins, or we read again."""
        self.heard_at = now

    def sent(self, length_bytes: int) -> None:
        """Note data sent to the peer."""
        self.unread_bytes += length_bytes

    def check(self, now: float, *, reading_paused: bool = False) -> Verdict:
        """Decide what to do, and set the next deadline.

        Args:
            now: monotonic seconds.
            reading_paused: True if we do not read what the peer sends. The silence is ours then:
                a PING is sent, so that the peer hears from us, and the silence starts again.
        """
        if reading_paused:
            self.restart(now)
            self.deadline = now + PING_AFTER_S
            return Verdict.PING
        silent_s = now - self.heard_at
        bound_s = STALL_MAX_S if self.unread_bytes > STALLED_BYTES else SILENCE_MAX_S
        if silent_s >= bound_s:
            return Verdict.DROP
        if silent_s >= PING_AFTER_S:
            self.deadline = now + min(bound_s - silent_s, PING_AFTER_S)
            return Verdict.PING
        self.deadline = self.heard_at + PING_AFTER_S
        return Verdict.WAIT

    def silent_s(self, now: float) -> float:
        """Return the seconds since the peer was last heard."""
        return now - self.heard_at
