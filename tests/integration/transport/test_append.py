"""append_once and append, over every wire."""

from __future__ import annotations

import asyncio
import contextlib
import io

import grpc
import pytest

from gazette_sdk import errors
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.append import queue
from gazette_sdk.transport.append.append import append, append_once
from gazette_sdk.transport.base import CHUNK_BYTES
from gazette_sdk.transport.grpc import GrpcTransport
from support.scripted_broker import (
    RefusalError,
    append_ok,
    append_status,
    drain,
    in_loop,
    no_pause,
    route_to,
)
from support.vectors import cases
from support.wires import IN_PROCESS

REQUEST = pb.AppendRequest(journal="a/journal")
CASES = {p.values[0]["id"][-3:]: p.values[0] for p in cases("broker", "appender_frames")}


@contextlib.asynccontextmanager
async def served(wire, *answers):
    """A broker whose appends are answered in turn, the last one for ever."""
    async with wire.served() as (broker, transport):
        left = list(answers)

        async def on_append(requests):
            answer = left.pop(0) if len(left) > 1 else left[0]
            await drain(requests)
            if isinstance(answer, Exception):
                raise answer
            return answer

        broker.on_append = on_append
        yield broker, transport


async def chunks(*contents):
    for content in contents:
        yield content


async def chunks_for_ever(first):
    """Chunks without end; the first is small."""
    yield first
    while True:
        yield b"bar" * 100_000


def frames(case):
    return [pb.AppendRequest(**_encoded(sent)) for sent in case["sent"]]


def _encoded(sent):
    return {k: v.encode() if k == "content" else v for k, v in sent.items()}


@in_loop
async def test_chunks_are_the_vectors_frames(wire):
    case = CASES["001"]
    route = route_to("http://localhost:1")
    async with served(wire, append_ok(route=route)) as (broker, transport):
        contents = [content.encode() for content in case["writes"]]
        response = await append_once(transport, REQUEST, chunks(*contents, b""))
        assert response.status == pb.OK
        assert broker.received == frames(case)
        assert broker.half_closes == 1
        assert not transport.knows_routes or transport.routes.route("a/journal") == route


@in_loop
async def test_an_append_ends_when_the_broker_fails(wire):
    async with wire.served() as (broker, transport):

        async def on_append(requests):
            await anext(requests)
            await anext(requests)
            raise RefusalError(grpc.StatusCode.UNKNOWN, "disk on fire")

        broker.on_append = on_append
        with pytest.raises(errors.CallError, match="disk on fire"):
            await append_once(transport, REQUEST, chunks_for_ever(b"foo"))


@in_loop
async def test_an_early_answer_ends_the_append(wire):
    async with wire.served() as (broker, transport):

        async def on_append(requests):
            await anext(requests)
            return append_status(pb.REGISTER_MISMATCH)

        broker.on_append = on_append
        with pytest.raises(errors.RegisterMismatchError):
            await append_once(transport, REQUEST, chunks_for_ever(b"foo"))


@in_loop
async def test_no_content_is_an_append_of_zero_bytes(wire):
    async with served(wire, append_ok()) as (broker, transport):
        await append_once(transport, REQUEST, chunks())
        assert broker.received == [REQUEST, pb.AppendRequest()]


@in_loop
async def test_an_error_of_the_content_half_closes_without_commit(wire):
    refusal = RefusalError(grpc.StatusCode.UNKNOWN, "ended without commit")
    async with served(wire, refusal) as (broker, transport):

        async def failing():
            yield b"foo"
            yield b"bar"
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await append_once(transport, REQUEST, failing())
        assert pb.AppendRequest() not in broker.received
        assert broker.half_closes == wire.is_grpc  # elsewhere the service is cancelled


@in_loop
async def test_an_append_that_failed_is_not_tried_again_by_itself(wire):
    async with served(wire, RefusalError(grpc.StatusCode.UNAVAILABLE), append_ok(0, 3)) as (
        _,
        transport,
    ):
        with pytest.raises(errors.UnavailableError):
            await append_once(transport, REQUEST, chunks(b"foo"))
        assert (await append_once(transport, REQUEST, chunks(b"foo"))).commit.end == 3


@in_loop
async def test_a_request_without_journal_is_refused():
    transport = GrpcTransport("http://localhost:1")
    with pytest.raises(errors.ValidationError, match="needs a journal"):
        await append(transport, pb.AppendRequest(), [b"x"])
    await transport.aclose()


@pytest.mark.parametrize("case", cases("broker", "client_error_mapping"))
@in_loop
async def test_responses_map_to_errors_as_the_vectors_say(case, wire):
    route = route_to("http://localhost:1")
    text = case["response"]
    if text.startswith("gRPC"):
        answer, error = RefusalError(grpc.StatusCode.UNKNOWN, "cause"), errors.CallError
    elif text.startswith("OK"):
        answer, error = append_ok(route=route), errors.ValidationError
        answer.commit.compression_codec = pb.INVALID
    else:
        status = pb.Status.Value(text)
        answer, error = append_status(status, route), type(errors.for_status(status))
        assert error is not errors.StatusError
    async with served(wire, answer) as (_, transport):
        if wire.name == IN_PROCESS and error is errors.ValidationError:
            # Messages of the same process are not checked.
            assert await append_once(transport, REQUEST, chunks()) == answer
            return
        with pytest.raises(error):
            await append_once(transport, REQUEST, chunks())
        if transport.knows_routes:
            assert (len(transport.routes) == 1) == case["route_cached"]


@in_loop
async def test_a_register_mismatch_reports_selector_and_registers(wire):
    answer = append_status(pb.REGISTER_MISMATCH)
    answer.registers.labels.add(name="owner", value="other")
    request = pb.AppendRequest(journal="a/journal")
    request.check_registers.include.labels.add(name="owner", value="me")
    async with served(wire, answer) as (_, transport):
        with pytest.raises(errors.RegisterMismatchError, match=r"\{owner=other\}.*\{owner=me\}"):
            await append_once(transport, request, chunks())


@in_loop
async def test_an_unhealthy_store_is_reported_with_its_cause(wire):
    answer = append_status(pb.FRAGMENT_STORE_UNHEALTHY)
    answer.store_health_error = "bucket is gone"
    async with served(wire, answer) as (_, transport):
        with pytest.raises(errors.FragmentStoreUnhealthyError, match="bucket is gone"):
            await append_once(transport, REQUEST, chunks())


# ------------------------------------------------------------------------- append


@in_loop
async def test_sources_of_every_kind_are_one_append(wire):
    async def iterate():
        yield b"c"
        yield b"d"

    async with served(wire, append_ok()) as (broker, transport):
        before = queue.APPEND_BYTES.labels("a/journal")._value.get()
        large = b"x" * (CHUNK_BYTES + 1)
        await append(transport, REQUEST, [b"a", io.BytesIO(b"b"), iterate, large])
        contents = [request.content for request in broker.received[1:]]
        assert b"".join(contents) == b"abcd" + large
        assert contents[-1] == b""
        assert b"" not in contents[:-1]
        assert max(map(len, contents)) == CHUNK_BYTES
        assert queue.APPEND_BYTES.labels("a/journal")._value.get() - before == 4 + len(large)


@in_loop
async def test_an_error_of_a_source_rolls_back(wire):
    case = CASES["004"]
    refusal = RefusalError(grpc.StatusCode.UNKNOWN, "ended without commit")
    async with served(wire, refusal) as (broker, transport):

        def failing():
            raise ZeroDivisionError("the source")

        with pytest.raises(ZeroDivisionError):
            await append(transport, REQUEST, [case["sources"][0].encode(), failing])
        if wire.is_grpc:
            assert broker.received == frames(case)
        assert pb.AppendRequest() not in broker.received
        assert broker.half_closes == wire.is_grpc  # elsewhere it is cancelled, if at all


@pytest.mark.parametrize("case", [c for c in CASES.values() if isinstance(c.get("server"), list)])
@in_loop
async def test_failures_are_tried_again_or_not_as_the_vectors_say(case, wire):
    answers = []
    for text in case["server"]:
        if text == "OK":
            answers.append(append_ok())
        elif text.startswith("UNAVAILABLE"):
            answers.append(RefusalError(grpc.StatusCode.UNAVAILABLE))
        elif text.startswith("gRPC"):
            answers.append(RefusalError(grpc.StatusCode.UNKNOWN))
        else:
            answers.append(append_status(pb.Status.Value(text)))
    async with served(wire, *answers) as (broker, transport):
        sources = [source.encode() for source in case["sources"]]
        if case["expect"].startswith("success"):
            await append(transport, REQUEST, sources, pause=no_pause)
            content = b"".join(request.content for request in broker.received)
            assert content == b"content" * len(answers)
        else:
            with pytest.raises((errors.StatusError, errors.CallError)):
                await append(transport, REQUEST, sources, pause=no_pause)
            assert broker.half_closes == 1


@pytest.mark.parametrize(
    "status",
    [
        pb.NOT_JOURNAL_PRIMARY_BROKER,
        pb.NO_JOURNAL_PRIMARY_BROKER,
        pb.INSUFFICIENT_JOURNAL_BROKERS,
    ],
)
@in_loop
async def test_routing_statuses_are_tried_again(status, wire):
    attempts = []

    async def pause(attempt):
        attempts.append(attempt)

    refused = append_status(status)
    async with served(wire, refused, refused, refused, append_ok()) as (_, transport):
        await append(transport, REQUEST, [io.BytesIO(b"x")], pause=pause)
        assert attempts == [0, 1, 2]


@in_loop
async def test_a_deadline_of_the_caller_surfaces_as_such(wire):
    async with served(wire, append_status(pb.NO_JOURNAL_PRIMARY_BROKER)) as (_, transport):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await append(transport, REQUEST, [b"x"])
