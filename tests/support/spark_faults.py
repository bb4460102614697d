"""A data source whose tasks and commits fail where a test says, each fault once.

Tasks and commits run in processes of Spark's own. So a fault is a file, named by the place: the
first process that comes there takes it away, and does what its content says:

- ``raise`` raises an error
- ``kill`` kills the process, as SIGKILL does
- ``hold`` waits until the test lets it go on, see :func:`held`
- ``kill executor`` kills the executor's JVM in the same way, and with it the process
- ``lose`` lets the answer of an append be lost
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa

from gazette_sdk.testing import FaultyTransport, TransportFaults
from gazette_sdk.transport import connect
from gazette_spark import GazetteDataSource, sink
from gazette_spark.sink import GazetteBatchWriter, GazetteStreamWriter, PreparedCommit
from gazette_spark.transaction_log import Record, TransactionLog
from gazette_spark.write_options import WriteOptions

HOLD_MAX_S = 240.0
"""Bound of a process that waits. Spark starts many processes, which takes minutes."""


class InjectedError(Exception):
    """A fault that a test has planted."""


def plant(directory: Path, place: str, what: str = "raise") -> None:
    (directory / place).write_text(what)


def planted(directory: Path) -> list[str]:
    """Places to which nobody came yet."""
    return sorted(each.name for each in directory.iterdir())


def take(directory: str, place: str) -> str:
    """Take the fault of a place away, and return it; empty if there is none."""
    taken = Path(directory) / f"{place}.{os.getpid()}"
    try:
        (Path(directory) / place).rename(taken)
    except FileNotFoundError:
        return ""
    what = taken.read_text()
    taken.unlink()
    return what


def reach(directory: str, place: str) -> str:
    """Do what the fault of a place says; return it."""
    what = take(directory, place)
    if what == "kill executor":
        os.kill(executor_pid(), signal.SIGKILL)
    if what.startswith("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "raise":
        raise InjectedError(place)
    if what == "hold":
        hold(Path(directory) / f"{place}.held")
    return what


def hold(mark: Path) -> None:
    """Wait until a file is removed, which says that this process waits."""
    deadline = time.monotonic() + HOLD_MAX_S
    mark.touch()
    while mark.exists():
        if time.monotonic() > deadline:
            raise InjectedError(f"{mark} was not let go")
        time.sleep(0.02)


@contextlib.contextmanager
def held(directory: Path, place: str, check: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Wait until a process waits at a place; it goes on when the context ends.

    Args:
        directory: the faults.
        place: the place.
        check: raises if nobody will come there any more.
    """
    mark = directory / f"{place}.held"
    deadline = time.monotonic() + HOLD_MAX_S
    while not mark.exists():
        assert time.monotonic() < deadline, f"nobody came to {place}"
        check()
        time.sleep(0.02)
    try:
        yield
    finally:
        mark.unlink(missing_ok=True)


def executor_pid() -> int:
    """Process id of the executor whose task this process runs: it started the one that forked."""
    stat = Path(f"/proc/{os.getppid()}/stat").read_text()
    return int(stat.rpartition(") ")[2].split()[1])


class FaultyDataSource(GazetteDataSource):
    """Data source ``faulty``, with the option ``faults``: the directory of the faults."""

    @classmethod
    def name(cls) -> str:
        return "faulty"

    def writer(self, schema, overwrite):
        return FaultyBatchWriter(*self._parse(schema, is_stream=False))

    def streamWriter(self, schema, overwrite):  # noqa: N802 - Spark's name
        return FaultyStreamWriter(*self._parse(schema, is_stream=True))

    def _parse(self, schema, *, is_stream: bool) -> tuple[WriteOptions, str]:
        options = dict(self.options)
        faults = options.pop("faults")
        return WriteOptions.parse(options, schema, is_stream=is_stream), faults


class FaultyTasks:
    """Tasks of a batch or of a stream that fail.

    Args:
        options: options of the write.
        faults: directory of the faults.
    """

    def __init__(self, options: WriteOptions, faults: str) -> None:
        super().__init__(options)
        self._faults = faults

    def write(self, iterator: Iterator[pa.RecordBatch]) -> PreparedCommit:
        with faulty_task(self._faults):
            prepared = super().write(published(iterator, self._faults))
        reach(self._faults, "task-prepared")
        return prepared


class FaultyBatchWriter(FaultyTasks, GazetteBatchWriter):
    def commit(self, messages) -> None:
        with faulty_commit(self._faults):
            super().commit(messages)


class FaultyStreamWriter(FaultyTasks, GazetteStreamWriter):
    def commit(self, messages, batchId: int) -> None:  # noqa: N803 - Spark's name
        with faulty_commit(self._faults):
            super().commit(messages, batchId)


def published(batches: Iterator[pa.RecordBatch], faults: str) -> Iterator[pa.RecordBatch]:
    """Fail behind the last rows, when all are published."""
    yield from batches
    reach(faults, "task-published")


@contextlib.contextmanager
def faulty_task(faults: str) -> Iterator[None]:
    """Let answers of the task's appends be lost, if there is such a fault."""
    if take(faults, "task-answers") != "lose":
        yield
        return

    def lossy(url: str) -> FaultyTransport:
        return FaultyTransport(
            connect(url), TransportFaults(dropped_answers=0.7, calls=("append",)), seed=1
        )

    with patch.object(sink, "open_transport", lossy), patch.dict(sink._idle, clear=True):
        yield


@contextlib.contextmanager
def faulty_commit(faults: str) -> Iterator[None]:
    """Fail at the steps of a commit."""
    append_line, append = TransactionLog._append_line, TransactionLog._append

    async def faulty_append_line(self: TransactionLog, head: int, entry: Any) -> int | None:
        kind = "decided" if isinstance(entry, Record) else next(iter(entry))
        reach(faults, f"before-{kind}")
        end = await append_line(self, head, entry)
        # The next attempt behind a lost answer finds another offset.
        return None if reach(faults, f"after-{kind}") == "lose" else end

    async def faulty_append(self: TransactionLog, journal: str, content: bytes, **options: Any):
        is_target = journal != self.journal
        if is_target:
            reach(faults, "before-acknowledgement")
        written = await append(self, journal, content, **options)
        if is_target:
            reach(faults, "after-acknowledgement")
        return written

    with (
        patch.object(TransactionLog, "_append_line", faulty_append_line),
        patch.object(TransactionLog, "_append", faulty_append),
    ):
        yield
