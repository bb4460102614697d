"""ByteReader over every wire, and a real web server for direct fragments."""

from __future__ import annotations

import contextlib
import os

import grpc
import pytest

from gazette_sdk import errors
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import content_path
from gazette_sdk.transport import journal_reader
from gazette_sdk.transport.journal_reader import (
    ByteReader,
    OffsetJumpError,
    SeekRequiresNewReaderError,
)
from support.fragment_files import fragment_of, served_files, store_fragment, stored
from support.scripted_broker import (
    RefusalError,
    header,
    in_loop,
    read_metadata,
    route_to,
)
from support.vectors import cases
from support.wires import NETWORK, over

CASES = {param.values[0]["id"][-3:]: param.values[0] for param in cases("broker", "reader_cases")}
CONTENT = b"XXXXXhello, world!!!"
FRAGMENT = fragment_of("a/journal", 100, CONTENT, pb.GZIP)
URL = "http://scripted"


def metadata(offset, *, url="", **fields):
    return pb.ReadResponse(
        offset=offset,
        write_head=120,
        fragment=FRAGMENT,
        fragment_url=url,
        header=header(),
        **fields,
    )


def not_yet(offset=0):
    return pb.ReadResponse(
        status=pb.OFFSET_NOT_YET_AVAILABLE, offset=offset, write_head=120, header=header()
    )


@contextlib.asynccontextmanager
async def reading(wire, *responses, **request):
    """A reader whose one read is answered by ``responses``; URLs are served by a web server."""
    async with (
        wire.served() as (broker, transport),
        served_files({"fragment": stored(CONTENT, pb.GZIP)}) as base,
    ):
        answers = []
        for response in responses:
            if isinstance(response, pb.ReadResponse) and response.fragment_url:
                response.fragment_url = response.fragment_url.replace(URL, base)
            answers.append(response)
        broker.on_read = lambda _: answers
        reader = ByteReader(transport, pb.ReadRequest(journal="a/journal", **request))
        reader.broker, reader.transport = broker, transport  # for the test's own use
        try:
            yield reader
        finally:
            await reader.aclose()


async def outcomes(reader, size_max=0):
    """What reads give: content, ``("jump", offset)``, an error's class; ``None`` at the end."""
    found = []
    while True:
        try:
            content = await reader.read(size_max)
        except OffsetJumpError as jump:
            found.append(("jump", jump.offset))
            continue
        except errors.GazetteError as error:
            found.append(type(error))
            with pytest.raises(type(error)):
                await reader.read()
            return found
        found.append(content)
        if content is None:
            return found


@in_loop
async def test_a_fragment_url_is_opened_when_the_stream_ended(wire):
    case = CASES["001"]
    answer = metadata(105, url=f"{URL}/fragment")
    answer.header.route.CopyFrom(route_to("http://localhost:1"))
    async with reading(wire, answer, offset=case["offset"]) as reader:
        got = await outcomes(reader)
        assert got == [b"", b"hello, world!!!", None]
        assert not reader.transport.knows_routes or len(reader.transport.routes) == 1
        assert reader.response.fragment == FRAGMENT
        assert reader.request.offset == 120


@in_loop
async def test_a_read_of_the_head_reports_a_jump(wire):
    async with reading(wire, metadata(110), offset=CASES["002"]["offset"]) as reader:
        assert await outcomes(reader) == [("jump", 110), b"", None]
        assert reader.request.offset == 110


@in_loop
async def test_content_is_delivered_before_the_status_that_ended_it(wire):
    async with reading(
        wire,
        metadata(105),
        pb.ReadResponse(offset=105, content=b"prior "),
        pb.ReadResponse(offset=111, content=b"content"),
        not_yet(118),
        offset=CASES["004"]["offset"],
    ) as reader:
        got = await outcomes(reader)
        assert b"".join(got[:-1]) == b"prior content"
        assert got[-1] is errors.OffsetNotYetAvailableError


@in_loop
async def test_a_status_alone_is_its_error(wire):
    async with reading(wire, not_yet(), offset=CASES["005"]["offset"]) as reader:
        assert await outcomes(reader) == [errors.OffsetNotYetAvailableError]
        assert reader.request.offset == 105


@in_loop
async def test_a_probe_of_the_head_learns_it_from_the_status(wire):
    async with reading(wire, not_yet(42), offset=-1) as reader:
        assert await outcomes(reader) == [errors.OffsetNotYetAvailableError]
        assert reader.request.offset == 42


@in_loop
async def test_small_reads_cut_messages_and_keep_metadata_visible(wire):
    case = CASES["007"]
    async with reading(
        wire,
        metadata(110),
        pb.ReadResponse(offset=110, content=b"foo bar "),
        pb.ReadResponse(offset=118, content=b"baz bing"),
        offset=case["offset"],
    ) as reader:
        with pytest.raises(OffsetJumpError) as caught:
            await reader.read(case["read_size"])
        assert caught.value.offset == 110
        assert await reader.read(case["read_size"]) == b""
        for content, end in ((b"foo ba", 116), (b"r ", 118), (b"baz bi", 124), (b"ng", 126)):
            assert await reader.read(case["read_size"]) == content
            assert reader.request.offset == end
            assert (reader.response.write_head, reader.response.fragment) == (120, FRAGMENT)
        assert reader.adjusted_offset(3) == 123


@in_loop
async def test_content_without_metadata_is_delivered_before_the_error(wire):
    async with reading(
        wire,
        pb.ReadResponse(offset=105, content=b"partial read"),
        RefusalError(grpc.StatusCode.UNKNOWN, "broken"),
        offset=CASES["008"]["offset"],
    ) as reader:
        assert await outcomes(reader) == [b"partial read", errors.CallError]


@over(*NETWORK)  # within a process there is nobody whose messages were to be checked
@in_loop
async def test_invalid_metadata_is_a_validation_error(wire):
    answer = metadata(105)
    answer.fragment.compression_codec = pb.INVALID
    async with reading(wire, answer, offset=CASES["010"]["offset"]) as reader:
        assert await outcomes(reader) == [errors.ValidationError]


@in_loop
async def test_the_end_offset_holds_in_direct_fragments(wire):
    case = CASES["011"]
    async with reading(
        wire,
        metadata(105, url=f"{URL}/fragment"),
        offset=case["offset"],
        end_offset=case["end_offset"],
    ) as reader:
        assert await outcomes(reader) == [b"", b"hello,", None]


@in_loop
async def test_metadata_only_opens_no_fragment(wire):
    async with reading(
        wire, metadata(105, url=f"{URL}/fragment"), offset=105, metadata_only=True
    ) as reader:
        assert await outcomes(reader) == [b"", None]


@in_loop
async def test_an_offset_below_the_requested_one_is_an_error(wire):
    async with reading(wire, metadata(100), offset=105) as reader:
        assert await outcomes(reader) == [errors.CallError]


@in_loop
async def test_a_fragment_that_is_missing_ends_the_reader(wire):
    async with reading(wire, metadata(105, url=f"{URL}/missing"), offset=105) as reader:
        assert await outcomes(reader) == [b"", errors.FragmentNotFoundError]


@in_loop
async def test_content_beyond_the_fragments_end_is_an_error_after_all_of_it(wire):
    answer = metadata(105, url=f"{URL}/fragment")
    answer.fragment.end = 117
    answer.fragment.ClearField("sum")
    async with reading(wire, answer, offset=105) as reader:
        assert await outcomes(reader) == [b"", b"hello, world", errors.CorruptFragmentError]


@in_loop
async def test_file_urls_are_opened_below_the_given_root(tmp_path, wire):
    store_fragment(tmp_path, FRAGMENT, CONTENT)
    answer = metadata(100, url=f"file:///{content_path(FRAGMENT)}")
    async with wire.served() as (broker, transport):
        broker.on_read = lambda _: [answer]
        request = pb.ReadRequest(journal="a/journal", offset=100)
        reader = ByteReader(transport, request, file_root=tmp_path)
        assert await outcomes(reader) == [b"", CONTENT, None]
        reader = ByteReader(transport, request)
        assert (await outcomes(reader))[-1] is errors.ConfigurationError


@in_loop
async def test_seeks_within_a_direct_fragment_follow_the_vector(wire):
    whence = {"current": os.SEEK_CUR, "start": os.SEEK_SET}
    async with reading(wire, metadata(100, url=f"{URL}/fragment"), offset=100) as reader:
        assert await reader.read() == b""
        with pytest.raises(SeekRequiresNewReaderError):
            await reader.seek(105)  # not opened yet
        first = await reader.read(1)
        assert first == b"X"
        # The vector begins at 100: one byte was read to have the fragment opened.
        for kind, offset, outcome, position in CASES["013"]["seeks"]:
            delta = offset - 1 if (kind, outcome) == ("current", "ok") else offset
            if outcome == "ok":
                assert await reader.seek(delta, whence[kind]) == position
            else:
                with pytest.raises(SeekRequiresNewReaderError):
                    await reader.seek(delta, whence[kind])
            assert reader.request.offset == position
        assert await reader.read() == CONTENT[6:]
        with pytest.raises(SeekRequiresNewReaderError):
            await reader.seek(0, os.SEEK_END)


@over(*NETWORK)  # within a process there are no routes
@in_loop
async def test_the_route_of_the_last_response_is_tried_first(wire):
    async with wire.broker() as service, wire.broker() as member:
        member.on_read = lambda _: [metadata(105)]
        last = metadata(105)
        last.header.route.CopyFrom(route_to(member.address))
        async with wire.transport(service.address) as transport:
            request = pb.ReadRequest(journal="a/journal", offset=105)
            reader = ByteReader(transport, request, last_response=last)
            assert await outcomes(reader) == [b"", None]
        assert (len(service.received), len(member.received)) == (0, 1)


@in_loop
async def test_the_header_stays_visible_with_later_metadata(wire):
    later = read_metadata(120, 120, 130, first=False)
    async with reading(
        wire, metadata(105), pb.ReadResponse(offset=105, content=b"x" * 15), later, offset=105
    ) as reader:
        assert await outcomes(reader) == [b"", b"x" * 15, b"", None]
        assert reader.response.fragment == later.fragment
        assert reader.header == header()


@in_loop
async def test_bytes_are_counted(wire):
    def values():
        names = ("a/journal", "GZIP")
        return [
            journal_reader.READ_BYTES.labels("a/journal")._value.get(),
            journal_reader.FRAGMENT_OPEN.labels(*names)._value.get(),
            journal_reader.FRAGMENT_OPEN_BYTES.labels(*names)._value.get(),
            journal_reader.READ_FRAGMENT_BYTES.labels(*names)._value.get(),
            journal_reader.DISCARD_FRAGMENT_BYTES.labels(*names)._value.get(),
        ]

    before = values()
    async with reading(wire, metadata(105, url=f"{URL}/fragment"), offset=105) as reader:
        await outcomes(reader)
    assert [a - b for a, b in zip(values(), before, strict=True)] == [15, 1, 20, 15, 5]


@in_loop
async def test_a_closed_reader_says_so(wire):
    async with reading(wire, metadata(105), offset=105) as reader:
        await reader.aclose()
        with pytest.raises(errors.ClosedError):
            await reader.read()


@pytest.mark.parametrize("case", cases("broker", "fragment_reader"))
@in_loop
async def test_fragments_are_read_as_the_vectors_say(case, wire):
    name = "missing" if case.get("url") == "missing" else "fragment"
    offset = case.get("offset", 100)
    answer = metadata(offset, url=f"{URL}/{name}")
    if "fragment_end" in case:
        answer.fragment.end = case["fragment_end"]
        answer.fragment.ClearField("sum")
    async with reading(wire, answer, offset=offset) as reader:
        got = await outcomes(reader)
    content = b"".join(piece for piece in got if isinstance(piece, bytes))
    if "expect" in case:
        assert content == case["expect"].encode()
    if "error" in case:
        assert issubclass(got[-1], errors.StoreError)
