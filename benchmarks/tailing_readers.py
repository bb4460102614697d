"""Processor time and memory of a broker with a thousand tailing readers.

    python benchmarks/tailing_readers.py [--readers 1000] [--seconds 20] [--json] [--check]

Every reader has its own connection over the stream wire, and receives a message of 200 bytes per
second. In the first measurement all of them read one journal; in the second each reads its own
journal, and the broker also takes a thousand appends a second. Readers are plain sockets in other
processes. Each reads its journal from the begin, and must receive every message once and in order;
otherwise the program fails.

The processor time is that of the broker's process, including appends. The memory is the growth of
its resident size since before the readers connected, divided by their number. Every journal was
written to before.
"""

from __future__ import annotations

import multiprocessing
import selectors
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from idle import processor_s, resident_mib
from measure import ClusterProcess, Figure, arguments, cluster, percentile, report
from raw import RawStream, append_frames, read_frame

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.stream_frames import Kind, encode

CORE_PERCENT_MAX = 25.0
READER_KIB_MAX = 64.0
READER_PROCESSES = 4
PRIMERS = 3
"""Number of messages in each journal before its readers connect."""

LINE_BYTES = 200
SETTLE_S = 5.0
ARRIVAL_TIMEOUT_S = 60.0


class MissingMessageError(Exception):
    """A reader did not receive the content of its journal."""


def specs(count: int) -> str:
    """Return specs of journals without stores."""
    names = "".join(f"  - name: tailed/part-{i:04d}\n" for i in range(count))
    return f"""
name: tailed/
replication: 1
fragment:
  length: 1073741824
  compression_codec: NONE
  stores: []
  refresh_interval: 1h
children:
{names}"""


def line(journal: int, number: int) -> bytes:
    """Return a message with the time of its creation."""
    text = b"%06d %010d %020d " % (journal, number, time.monotonic_ns())
    return text.ljust(LINE_BYTES - 1, b"x") + b"\n"


# ------------------------------------------------------------------- readers


@dataclass
class Follower:
    """Reader that checks its messages.

    Args:
        stream: its connection.
        journal: number of the journal.
    """

    stream: RawStream
    journal: int
    count: int = 0
    delays_s: list[float] = field(default_factory=list)
    _rest: bytes = b""

    def take(self) -> None:
        """Read available content.

        Raises:
            MissingMessageError: it is not the next message.
        """
        for frame in self.stream.receive():
            if frame.kind == Kind.CONTENT:
                self._note(bytes(frame.payload))
            elif frame.kind == Kind.PING:
                self.stream.socket.sendall(encode(Kind.PONG, frame.payload))
            elif frame.kind != Kind.MESSAGE:
                raise MissingMessageError(f"a reader was sent {frame}")
            elif content := pb.ReadResponse.FromString(frame.payload).content:
                self._note(content)

    def _note(self, content: bytes) -> None:
        now_ns = time.monotonic_ns()
        content = self._rest + content
        end = len(content) - len(content) % LINE_BYTES
        for begin in range(0, end, LINE_BYTES):
            journal, number, sent_ns, fill = content[begin : begin + LINE_BYTES].split(b" ")
            if (int(journal), int(number)) != (self.journal, self.count) or fill[-1:] != b"\n":
                raise MissingMessageError(
                    f"a reader of journal {self.journal} got {journal!r} {number!r} instead of"
                    f" message {self.count}"
                )
            self.count += 1
            self.delays_s.append((now_ns - int(sent_ns)) / 1e9)
        self._rest = content[end:]


def follow(pipe: Connection, address: str, journals: Sequence[int]) -> None:
    """Run a process of readers.

    Args:
        pipe: receives a word when all readers have the first messages, sends the final number of
            messages per journal, and receives the delays of all later messages.
        address: address of the broker.
        journals: journal of each reader.
    """
    selector = selectors.DefaultSelector()
    followers = []
    for journal in journals:
        stream = RawStream(address)
        request = pb.ReadRequest(journal=f"tailed/part-{journal:04d}", block=True)
        stream.socket.sendall(read_frame(request))
        followers.append(Follower(stream, journal))
        selector.register(stream.socket, selectors.EVENT_READ, followers[-1])
    selector.register(pipe, selectors.EVENT_READ)
    expected = PRIMERS
    try:
        _gather(selector, followers, expected)
        pipe.send(None)
        expected = _until_told(selector, pipe)
        _gather(selector, followers, expected)
    except MissingMessageError as error:
        pipe.send(error)
        return
    surplus = [each for each in followers if each.count != expected]
    if surplus:
        pipe.send(MissingMessageError(f"{len(surplus)} readers got more than {expected} messages"))
        return
    pipe.send([delay for each in followers for delay in each.delays_s[PRIMERS:]])


def _gather(selector: selectors.BaseSelector, followers: list[Follower], expected: int) -> None:
    """Read until every reader has ``count`` messages."""
    deadline = time.monotonic() + ARRIVAL_TIMEOUT_S
    while late := sum(each.count < expected for each in followers):
        for key, _ in selector.select(1.0):
            if key.data is not None:
                key.data.take()
        if time.monotonic() > deadline:
            raise MissingMessageError(f"{late} readers got less than {expected} messages")


def _until_told(selector: selectors.BaseSelector, pipe: Connection) -> int:
    while True:
        for key, _ in selector.select():
            if key.data is None:
                expected: int = pipe.recv()
                return expected
            key.data.take()


@contextmanager
def readers(address: str, journals: Sequence[int]) -> Iterator[list[Connection]]:
    """Start processes of readers, and wait until they have the first messages."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        for number in range(READER_PROCESSES):
            here, there = context.Pipe()
            part = journals[number::READER_PROCESSES]
            process = context.Process(target=follow, args=(there, address, part), daemon=True)
            process.start()
            there.close()
            processes.append(process)
            pipes.append(here)
        for pipe in pipes:
            _heard(pipe)
        yield pipes
    finally:
        for process in processes:
            process.kill()
            process.join()


def _heard(pipe: Connection) -> list[float]:
    if not pipe.poll(2 * ARRIVAL_TIMEOUT_S):
        raise TimeoutError("the readers do not answer")
    told = pipe.recv()
    if isinstance(told, Exception):
        raise told
    return told or []


# ------------------------------------------------------------------ appends


class Appends:
    """Appends of one message per second to each journal, spread over the second.

    Args:
        address: address of the broker.
        journals: number of journals.
    """

    def __init__(self, address: str, journals: int) -> None:
        self._stream = RawStream(address)
        self._journals = journals
        self.rounds = 0
        self.late_s = 0.0
        self.error: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def once(self) -> None:
        """Append a message to each journal."""
        for journal in range(self._journals):
            self._append(journal)
        self.rounds += 1

    def start(self) -> None:
        """Continue in a thread."""
        self._thread.start()

    def stop(self) -> int:
        """Stop after a whole round; return the number of messages per journal."""
        self._stop.set()
        self._thread.join(ARRIVAL_TIMEOUT_S)
        if self.error is not None or self._thread.is_alive():
            raise RuntimeError("the appends have failed") from self.error
        self._stream.close()
        return self.rounds

    def _run(self) -> None:
        try:
            due = time.monotonic()
            while not self._stop.is_set():
                for journal in range(self._journals):
                    time.sleep(max(0.0, due - time.monotonic()))
                    self.late_s = max(self.late_s, time.monotonic() - due)
                    self._append(journal)
                    due += 1 / self._journals
                self.rounds += 1
        except Exception as error:  # noqa: BLE001 - `stop` raises it
            self.error = error

    def _append(self, journal: int) -> None:
        content = line(journal, self.rounds)
        (answer,) = self._stream.call(append_frames(f"tailed/part-{journal:04d}", content))
        assert pb.AppendResponse.FromString(answer.payload).status == pb.OK


# ------------------------------------------------------------------- figures


@dataclass(frozen=True)
class Cost:
    """Cost of the readers.

    Attributes:
        core_percent: processor time of the broker, in percent of one core.
        reader_kib: memory per reader.
        delays_s: seconds from creating a message to receiving it, of each message and reader.
    """

    core_percent: float
    reader_kib: float
    delays_s: list[float]


def measure(running: ClusterProcess, reader_count: int, journals: int, seconds: float) -> Cost:
    """Measure readers for some seconds."""
    appends = Appends(running.address, journals)
    for _ in range(PRIMERS):
        appends.once()
    time.sleep(SETTLE_S)
    memory_before = resident_mib(running.pid)
    with readers(running.address, [i % journals for i in range(reader_count)]) as pipes:
        appends.start()
        time.sleep(SETTLE_S)
        before, begun = processor_s(running.pid), time.monotonic()
        time.sleep(seconds)
        used, taken = processor_s(running.pid) - before, time.monotonic() - begun
        memory = resident_mib(running.pid) - memory_before
        count = appends.stop()
        for pipe in pipes:
            pipe.send(count)
        delays_s = [delay for pipe in pipes for delay in _heard(pipe)]
    if len(delays_s) != reader_count * (count - PRIMERS):
        raise MissingMessageError(f"{len(delays_s)} messages arrived")
    return Cost(100 * used / taken, memory * 1024 / reader_count, delays_s)


def main() -> None:
    """Measure, and print the figures."""
    options = arguments(__doc__ or "", readers=1000, seconds=20)
    figures = []
    ways = {"one journal": 1, "a journal each": options.readers}
    for way, journals in ways.items():
        with cluster(specs(journals)) as running:
            cost = measure(running, options.readers, journals, options.seconds)
        p50, p99 = (percentile(cost.delays_s, percent) * 1e6 for percent in (50, 99))
        print(
            f"{way}: {len(cost.delays_s)} messages arrived, after {p50:,.0f} µs (p50),"
            f" {p99:,.0f} µs (p99)",
            file=sys.stderr,
        )
        figures += [
            Figure(
                f"{way}: one core",
                cost.core_percent,
                CORE_PERCENT_MAX,
                "%",
                1.0,
                more_is_better=False,
            ),
            Figure(
                f"{way}: memory of a reader",
                cost.reader_kib,
                READER_KIB_MAX,
                "KiB",
                1.0,
                more_is_better=False,
            ),
        ]
    report(figures, options)


if __name__ == "__main__":
    main()
