from __future__ import annotations

import asyncio
import logging

import pytest

from gazette_sdk.broker.replica import Replica, ReplicaParts
from gazette_sdk.broker.spool_directory import SpoolDirectory
from gazette_sdk.protocol import broker_pb2 as pb
from support.etcd import run


async def for_ever(_):
    await asyncio.Event().wait()


class Made:
    def __init__(self, directory, refresh=for_ever, pulse=for_ever):
        self.completed = []
        self.directory = directory
        self.parts = ReplicaParts(
            complete=self.completed.append,
            refresh=refresh,
            pulse=pulse,
            min_append_rate=100,
            max_append_rate=200,
        )

    def replica(self, recovered=(), create_revision=5):
        storage = self.directory.journal(
            "a/journal", create_revision=create_revision, cluster_id=77
        )
        return Replica("a/journal", create_revision, storage, self.parts, recovered=recovered)


@pytest.fixture
def directory(tmp_path):
    with SpoolDirectory(tmp_path / "spools") as made:
        yield made


async def commit(spool, content):
    await spool.write(content, 0)
    response = await spool.apply(
        pb.ReplicateRequest(proposal=spool.next(), registers=spool.registers), primary=True
    )
    assert response.status == pb.OK


def test_shutting_down_closes_the_fragment_as_a_replica_and_keeps_both_slots(directory):
    async def scenario():
        made = Made(directory)
        replica = made.replica()
        replica.start()
        spool = await replica.spool.take()
        await commit(spool, b"content")
        await spool.write(b"uncommitted", 0)
        ending = asyncio.ensure_future(replica.shut_down())
        await asyncio.sleep(0.01)
        assert not ending.done(), "the spool has an owner still"
        await spool.roll_back()
        replica.spool.put(spool)
        await ending
        (closed,) = made.completed
        assert (closed.fragment.begin, closed.fragment.end, closed.primary) == (0, 7, False)
        assert not replica.spool.free
        assert not replica.pipeline.free
        assert replica.ended.fired
        assert not replica._tasks

    run(scenario())


def test_a_replica_begins_where_an_earlier_process_ended(tmp_path):
    async def scenario():
        with SpoolDirectory(tmp_path) as directory:
            spool = await Made(directory).replica().spool.take()
            await commit(spool, b"content")
        with SpoolDirectory(tmp_path) as directory:
            made = Made(directory)
            recovered = directory.recover(77)
            replica = made.replica(recovered)
            spool = replica.spool.peek()
            assert (spool.fragment.begin, spool.fragment.end) == (7, 7)
            assert replica.index.summary() == (0, 7, 0)
            # The journal of that name which is created later is another one.
            other = made.replica(create_revision=6)
            assert other.spool.peek().fragment.end == 0

    run(scenario())


def test_a_loop_that_fails_is_logged_with_its_cause(directory, caplog):
    async def failing(_):
        raise RuntimeError("the loop broke")

    async def scenario():
        replica = Made(directory, refresh=failing).replica()
        replica.start()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await replica.shut_down()

    with caplog.at_level(logging.ERROR):
        run(scenario())
    assert "the loop broke" in caplog.text


def test_limits_of_rates_reach_the_flow_control(directory):
    async def scenario():
        replica = Made(directory).replica()
        replica.flow.reset(1000, 0)
        assert (replica.flow.min_rate, replica.flow.max_rate) == (100, 200)

    run(scenario())
