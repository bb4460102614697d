"""FragmentStoreTransport over directories and the store in memory."""

from __future__ import annotations

import asyncio
import os
import time

import fsspec
import pytest

from gazette_sdk import errors
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import rules as rpc
from gazette_sdk.protocol.fragments import content_path
from gazette_sdk.transport import fragment_store
from gazette_sdk.transport.fragment_store import FragmentStoreTransport
from gazette_sdk.transport.journal_reader import OffsetJumpError, RetryReader
from gazette_sdk.transport.listing import get_journal, list_all_fragments, list_journals
from gazette_sdk.transport.wire import ANYWHERE
from support.fragment_files import fragment_of, store_fragment
from support.scripted_broker import in_loop

DAY_S = 86400


def store(root, journal, begin, content, *, codec=pb.NONE, postfix="", age_s=0):
    fragment = fragment_of(journal, begin, content, codec, postfix)
    path = store_fragment(root, fragment, content)
    at = time.time() - age_s
    os.utime(path, (at, at))
    return fragment


def at(root, **options):
    return FragmentStoreTransport(f"file://{root}", refresh_interval_s=0.02, **options)


async def read(transport, **request):
    request = pb.ReadRequest(**({"journal": "some/journal"} | request))
    items = [item async for item in transport.read(request)]
    for item in items:
        if isinstance(item, pb.ReadResponse):
            rpc.validate(item)
    return items


def content_of(items):
    return b"".join(item for item in items if isinstance(item, bytes))


@in_loop
async def test_a_journal_is_read_across_its_fragments(tmp_path):
    store(tmp_path, "some/journal", 0, b"hello ", codec=pb.GZIP)
    store(tmp_path, "some/journal", 6, b"big ", postfix="date=2024/hour=01")
    store(tmp_path, "some/journal", 6, b"big wide ")
    store(tmp_path, "some/journal", 15, b"world", codec=pb.GZIP)
    async with at(tmp_path) as transport:
        items = await read(transport)
        assert content_of(items) == b"hello big wide world"
        assert items[0].HasField("header")
        assert items[-1].status == pb.OFFSET_NOT_YET_AVAILABLE
        assert (items[-1].offset, items[-1].write_head) == (20, 20)
        assert content_of(await read(transport, offset=8)) == b"g wide world"
        assert content_of(await read(transport, offset=8, end_offset=17)) == b"g wide wo"
        metadata = await read(transport, offset=8, metadata_only=True)
        assert [item.fragment.begin for item in metadata] == [6]


@in_loop
async def test_the_head_is_found_by_offset_minus_one(tmp_path):
    store(tmp_path, "some/journal", 5, b"hello")
    async with at(tmp_path) as transport:
        [head] = await read(transport, offset=-1)
        assert (head.status, head.offset) == (pb.OFFSET_NOT_YET_AVAILABLE, 10)


@in_loop
async def test_a_blocking_read_follows_fragments_that_are_stored_later(tmp_path):
    store(tmp_path, "some/journal", 0, b"hello ")
    async with at(tmp_path) as transport:
        reader = RetryReader(transport, pb.ReadRequest(journal="some/journal", block=True))
        assert await reader.read() == b"hello "
        later = asyncio.create_task(reader.read())
        await asyncio.sleep(0)
        store(tmp_path, "some/journal", 6, b"world")
        assert await later == b"world"
        await reader.aclose()


@in_loop
async def test_missing_content_is_passed_over_once_it_is_old(tmp_path):
    store(tmp_path, "some/journal", 10, b"first")
    store(tmp_path, "some/journal", 20, b"second", age_s=DAY_S)
    store(tmp_path, "some/journal", 30, b"third")
    async with at(tmp_path) as transport:
        items = await read(transport)
        offsets = [item.offset for item in items if isinstance(item, pb.ReadResponse)]
        assert content_of(items) == b"firstsecond"
        assert offsets == [10, 20, 26]
        reader = RetryReader(transport, pb.ReadRequest(journal="some/journal"))
        with pytest.raises(OffsetJumpError):
            await reader.read()
        assert await reader.read() == b"first"
        await reader.aclose()


@in_loop
async def test_fragments_before_the_wanted_time_are_passed_over(tmp_path):
    store(tmp_path, "some/journal", 0, b"old", age_s=DAY_S)
    store(tmp_path, "some/journal", 3, b"new")
    async with at(tmp_path) as transport:
        items = await read(transport, begin_mod_time=int(time.time()) - 3600)
        assert content_of(items) == b"new"


@in_loop
async def test_an_absent_journal_is_not_found(tmp_path):
    async with at(tmp_path) as transport:
        [answer] = await read(transport)
        assert answer.status == pb.JOURNAL_NOT_FOUND
        with pytest.raises(errors.JournalNotFoundError):
            await get_journal(transport, "some/journal")


@in_loop
async def test_a_damaged_fragment_is_an_error_that_names_it(tmp_path):
    fragment = store(tmp_path, "some/journal", 0, b"hello world")
    (tmp_path / content_path(fragment)).write_bytes(b"hello_world")
    async with at(tmp_path) as transport:
        with pytest.raises(errors.CorruptFragmentError, match="some/journal"):
            await read(transport)


@in_loop
async def test_fragments_removed_after_they_were_listed_are_passed_over(tmp_path):
    gone = store(tmp_path, "some/journal", 0, b"gone")
    store(tmp_path, "some/journal", 4, b"here", age_s=DAY_S)
    async with FragmentStoreTransport(f"file://{tmp_path}", refresh_interval_s=60) as transport:
        await list_all_fragments(transport, pb.FragmentsRequest(journal="some/journal"))
        (tmp_path / content_path(gone)).unlink()
        items = await read(transport)
        assert content_of(items) == b"here"


@in_loop
async def test_labels_that_only_brokers_know_are_refused(tmp_path):
    store(tmp_path, "orders/part-000", 0, b"x")
    async with at(tmp_path) as transport:
        with pytest.raises(errors.ValidationError, match=r"no label 'topic'; .* prefix=DIRECTORY/"):
            await list_journals(transport, "topic=orders")
        assert (await list_journals(transport, "prefix=orders/")).journals


@in_loop
async def test_journals_are_the_directories_with_fragments(tmp_path):
    store(tmp_path, "topic/orders/part-000", 0, b"x", codec=pb.GZIP)
    store(tmp_path, "topic/orders/part-001", 0, b"x")
    store(tmp_path, "topic/others/part-000", 0, b"x")
    (tmp_path / "topic" / "notes.txt").write_text("not a fragment")
    async with at(tmp_path, content_type="application/x-ndjson") as transport:
        listing = await list_journals(transport)
        rpc.validate(listing)
        assert [j.spec.name for j in listing.journals] == [
            "topic/orders/part-000",
            "topic/orders/part-001",
            "topic/others/part-000",
        ]
        assert listing.journals[0].spec.fragment.compression_codec == pb.GZIP
        for selector, count in (
            ("prefix=topic/orders/", 2),
            ("name=topic/orders/part-001", 1),
            ("name:prefix=topic/o", 3),
            ("name in (topic/orders/part-001, topic/others/part-000)", 2),
            ("name=topic/absent", 0),
            ("content-type=application/x-ndjson", 3),
            ("content-type=text/plain", 0),
        ):
            listing = await list_journals(transport, selector)
            assert len(listing.journals) == count, selector


@in_loop
async def test_a_journal_with_postfixes_is_found_by_its_name(tmp_path):
    store(tmp_path, "some/journal", 0, b"x", postfix="date=2024")
    async with at(tmp_path) as transport:
        journal = await get_journal(transport, "some/journal;meta")
        assert journal.spec.name == "some/journal"


@in_loop
async def test_a_watch_shows_journals_that_appear(tmp_path):
    store(tmp_path, "some/journal", 0, b"x")
    async with at(tmp_path) as transport:
        watch = transport.list(pb.ListRequest(watch=True))
        first = await anext(watch)
        assert len(first.journals) == 1
        assert await anext(watch) == pb.ListResponse()
        store(tmp_path, "another/journal", 0, b"x")
        second = await anext(watch)
        assert len(second.journals) == 2
        assert second.header.etcd.revision > first.header.etcd.revision
        await watch.aclose()
        resumed = transport.list(pb.ListRequest(watch=True, watch_resume=second.header))
        assert (await anext(resumed)).header.etcd.revision > second.header.etcd.revision
        await resumed.aclose()


@in_loop
async def test_fragments_are_listed_by_pages_and_times(tmp_path):
    for begin in range(0, 10, 2):
        store(tmp_path, "some/journal", begin, b"ab", age_s=begin * DAY_S)
    now = int(time.time())
    async with at(tmp_path) as transport:
        request = pb.FragmentsRequest(journal="some/journal", page_limit=2)
        page = await transport.list_fragments(request)
        rpc.validate(page)
        assert ([f.spec.begin for f in page.fragments], page.next_page_token) == ([0, 2], 4)
        listed = await list_all_fragments(transport, request)
        assert [f.spec.begin for f in listed.fragments] == [0, 2, 4, 6, 8]
        request = pb.FragmentsRequest(
            journal="some/journal",
            begin_mod_time=now - 7 * DAY_S,
            end_mod_time=now - DAY_S,
            signatureTTL={"seconds": 60},
        )
        listed = await list_all_fragments(transport, request)
        assert [f.spec.begin for f in listed.fragments] == [2, 4, 6]
        assert listed.fragments[0].signed_url.startswith("file:///")


@in_loop
async def test_everything_else_is_refused_with_a_reason(tmp_path):
    async def nothing():
        yield pb.AppendRequest(journal="some/journal")

    async with at(tmp_path) as transport:
        with pytest.raises(errors.NotAllowedError, match="read-only"):
            await transport.append(nothing())
        with pytest.raises(errors.NotAllowedError, match="read-only"):
            await transport.apply(pb.ApplyRequest())
        with pytest.raises(errors.NotAllowedError, match="read-only"):
            await transport.fragment_store_health(pb.FragmentStoreHealthRequest())
        with pytest.raises(errors.NotAllowedError, match="read-only"):
            transport.replicate(nothing(), None)


@in_loop
async def test_a_closed_transport_says_so(tmp_path):
    transport = at(tmp_path)
    await transport.aclose()
    await transport.aclose()
    with pytest.raises(errors.ClosedError):
        await read(transport)


@in_loop
async def test_the_store_in_memory_is_read_as_well():
    fragment = fragment_of("some/journal", 0, b"hello")
    with fsspec.open(f"memory://transport-test/prefix/{content_path(fragment)}", "wb") as file:
        file.write(b"hello")
    async with FragmentStoreTransport("memory://transport-test/prefix/") as transport:
        assert content_of(await read(transport)) == b"hello"
        assert len((await list_journals(transport)).journals) == 1


@pytest.mark.parametrize("url", ["file://host/path", "s3://", "s3://bucket/?unknown=1"])
def test_a_url_that_is_no_store_is_a_configuration_error(url):
    with pytest.raises(errors.ConfigurationError, match=r"fragment store"):
        FragmentStoreTransport(url)


@in_loop
async def test_given_fragments_are_read_without_a_listing_until_one_is_gone(tmp_path, monkeypatch):
    listed = []
    found = fragment_store.readable

    def counted(*wanted):
        listed.append(wanted[1])
        return found(*wanted)

    monkeypatch.setattr(fragment_store, "readable", counted)
    given = [store(tmp_path, "some/journal", begin, b"12345") for begin in (5, 10)]
    store(tmp_path, "some/journal", 0, b"abcde")

    async with at(tmp_path) as transport:
        transport.use_fragments("some/journal", given)
        inside = await read(transport, offset=7, end_offset=15)
        assert content_of(inside) == b"34512345"
        assert listed == []
        assert content_of(await read(transport, offset=3, end_offset=7)) == b"de12"
        assert listed == ["some/journal"]
        transport.use_fragments("some/journal", given)
        (tmp_path / content_path(given[1])).unlink()
        store(tmp_path, "some/journal", 10, b"1234567890")
        assert content_of(await read(transport, offset=5, end_offset=15)) == b"1234512345"
        assert len(listed) == 2


@in_loop
async def test_a_fragment_that_stays_gone_is_an_error_after_some_attempts(tmp_path):
    gone = fragment_of("some/journal", 0, b"12345")
    store(tmp_path, "some/journal", 5, b"67890")

    class Forgetful(FragmentStoreTransport):
        async def read(self, request, target=ANYWHERE):
            raise errors.FragmentNotFoundError(f"{content_path(gone)} is not there")
            yield  # which makes it a generator

    transport = Forgetful(f"file://{tmp_path}")
    request = pb.ReadRequest(journal="some/journal", end_offset=5)
    attempts = []

    async def pause(attempt):
        attempts.append(attempt)

    reader = RetryReader(transport, request, pause=pause, patience_s=60)
    with pytest.raises(errors.FragmentNotFoundError, match="is not there"):
        await reader.read()
    await reader.aclose()
    assert attempts == [-1, 0, 1, 2]  # the first asks a broker to open it
