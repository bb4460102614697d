"""The event loop of a server: it looks for what comes next before it sleeps.

A client that publishes one message after the other sends the next within some tens of
microseconds after the answer, which is about what it takes to go to sleep and wake again. A
server with nothing to do, or with seldom something to do, sleeps as any other.
"""

from __future__ import annotations

import asyncio
import selectors
import time

from gazette_sdk.alertness import Alertness, has_cores

__all__ = ["WATCH_S", "WatchfulSelector", "new_loop"]

WATCH_S = 0.0001
"""What is looked for the next event before sleeping. A client in plain code publishes again
after a third of it."""


class WatchfulSelector(selectors.DefaultSelector):
    """Looks for events for a moment after it had some, and sleeps only then."""

    def __init__(self) -> None:
        super().__init__()
        self._alertness = Alertness()
        self._had_some = False

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """As any selector."""
        if (timeout is None or timeout > WATCH_S) and self._had_some and self._alertness.looks():
            found = self._look()
            if found:
                return found
        found = super().select(timeout)
        self._had_some = bool(found)
        return found

    def _look(self) -> list[tuple[selectors.SelectorKey, int]]:
        look, now = super().select, time.perf_counter
        ends_at = now() + WATCH_S
        while not (found := look(0)):
            if now() > ends_at:
                self._alertness.missed()
                return found
        self._alertness.seen()
        return found


def new_loop() -> asyncio.AbstractEventLoop:
    """A loop for a server that has its process, and more than one core, to itself."""
    return (
        asyncio.SelectorEventLoop(WatchfulSelector()) if has_cores() else asyncio.new_event_loop()
    )
