"""Child process of the phase *tail*: reads messages as another process publishes them."""

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


def tail(job: TailJob, pipe: Connection) -> None:
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
