"""GrpcTransport against a real gRPC server that answers as each test says."""

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
from gazette_sdk.transport import channels
from gazette_sdk.transport.base import Target
from gazette_sdk.transport.dispatcher import SERVICE, Health, candidates
from gazette_sdk.transport.grpc import GrpcTransport
from gazette_sdk.transport.routed import CHUNK_BYTES_KEY
from support.scripted_broker import (
    RefusalError,
    ScriptedBroker,
    append_ok,
    append_status,
    drain,
    header,
    in_loop,
    read_metadata,
    route_to,
    until,
)
from support.tcp_proxy import TcpProxy

KEYS = "c2VjcmV0c2VjcmV0"


@contextlib.asynccontextmanager
async def served(**options):
    async with ScriptedBroker() as broker, GrpcTransport(broker.address, **options) as transport:
        yield broker, transport


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


@in_loop
async def test_an_append_sends_its_frames_and_half_closes():
    async with served() as (broker, transport):

        async def on_append(requests):
            await drain(requests)
            return append_ok(0, 6)

        broker.on_append = on_append
        response = await transport.append(items(b"foo", b"bar"))
        assert response == append_ok(0, 6)
        assert broker.received == [
            pb.AppendRequest(journal="a/journal"),
            pb.AppendRequest(content=b"foo"),
            pb.AppendRequest(content=b"bar"),
            pb.AppendRequest(),
        ]
        assert broker.half_closes == 1


@in_loop
async def test_an_error_of_the_content_rolls_back_by_a_half_close_without_commit():
    async with served() as (broker, transport):

        async def on_append(requests):
            received = await drain(requests)
            assert received[-1] != pb.AppendRequest()
            raise RefusalError(grpc.StatusCode.UNKNOWN, "append ended without commit")

        async def failing():
            yield pb.AppendRequest(journal="a/journal")
            yield b"con"
            raise ZeroDivisionError("the source")

        broker.on_append = on_append
        with pytest.raises(ZeroDivisionError, match="the source"):
            await transport.append(failing())
        assert broker.received[1:] == [pb.AppendRequest(content=b"con")]
        assert broker.half_closes == 1


@in_loop
async def test_an_append_that_ends_without_commit_reports_what_the_broker_says():
    async with served() as (broker, transport):

        async def on_append(requests):
            await drain(requests)
            raise RefusalError(grpc.StatusCode.UNKNOWN, "append ended without commit")

        broker.on_append = on_append
        with pytest.raises(CallError, match="append ended without commit") as caught:
            await transport.append(items(b"x", commit=False))
        assert caught.value.code == "UNKNOWN"


@in_loop
async def test_an_early_refusal_is_reported_as_it_is_every_time():
    """grpcio tends to report `Internal error from Core` instead."""
    chunk = b"x" * (128 << 10)
    async with served() as (broker, transport):

        async def on_append(requests):
            await anext(requests)
            raise RefusalError(grpc.StatusCode.UNAUTHENTICATED, "no token")

        broker.on_append = on_append
        for _ in range(150):
            with pytest.raises(UnauthenticatedError, match="no token"):
                await transport.append(items(*[chunk] * 20))


@in_loop
async def test_an_early_response_is_returned_every_time():
    chunk = b"x" * (128 << 10)
    early = append_status(pb.REGISTER_MISMATCH)
    async with served() as (broker, transport):

        async def on_append(requests):
            await anext(requests)
            return early

        broker.on_append = on_append
        for _ in range(150):
            assert await transport.append(items(*[chunk] * 20)) == early


@in_loop
async def test_a_cancelled_append_is_cancelled_at_the_broker():
    began, ended = asyncio.Event(), asyncio.Event()
    async with served() as (broker, transport):

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


@in_loop
async def test_metadata_of_a_name_is_stripped_unless_the_broker_is_named():
    async with served() as (broker, transport):

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


@in_loop
async def test_an_invalid_response_is_an_error_and_caches_no_route():
    async with served() as (broker, transport):
        response = append_ok(route=route_to(broker.address))
        response.commit.compression_codec = pb.INVALID

        async def on_append(requests):
            await drain(requests)
            return response

        broker.on_append = on_append
        with pytest.raises(ValidationError):
            await transport.append(items(b"x"))
        assert len(transport.routes) == 0


@in_loop
async def test_an_invalid_opening_is_never_sent():
    async with served() as (broker, transport):
        with pytest.raises(ValidationError):
            await transport.append(items(journal="not//clean"))
        assert broker.received == []


# --------------------------------------------------------------------- routes


@in_loop
async def test_appends_go_to_the_primary_once_the_route_is_known():
    async with ScriptedBroker() as replica, ScriptedBroker() as primary:
        route = route_to(replica.address, primary.address, primary=1)

        async def on_append(requests):
            await drain(requests)
            return append_status(pb.NOT_JOURNAL_PRIMARY_BROKER, route)

        replica.on_append = primary.on_append = on_append
        async with GrpcTransport(replica.address) as transport:
            await transport.append(items())
            assert transport.routes.route("a/journal") == route
            await transport.append(items())
        assert [len(replica.received), len(primary.received)] == [2, 2]


@in_loop
async def test_reads_prefer_a_broker_of_their_zone():
    async with ScriptedBroker() as far, ScriptedBroker() as near:
        route = route_to(far.address, near.address)
        route.members[1].zone = "zone-b"
        near.on_read = far.on_read = lambda _: [read_metadata(0, 0, 3)]
        async with GrpcTransport(far.address, zone="zone-b") as transport:
            await read_all(transport, Target(route))
            await read_all(transport, Target(route))
        assert [len(far.received), len(near.received)] == [0, 2]


@in_loop
async def test_only_unavailable_forgets_a_route():
    async with served() as (broker, transport):
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


@in_loop
async def test_a_dead_member_fails_and_the_next_call_goes_to_the_service_address():
    async with ScriptedBroker() as gone:
        pass
    async with served() as (broker, transport):

        async def on_append(requests):
            await drain(requests)
            return append_ok()

        broker.on_append = on_append
        transport.routes.update("a/journal", route_to(gone.address))
        with pytest.raises(UnavailableError, match=f"zone-a/broker-0.*{gone.address}"):
            await transport.append(items())
        await transport.append(items())
        assert len(broker.received) == 2


@in_loop
async def test_a_member_that_comes_back_is_used_again():
    async with ScriptedBroker() as first:
        address, bind = first.address, f"127.0.0.1:{first.port}"
    route = route_to(address)
    async with GrpcTransport(address, reconnect_backoff_max_s=0.2) as transport:
        with pytest.raises(UnavailableError):
            await read_all(transport, Target(route))
        async with ScriptedBroker(bind) as again:
            again.on_read = lambda _: [read_metadata(0, 0, 3)]
            while True:
                with contextlib.suppress(UnavailableError):
                    assert len(await read_all(transport, Target(route))) == 1
                    break
                await asyncio.sleep(0.02)


# ---------------------------------------------------------------------- reads


@in_loop
async def test_content_comes_as_bytes_and_metadata_as_messages():
    first = read_metadata(5, 0, 20)
    second = read_metadata(15, 10, 20, first=False)
    async with served() as (broker, transport):
        broker.on_read = lambda _: [
            first,
            pb.ReadResponse(offset=5, content=b"hello"),
            pb.ReadResponse(offset=10, content=b"world"),
            second,
            pb.ReadResponse(offset=15, content=b"again"),
        ]
        assert await read_all(transport, offset=5) == [first, b"hello", b"world", second, b"again"]
        assert broker.metadata[CHUNK_BYTES_KEY] == str(512 << 10)
        assert broker.received == [pb.ReadRequest(journal="a/journal", offset=5)]


@in_loop
async def test_content_that_does_not_continue_comes_with_its_offset():
    async with served() as (broker, transport):
        broker.on_read = lambda _: [
            pb.ReadResponse(offset=5, content=b"hello"),
            pb.ReadResponse(offset=50, content=b"world"),
        ]
        assert await read_all(transport, offset=5) == [
            pb.ReadResponse(offset=5, content=b"hello"),
            pb.ReadResponse(offset=50, content=b"world"),
        ]


@in_loop
async def test_the_first_header_of_a_read_caches_the_route():
    async with served() as (broker, transport):
        metadata = read_metadata(0, 0, 3)
        metadata.header.route.CopyFrom(route_to(broker.address))
        broker.on_read = lambda _: [metadata]
        await read_all(transport)
        assert transport.routes.route("a/journal") == metadata.header.route


@in_loop
async def test_a_read_that_breaks_gives_its_content_then_the_error():
    async with served() as (broker, transport):
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


@in_loop
async def test_closing_the_iterator_ends_the_call_at_the_broker():
    ended = asyncio.Event()
    async with served() as (broker, transport):

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


@in_loop
async def test_messages_above_four_mebibytes_are_received():
    content = b"x" * (5 << 20)
    async with served() as (broker, transport):
        broker.on_read = lambda _: [read_metadata(0, 0, 6 << 20), pb.ReadResponse(content=content)]
        assert (await read_all(transport))[1] == content


@in_loop
async def test_sixty_four_reads_share_a_connection_and_may_be_drained_in_any_order():
    async with served() as (broker, transport):
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


@in_loop
async def test_unary_calls_return_responses_of_any_status():
    async with served() as (broker, transport):
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


@in_loop
async def test_an_invalid_unary_response_is_a_validation_error():
    async with served() as (broker, transport):
        broker.on_apply = lambda _: pb.ApplyResponse()
        with pytest.raises(ValidationError):
            await transport.apply(pb.ApplyRequest())


@in_loop
async def test_a_listing_caches_the_route_of_each_journal():
    async with served() as (broker, transport):

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


@in_loop
async def test_replication_streams_both_ways():
    proposal = pb.ReplicateRequest(
        header=header(),
        proposal=pb.Fragment(journal="a/journal", compression_codec=pb.NONE),
        acknowledge=True,
    )
    async with served() as (broker, transport):

        async def on_replicate(requests):
            async for request in requests:
                if request.acknowledge:
                    yield pb.ReplicateResponse()

        broker.on_replicate = on_replicate
        queue: asyncio.Queue[pb.ReplicateRequest | None] = asyncio.Queue()

        async def requests():
            while (request := await queue.get()) is not None:
                yield request

        route = route_to(broker.address)
        responses = transport.replicate(requests(), Target(route, route.members[0]))
        for _ in range(3):
            queue.put_nowait(proposal)
            assert await anext(responses) == pb.ReplicateResponse()
        queue.put_nowait(None)
        assert await anext(responses, None) is None
        assert broker.half_closes == 1


@in_loop
async def test_an_error_of_replicated_requests_is_raised_to_the_one_who_reads():
    async with served() as (broker, transport):

        async def on_replicate(requests):
            async for _ in requests:
                yield pb.ReplicateResponse()

        async def failing():
            yield pb.ReplicateRequest(acknowledge=True)
            raise ZeroDivisionError("the source")

        broker.on_replicate = on_replicate
        with pytest.raises(ZeroDivisionError):
            async for _ in transport.replicate(failing(), Target()):
                pass


@in_loop
async def test_an_early_refusal_of_replication_is_reported_as_it_is():
    async with served() as (broker, transport):

        async def on_replicate(requests):
            await anext(requests)
            raise RefusalError(grpc.StatusCode.UNAUTHENTICATED, "no token")
            yield  # pragma: no cover - makes it a generator

        async def requests():
            for _ in range(20):
                yield pb.ReplicateRequest(content=b"x" * (128 << 10), content_delta=1)

        broker.on_replicate = on_replicate
        for _ in range(50):
            with pytest.raises(UnauthenticatedError, match="no token"):
                async for _ in transport.replicate(requests(), Target()):
                    pass


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
@in_loop
async def test_grpc_codes_become_errors(code, error):
    async with served() as (broker, transport):

        def refuse(request):
            raise RefusalError(code, "because")

        broker.on_apply = refuse
        with pytest.raises(error, match="because") as caught:
            await transport.apply(pb.ApplyRequest())
        assert caught.value.code == code.name


@in_loop
async def test_an_unreachable_address_is_named_with_its_remedy_within_the_bound():
    async with ScriptedBroker() as broker:
        pass
    async with GrpcTransport(broker.address, connect_timeout_s=0.3) as transport:
        begun = time.monotonic()
        with pytest.raises(UnavailableError, match=f"{broker.address}.*GAZETTE_ADDRESS"):
            await transport.apply(pb.ApplyRequest())
        with pytest.raises(UnavailableError, match="Connection refused"):
            await read_all(transport)
        assert time.monotonic() - begun < 5


@in_loop
async def test_a_broker_that_is_just_starting_is_waited_for():
    async with ScriptedBroker() as broker:
        address, bind = broker.address, f"127.0.0.1:{broker.port}"
    async with GrpcTransport(address) as transport:
        applying = asyncio.create_task(transport.apply(pb.ApplyRequest()))
        await until(lambda: transport._channels.health(SERVICE) is Health.FAILED)
        async with ScriptedBroker(bind) as started:
            started.on_apply = lambda _: pb.ApplyResponse(header=header())
            assert (await applying).header == header()


@in_loop
async def test_a_broker_that_is_far_away_or_busy_is_given_time_to_answer_the_first_dial():
    async with ScriptedBroker() as broker, TcpProxy(broker.port) as proxy:
        broker.on_apply = lambda _: pb.ApplyResponse(header=header())
        address = f"http://127.0.0.1:{proxy.port}"
        proxy.answering.clear()
        async with GrpcTransport(address, reconnect_backoff_max_s=0.1) as transport:
            applying = asyncio.create_task(transport.apply(pb.ApplyRequest()))
            await asyncio.sleep(0.5)  # what a dial takes, handshakes and all
            assert transport._channels.health(SERVICE) is Health.CONNECTING
            proxy.answering.set()
            assert (await applying).header == header()
            assert proxy.connections_made == 1


@in_loop
async def test_an_address_that_is_no_grpc_server_fails_within_the_bound():
    async def web(reader, writer):
        await reader.read(100)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(web, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, GrpcTransport(f"http://127.0.0.1:{port}", connect_timeout_s=0.5) as plain:
        with pytest.raises(UnavailableError, match=str(port)):
            await plain.apply(pb.ApplyRequest())


@in_loop
async def test_a_callers_timeout_surfaces_as_such():
    async with served() as (broker, transport):

        async def on_apply(request):
            await asyncio.Event().wait()

        broker.on_apply = on_apply
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await transport.apply(pb.ApplyRequest())


@in_loop
async def test_closing_ends_calls_under_way():
    began = asyncio.Event()
    async with served() as (broker, transport):

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


def test_a_transport_belongs_to_one_loop():
    transport = GrpcTransport("http://localhost:1", connect_timeout_s=0.05)

    async def use():
        with contextlib.suppress(UnavailableError):
            await transport.apply(pb.ApplyRequest())

    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(use())
        with pytest.raises(ClosedError, match="connect again"):
            asyncio.run(use())
        loop.run_until_complete(transport.aclose())
    finally:
        loop.close()


@in_loop
async def test_unused_members_are_swept_and_dialled_again():
    async with served() as (broker, transport):
        broker.on_read = lambda _: [read_metadata(0, 0, 3)]
        route = route_to(broker.address)
        peer = candidates(Target(route), needs_primary=False)[0]
        await read_all(transport, Target(route))
        transport._channels._sweep()
        assert peer in transport._channels
        transport._channels._sweep()
        assert peer not in transport._channels
        await read_all(transport, Target(route))
        assert peer in transport._channels


# -------------------------------------------------------------- authentication


@in_loop
async def test_each_call_carries_a_token_for_just_that_call():
    async with served(auth_keys=KEYS) as (broker, transport):
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


@in_loop
async def test_a_given_token_is_sent_unless_there_are_keys():
    async with served(auth_token="a-token") as (broker, transport):
        broker.on_apply = lambda _: pb.ApplyResponse(header=header())
        await transport.apply(pb.ApplyRequest())
        assert broker.metadata["authorization"] == "Bearer a-token"
        async with GrpcTransport(broker.address, auth_keys=KEYS, auth_token="a-token") as keyed:
            await keyed.apply(pb.ApplyRequest())
        assert broker.metadata["authorization"] != "Bearer a-token"


# ------------------------------------------------------------------- addresses


@in_loop
async def test_unix_sockets_are_dialled(tmp_path):
    async with ScriptedBroker(f"unix:{tmp_path}/broker.sock") as broker:
        broker.on_apply = lambda _: pb.ApplyResponse(header=header())
        for address in (
            f"unix://{tmp_path}/broker.sock",
            f"unix://localhost{tmp_path}/broker.sock",
        ):
            async with GrpcTransport(address) as transport:
                await transport.apply(pb.ApplyRequest())


@pytest.mark.parametrize("address", ["localhost:8080", "http://", "", "http://a b"])
def test_a_bad_address_is_reported_where_it_is_given(address):
    with pytest.raises(ValidationError):
        channels.dial(address)
    with pytest.raises(ValidationError):
        GrpcTransport(address)
