"""GrpcTransport against a real gRPC server that answers as each test says."""

from __future__ import annotations

import asyncio
import contextlib
import time
from contextlib import aclosing

import grpc
import pytest

from gazette_sdk.errors import (
    CallError,
    UnavailableError,
    ValidationError,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.testing.tcp_proxy import TcpProxy
from gazette_sdk.transport import grpc as channels
from gazette_sdk.transport.connect import connect
from gazette_sdk.transport.grpc import GrpcTransport
from gazette_sdk.transport.router import candidates
from gazette_sdk.transport.wire import SERVICE, Health, Target
from support.scripted_broker import (
    RefusalError,
    ScriptedBroker,
    append_ok,
    drain,
    header,
    in_loop,
    read_metadata,
    route_to,
    until,
)

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


# ---------------------------------------------------------------------- reads


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
async def test_messages_above_four_mebibytes_are_received():
    content = b"x" * (5 << 20)
    async with served() as (broker, transport):
        broker.on_read = lambda _: [read_metadata(0, 0, 6 << 20), pb.ReadResponse(content=content)]
        assert (await read_all(transport))[1] == content


# ------------------------------------------------------------- errors and bounds


@in_loop
async def test_a_broker_that_is_just_starting_is_waited_for():
    async with ScriptedBroker() as broker:
        address, bind = broker.address, f"127.0.0.1:{broker.port}"
    async with GrpcTransport(address) as transport:
        applying = asyncio.create_task(transport.apply(pb.ApplyRequest()))
        await until(lambda: transport.wire._channels.health(SERVICE) is Health.FAILED)
        async with ScriptedBroker(bind) as started:
            started.on_apply = lambda _: pb.ApplyResponse(header=header())
            assert (await applying).header == header()


@in_loop
async def test_a_broker_that_is_far_away_or_busy_is_given_time_to_answer_the_first_dial():
    async with ScriptedBroker() as broker, TcpProxy(broker.port) as proxy:
        broker.on_apply = lambda _: pb.ApplyResponse(header=header())
        address = f"http://127.0.0.1:{proxy.port}"
        proxy.cut("answers")
        async with GrpcTransport(address, reconnect_backoff_max_s=0.1) as transport:
            applying = asyncio.create_task(transport.apply(pb.ApplyRequest()))
            await asyncio.sleep(0.5)  # what a dial takes, handshakes and all
            assert transport.wire._channels.health(SERVICE) is Health.CONNECTING
            proxy.heal()
            assert (await applying).header == header()
            assert proxy.connections_made == 1


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"-ERR\r\n", b""])
@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("query", ["", "?wire=grpc"])
@in_loop
async def test_an_address_that_is_no_broker_is_an_error_within_a_second(answer, scheme, query):
    async def speak(reader, writer):
        await reader.read(100)
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, aclosing(connect(f"{scheme}://127.0.0.1:{port}{query}")) as transport:
        begin = time.monotonic()
        with pytest.raises(UnavailableError, match=str(port)):
            await transport.apply(pb.ApplyRequest())
        assert time.monotonic() < begin + 2  # 0.8 s and what a busy machine needs


def in_a_thread(coroutine):
    """Runs it on an event loop of its own."""
    return asyncio.to_thread(asyncio.run, coroutine)


@in_loop
async def test_calls_from_every_loop_are_made_on_the_sdks_loop():
    async def total(requests):
        return append_ok(end=len(b"".join([item.content async for item in requests])))

    async def requests(loops):
        loops.append(asyncio.get_running_loop())
        yield pb.AppendRequest(journal="a/journal")
        for piece in (b"a", b"b"):
            await asyncio.sleep(0)
            yield piece
        loops.append(asyncio.get_running_loop())
        yield pb.AppendRequest()

    async with served() as (broker, transport):
        broker.on_apply = lambda _: pb.ApplyResponse(header=header())
        broker.on_read = lambda _: [read_metadata(0, 0, 3), pb.ReadResponse(content=b"abc")]
        broker.on_append = total

        async def use():
            loops = []
            assert (await transport.apply(pb.ApplyRequest())).header == header()
            assert (await read_all(transport))[1] == b"abc"
            assert (await transport.append(requests(loops))).commit.end == 2
            assert loops == [asyncio.get_running_loop()] * 2

        await use()
        await asyncio.gather(*(in_a_thread(use()) for _ in range(3)))


@in_loop
async def test_a_read_from_another_loop_can_be_closed_and_cancelled():
    ended = []

    async def on_read(request):
        try:
            yield read_metadata(0, 0, 3)
            await asyncio.Event().wait()
        finally:
            ended.append(request)

    async with served() as (broker, transport):
        broker.on_read = on_read

        async def use():
            reading = transport.read(pb.ReadRequest(journal="a/journal", block=True))
            await anext(reading)
            await reading.aclose()
            reading = transport.read(pb.ReadRequest(journal="a/journal", block=True))
            await anext(reading)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await anext(reading)

        await in_a_thread(use())
        await until(lambda: len(ended) == 2)


@in_loop
async def test_unused_members_are_swept_and_dialled_again():
    async with served() as (broker, transport):
        broker.on_read = lambda _: [read_metadata(0, 0, 3)]
        route = route_to(broker.address)
        peer = candidates(Target(route), needs_primary=False)[0]
        await read_all(transport, Target(route))
        transport.wire._channels._sweep()
        assert peer in transport.wire._channels
        transport.wire._channels._sweep()
        assert peer not in transport.wire._channels
        await read_all(transport, Target(route))
        assert peer in transport.wire._channels


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
