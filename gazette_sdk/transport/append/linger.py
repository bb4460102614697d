"""Pause before a further append of a journal that is being streamed to. Pure."""

from __future__ import annotations

__all__ = ["LARGE_BYTES", "LINGER_S", "STREAMING_COUNT_MIN", "Linger"]

LINGER_S = 0.002
"""Length of the pause, so that more writes share an append. A journal whose writes come one by one
never waits."""

STREAMING_COUNT_MIN = 16
"""An append of so many writes shows that its journal is being streamed to."""

LARGE_BYTES = 256 << 10
"""An append of this size costs little beside its content: it does not wait for more."""


class Linger:
    """Pause of one journal. Times are monotonic seconds."""

    __slots__ = ("_begun_at", "_last_count")

    def __init__(self) -> None:
        self._last_count = 0  # writes of the last append
        self._begun_at = 0.0

    def wait_s(self, now: float, length_bytes: int, *, is_in_flight: bool) -> float:
        """Return the seconds until the next append may begin; 0 if it may now.

        Args:
            now: the time.
            length_bytes: length of the next append.
            is_in_flight: True if appends before it have no answer yet.
        """
        if length_bytes >= LARGE_BYTES:
            return 0.0
        if self._last_count < STREAMING_COUNT_MIN and not is_in_flight:
            return 0.0
        return max(0.0, self._begun_at + LINGER_S - now)

    def begun(self, now: float, count: int) -> None:
        """Note that an append of ``count`` writes was sent."""
        self._last_count = count
        self._begun_at = now

    def ran_dry(self) -> None:
        """Note that nothing is queued: the next write is not waited with."""
        self._last_count = 0
