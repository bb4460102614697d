from __future__ import annotations

import base64
import gzip
import hashlib
import io
import struct
import zlib

import pytest
import snappy
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from gazette_sdk.fragment.codecs import CODECS, CodecError, compressor, decompressor
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import parse_content_path
from support.vectors import golden

COMPRESSING = [codec for codec in CODECS if codec != pb.NONE]
BYTES = st.one_of(
    st.binary(max_size=3000),
    st.tuples(st.binary(min_size=1, max_size=9), st.integers(0, 40_000)).map(lambda t: t[0] * t[1]),
)
STEPS = st.lists(st.tuples(BYTES, st.booleans()), max_size=8)


def compress(codec, steps):
    out = io.BytesIO()
    writer = compressor(codec, out)
    for data, ends_batch in steps:
        writer.write(memoryview(data))
        if ends_batch:
            writer.end_batch()
    writer.close()
    return out.getvalue()


def decompress(codec, data):
    with decompressor(codec, io.BytesIO(data)) as reader:
        return reader.read()


@given(st.sampled_from(CODECS), STEPS)
def test_what_was_compressed_in_any_batches_is_read_back(codec, steps):
    assert decompress(codec, compress(codec, steps)) == b"".join(data for data, _ in steps)


@settings(max_examples=40)  # the law before this one covers the codecs themselves
@given(st.sampled_from(CODECS), STEPS, STEPS, st.integers(100, 50_000))
def test_concatenated_files_are_the_concatenated_content(codec, first, second, size):
    stored = compress(codec, first) + compress(codec, second)
    reader = decompressor(codec, io.BytesIO(stored))
    assert b"".join(iter(lambda: reader.read(size), b"")) == b"".join(
        data for data, _ in first + second
    )


@pytest.mark.parametrize("codec", COMPRESSING)
def test_every_batch_can_be_read_before_the_next_begins(codec):
    out = io.BytesIO()
    writer = compressor(codec, out)
    written = b""
    for number in range(3):
        data = b"batch %d " % number * 20_000
        writer.write(data)
        writer.end_batch()
        written += data
        reader = decompressor(codec, io.BytesIO(out.getvalue()))
        got = b""
        while len(got) < len(written):
            chunk = reader.read(len(written) - len(got))
            assert chunk, "a batch is not all there"
            got += chunk
        assert got == written


def test_gzip_closes_a_member_with_each_batch_and_offloaded_gzip_never():
    steps = [
        (b"one" * 100, True),
        (b"two" * 50, False),
        (b"2" * 7, True),
        (b"", True),
        (b"3", False),
    ]
    assert member_sizes(compress(pb.GZIP, steps)) == [300, 157, 1]
    assert member_sizes(compress(pb.GZIP_OFFLOAD_DECOMPRESSION, steps)) == [458]
    assert member_sizes(compress(pb.GZIP, [])) == [0]


def test_gzip_headers_are_those_of_other_writers():
    stored = compress(pb.GZIP, [(b"content", True), (b"more", True)])
    assert stored.startswith(bytes.fromhex("1f8b080000096e8800ff"))
    assert stored.count(bytes.fromhex("1f8b080000096e8800ff")) == 2
    assert gzip.decompress(stored) == b"contentmore"


def test_other_readers_understand_what_is_written():
    steps = [(b"some content " * 9000, True), (b"tail", False)]
    content = b"".join(data for data, _ in steps)
    assert snappy.StreamDecompressor().decompress(compress(pb.SNAPPY, steps)) == content
    zstd = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(compress(pb.ZSTANDARD, steps)))
    assert zstd.read() == content
    assert compress(pb.SNAPPY, []) == bytes.fromhex("ff060000734e61507059")


@pytest.mark.parametrize("codec", [pb.GZIP, pb.SNAPPY, pb.GZIP_OFFLOAD_DECOMPRESSION])
def test_a_file_cut_anywhere_is_an_error(codec):
    stored = compress(codec, [(b"some content " * 50, True)])
    for length in range(1, len(stored)):
        if codec == pb.SNAPPY and length == 10:
            continue  # a stream identifier alone is a whole, empty file
        with pytest.raises(CodecError, match="ends in the middle"):
            decompress(codec, stored[:length])


def test_a_zstandard_file_cut_anywhere_gives_less():
    content = b"some content " * 50
    stored = compress(pb.ZSTANDARD, [(content, True)])
    for length in range(1, len(stored) - 4):
        got = decompress(pb.ZSTANDARD, stored[:length])
        assert len(got) < len(content)
        assert content.startswith(got)


@pytest.mark.parametrize("codec", COMPRESSING)
def test_bytes_after_the_end_are_an_error(codec):
    stored = compress(codec, [(b"content", True)])
    with pytest.raises(CodecError):
        decompress(codec, stored + b"trailing bytes")


@pytest.mark.parametrize("codec", COMPRESSING)
def test_foreign_bytes_are_an_error(codec):
    with pytest.raises(CodecError):
        decompress(codec, b"this was never compressed, and is long enough to be seen as such")


@pytest.mark.parametrize("codec", [pb.GZIP, pb.SNAPPY])
def test_a_flipped_bit_of_the_content_is_an_error(codec):
    stored = bytearray(compress(codec, [(bytes(range(256)) * 8, True)]))
    stored[-12] ^= 0x10
    with pytest.raises(CodecError, match="damaged"):
        decompress(codec, bytes(stored))


def test_a_bomb_does_not_fill_the_memory():
    stored = zstandard.ZstdCompressor(level=19).compress(bytes(64 << 20))
    assert len(stored) < 10_000
    reader = decompressor(pb.ZSTANDARD, io.BytesIO(stored))
    assert len(reader.read(1 << 20)) <= 1 << 20
    bomb = compress(pb.GZIP, [(bytes(64 << 20), True)])
    reader = decompressor(pb.GZIP, io.BytesIO(bomb))
    assert len(reader.read(1 << 20)) <= 1 << 20
    assert len(reader._pending) < len(bomb)


def test_snappy_content_may_arrive_a_byte_at_a_time():
    class Slow(io.BytesIO):
        def read(self, size=-1):
            return super().read(min(size, 1))

    stored = compress(pb.SNAPPY, [(b"some content", True)]) + compress(pb.SNAPPY, [])
    assert decompressor(pb.SNAPPY, Slow(stored)).read() == b"some content"


def test_unknown_codecs_are_refused():
    for codec in (pb.INVALID, 9):
        with pytest.raises(ValueError, match="not a compression codec"):
            compressor(codec, io.BytesIO())
        with pytest.raises(ValueError, match="not a compression codec"):
            decompressor(codec, io.BytesIO())


@pytest.mark.parametrize("codec", CODECS)
def test_closing_a_reader_closes_what_it_reads_from(codec):
    raw = io.BytesIO(compress(codec, [(b"x", True)]))
    reader = decompressor(codec, raw)
    assert reader.read() == b"x"
    assert reader.readinto(bytearray(5)) == 0
    reader.close()
    reader.close()
    assert raw.closed


def stored_files():
    """Every file of the recording, with the journal it is of."""
    for journal in golden("broker/fragment_files.json")["journals"]:
        for file in journal["files"]:
            if "base64" in file:
                yield pytest.param(journal["journal"], file, id=file["path"])


@pytest.mark.parametrize(("journal", "file"), list(stored_files()))
def test_files_of_the_recording_are_read_back(journal, file):
    stored = base64.b64decode(file["base64"])
    assert len(stored) == file["size"]
    codec = parse_content_path(journal, file["path"].rpartition("/")[2]).compression_codec
    content = decompress(codec, stored)
    assert len(content) == file["content_len"]
    assert hashlib.sha1(content).hexdigest() == file["content_sha1"]
    if "gzip_members" in file:
        assert member_sizes(stored) == file["gzip_members"]


def member_sizes(stored):
    """Content length of each gzip member, by decoding them one by one."""
    sizes = []
    file = io.BytesIO(stored)
    while (begin := file.tell()) < len(stored):
        member = first_member(stored[begin:])
        sizes.append(member[1])
        file.seek(begin + member[0])
    return sizes


def first_member(stored):
    member = zlib.decompressobj(wbits=31)
    content = member.decompress(stored)
    assert member.eof
    used = len(stored) - len(member.unused_data)
    assert struct.unpack("<I", stored[used - 4 : used])[0] == len(content)
    return used, len(content)
