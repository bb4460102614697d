"""The automatic choice between the stream transport and gRPC, against servers of all kinds."""

from __future__ import annotations

import asyncio
import time
from itertools import islice

import pytest

from gazette_sdk import Publisher, Reader, mapping
from gazette_sdk.errors import UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport import connect
from gazette_sdk.transport.loop import run
from gazette_sdk.transport.stream import wire as choice
from gazette_sdk.transport.stream.wire import REMEMBERED_S, ChosenTransport, StreamTransport
from gazette_sdk.transport.wire import SERVICE, Target
from support.scripted_broker import (
    ScriptedBroker,
    header,
    in_loop,
    read_metadata,
    route_to,
    until,
)
from support.scripted_stream import ScriptedStream

APPLIED = pb.ApplyResponse(header=header())


def apply(transport):
    return transport.apply(pb.ApplyRequest())


async def obliging(peer):
    """Speaks the stream transport, and answers every Apply."""
    await peer.greet()
    while True:
        peer.answer((await peer.call()).call, APPLIED)


class Front:
    """A port that looks at the first bytes: gRPC goes to a gRPC server, what begins with the
    stream transport's preface is met as the test says.

    Attributes:
        meet: what to do with a client that begins with the preface.
        grpc_connections: how many connections went to gRPC.
    """

    def __init__(self, broker, meet):
        self.meet = meet
        self.grpc_connections = 0
        self.prefaces = 0
        self._broker = broker
        self._tasks = set()
        self._writers = set()

    @property
    def address(self):
        return f"http://localhost:{self.port}"

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_):
        await asyncio.sleep(0.02)  # a server that closes as it accepts loses the connection
        self._server.close()
        await self.break_connections()

    async def break_connections(self):
        for writer in self._writers:
            writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))

    async def _serve(self, reader, writer):
        self._tasks.add(asyncio.current_task())
        self._writers.add(writer)
        try:
            first = await reader.readexactly(3)
            if first == b"GZT":
                self.prefaces += 1
                await self.meet(reader, writer)
                return
            self.grpc_connections += 1
            there, back = await asyncio.open_connection("127.0.0.1", self._broker.port)
            self._writers.add(back)
            back.write(first)
            async with asyncio.TaskGroup() as group:
                group.create_task(_pump(reader, back))
                group.create_task(_pump(there, writer))
        except* (OSError, EOFError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(asyncio.current_task())
            writer.transport.abort()


async def _pump(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.transport.abort()


async def closes(reader, writer):
    """As a broker of another implementation does."""


async def answers_http(reader, writer):
    writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
    await writer.drain()


async def swallows(reader, writer):
    await reader.read()


async def resets(reader, writer):
    writer.transport.abort()


def grpc_broker():
    broker = ScriptedBroker()
    broker.on_apply = lambda _: APPLIED
    broker.on_read = lambda _: [read_metadata(0, 0, 3)]
    return broker


@in_loop
async def test_a_server_that_speaks_the_stream_transport_is_spoken_to_in_it():
    async with ScriptedStream(obliging) as server, ChosenTransport(server.address) as transport:
        for _ in range(3):
            assert await apply(transport) == APPLIED
        assert len(server.peers) == 1


@pytest.mark.parametrize("meet", [closes, answers_http, swallows, resets])
@in_loop
async def test_others_get_grpc_within_a_second_and_are_remembered(meet):
    async with (
        grpc_broker() as broker,
        Front(broker, meet) as front,
        ChosenTransport(front.address) as transport,
    ):
        begun = time.monotonic()
        assert await apply(transport) == APPLIED
        took_s = time.monotonic() - begun
        assert took_s < 3.0
        assert (took_s >= 1.0) is (meet is swallows)
        for _ in range(3):
            assert await apply(transport) == APPLIED
        assert (front.prefaces, front.grpc_connections) == (1, 1)


@in_loop
async def test_a_broker_that_speaks_grpc_only_is_not_dialled_for_inline_appends():
    async with (
        grpc_broker() as broker,
        Front(broker, closes) as front,
        ChosenTransport(front.address) as transport,
    ):
        assert await apply(transport) == APPLIED
        transport.routes.update("a/journal", route_to(front.address))
        route = transport.append_route("a/journal", lambda: None)
        await asyncio.to_thread(route.prepare_inline)
        assert front.prefaces == 1
        assert route.send_inline(b"content") is None


@in_loop
async def test_many_calls_at_once_try_once():
    async with (
        grpc_broker() as broker,
        Front(broker, closes) as front,
        ChosenTransport(front.address) as transport,
    ):
        await asyncio.gather(*(apply(transport) for _ in range(50)))
        assert front.prefaces == 1


@in_loop
async def test_many_calls_at_once_to_nobody_fail_together():
    async with ScriptedBroker() as gone:
        pass
    for kind in (ChosenTransport, StreamTransport):
        async with kind(gone.address, connect_timeout_s=0.3) as transport:
            begun = time.monotonic()
            calls = (apply(transport) for _ in range(50))
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(result, UnavailableError) for result in results)
            assert time.monotonic() - begun < 3


@in_loop
async def test_who_tries_may_give_up_and_another_goes_on():
    async with (
        grpc_broker() as broker,
        Front(broker, swallows) as front,
        ChosenTransport(front.address) as transport,
    ):
        first = asyncio.create_task(apply(transport))
        await until(lambda: front.prefaces == 1)
        second = asyncio.create_task(apply(transport))
        await asyncio.sleep(0)
        first.cancel()
        assert await second == APPLIED
        assert front.prefaces == 2


@in_loop
async def test_a_server_of_http_alone_is_unavailable():
    async def web(peer):
        peer.raw(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with (
        ScriptedStream(web) as server,
        ChosenTransport(server.address, connect_timeout_s=0.5) as transport,
    ):
        with pytest.raises(UnavailableError, match=server.address):
            await apply(transport)


@in_loop
async def test_nothing_at_the_address_is_no_reason_for_grpc():
    async with ScriptedBroker() as gone:
        pass
    async with ChosenTransport(gone.address, connect_timeout_s=0.3) as transport:
        with pytest.raises(UnavailableError, match=r"Connection refused.*GAZETTE_ADDRESS"):
            await apply(transport)
        assert transport.wire.grpc is None


async def upgraded(reader, writer):
    """A server that speaks the stream transport by now."""
    script = ScriptedStream(obliging)
    async with script:
        there, back = await asyncio.open_connection("127.0.0.1", script.port)
        back.write(b"GZT")
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_pump(reader, back))
                group.create_task(_pump(there, writer))
        finally:
            back.transport.abort()


@in_loop
async def test_an_upgrade_is_noticed_when_the_memory_ends(monkeypatch):
    async with (
        grpc_broker() as broker,
        Front(broker, closes) as front,
        ChosenTransport(front.address) as transport,
    ):
        await apply(transport)
        front.meet = upgraded
        await apply(transport)
        assert front.prefaces == 1
        later = time.monotonic() + REMEMBERED_S
        monkeypatch.setattr(transport.wire.remembered, "_clock", lambda: later)
        await apply(transport)
        await apply(transport)
        assert front.prefaces == 2
        assert len(transport.wire.over_stream.pools) == 1


@in_loop
async def test_an_upgrade_is_noticed_when_the_connection_fails():
    async with (
        grpc_broker() as broker,
        Front(broker, closes) as front,
        ChosenTransport(front.address) as transport,
    ):
        await apply(transport)
        await apply(transport)
        front.meet = upgraded
        await front.break_connections()
        grpc = transport.wire.grpc
        await until(lambda: grpc.health(SERVICE).name != "READY")
        await apply(transport)
        assert front.prefaces == 2
        assert len(transport.wire.over_stream.pools) == 1


@in_loop
async def test_a_downgrade_is_met_by_the_next_call():
    async with (
        grpc_broker() as broker,
        Front(broker, upgraded) as front,
        ChosenTransport(front.address) as transport,
    ):
        await apply(transport)
        front.meet = closes
        await front.break_connections()
        await until(lambda: len(transport.wire.over_stream.pools) == 0)
        assert await apply(transport) == APPLIED
        assert front.grpc_connections == 1


@in_loop
async def test_a_broker_that_falls_silent_is_unavailable_and_gets_no_grpc():
    async with (
        grpc_broker() as broker,
        Front(broker, upgraded) as front,
        ChosenTransport(front.address) as transport,
    ):
        target = Target(route_to(front.address))

        async def read():
            request = pb.ReadRequest(journal="a/journal")
            return [item async for item in transport.read(request, target)]

        assert await read()
        front.meet = swallows
        await front.break_connections()
        await until(lambda: len(transport.wire.over_stream.pools) == 0)
        with pytest.raises(UnavailableError, match="did not say HELLO within 1 s"):
            await read()
        assert front.grpc_connections == 0
        front.meet = upgraded
        await asyncio.sleep(0.2)  # the back-off of a failed dial
        assert await read()


@in_loop
async def test_each_broker_is_chosen_for_by_itself():
    async def reading(peer):
        await peer.greet()
        while True:
            began = await peer.call()
            peer.message(began.call, read_metadata(0, 0, 3))
            peer.raw(peer.calls.status(began.call))

    async with (
        ScriptedStream(reading) as new,
        grpc_broker() as old,
        Front(old, closes) as front,
        ChosenTransport(new.address) as transport,
    ):
        for address in (front.address, new.address, front.address, new.address):
            request = pb.ReadRequest(journal="a/journal")
            target = Target(route_to(address))
            assert len([item async for item in transport.read(request, target)]) == 1
        assert (front.prefaces, front.grpc_connections, len(new.peers)) == (1, 1, 1)


@in_loop
async def test_each_loop_learns_which_wire_a_broker_speaks():
    async with grpc_broker() as broker, ChosenTransport(broker.address) as transport:

        async def use():
            await asyncio.gather(*(apply(transport) for _ in range(10)))

        await asyncio.gather(use(), *(asyncio.to_thread(asyncio.run, use()) for _ in range(3)))
        wire = transport.wire
        assert wire.remembered.only_grpc(broker.address, wire.grpc.health(SERVICE))
        assert await transport.apply(pb.ApplyRequest()) == APPLIED
        await until(lambda: len(wire.over_stream.pools) == 0)


@pytest.mark.parametrize(
    ("wire", "kind"),
    [("auto", "ChosenTransport"), ("stream", "StreamTransport"), ("grpc", "GrpcTransport")],
)
def test_the_wire_can_be_asked_for(wire, kind):
    assert type(connect(f"http://localhost:1?wire={wire}")).__name__ == kind
    assert type(connect("http://localhost:1", wire=wire)).__name__ == kind


MANY = """
name: many/
replication: 1
labels: [{name: content-type, value: application/x-ndjson}, {name: topic, value: many}]
fragment: {length: 65536, compression_codec: NONE, stores: ["file:///"], refresh_interval: 1m}
children:
""" + "".join(f"  - name: many/part-{part:03d}\n" for part in range(12))


def test_a_reader_of_many_journals_needs_no_connection_for_each(gazette_cluster, monkeypatch):
    monkeypatch.setattr(choice, "LASTING_MAX", 4)
    cluster = gazette_cluster(1)
    cluster.apply(MANY)
    with Publisher(mapping.random("topic=many")) as publisher:
        publisher.publish_batch([{"n": n} for n in range(300)])
    transport = connect(cluster.address)
    with Reader(dict, "topic=many", transport=transport, block=True) as reader:
        found = [envelope.message["n"] for envelope in islice(reader, 300)]
        assert sorted(found) == list(range(300))
        assert len(transport.wire.over_stream.pools) <= 12 // 2, "the others share one of gRPC's"
    run(transport.aclose())
