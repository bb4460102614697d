"""Exactly once through a shard's input and output, over real brokers.

A shard copies messages of one journal to two others, and stores its checkpoints in a journal that
is its log. It is stopped at random places, followed by another, and fenced while it runs.
"""

from __future__ import annotations

import asyncio

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gazette_sdk.errors import RegisterMismatchError
from gazette_sdk.transport.append.queue import DependencyFailedError
from support.chained_topic import Topic, of_outputs

STEPS = ["consumed", "started", "committed", "acknowledged", "abort", "fenced", "go on", "go on"]
RUNS = st.lists(
    st.lists(st.tuples(st.integers(1, 12), st.sampled_from(STEPS)), min_size=1, max_size=4),
    max_size=4,
)


@settings(
    max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), RUNS, st.sampled_from([1, 3, 8192]))
def test_every_message_is_copied_once_wherever_shards_stop(cluster, sizes, runs, ring_size):
    topic = Topic(cluster)
    numbers = topic.fill(sizes)

    async def play():
        fenced = []
        for transactions in runs:
            shard = topic.shard(ring_size=ring_size, follows=False)
            await shard.start()
            if await one_run(shard, transactions, numbers[-1]) == "fenced":
                fenced.append(shard)
            else:
                await shard.crash()
        last = topic.shard(ring_size=ring_size, follows=False)
        await last.start()
        for shard in fenced:  # they commit too late
            late, _ = await shard.start_commit()
            await late.ended()
            assert isinstance(late.exception(), RegisterMismatchError)
            await shard.crash()
        assert await last.consume(1 << 20, numbers[-1])
        commit, acks = await last.start_commit()
        for each in (commit, *acks.values()):
            await each
        await last.crash()

    topic.play(play())
    assert topic.copied() == of_outputs(numbers)


async def one_run(shard, transactions, last):
    """Play transactions, up to the step at which the shard stops."""
    commit, acks = None, {}
    for count, step in transactions:
        await shard.consume(count, last)
        if commit is not None:  # the transaction before was committed while this one consumed
            for each in (commit, *acks.values()):
                await each
        if step == "consumed":
            return step
        if step == "abort":
            await shard.abort()
            commit, acks = None, {}
            continue
        if step == "fenced":
            return step
        commit, acks = await shard.start_commit()
        if step == "committed":
            await commit
        elif step == "acknowledged":
            for each in (commit, *acks.values()):
                await each
        if step != "go on":
            return step
    return "end"


def test_a_fenced_shard_neither_commits_nor_acknowledges(cluster):
    topic = Topic(cluster)
    numbers = topic.fill([10, 1, 10])

    async def play():
        zombie = topic.shard()
        await zombie.start()
        await zombie.consume(5, numbers[-1])
        commit, acks = await zombie.start_commit()
        for each in (commit, *acks.values()):
            await each
        await zombie.consume(8, numbers[-1])
        successor = topic.shard()
        await successor.start()
        late, late_acks = await zombie.start_commit()
        await late.ended()
        assert isinstance(late.exception(), RegisterMismatchError)
        for each in late_acks.values():
            await each.ended()
            assert isinstance(each.exception(), DependencyFailedError)
        await zombie.consume(20, numbers[-1])
        again, _ = await zombie.start_commit()
        assert isinstance(again.exception(), RegisterMismatchError)
        assert await successor.consume(1 << 20, numbers[-1])
        assert successor.consumed == numbers[5:]
        commit, acks = await successor.start_commit()
        for each in (commit, *acks.values()):
            await each
        await zombie.crash()
        await successor.crash()

    topic.play(play())
    assert topic.copied() == of_outputs(numbers)


def test_shards_chain(cluster):
    """Output of one shard is input of another, while both are restarted."""
    first, second = Topic(cluster), Topic(cluster)
    numbers = first.fill([30, 5, 30, 30, 5, 30])
    first.outputs = [second.source, second.source]

    async def copy(topic, step):
        shard = topic.shard()
        await shard.start()
        is_last = False
        while not is_last:
            is_last = await shard.consume(step, numbers[-1])
            commit, acks = await shard.start_commit()
            for each in (commit, *acks.values()):
                await each
            if step % 2:  # what comes now is never committed
                if not is_last:
                    await shard.consume(step, numbers[-1])
                await shard.crash()
                shard = topic.shard()
                await shard.start()
        await shard.crash()

    async def play():
        async with asyncio.TaskGroup() as group:
            group.create_task(copy(first, 7))
            group.create_task(copy(second, 9))

    second.play(play())
    assert second.copied() == of_outputs(numbers)
