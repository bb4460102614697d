"""Transport.direct: where there is a way to append from plain code, and how routes learn of it."""

from __future__ import annotations

import asyncio
import base64
import time

import pytest

from gazette_sdk.errors import CallError, ClosedError, UnavailableError, ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Capability, authority_for
from gazette_sdk.transport import metrics
from gazette_sdk.transport.wires.stream import StreamTransport, blocking
from support.scripted_broker import append_ok, in_loop, route_to, until
from support.scripted_stream import ScriptedStream

WAIT_S = 10.0


async def way_to_the_primary(transport):
    """The direct way, once the event loop has appended at the primary."""
    assert transport.direct("a/journal") is None
    for _ in range(2):  # at the service address, and at the primary that it told of

        async def items():
            yield pb.AppendRequest(journal="a/journal")
            yield b"content"
            yield pb.AppendRequest()

        await transport.append(items())
    way = transport.direct("a/journal")
    assert way is not None
    return way


async def respond_to(way):
    call = way.append(b"x")
    if call is None:
        await asyncio.to_thread(way.prepare)
        call = way.append(b"x")
    assert await asyncio.to_thread(call.wait, WAIT_S)
    return call.response()


@in_loop
async def test_a_transport_signs_each_append_and_follows_the_route():
    key = base64.b64encode(b"k" * 32).decode()
    heads = []

    async def script(peer):
        await peer.greet()
        while True:
            began, _ = await peer.whole_append()
            heads.append(dict(began.head.metadata))
            route = route_to("http://127.0.0.1:1" if len(heads) == 4 else server.address)
            peer.answer(began.call, append_ok(route=route))

    async with (
        ScriptedStream(script) as server,
        StreamTransport(server.address, auth_keys=key) as transport,
    ):
        way = await way_to_the_primary(transport)
        assert not way.check(await respond_to(way))
        response = await respond_to(way)
        for head in heads:
            authority_for(key).verify(head["authorization"], Capability.APPEND, time.time())
        assert len(heads) == 4
        assert way.check(response)
        assert transport.direct("a/journal") is way
        way.learn(response)
        assert transport.direct("a/journal") is None  # nobody has spoken to that one yet
        way.failed(CallError("something"))
        assert transport.routes.peek("a/journal") is not None
        way.failed(UnavailableError("it is gone"))
        assert transport.routes.peek("a/journal") is None


@in_loop
async def test_a_response_that_breaks_a_rule_is_refused():
    answers = []

    async def script(peer):
        await peer.greet()
        while True:
            began, _ = await peer.whole_append()
            response = append_ok(begin=5, end=9, route=route_to(server.address))
            answers.append(response)
            match len(answers):
                case 5:
                    response.ClearField("commit")
                case 6:
                    response.commit.begin = 10
                case 7:
                    response.ClearField("registers")
            peer.answer(began.call, response)

    async with ScriptedStream(script) as server, StreamTransport(server.address) as transport:
        way = await way_to_the_primary(transport)
        for is_good in (True, True, False, False, False, True):
            response = await respond_to(way)
            if is_good:
                assert not way.check(response)
            else:
                with pytest.raises(ValidationError):
                    way.check(response)


@in_loop
async def test_what_has_no_connection_is_not_sent_nor_counted_nor_prepared_twice():
    async def script(peer):
        await peer.greet()
        while True:
            began, content = await peer.whole_append()
            route = route_to(server.address)
            peer.answer(began.call, append_ok(end=len(content), route=route))

    def counted():
        return metrics.APPEND_BYTES.labels("a/journal")._value.get()

    async with ScriptedStream(script) as server, StreamTransport(server.address) as transport:
        way = await way_to_the_primary(transport)
        before, peers = counted(), len(server.peers)
        assert way.append(b"abc") is None
        assert counted() == before
        assert len(server.peers) == peers
        await asyncio.to_thread(way.prepare)
        await until(lambda: len(server.peers) == peers + 1)
        call = way.append(b"abc")
        assert counted() == before + 3
        assert await asyncio.to_thread(call.wait, WAIT_S)
        assert call.response().commit.end == 3
        assert len(server.peers) == peers + 1


@in_loop
async def test_there_is_no_way_while_its_broker_cannot_be_dialled(monkeypatch):
    monkeypatch.setattr(blocking, "REDIAL_AFTER_S", 0.1)
    is_well = True

    async def script(peer):
        if not is_well:
            return
        await peer.greet()
        while True:
            began, _ = await peer.whole_append()
            peer.answer(began.call, append_ok(route=route_to(server.address)))

    async with ScriptedStream(script) as server, StreamTransport(server.address) as transport:
        way = await way_to_the_primary(transport)
        is_well = False
        with pytest.raises(UnavailableError):
            await asyncio.to_thread(way.prepare)
        assert transport.direct("a/journal") is None
        await until(lambda: transport.direct("a/journal") is not None)
        assert transport.direct("a/journal") is way
        is_well = True
        assert not way.check(await respond_to(way))


@in_loop
async def test_a_transport_that_was_closed_has_no_ways():
    async def script(peer):
        await peer.greet()
        while True:
            began, _ = await peer.whole_append()
            peer.answer(began.call, append_ok(route=route_to(server.address)))

    async with ScriptedStream(script) as server:
        async with StreamTransport(server.address) as transport:
            way = await way_to_the_primary(transport)
            await respond_to(way)
        assert transport.direct("a/journal") is None
        with pytest.raises(ClosedError):
            way.append(b"x")
        with pytest.raises(ClosedError):
            await asyncio.to_thread(way.prepare)
