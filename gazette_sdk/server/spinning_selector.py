"""The event loop of a server, whose selector spins for a moment before it sleeps.

A client that publishes one message after the other sends the next one some tens of microseconds
after the response, which is about the time that sleeping and waking take. See `adaptive_spin`.
"""

from __future__ import annotations

import asyncio
import selectors
import time

from gazette_sdk.adaptive_spin import AdaptiveSpin, has_spare_core

SPIN_S = 0.0001
"""Time to spin before sleeping. A client in plain code publishes again after a third of it."""


class SpinningSelector(selectors.DefaultSelector):
    """Selector that spins after it has returned events, and sleeps only then."""

    def __init__(self) -> None:
        super().__init__()
        self._spin = AdaptiveSpin()
        self._had_events = False

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return the events that are ready, as any selector does."""
        if (timeout is None or timeout > SPIN_S) and self._had_events and self._spin.should_spin():
            events = self._poll()
            if events:
                return events
        events = super().select(timeout)
        self._had_events = bool(events)
        return events

    def _poll(self) -> list[tuple[selectors.SelectorKey, int]]:
        poll, now = super().select, time.perf_counter
        ends_at = now() + SPIN_S
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
