"""When messages of a fixed rate are due.

A program that waits for a slow answer before it sends the next request sends fewer requests while
the answers are slow, and so hardly measures the slow ones: coordinated omission. Here the times
are fixed beforehand. A latency counts from when its message was due, and not from when it was
sent at last; what was late is sent at once, and counts as late.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

__all__ = ["Schedule", "due_messages"]

NANOSECONDS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Schedule:
    """Times of messages, which nothing changes.

    Attributes:
        begin_ns: when the first message is due, on the clock that all processes share
            (:func:`time.monotonic_ns`).
        rate: messages per second.
        count: how many messages there are.
    """

    begin_ns: int
    rate: float
    count: int

    def due_ns(self, index: int) -> int:
        """When a message is due."""
        return self.begin_ns + int(index * NANOSECONDS / self.rate)

    def due_by(self, now_ns: int) -> int:
        """How many messages are due by a time."""
        if now_ns < self.begin_ns:
            return 0
        guess = int((now_ns - self.begin_ns) * self.rate / NANOSECONDS)
        # Whatever rounding did: those before are due, and the next one is not.
        while guess > 0 and self.due_ns(guess) > now_ns:
            guess -= 1
        while self.due_ns(guess + 1) <= now_ns:
            guess += 1
        return min(guess + 1, self.count)


def due_messages(
    schedule: Schedule,
    *,
    now_ns: Callable[[], int] = time.monotonic_ns,
    sleep: Callable[[float], object] = time.sleep,
    at_once_max: int = 1000,
) -> Iterator[range]:
    """Messages, as they become due: a range of their indices each time.

    Args:
        schedule: when that is.
        now_ns: the clock.
        sleep: waits, in seconds.
        at_once_max: greatest number of messages of one range, when many are late.
    """
    done = 0
    while done < schedule.count:
        due = min(schedule.due_by(now_ns()), done + at_once_max)
        if due > done:
            yield range(done, due)
            done = due
        else:
            sleep(max(0, schedule.due_ns(done) - now_ns()) / NANOSECONDS)
