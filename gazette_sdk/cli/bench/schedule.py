"""Due times of messages of a fixed rate.

A program that waits for a slow answer before it sends the next request measures few slow answers
(coordinated omission). Here the due times are fixed in advance, and a latency counts from the due
time. A late message is sent at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

__all__ = ["Schedule", "due_messages"]

NANOSECONDS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Schedule:
    """Fixed due times of messages.

    Attributes:
        begin_ns: due time of the first message, on the clock that all processes share
            (:func:`time.monotonic_ns`).
        rate: messages per second.
        count: number of messages.
    """

    begin_ns: int
    rate: float
    count: int

    def due_ns(self, index: int) -> int:
        """Return the due time of a message."""
        return self.begin_ns + int(index * NANOSECONDS / self.rate)

    def due_by(self, now_ns: int) -> int:
        """Return the number of messages that are due by a time."""
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
    """Wait for due messages, and yield ranges of their indices.

    Args:
        schedule: the due times.
        now_ns: the clock.
        sleep: waits, in seconds.
        at_once_max: greatest length of a range.
    """
    done = 0
    while done < schedule.count:
        due = min(schedule.due_by(now_ns()), done + at_once_max)
        if due > done:
            yield range(done, due)
            done = due
        else:
            sleep(max(0, schedule.due_ns(done) - now_ns()) / NANOSECONDS)
