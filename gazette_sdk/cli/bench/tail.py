"""The phase *tail*: how long a message takes from one process to another, at a fixed rate."""

from __future__ import annotations

import functools
import time
from multiprocessing.connection import Connection
from typing import TypeVar

from gazette_sdk.cli.bench.child import child_process
from gazette_sdk.cli.bench.content import Messages
from gazette_sdk.cli.bench.display import Display
from gazette_sdk.cli.bench.publish import Sending, open_publisher
from gazette_sdk.cli.bench.report import Throughput
from gazette_sdk.cli.bench.schedule import NANOSECONDS, Schedule, due_messages
from gazette_sdk.cli.bench.settings import BenchSettings
from gazette_sdk.cli.bench.site import Site
from gazette_sdk.cli.bench.tailer import Failure, Ready, Tailed, TailJob
from gazette_sdk.cli.bench.tailer import tail as tail_in_process
from gazette_sdk.cli.bench.verify import Ledger
from gazette_sdk.cli.failure import CommandFailedError
from gazette_sdk.server.settings import LoggingSettings

__all__ = ["tail"]

READY_TIMEOUT_S = 60.0
"""What a process may take to start and to read its first messages."""

ARRIVED_TIMEOUT_S = 30.0
"""What the last message may take to come; then it counts as lost."""

STOP_TIMEOUT_S = 5.0

_LEAD_NS = 50_000_000
"""The schedule begins so long after it was told."""

T = TypeVar("T", Ready, Tailed)


def tail(
    settings: BenchSettings,
    site: Site,
    ledger: Ledger,
    logging: LoggingSettings,
    display: Display,
) -> tuple[Tailed, Throughput]:
    """Publish at the rate, while another process tails.

    Returns:
        What came, and how much that was from the first message due until the last one there.

    Raises:
        CommandFailedError: the other process could not read.
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
    display.begin("Starting a process that tails")
    with (
        child_process(functools.partial(tail_in_process, job), logging, STOP_TIMEOUT_S) as pipe,
        open_publisher(site) as publisher,
    ):
        tailer = _Tailer(pipe)
        sending = Sending(publisher, ledger, Messages(settings.size), settings.size)
        # One to each journal: now publisher and tail are connected to all of them.
        sending.each(ledger.take(probes))
        sending.finish()
        tailer.receive(Ready, READY_TIMEOUT_S)
        length = ledger.length_bytes
        display.begin("Tailing", count)
        schedule = Schedule(time.monotonic_ns() + _LEAD_NS, settings.rate, count)
        pipe.send(schedule)
        for due in due_messages(schedule):
            sending.each(ledger.take(len(due)))
            display.advance(due.stop)
        sending.finish()
        tailed = tailer.finish()
    took = (tailed.end_ns - schedule.begin_ns) / NANOSECONDS
    return tailed, Throughput(tailed.latency.count, ledger.length_bytes - length, max(took, 1e-9))


class _Tailer:
    """The process that tails, from this side."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def receive(self, wanted: type[T], timeout_s: float) -> T:
        """What it says next.

        Raises:
            CommandFailedError: it failed, or says nothing in time.
        """
        if not self._pipe.poll(timeout_s):
            raise CommandFailedError(
                f"the process that tails has not read the first messages within {timeout_s:g} s"
            )
        try:
            word = self._pipe.recv()
        except EOFError:
            word = Failure("the process ended")
        if isinstance(word, Failure):
            raise CommandFailedError(f"the tail failed: {word.problem}")
        assert isinstance(word, wanted)
        return word

    def finish(self) -> Tailed:
        """Wait until all has come; what has not come after a while is lost."""
        if not self._pipe.poll(ARRIVED_TIMEOUT_S):
            self._pipe.send("stop")
        return self.receive(Tailed, STOP_TIMEOUT_S)
