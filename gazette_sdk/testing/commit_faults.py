"""Crashes of a shard at a chosen step of a commit."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from gazette_sdk.shard.transaction.machine import CommitStep

__all__ = ["CommitStep", "CrashAt", "InjectedCrashError", "exit_process"]

EXIT_STATUS = 137
"""Exit status of a process that crashes: that of one that is killed."""


class InjectedCrashError(Exception):
    """A crash that a test has asked for. What runs ends without anything further."""


class CrashAt:
    """Function to call at each step of a commit, which crashes at one of them.

    Args:
        step: the step.
        nth: the time it is reached at which to crash, from 1 on.
        crash: ends what runs; raises :class:`InjectedCrashError` by default.

    Attributes:
        has_crashed: the step was reached.
        steps: all steps that were reached, in order.
    """

    def __init__(
        self, step: CommitStep, nth: int = 1, crash: Callable[[], None] | None = None
    ) -> None:
        self.has_crashed = False
        self.steps: list[CommitStep] = []
        self._step = step
        self._left = nth
        self._crash = crash or _raise
        self._lock = threading.Lock()

    def __call__(self, step: CommitStep) -> None:
        """Note a step, and crash if it is the one."""
        with self._lock:
            self.steps.append(step)
            if step is self._step:
                self._left -= 1
            crashes = step is self._step and self._left == 0
        if crashes:
            self.has_crashed = True
            self._crash()


def exit_process() -> None:
    """End this process at once, as a kill does: nothing is flushed, closed or given up."""
    os._exit(EXIT_STATUS)


def _raise() -> None:
    raise InjectedCrashError("a test has asked for this crash")
