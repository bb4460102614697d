"""Large chunks are written by a thread; a spool that gets them is as exact as with small ones."""

import asyncio
import errno
import hashlib
import os
from pathlib import Path

import pytest

from gazette_sdk.broker.spool import spool as spool_module
from gazette_sdk.broker.spool.directory import SpoolDirectory
from gazette_sdk.broker.spool.files import (
    LARGE_CHUNK_BYTES,
    QUEUED_CHUNKS_MAX,
    ChunkQueue,
    ChunkThread,
    SpoolDiskError,
    write_all,
)
from gazette_sdk.protocol import broker_pb2 as pb
from support.spools import SpoolUser, sum_of_content

LARGE = LARGE_CHUNK_BYTES


@pytest.fixture
def directory(tmp_path: Path):
    with SpoolDirectory(tmp_path / "spools") as directory:
        yield directory


def test_large_and_small_chunks_keep_their_order_and_their_sum(directory: SpoolDirectory):
    chunks = [os.urandom(LARGE + i) for i in range(3 * QUEUED_CHUNKS_MAX)]
    chunks[5:5] = [b"small", b"smaller"]
    content = b"".join(chunks)

    async def scenario() -> None:
        user, also, delta = SpoolUser(directory), hashlib.sha1(), 0
        for chunk in chunks:
            await user.spool.write(chunk, delta, also)
            delta += len(chunk)
        await user.spool.flush()
        assert also.digest() == hashlib.sha1(content).digest()
        response = await user.propose(user.spool.next())
        assert response.status == pb.OK
        assert user.spool.fragment.sum == sum_of_content(content)
        file = user.spool.content_file
        assert file.read_at(0, len(content) + 1) == content

    asyncio.run(scenario())


def test_a_roll_back_drops_chunks_that_are_still_on_their_way(directory: SpoolDirectory):
    async def scenario() -> None:
        user = SpoolUser(directory)
        await user.spool.write(b"kept", 0)
        await user.propose(user.spool.next())
        for i in range(4):
            await user.spool.write(bytes(LARGE), i * LARGE)
        assert (await user.propose(user.spool.fragment)).status == pb.OK
        assert user.spool.uncommitted_bytes == 0
        await user.spool.write(b" and more", 0)
        await user.propose(user.spool.next())
        assert user.spool.fragment.sum == sum_of_content(b"kept and more")
        assert user.spool.content_file.read_at(0, 100) == b"kept and more"

    asyncio.run(scenario())


class FailingFile:
    """Makes writes of content fail for some attempts, as a full disk does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failures: int) -> None:
        self.left = failures

        def failing(fd: int, data: bytes, position: int) -> None:
            if self.left > 0:
                self.left -= 1
                raise OSError(errno.ENOSPC, "No space left on device")
            write_all(fd, data, position)

        monkeypatch.setattr(spool_module, "write_all", failing)
        monkeypatch.setattr(spool_module, "DISK_RETRIES_S", (0.001, 0.001, 0.001))


def test_chunks_behind_a_failed_write_are_written_once_there_is_room(
    directory: SpoolDirectory, monkeypatch: pytest.MonkeyPatch
):
    FailingFile(monkeypatch, 2)
    chunks = [bytes([i]) * LARGE for i in range(2 * QUEUED_CHUNKS_MAX)]

    async def scenario() -> None:
        user = SpoolUser(directory)
        for i, chunk in enumerate(chunks):
            await user.spool.write(chunk, i * LARGE)
        await user.spool.flush()
        await user.propose(user.spool.next())
        assert user.spool.fragment.sum == sum_of_content(b"".join(chunks))
        assert user.spool.content_file.read_at(0, LARGE * 99) == b"".join(chunks)

    asyncio.run(scenario())


def test_a_disk_that_stays_full_fails_the_append_and_nothing_else(
    directory: SpoolDirectory, monkeypatch: pytest.MonkeyPatch
):
    async def scenario() -> None:
        user = SpoolUser(directory)
        await user.spool.write(b"acknowledged", 0)
        await user.propose(user.spool.next())
        disk = FailingFile(monkeypatch, 1000)
        await user.spool.write(bytes(LARGE), 0)
        await user.spool.write(bytes(LARGE), LARGE)
        with pytest.raises(SpoolDiskError):
            await user.spool.flush()
        await user.spool.roll_back()
        disk.left = 0
        await user.spool.write(b", and more", 0)
        await user.propose(user.spool.next())
        assert user.spool.fragment.sum == sum_of_content(b"acknowledged, and more")

    asyncio.run(scenario())


def test_waiting_can_be_cancelled_and_done_again():
    thread = ChunkThread("test")
    written: list[int] = []

    async def scenario() -> None:
        release, loop = asyncio.Event(), asyncio.get_running_loop()
        queue = ChunkQueue(thread)
        queue.add(lambda: asyncio.run_coroutine_threadsafe(release.wait(), loop).result(10))
        for number in range(3):
            queue.add(lambda number=number: written.append(number))
        waiting = asyncio.create_task(queue.wait_below(0))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        release.set()
        await queue.wait_below(0)
        assert written == [0, 1, 2]
        assert len(queue) == 0

    try:
        asyncio.run(scenario())
    finally:
        thread.close()
