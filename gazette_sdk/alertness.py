"""Whether to look for what is awaited, or to sleep until it comes.

To wake a thread takes the kernel some tens of microseconds; on a virtual machine, whose idle
cores are halted, as long as a whole append. Who expects an answer within that time is quicker to
look for it over and over. Where it does not come so soon that is in vain, which is noticed, and
done ever more seldom.
"""

from __future__ import annotations

import os

__all__ = ["SKIPPED_MAX", "Alertness", "has_cores"]

SKIPPED_MAX = 256
"""Waits that are begun asleep after looking was in vain again and again."""


class Alertness:
    """Decides for each wait whether to look first. Pure."""

    __slots__ = ("_skip", "_skipped_next")

    def __init__(self) -> None:
        self._skip = 0
        self._skipped_next = 1

    def looks(self) -> bool:
        """Whether the wait which begins now is one to look in."""
        if not self._skip:
            return True
        self._skip -= 1
        return False

    def seen(self) -> None:
        """It came while it was looked for."""
        self._skipped_next = 1

    def missed(self) -> None:
        """It did not: some waits are begun asleep now, twice as many as the last time."""
        self._skip = self._skipped_next
        self._skipped_next = min(2 * self._skipped_next, SKIPPED_MAX)


def has_cores() -> bool:
    """Whether somebody else can work while we look: not so on a single core."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0)) > 1
    return (os.cpu_count() or 1) > 1
