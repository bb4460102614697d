"""Clocks of producers, which order their messages (message section 2)."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta

__all__ = [
    "TICK",
    "UNIX_EPOCH",
    "Clock",
    "clock_of_time",
    "clock_of_unix_ns",
    "time_of_clock",
    "unix_100ns_of_clock",
]

TICK = 160
"""One tick of a clock: a microsecond, in units of 100 ns that are shifted by four bits."""

UNIX_EPOCH = 122_192_928_000_000_000
"""Time from 1582-10-15, the epoch of UUIDs, to 1970-01-01, in units of 100 ns."""

_MASK = (1 << 64) - 1


def clock_of_unix_ns(unix_ns: int) -> int:
    """Return the clock at a time in nanoseconds since 1970."""
    return ((unix_ns // 100 + UNIX_EPOCH) << 4) & _MASK


def clock_of_time(time: datetime) -> int:
    """Return the least clock of a time, which has a time zone; times before 1970 are 1970."""
    micros = (time - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
    return clock_of_unix_ns(max(0, micros) * 1000)


def unix_100ns_of_clock(clock: int) -> int:
    """Return the time of a clock, in units of 100 ns since 1970."""
    return (clock >> 4) - UNIX_EPOCH


def time_of_clock(clock: int) -> datetime:
    """Return the time of a clock, in UTC, rounded down to a microsecond.

    Raises:
        OverflowError: the time is after the year 9999.
    """
    micros = unix_100ns_of_clock(clock) // 10
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=micros)


class Clock:
    """Clock that never goes back. Publishers and threads may share it.

    Args:
        value: its first value.

    Attributes:
        value: its value, 64 bits.
    """

    __slots__ = ("_lock", "value")

    def __init__(self, value: int = 0) -> None:
        self.value = value
        self._lock = threading.RLock()  # a signal handler may publish within

    def update(self, unix_ns: int) -> None:
        """Advance to a time in nanoseconds since 1970, unless the clock is later."""
        candidate = clock_of_unix_ns(unix_ns)
        with self._lock:
            self.value = max(self.value, candidate)

    def tick(self, count: int = 1) -> int:
        """Advance by one microsecond, ``count`` times; return the value after the first."""
        with self._lock:
            first = (self.value + TICK) & _MASK
            self.value = (self.value + count * TICK) & _MASK
            return first

    def unlock(self) -> None:
        """Replace the lock in a forked child, as another thread of the parent may have held it."""
        self._lock = threading.RLock()  # a signal handler may publish within
