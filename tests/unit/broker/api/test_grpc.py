import asyncio
import base64
import tempfile

import grpc.aio
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.broker.api.fronts import Chunk, decode_append_item, encode_read_item
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.rules import complete
from gazette_sdk.server.authorization import FOREIGN_CHUNK_BYTES
from gazette_sdk.transport.loop import run
from support.scripted_journals import (
    HEADER,
    FileSpan,
    ScriptedJournals,
    items,
    metadata,
    serving,
    stub,
)
from support.vectors import golden


@given(st.integers(0, (1 << 63) - 1), st.binary(min_size=1, max_size=300))
def test_a_chunk_is_written_as_protobuf_writes_it(offset, content):
    message = pb.ReadResponse(offset=offset, content=content)
    assert encode_read_item(Chunk(offset, content)) == message.SerializeToString()


def test_a_great_chunk_is_written_as_protobuf_writes_it():
    content = bytes(1 << 20)
    message = pb.ReadResponse(offset=1 << 40, content=content)
    assert encode_read_item(Chunk(1 << 40, content)) == message.SerializeToString()


def test_metadata_is_written_with_every_part_that_peers_expect():
    written = encode_read_item(metadata(5))
    assert written == complete(metadata(5)).SerializeToString()
    assert pb.ReadResponse.FromString(written).fragment.HasField("sum")


def test_recorded_responses_are_written_byte_by_byte():
    compared = 0
    for case in golden("broker/grpc_read.json"):
        for response in case.get("responses", ()):
            if "wire" not in response or response["json"] is None:
                continue
            wire = base64.b64decode(response["wire"])
            message = pb.ReadResponse.FromString(wire)
            item = Chunk(message.offset, message.content) if message.content else message
            assert encode_read_item(item) == wire
            compared += 1
    assert compared > 50


@given(st.binary(max_size=300))
def test_content_comes_out_as_bytes(content):
    wire = pb.AppendRequest(content=content).SerializeToString()
    assert decode_append_item(wire, False) == (content or pb.AppendRequest())


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16383, 16384, 1 << 21])
def test_content_of_every_length_comes_out_as_bytes(size):
    wire = pb.AppendRequest(content=bytes(size)).SerializeToString()
    assert decode_append_item(wire, False) == (bytes(size) or pb.AppendRequest())


def test_an_empty_content_field_is_the_empty_request():
    assert decode_append_item(b"\x22\x00", False) == pb.AppendRequest()


def test_the_opening_request_is_never_content():
    wire = pb.AppendRequest(content=b"x").SerializeToString()
    assert decode_append_item(wire, True) == pb.AppendRequest(content=b"x")
    assert decode_append_item(b"", True) == pb.AppendRequest()


@pytest.mark.parametrize(
    "request_",
    [
        pb.AppendRequest(journal="a/b", content=b"x"),
        pb.AppendRequest(content=b"x", do_not_proxy=True),
        pb.AppendRequest(content=b"x", offset=3),
        pb.AppendRequest(content=b"x", header=HEADER),
    ],
)
def test_requests_that_are_more_than_content_are_left_for_the_service_to_judge(request_):
    assert decode_append_item(request_.SerializeToString(), False) == request_


def test_content_beside_unknown_fields_is_content():
    wire = pb.AppendRequest(content=b"x").SerializeToString() + b"\xf8\x06\x01"  # field 111
    assert decode_append_item(wire, False) == b"x"


def test_repeated_content_is_the_last_as_protobuf_has_it():
    wire = pb.AppendRequest(content=b"x").SerializeToString() * 2
    assert decode_append_item(wire, False) == b"x"


@pytest.mark.parametrize(
    "wire", [b"\x22", b"\x22\x05abc", b"\x22\xff\xff\xff\xff\xff\xff", b"\xff"]
)
@pytest.mark.parametrize("first", [True, False])
def test_bytes_that_are_no_message_are_refused(wire, first):
    with pytest.raises(DecodeError):
        decode_append_item(wire, first)


@given(st.binary(max_size=40))
def test_whatever_comes_is_decoded_as_protobuf_decodes_it(wire):
    try:
        expected = pb.AppendRequest.FromString(wire)
    except DecodeError:
        with pytest.raises(DecodeError):
            decode_append_item(wire, False)
        return
    item = decode_append_item(wire, False)
    if isinstance(item, bytes):
        assert item == expected.content
        expected.ClearField("content")
        assert not expected.ListFields()
    else:
        assert item == expected or (not item.ListFields() and not expected.content)


# ------------------------------------------------------------------- end to end


def channel_to(server) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(
        f"127.0.0.1:{server.listener.port}", options=[("grpc.max_receive_message_length", 16 << 20)]
    )


def test_an_append_reaches_the_service_item_by_item():
    async def scenario():
        journals = ScriptedJournals()
        async with serving(journals) as server, channel_to(server) as channel:
            opening = pb.AppendRequest(journal="a/journal", offset=5)
            response = await stub(channel, "Append")(
                iter([opening, pb.AppendRequest(content=b"abc"), pb.AppendRequest()])
            )
        assert journals.appended == [[opening, b"abc", pb.AppendRequest()]]
        assert response.commit.end == 103
        assert response.HasField("registers")

    run(scenario(), 10)


@pytest.mark.parametrize("asked", [None, 131072, 1 << 20])
def test_reads_come_in_chunks_of_the_size_asked_for(asked):
    async def scenario():
        with tempfile.TemporaryFile() as file:
            content = bytes(range(256)) * 12_000
            file.write(content)
            file.flush()
            journals = ScriptedJournals()
            journals.on_read = lambda *_: items(
                metadata(10), FileSpan(file.fileno(), 0, len(content)), b"tail"
            )
            async with serving(journals) as server, channel_to(server) as channel:
                read = stub(channel, "Read")(
                    pb.ReadRequest(journal="a/journal"),
                    metadata=(("gazette-chunk-bytes", str(asked)),) if asked else None,
                )
                first, *rest = [response async for response in read]
        size = asked or FOREIGN_CHUNK_BYTES
        assert first == complete(metadata(10))
        assert b"".join(response.content for response in rest) == content + b"tail"
        assert {len(response.content) for response in rest[:-2]} <= {size}
        offset = 10
        for response in rest:
            assert response.offset == offset
            offset += len(response.content)

    run(scenario(), 10)


def test_every_call_reaches_the_service():
    async def scenario():
        journals = ScriptedJournals()
        async with serving(journals) as server, channel_to(server) as channel:
            assert (await stub(channel, "List")(pb.ListRequest()).read()).header == HEADER
            assert (await stub(channel, "Apply")(pb.ApplyRequest())).header == HEADER
            assert (await stub(channel, "ListFragments")(pb.FragmentsRequest())).header == HEADER
            health = stub(channel, "FragmentStoreHealth")(pb.FragmentStoreHealthRequest())
            assert (await health).header == HEADER
            call = stub(channel, "Replicate")()
            await call.write(pb.ReplicateRequest(content=b"x"))
            await call.write(pb.ReplicateRequest(acknowledge=True))
            assert await asyncio.wait_for(call.read(), 5) == pb.ReplicateResponse()
            await call.done_writing()
            assert await asyncio.wait_for(call.read(), 5) is grpc.aio.EOF
        assert len(journals.calls) == 5

    run(scenario(), 10)
