"""Fixtures of transports: signal handlers that raise."""

from __future__ import annotations

import contextlib
import signal

import pytest


@pytest.fixture
def alarm():
    """Context manager in which a signal handler raises an error, after 0.1 seconds."""

    @contextlib.contextmanager
    def alarm(error):
        def interrupt(*_):
            raise error

        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    return alarm
