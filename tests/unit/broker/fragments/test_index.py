from __future__ import annotations

import asyncio
import gc
import os
import tempfile
import weakref
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gazette_sdk.broker.fragments import index as index_module
from gazette_sdk.broker.fragments.index import OFFSET_JUMP_AGE_S, Index, Summary
from gazette_sdk.broker.spool.directory import SpoolDirectory
from gazette_sdk.errors import ClosedError
from gazette_sdk.fragment.content import CoverSet
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


def test_a_gap_is_skipped_at_once_where_a_restore_let_the_journal_continue(directory):
    async def scenario():
        now = 1_500_000_000
        fragments = [
            {"begin": 100, "end": 200, "mod_time": now, "local": False},
            {"begin": 300, "end": 400, "mod_time": 0, "local": True},
            {"begin": 500, "end": 600, "mod_time": now, "local": False},
        ]
        index = index_of(fragments, directory, now)
        index.skipped_to = 300
        result = await index.query(pb.ReadRequest(offset=210))
        assert (result.status, result.offset) == (pb.OK, 300)
        result = await index.query(pb.ReadRequest(offset=410))
        assert (result.status, result.offset) == (pb.OFFSET_NOT_YET_AVAILABLE, 410)

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


# ----------------------------------------------------------- what is acknowledged


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 9)),
        st.tuples(st.just("roll"), st.just(0)),
        st.tuples(st.just("acknowledge"), st.integers(0, 100)),  # percent of what is committed
        st.tuples(st.just("store"), st.integers(0, 100)),  # percent of the closed fragments
    ),
    max_size=30,
)


@settings(max_examples=300)
@given(steps=STEPS)
def test_readers_are_never_ahead_of_what_is_acknowledged_or_stored(steps):
    """The index against a model: an offset is readable if it is acknowledged, or stored."""

    async def scenario(directory):
        index, file = Index(), a_file(directory)
        index.hold(is_reported=False)
        index.replace_remote(CoverSet())
        begin = end = acknowledged = stored = 0
        closed: list[tuple[int, int]] = []
        forms = {(0, 0)}
        for name, value in steps:
            match name:
                case "append":
                    end += value
                    forms.add((begin, end))
                    index.add_unacknowledged(fragment_of(begin, end), file)
                case "roll" if end > begin:
                    closed.append((begin, end))
                    begin = end
                case "acknowledge":
                    acknowledged = max(acknowledged, end * value // 100)
                    index.acknowledge(end * value // 100)
                case "store":
                    those = closed[: len(closed) * value // 100]
                    stored = max(stored, max((e for _, e in those), default=0))
                    there = closed[: sum(e <= stored for _, e in closed)]
                    index.replace_remote(
                        CoverSet(fragment_of(*span, 1_500_000_000) for span in there)
                    )
            readable = max(acknowledged, stored)
            assert index.readable_end == readable
            assert index.summary().end == end
            head = await index.query(pb.ReadRequest(offset=-1))
            assert (head.offset, head.write_head) == (readable, readable)
            for offset in range(end + 1):
                found = await index.query(pb.ReadRequest(offset=offset))
                assert (found.status == pb.OK) == (offset < readable)
                if found.fragment is not None:
                    assert found.fragment.begin <= offset < found.fragment.end <= readable
                everything = await index.query(
                    pb.ReadRequest(offset=offset, include_unacknowledged=True)
                )
                assert (everything.status == pb.OK) == (offset < end)
                assert everything.write_head == end

    with tempfile.TemporaryDirectory() as root, SpoolDirectory(Path(root)) as directory:
        asyncio.run(scenario(directory))


def test_a_read_gets_the_fragment_as_it_was_when_it_was_acknowledged(directory):
    async def scenario():
        index, user = Index(), SpoolUser(directory)
        user._on_commit = index.add_unacknowledged
        index.hold(is_reported=False)
        waiting = asyncio.ensure_future(index.query(pb.ReadRequest(block=True)))
        await user.append(b"first")
        first = user.spool.fragment
        await user.append(b"second")
        await asyncio.sleep(0)
        assert not waiting.done()
        index.acknowledge(first.end)
        found = await waiting
        assert (found.status, found.fragment, found.write_head) == (pb.OK, first, 5)
        assert found.file is user.spool.content_file
        index.acknowledge(3)  # of an earlier append
        assert index.readable_end == 5
        index.acknowledge(11)
        found = await index.query(pb.ReadRequest(offset=5))
        assert found.fragment == user.spool.fragment

    asyncio.run(scenario())


def test_a_read_that_does_not_block_waits_for_the_primary_to_tell_what_is_acknowledged(
    directory, monkeypatch
):
    async def scenario():
        index, file = Index(), a_file(directory)
        index.hold(is_reported=True)
        index.add_unacknowledged(fragment_of(0, 5), file)
        reads = [
            asyncio.ensure_future(index.query(pb.ReadRequest(offset=offset))) for offset in (0, -1)
        ]
        await asyncio.sleep(0)
        assert not any(read.done() for read in reads)
        index.acknowledge(5)
        content, head = await asyncio.gather(*reads)
        assert (content.status, content.fragment.end) == (pb.OK, 5)
        assert (head.offset, head.write_head) == (5, 5)
        # A primary that is gone tells nothing more.
        monkeypatch.setattr(index_module, "ACKNOWLEDGED_WAIT_S", 0.001)
        index.add_unacknowledged(fragment_of(0, 9), file)
        head = await index.query(pb.ReadRequest(offset=-1))
        assert (head.status, head.write_head) == (pb.OFFSET_NOT_YET_AVAILABLE, 5)
        index.release()
        assert index.readable_end == 9

    asyncio.run(scenario())


def test_a_read_that_does_not_block_waits_for_what_the_first_listing_may_show(
    directory, monkeypatch
):
    """A replica takes appends before it has listed the stores, if its head is known."""

    async def scenario():
        def restarted():
            index = Index()
            index.commit(fragment_of(6, 12), a_file(directory))
            return index, asyncio.ensure_future(index.query(pb.ReadRequest(offset=0)))

        index, read = restarted()
        beyond, head, stored = [
            asyncio.ensure_future(index.query(pb.ReadRequest(offset=offset, block=block)))
            for offset, block in ((12, False), (-1, True), (13, False))
        ]
        await asyncio.sleep(0)
        assert not any(each.done() for each in (read, beyond, head, stored))
        index.replace_remote(
            CoverSet(fragment_of(*span, mod_time=1_500_000_000) for span in ((0, 6), (12, 20)))
        )
        found = await read
        assert (found.status, found.fragment.end, found.write_head) == (pb.OK, 6, 20)
        assert [(await each).status for each in (beyond, stored)] == [pb.OK, pb.OK]
        await asyncio.sleep(0)
        assert not head.done(), "it waits for what follows the head"
        index.commit(fragment_of(20, 25), a_file(directory))
        assert (await head).offset == 20

        index, read = restarted()
        await asyncio.sleep(0)
        index.note_refresh_failure("refused")
        assert (await read).status == pb.OFFSET_NOT_YET_AVAILABLE

        index, read = restarted()
        await asyncio.sleep(0)
        index.close()
        with pytest.raises(ClosedError):
            await read

        monkeypatch.setattr(index_module, "FIRST_LISTING_WAIT_S", 0.001)
        index, read = restarted()
        assert (await read).status == pb.OFFSET_NOT_YET_AVAILABLE

    asyncio.run(scenario())


def test_an_index_follows_a_spool_if_it_has_every_byte_behind_it():
    def followed(*offsets):
        return [offset for offset in offsets if index.follows(fragment_of(offset, offset))]

    index = Index()
    index.replace_remote(CoverSet([fragment_of(0, 10, 1), fragment_of(10, 20, 1)]))
    assert followed(0, 5, 19, 20, 25) == [0, 5, 19]
    assert not index.follows(fragment_of(4, 5)), "a spool with content"
    index.replace_remote(CoverSet([fragment_of(0, 10, 1), fragment_of(12, 20, 1)]))
    assert followed(5, 10, 12, 15) == [12, 15]


def test_what_is_acknowledged_is_everything_until_something_is_held():
    index = Index()
    assert index.acknowledged_end > 1 << 62
    index.hold(end=5, is_reported=True)
    assert index.acknowledged_end == 5
    index.acknowledge(9)
    assert index.acknowledged_end == 9
    index.release()
    assert index.acknowledged_end > 1 << 62


def test_a_torn_fragment_has_no_content_and_no_append_begins_before_its_end():
    async def scenario():
        index = Index()
        torn = fragment_of(20, 30, 1, "s3://b/")
        following = fragment_of(30, 40, 2, "s3://b/")
        index.replace_remote(CoverSet([fragment_of(0, 10, 1, "s3://b/")]), CoverSet([torn]))
        assert [each.end for each in index.page(limit=10).fragments] == [10]
        assert index.page(limit=10, torn_only=True) == ([torn], 0)
        assert index.summary() == (0, 30, 0)
        assert index.readable_end == 30
        assert index.listed_end == 10
        result = await index.query(pb.ReadRequest(offset=-1))
        assert (result.status, result.offset) == (pb.OFFSET_NOT_YET_AVAILABLE, 30)
        result = await index.query(pb.ReadRequest(offset=10))
        assert (result.status, result.offset) == (pb.OFFSET_NOT_YET_AVAILABLE, 10)
        # Its reading fails, with what is wrong; a read that blocks waits for its content.
        result = await index.query(pb.ReadRequest(offset=25))
        assert (result.status, result.fragment, result.file) == (pb.OK, torn, None)
        blocked = asyncio.ensure_future(index.query(pb.ReadRequest(offset=25, block=True)))
        await asyncio.sleep(0)
        assert not blocked.done()
        index.replace_remote(
            CoverSet([fragment_of(0, 10, 1, "s3://b/"), following]), CoverSet([torn])
        )
        assert (await blocked).fragment == torn  # not passed over, as removed fragments are
        newer = await index.query(pb.ReadRequest(offset=25, begin_mod_time=2))
        assert (newer.offset, newer.fragment) == (30, following)
        index.replace_remote(CoverSet(), CoverSet([torn]))
        assert index.summary() == (0, 30, 0)
        index.replace_remote(CoverSet([fragment_of(0, 30, 1, "s3://b/")]))
        assert index.summary() == (0, 30, 1)
        assert index.page(limit=10, torn_only=True) == ([], 0)

    asyncio.run(scenario())
