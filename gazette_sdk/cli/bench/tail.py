"""Phase *tail*: latency of messages from one process to another, at a fixed rate."""

from __future__ import annotations

import functools
import time
from multiprocessing.connection import Connection
from typing import TypeVar

from gazette_sdk.cli.bench.child import child_process
from gazette_sdk.cli.bench.content import Messages
from gazette_sdk.cli.bench.publish import Sending, open_publisher
from gazette_sdk.cli.bench.report import Throughput
from gazette_sdk.cli.bench.schedule import NANOSECONDS, Schedule, due_messages
from gazette_sdk.cli.bench.settings import BenchSettings
from gazette_sdk.cli.bench.site import Site
from gazette_sdk.cli.bench.tailer import Failure, Ready, Tailed, TailJob
from gazette_sdk.cli.bench.tailer import tail as run_tailer
from gazette_sdk.cli.bench.verify import Ledger
from gazette_sdk.cli.failure import CommandFailedError
from gazette_sdk.cli.progress import Progress
from gazette_sdk.server.settings import LoggingSettings

__all__ = ["tail"]

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
        child_process(functools.partial(run_tailer, job), logging, STOP_TIMEOUT_S) as pipe,
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
