"""The pieces of work of one acknowledged publish, each by itself in a loop."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from peers.contender import make

from gazette_sdk.framing import JsonLines
from gazette_sdk.message.flags import OUTSIDE_TXN
from gazette_sdk.message.kinds import kind_of
from gazette_sdk.message.uuid import Stamp, new_producer_id
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.stream_calls import CallBegan, ClientCalls, ServerCalls
from gazette_sdk.protocol.stream_frames import PREFACE, Frame, FrameBuffer
from gazette_sdk.transport import loop as sdk_loop

__all__ = ["Part", "parts"]

REPEATS = 2000
TRIES = 7
HOPS = 1000


@dataclass(frozen=True)
class Part:
    """A piece of work.

    Attributes:
        name: what is done.
        where: client, broker, or both.
        us: processor time of it, in microseconds; of a hop between threads the wall time.
    """

    name: str
    where: str
    us: float


def best_us(work: Callable[[], object]) -> float:
    """Microseconds of one call, in the best of several loops."""
    found = []
    for _ in range(TRIES):
        begun = time.perf_counter()
        for _ in range(REPEATS):
            work()
        found.append((time.perf_counter() - begun) / REPEATS * 1e6)
    return min(found)


def parts(directory: Path) -> list[Part]:
    """All of them.

    Args:
        directory: for the file that is written.
    """
    return [Part(name, where, us) for name, where, us in _measured(directory)]


def _measured(directory: Path) -> Iterator[tuple[str, str, float]]:
    content = _content()
    yield "making the message, a dict", "client", best_us(lambda: make(1))
    yield "stamping and encoding it", "client", best_us(_encoding())
    exchange = _Exchange(content)
    whole = best_us(exchange.whole)
    of_client = best_us(exchange.of_client)
    yield "a call's frames and messages, out and in", "client", of_client
    yield "a call's frames and messages, in and out", "broker", whole - of_client
    yield "sending and receiving on a socket that is ready", "both", best_us(_socket(content))
    yield "a turn of the event loop", "both", _turn_us()
    yield "writing 200 bytes to the page cache", "broker", best_us(_writing(directory, content))
    yield "hashing them, and the sum so far", "broker", best_us(_hashing(content))
    yield "a hop to another thread's event loop and back", "asyncio client", _hop_us()


def _content() -> bytes:
    encode = _encoding()
    return encode()


def _encoding() -> Callable[[], bytes]:
    stamp, kind, framing = Stamp(new_producer_id()), kind_of(dict, "json"), JsonLines()
    stamp.flags = OUTSIDE_TXN
    message = make(1)

    def work() -> bytes:
        stamp.tick_now()
        out = bytearray()
        framing.encode(kind.encode(message, stamp), out)
        return bytes(out)

    return work


class _FrameFeed(FrameBuffer):
    """A frame buffer that copies what it is given into its memory."""

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that are whole now."""
        self.get_buffer()[: len(data)] = data
        return self.updated(len(data))


class _Exchange:
    """Both ends of the wire without a socket between them.

    Args:
        content: of an append.
    """

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._client, self._server = ClientCalls(), ServerCalls()
        self._to_client, self._to_server = _FrameFeed(), _FrameFeed(PREFACE)
        self._to_server.feed(PREFACE)
        for frame in self._to_client.feed(self._server.hello("zone", "broker-1")):
            self._client.receive(frame)
        self._response = _response()
        self.whole()
        # What the broker says to the client alone is the same each time.
        lone = ServerCalls()
        lone.hello("zone", "broker-1")
        self._answer = self._served(lone, _FrameFeed(), self._sent(ClientCalls()))

    def whole(self) -> None:
        """An append, at both ends."""
        self._received(self._served(self._server, self._to_server, self._sent(self._client)))

    def of_client(self) -> None:
        """The client's part of it."""
        self._sent(self._client)
        self._received(self._answer)

    def _sent(self, calls: ClientCalls) -> bytes:
        if calls is not self._client:
            for frame in _FrameFeed().feed(ServerCalls().hello("zone", "broker-1")):
                calls.receive(frame)
        request = pb.AppendRequest(journal="profiled/part-000").SerializeToString()
        _, data = calls.append(request, self._content)
        return data

    def _served(self, calls: ServerCalls, decoder: _FrameFeed, data: bytes) -> bytes:
        call = 0
        for frame in decoder.feed(data):
            event = calls.receive(frame)
            if isinstance(event, CallBegan):
                call = event.call
                pb.AppendRequest.FromString(event.request)
        return calls.answer(call, self._response.SerializeToString())

    def _received(self, data: bytes) -> None:
        for index, frame in enumerate(self._to_client.feed(data)):
            self._client.receive(frame)
            if index == 0:
                pb.AppendResponse.FromString(frame.payload)


def _response() -> pb.AppendResponse:
    broker = pb.ProcessSpec.ID(zone="zone", suffix="broker-1")
    route = pb.Route(members=[broker], primary=0, endpoints=["http://localhost:8080"])
    etcd = pb.Header.Etcd(cluster_id=1 << 60, member_id=1 << 60, revision=1 << 20, raft_term=7)
    commit = pb.Fragment(
        journal="profiled/part-000",
        begin=1 << 30,
        end=(1 << 30) + 200,
        sum=pb.SHA1Sum(part1=1 << 60, part2=1 << 60, part3=1 << 30),
        compression_codec=pb.NONE,
    )
    header = pb.Header(process_id=broker, route=route, etcd=etcd)
    return pb.AppendResponse(header=header, commit=commit, registers=pb.LabelSet())


def _socket(content: bytes) -> Callable[[], object]:
    here, there = socket.socketpair()

    def work() -> None:
        here.send(content)
        there.recv(1 << 16)

    return work


def _turn_us() -> float:
    async def turns() -> float:
        begun = time.perf_counter()
        for _ in range(REPEATS):
            await asyncio.sleep(0)
        return (time.perf_counter() - begun) / REPEATS * 1e6

    return min(asyncio.run(turns()) for _ in range(TRIES))


def _writing(directory: Path, content: bytes) -> Callable[[], object]:
    file = (directory / "written").open("wb", buffering=0)
    position = 0

    def work() -> None:
        nonlocal position
        position += os.pwrite(file.fileno(), content, position)

    return work


def _hashing(content: bytes) -> Callable[[], object]:
    digest = hashlib.sha1(usedforsecurity=False)

    def work() -> None:
        digest.update(content)
        digest.copy().digest()

    return work


def _hop_us() -> float:
    async def nothing() -> None:
        pass

    taken = []
    for _ in range(HOPS):
        begun = time.perf_counter()
        sdk_loop.run(nothing())
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken) * 1e6
