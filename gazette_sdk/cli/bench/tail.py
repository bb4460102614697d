"""Phases *tail* and *read* of a run.

*tail* measures the latency of messages from one process to another, at a fixed rate: a child
process (:func:`tail_journal`) reads them as this one publishes. *read* (:func:`catch_up`) reads all
messages as fast as possible, and verifies them.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from gazette_sdk.cli.bench.publish import Sending, open_publisher
from gazette_sdk.cli.bench.report import NANOSECONDS, Histogram, Schedule, Throughput, due_messages
from gazette_sdk.cli.bench.site import Messages, Site, child_process
from gazette_sdk.cli.bench.verify import Findings, Ledger, Reading
from gazette_sdk.cli.formats import Progress
from gazette_sdk.cli.program import CommandFailedError, explain
from gazette_sdk.cli.settings import BenchSettings
from gazette_sdk.errors import ClosedError, GazetteError
from gazette_sdk.message import Reader
from gazette_sdk.server.settings import LoggingSettings
from gazette_sdk.transport.connect import connect
from gazette_sdk.transport.loop import run


@dataclass(frozen=True)
class TailJob:
    """Work of the child process.

    Attributes:
        address: address of a broker.
        options: arguments of ``connect``.
        selector: label selector of the journals.
        journals: their names, in order.
        offsets: offset by journal at which to begin.
        size: length of a message.
        begin: number of the first message.
        probes: number of messages before those that are measured.
    """

    address: str
    options: Mapping[str, Any]
    selector: str
    journals: tuple[str, ...]
    offsets: Mapping[str, int]
    size: int
    begin: int
    probes: int


@dataclass(frozen=True)
class Ready:
    """Answer of the child: it has read all probes."""


@dataclass(frozen=True)
class Tailed:
    """Result of the child.

    Attributes:
        findings: defects of the messages that it read.
        latency: nanoseconds from when a message was due until it was read.
        end_ns: time of the last message, on the shared clock.
    """

    findings: Findings
    latency: Histogram
    end_ns: int


@dataclass(frozen=True)
class Failure:
    """Error of the child.

    Attributes:
        problem: its text.
    """

    problem: str


def tail_journal(job: TailJob, pipe: Connection) -> None:
    """Read until all messages of the schedule have arrived, or until stopped.

    Sends :class:`Ready` after the probes, receives the :class:`Schedule`, and sends
    :class:`Tailed` or :class:`Failure`. Anything else on the pipe, and its end, stop it.
    """
    transport = connect(job.address, **job.options)
    reader = Reader(dict, job.selector, transport=transport, block=True, offsets=dict(job.offsets))
    schedules: queue.SimpleQueue[Schedule | None] = queue.SimpleQueue()
    is_over = threading.Event()

    def listen() -> None:
        """Receive from the pipe while the reader waits for messages."""
        with suppress(EOFError, OSError):
            while isinstance(word := pipe.recv(), Schedule):
                schedules.put(word)
        schedules.put(None)
        if not is_over.is_set():
            reader.close()

    threading.Thread(target=listen, name="listen", daemon=True).start()
    try:
        answer: Tailed | Failure = _read(job, reader, schedules, pipe)
    except GazetteError as error:
        answer = Failure(explain(error))
    finally:
        reader.close()
        run(transport.aclose())
    is_over.set()
    pipe.send(answer)


def _read(
    job: TailJob,
    reader: Reader[dict[str, Any]],
    schedules: queue.SimpleQueue[Schedule | None],
    pipe: Connection,
) -> Tailed:
    reading = Reading(job.journals, Messages(job.size), job.begin)
    latency = Histogram()
    envelopes = iter(reader)
    for _, envelope in zip(range(job.probes), envelopes, strict=False):
        reading.feed([envelope])
    pipe.send(Ready())
    clock = time.monotonic_ns
    schedule: Schedule | None = None
    end_ns = clock()
    first = job.begin + job.probes
    with suppress(ClosedError):  # it was stopped: earlier messages count
        for envelope in envelopes:
            end_ns = clock()
            if schedule is None:
                schedule = schedules.get()  # it was sent before the first message
                if schedule is None:
                    break
            number = envelope.message.get("n")
            if type(number) is int and first <= number < first + schedule.count:
                latency.record(end_ns - schedule.due_ns(number - first))
            reading.feed([envelope])
            if reading.findings.count >= job.probes + schedule.count:
                break
    schedule = schedule or schedules.get()
    if schedule is None:
        raise ClosedError("the reader was stopped before publishing began; run the benchmark again")
    return Tailed(reading.finish(first + schedule.count), latency, end_ns)


READY_TIMEOUT_S = 60.0
"""Limit of the child's start and of its first messages."""

ARRIVED_TIMEOUT_S = 30.0
"""A message that does not arrive for this long after the last publish counts as lost."""

STOP_TIMEOUT_S = 5.0

_LEAD_NS = 50_000_000
"""Time between sending the schedule to the child and its first message."""

T = TypeVar("T", Ready, Tailed)


def tail(
    settings: BenchSettings,
    site: Site,
    ledger: Ledger,
    logging: LoggingSettings,
    progress: Progress,
) -> tuple[Tailed, Throughput]:
    """Publish at the rate, while another process tails.

    Returns:
        The result of the child, and the throughput from the first due message to the last one
        that arrived.

    Raises:
        CommandFailedError: the child process could not read.
        GazetteError: a message could not be published, or was not acknowledged in time.
    """
    count = max(round(settings.rate * settings.duration_s), 1)
    probes = len(ledger.journals)
    job = TailJob(
        address=site.address,
        options=site.options,
        selector=site.selector,
        journals=ledger.journals,
        offsets=dict(ledger.ends),
        size=settings.size,
        begin=ledger.next_number,
        probes=probes,
    )
    progress.begin("Starting a process that tails")
    with (
        child_process(functools.partial(tail_journal, job), logging, STOP_TIMEOUT_S) as pipe,
        open_publisher(site) as publisher,
    ):
        sending = Sending(publisher, ledger, Messages(settings.size), settings.size)
        # One message to each journal connects publisher and child to all of them.
        sending.each(ledger.take(probes))
        sending.finish()
        _receive(pipe, Ready, READY_TIMEOUT_S)
        length = ledger.length_bytes
        progress.begin("Tailing", count)
        schedule = Schedule(time.monotonic_ns() + _LEAD_NS, settings.rate, count)
        pipe.send(schedule)
        for due in due_messages(schedule):
            sending.each(ledger.take(len(due)))
            progress.advance(due.stop)
        sending.finish()
        if not pipe.poll(ARRIVED_TIMEOUT_S):
            pipe.send("stop")
        tailed = _receive(pipe, Tailed, STOP_TIMEOUT_S)
    took = (tailed.end_ns - schedule.begin_ns) / NANOSECONDS
    return tailed, Throughput(tailed.latency.count, ledger.length_bytes - length, max(took, 1e-9))


def _receive(pipe: Connection, expected: type[T], timeout_s: float) -> T:
    """Receive the child's next answer.

    Raises:
        CommandFailedError: the child failed, or did not answer in time.
    """
    if not pipe.poll(timeout_s):
        raise CommandFailedError(f"the process that tails did not answer within {timeout_s:g} s")
    try:
        answer = pipe.recv()
    except EOFError:
        answer = Failure("the process ended")
    if isinstance(answer, Failure):
        raise CommandFailedError(f"the tail failed: {answer.problem}")
    assert isinstance(answer, expected)
    return answer


BLOCK_MESSAGES = 1000
"""Number of messages that are verified together."""


def catch_up(
    settings: BenchSettings, site: Site, ledger: Ledger, progress: Progress
) -> tuple[Reading, Throughput]:
    """Read the committed messages of all journals from their beginnings to their write heads.

    The time includes the comparison with the published messages.

    Raises:
        GazetteError: a journal cannot be read.
    """
    reading = Reading(ledger.journals, Messages(settings.size))
    progress.begin("Reading", ledger.acknowledged)
    with Reader(dict, site.selector, transport=site.transport) as reader:
        begun = time.perf_counter()
        envelopes = iter(reader)
        while block := list(islice(envelopes, BLOCK_MESSAGES)):
            reading.feed(block)
            progress.advance(reading.findings.count)
        took = time.perf_counter() - begun
    return reading, Throughput(reading.findings.count, ledger.length_bytes, took)
