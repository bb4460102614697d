"""Adaptive spin: poll for a short while before sleeping, as long as that pays.

The kernel takes some tens of microseconds to wake a thread, and on a virtual machine with halted
idle cores as long as a whole append takes. A thread that expects an event within that time polls
for it first. After polls in vain it skips more and more waits, so that an idle process sleeps.
"""

from __future__ import annotations

import asyncio
import os
import select
import selectors
import time

SKIPPED_MAX = 256
"""Greatest number of waits without a spin between two waits with one."""

SPIN_S = 0.0003
"""Time to poll a socket before its thread sleeps: some appends of a broker on the same machine, or
in the same room."""

SELECTOR_SPIN_S = 0.0001
"""Time for which a server's loop spins before it sleeps. A client in plain code publishes again
after a third of it."""


class AdaptiveSpin:
    """Decision for each wait of one thread: spin first, or sleep at once. Pure."""

    __slots__ = ("_skip", "_skipped_next")

    def __init__(self) -> None:
        self._skip = 0
        self._skipped_next = 1

    def should_spin(self) -> bool:
        """Return True if the wait that begins now should spin first. To be asked once per wait."""
        if not self._skip:
            return True
        self._skip -= 1
        return False

    def found(self) -> None:
        """Note that the event came during the spin."""
        self._skipped_next = 1

    def missed(self) -> None:
        """Note that it did not. Twice as many waits as the last time now go without a spin."""
        self._skip = self._skipped_next
        self._skipped_next = min(2 * self._skipped_next, SKIPPED_MAX)


def has_spare_core() -> bool:
    """Return True if other threads can work while one spins: not so on a single core."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0)) > 1
    return (os.cpu_count() or 1) > 1


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


class SpinningSelector(selectors.DefaultSelector):
    """Selector of a server's event loop. It spins after it has returned events, then it sleeps.

    A client that publishes one message after the other sends the next one some tens of microseconds
    after the response, which is about the time that sleeping and waking take.
    """

    def __init__(self) -> None:
        super().__init__()
        self._spin = AdaptiveSpin()
        self._had_events = False

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return the events that are ready, as any selector does."""
        if (
            (timeout is None or timeout > SELECTOR_SPIN_S)
            and self._had_events
            and self._spin.should_spin()
        ):
            events = self._poll()
            if events:
                return events
        events = super().select(timeout)
        self._had_events = bool(events)
        return events

    def _poll(self) -> list[tuple[selectors.SelectorKey, int]]:
        poll, now = super().select, time.perf_counter
        ends_at = now() + SELECTOR_SPIN_S
        while not (events := poll(0)):
            if now() > ends_at:
                self._spin.missed()
                return events
        self._spin.found()
        return events


def new_loop() -> asyncio.AbstractEventLoop:
    """Return a loop for a server that has its process, and more than one core, to itself."""
    if has_spare_core():
        return asyncio.SelectorEventLoop(SpinningSelector())
    return asyncio.new_event_loop()
