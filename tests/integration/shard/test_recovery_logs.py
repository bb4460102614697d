"""Recovery logs over a real broker: recording, standbys, hand-offs, fences, missing content."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from gazette_sdk.errors import (
    CallError,
    ClosedError,
    FencedError,
    GazetteError,
    JournalNotFoundError,
    RecoveryError,
    ValidationError,
)
from gazette_sdk.journals.changes import list_named
from gazette_sdk.protocol import broker_pb2
from gazette_sdk.protocol import recoverylog_pb2 as pb
from gazette_sdk.protocol.fragments import parse_content_path
from gazette_sdk.protocol.labels import (
    CONTENT_TYPE,
    RECOVERY_LOG,
    needed_from,
    pairs_of,
    set_value,
)
from gazette_sdk.shard.recovery import player as playback
from gazette_sdk.shard.recovery.fsm import FSM
from gazette_sdk.shard.recovery.hints import (
    CreateFile,
    FileChange,
    RemoveFile,
    RenameFile,
    SetProperty,
    WriteFile,
    from_bytes,
    to_json,
)
from gazette_sdk.shard.recovery.log import LogPruning, RecoveryLog, ShardHints, fence_of
from gazette_sdk.shard.recovery.player import Playback, Recovered
from gazette_sdk.shard.recovery.recorder import Recorder
from gazette_sdk.testing.transport_faults import FaultyTransport
from gazette_sdk.transport.append.appender import AppendService
from gazette_sdk.transport.append.queue import DependencyFailedError
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.wire import ANYWHERE, AppendItem, Target
from support.brokers import Client, a_broker, journal_spec
from support.etcd import run, within
from support.recovery_logs import files_of
from support.spools import until

LOG = "recovery/shard-0"
OTHER_LOG = "recovery/shard-1"

T = TypeVar("T")


def empty(log: str = LOG) -> pb.FSMHints:
    return pb.FSMHints(log=log)


@contextlib.asynccontextmanager
async def logs(etcd, tmp_path: Path, **spec: object) -> AsyncIterator[Client]:
    """A broker with two recovery logs."""
    async with a_broker(etcd, tmp_path) as (_, client):
        await client.apply(journal_spec(LOG, **spec), journal_spec(OTHER_LOG, **spec))
        for log in (LOG, OTHER_LOG):
            await client.append_when_ready(log)
        yield client


class Standby:
    """A playback, and the task that runs it."""

    def __init__(self, transport: Transport, hints: pb.FSMHints, directory: Path) -> None:
        self.directory = directory
        self.playback = Playback(transport, hints, directory)
        self.task = asyncio.create_task(self.playback.run())

    async def tailing(self) -> None:
        """Wait until it tails; raises what playback raised."""
        waiting = asyncio.create_task(self.playback.tailing.wait())
        await asyncio.wait({waiting, self.task}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self.task.done():
            self.task.result()

    async def hand_off(self, author: int) -> Recovered:
        recovered = await self.playback.hand_off(author)
        await self.task
        return recovered

    async def finish(self) -> Recovered:
        recovered = await self.playback.finish()
        await self.task
        return recovered

    async def cancel(self) -> None:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


class Primary:
    """A recorder, and its fenced appends."""

    def __init__(self, transport: Transport, recovered: Recovered, author: int) -> None:
        self.service = AppendService(transport)
        appender = self.service.appender(recovered.log)
        self.log = RecoveryLog(appender, recovered.log, author)
        self.recorder = Recorder(
            recovered.fsm, log=recovered.log, author=author, write_head=recovered.write_head
        )

    async def open(self) -> None:
        if self.recorder.opening:
            self.recorder.appended(await self.log.take_over(self.recorder.opening))

    async def commit(self, *changes: FileChange) -> None:
        self.recorder.appended(await self.log.append(self.recorder.record(changes)))


async def restored(transport: Transport, hints: pb.FSMHints, directory: Path) -> dict[str, bytes]:
    """The files at the write head."""
    await Standby(transport, hints, directory).finish()
    return files_of(directory)


async def new_primary(
    client: Client, tmp_path: Path, author: int, hints: pb.FSMHints | None = None
) -> Primary:
    standby = Standby(client.transport, hints or empty(), tmp_path / f"primary-{author}")
    return Primary(client.transport, await standby.hand_off(author), author)


async def registers(client: Client, log: str = LOG) -> dict[str, str]:
    response = await client.append(log)
    return dict(pairs_of(response.registers))


CHANGES: Sequence[FileChange] = (
    CreateFile("/a", b"content of a"),
    CreateFile("/dir/b", b"b"),
    SetProperty("/IDENTITY", "me"),
)
FILES = {"/a": b"content of a", "/dir/b": b"b", "/IDENTITY": b"me"}


def test_a_recorded_store_is_restored_and_goes_on_at_its_new_primary(etcd, tmp_path):
    async def scenario():
        async with logs(etcd, tmp_path) as client:
            first = await new_primary(client, tmp_path, 1234)
            assert await registers(client) == {"author": fence_of(1234)}
            await first.commit(*CHANGES)
            hints = from_bytes(to_json(first.recorder.hints()))
            await first.commit(WriteFile("/a", 12, b", longer"), RemoveFile("/dir/b"))
            longer = {"/a": b"content of a, longer", "/IDENTITY": b"me"}
            for number, given in enumerate((empty(), hints)):
                assert await restored(client.transport, given, tmp_path / f"{number}") == longer

            second = await new_primary(client, tmp_path, 5678, hints)
            assert files_of(tmp_path / "primary-5678") == longer
            assert await registers(client) == {"author": fence_of(5678)}
            await second.commit(RenameFile("/a", "/dir/c"))
            hints = second.recorder.hints()
            assert await restored(client.transport, hints, tmp_path / "last") == {
                "/dir/c": b"content of a, longer",
                "/IDENTITY": b"me",
            }

    run(scenario())


def test_a_standby_follows_the_log_and_takes_over_at_its_head(etcd, tmp_path):
    async def scenario():
        async with logs(etcd, tmp_path) as client:
            primary = await new_primary(client, tmp_path, 1)
            standbys = [
                Standby(client.transport, empty(), tmp_path / name) for name in ("one", "two")
            ]
            for standby in standbys:
                await standby.tailing()
            for number in range(20):
                await primary.commit(CreateFile(f"/{number}", b"x" * number))
            results = [await standby.hand_off(9 + n) for n, standby in enumerate(standbys)]
            expected = {f"/{number}": b"x" * number for number in range(20)}
            for standby in standbys:
                assert files_of(standby.directory) == expected
                assert standby.playback.bytes_live == sum(range(20))
                assert standby.playback.bytes_read > 0
            assert results[0].fsm.hints(LOG) == results[1].fsm.hints(LOG)
            assert results[1].fsm.next_seq_no == results[0].fsm.next_seq_no + 1
            assert await registers(client) == {"author": fence_of(10)}

    run(scenario())


def test_hand_offs_that_race_all_end_and_one_primary_is_left(etcd, tmp_path):
    async def scenario():
        async with logs(etcd, tmp_path) as client:
            primary = await new_primary(client, tmp_path, 1)
            await primary.commit(*CHANGES)
            standbys = [Standby(client.transport, empty(), tmp_path / f"{n}") for n in range(4)]
            for standby in standbys:
                await standby.tailing()
            results = await asyncio.gather(
                *(standby.hand_off(100 + n) for n, standby in enumerate(standbys))
            )
            by_author = {
                fence_of(100 + n): Primary(client.transport, result, 100 + n)
                for n, result in enumerate(results)
            }
            holder = (await registers(client))["author"]
            for author, each in by_author.items():
                if author == holder:
                    await each.commit(CreateFile("/mine", author.encode()))
                else:
                    with pytest.raises(FencedError):
                        await each.commit(CreateFile("/mine", author.encode()))
            found = await restored(client.transport, empty(), tmp_path / "last")
            assert found == {**FILES, "/mine": holder.encode()}

    run(scenario())


def test_a_hand_off_waits_for_brokers_that_refuse_appends_without_a_status(
    etcd, tmp_path, monkeypatch
):
    async def scenario():
        async with logs(etcd, tmp_path) as client:
            primary = await new_primary(client, tmp_path, 1)
            await primary.commit(*CHANGES)
            append = client.transport.append
            refused = [True, True, False] * 2  # of the write head, and of the fence

            async def refusing(requests, target=ANYWHERE):
                if refused and refused.pop(0):
                    raise CallError("this broker is stopping")
                return await append(requests, target)

            monkeypatch.setattr(client.transport, "append", refusing)
            standby = Standby(client.transport, empty(), tmp_path / "standby")
            await standby.hand_off(2)
            assert not refused
            assert files_of(standby.directory) == FILES
            assert (await registers(client))["author"] == fence_of(2)

    run(scenario())


def test_a_fenced_primary_never_commits_again(etcd, tmp_path):
    async def scenario():
        async with logs(etcd, tmp_path) as client:
            zombie = await new_primary(client, tmp_path, 1)
            await zombie.commit(*CHANGES)
            successor = await new_primary(client, tmp_path, 2)
            head = (await client.append(LOG)).commit.end
            with pytest.raises(FencedError, match=LOG) as caught:
                await zombie.commit(CreateFile("/zombie"))
            assert zombie.log.failure is caught.value
            with pytest.raises(FencedError):
                await zombie.commit()  # an empty append is checked, too
            zombie.recorder.failed(caught.value)
            with pytest.raises(FencedError):
                zombie.recorder.record([])
            assert (await client.append(LOG)).commit.end == head
            await successor.commit(CreateFile("/successor", b"s"))
            found = await restored(client.transport, empty(), tmp_path / "last")
            assert found == {**FILES, "/successor": b"s"}

    run(scenario())


def test_a_commit_waits_for_what_it_depends_on_and_fails_with_it(etcd, tmp_path):
    async def scenario():
        async with logs(etcd, tmp_path) as client:
            primary = await new_primary(client, tmp_path, 1)
            head = (await client.append(LOG)).commit.end
            loop = asyncio.get_running_loop()
            output: asyncio.Future[None] = loop.create_future()
            contents = primary.recorder.record([CreateFile("/a")])
            commit = primary.log.append(contents, after=[output])
            assert (await client.append(LOG)).commit.end == head
            assert not commit.done()
            output.set_result(None)
            assert await commit == head + sum(map(len, contents))
            primary.recorder.appended(commit.result())

            failed: asyncio.Future[None] = loop.create_future()
            commit = primary.log.append(primary.recorder.record([]), after=[failed])
            failed.set_exception(GazetteError("an output failed"))
            with pytest.raises(DependencyFailedError):
                await commit
            with pytest.raises(GazetteError):
                await primary.log.append([b""])

    run(scenario())


def test_a_history_goes_on_in_another_log(etcd, tmp_path):
    async def scenario():
        async with logs(etcd, tmp_path) as client:
            first = await new_primary(client, tmp_path, 1)
            await first.commit(CreateFile("/old/file", b"old data"))
            finished = await Standby(client.transport, empty(), tmp_path / "fork").finish()
            head = (await client.append(OTHER_LOG)).commit.end
            second = Primary(client.transport, Recovered(finished.fsm, OTHER_LOG, head), 2)
            await second.open()
            assert await registers(client, OTHER_LOG) == {"author": fence_of(2)}
            await second.commit(CreateFile("/new/file", b"new data"))
            hints = from_bytes(to_json(second.recorder.hints()))
            expected = {"/old/file": b"old data", "/new/file": b"new data"}
            assert await restored(client.transport, hints, tmp_path / "both") == expected
            await first.commit(CreateFile("/not/here"))  # the other log's fence is its own
            standby = Standby(client.transport, hints, tmp_path / "next")
            assert (await standby.hand_off(3)).log == OTHER_LOG
            assert files_of(standby.directory) == expected

    run(scenario())


def test_files_outlive_brokers_and_are_read_from_stored_fragments(etcd, tmp_path):
    """Small fragments and large files: hinted segments are read, and what lies between is not."""

    async def scenario():
        async with logs(etcd, tmp_path, length=1 << 16, stores=["file:///"]) as client:
            primary = await new_primary(client, tmp_path, 1)
            await primary.commit(CreateFile("/kept", b"kept" * 10_000))
            for number in range(40):
                await primary.commit(CreateFile("/large", bytes([number]) * 200_000))
            await primary.commit(CreateFile("/last", b"last"))
            hints = primary.recorder.hints()
            standby = Standby(client.transport, hints, tmp_path / "hinted")
            await standby.finish()
            expected = {
                "/kept": b"kept" * 10_000,
                "/large": bytes([39]) * 200_000,
                "/last": b"last",
            }
            assert files_of(standby.directory) == expected
            assert standby.playback.bytes_read < 3_000_000 < 40 * 200_000
            assert await restored(client.transport, empty(), tmp_path / "all") == expected

    run(scenario(), timeout_s=60.0)


def test_what_no_recovery_needs_of_a_log_is_removed_by_its_broker(etcd, tmp_path):
    """Hints that are missing, or another shard's that begin in the log, keep it."""

    async def scenario():
        async with a_broker(etcd, tmp_path) as (_, client):
            spec = journal_spec(LOG, length=1 << 16, stores=["file:///"])
            spec.fragment.refresh_interval.FromSeconds(1)
            set_value(spec.labels, CONTENT_TYPE, RECOVERY_LOG)
            await client.apply(spec)
            await client.append_when_ready(LOG)
            directory = tmp_path / "fragments" / LOG

            def stored() -> list[tuple[int, int]]:
                parsed = [parse_content_path(LOG, each.name) for each in directory.glob("[!.]*")]
                return sorted((each.begin, each.end) for each in parsed)

            primary = await new_primary(client, tmp_path, 1)
            await primary.commit(CreateFile("/large", b"first" * 40_000))
            forked = primary.recorder.hints()
            for number in range(20):
                await primary.commit(CreateFile("/large", bytes([number]) * 200_000))
            await primary.commit(CreateFile("/last", b"last"))
            hints = primary.recorder.hints()
            known = [ShardHints("a", LOG, [hints, None])]
            pruning = LogPruning(client.transport, lambda: loaded(known), lambda: True, period_s=1)

            async def labelled() -> int:
                (journal,) = (await list_named(client.transport, [LOG])).values()
                return needed_from(journal.spec.labels)

            await pruning.report()
            assert await labelled() == 0
            known[:] = [ShardHints("a", LOG, [hints]), ShardHints("b", OTHER_LOG, [forked])]
            await pruning.report()
            assert await labelled() < 200_000  # where the other shard's playback begins
            known.pop()
            await pruning.report()
            needed = await labelled()
            assert needed > 20 * 200_000
            await pruning.report()
            await client.append(LOG)  # an empty one, which closes the last fragment
            await until(lambda: stored() and stored()[0][1] > needed)
            assert await labelled() == needed
            expected = {"/large": bytes([19]) * 200_000, "/last": b"last"}
            assert await restored(client.transport, hints, tmp_path / "hinted") == expected

    run(scenario(), timeout_s=60.0)


async def loaded(hints: list[ShardHints]) -> list[ShardHints]:
    return hints


class AbortingTransport(FaultyTransport):
    """A transport of which every other append is aborted by its broker, as of a slow client."""

    append_count = 0

    async def append(
        self, items: AsyncIterator[AppendItem], target: Target = ANYWHERE
    ) -> broker_pb2.AppendResponse:
        self.append_count += 1
        if self.append_count % 2:
            raise CallError("the client's stream did not sustain the minimum append rate")
        return await super().append(items, target)


def test_a_recovery_outlives_appends_that_brokers_abort(etcd, tmp_path):
    async def scenario():
        async with logs(etcd, tmp_path) as client:
            transport = AbortingTransport(client.transport)
            standby = Standby(transport, empty(), tmp_path / "store")
            assert (await within(standby.hand_off(3))).fsm.next_seq_no == 2
            assert transport.append_count == 4
            assert (await registers(client)) == {"author": fence_of(3)}

    run(scenario())


def test_garbage_in_the_log_is_passed_over(etcd, tmp_path):
    async def scenario():
        async with logs(etcd, tmp_path) as client:
            await client.append(LOG, b"junk")
            primary = await new_primary(client, tmp_path, 1)
            await primary.commit(CreateFile("/foo/bar", b"hello"))
            hints = primary.recorder.hints()
            standby = Standby(client.transport, hints, tmp_path / "standby")
            await standby.tailing()
            await primary.commit(CreateFile("/baz", b"bing"), WriteFile("/foo/bar", 5, b" world"))
            await client.append(LOG, b"raw garbage")
            await primary.commit(WriteFile("/foo/bar", 11, b"!"))
            await standby.hand_off(2)
            assert files_of(standby.directory) == {"/foo/bar": b"hello world!", "/baz": b"bing"}

    run(scenario())


# ------------------------------------------------------------------- failures


async def fails(standby: Standby, error: type[T], match: str) -> None:
    """The playback fails, tells so to who waits for a hand-off, and leaves no directory."""
    with pytest.raises(error, match=match):
        await standby.playback.hand_off(7)
    with pytest.raises(error, match=match):
        await standby.task
    assert not standby.directory.exists()


def one_segment(**changes: int) -> pb.FSMHints:
    segment = pb.Segment(**{"author": 123, "first_seq_no": 1, "last_seq_no": 1, **changes})
    return pb.FSMHints(log=LOG, live_nodes=[pb.FnodeSegments(fnode=1, segments=[segment])])


def test_hints_that_name_missing_content_fail_the_playback(etcd, tmp_path):
    async def scenario():
        async with logs(etcd, tmp_path) as client:
            directory = tmp_path / "store"
            past_head = one_segment(first_offset=100)
            await fails(
                Standby(client.transport, past_head, directory),
                RecoveryError,
                r"max write-head of .* is 0, vs hinted .*possible data loss",
            )
            primary = await new_primary(client, tmp_path, 1)
            await primary.commit(*CHANGES)
            await fails(
                Standby(client.transport, one_segment(), directory),
                RecoveryError,
                r"offset .*:\d+ >= readThrough \d+, but FSM has unused hints; possible data loss",
            )
            stale = pb.FSMHints(log="does/not/exist")
            await fails(
                Standby(client.transport, stale, directory), JournalNotFoundError, "does/not/exist"
            )
            await fails(
                Standby(client.transport, pb.FSMHints(), directory),
                ValidationError,
                "hinted log not provided",
            )

    run(scenario())


def test_operations_that_begin_no_history_are_no_empty_store(etcd, tmp_path):
    async def scenario():
        async with logs(etcd, tmp_path) as client:
            primary = await new_primary(client, tmp_path, 1)
            await primary.commit(*CHANGES)
            log = await client.read(LOG)
            await client.append(OTHER_LOG, log[15:])
            await fails(
                Standby(client.transport, empty(OTHER_LOG), tmp_path / "store"),
                RecoveryError,
                "restore the hints",
            )

    run(scenario())


def test_a_log_whose_content_was_deleted_does_not_begin_empty(etcd, tmp_path, monkeypatch):
    """The broker knows the write head, and has no content before it."""

    async def scenario():
        async with logs(etcd, tmp_path) as client:
            primary = await new_primary(client, tmp_path, 1)
            await primary.commit(*CHANGES)
            hints = primary.recorder.hints()
            head = (await client.append(LOG)).commit.end

            async def read(request, target=None):
                yield broker_pb2.ReadResponse(
                    status=broker_pb2.OFFSET_NOT_YET_AVAILABLE,
                    offset=request.offset,
                    write_head=head,
                )

            monkeypatch.setattr(client.transport, "read", read)
            monkeypatch.setattr(playback, "MISSING_CONTENT_S", 0.2)
            for given in (empty(), hints):
                await fails(
                    Standby(client.transport, given, tmp_path / "store"),
                    RecoveryError,
                    f"to its head at {head} is missing; possible data loss",
                )

    run(scenario())


def test_a_replica_that_lags_behind_is_waited_for(etcd, tmp_path, monkeypatch):
    """It answers a read that does not block as if there was no content, and one that does."""

    async def scenario():
        async with logs(etcd, tmp_path) as client:
            primary = await new_primary(client, tmp_path, 1)
            await primary.commit(*CHANGES)
            head = (await client.append(LOG)).commit.end
            read = client.transport.read
            lagging = 0

            async def lag(request, *target):
                nonlocal lagging
                if request.block or request.offset >= head:
                    async for item in read(request, *target):
                        yield item
                else:
                    lagging += 1
                    yield broker_pb2.ReadResponse(
                        status=broker_pb2.OFFSET_NOT_YET_AVAILABLE,
                        offset=request.offset,
                        write_head=request.offset,
                    )

            monkeypatch.setattr(client.transport, "read", lag)
            standby = Standby(client.transport, empty(), tmp_path / "store")
            assert (await standby.hand_off(2)).fsm.next_seq_no > 1
            assert files_of(standby.directory) == FILES
            assert 0 < lagging < 10

    run(scenario())


def test_a_log_whose_first_fragments_were_deleted_does_not_begin_empty(etcd, tmp_path):
    async def scenario():
        async with logs(etcd, tmp_path, length=1 << 16, stores=["file:///"]) as client:
            primary = await new_primary(client, tmp_path, 1)
            for number in range(5):
                await primary.commit(CreateFile(f"/{number}", bytes(70_000)))
            hints = primary.recorder.hints()
        fragments = sorted((tmp_path / "fragments" / LOG).iterdir())
        assert len(fragments) > 3
        for fragment in fragments[:2]:  # the hand-off, and a file
            fragment.unlink()
        async with a_broker(etcd, tmp_path) as (_, client):
            await client.append_when_ready(LOG)
            for given, match in ((empty(), "is missing"), (hints, "possible data loss")):
                await fails(
                    Standby(client.transport, given, tmp_path / "store"), RecoveryError, match
                )

    run(scenario())


def test_a_cancelled_playback_leaves_nothing(etcd, tmp_path):
    async def scenario():
        async with logs(etcd, tmp_path) as client:
            primary = await new_primary(client, tmp_path, 1)
            await primary.commit(*CHANGES)
            standby = Standby(client.transport, empty(), tmp_path / "store")
            await standby.tailing()
            assert standby.directory.exists()
            await standby.cancel()
            assert not standby.directory.exists()
            with pytest.raises(ClosedError):
                await standby.playback.hand_off(9)
            assert (await registers(client)) == {"author": fence_of(1)}

    run(scenario())


def test_a_playback_is_handed_off_to_one_author(etcd, tmp_path):
    async def scenario():
        async with logs(etcd, tmp_path) as client:
            standby = Standby(client.transport, empty(), tmp_path / "store")
            with pytest.raises(ValidationError):
                await standby.playback.hand_off(0)
            first = asyncio.create_task(standby.playback.hand_off(5))
            await asyncio.sleep(0)
            with pytest.raises(GazetteError, match="author 5"):
                await standby.playback.hand_off(6)
            assert (await within(_both(first, standby.task))).fsm.next_seq_no == 2

    run(scenario())


async def _both(first: Awaitable[Recovered], second: Awaitable[None]) -> Recovered:
    await second
    return await first


def test_what_was_in_the_directory_is_deleted(etcd, tmp_path):
    async def scenario():
        async with logs(etcd, tmp_path) as client:
            (tmp_path / "store" / "old").mkdir(parents=True)
            (tmp_path / "store" / "old" / "file").write_bytes(b"old")
            (tmp_path / "store" / "link").symlink_to(tmp_path)
            primary = await new_primary(client, tmp_path, 1)
            await primary.commit(*CHANGES)
            assert await restored(client.transport, empty(), tmp_path / "store") == FILES
            assert FSM(empty()).next_seq_no == 1

    run(scenario())
