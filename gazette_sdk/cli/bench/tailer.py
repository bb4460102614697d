"""The process that tails: reads what another process publishes, as it comes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from gazette_sdk.cli.bench.content import Messages
from gazette_sdk.cli.bench.histogram import Histogram
from gazette_sdk.cli.bench.schedule import Schedule
from gazette_sdk.cli.bench.verify import Findings, Reading
from gazette_sdk.cli.failure import explain
from gazette_sdk.errors import ClosedError, GazetteError
from gazette_sdk.message import Reader
from gazette_sdk.transport.connect import connect
from gazette_sdk.transport.loop import run

__all__ = ["Failure", "Ready", "TailJob", "Tailed", "tail"]


@dataclass(frozen=True)
class TailJob:
    """What to tail.

    Attributes:
        address: of a broker.
        options: of the connection.
        selector: of the journals.
        journals: their names, in order.
        offsets: where to begin, by journal.
        size: length of a message.
        begin: number of the first message to come.
        probes: how many messages come first, by which readiness is seen.
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
    """All probes have come."""


@dataclass(frozen=True)
class Tailed:
    """What came.

    Attributes:
        findings: whether it is what was published.
        latency: nanoseconds from when a message was due until it was there.
        end_ns: when the last one came, on the shared clock.
    """

    findings: Findings
    latency: Histogram
    end_ns: int


@dataclass(frozen=True)
class Failure:
    """It could not go on, and why."""

    problem: str


def tail(job: TailJob, pipe: Connection) -> None:
    """Read until all messages of the schedule have come, or until told to stop.

    Sends :class:`Ready` when the probes have come; takes the :class:`Schedule`; sends
    :class:`Tailed` or :class:`Failure`. An end of file on the pipe ends it.
    """
    transport = connect(job.address, **job.options)
    reader = Reader(dict, job.selector, transport=transport, block=True, offsets=dict(job.offsets))
    schedules: queue.SimpleQueue[Schedule | None] = queue.SimpleQueue()
    is_over = threading.Event()

    def listen() -> None:
        """The reader waits for messages; this waits for words."""
        try:
            while isinstance(word := pipe.recv(), Schedule):
                schedules.put(word)
        except (EOFError, OSError):
            pass  # nobody is there any more, which means the same as a word to stop
        schedules.put(None)
        if not is_over.is_set():
            reader.close()

    threading.Thread(target=listen, name="listen", daemon=True).start()
    try:
        word: Tailed | Failure = _read(job, reader, schedules, pipe)
    except GazetteError as error:
        word = Failure(explain(error))
    finally:
        reader.close()
        run(transport.aclose())
    is_over.set()
    pipe.send(word)


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
    with suppress(ClosedError):  # it was told to stop: what came before counts
        for envelope in envelopes:
            end_ns = clock()
            if schedule is None:
                schedule = schedules.get()  # it was sent before the first message was
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
        raise ClosedError("it was stopped before it began")
    return Tailed(reading.finish(first + schedule.count), latency, end_ns)
