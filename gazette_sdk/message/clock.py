"""A producer's clock, which orders its messages (message section 2)."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta

__all__ = [
    "TICK",
    "UNIX_EPOCH",
    "Clock",
    "clock_of_unix_ns",
    "time_of_clock",
    "unix_100ns_of_clock",
]

TICK = 160
"""What a tick adds: one microsecond, in units of 100 ns which are shifted by four bits."""

UNIX_EPOCH = 122_192_928_000_000_000
"""From 1582-10-15, where UUIDs begin to count, to 1970-01-01, in units of 100 ns."""

_MASK = (1 << 64) - 1


def clock_of_unix_ns(unix_ns: int) -> int:
    """The clock at a time, which is given in nanoseconds since 1970."""
    return ((unix_ns // 100 + UNIX_EPOCH) << 4) & _MASK


def unix_100ns_of_clock(clock: int) -> int:
    """The time within a clock, in units of 100 ns since 1970."""
    return (clock >> 4) - UNIX_EPOCH


def time_of_clock(clock: int) -> datetime:
    """The time within a clock, in UTC, to the microsecond below.

    Raises:
        OverflowError: the clock runs past the year 9999.
    """
    micros = unix_100ns_of_clock(clock) // 10
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=micros)


class Clock:
    """A clock which never goes back. May be shared by publishers and threads.

    Args:
        value: where it begins; a fresh clock is 0.

    Attributes:
        value: the clock now, 64 bits.
    """

    __slots__ = ("_lock", "value")

    def __init__(self, value: int = 0) -> None:
        self.value = value
        self._lock = threading.Lock()

    def update(self, unix_ns: int) -> None:
        """Move on to a time in nanoseconds since 1970, unless the clock is there already."""
        candidate = clock_of_unix_ns(unix_ns)
        with self._lock:
            self.value = max(self.value, candidate)

    def tick(self, count: int = 1) -> int:
        """Move on by one microsecond, ``count`` times; returns the value after the first."""
        with self._lock:
            first = (self.value + TICK) & _MASK
            self.value = (self.value + count * TICK) & _MASK
            return first

    def unlock(self) -> None:
        """In a forked child: another thread of the parent may have held the lock."""
        self._lock = threading.Lock()
