from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from gazette_sdk.broker.fragments import refresh
from gazette_sdk.broker.fragments.index import Index, Summary
from gazette_sdk.broker.fragments.refresh import (
    FIRST_RETRY_S_MAX,
    list_stores,
    refresh_index,
    retry_delay,
    whole_of,
)
from gazette_sdk.broker.spool.directory import SpoolDirectory
from gazette_sdk.errors import StoreError
from gazette_sdk.fragment.content import CoverSet
from gazette_sdk.fragment.registry import StoreRegistry
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.durations import from_ns
from gazette_sdk.protocol.fragments import length_of, parse_content_path
from support.spools import SpoolUser, until
from support.vectors import cases


@pytest.mark.parametrize("case", cases("broker", "walk_stores"))
def test_listing_of_stores(case, tmp_path):
    urls = []
    for url, paths in case["stores"].items():
        name = url.removeprefix("s3://").rstrip("/")
        urls.append(f"file:///{name}/")
        (tmp_path / name).mkdir()
        for path in paths:
            target = tmp_path / name / path
            target.parent.mkdir(parents=True, exist_ok=True)
            fragment = parse_content_path("a/journal", path.removeprefix("a/journal/"))
            target.write_bytes(bytes(length_of(fragment)))

    async def scenario():
        stores = StoreRegistry(tmp_path)
        found = await list_stores("a/journal", urls, stores)
        cover = CoverSet(whole_of(found))
        assert len(cover) == case.get("expect_count", len(case.get("expect", ())))
        index = Index()
        index.replace_remote(cover)
        if "query" in case:
            assert index.summary()[:2] == (case["begin"], case["end"])
            result = await index.query(pb.ReadRequest(offset=case["query"]["offset"]))
            name = case["query"]["store"].removeprefix("s3://")
            assert result.fragment.backing_store == f"file:///{name}"
            assert result.fragment.mod_time > 0
        await stores.aclose()

    asyncio.run(scenario())


def spec_of(*urls, interval_s=0.01):
    spec = pb.JournalSpec(name="a/journal")
    spec.fragment.stores.extend(urls)
    spec.fragment.refresh_interval.CopyFrom(from_ns(int(interval_s * 1e9)))
    return spec


NAME = "{:016x}-{:016x}-" + "1" * 40 + ".raw"


def put(root, begin, end):
    target = root / "a" / "journal" / NAME.format(begin, end)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(bytes(end - begin))


@contextlib.asynccontextmanager
async def refreshing(index, stores, lookup):
    def journal_of(journal):
        spec = lookup(journal)
        return SimpleNamespace(value=spec) if spec is not None else None

    task = asyncio.create_task(refresh_index("a/journal", index, stores, journal_of))
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await stores.aclose()


def test_the_index_follows_the_store_and_releases_local_files(tmp_path):
    async def scenario():
        root = tmp_path / "store"
        root.mkdir()
        index, specs = Index(), [spec_of("file:///store/")]
        with SpoolDirectory(tmp_path / "spools") as directory:
            user = SpoolUser(directory, on_commit=index.commit)
            await user.append(bytes(100))
            async with refreshing(index, StoreRegistry(tmp_path), lambda _: specs[0]) as task:
                await asyncio.wait_for(index.first_refresh.wait(), 5)
                assert (await index.query(pb.ReadRequest())).file is not None
                put(root, 0, 100)
                await until(lambda: index.summary().mod_time > 0)
                assert (await index.query(pb.ReadRequest())).file is None

                (root / "a" / "journal" / NAME.format(0, 100)).unlink()
                await until(lambda: index.summary() == Summary(0, 0, 0))

                other = tmp_path / "other"
                other.mkdir()
                put(other, 50, 60)
                specs[0] = spec_of("file:///other/")
                await until(lambda: index.summary()[:2] == (50, 60))

                specs[0] = None  # the journal is deleted
                await asyncio.wait_for(task, 5)

    asyncio.run(scenario())


def test_the_second_listing_comes_after_a_part_of_the_interval(tmp_path, monkeypatch):
    """So that journals which were created together are listed one after the other."""
    pauses = []

    async def pause(_index, delay_s, _wanted_pause_s, _waits):
        pauses.append(delay_s)

    monkeypatch.setattr(refresh, "_pause", pause)

    async def scenario():
        (tmp_path / "store").mkdir()
        urls = ["file:///missing/", "file:///store/", "file:///store/", "file:///store/"]
        found = [SimpleNamespace(value=spec_of(url, interval_s=300)) for url in urls]
        stores = StoreRegistry(tmp_path)

        def journal_of(_journal):
            return found.pop(0) if found else None

        async def list_some(_journal, urls, _stores):
            if "missing" in urls[0]:
                raise StoreError("it is down")
            return []

        monkeypatch.setattr(refresh, "list_stores", list_some)
        await refresh_index("a/journal", Index(), stores, journal_of, jitter=lambda: 0.25)
        await stores.aclose()

    asyncio.run(scenario())
    assert pauses == [retry_delay(0, 300, is_first=True), 75.0, 300.0, 300.0]


def test_a_listing_that_the_primarys_uploads_ask_for_comes_sooner(tmp_path, monkeypatch):
    monkeypatch.setattr(refresh, "WANTED_PAUSE_S", 0.001)

    async def scenario():
        root = tmp_path / "store"
        root.mkdir()
        index, spec = Index(), spec_of("file:///store/", interval_s=300)
        with SpoolDirectory(tmp_path / "spools") as directory:
            user = SpoolUser(directory, on_commit=index.commit)
            await user.append(bytes(100))
            async with refreshing(index, StoreRegistry(tmp_path), lambda _: spec):
                await asyncio.wait_for(index.first_refresh.wait(), 5)
                index.expect_stored(99)
                assert not index.listing_wanted.is_set()
                index.expect_stored(100)
                assert index.listing_wanted.is_set()
                await asyncio.sleep(0.02)  # listings which do not show it yet
                assert index.listing_wanted.is_set()
                assert (await index.query(pb.ReadRequest())).file is not None
                put(root, 0, 100)
                await until(lambda: index.summary().mod_time > 0)
                assert not index.listing_wanted.is_set()
                assert (await index.query(pb.ReadRequest())).file is None

    asyncio.run(scenario())


def test_a_listing_that_is_asked_for_begins_at_once_and_is_one_that_began_later(
    tmp_path, monkeypatch
):
    async def scenario():
        index, spec = Index(), spec_of("file:///store/", interval_s=300)
        begun, finish = asyncio.Queue(), asyncio.Queue()

        async def listing(*_):
            begun.put_nowait(None)
            if error := await finish.get():
                raise error
            return []

        monkeypatch.setattr(refresh, "list_stores", listing)
        async with refreshing(index, StoreRegistry(tmp_path), lambda _: spec):
            await begun.get()
            asking = asyncio.create_task(index.list_again())
            finish.put_nowait(None)  # this one may not show what was stored before it was asked
            await begun.get()
            assert not asking.done()
            finish.put_nowait(None)
            await asyncio.wait_for(asking, 5)
            asking = asyncio.create_task(index.list_again())
            await begun.get()
            finish.put_nowait(StoreError("it is away"))
            await asyncio.wait_for(asking, 5)  # the refresh reports it
            assert begun.empty()
            assert not index.listing_wanted.is_set()

    asyncio.run(scenario())


def test_a_read_in_a_hole_asks_for_listings_until_one_shows_its_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(refresh, "WANTED_PAUSE_S", 0.001)

    async def scenario():
        root = tmp_path / "store"
        put(root, 0, 10)
        put(root, 90, 100)
        index, spec = Index(), spec_of("file:///store/", interval_s=300)
        async with refreshing(index, StoreRegistry(tmp_path), lambda _: spec):
            await asyncio.wait_for(index.first_refresh.wait(), 5)
            head, hole, given_up = (
                asyncio.create_task(index.query(pb.ReadRequest(offset=offset, block=True)))
                for offset in (100, 10, 80)
            )
            await until(index.listing_wanted.is_set)
            put(root, 10, 20)
            assert (await asyncio.wait_for(hole, 5)).fragment.end == 20
            assert index.listing_wanted.is_set()
            given_up.cancel()
            await asyncio.wait([given_up])
            await until(lambda: not index.listing_wanted.is_set())
            assert not head.done()  # a read at the head asks for none
            head.cancel()

    asyncio.run(scenario())


def test_a_store_that_fails_leaves_the_index_as_it_is(tmp_path, caplog):
    async def scenario():
        root = tmp_path / "store"
        put(root, 0, 10)
        index, specs = Index(), [spec_of("file:///store/")]
        async with refreshing(index, StoreRegistry(tmp_path), lambda _: specs[0]):
            await until(lambda: index.summary()[:2] == (0, 10))
            put(root, 10, 20)
            specs[0] = spec_of("file:///store/", "s3://bucket/?unknown=argument")
            await until(lambda: "listing of the fragments of a/journal failed" in caplog.text)
            assert index.summary()[:2] == (0, 10), "a part of the truth is not adopted"
            specs[0] = spec_of("file:///store/")
            await until(lambda: index.summary()[:2] == (0, 20))

    asyncio.run(scenario())


def test_a_failed_first_listing_does_not_set_first_refresh(tmp_path, caplog):
    async def scenario():
        index, specs = Index(), [spec_of("s3://bucket/?unknown=argument", interval_s=300)]
        async with refreshing(index, StoreRegistry(tmp_path), lambda _: specs[0]):
            await until(lambda: "listing of the fragments of a/journal failed" in caplog.text)
            assert not index.first_refresh.is_set()
            specs[0] = spec_of("file:///store/")
            await asyncio.wait_for(index.first_refresh.wait(), 5)

    asyncio.run(scenario())


def test_an_error_of_a_store_is_an_error_of_the_listing(tmp_path):
    async def scenario():
        stores = StoreRegistry(tmp_path)
        with pytest.raises(StoreError):
            await list_stores("a/journal", ["s3://bucket/?unknown=argument"], stores)
        await stores.aclose()

    asyncio.run(scenario())


def test_delays_of_failed_listings():
    first = [retry_delay(n, 300, is_first=True) for n in range(40)]
    assert first[0] < 1
    assert first == sorted(first)
    assert first[-1] == FIRST_RETRY_S_MAX
    assert retry_delay(0, 0.1, is_first=True) == 0.1
    assert retry_delay(5, 300, is_first=False) == 300
