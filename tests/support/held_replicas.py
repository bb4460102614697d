"""A broker that leads journals, whose replica holds its answers until a test gives them.

Load the fixture in a test module with ``from support.held_replicas import led``.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gazette_sdk.broker.api.fronts import stream_methods
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Authority, Capability, authority_for
from gazette_sdk.protocol.stream_frames import StatusLine
from gazette_sdk.server.metrics import CODES
from gazette_sdk.server.process import Server
from gazette_sdk.transport.wire import as_requests
from support.brokers import Client, HandCluster, journal_spec
from support.etcd import EtcdFixture, run
from support.raw_stream import RawStream, append_frames, head_of
from support.scripted_replicas import JOURNAL, ScriptedPeer, is_repeated, without_pulses
from support.spools import until

__all__ = ["AFTER", "KEYS", "Connection", "HeldPeer", "Setting", "led", "token_of"]

AFTER = head_of(after_success=True)
KEYS = "c2VjcmV0IGtleSBvZiB0aGUgdGVzdHM=,AA=="  # also calls without token are admitted


class HeldPeer(ScriptedPeer):
    """A member that reads on while its answers are held. It is primary of what is appended to it.

    Attributes:
        asked: requests whose answers are held, and those.
        appended: what it was asked to append.
    """

    def __init__(self) -> None:
        super().__init__(self._held)
        self.holds = False
        self.asked: list[tuple[pb.ReplicateRequest, asyncio.Future[Any]]] = []
        self.appended: list[bytes] = []

    def _held(self, request: pb.ReplicateRequest) -> Any:
        if not self.holds:
            return pb.ReplicateResponse()
        self.asked.append((request, asyncio.get_running_loop().create_future()))
        return self.asked[-1][1]

    def give(self, answer: Any = None, count: int = 1) -> None:
        """Answer so many of those that are asked."""
        for _ in range(count):
            future = self.asked.pop(0)[1]
            if not future.done():  # its stream may have been given up
                future.set_result(answer or pb.ReplicateResponse())

    def let_go(self) -> None:
        self.holds = False
        self.give(count=len(self.asked))

    def content(self, journal: str = JOURNAL) -> bytes:
        """What was replicated to it of a journal."""
        mine = [got for got in self.streams if got[0].proposal.journal == journal]
        return b"".join(request.content for got in mine for request in got)

    async def replicate(self, requests, target) -> AsyncIterator[pb.ReplicateResponse]:
        mine: list[pb.ReplicateRequest] = []
        self.streams.append(mine)
        answers: asyncio.Queue[Any] = asyncio.Queue()

        async def read() -> None:
            async for request in as_requests(requests):
                if is_repeated(request, mine):
                    continue
                mine.append(request)
                if request.acknowledge:
                    answers.put_nowait(self.answer(request))
                async with self.more:
                    self.more.notify_all()
            answers.put_nowait(None)

        reading = asyncio.ensure_future(read())
        try:
            while (answer := await answers.get()) is not None:
                given = await answer if isinstance(answer, asyncio.Future) else answer
                if isinstance(given, Exception):
                    raise given
                yield given
        finally:
            reading.cancel()

    async def append(self, requests, target=None) -> pb.AppendResponse:
        _, *chunks, _ = [item async for item in requests]
        self.appended.append(b"".join(chunks))
        return pb.AppendResponse(header=target_header(target))


def target_header(target: Any) -> pb.Header:
    return pb.Header(process_id=target.member, route=target.route)


def token_of(ttl_s: float, *, after_success: bool = True) -> bytes:
    """The head of an append with a token."""
    authority = authority_for(KEYS)
    assert isinstance(authority, Authority)
    token = authority.header(Capability.APPEND, pb.LabelSelector(), ttl_s, time.time())
    return head_of(after_success=after_success, token=token or "")


class Connection:
    """A connection to the broker, used from its own loop."""

    def __init__(self, stream: RawStream) -> None:
        self._stream = stream

    def append(self, content: bytes, journal: str = JOURNAL, head: bytes = b"", **fields: Any):
        chunks = [content] if content else []
        self._stream.send(*append_frames(journal, *chunks, head=head, **fields))

    def send(self, *frames: bytes) -> None:
        self._stream.send(*frames)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # whoever waits for an answer is woken
            self._stream.socket.shutdown(socket.SHUT_RDWR)
        self._stream.close()

    async def answer(self) -> tuple[pb.AppendResponse | None, StatusLine]:
        frames, status = await asyncio.to_thread(self._stream.answer)
        responses = [pb.AppendResponse.FromString(frame.payload) for frame in frames]
        return (responses[0] if responses else None), status

    async def span(self) -> tuple[int, int]:
        """Where an append was put that succeeds."""
        response, status = await self.answer()
        assert response is not None, status
        assert response.status == pb.OK, response
        return response.commit.begin, response.commit.end

    async def failure(self) -> str:
        response, status = await self.answer()
        assert response is None
        name = next(name for name, code in CODES.items() if code == status.code)
        return f"{name} {status.kind}".strip()


class Setting:
    """A broker that leads a journal, its peers, and a connection to it."""

    def __init__(self, cluster: HandCluster, client: Client, server: Server) -> None:
        self.cluster = cluster
        self.client = client
        self.server = server
        self.peer = HeldPeer()
        self.connection: Connection

    async def connect(self) -> Connection:
        return Connection(await asyncio.to_thread(RawStream, self.server.endpoint))

    async def led(self, journal: str = JOURNAL) -> None:
        """Make a journal, and append to it twice: the second append closes its first fragment."""
        await self.client.apply(journal_spec(journal, replication=2))
        await self.cluster.assign(journal, "broker-1", "peer-2")
        for end in (1, 2):
            response = await self.client.append(journal, b"0")
            assert (response.status, response.commit.end) == (pb.OK, end)

    async def replicated(self, content: bytes, journal: str = JOURNAL) -> None:
        """Wait until the peer has got content, all in all."""
        await self.peer.reach(lambda: self.peer.content(journal) == content)

    async def arrived(self, count: int) -> None:
        """Wait until so many calls are not answered yet, begun or not."""
        connections = self.server.stream._connections
        await until(lambda: sum(len(each._calls.open_calls) for each in connections) == count)

    async def asked(self, count: int) -> None:
        """Wait until so many acknowledgements are held."""
        await self.peer.reach(lambda: len(self.peer.asked) == count)


@pytest.fixture
def led(etcd: EtcdFixture, tmp_path, monkeypatch):
    """Runs a scenario with a journal that a broker leads."""
    without_pulses(monkeypatch)

    @contextlib.asynccontextmanager
    async def setting(**changes: Any) -> AsyncIterator[Setting]:
        async with HandCluster(etcd, tmp_path) as cluster:
            client = await cluster.start(**changes)
            server = Server(host="127.0.0.1")
            server.stream.add(stream_methods(cluster.brokers["broker-1"].service))
            await server.start()
            made = Setting(cluster, client, server)
            await cluster.member("peer-2", made.peer)
            await made.led()
            made.connection = await made.connect()
            try:
                yield made
            finally:
                made.peer.let_go()
                made.connection.close()
                await server.stop(0)

    def runs(scenario: Any, **changes: Any) -> None:
        async def whole() -> None:
            async with setting(**changes) as made:
                made.peer.holds = True
                await scenario(made)

        run(whole())

    return runs
