"""Streams, their chunks and their sums."""

from __future__ import annotations

import base64
import random

import msgspec
import pytest

from examples.stream_sum.chunker import streams
from examples.stream_sum.messages import NO_ID, Chunk, Sum, WrongChunkError, crc64
from gazette_sdk.framing.base import framing_for
from gazette_sdk.message.kinds import kind_of
from support.vectors import golden, group

VECTORS = group("message", "stream_sum")

GOLDEN = [
    pytest.param(kind, case, id=case["name"])
    for case in golden("consumer/messages/framing.json")["frames"]
    for kind in (Chunk, Sum)
    if case["name"].startswith(kind.__name__.lower())
]


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: case["data_utf8"])
def test_sums_are_those_of_the_vectors(case):
    start = int(str(case["start"]), 16)
    assert crc64(case["data_utf8"].encode(), start) == int(case["expect"], 16)


def test_a_sum_takes_the_chunks_of_its_stream_in_their_order():
    found = Sum()
    assert not found.add(Chunk(NO_ID, 1, b"battery"))
    assert not found.add(Chunk(NO_ID, 2, b" horse"))
    assert found.add(Chunk(NO_ID, 3))
    assert found == Sum(NO_ID, 3, 0xAE763109C1192ED6)
    for chunk in (Chunk(NO_ID, 3), Chunk(NO_ID, 5), Chunk((1,) * 16, 4)):
        with pytest.raises(WrongChunkError):
            found.add(chunk)
    assert found == Sum(NO_ID, 3, 0xAE763109C1192ED6)


@pytest.mark.parametrize(("count", "chunks"), [(1, 2), (20, 20), (0, 5)])
def test_each_stream_has_its_chunks_and_one_sum(count, chunks):
    found = list(streams(count, chunks, random.Random(1), b"own"))
    assert len(found) == count * (chunks + 1)
    sums = {bytes(each.id): each for _, each in found if each is not None}
    assert len(sums) == count
    again = {key: Sum(tuple(key)) for key in sums}
    ended = [again[bytes(chunk.id)].add(chunk) for chunk, _ in found]
    assert ended == [each is not None for _, each in found]
    assert again == sums
    assert all(key.startswith(b"own") for key in sums)


def test_streams_without_end_go_on():
    found = streams(-1, 3, random.Random(1))
    assert sum(1 for _, each in zip(range(1000), found, strict=False) if each[1] is not None) > 100


@pytest.mark.parametrize(("kind", "case"), GOLDEN)
def test_messages_have_the_bytes_of_the_recordings(kind, case):
    framing = framing_for(case["content_type"])
    frame = base64.b64decode(case["frame"])
    decoded = kind_of(kind, framing.form).decode(framing, frame, framing.cut(frame))
    assert decoded.error is None
    written = msgspec.json.encode(decoded.messages[0])
    assert frame.partition(b",")[2] == written[1:] + b"\n"
