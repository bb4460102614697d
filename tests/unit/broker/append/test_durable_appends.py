"""With durability ``persisted`` an append is neither acknowledged nor read before it is on disk."""

from __future__ import annotations

import asyncio

import pytest

from gazette_sdk.broker.spool.directory import Durability
from gazette_sdk.protocol import broker_pb2 as pb
from support.append_world import JOURNAL, World
from support.etcd import run
from support.spools import SlowDisk, until

APPEND = pb.AppendRequest(journal=JOURNAL)


async def write_head(world: World) -> int:
    """Return the end of what can be read."""
    found = await world.replica.index.query(pb.ReadRequest(journal=JOURNAL, offset=-1))
    return found.write_head


@pytest.mark.parametrize("replication", [1, 2])
def test_what_the_disk_does_not_have_yet_is_not_read(replication, tmp_path, monkeypatch):
    disk = SlowDisk(monkeypatch)

    async def scenario():
        world = World(tmp_path, replication=replication, durability=Durability.PERSISTED)
        disk.go_on()
        assert (await world.append(APPEND, b"first, ")).status == pb.OK
        assert await write_head(world) == 7
        disk.stop()
        second = asyncio.ensure_future(world.append(APPEND, b"second"))
        await until(lambda: disk.began == 2)
        assert world.spool.fragment.end == 13
        blocked = asyncio.ensure_future(
            world.replica.index.query(pb.ReadRequest(journal=JOURNAL, offset=7, block=True))
        )
        assert await write_head(world) == 7
        assert not blocked.done()
        disk.go_on()
        assert (await second).commit.end == 13
        assert (await blocked).write_head == 13
        await world.close()

    run(scenario())


def test_an_append_that_was_given_up_is_read_once_it_is_on_disk(tmp_path, monkeypatch):
    disk = SlowDisk(monkeypatch)

    async def scenario():
        world = World(tmp_path, durability=Durability.PERSISTED)
        first = asyncio.ensure_future(world.append(APPEND, b"given up, "))
        await until(lambda: disk.began == 1)
        first.cancel()
        await asyncio.wait([first])
        second = asyncio.ensure_future(world.append(APPEND, b"second"))
        await asyncio.sleep(0)
        assert await write_head(world) == 0
        assert not second.done()
        disk.go_on()
        assert (await second).commit.end == 16
        assert await write_head(world) == 16
        assert disk.began == 3, "the disk may not have had all of it at the first sync"
        await world.close()

    run(scenario())


def test_with_durability_replicated_a_lone_replica_shows_each_commit_at_once(tmp_path):
    async def scenario():
        world = World(tmp_path)
        assert (await world.append(APPEND, b"first")).status == pb.OK
        assert world.replica.index.acknowledged_end > 1 << 62
        await world.close()

    run(scenario())
