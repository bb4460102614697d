"""What holds for all tests."""

import faulthandler
import signal

import pytest
from hypothesis import settings

# A busy machine makes any example slow; how long things take is the business of benchmarks/.
settings.register_profile("gazette", deadline=None)
settings.load_profile("gazette")

END_TIMEOUT_S = 30.0
"""How long Python may take to end after the last test."""

# A shell's background job ignores SIGINT, and so would all programs that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> object:
    """Escape lone surrogates in what a test logged: a worker that sends them to the run ends it."""
    report = yield
    report.sections = [(title, encodable(text)) for title, text in report.sections]
    if report.longrepr is not None and not isinstance(report.longrepr, tuple):
        text = str(report.longrepr)
        if encodable(text) != text:
            report.longrepr = encodable(text)
    return report


def encodable(text: str) -> str:
    """Return the text with lone surrogates as escapes."""
    return text.encode(errors="backslashreplace").decode()


def pytest_unconfigure() -> None:
    """End in spite of threads that tests left behind, and say what they do."""
    faulthandler.dump_traceback_later(END_TIMEOUT_S, exit=True)
