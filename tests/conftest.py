"""What holds for all tests."""

import faulthandler
import signal

from hypothesis import settings

# A busy machine makes any example slow; how long things take is the business of benchmarks/.
settings.register_profile("gazette", deadline=None)
settings.load_profile("gazette")

END_TIMEOUT_S = 30.0
"""How long Python may take to end after the last test."""

# A shell's background job ignores SIGINT, and so would all programs that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_unconfigure() -> None:
    """End in spite of threads that tests left behind, and say what they do."""
    faulthandler.dump_traceback_later(END_TIMEOUT_S, exit=True)
