"""Phases of ``gazette bench``.

*publish* sends messages as fast as possible. *tail* measures the latency of messages from one
process to another, at a fixed rate: a child process (:func:`tail_journal`) reads them as this one
publishes. *read* (:func:`catch_up`) reads all messages as fast as possible, and verifies them.
"""

from __future__ import annotations

import functools
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any, TypeAlias, TypeVar

from gazette_sdk.cli.bench.report import (
    NANOSECONDS,
    Histogram,
    Report,
    Schedule,
    Throughput,
    Verification,
    due_messages,
)
from gazette_sdk.cli.bench.site import Messages, Site, child_process, open_site
from gazette_sdk.cli.bench.verify import Findings, Ledger, Reading, journal_of
from gazette_sdk.cli.formats import Progress, open_progress
from gazette_sdk.cli.program import CommandFailedError, Invocation, explain
from gazette_sdk.cli.settings import BENCH, BENCH_CLUSTER, BenchSettings
from gazette_sdk.errors import ClosedError, GazetteError
from gazette_sdk.message import Publisher, Reader
from gazette_sdk.message.receipt import BatchReceipt, Receipt
from gazette_sdk.server.settings import LOGGING, LoggingSettings
from gazette_sdk.transport import loop as sdk_loop
from gazette_sdk.transport.connect import connect


def run(invocation: Invocation) -> None:
    """Create journals, run the phases, delete the journals, and print the figures.

    Raises:
        CommandFailedError: the messages that were read differ from those that were acknowledged,
            or the run could not be set up.
        GazetteError: a phase failed.
    """
    settings, logging = invocation.settings(BENCH), invocation.settings(LOGGING)
    report: Report | None = None
    try:
        with _terminable(), open_progress("messages") as progress:
            progress.begin("Creating journals")
            with open_site(settings, invocation.settings(BENCH_CLUSTER), logging) as site:
                report = _measure(settings, site, logging, progress)
                progress.begin("Deleting journals")
    finally:
        if report is not None:  # also if the deletion failed
            report.setting["version"] = invocation.version
            write = report.write_json if settings.json_output else report.write_tables
            write()
    findings = report.verification.findings if report.verification is not None else Findings()
    if not findings.is_flawless:
        raise CommandFailedError(f"what was read is not what was acknowledged: {findings}")


def _measure(
    settings: BenchSettings, site: Site, logging: LoggingSettings, progress: Progress
) -> Report:
    phases = settings.phases.split(",")
    ledger = Ledger(site.journals)
    report = Report(_setting(settings, site))
    findings = Findings()
    if "publish" in phases:
        report.publish = publish(settings, site, ledger, progress)
    if "tail" in phases:
        tailed, report.tail = tail(settings, site, ledger, logging, progress)
        report.tail_rate, report.latency = settings.rate, tailed.latency
        findings.add(tailed.findings)
        report.verification = Verification(findings)
    if "read" in phases:
        reading, report.read = catch_up(settings, site, ledger, progress)
        progress.begin("Comparing")
        chains = ledger.chains(Messages(settings.size))
        findings.add(reading.finish(ledger.acknowledged, chains))
        report.verification = Verification(findings, chains)
    return report


def _setting(settings: BenchSettings, site: Site) -> dict[str, object]:
    return {
        "address": site.address,
        "embedded": settings.embedded,
        "prefix": site.prefix,
        "journals": settings.journals,
        "replication": settings.replication,
        "store": settings.store,
        "message_bytes": settings.size,
        "mode": settings.mode,
        **({"batch": settings.batch} if settings.mode == "publish_batch" else {}),
    }


@contextmanager
def _terminable() -> Iterator[None]:
    """Handle SIGTERM as Ctrl-C: the run deletes its journals and ends its processes."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# ------------------------------------------------------------------ publish

BLOCK_MESSAGES = 1000
"""Number of messages between two checks of receipts."""

PENDING_BYTES = 32 << 20
"""Limit of unacknowledged bytes. It is below the publisher's own, so that this program waits for
receipts, with a timeout, and never for the publisher."""

FRAME_BYTES = 64
"""Approximate length of a message's UUID in its journal."""

ACKNOWLEDGED_TIMEOUT_S = 30.0
"""A message without an acknowledgement for this long ends the run."""

CLOSE_TIMEOUT_S = 1.0

_Receipts: TypeAlias = Sequence[Receipt] | BatchReceipt


def publish(settings: BenchSettings, site: Site, ledger: Ledger, progress: Progress) -> Throughput:
    """Publish messages, and wait until all are acknowledged.

    Raises:
        GazetteError: a message could not be published, or was not acknowledged in time.
    """
    length_before = ledger.length_bytes
    size = settings.batch if settings.mode == "publish_batch" else BLOCK_MESSAGES
    begin, end = ledger.next_number, ledger.next_number + settings.messages
    progress.begin("Publishing", settings.messages)
    with open_publisher(site) as publisher:
        sending = Sending(publisher, ledger, Messages(settings.size), settings.size)
        send = sending.batch if settings.mode == "publish_batch" else sending.each
        begun = time.perf_counter()
        while (left := end - ledger.next_number) > 0:
            send(ledger.take(min(size, left)))
            progress.advance(ledger.acknowledged - begin)
        sending.finish()
        took = time.perf_counter() - begun
    progress.advance(settings.messages)
    return Throughput(settings.messages, ledger.length_bytes - length_before, took)


@contextmanager
def open_publisher(site: Site) -> Iterator[Publisher]:
    """Open a publisher of messages to their journals."""
    journals = site.journals
    publisher = Publisher(
        lambda message: journal_of(message["n"], journals), transport=site.transport
    )
    try:
        yield publisher
    except BaseException:
        # Report the first error, and not the failures that follow from it.
        with suppress(GazetteError):
            publisher.close(timeout=CLOSE_TIMEOUT_S)
        raise
    publisher.close(timeout=ACKNOWLEDGED_TIMEOUT_S)


class Sending:
    """Unacknowledged messages, in the order of their numbers.

    Args:
        publisher: publishes the messages.
        ledger: records acknowledgements.
        messages: content of the messages.
        size: bytes of a message.
    """

    def __init__(self, publisher: Publisher, ledger: Ledger, messages: Messages, size: int) -> None:
        self._publisher = publisher
        self._ledger = ledger
        self._message = messages.message
        self._pending_max = max(PENDING_BYTES // (size + FRAME_BYTES), 1)
        self._pending_count = 0
        self._pending: deque[tuple[range, _Receipts]] = deque()

    def each(self, numbers: range) -> None:
        """Publish messages one by one. May wait for earlier ones."""
        publish = self._publisher.publish
        self._add(numbers, [publish(message) for message in map(self._message, numbers)])

    def batch(self, numbers: range) -> None:
        """Publish messages as a batch. May wait for earlier ones."""
        self._add(numbers, self._publisher.publish_batch(list(map(self._message, numbers))))

    def _add(self, numbers: range, receipts: _Receipts) -> None:
        self._pending.append((numbers, receipts))
        self._pending_count += len(numbers)
        while self._pending and (
            self._pending_count > self._pending_max or _is_done(self._pending[0][1])
        ):
            self._settle()

    def finish(self) -> None:
        """Wait until all messages are acknowledged.

        Raises:
            GazetteError: the first failure, or a wait that took too long.
        """
        while self._pending:
            self._settle()
        self._publisher.flush(ACKNOWLEDGED_TIMEOUT_S)

    def _settle(self) -> None:
        """Wait for the acknowledgement of the oldest messages."""
        numbers, receipts = self._pending.popleft()
        self._pending_count -= len(numbers)
        if isinstance(receipts, BatchReceipt):
            landed = receipts.result(ACKNOWLEDGED_TIMEOUT_S).landed
            ends = [(journal, landing.end) for journal, landing in landed.items()]
        else:
            # Messages of one journal are acknowledged in order: wait for its last one.
            last = receipts[-len(self._ledger.journals) :]
            for receipt in last:
                receipt.result(ACKNOWLEDGED_TIMEOUT_S)
            ends = [(receipt.journal, receipt.end) for receipt in last]
        self._ledger.acknowledge(numbers, ends)


def _is_done(receipts: _Receipts) -> bool:
    if isinstance(receipts, BatchReceipt):
        return receipts.done()
    return receipts[-1].done()


# ------------------------------------------------------------------ tail


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
        sdk_loop.run(transport.aclose())
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


# ------------------------------------------------------------------ read

READ_BLOCK_MESSAGES = 1000
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
        while block := list(islice(envelopes, READ_BLOCK_MESSAGES)):
            reading.feed(block)
            progress.advance(reading.findings.count)
        took = time.perf_counter() - begun
    return reading, Throughput(reading.findings.count, ledger.length_bytes, took)
