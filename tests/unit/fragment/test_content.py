from __future__ import annotations

import base64
import gzip
import hashlib
import io
import os
import re
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.errors import CorruptFragmentError, FragmentNotFoundError
from gazette_sdk.fragment import CODECS, compressor, decode_fragment, open_fragment, open_store
from gazette_sdk.fragment.stores import StoredContent
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import content_path, parse_content_path, sum_of
from support.vectors import cases, golden

GOOD = b"XXXXXhello, world!!!"


def encode(codec, content, batch=1 << 16):
    out = io.BytesIO()
    writer = compressor(codec, out)
    for begin in range(0, len(content), batch):
        writer.write(content[begin : begin + batch])
        writer.end_batch()
    writer.close()
    return out.getvalue()


def fragment_of(content, codec=pb.NONE, begin=100, **more):
    return pb.Fragment(
        journal="a/journal",
        begin=begin,
        end=begin + len(content),
        sum=sum_of(hashlib.sha1(content).digest()),
        compression_codec=codec,
        **more,
    )


def reading(stored, fragment, offset, encoding=""):
    content = StoredContent(io.BytesIO(stored), len(stored), encoding)
    return decode_fragment(content, fragment, offset, source="a test")


@pytest.mark.parametrize(
    "case", [case for case in cases("broker", "fragment_reader") if "url" not in case.values[0]]
)
def test_reading_follows_the_vectors(case):
    fragment = pb.Fragment(
        journal="a/journal",
        begin=100,
        end=case.get("fragment_end", 120),
        compression_codec=pb.GZIP,
    )
    reader = reading(encode(pb.GZIP, GOOD), fragment, case["offset"])
    assert reader.read(1000) == case["expect"].encode()
    if "error" in case:
        with pytest.raises(CorruptFragmentError, match="goes on after its end"):
            reader.read(1)
    else:
        assert reader.read(1) == b""


@given(st.sampled_from(CODECS), st.binary(min_size=1, max_size=2000), st.data())
def test_every_offset_of_every_codec_gives_the_rest(codec, content, data):
    fragment = fragment_of(content, codec)
    offset = data.draw(st.integers(0, len(content)))
    size = data.draw(st.integers(1, 700))
    with reading(encode(codec, content, 300), fragment, 100 + offset) as reader:
        assert reader.offset == 100 + offset
        got = b""
        while chunk := reader.read(size):
            got += chunk
            assert reader.offset == 100 + offset + len(got)
    assert got == content[offset:]


@pytest.mark.parametrize("codec", CODECS)
def test_a_large_fragment_is_read_into_buffers_and_summed_beside(codec):
    content = os.urandom(1 << 20) * 6
    with reading(encode(codec, content), fragment_of(content, codec), 100) as reader:
        buffer, got = bytearray(100_001), hashlib.sha1()
        while count := reader.readinto(buffer):
            got.update(buffer[:count])
    assert got.digest() == hashlib.sha1(content).digest()
    assert not [t for t in threading.enumerate() if t.name == "fragment-sum"]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("length", [1000, 5 << 20])
def test_a_flipped_byte_is_found_before_the_last_bytes_are_given(codec, length):
    content = os.urandom(1000) * (length // 1000)
    damaged = bytearray(content)
    damaged[len(damaged) // 3] ^= 1
    taken = []
    with (
        reading(encode(codec, bytes(damaged)), fragment_of(content, codec), 100) as reader,
        pytest.raises(CorruptFragmentError) as caught,
    ):
        taken.extend(iter(lambda: reader.read(1 << 20), b""))
    assert sum(map(len, taken)) < len(content)
    assert caught.value.journal == "a/journal"
    for said in ("a/journal", f"[100, {100 + len(content)})", "a test", "put a good copy"):
        assert said in str(caught.value)


@pytest.mark.parametrize("codec", CODECS)
def test_any_flipped_bit_of_a_stored_file_is_found(codec):
    content = b"".join(b"%d," % number for number in range(400))
    stored = encode(codec, content)
    fragment = fragment_of(content, codec)
    for at in range(0, len(stored), 7):
        damaged = bytearray(stored)
        damaged[at] ^= 1 << (at % 8)
        with reading(bytes(damaged), fragment, 100) as reader:
            try:
                got = reader.read()
                reader.read(1)
            except CorruptFragmentError:
                continue
        # Header fields that say nothing about the content may differ.
        assert got == content


@pytest.mark.parametrize("codec", CODECS)
def test_a_file_that_is_too_short_gives_what_there_is_and_an_error(codec):
    content = os.urandom(5000)
    with reading(encode(codec, content[:3000]), fragment_of(content, codec), 100) as reader:
        assert reader.read(10_000) == content[:3000]
        with pytest.raises(CorruptFragmentError, match="2000 bytes too early, at 3100"):
            reader.read(1)


@pytest.mark.parametrize("codec", CODECS)
def test_a_file_that_is_too_long_gives_the_fragment_and_an_error(codec):
    content = os.urandom(5000)
    with reading(encode(codec, content + b"more"), fragment_of(content, codec), 100) as reader:
        assert reader.read(10_000) == content
        with pytest.raises(CorruptFragmentError, match="goes on after its end 5100"):
            reader.read(1)


@pytest.mark.parametrize("codec", CODECS[1:])
def test_a_file_cut_in_its_middle_is_an_error(codec):
    content = os.urandom(5000)
    stored = encode(codec, content)
    with (
        reading(stored[:2000], fragment_of(content, codec), 100) as reader,
        pytest.raises(CorruptFragmentError, match="damaged"),
    ):
        reader.read()


def test_a_fragment_read_from_its_middle_verbatim_is_not_read_from_its_begin():
    class Counting(io.BytesIO):
        taken = 0

        def read(self, size=-1):
            data = super().read(size)
            self.taken += len(data)
            return data

    content = os.urandom(100_000)
    raw = Counting(content)
    fragment = fragment_of(content)
    with decode_fragment(StoredContent(raw, len(content)), fragment, 90_100, source="s") as reader:
        assert reader.read() == content[90_000:]
        assert raw.taken == 10_000


def test_passing_over_bytes():
    content = os.urandom(1_000_000)
    for codec in CODECS:
        with reading(encode(codec, content), fragment_of(content, codec), 110) as reader:
            assert reader.read(5) == content[10:15]
            reader.skip(85)
            assert reader.offset == 200
            assert reader.read(5) == content[100:105]
            reader.skip(500_000)
            assert reader.offset == 500_205
            reader.skip(10)
            assert reader.read() == content[500_115:]


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", ""])
def test_offloaded_gzip_is_read_whoever_decompresses_it(encoding):
    fragment = fragment_of(GOOD, pb.GZIP_OFFLOAD_DECOMPRESSION)
    stored = encode(pb.GZIP_OFFLOAD_DECOMPRESSION, GOOD)
    with reading(stored, fragment, 105, encoding) as reader:
        assert reader.read() == GOOD[5:]
    with reading(GOOD, fragment, 105) as reader:
        assert reader.read() == GOOD[5:]


def test_an_encoding_on_top_of_a_codec_is_taken_off_but_gzip_is_one_layer():
    snappy = gzip.compress(encode(pb.SNAPPY, GOOD))
    with reading(snappy, fragment_of(GOOD, pb.SNAPPY), 100, "gzip") as reader:
        assert reader.read() == GOOD
    with reading(encode(pb.GZIP, GOOD), fragment_of(GOOD, pb.GZIP), 100, "gzip") as reader:
        assert reader.read() == GOOD


def test_a_fragment_without_a_sum_is_not_verified():
    fragment = fragment_of(GOOD)
    fragment.ClearField("sum")
    with reading(GOOD.upper(), fragment, 100) as reader:
        assert reader.read() == GOOD.upper()


def test_a_reader_that_is_given_up_ends_its_thread():
    content = os.urandom(1 << 20) * 8
    with reading(encode(pb.NONE, content), fragment_of(content), 100) as reader:
        reader.read(10)
    assert reader.closed
    assert not [t for t in threading.enumerate() if t.name == "fragment-sum"]


def golden_files():
    for file in ("fragment_files", "file_only_gzip_offload"):
        recorded = golden(f"broker/{file}.json")
        for journal in recorded.get("journals", [recorded]):
            for stored in journal["files"]:
                if "base64" in stored and ".test/" not in stored["path"]:
                    yield pytest.param(stored, id=stored["path"])


@pytest.mark.parametrize("file", list(golden_files()))
def test_files_of_the_recording_are_read_through_a_store(file, tmp_path):
    path = tmp_path / file["path"]
    path.parent.mkdir(parents=True)
    path.write_bytes(base64.b64decode(file["base64"]))
    store = open_store("file:///", file_root=tmp_path)
    directory, _, name = file["path"].rpartition("/")
    fragment = parse_content_path(directory, name)
    assert content_path(fragment) == re.sub(r"\.gzod$", "", file["path"])
    with open_fragment(store, fragment, fragment.begin) as reader:
        content = reader.read()
    assert len(content) == file["content_len"]
    assert hashlib.sha1(content).hexdigest() == file["content_sha1"]


def test_a_fragment_that_is_not_stored_is_not_found(tmp_path):
    store = open_store("file:///", file_root=tmp_path)
    with pytest.raises(FragmentNotFoundError, match="a/journal/0000"):
        open_fragment(store, fragment_of(GOOD), 100)
