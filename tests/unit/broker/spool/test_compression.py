from __future__ import annotations

import gzip
import logging
import os
from pathlib import Path

import pytest

from gazette_sdk.broker.spool import files as compression_module
from gazette_sdk.broker.spool.files import Compression, FileView
from gazette_sdk.errors import CorruptFragmentError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import digest_of
from support.spools import sum_of_content

CONTENT = os.urandom(5000) * 100


class Content:
    """A file of content."""

    def __init__(self, path):
        self.path = path
        path.write_bytes(CONTENT)

    def read_at(self, position, length):
        with self.path.open("rb") as file:
            return os.pread(file.fileno(), length, position)


class Disk:
    """Counts descriptors' bytes, and is full for files beside the content, or for all."""

    def __init__(self, monkeypatch, room):
        self.room = room
        self.beside = set()
        monkeypatch.setattr(compression_module, "os", self)

    def __getattr__(self, name):
        return getattr(os, name)

    def write(self, fd, data):
        if "spools" in str(Path(f"/proc/self/fd/{fd}").readlink()):
            if len(data) > self.room:
                raise OSError(28, "No space left on device")
            self.room -= len(data)
        return os.write(fd, data)


@pytest.fixture
def content(tmp_path):
    (tmp_path / "spools").mkdir()
    return Content(tmp_path / "spools" / "x.content")


def digest():
    return digest_of(sum_of_content(CONTENT))


def finished(compression, content):
    file = compression.finish(content, len(CONTENT), digest())
    return FileView(file, file.fd, file.length_bytes).as_binary().read()


def test_batches_and_the_rest_are_compressed_once(content):
    compression = Compression(pb.GZIP)
    assert compression.add_batch(100_000)
    assert not compression.add_batch(200_000)
    assert compression.compress_batch(content)
    assert gzip.decompress(finished(compression, content)) == CONTENT
    assert not compression.compress_batch(content), "what is finished is finished"
    assert not compression.compress_batch(content)
    assert gzip.decompress(finished(compression, content)) == CONTENT
    assert [path.name for path in content.path.parent.iterdir()] == ["x.content"]


def test_on_a_full_disk_it_goes_elsewhere(content, monkeypatch, caplog):
    disk = Disk(monkeypatch, 1_000)
    compression = Compression(pb.GZIP)
    compression.add_batch(100_000)
    with caplog.at_level(logging.WARNING):
        compression.compress_batch(content)
    assert "no room to compress" in caplog.text
    assert disk.room <= 1_000
    assert gzip.decompress(finished(compression, content)) == CONTENT


def test_an_error_ends_background_work_and_another_attempt_begins_anew(content, monkeypatch):
    compression = Compression(pb.ZSTANDARD)
    for end in (100_000, 200_000, 300_000):
        compression.add_batch(end)
    path, content.path = content.path, content.path.with_name("gone")
    with pytest.raises(OSError, match="gone"):
        compression.compress_batch(content)
    content.path = path
    while compression.compress_batch(content):
        assert compression._position == 0, "nobody compresses again what failed"
    assert finished(compression, content)[:4] == b"\x28\xb5\x2f\xfd"


def test_changed_content_is_an_error_and_right_content_is_compressed_afterwards(content):
    compression = Compression(pb.GZIP)
    content.path.write_bytes(b"x" + CONTENT[1:])
    with pytest.raises(CorruptFragmentError, match="changed since it was committed"):
        finished(compression, content)
    content.path.write_bytes(CONTENT[:-1])
    with pytest.raises(OSError, match="ends before"):
        finished(compression, content)
    content.path.write_bytes(CONTENT)
    assert gzip.decompress(finished(compression, content)) == CONTENT


@pytest.mark.parametrize("length", [1, 100_000, 150_000, 250_000])
def test_a_fragment_that_was_cut_meanwhile_is_compressed_to_its_end(content, length):
    compression = Compression(pb.GZIP)
    for end in (100_000, 200_000, 300_000):
        compression.add_batch(end)
    compression.compress_batch(content)
    compression.compress_batch(content)
    beginning = CONTENT[:length]
    file = compression.finish(content, length, digest_of(sum_of_content(beginning)))
    assert (
        gzip.decompress(FileView(file, file.fd, file.length_bytes).as_binary().read()) == beginning
    )
