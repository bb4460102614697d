import os
import tempfile

import pytest

from gazette_sdk.broker.api.fronts import Chunk, chunks
from gazette_sdk.errors import CorruptFragmentError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.loop import run
from support.scripted_journals import FileSpan, items, metadata


def cut(*yielded, chunk_bytes: int = 4):
    async def collect():
        return [item async for item in chunks(items(*yielded), chunk_bytes)]

    return run(collect(), 5)


def test_content_continues_where_the_item_before_it_ended():
    first, second = metadata(7), metadata(30, header=None)
    assert cut(first, b"abcdef", b"g", second, b"hi") == [
        first,
        Chunk(7, b"abcd"),
        Chunk(11, b"ef"),
        Chunk(13, b"g"),
        second,
        Chunk(30, b"hi"),
    ]


def test_spans_of_files_are_read_in_chunks():
    with tempfile.TemporaryFile() as file:
        file.write(b"0123456789")
        file.flush()
        span = FileSpan(file.fileno(), 2, 7)
        assert cut(metadata(5), span, b"x")[1:] == [
            Chunk(5, b"2345"),
            Chunk(9, b"678"),
            Chunk(12, b"x"),
        ]
        assert os.lseek(file.fileno(), 0, os.SEEK_CUR) == 10  # other readers are not disturbed


def test_a_file_that_ends_early_is_an_error_behind_what_it_holds():
    async def collect():
        with tempfile.TemporaryFile() as file:
            file.write(b"012345")
            file.flush()
            pieces = chunks(items(metadata(5), FileSpan(file.fileno(), 0, 10)), 4)
            taken = [await anext(pieces) for _ in range(3)]
            with pytest.raises(CorruptFragmentError, match="ends 4 bytes early") as caught:
                await anext(pieces)
            return taken, caught.value.offset

    taken, offset = run(collect(), 5)
    assert taken[1:] == [Chunk(5, b"0123"), Chunk(9, b"45")]
    assert offset == 11


def test_messages_with_content_of_a_proxied_read_are_cut_too():
    assert cut(metadata(0), pb.ReadResponse(offset=3, content=b"abcdef"))[1:] == [
        Chunk(3, b"abcd"),
        Chunk(7, b"ef"),
    ]


def test_the_service_is_closed_with_the_chunks():
    closed: list[str] = []

    async def service():
        try:
            yield metadata()
            yield b"x"
        finally:
            closed.append("closed")

    async def leave_early():
        taken = chunks(service(), 4)
        await anext(taken)
        await taken.aclose()

    run(leave_early(), 5)
    assert closed == ["closed"]
