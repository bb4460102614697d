"""What every kind of store must do, over a real service or its emulator."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import threading
import time
import urllib.request

import pytest

from gazette_sdk.cli.journals.fragments import FragmentCopies, Pace
from gazette_sdk.errors import FragmentNotFoundError, StoreAuthorizationError, StoreError
from gazette_sdk.fragment import (
    check_delete,
    check_store,
    compressor,
    list_fragments,
    open_fragment,
    open_url,
)
from gazette_sdk.fragment.codecs import CODECS
from gazette_sdk.fragment.listing import StoredFragment
from gazette_sdk.fragment.registry import StoreRegistry
from gazette_sdk.fragment.stores import FileStore
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import content_path, sum_of
from gazette_sdk.protocol.names import parse_store_url
from support.stores import STORE_KINDS, put_bytes

# Azure's client gives aiohttp bodies as bytes, which aiohttp advises against.
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")

PATH = "some/journal/day=2026-01-01/0000-with%25+chars=ü.raw"


def read(store, path):
    content = store.open(path)
    with content.raw as raw:
        data = raw.read()
    assert content.length == len(data)
    return data


def test_what_was_put_exists_and_is_read_back(store):
    assert not store.exists(PATH)
    put_bytes(store, PATH, b"hello")
    assert store.exists(PATH)
    assert not store.exists("some/journal/day=2026-01-01")
    assert read(store, PATH) == b"hello"


def test_an_empty_object_is_an_object(store):
    put_bytes(store, "empty", b"")
    assert store.exists("empty")
    assert read(store, "empty") == b""


def test_an_object_of_several_ranges_is_read_whole_and_from_its_middle(store):
    content = os.urandom(3_000_000)
    put_bytes(store, "large", content)
    assert read(store, "large") == content
    with store.open("large").raw as raw:
        raw.seek(2_000_000)
        assert raw.read(10) == content[2_000_000:2_000_010]
        raw.seek(5)
        assert raw.read(10) == content[5:15]


def test_length_and_sum_of_an_object_are_known_without_its_content(store):
    assert store.status(PATH) is None
    for content in (b"", b"hello", os.urandom(300_000)):
        put_bytes(store, PATH, content, overwrite=True)
        status = store.status(PATH)
        assert status.length == len(content)
        has_sum = store.url.startswith(("s3:", "gs:", "azure:"))
        assert status.md5 == (hashlib.md5(content).digest() if has_sum else b"")
        assert [found.length for found in store.list("")] == [len(content)]


def test_opening_what_is_not_there_says_so(store):
    with pytest.raises(FragmentNotFoundError, match="not/there"):
        store.open("not/there")


def test_an_object_that_is_there_is_kept_unless_it_shall_be_replaced(store):
    put_bytes(store, PATH, b"first")
    if not store.url.startswith("gs:"):  # whose emulator knows no preconditions
        put_bytes(store, PATH, b"other")
        assert read(store, PATH) == b"first"
    put_bytes(store, PATH, b"third", overwrite=True)
    assert read(store, PATH) == b"third"


def test_many_writers_of_one_object_all_succeed(store):
    failures = []

    def write():
        try:
            put_bytes(store, PATH, b"same")
        except StoreError as error:
            failures.append(error)

    writers = [threading.Thread(target=write) for _ in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert not failures
    assert read(store, PATH) == b"same"


def test_content_that_ends_too_early_is_not_stored(store):
    with pytest.raises(StoreError, match="too early"):
        store.put(PATH, io.BytesIO(b"short"), 10)
    assert not store.exists(PATH)
    assert list(store.list("")) == []


def test_a_listing_gives_paths_below_a_directory_and_times(store):
    before = int(time.time())
    for path in ("j/a", "j/b=c/d%", "jj/e", "k"):
        put_bytes(store, path, b"x")
    assert sorted(found.path for found in store.list("j/")) == ["a", "b=c/d%"]
    assert sorted(found.path for found in store.list("j")) == ["a", "b=c/d%"]
    assert sorted(found.path for found in store.list("")) == ["j/a", "j/b=c/d%", "jj/e", "k"]
    assert list(store.list("nothing/here/")) == []
    for found in store.list(""):
        assert before - 2 <= found.mod_time <= time.time() + 2


def test_removing_an_object_removes_it_alone(store):
    put_bytes(store, "j/a", b"x")
    put_bytes(store, "j/b", b"x")
    store.remove("j/a")
    assert not store.exists("j/a")
    assert store.exists("j/b")


def test_two_prefixes_of_one_bucket_do_not_see_each_other(store, make_store):
    put_bytes(store, "a", b"x")
    assert not store._parsed.key("a").startswith("/")
    assert list(make_store(store._parsed.scheme).list("")) == []


def test_a_signed_url_gives_the_object_to_anybody(store):
    put_bytes(store, PATH, b"signed")
    url = store.sign_get(PATH, 60)
    if url.startswith("http"):
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert answer.read() == b"signed"
    else:
        assert url.startswith(f"{store._parsed.scheme}://")


def test_a_store_that_works_passes_its_probes(store):
    check_store(store)
    check_store(store)
    check_delete(store, "recovery/")
    check_delete(store, "")
    assert [found.path for found in store.list("")] == [".test/health-check"]


@pytest.mark.parametrize("kind", ["file", "s3", "gs", "azure", "webhdfs", "hdfs"])
def test_a_store_without_its_bucket_is_refused_for_good(make_store, kind):
    store = make_store(kind, create=False)
    with pytest.raises(StoreAuthorizationError, match="exist") as caught:
        put_bytes(store, "a", b"x")
    assert store.is_authorization_error(caught.value)
    assert caught.value.store == store.url
    with pytest.raises(StoreAuthorizationError, match="put"):
        check_store(store)


@pytest.mark.parametrize("codec", pb.CompressionCodec.values()[1:])
def test_a_fragment_of_every_codec_is_listed_and_read(store, codec):
    content = b"".join(b"line %d\n" % number for number in range(20_000))
    fragment = pb.Fragment(
        journal="a/journal",
        begin=1000,
        end=1000 + len(content),
        sum=sum_of(hashlib.sha1(content).digest()),
        compression_codec=codec,
        path_postfix="day=1",
    )
    stored = io.BytesIO()
    writer = compressor(codec, stored)
    for begin in range(0, len(content), 50_000):
        writer.write(content[begin : begin + 50_000])
        writer.end_batch()
    writer.close()
    encoding = "gzip" if codec == pb.GZIP_OFFLOAD_DECOMPRESSION else ""
    put_bytes(store, content_path(fragment), stored.getvalue(), encoding)
    put_bytes(store, "a/journal/README.txt", b"not a fragment")

    (listed,) = list_fragments(store, "a/journal")
    assert listed.backing_store == store.url
    assert listed.mod_time > 0
    fragment.backing_store, fragment.mod_time = listed.backing_store, listed.mod_time
    assert listed == fragment

    for offset in (1000, 1001, 101_000, fragment.end):
        with open_fragment(store, listed, offset) as reader:
            assert reader.read() == content[offset - 1000 :]
    url = store.sign_get(content_path(listed), 60)
    if store.url.startswith("gs:") and encoding:
        return  # its emulator neither decompresses nor says that it does not
    if url.startswith(("http", "file")):
        root = getattr(store, "_root", None)
        with open_url(url, listed, 1500, file_root=root) as reader:
            assert reader.read() == content[500:]


def test_find_and_replace_apply_to_every_operation(make_store):
    for kind in STORE_KINDS:
        store = make_store(kind, "", find="bar/", replace="baz/")
        put_bytes(store, "foo/bar/x", b"x")
        assert store.exists("foo/bar/x")
        assert read(store, "foo/bar/x") == b"x"
        assert [found.path for found in store.list("foo/bar/")] == ["x"]
        assert [found.path for found in store.list("")] == ["foo/baz/x"]
        assert "foo/baz/x" in store.sign_get("foo/bar/x", 60)
        store.remove("foo/bar/x")
        assert not store.exists("foo/bar/x")


@pytest.mark.parametrize("codec", CODECS)
def test_fragments_are_copied_to_it_and_back(store, codec, tmp_path):
    content = b"content that moves to another store\n" * 100
    fragment = pb.Fragment(
        journal="a/journal",
        begin=7,
        end=7 + len(content),
        sum=sum_of(hashlib.sha1(content).digest()),
        compression_codec=codec,
    )
    file = io.BytesIO()
    writer = compressor(codec, file)
    writer.write(content)
    writer.close()
    files = {url: FileStore(parse_store_url(url), tmp_path) for url in ("file:///a/", "file:///b/")}
    for url, each in files.items():
        (tmp_path / url[-2]).mkdir()
        assert each.url == url
    put_bytes(files["file:///a/"], content_path(fragment), file.getvalue())
    opened = StoreRegistry(opener=({store.url: store} | files).__getitem__)

    async def copy(old, new):
        fragment.backing_store = old
        async with FragmentCopies(opened, new, Pace(0)) as copies:
            return [await copies.copy(StoredFragment(fragment, -1)) for _ in range(2)]

    for old, new in (("file:///a/", store.url), (store.url, "file:///b/")):
        assert asyncio.run(copy(old, new)) == [True, False]
    assert read(files["file:///b/"], content_path(fragment)) == file.getvalue()
    with open_fragment(store, fragment, fragment.begin) as reader:
        assert reader.readall() == content
