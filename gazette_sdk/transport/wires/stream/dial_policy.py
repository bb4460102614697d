"""Policy of dialling one broker: when it may be dialled again after a failure. Pure."""

from __future__ import annotations

from gazette_sdk.errors import GazetteError

__all__ = ["DialPolicy"]

FAILURES_MAX = 30
"""Failures that are counted: the back-off has reached its bound long before."""


class DialPolicy:
    """Back-off of one broker. It doubles with each failure in a row, up to a bound.

    Args:
        first_s: seconds to wait after the first failure.
        max_s: greatest wait.

    Attributes:
        dial_after: monotonic seconds before which the broker is not to be dialled.
        failure: why the last dial failed; None after a success, and before the first dial.
    """

    __slots__ = ("_failures", "_first_s", "_max_s", "dial_after", "failure")

    def __init__(self, first_s: float, max_s: float) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._failures = 0
        self.dial_after = 0.0
        self.failure: GazetteError | None = None

    def may_dial(self, now: float) -> bool:
        """Return True if the broker may be dialled at the time ``now``."""
        return now >= self.dial_after

    def wait_s(self, now: float) -> float:
        """Return the seconds until the broker may be dialled; 0 if it may be now."""
        return max(0.0, self.dial_after - now)

    def failed(self, now: float, failure: GazetteError) -> None:
        """Note that a dial failed."""
        self.dial_after = now + min(self._first_s * 2.0**self._failures, self._max_s)
        self._failures = min(self._failures + 1, FAILURES_MAX)
        self.failure = failure

    def succeeded(self) -> None:
        """Note that a dial succeeded: the next failure is a first one."""
        self._failures = 0
        self.dial_after = 0.0
        self.failure = None
