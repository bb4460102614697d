"""Adaptive spin: polling a socket for an answer that comes sooner than a sleeping thread wakes."""

from __future__ import annotations

import select
import time

from gazette_sdk.adaptive_spin import AdaptiveSpin, has_spare_core

__all__ = ["SPIN_S", "SpinningPoll"]

SPIN_S = 0.0003
"""Time to poll a socket before its thread sleeps: some appends of a broker on the same machine, or
in the same room."""

_has_cores = has_spare_core()


class SpinningPoll:
    """Poll of one socket.

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

    def is_readable(self) -> bool:
        """Return True if there is something to read now."""
        return bool(self._poll(0))

    def wait_readable(self, timeout_s: float) -> bool:
        """Wait until there is something to read, at first spinning. Return True if there is."""
        poll = self._poll
        if timeout_s >= SPIN_S and _has_cores and self._spin.should_spin():
            now = time.perf_counter
            ends_at = now() + SPIN_S
            while not poll(0):
                if now() > ends_at:
                    self._spin.missed()
                    break
            else:
                self._spin.found()
                return True
        return bool(poll(timeout_s * 1000))

    def wait_writable(self, timeout_s: float) -> bool:
        """Wait until something can be sent. Return True if it can. Seldom called."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        return bool(poll.poll(timeout_s * 1000))
