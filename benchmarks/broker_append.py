"""Processor time of a broker per small append, with 1 and 64 appends in flight over 8 journals.

The broker has a process of its own and one replica of each journal. The client is a raw stream
connection per journal, so that only the broker's work is counted: the processor time of its
threads, as Linux accounts for it. A third figure adds a tailing reader, which gets each append
before the next one is made, and a fourth one is of appends by HTTP PUT, as curl makes them. To
compare two versions, run the program of each in alternation.
"""

from __future__ import annotations

import http.client
import selectors
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from measure import Figure, arguments, cluster, in_turn, report
from peers.gazette import specs_of
from raw import RawStream, append_frames, read_frame

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.stream_frames import Frame, Kind, decode_status

TOPIC = "appended"
JOURNALS = 8
LINE = b'{"n":1,"payload":"%s"}\n' % (b"x" * 178)


def processor_time_s(pid: int) -> float:
    """Return the processor time that the threads of a process have used."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


class Client:
    """A raw stream connection per journal.

    Args:
        addresses: of the brokers of the journals; the first one has those that are left.
    """

    def __init__(self, *addresses: str) -> None:
        brokers = addresses + addresses[:1] * (JOURNALS - len(addresses))
        self._streams = [RawStream(address) for address in brokers]
        self._address = addresses[0]
        self._frames = [
            append_frames(f"{TOPIC}/part-{number:03}", LINE) for number in range(JOURNALS)
        ]

    def one_in_flight(self, count: int) -> None:
        """Append to one journal after the other, and await each answer."""
        for number in range(count):
            (answer,) = self._streams[number % JOURNALS].call(self._frames[number % JOURNALS])
            assert pb.AppendResponse.FromString(answer.payload).status == pb.OK

    def put(self, count: int) -> None:
        """Append to one journal after the other by HTTP PUT, over one connection."""
        connection = http.client.HTTPConnection(self._address.removeprefix("http://"))
        for number in range(count):
            connection.request("PUT", f"/{TOPIC}/part-{number % JOURNALS:03}", LINE)
            response = connection.getresponse()
            assert response.status == HTTPStatus.NO_CONTENT, response.read()
            response.read()
        connection.close()

    def many_in_flight(self, count: int, depth: int = 8) -> None:
        """Keep ``depth`` appends in flight on each connection."""
        left = [count // JOURNALS] * JOURNALS
        in_flight = [0] * JOURNALS
        selector = selectors.DefaultSelector()
        for number, stream in enumerate(self._streams):
            selector.register(stream.socket, selectors.EVENT_READ, number)
            self._send(number, depth, left, in_flight)
        while any(in_flight):
            for key, _ in selector.select():
                answered = _statuses(self._streams[key.data].receive())
                in_flight[key.data] -= answered
                self._send(key.data, answered, left, in_flight)
        selector.close()

    def tail(self, count: int) -> None:
        """Append to one journal, and read each append before the next."""
        request = pb.ReadRequest(journal=f"{TOPIC}/part-000", offset=-1, block=True)
        reader, stream, frames = RawStream(self._address), self._streams[0], self._frames[0]
        reader.socket.sendall(read_frame(request))
        time.sleep(0.1)
        for _ in range(count):
            stream.call(frames)
            received = 0
            while received < len(LINE):
                contents = [frame for frame in reader.receive() if frame.kind == Kind.CONTENT]
                received += sum(len(frame.payload) for frame in contents)
        reader.close()

    def _send(self, number: int, count: int, left: list[int], in_flight: list[int]) -> None:
        count = min(count, left[number])
        if count:
            left[number] -= count
            in_flight[number] += count
            self._streams[number].socket.sendall(self._frames[number] * count)

    def close(self) -> None:
        """Disconnect."""
        for stream in self._streams:
            stream.close()


def _statuses(frames: Sequence[Frame]) -> int:
    codes = [decode_status(frame.payload).code for frame in frames if frame.kind == Kind.STATUS]
    assert not any(codes), f"an append failed: {codes}"
    return len(codes)


def spent_us(pid: int, append: Callable[[int], Any], count: int) -> float:
    """Return the broker's processor time per append, in microseconds."""
    before = processor_time_s(pid)
    append(count)
    return (processor_time_s(pid) - before) / count * 1e6


def main() -> None:
    """Measure, and print a table."""
    options = arguments(__doc__ or "", rounds=5, single=4_000, pipelined=24_000)
    with cluster(specs_of(TOPIC, JOURNALS)) as running:
        client = Client(running.address)
        _append_when_ready(client)
        began = time.perf_counter()
        found = in_turn(
            options.rounds,
            single=lambda: spent_us(running.pid, client.one_in_flight, options.single),
            pipelined=lambda: spent_us(running.pid, client.many_in_flight, options.pipelined),
            tail=lambda: spent_us(running.pid, client.tail, options.single),
            put=lambda: spent_us(running.pid, client.put, options.single),
        )
        elapsed_s = time.perf_counter() - began
        client.close()
    figures = []
    for name, in_flight in (("single", 1), ("pipelined", 64)):
        spent, of = found[name], f"{in_flight} in flight"
        figures.append(Figure(f"processor time per append, {of}", spent, spent, "µs", None))
        figures.append(Figure(f"appends/s per core, {of}", 1e6 / spent, 1e6 / spent, "1/s", None))
    spent = found["tail"]
    figures.append(Figure("processor time per append and delivery", spent, spent, "µs", None))
    figures.append(
        Figure(
            "processor time per append by PUT, beside one in flight",
            found["put"],
            found["single"],
            "µs",
            bar=1.8,
            more_is_better=False,
        )
    )
    figures.append(Figure("length of the run", elapsed_s, elapsed_s, "s", None))
    report(figures, options)


def _append_when_ready(client: Client, limit_s: float = 30.0) -> None:
    """Append to each journal until each has its primary."""
    ends_at = time.monotonic() + limit_s
    while True:
        try:
            client.one_in_flight(JOURNALS * 50)
        except AssertionError:
            if time.monotonic() > ends_at:
                raise
            time.sleep(0.1)
        else:
            return


if __name__ == "__main__":
    main()
