"""What holds over every wire, against a real server that answers as each test says."""

from __future__ import annotations

import asyncio
import contextlib
import time

import grpc
import pytest

from gazette_sdk.errors import (
    CallCancelledError,
    CallError,
    ClosedError,
    DeadlineExceededError,
    UnauthenticatedError,
    UnavailableError,
    ValidationError,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Authority, Capability
from gazette_sdk.transport.router import CHUNK_BYTES_KEY
from gazette_sdk.transport.wire import Target
from support.scripted_broker import (
    RefusalError,
    append_ok,
    append_status,
    drain,
    header,
    in_loop,
    read_metadata,
    route_to,
    until,
)
from support.wires import CHOSEN, NETWORK, WAYS, over

KEYS = "c2VjcmV0c2VjcmV0"


everywhere = over(*WAYS, *CHOSEN)

networked = over(*NETWORK, *CHOSEN)
"""Within a process there is no route, nothing to connect to, and nobody whose messages were to be
checked."""


async def items(*contents, journal="a/journal", commit=True):
    yield pb.AppendRequest(journal=journal)
    for content in contents:
        yield content
    if commit:
        yield pb.AppendRequest()


async def read_all(transport, target=None, **request):
    request = pb.ReadRequest(**({"journal": "a/journal"} | request))
    return [item async for item in transport.read(request, target or Target())]


# --------------------------------------------------------------------- append


@everywhere
@in_loop
async def test_an_early_refusal_is_reported_as_it_is_every_time(wire):
    """grpcio tends to report `Internal error from Core` instead."""
    chunk = b"x" * (128 << 10)
    async with wire.served() as (broker, transport):

        async def on_append(requests):
            await anext(requests)
            raise RefusalError(grpc.StatusCode.UNAUTHENTICATED, "no token")

        broker.on_append = on_append
        for _ in range(50):
            with pytest.raises(UnauthenticatedError, match="no token"):
                await transport.append(items(*[chunk] * 20))


@everywhere
@in_loop
async def test_an_early_response_is_returned_every_time(wire):
    chunk = b"x" * (128 << 10)
    early = append_status(pb.REGISTER_MISMATCH)
    async with wire.served() as (broker, transport):

        async def on_append(requests):
            await anext(requests)
            return early

        broker.on_append = on_append
        for _ in range(50):
            assert await transport.append(items(*[chunk] * 20)) == early


@everywhere
@in_loop
async def test_a_cancelled_append_is_cancelled_at_the_broker(wire):
    began, ended = asyncio.Event(), asyncio.Event()
    async with wire.served() as (broker, transport):

        async def on_append(requests):
            await anext(requests)
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        broker.on_append = on_append
        append = asyncio.create_task(transport.append(items(b"x")))
        await began.wait()
        append.cancel()
        with pytest.raises(asyncio.CancelledError):
            await append
        await ended.wait()


@networked
@in_loop
async def test_metadata_of_a_name_is_stripped_unless_the_broker_is_named(wire):
    async with wire.served() as (broker, transport):

        async def on_append(requests):
            await drain(requests)
            return append_ok()

        broker.on_append = on_append
        await transport.append(items(journal="a/journal;with/meta"))
        assert broker.received[0].journal == "a/journal"
        route = route_to(broker.address)
        await transport.append(
            items(journal="a/journal;with/meta"), Target(route, route.members[0])
        )
        assert broker.received[2].journal == "a/journal;with/meta"


@networked
@in_loop
async def test_an_invalid_response_is_an_error_and_caches_no_route(wire):
    async with wire.served() as (broker, transport):
        response = append_ok(route=route_to(broker.address))
        response.commit.compression_codec = pb.INVALID

        async def on_append(requests):
            await drain(requests)
            return response

        broker.on_append = on_append
        with pytest.raises(ValidationError):
            await transport.append(items(b"x"))
        assert len(transport.routes) == 0


@networked
@in_loop
async def test_an_invalid_opening_is_never_sent(wire):
    async with wire.served() as (broker, transport):
        with pytest.raises(ValidationError):
            await transport.append(items(journal="not//clean"))
        assert broker.received == []


# --------------------------------------------------------------------- routes


@networked
@in_loop
async def test_appends_go_to_the_primary_once_the_route_is_known(wire):
    async with wire.broker() as replica, wire.broker() as primary:
        route = route_to(replica.address, primary.address, primary=1)

        async def on_append(requests):
            await drain(requests)
            return append_status(pb.NOT_JOURNAL_PRIMARY_BROKER, route)

        replica.on_append = primary.on_append = on_append
        async with wire.transport(replica.address) as transport:
            await transport.append(items())
            assert transport.routes.route("a/journal") == route
            await transport.append(items())
        assert [len(replica.received), len(primary.received)] == [2, 2]


@networked
@in_loop
async def test_appends_follow_their_journal_to_another_primary(wire):
    async with wire.broker() as first, wire.broker() as second:
        routes = [
            route_to(first.address, second.address, primary=primary) for primary in (0, 0, 1, 1, 0)
        ]

        async def on_append(requests):
            await drain(requests)
            return append_ok(route=routes.pop(0))

        first.on_append = second.on_append = on_append
        async with wire.transport(first.address) as transport:
            for _ in range(5):
                await transport.append(items())
        assert [len(first.received), len(second.received)] == [6, 4]


@networked
@in_loop
async def test_an_exact_broker_is_kept_to_also_where_the_primary_is_known(wire):
    async with wire.broker() as primary, wire.broker() as other:
        route = route_to(primary.address, other.address)

        async def on_append(requests):
            await drain(requests)
            return append_ok(route=route)

        primary.on_append = other.on_append = on_append
        async with wire.transport(primary.address) as transport:
            await transport.append(items())
            await transport.append(items(), Target(route))
            await transport.append(items(), Target(route, route.members[1]))
        assert [len(primary.received), len(other.received)] == [4, 2]


@networked
@in_loop
async def test_reads_prefer_a_broker_of_their_zone(wire):
    async with wire.broker() as far, wire.broker() as near:
        route = route_to(far.address, near.address)
        route.members[1].zone = "zone-b"
        near.on_read = far.on_read = lambda _: [read_metadata(0, 0, 3)]
        async with wire.transport(far.address, zone="zone-b") as transport:
            await read_all(transport, Target(route))
            await read_all(transport, Target(route))
        assert [len(far.received), len(near.received)] == [0, 2]


@networked
@in_loop
async def test_only_unavailable_forgets_a_route(wire):
    async with wire.served() as (broker, transport):
        route = route_to(broker.address)
        transport.routes.update("a/journal", route)

        async def on_append(requests):
            await drain(requests)
            raise RefusalError(code, "scripted")

        broker.on_append = on_append
        code = grpc.StatusCode.UNKNOWN
        with pytest.raises(CallError):
            await transport.append(items())
        assert transport.routes.route("a/journal") == route
        code = grpc.StatusCode.UNAVAILABLE
        with pytest.raises(UnavailableError):
            await transport.append(items())
        assert len(transport.routes) == 0


@networked
@in_loop
async def test_a_dead_member_fails_and_the_next_call_goes_to_the_service_address(wire):
    async with wire.broker() as gone:
        pass
    async with wire.served() as (broker, transport):

        async def on_append(requests):
            await drain(requests)
            return append_ok()

        broker.on_append = on_append
        transport.routes.update("a/journal", route_to(gone.address))
        with pytest.raises(UnavailableError, match=f"zone-a/broker-0.*{gone.address}"):
            await transport.append(items())
        await transport.append(items())
        assert len(broker.received) == 2


@networked
@in_loop
async def test_a_member_that_comes_back_is_used_again(wire):
    async with wire.broker() as first:
        address, bind = first.address, f"127.0.0.1:{first.port}"
    route = route_to(address)
    async with wire.transport(address, reconnect_backoff_max_s=0.2) as transport:
        with pytest.raises(UnavailableError):
            await read_all(transport, Target(route))
        async with wire.broker(bind) as again:
            again.on_read = lambda _: [read_metadata(0, 0, 3)]
            while True:
                with contextlib.suppress(UnavailableError):
                    assert len(await read_all(transport, Target(route))) == 1
                    break
                await asyncio.sleep(0.02)


# ---------------------------------------------------------------------- reads


@everywhere
@in_loop
async def test_content_comes_as_bytes_and_metadata_as_messages(wire):
    first = read_metadata(5, 0, 20)
    second = read_metadata(15, 10, 20, first=False)
    async with wire.served() as (broker, transport):
        broker.on_read = lambda _: [
            first,
            pb.ReadResponse(offset=5, content=b"hello"),
            pb.ReadResponse(offset=10, content=b"world"),
            second,
            pb.ReadResponse(offset=15, content=b"again"),
        ]
        assert await read_all(transport, offset=5) == [first, b"hello", b"world", second, b"again"]
        assert int(broker.metadata[CHUNK_BYTES_KEY]) >= 128 << 10
        assert broker.received == [pb.ReadRequest(journal="a/journal", offset=5)]


@networked
@in_loop
async def test_the_first_header_of_a_read_caches_the_route(wire):
    async with wire.served() as (broker, transport):
        metadata = read_metadata(0, 0, 3)
        metadata.header.route.CopyFrom(route_to(broker.address))
        broker.on_read = lambda _: [metadata]
        await read_all(transport)
        assert transport.routes.route("a/journal") == metadata.header.route


@everywhere
@in_loop
async def test_a_read_that_breaks_gives_its_content_then_the_error(wire):
    async with wire.served() as (broker, transport):
        broker.on_read = lambda _: [
            read_metadata(0, 0, 9),
            pb.ReadResponse(content=b"abc"),
            RefusalError(grpc.StatusCode.DATA_LOSS, "disk"),
        ]
        reading = transport.read(pb.ReadRequest(journal="a/journal"))
        assert await anext(reading) == read_metadata(0, 0, 9)
        assert await anext(reading) == b"abc"
        with pytest.raises(CallError, match="disk") as caught:
            await anext(reading)
        assert caught.value.code == "DATA_LOSS"


@everywhere
@in_loop
async def test_closing_the_iterator_ends_the_call_at_the_broker(wire):
    ended = asyncio.Event()
    async with wire.served() as (broker, transport):

        async def on_read(request):
            try:
                yield read_metadata(0, 0, 9)
                await asyncio.Event().wait()
            finally:
                ended.set()

        broker.on_read = on_read
        reading = transport.read(pb.ReadRequest(journal="a/journal", block=True))
        await anext(reading)
        await reading.aclose()
        await ended.wait()


@everywhere
@in_loop
async def test_sixty_four_reads_share_a_connection_and_may_be_drained_in_any_order(wire):
    async with wire.served() as (broker, transport):
        content = b"x" * (256 << 10)
        broker.on_read = lambda _: [
            read_metadata(0, 0, 1 << 30),
            *(pb.ReadResponse(offset=i * len(content), content=content) for i in range(8)),
        ]
        readings = [transport.read(pb.ReadRequest(journal=f"a/journal-{i}")) for i in range(64)]
        for reading in readings:
            await anext(reading)
        for reading in reversed(readings):
            assert sum(len(item) for item in [item async for item in reading]) == 8 * len(content)


# ----------------------------------------------------------------- other calls


@everywhere
@in_loop
async def test_unary_calls_return_responses_of_any_status(wire):
    async with wire.served() as (broker, transport):
        broker.on_apply = lambda _: pb.ApplyResponse(
            status=pb.ETCD_TRANSACTION_FAILED, header=header()
        )
        broker.on_fragments = lambda _: pb.FragmentsResponse(header=header())
        broker.on_health = lambda _: pb.FragmentStoreHealthResponse(
            header=header(), store_health_error="x"
        )
        applied = await transport.apply(pb.ApplyRequest())
        assert applied.status == pb.ETCD_TRANSACTION_FAILED
        request = pb.FragmentsRequest(journal="a/journal")
        assert (await transport.list_fragments(request)).header == header()
        health = pb.FragmentStoreHealthRequest(fragment_store="s3://bucket/")
        assert (await transport.fragment_store_health(health)).store_health_error == "x"
        assert broker.received == [pb.ApplyRequest(), request, health]


@networked
@in_loop
async def test_an_invalid_unary_response_is_a_validation_error(wire):
    async with wire.served() as (broker, transport):
        broker.on_apply = lambda _: pb.ApplyResponse()
        with pytest.raises(ValidationError):
            await transport.apply(pb.ApplyRequest())


@networked
@in_loop
async def test_a_listing_caches_the_route_of_each_journal(wire):
    async with wire.served() as (broker, transport):

        def listed(name):
            return pb.ListResponse.Journal(
                spec=pb.JournalSpec(name=name), mod_revision=1, route=route_to(broker.address)
            )

        first = pb.ListResponse(header=header())
        rest = pb.ListResponse(journals=[listed("a/one"), listed("a/two")])
        broker.on_list = lambda _: [first, rest]
        got = [response async for response in transport.list(pb.ListRequest())]
        assert got == [first, rest]
        assert len(transport.routes) == 2


# ------------------------------------------------------------- errors and bounds


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (grpc.StatusCode.UNAVAILABLE, UnavailableError),
        (grpc.StatusCode.UNAUTHENTICATED, UnauthenticatedError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceededError),
        (grpc.StatusCode.CANCELLED, CallCancelledError),
        (grpc.StatusCode.INTERNAL, CallError),
    ],
)
@everywhere
@in_loop
async def test_grpc_codes_become_errors(wire, code, error):
    async with wire.served() as (broker, transport):

        def refuse(request):
            raise RefusalError(code, "because")

        broker.on_apply = refuse
        with pytest.raises(error, match="because") as caught:
            await transport.apply(pb.ApplyRequest())
        assert caught.value.code == code.name


@networked
@in_loop
async def test_an_unreachable_address_is_named_with_its_remedy_within_the_bound(wire):
    async with wire.broker() as broker:
        pass
    async with wire.transport(broker.address, connect_timeout_s=0.3) as transport:
        begun = time.monotonic()
        with pytest.raises(UnavailableError, match=f"{broker.address}.*GAZETTE_ADDRESS"):
            await transport.apply(pb.ApplyRequest())
        with pytest.raises(UnavailableError, match="Connection refused"):
            await read_all(transport)
        assert time.monotonic() - begun < 5


@everywhere
@in_loop
async def test_a_callers_timeout_surfaces_as_such(wire):
    async with wire.served() as (broker, transport):

        async def on_apply(request):
            await asyncio.Event().wait()

        broker.on_apply = on_apply
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await transport.apply(pb.ApplyRequest())


@everywhere
@in_loop
async def test_closing_ends_calls_under_way(wire):
    began = asyncio.Event()
    async with wire.served() as (broker, transport):

        async def on_apply(request):
            began.set()
            await asyncio.Event().wait()

        async def on_read(request):
            yield read_metadata(0, 0, 9)
            await asyncio.Event().wait()

        async def on_append(requests):
            await anext(requests)
            await asyncio.Event().wait()

        broker.on_apply, broker.on_read, broker.on_append = on_apply, on_read, on_append
        reading = transport.read(pb.ReadRequest(journal="a/journal", block=True))
        await anext(reading)
        calls = [
            asyncio.create_task(transport.apply(pb.ApplyRequest())),
            asyncio.create_task(transport.append(items(b"x"))),
            asyncio.create_task(anext(reading)),
        ]
        await began.wait()
        await transport.aclose()
        for call in calls:
            with pytest.raises(ClosedError):
                await call
        with pytest.raises(ClosedError, match="connect again"):
            await transport.apply(pb.ApplyRequest())
        await transport.aclose()


@everywhere
@in_loop
async def test_closing_ends_appends_at_every_step_of_their_begin(wire):
    for steps in range(40):  # of the event loop, from the begin of the append to the close
        async with wire.served() as (broker, transport):

            async def on_append(requests):
                await anext(requests)
                await asyncio.Event().wait()

            broker.on_append = on_append
            append = asyncio.create_task(transport.append(items(b"x")))
            for _ in range(steps):
                await asyncio.sleep(0)
            await transport.aclose()
            async with asyncio.timeout(30):
                with pytest.raises(ClosedError):
                    await append


# -------------------------------------------------------------- authentication


@everywhere
@in_loop
async def test_each_call_carries_a_token_for_just_that_call(wire):
    async with wire.served(auth_keys=KEYS) as (broker, transport):
        broker.on_read = lambda _: [read_metadata(0, 0, 3)]
        broker.on_apply = lambda _: pb.ApplyResponse(header=header())
        await read_all(transport, journal="a/journal;meta")
        claims = Authority(KEYS).verify(
            broker.metadata["authorization"], Capability.READ, time.time()
        )
        assert claims.capability == Capability.READ
        assert [(label.name, label.value) for label in claims.selector.include.labels] == [
            ("name", "a/journal")
        ]
        await transport.apply(pb.ApplyRequest())
        Authority(KEYS).verify(broker.metadata["authorization"], Capability.APPLY, time.time())


@everywhere
@in_loop
async def test_a_given_token_is_sent_unless_there_are_keys(wire):
    async with wire.served(auth_token="a-token") as (broker, transport):
        broker.on_apply = lambda _: pb.ApplyResponse(header=header())
        await transport.apply(pb.ApplyRequest())
        assert broker.metadata["authorization"] == "Bearer a-token"
        async with wire.transport(broker.address, auth_keys=KEYS, auth_token="a-token") as keyed:
            await keyed.apply(pb.ApplyRequest())
        assert broker.metadata["authorization"] != "Bearer a-token"


@everywhere
@in_loop
async def test_calls_that_are_not_answered_hold_up_no_others(wire):
    """Such as appends to journals whose replicas are away."""
    release = asyncio.Event()
    async with wire.served() as (broker, transport):

        async def on_append(requests):
            opening = await anext(requests)
            await drain(requests)
            if opening.journal == "a/journal":
                await release.wait()
            return append_ok()

        broker.on_append = on_append
        hanging = [asyncio.create_task(transport.append(items(b"x"))) for _ in range(40)]
        await until(lambda: len(broker.received) >= 3 * 8)
        await asyncio.sleep(0.1)  # until it is known that they are not answered
        async with asyncio.timeout(5):
            await asyncio.gather(
                *(transport.append(items(b"x", journal="another/journal")) for _ in range(30))
            )
        release.set()
        await asyncio.gather(*hanging)


# ------------------------------------------------------------------ mirrors of Etcd that lag


async def _append(transport):
    return (await transport.append(items(b"x"))).status


async def _read(transport):
    return (await read_all(transport))[-1].status


async def _list_fragments(transport):
    return (await transport.list_fragments(pb.FragmentsRequest(journal="a/journal"))).status


@networked
@pytest.mark.parametrize("call", [_append, _read, _list_fragments])
@in_loop
async def test_a_journal_of_which_a_broker_does_not_know_yet_is_no_missing_one(wire, call):
    async def on_append(requests):
        await drain(requests)
        return pb.AppendResponse(status=pb.JOURNAL_NOT_FOUND, header=header(revision=lagging))

    async with wire.served() as (broker, transport):
        broker.on_apply = lambda _: pb.ApplyResponse(header=header(revision=9))
        broker.on_append = on_append
        broker.on_read = lambda _: [
            pb.ReadResponse(status=pb.JOURNAL_NOT_FOUND, header=header(revision=lagging))
        ]
        broker.on_fragments = lambda _: pb.FragmentsResponse(
            status=pb.JOURNAL_NOT_FOUND, header=header(revision=lagging)
        )
        lagging = 8
        assert await call(transport) == pb.JOURNAL_NOT_FOUND
        await transport.apply(pb.ApplyRequest())
        assert await call(transport) == pb.NO_JOURNAL_PRIMARY_BROKER
        lagging = 9
        assert await call(transport) == pb.JOURNAL_NOT_FOUND
