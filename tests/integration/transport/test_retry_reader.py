"""RetryReader over every wire; each read of the broker is answered by a script."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import pytest

from gazette_sdk import errors
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.grpc import GrpcTransport
from gazette_sdk.transport.journal_reader import ByteReader, OffsetJumpError, RetryReader
from support.fragment_files import fragment_of, served_files
from support.scripted_broker import (
    RefusalError,
    header,
    in_loop,
    no_pause,
    read_metadata,
    route_to,
)

BROKEN = RefusalError(grpc.StatusCode.UNKNOWN, "broken")


class Reads:
    """Answers reads in turn. Text is content; a status, a refusal or metadata stands for itself."""

    def __init__(self, broker, *scripts):
        self.scripts = list(scripts)
        self.requests: list[pb.ReadRequest] = []
        self.idle = asyncio.Event()
        broker.on_read = self.on_read

    async def on_read(self, request):
        self.requests.append(request)
        if not self.scripts:
            self.idle.set()
            await asyncio.Event().wait()
        offset = max(request.offset, 0)
        for step in self.scripts.pop(0):
            if isinstance(step, Exception):
                raise step
            if isinstance(step, pb.ReadResponse):
                offset = step.offset
                yield step
            elif isinstance(step, int):
                yield pb.ReadResponse(
                    status=step, offset=offset, write_head=offset, header=header()
                )
            else:
                yield pb.ReadResponse(offset=offset, content=step.encode())
                offset += len(step)


@contextlib.asynccontextmanager
async def served(wire, *scripts, pause=no_pause, **request):
    async with wire.served() as (broker, transport):
        reads = Reads(broker, *scripts)
        request = pb.ReadRequest(**({"journal": "a/journal", "offset": 100} | request))
        reader = RetryReader(transport, request, pause=pause)
        try:
            yield reader, reads
        finally:
            await reader.aclose()


async def read_text(reader, size):
    text = b""
    while len(text) < size:
        text += await reader.read(size - len(text))
    return text.decode()


@in_loop
async def test_reads_go_on_behind_what_was_delivered_as_the_first_vectors_say(wire):
    """Cases 001 and 002 of `retry_reader`, one after the other as they stand."""
    async with served(
        wire,
        ["foo", BROKEN],
        ["barba", BROKEN],
        [pb.NOT_JOURNAL_BROKER],
        ["zbing", pb.OFFSET_NOT_YET_AVAILABLE],
        ["next ", pb.OFFSET_NOT_YET_AVAILABLE],
        ["read"],
        [read_metadata(512, 512, 600), "xxxxyyyy"],
    ) as (reader, reads):
        assert await read_text(reader, 13) == "foobarbazbing"
        with pytest.raises(errors.OffsetNotYetAvailableError):
            await reader.read()
        assert reader.offset == 113

        reader.block = True
        assert await read_text(reader, 9) == "next read"
        with pytest.raises(OffsetJumpError) as caught:
            await reader.read()
        assert (caught.value.offset, reader.offset) == (512, 512)
        assert await read_text(reader, 8) == "xxxxyyyy"
        assert [r.offset for r in reads.requests] == [100, 103, 108, 108, 113, 118, 122]
        assert [r.block for r in reads.requests] == [False] * 4 + [True] * 3

        waiting = asyncio.create_task(reader.read())
        await reads.idle.wait()
        reader.cancel()
        with pytest.raises(errors.CallCancelledError):
            await waiting
        with pytest.raises(errors.CallCancelledError):
            await reader.read()


@in_loop
async def test_every_byte_is_delivered_once_whatever_breaks(wire):
    text = "0123456789" * 5
    scripts = []
    for position in range(0, 50, 5):
        scripts += [[], [*text[position : position + 5], BROKEN], [pb.NOT_JOURNAL_BROKER]]
    async with served(wire, *scripts, offset=0) as (reader, _):
        assert await read_text(reader, 50) == text


@in_loop
async def test_the_end_offset_is_the_end(wire):
    async with served(wire, ["foo"], ["bar"], end_offset=106) as (reader, reads):
        assert await read_text(reader, 6) == "foobar"
        assert await reader.read() is None
        assert await reader.read() is None
        assert [r.offset for r in reads.requests] == [100, 103]


@in_loop
async def test_attempts_wait_by_the_schedule_and_progress_resets_it(wire):
    attempts = []

    async def pause(attempt):
        attempts.append(attempt)

    refused = [pb.NOT_JOURNAL_BROKER]
    async with served(
        wire, refused, refused, ["x", BROKEN], refused, ["y"], ["z"], pause=pause
    ) as (
        reader,
        _,
    ):
        assert await read_text(reader, 3) == "xyz"
        # An end after metadata restarts at once; these ends had none, so they count.
        assert attempts == [0, 1, 0, 1, 0]


@in_loop
async def test_a_usual_end_restarts_at_once(wire):
    attempts = []

    async def pause(attempt):
        attempts.append(attempt)

    first = [read_metadata(100, 100, 103), "abc"]
    second = [read_metadata(103, 100, 106), "def"]
    async with served(wire, first, second, pause=pause) as (reader, _):
        assert await read_text(reader, 6) == "abcdef"
        assert attempts == [-1]


@in_loop
async def test_a_journal_that_is_not_found_is_tried_four_times_more(wire):
    async with served(wire, *[[pb.JOURNAL_NOT_FOUND]] * 9) as (reader, reads):
        with pytest.raises(errors.JournalNotFoundError):
            await reader.read()
        assert len(reads.requests) == 5


@in_loop
async def test_a_proxied_read_returns_not_found_at_once(wire):
    async with served(wire, [pb.JOURNAL_NOT_FOUND], header=header()) as (reader, reads):
        with pytest.raises(errors.JournalNotFoundError):
            await reader.read()
        assert len(reads.requests) == 1


@in_loop
async def test_a_suspended_journal_is_reported(wire):
    async with served(wire, [pb.SUSPENDED]) as (reader, _):
        with pytest.raises(errors.SuspendedError):
            await reader.read()


@in_loop
async def test_a_missing_token_is_reported_but_an_expired_one_is_tried_again(wire):
    refused = RefusalError(grpc.StatusCode.UNAUTHENTICATED, "token")
    async with served(wire, [refused]) as (reader, _):
        with pytest.raises(errors.UnauthenticatedError):
            await reader.read()
    async with served(wire, [read_metadata(100, 100, 109), "abc"], [refused], ["def"]) as (
        reader,
        _,
    ):
        assert await read_text(reader, 6) == "abcdef"


@in_loop
async def test_an_invalid_response_is_tried_again(wire):
    invalid = read_metadata(100, 100, 109)
    invalid.fragment.compression_codec = pb.INVALID
    async with served(wire, [invalid], ["abc"]) as (reader, _):
        assert await read_text(reader, 3) == "abc"


@in_loop
async def test_a_reader_that_timed_out_may_read_again(wire):
    async with served(wire, ["abc"]) as (reader, reads):
        assert await reader.read() == b"abc"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await reader.read()
        reads.scripts = [["def"]]
        assert await reader.read() == b"def"


@in_loop
async def test_a_seek_backwards_restarts_at_its_target(wire):
    async with served(wire, ["0123456789", pb.SUSPENDED], ["3456"]) as (reader, reads):
        assert await reader.read(5) == b"01234"
        assert await reader.seek(103) == 103
        assert await reader.read() == b"3456"
        assert [r.offset for r in reads.requests] == [100, 103]
        assert await reader.seek(-2, 1) == 105


@in_loop
async def test_a_seek_forward_stays_within_a_direct_fragment(wire):
    content = b"0123456789" * 10
    fragment = fragment_of("a/journal", 100, content)
    async with served_files({"f": content}) as base:
        metadata = pb.ReadResponse(
            offset=100, write_head=200, fragment=fragment, fragment_url=f"{base}/f"
        )
        metadata.header.CopyFrom(header())
        async with served(wire, [metadata], end_offset=200) as (reader, reads):
            assert await reader.read(5) == b"01234"
            await reader.seek(155)
            assert await reader.read() == content[55:]
            assert await reader.read() is None
            assert len(reads.requests) == 1


@in_loop
async def test_a_fragment_that_fails_is_read_through_another_attempt(wire):
    content = b"0123456789"
    fragment = fragment_of("a/journal", 100, content)
    async with served_files({}) as base:
        metadata = pb.ReadResponse(
            offset=100, write_head=110, fragment=fragment, fragment_url=f"{base}/gone"
        )
        metadata.header.CopyFrom(header())
        async with served(wire, [metadata], ["0123456789"]) as (reader, _):
            assert await read_text(reader, 10) == "0123456789"


@in_loop
async def test_a_proxied_fragment_whose_stream_ends_early_is_asked_for_again(wire):
    """A broker that stops ends its streams; the URL that it named is still out of reach."""
    content = b"0123456789"
    fragment = fragment_of("a/journal", 100, content)
    metadata = pb.ReadResponse(
        offset=100, write_head=110, fragment=fragment, fragment_url="file:///of/the/brokers"
    )
    metadata.header.CopyFrom(header())
    answers = [metadata], [metadata, "01234"], [metadata], ["56789"]
    async with served(wire, *answers) as (reader, reads):
        assert await read_text(reader, 10) == "0123456789"
        assert [each.offset for each in reads.requests] == [100, 100, 105, 105]
        assert not any(each.do_not_proxy for each in reads.requests[1:])


@pytest.mark.parametrize(("offset", "whence"), [(0, 2), (-1, 0), (-101, 1)])
@in_loop
async def test_seeks_from_the_end_and_before_the_start_are_refused(offset, whence, wire):
    async with served(wire) as (reader, _):
        with pytest.raises(errors.ValidationError):
            await reader.seek(offset, whence)
        assert reader.offset == 100


@in_loop
async def test_adjusted_seeks_use_the_buffer_where_they_can(wire):
    async with served(wire, ["0123456789"], ["56789"]) as (reader, reads):
        buffer = bytearray(await reader.read())
        del buffer[:6]
        assert reader.adjusted_offset(len(buffer)) == 106
        await reader.adjusted_seek(108, buffer)
        assert (bytes(buffer), reader.offset) == (b"89", 110)
        await reader.adjusted_seek(reader.adjusted_offset(len(buffer)) - 3, buffer)
        assert (bytes(buffer), reader.offset) == (b"", 105)
        assert await reader.read() == b"56789"
        assert [r.offset for r in reads.requests] == [100, 105]


@in_loop
async def test_a_jump_leaves_the_reader_usable(wire):
    async with served(wire, [read_metadata(150, 150, 160), "abc"]) as (reader, reads):
        with pytest.raises(OffsetJumpError):
            await reader.read()
        assert await reader.read() == b"abc"
        assert len(reads.requests) == 1


@in_loop
async def test_closing_while_another_task_reads_ends_that_read(wire):
    async with served(wire) as (reader, reads):
        waiting = asyncio.create_task(reader.read())
        await reads.idle.wait()
        await reader.aclose()
        with pytest.raises(errors.CallCancelledError):
            await waiting


@in_loop
async def test_a_task_cancelled_by_others_is_cancelled(wire):
    async with served(wire) as (reader, reads):
        waiting = asyncio.create_task(reader.read())
        await reads.idle.wait()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


def test_a_malformed_request_is_refused():
    with pytest.raises(errors.ValidationError):
        RetryReader(GrpcTransport("http://localhost:1"), pb.ReadRequest(journal="x"))


@in_loop
async def test_a_route_whose_brokers_are_not_reached_is_given_up(wire):
    gone = RefusalError(grpc.StatusCode.UNAVAILABLE, "gone")
    async with wire.served() as (broker, transport):
        named = read_metadata(100, 100, 103)
        named.header.route.CopyFrom(route_to(broker.address))
        reads = Reads(broker, [named, "abc"], [gone], [gone], [gone], ["def"])
        hints = []

        def begin(request, last):
            hints.append(last)
            return ByteReader(transport, request, last_response=last)

        request = pb.ReadRequest(journal="a/journal", offset=100)
        reader = RetryReader(transport, request, pause=no_pause, new_reader=begin)
        assert await read_text(reader, 6) == "abcdef"
        assert len(reads.requests) == 5
        routed = [hint is not None and bool(hint.header.route.members) for hint in hints]
        assert routed == [False, True, True, False, False]
        await reader.aclose()
