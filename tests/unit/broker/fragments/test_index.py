from __future__ import annotations

import asyncio
import gc
import os
import weakref

import pytest

from gazette_sdk.broker.fragments.index import OFFSET_JUMP_AGE_S, Index, Summary
from gazette_sdk.broker.spool.directory import SpoolDirectory
from gazette_sdk.errors import ClosedError
from gazette_sdk.fragment.cover import CoverSet
from gazette_sdk.protocol import broker_pb2 as pb
from support.spools import SpoolUser
from support.vectors import cases


@pytest.fixture
def directory(tmp_path):
    with SpoolDirectory(tmp_path / "spools") as made:
        yield made


def fragment_of(begin, end, mod_time=0, store=""):
    return pb.Fragment(
        journal="a/journal",
        begin=begin,
        end=end,
        sum=pb.SHA1Sum(),
        compression_codec=pb.NONE,
        mod_time=mod_time,
        backing_store=store,
    )


def a_file(directory):
    """An open content file."""
    storage = directory.journal("a/journal", create_revision=1, cluster_id=1)
    return storage.create(0, pb.NONE)[0]


def index_of(fragments, directory, now=1_500_000_000):
    index = Index(now=lambda: now)
    index.replace_remote(
        CoverSet(
            fragment_of(f["begin"], f["end"], f["mod_time"]) for f in fragments if not f["local"]
        )
    )
    for f in fragments:
        if f["local"]:
            index.commit(fragment_of(f["begin"], f["end"]), a_file(directory))
    return index


def check(result, expect):
    assert pb.Status.Name(result.status) == expect["status"]
    assert result.offset == expect.get("offset", result.offset)
    assert result.write_head == expect.get("write_head", result.write_head)
    if "fragment" in expect:
        assert [result.fragment.begin, result.fragment.end] == expect["fragment"]
    if "local_file" in expect:
        assert (result.file is not None) == expect["local_file"]


@pytest.mark.parametrize("case", cases("broker", "index_query"))
def test_queries(case, directory):
    async def scenario():
        if "fragments" in case:
            index = index_of(case["fragments"], directory)
            result = await index.query(pb.ReadRequest(**case["request"]))
            check(result, case["expect"])
            return
        index, file, task = Index(), a_file(directory), None
        for step in case["steps"]:
            if "commit_local" in step:
                index.commit(fragment_of(*step["commit_local"]), file)
            elif "start_query" in step:
                task = asyncio.create_task(index.query(pb.ReadRequest(**step["start_query"])))
                await asyncio.sleep(0)
                assert not task.done()
            elif "cancel" in step:
                task.cancel()
            elif "error" in step["expect"]:
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert not index._waiters, "no waiter is left behind"
            else:
                check(await asyncio.wait_for(task, 5), step["expect"])

    asyncio.run(scenario())


def test_a_gap_is_skipped_if_the_next_fragment_is_old(directory):
    async def scenario():
        now = 1_500_000_000
        for age, status in [(OFFSET_JUMP_AGE_S - 1, 6), (OFFSET_JUMP_AGE_S + 1, 0)]:
            index = index_of(
                [
                    {"begin": 100, "end": 200, "mod_time": now, "local": False},
                    {"begin": 300, "end": 400, "mod_time": now - age, "local": False},
                ],
                directory,
                now,
            )
            result = await index.query(pb.ReadRequest(offset=210))
            assert result.status == status
            assert result.offset == (300 if status == 0 else 210)

    asyncio.run(scenario())


def test_local_files_are_released_when_a_listing_covers_their_bytes(directory):
    async def scenario():
        index, one, two = Index(), a_file(directory), a_file(directory)
        index.commit(fragment_of(0, 50), one)
        index.commit(fragment_of(0, 100), one)  # it grew
        index.commit(fragment_of(100, 150), two)
        assert index.summary() == Summary(0, 150, 0)

        index.replace_remote(CoverSet([fragment_of(0, 60, 7, "s3://b/")]))
        assert (await index.query(pb.ReadRequest(offset=0))).file is one, "bytes 60-100 are not"

        reading = (await index.query(pb.ReadRequest(offset=70))).file
        fd, gone = one.fd, weakref.ref(one)
        del one
        index.replace_remote(
            CoverSet([fragment_of(0, 60, 7, "s3://b/"), fragment_of(60, 100, 8, "s3://b/")])
        )
        result = await index.query(pb.ReadRequest(offset=70))
        assert (result.fragment.begin, result.file) == (60, None)
        assert (await index.query(pb.ReadRequest(offset=120))).file is two
        assert index.summary() == Summary(0, 150, 0)

        os.fstat(fd)  # a read still uses the file
        del reading
        assert gone() is None
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)

    asyncio.run(scenario())


def test_a_fragment_that_vanishes_from_the_store_vanishes_from_the_index():
    async def scenario():
        index = Index()
        assert not index.first_refresh.is_set()
        index.replace_remote(CoverSet([fragment_of(0, 10, 1, "s3://b/"), fragment_of(10, 20, 2)]))
        assert index.first_refresh.is_set()
        assert index.summary() == Summary(0, 20, 2)
        index.replace_remote(CoverSet([fragment_of(10, 20, 2)]))
        assert index.summary() == Summary(10, 20, 2)
        index.replace_remote(CoverSet())
        assert index.summary() == Summary(0, 0, 0)

    asyncio.run(scenario())


def test_a_replica_that_ends_wakes_all_readers(directory):
    async def scenario():
        index = Index()
        waiting = [
            asyncio.create_task(index.query(pb.ReadRequest(offset=5, block=True))) for _ in range(3)
        ]
        await asyncio.sleep(0)
        index.close()
        for task in waiting:
            with pytest.raises(ClosedError):
                await asyncio.wait_for(task, 5)
        index.commit(fragment_of(0, 9), a_file(directory))
        assert index.summary() == Summary(0, 0, 0)

    asyncio.run(scenario())


def test_committed_bytes_of_a_spool_can_be_read_at_once(directory):
    async def scenario():
        index = Index()
        user = SpoolUser(directory, on_commit=index.commit)
        waiting = asyncio.create_task(index.query(pb.ReadRequest(offset=0, block=True)))
        await user.spool.write(b"content", 0)
        await asyncio.sleep(0)
        assert not waiting.done(), "what is not committed is not visible"
        await user.append(b" and more")
        result = await asyncio.wait_for(waiting, 5)
        assert result.file.read_at(0, 100) == b"content and more"
        assert result.write_head == 16
        await user.roll()
        await user.append(b"next")
        result = await index.query(pb.ReadRequest(offset=17))
        assert (result.fragment.begin, result.file.read_at(0, 9)) == (16, b"next")
        user.completed.clear()
        del user
        gc.collect()
        assert (await index.query(pb.ReadRequest(offset=3))).file.read_at(0, 7) == b"content"

    asyncio.run(scenario())
