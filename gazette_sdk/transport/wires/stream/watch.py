"""Waiting for an answer on a socket with open eyes, where it comes sooner than a sleeper wakes."""

from __future__ import annotations

import select
import time

from gazette_sdk.adaptive_spin import AdaptiveSpin, has_spare_core

__all__ = ["WATCH_S", "Watch"]

WATCH_S = 0.0003
"""What a socket is looked at before its caller sleeps: some appends of a broker that is on the
same machine, or in the same room."""


class Watch:
    """Looks at one socket.

    Args:
        descriptor: of the socket.
    """

    __slots__ = ("_descriptor", "_poll", "_spin")

    def __init__(self, descriptor: int) -> None:
        self._spin = AdaptiveSpin()
        self._descriptor = descriptor
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        self._poll = poll.poll

    def sees(self) -> bool:
        """Whether there is something to be read now."""
        return bool(self._poll(0))

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is something to be read, at first awake; whether there is."""
        poll = self._poll
        if timeout_s >= WATCH_S and _has_cores and self._spin.should_spin():
            now = time.perf_counter
            ends_at = now() + WATCH_S
            while not poll(0):
                if now() > ends_at:
                    self._spin.missed()
                    break
            else:
                self._spin.found()
                return True
        return bool(poll(timeout_s * 1000))

    def has_room(self, timeout_s: float) -> bool:
        """Wait until something can be sent; whether it can. Seldom asked."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        return bool(poll.poll(timeout_s * 1000))


_has_cores = has_spare_core()
