"""Round trips, from an echo of bytes to an acknowledged publish."""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

from measure import ClusterProcess, cluster
from peers.contender import make
from peers.gazette import specs_of
from raw import RawStream, append_frames

from gazette_sdk import Publisher, connect, mapping
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.stream_frames import END_FRAME, Kind, Method, encode, encode_call
from gazette_sdk.transport import Transport
from gazette_sdk.transport import loop as sdk_loop
from gazette_sdk.transport.append.append import append_once

__all__ = ["PROFILED", "Step", "steps"]

PROFILED = "append of 200 bytes"
"""Step that is profiled."""

TOPIC = "profiled"
JOURNAL = f"{TOPIC}/part-000"
LINE = b'{"n":1,"payload":"%s"}\n' % (b"x" * 178)
TIMEOUT_S = 60.0

Run = Callable[[int], list[float]]
"""(number of calls) -> seconds of each."""


@dataclass(frozen=True)
class Step:
    """Kind of round trip.

    Attributes:
        name: name of the step.
        adds: difference to the step it is compared with.
        over: name of that step; empty for none.
        run: makes the round trips.
        pid: id of the other process.
    """

    name: str
    adds: str
    over: str
    run: Run
    pid: int


# --------------------------------------------------------------- other ends


def blocking_echo(pipe: Connection) -> None:
    """Echo with two system calls."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname()[1])
        connection, _ = server.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := connection.recv(1 << 16):
            connection.sendall(data)


class _Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


def loop_echo(pipe: Connection) -> None:
    """Echo on an event loop."""

    async def serve() -> None:
        server = await asyncio.get_running_loop().create_server(_Echo, "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        await asyncio.Event().wait()

    asyncio.run(serve())


@contextmanager
def echo(serve: Callable[[Connection], None]) -> Iterator[tuple[socket.socket, int]]:
    """Start a process that echoes; yield a connection and the process id."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there,), daemon=True)
    process.start()
    assert process.pid is not None
    try:
        with socket.create_connection(("127.0.0.1", here.recv()), TIMEOUT_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield connection, process.pid
    finally:
        process.kill()
        process.join()


# -------------------------------------------------------------------- steps


def timed(call: Callable[[], object]) -> Run:
    """Return the seconds of each call."""

    def run(count: int) -> list[float]:
        taken = []
        for _ in range(count):
            begun = time.perf_counter()
            call()
            taken.append(time.perf_counter() - begun)
        return taken

    return run


def echoed(connection: socket.socket) -> Callable[[], object]:
    """Echo a message of the length of an append."""
    data = append_frames(JOURNAL, LINE)

    def call() -> None:
        connection.sendall(data)
        left = len(data)
        while left:
            left -= len(connection.recv(1 << 16))

    return call


def pinged(stream: RawStream) -> Callable[[], object]:
    """Send PING, and receive PONG."""
    frame = encode(Kind.PING, b"x" * 32)

    def call() -> None:
        stream.socket.sendall(frame)
        while not stream.receive():
            pass

    return call


def refused(stream: RawStream) -> Callable[[], object]:
    """Append to an absent journal."""
    frames = append_frames("no/such/journal", LINE)

    def call() -> None:
        (answer,) = stream.call(frames)
        assert pb.AppendResponse.FromString(answer.payload).status == pb.JOURNAL_NOT_FOUND

    return call


def empty(stream: RawStream) -> Callable[[], object]:
    """Append no content."""
    request = pb.AppendRequest(journal=JOURNAL).SerializeToString()
    frames = encode_call(Method.APPEND, request) + END_FRAME
    return lambda: stream.call(frames)


def appended(stream: RawStream) -> Callable[[], object]:
    """Append 200 bytes."""

    def call() -> None:
        (answer,) = stream.call(append_frames(JOURNAL, LINE))
        assert pb.AppendResponse.FromString(answer.payload).status == pb.OK

    return call


def appended_in_coroutine(transport: Transport) -> Run:
    """Append 200 bytes with the asyncio client, on its own event loop."""

    async def line() -> AsyncIterator[bytes]:
        yield LINE

    async def calls(count: int) -> list[float]:
        taken = []
        for _ in range(count):
            begun = time.perf_counter()
            await append_once(transport, pb.AppendRequest(journal=JOURNAL), line())
            taken.append(time.perf_counter() - begun)
        return taken

    return lambda count: sdk_loop.run(calls(count))


def awaited(publisher: Publisher) -> Run:
    """Await a publish in a coroutine of the program's own event loop."""

    async def calls(count: int) -> list[float]:
        taken = []
        for i in range(count):
            begun = time.perf_counter()
            await publisher.publish(make(i))
            taken.append(time.perf_counter() - begun)
        return taken

    return lambda count: asyncio.run(calls(count))


@contextmanager
def steps() -> Iterator[tuple[list[Step], ClusterProcess]]:
    """Yield all steps, and the broker."""
    with ExitStack() as stack:
        blocking, blocking_pid = stack.enter_context(echo(blocking_echo))
        looped, loop_pid = stack.enter_context(echo(loop_echo))
        running = stack.enter_context(cluster(specs_of(TOPIC, 1)))
        raw = stack.enter_context(RawStream(running.address))
        appended(raw)()  # a broker waits only so long for a first call
        broker = running.pid
        transports: dict[str, Transport] = {}
        for wire in ("stream", "grpc"):
            transports[wire] = connect(running.address, wire=wire)
            stack.callback(lambda transport: sdk_loop.run(transport.aclose()), transports[wire])
        # Each has one habit: of how its receipts are waited for.
        plain, in_coroutine, of_grpc = (
            stack.enter_context(Publisher(mapping.direct(JOURNAL), transport=transports[wire]))
            for wire in ("stream", "stream", "grpc")
        )
        message = make(1)
        found = [
            Step(
                "echo of a blocking process",
                "two sends, two wake-ups: the kernel",
                "",
                timed(echoed(blocking)),
                blocking_pid,
            ),
            Step(
                "echo of an event loop",
                "a turn of asyncio's loop in the server",
                "echo of a blocking process",
                timed(echoed(looped)),
                loop_pid,
            ),
            Step(
                "PING of the broker",
                "frames, and what else runs in a broker",
                "echo of an event loop",
                timed(pinged(raw)),
                broker,
            ),
            Step(
                "append to no journal",
                "a call: its head, its request, the look-up of the journal, the response",
                "PING of the broker",
                timed(refused(raw)),
                broker,
            ),
            Step(
                "append of nothing",
                "the journal's turn and route, registers",
                "append to no journal",
                timed(empty(raw)),
                broker,
            ),
            Step(
                PROFILED,
                "writing, hashing, the log of commits, those who wait for content",
                "append of nothing",
                timed(appended(raw)),
                broker,
            ),
            Step(
                "append by the asyncio client",
                "the client's event loop, pool, routes and time limits",
                PROFILED,
                appended_in_coroutine(transports["stream"]),
                broker,
            ),
            Step(
                "publish(…).result(), plain code",
                "stamp, encoding, batch and receipt, instead of the asyncio client",
                PROFILED,
                timed(lambda: plain.publish(message).result(TIMEOUT_S)),
                broker,
            ),
            Step(
                "await publish(…), in a coroutine",
                "the answer's way through the SDK's event loop",
                "append by the asyncio client",
                awaited(in_coroutine),
                broker,
            ),
            Step(
                "publish(…).result() over gRPC",
                "gRPC, at both ends",
                "publish(…).result(), plain code",
                timed(lambda: of_grpc.publish(message).result(TIMEOUT_S)),
                broker,
            ),
        ]
        yield found, running
