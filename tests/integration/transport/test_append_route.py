"""Routes of a journal's appends over the stream wire: broker, token and connection."""

from __future__ import annotations

import asyncio
import base64
import time

import pytest

from gazette_sdk.errors import CallError, ClosedError, UnavailableError, ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Capability, authority_for
from gazette_sdk.transport.stream import blocking
from gazette_sdk.transport.stream.wire import ChosenTransport, StreamTransport
from gazette_sdk.transport.wire import SERVICE, Target
from support.scripted_broker import append_ok, append_status, in_loop, route_to, until
from support.scripted_stream import ScriptedStream

WAIT_S = 10.0
JOURNAL = "a/journal"
PLAIN = pb.AppendRequest(journal=JOURNAL)
KEY = base64.b64encode(b"k" * 32).decode()
NOWHERE = "http://127.0.0.1:1"


def no_wake():
    raise AssertionError("it has no content that is leaving")


async def begun(route, content=b"content", request=PLAIN):
    """Send an append on the event loop; returns the future of its outcome."""
    outcome = asyncio.get_running_loop().create_future()
    if not route.try_begin(request, [content], outcome.set_result):
        await route.open(request)
        assert route.try_begin(request, [content], outcome.set_result)
    return outcome


async def route_to_the_primary(transport):
    """The route, once an append was answered by the service address."""
    route = transport.append_route(JOURNAL, no_wake)
    assert transport.router.prepare_append(PLAIN).to.peer == SERVICE
    assert (await (await begun(route))).status == pb.OK
    assert transport.router.prepare_append(PLAIN).to.peer != SERVICE
    return route


async def send_inline(route, content=b"x"):
    """Send an inline append, and wait for its response."""
    call = route.send_inline(content)
    if call is None:
        await asyncio.to_thread(route.prepare_inline)
        call = route.send_inline(content)
    assert await asyncio.to_thread(call.wait, WAIT_S)
    return call.response()


def answering(server_of, *, route=None):
    """A script that answers each append, and names a route; heads of calls are kept."""

    async def script(peer):
        await peer.greet()
        while True:
            began, content = await peer.whole_append()
            server = server_of()
            script.heads.append(began.head)
            response = append_ok(end=len(content), route=route or route_to(server.address))
            peer.answer(began.call, response)

    script.heads = []
    return script


# ------------------------------------------------------------------- prepare_append


def test_what_is_the_same_for_all_appends_of_a_route_is_prepared_once():
    transport = StreamTransport("http://localhost:1")
    first = transport.router.prepare_append(PLAIN)
    assert first.to.peer == SERVICE
    assert transport.router.prepare_append(PLAIN) is not first, "the primary is not known"
    for endpoint in ("http://one:1", "http://two:1"):
        transport.routes.update(JOURNAL, route_to(endpoint))
        append = transport.router.prepare_append(PLAIN)
        assert append.to.peer.endpoint == endpoint
        assert append.to.authorization is None
        assert append.encoded == PLAIN.SerializeToString()
        transport.routes.update(JOURNAL, route_to(endpoint))
        assert transport.router.prepare_append(PLAIN) is transport.router.prepare_append(PLAIN)
    transport.routes.invalidate(JOURNAL)
    assert transport.router.prepare_append(PLAIN).to.peer == SERVICE


def test_another_request_is_prepared_anew_and_its_repetition_is_not():
    transport = StreamTransport("http://localhost:1")
    transport.routes.update(JOURNAL, route_to("http://one:1"))
    plain = transport.router.prepare_append(PLAIN)
    fenced = pb.AppendRequest(journal=JOURNAL, offset=7)
    append = transport.router.prepare_append(fenced)
    assert append.request == fenced
    assert pb.AppendRequest.FromString(append.encoded) == fenced
    assert append.to.peer == plain.to.peer
    assert transport.router.prepare_append(fenced) is transport.router.prepare_append(fenced)
    fenced.offset = 8
    assert transport.router.prepare_append(fenced).request.offset == 8
    assert transport.router.prepare_append(PLAIN).encoded == plain.encoded
    with pytest.raises(ValidationError):
        transport.router.prepare_append(pb.AppendRequest(journal=JOURNAL, offset=-1))


def test_metadata_is_stripped_unless_the_broker_is_named():
    transport = StreamTransport("http://localhost:1")
    route = route_to("http://one:1")
    named = pb.AppendRequest(journal=f"{JOURNAL};meta")
    transport.routes.update(named.journal, route)
    for _ in range(2):
        append = transport.router.prepare_append(named)
        assert (append.request, append.encoded) == (PLAIN, PLAIN.SerializeToString())
        exact = transport.router.prepare_append(named, Target(route, route.members[0]))
        assert exact.request == named


def test_a_target_of_the_callers_passes_the_remembered_route():
    transport = StreamTransport("http://localhost:1")
    transport.routes.update(JOURNAL, route_to("http://one:1"))
    transport.router.prepare_append(PLAIN)
    append = transport.router.prepare_append(PLAIN, Target(route_to("http://two:1")))
    assert append.to.peer.endpoint == "http://two:1"
    assert transport.router.prepare_append(PLAIN).to.peer.endpoint == "http://one:1"


def test_each_append_has_a_token_of_its_own(monkeypatch):
    transport = StreamTransport("http://localhost:1", auth_keys=KEY)
    transport.routes.update(JOURNAL, route_to("http://one:1"))
    now = time.time()
    tokens = []
    for n in range(3):
        monkeypatch.setattr(time, "time", lambda n=n: now + 100 * n)
        append = transport.router.prepare_append(PLAIN)
        assert append.encoded == PLAIN.SerializeToString()
        claims = authority_for(KEY).verify(
            append.to.authorization, Capability.APPEND, now + 100 * n
        )
        assert claims.expires_at > now + 100 * n
        tokens.append(append.to.authorization)
    assert len(set(tokens)) == 3
    cached = transport.routes.get(JOURNAL)
    assert cached.append.to.authorization is None


# ----------------------------------------------------------------- appends of the loop


@in_loop
async def test_appends_follow_the_route_once_those_in_flight_are_answered():
    gate = asyncio.Event()
    calls = []

    def script_of(name):
        async def script(peer):
            await peer.greet()
            while True:
                began, content = await peer.whole_append()
                calls.append((name, content))
                if content == b"held":
                    await gate.wait()
                primary = second if content == b"moved" else first
                peer.answer(began.call, append_ok(route=route_to(primary.address)))

        return script

    async with (
        ScriptedStream(script_of("first")) as first,
        ScriptedStream(script_of("second")) as second,
        StreamTransport(first.address) as transport,
    ):
        route = await route_to_the_primary(transport)
        held = await begun(route, b"held")
        transport.routes.update(JOURNAL, route_to(second.address))
        assert not route.try_begin(PLAIN, [b"moved"], no_wake)
        gate.set()
        await held
        transport.routes.update(JOURNAL, route_to(second.address))
        await (await begun(route, b"moved"))
        await (await begun(route, b"more"))
        assert calls[1:] == [("first", b"held"), ("second", b"moved"), ("second", b"more")]


@in_loop
async def test_a_connection_that_was_opened_in_vain_is_returned_when_the_route_changes():
    script = answering(lambda: server)
    async with (
        ScriptedStream(script) as server,
        ScriptedStream(answering(lambda: other)) as other,
        StreamTransport(server.address) as transport,
    ):
        route = await route_to_the_primary(transport)
        await route.open(PLAIN)
        transport.routes.update(JOURNAL, route_to(other.address))
        assert (await (await begun(route))).status == pb.OK
        assert len(other.peers) == 1
        await route.open(PLAIN)
        route.give_up()
        pool = transport.wire.pools.here()
        assert pool.pipelines == 0
        assert all(connection.usable for connection in pool.connections())


@in_loop
async def test_appends_that_are_given_up_are_not_answered():
    async def script(peer):
        await peer.greet()
        await peer.hang_up()

    async with ScriptedStream(script) as server, StreamTransport(server.address) as transport:
        route = transport.append_route(JOURNAL, no_wake)
        outcomes = [await begun(route, b"%d" % n) for n in range(3)]
        route.give_up()
        await until(lambda: transport.wire.pools.here().pipelines == 0)
        assert not any(outcome.done() for outcome in outcomes)


@in_loop
async def test_a_broker_that_cannot_be_reached_is_forgotten():
    async with StreamTransport(NOWHERE, connect_timeout_s=0.1) as transport:
        transport.routes.update(JOURNAL, route_to(NOWHERE))
        route = transport.append_route(JOURNAL, no_wake)
        with pytest.raises(UnavailableError):
            await route.open(PLAIN)
        assert len(transport.routes) == 0
        with pytest.raises(UnavailableError, match="check that a broker runs at"):
            await route.open(PLAIN)


@in_loop
async def test_a_lost_answer_forgets_the_route():
    async def script(peer):
        await peer.greet()
        began, _ = await peer.whole_append()
        if len(server.peers) == 1:  # the others are those of the primary
            peer.answer(began.call, append_ok(route=route_to(server.address)))
            await peer.hang_up()

    async with ScriptedStream(script) as server, StreamTransport(server.address) as transport:
        route = await route_to_the_primary(transport)
        outcome = await (await begun(route))
        assert isinstance(outcome, UnavailableError)
        assert len(transport.routes) == 0


BREAKS = {
    "no commit": lambda response: response.ClearField("commit"),
    "a commit that ends before it begins": lambda response: setattr(response.commit, "begin", 10),
    "no registers": lambda response: response.ClearField("registers"),
}


@pytest.mark.parametrize("breaks", BREAKS.values(), ids=BREAKS)
@pytest.mark.parametrize("is_inline", [False, True])
@in_loop
async def test_a_response_that_breaks_a_rule_is_refused_and_its_route_is_not_learned(
    breaks, is_inline
):
    answers = []

    async def script(peer):
        await peer.greet()
        while True:
            began, _ = await peer.whole_append()
            answers.append(append_ok(begin=5, end=9, route=route_to(server.address)))
            if len(answers) == 2:
                answers[-1].header.route.CopyFrom(route_to(NOWHERE))
                breaks(answers[-1])
            peer.answer(began.call, answers[-1])

    async with ScriptedStream(script) as server, StreamTransport(server.address) as transport:
        route = await route_to_the_primary(transport)
        if is_inline:
            response = await send_inline(route)
            with pytest.raises(ValidationError):
                route.accept(response)
            route.accept(await send_inline(route))
        else:
            assert isinstance(await (await begun(route)), ValidationError)
            assert (await (await begun(route))).status == pb.OK
        assert transport.routes.route(JOURNAL) == route_to(server.address)


# -------------------------------------------------------------------- inline appends


@in_loop
async def test_inline_appends_are_signed_and_follow_the_route():
    script = answering(lambda: server)
    async with (
        ScriptedStream(script) as server,
        StreamTransport(server.address, auth_keys=KEY) as transport,
    ):
        route = await route_to_the_primary(transport)
        for _ in range(2):
            route.accept(await send_inline(route))
        assert len(script.heads) == 3
        for head in script.heads:
            token = dict(head.metadata)["authorization"]
            authority_for(KEY).verify(token, Capability.APPEND, time.time())
        moved = append_ok(route=route_to(NOWHERE))
        route.accept(moved)
        assert route.send_inline(b"x") is None, "it has no connection to the other broker"
        route.failed(CallError("something"))
        assert len(transport.routes) == 1
        route.failed(UnavailableError("it is gone"))
        assert len(transport.routes) == 0
        assert route.send_inline(b"x") is None
        await asyncio.to_thread(route.prepare_inline)  # no effect: the primary is not known


@in_loop
async def test_a_response_without_a_route_leaves_inline_appends_to_the_loop():
    script = answering(lambda: server)
    async with ScriptedStream(script) as server, StreamTransport(server.address) as transport:
        route = await route_to_the_primary(transport)
        response = await send_inline(route)
        route.accept(response)
        route.accept(append_status(pb.NOT_JOURNAL_PRIMARY_BROKER))
        assert route.send_inline(b"x") is None


@pytest.mark.parametrize("kind", [StreamTransport, ChosenTransport])
@in_loop
async def test_nothing_is_sent_inline_before_a_connection_was_prepared(kind):
    script = answering(lambda: server)
    async with ScriptedStream(script) as server, kind(server.address) as transport:
        route = await route_to_the_primary(transport)
        peers = len(server.peers)
        assert route.send_inline(b"abc") is None
        assert len(server.peers) == peers
        await asyncio.to_thread(route.prepare_inline)
        await until(lambda: len(server.peers) == peers + 1)
        call = route.send_inline(b"abc")
        assert await asyncio.to_thread(call.wait, WAIT_S)
        assert call.response().commit.end == 3
        assert len(server.peers) == peers + 1


@in_loop
async def test_nothing_is_sent_inline_where_no_routes_are_remembered():
    script = answering(lambda: server)
    async with (
        ScriptedStream(script) as server,
        StreamTransport(server.address, cache_size=0) as transport,
    ):
        route = transport.append_route(JOURNAL, no_wake)
        assert (await (await begun(route))).status == pb.OK
        await asyncio.to_thread(route.prepare_inline)
        assert route.send_inline(b"x") is None
        assert len(server.peers) == 1


@in_loop
async def test_a_broker_that_cannot_be_dialled_is_left_to_the_loop_for_a_while(monkeypatch):
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
        route = await route_to_the_primary(transport)
        is_well = False
        for _ in range(2):
            with pytest.raises(UnavailableError):
                await asyncio.to_thread(route.prepare_inline)
        assert len(server.peers) == 2, "the second attempt does not dial"
        assert route.send_inline(b"x") is None
        is_well = True
        assert (await (await begun(route))).status == pb.OK
        await asyncio.sleep(0.15)
        route.accept(await send_inline(route))


@in_loop
async def test_a_transport_that_was_closed_appends_nothing():
    script = answering(lambda: server)
    async with ScriptedStream(script) as server:
        async with StreamTransport(server.address) as transport:
            route = await route_to_the_primary(transport)
            await send_inline(route)
        with pytest.raises(ClosedError):
            route.send_inline(b"x")
        with pytest.raises(ClosedError):
            await asyncio.to_thread(route.prepare_inline)
        with pytest.raises(ClosedError):
            await begun(route)
