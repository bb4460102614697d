"""What holds for all tests."""

import faulthandler
import gc
import os
import signal
import zlib

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

# A busy machine makes any example slow; how long things take is the business of benchmarks/.
settings.register_profile("gazette", deadline=None)
settings.load_profile("gazette")

END_TIMEOUT_S = 30.0
"""How long Python may take to end after the last test."""

SPARK_SESSION = (
    "tests/integration/spark/",
    "tests/docs/test_pages.py::test_the_examples_of_a_page_run_in_order[lake.md]",
    "tests/docs/test_pages.py::test_the_examples_of_a_page_run_in_order[spark.md]",
)
"""Tests that share a JVM with a Spark session, by the begin of their ids."""

SPARK_PROGRAMS = ("tests/crash/test_kill_spark.py", "tests/docs/test_contract.py")
"""Tests that run programs of Spark, each with a JVM of its own."""

MANY_PROCESSES = (
    "tests/benchmarks/",
    "tests/compatibility/",
    "tests/crash/",
    "tests/deploy/",
    "tests/docs/",
    "tests/integration/cli/",
    "tests/integration/local_cluster/",
    "tests/simulation/",
)
"""Tests that start many processes."""

LONGEST = (
    "tests/crash/test_failover.py",
    "tests/crash/test_waiting_journals.py",
    "tests/docs/test_first_hour.py",
    "tests/docs/test_pages.py",
    "tests/simulation/test_simulation.py",
)
"""Those of them that take a minute or more: at the end, other workers would wait for them."""

ONE_BY_ONE = (
    "tests/crash/test_failover.py",
    "tests/crash/test_waiting_journals.py",
    "tests/docs/test_pages.py",
    "tests/simulation/test_simulation.py",
)
"""Long files whose tests share nothing that takes time to start."""

KUBE_TOOLS = "scripts/kube-tools"
"""Program that builds what tests of the chart need, as the reasons of skipped ones name it."""

# A JVM of tests ends within a minute: it takes a fifth less processor time with its quick compiler.
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")

# Python's libraries read all certificates of the system when they are imported, a twentieth of the
# processor time in which a broker starts. Tests have authorities of their own.
os.environ.setdefault("SSL_CERT_FILE", os.devnull)

# A shell's background job ignores SIGINT, and so would all programs that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


class Scheduling(LoadFileScheduling):
    """Distribution of tests over workers: a file of tests runs in one worker.

    All tests of the Spark session are in one worker, and those of programs of Spark in another
    one: more JVMs at a time are too many. The tests of a file that is long, and has nothing that is
    started once for all of them, are distributed one by one.
    """

    def _split_scope(self, nodeid: str) -> str:
        for of_spark in (SPARK_SESSION, SPARK_PROGRAMS):
            if nodeid.startswith(of_spark):
                return of_spark[0]
        return nodeid if nodeid.startswith(ONE_BY_ONE) else super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Scheduling:
    """Distribute tests over workers."""
    return Scheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> object:
    """Leave the collected tests out of the collection of garbage.

    They are half a million objects. To look through them takes a third of a second each time,
    which added up to two fifths of the processor time of unit tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with Spark, which takes longest, and end with tests of many processes.

    Spark gives a process of Python ten seconds to start, which a busy machine exceeds. Otherwise
    files are mixed: some of them wait, and others compute. In the order of their names processors
    would be idle half of the time, and taken by too many tests in the other half.
    """
    items.sort(
        key=lambda item: (
            not item.nodeid.startswith(SPARK_SESSION + SPARK_PROGRAMS),
            item.nodeid.startswith(MANY_PROCESSES),
            not item.nodeid.startswith(LONGEST),
            _mixed(item.nodeid),
        )
    )


def _mixed(nodeid: str) -> int:
    """Return a number for the file of a test, the same one in each run."""
    return zlib.crc32(nodeid.partition("::")[0].encode())


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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests of the chart were left out because their programs are not here."""
    skipped = terminalreporter.stats.get("skipped", [])
    count = sum(KUBE_TOOLS in str(report.longrepr) for report in skipped)
    if count:
        terminalreporter.write_line(
            f"{count} tests of the chart did not run: {KUBE_TOOLS} builds helm and kube-apiserver"
        )


def pytest_unconfigure(config: pytest.Config) -> None:
    """End in spite of threads that tests left behind, and say what they do."""
    if not hasattr(config, "workerinput"):  # a worker waits for the others, and is ended with them
        faulthandler.dump_traceback_later(END_TIMEOUT_S, exit=True)
