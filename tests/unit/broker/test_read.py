from __future__ import annotations

import asyncio
import io
import os
import threading

import pytest

from gazette_sdk.broker import read
from gazette_sdk.broker.fragments.index import Index
from gazette_sdk.broker.read import FileSpan, ReadServer
from gazette_sdk.broker.spool.directory import SpoolDirectory
from gazette_sdk.errors import CorruptFragmentError, FragmentNotFoundError
from gazette_sdk.fragment.codecs import compressor
from gazette_sdk.fragment.content import CoverSet
from gazette_sdk.fragment.registry import StoreRegistry
from gazette_sdk.fragment.stores import FileStore, open_store
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import content_path
from support.spools import SpoolUser, sum_of_content
from support.vectors import cases

STORE = "file:///store/"
HEADER = pb.Header(process_id=pb.ProcessSpec.ID(zone="z", suffix="broker"))


class Setting:
    """An index with a spool and a store, and a server of its reads."""

    def __init__(self, tmp_path, opener=None):
        self.root = tmp_path / "root"
        (self.root / "store").mkdir(parents=True)
        self.directory = SpoolDirectory(tmp_path / "spools")
        self.stores = StoreRegistry(self.root, opener=opener)
        self.server = ReadServer(self.stores)
        self.index = Index()
        self.user = SpoolUser(self.directory, on_commit=self.index.commit)

    def store(self, begin, content, codec=pb.NONE, *, stored=None, mod_time=1234567):
        """Put a fragment into the store and the index."""
        fragment = pb.Fragment(
            journal="a/journal",
            begin=begin,
            end=begin + len(content),
            sum=sum_of_content(content),
            compression_codec=codec,
            backing_store=STORE,
            mod_time=mod_time,
        )
        out = io.BytesIO()
        compressing = compressor(codec, out)
        compressing.write(content if stored is None else stored)
        compressing.close()
        path = self.root / "store" / content_path(fragment)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(out.getvalue())
        remote = [each for each in self.index._all if each.mod_time]
        self.index.replace_remote(CoverSet([*remote, fragment]))
        return path

    def read(self, *, chunk_bytes=1000, **request):
        """The items of a read, with content of files read and cut as a front does."""
        request = pb.ReadRequest(journal="a/journal", **request)
        return as_a_front(
            self.server.serve(request, self.index, HEADER, chunk_bytes=chunk_bytes), chunk_bytes
        )

    async def items(self, **request):
        async with asyncio.timeout(10):
            return [item async for item in self.read(**request)]

    async def into(self, got):
        """Read all content into a list, up to an error."""
        async for item in self.read():
            if isinstance(item, bytes):
                got.append(item)

    async def content(self, **request):
        return b"".join([i for i in await self.items(**request) if isinstance(i, bytes)])

    async def close(self):
        self.server.close()
        await self.stores.aclose()
        await asyncio.to_thread(self.directory.close)


async def as_a_front(items, chunk_bytes):
    try:
        async for item in items:
            if isinstance(item, FileSpan):
                yield item.metadata
                for at in range(item.position, item.position + item.length, chunk_bytes):
                    length = min(chunk_bytes, item.position + item.length - at)
                    yield os.pread(item.fd, length, at)
            else:
                yield item
    finally:
        await items.aclose()


def scenario(tmp_path, body, **options):
    async def run():
        setting = Setting(tmp_path, **options)
        try:
            await body(setting)
        finally:
            await setting.close()

    asyncio.run(run())


OURS = [
    case
    for case in cases("broker", "read_stream")
    if not case.values[0].keys() & {"claims", "assigned", "flags"}  # resolved before it comes here
]


@pytest.mark.parametrize("case", OURS)
def test_streams(case, tmp_path):
    async def body(setting):
        if "committed" in case:
            await setting.user.append(case["committed"].encode())
        if "remote_fragment" in case:
            remote = case["remote_fragment"]
            setting.store(
                remote["begin"],
                remote["content"].encode(),
                pb.CompressionCodec.Value(remote["codec"]),
                mod_time=remote["mod_time"],
            )
        chunk = case.get("chunk_size", 32736)
        items, offset = setting.read(chunk_bytes=chunk, **case["request"]), None
        pending = None
        for event in case["events"]:
            if pending is None and "cancel" not in event:
                pending = asyncio.ensure_future(anext(items, None))
                await asyncio.sleep(0)
            if "commit" in event:
                await setting.user.append(event["commit"].encode())
                continue
            if "cancel" in event:
                await items.aclose()
                return
            async with asyncio.timeout(10):
                item, pending = await pending, None
            if "eof" in event:
                assert item is None
                return
            if event["kind"] == "chunk":
                assert (offset, item) == (event["offset"], event["content"].encode())
                offset += len(item)
                continue
            offset = item.offset
            assert pb.Status.Name(item.status) == event["status"]
            assert (item.offset, item.write_head) == (event["offset"], event["write_head"])
            assert item.HasField("header") == event.get("header", False)
            assert bool(item.fragment_url) == event.get("fragment_url", False)
            if "fragment" in event:
                assert item.fragment.begin == event["fragment"]["begin"]
                assert item.fragment.end == event["fragment"]["end"]
                content_sum = item.fragment.sum
                expect = bytes.fromhex(event["fragment"]["sum"])
                got = b"".join(
                    [
                        content_sum.part1.to_bytes(8, "big"),
                        content_sum.part2.to_bytes(8, "big"),
                        content_sum.part3.to_bytes(4, "big"),
                    ]
                )
                assert got == expect

    scenario(tmp_path, body)


BIG = os.urandom(1000) * 3500 + b"the end"


@pytest.mark.parametrize(
    "codec", [pb.NONE, pb.GZIP, pb.ZSTANDARD, pb.SNAPPY, pb.GZIP_OFFLOAD_DECOMPRESSION]
)
def test_stored_fragments_of_every_codec_and_local_content_behind_them(codec, tmp_path):
    async def body(setting):
        setting.store(0, BIG, codec)
        await setting.user.roll(len(BIG))
        await setting.user.append(b"local")
        for offset in (0, 1, 1_500_000, len(BIG) - 1, len(BIG) + 2):
            assert await setting.content(offset=offset) == (BIG + b"local")[offset:]
        chunks = [i for i in await setting.items(offset=7) if isinstance(i, bytes)]
        assert max(map(len, chunks)) <= 1000
        assert await setting.content(offset=5, end_offset=2_000_000) == BIG[5:2_000_000]
        end = len(BIG) + 2
        assert await setting.content(offset=9, end_offset=end) == (BIG + b"lo")[9:]
        assert await setting.content(offset=9, end_offset=len(BIG)) == BIG[9:]

    scenario(tmp_path, body)


def test_a_stored_fragment_that_is_cut_gives_what_can_be_read_and_then_an_error(tmp_path):
    async def body(setting):
        setting.store(0, BIG, stored=BIG[:2_000_000])
        got = []
        with pytest.raises(CorruptFragmentError):
            await setting.into(got)
        assert b"".join(got) == BIG[:2_000_000]

    scenario(tmp_path, body)


def test_a_stored_fragment_that_is_too_long_gives_exactly_its_bytes_and_then_an_error(tmp_path):
    async def body(setting):
        setting.store(0, BIG, stored=BIG + b"too long")
        got = []
        with pytest.raises(CorruptFragmentError):
            await setting.into(got)
        assert b"".join(got) == BIG

    scenario(tmp_path, body)


async def list_once(index, remote):
    """List the stores when it is asked for, as the loop of a replica does."""
    await index.listing_asked.wait()
    index.begin_listing()
    index.replace_remote(CoverSet(remote))


def test_a_stored_fragment_that_vanished_is_an_error_once_the_stores_are_listed_again(tmp_path):
    async def body(setting):
        setting.store(0, b"content").unlink()
        listing = asyncio.ensure_future(list_once(setting.index, []))
        items = setting.read()
        assert (await anext(items)).status == pb.OK
        with pytest.raises(FragmentNotFoundError):
            await anext(items)
        assert listing.done()

    scenario(tmp_path, body)


def test_the_error_does_not_wait_for_a_store_that_hangs(tmp_path, monkeypatch):
    monkeypatch.setattr(read, "LISTING_TIMEOUT_S", 0.05)

    async def body(setting):
        setting.store(0, b"content").unlink()
        items = setting.read()
        assert (await anext(items)).status == pb.OK
        with pytest.raises(FragmentNotFoundError):
            await asyncio.wait_for(anext(items), 5)

    scenario(tmp_path, body)


@pytest.mark.parametrize("next_is_stored", [True, False])
@pytest.mark.parametrize("block", [True, False])
def test_the_next_read_skips_a_removed_begin(tmp_path, next_is_stored, block):
    """The index has the removed fragment still: a tool or a rule of the store removed it."""

    async def body(setting):
        if next_is_stored:
            setting.store(7, b"is left")
        else:
            setting.user.spool._begin_fragment(7, pb.NONE)
            await setting.user.append(b"is left")
        left = [each for each in setting.index._all if each.mod_time]
        setting.store(0, b"removed").unlink()
        listing = asyncio.ensure_future(list_once(setting.index, left))
        with pytest.raises(FragmentNotFoundError):
            await setting.items(block=block, end_offset=14)
        responses, content = [], b""
        async with asyncio.timeout(5):
            async for item in setting.read(block=block, end_offset=14):
                if isinstance(item, bytes):
                    content += item
                else:
                    responses.append(item)
        await listing
        assert content == b"is left"
        assert [(each.status, each.offset) for each in responses] == [(pb.OK, 7)]

    scenario(tmp_path, body)


def test_a_read_waits_for_a_begin_that_was_never_listed(tmp_path):
    """Another broker may have it, and store it."""

    async def body(setting):
        setting.user.spool._begin_fragment(7, pb.NONE)
        await setting.user.append(b"is left")
        setting.index.replace_remote(CoverSet())
        items = setting.read(block=True)
        waiting = asyncio.ensure_future(anext(items))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        setting.store(0, b"content")
        assert (await waiting).offset == 0
        assert await anext(items) == b"content"

    scenario(tmp_path, body)


def test_a_read_ends_cleanly_when_the_replica_ends(tmp_path):
    async def body(setting):
        await setting.user.append(b"content")
        items = setting.read(block=True)
        assert (await anext(items)).status == pb.OK
        assert await anext(items) == b"content"
        rest = asyncio.ensure_future(anext(items, None))
        await asyncio.sleep(0)
        assert not rest.done()
        setting.index.close()
        assert await asyncio.wait_for(rest, 5) is None

    scenario(tmp_path, body)


def test_a_span_keeps_its_file_open_when_everybody_else_let_go_of_it(tmp_path):
    async def body(setting):
        await setting.user.append(b"content")
        items = setting.server.serve(
            pb.ReadRequest(journal="a/journal"), setting.index, HEADER, chunk_bytes=100
        )
        span = await anext(items)
        assert span.metadata.status == pb.OK
        await items.aclose()
        await setting.user.roll()
        setting.user.completed.pop().file.discard()
        setting.index.close()
        fd = span.fd
        assert os.pread(span.fd, span.length, span.position) == b"content"
        del span, items
        # The background let go of it too, once its name is removed.
        async with asyncio.timeout(10):
            while True:
                try:
                    os.fstat(fd)
                except OSError:
                    return
                await asyncio.sleep(0.002)

    scenario(tmp_path, body)


def test_a_cancelled_read_of_a_store_that_hangs_ends_at_once_and_closes_later(tmp_path):
    release, opened, closed = threading.Event(), threading.Event(), threading.Event()

    class HangingFile(io.FileIO):
        def readinto(self, buffer):
            opened.set()
            release.wait(10)
            return super().readinto(buffer)

        def read(self, size=-1):
            opened.set()
            release.wait(10)
            return super().read(size)

        def close(self):
            if not self.closed:
                closed.set()
            super().close()

    class Hanging(FileStore):
        def _open(self, key):
            content = super()._open(key)
            path = content.raw.name
            content.raw.close()
            return type(content)(HangingFile(path), content.length)

    def opener(url):
        return Hanging(open_store(url, file_root=tmp_path / "root")._parsed, tmp_path / "root")

    async def body(setting):
        setting.store(0, BIG)
        items = setting.read()
        await anext(items)
        waiting = asyncio.ensure_future(anext(items))
        await asyncio.to_thread(opened.wait, 5)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(waiting, 5)
        await items.aclose()
        assert not closed.is_set(), "a thread still reads"
        release.set()
        assert await asyncio.to_thread(closed.wait, 5)

    scenario(tmp_path, body, opener=opener)
