"""Waiting for an answer on a socket with open eyes, where it comes sooner than a sleeper wakes."""

from __future__ import annotations

import select
import time

from gazette_sdk.alertness import Alertness, has_cores

__all__ = ["WATCH_S", "Watch"]

WATCH_S = 0.0003
"""What a socket is looked at before its caller sleeps: some appends of a broker that is on the
same machine, or in the same room."""


class Watch:
    """Looks at one socket.

    Args:
        descriptor: of the socket.
    """

    __slots__ = ("_alertness", "_poll")

    def __init__(self, descriptor: int) -> None:
        self._alertness = Alertness()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        self._poll = poll.poll

    def sees(self) -> bool:
        """Whether there is something to be read now."""
        return bool(self._poll(0))

    def wait(self, timeout_s: float) -> None:
        """Return when there is something to be read, or when it is time to sleep for it."""
        if timeout_s < WATCH_S or not _has_cores or not self._alertness.looks():
            return
        poll, now = self._poll, time.perf_counter
        ends_at = now() + WATCH_S
        while not poll(0):
            if now() > ends_at:
                self._alertness.missed()
                return
        self._alertness.seen()


_has_cores = has_cores()
