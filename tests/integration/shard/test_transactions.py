"""Transactions over an embedded broker: exactly once through restarts and crashes at each step."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from operator import attrgetter

import pytest

from gazette_sdk import JsonMessage, Publisher, mapping, shard
from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.shard.stores.json_store import JsonStore
from gazette_sdk.shard.transaction.steps import CommitStep
from gazette_sdk.testing.commit_faults import CrashAt, InjectedCrashError
from gazette_sdk.transport.loop import run
from support.shard_runs import Primary, World

pytestmark = pytest.mark.timeout(300)


@dataclass
class Word(JsonMessage):
    word: str
    number: int


@dataclass
class Count(JsonMessage):
    word: str
    count: int
    number: int


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with EmbeddedCluster(tmp_path_factory.mktemp("cluster"), sync_etcd=False) as started:
        yield started


@pytest.fixture
def world(cluster, tmp_path):
    made = World(cluster, tmp_path, f"words-{uuid.uuid4().hex[:8]}")
    made.create()
    return made


def counter(world, *, is_async=False, **declared):
    """Counts words, and publishes each count."""
    by_word = mapping.modulo(f"topic={world.name}-out", key=attrgetter("word"))

    def count(txn, message):
        counts = txn.store.state
        counts[message.word] = counts.get(message.word, 0) + 1
        txn.publish(Count(message.word, counts[message.word], message.number), mapping=by_word)

    async def count_later(txn, message):
        count(txn, message)

    return shard.handler(message=Word, store=JsonStore, name="count", **declared)(
        count_later if is_async else count
    )


def publish(world, begin, end):
    """Publish numbered words, some in transactions."""
    direct = mapping.direct(world.source_names[0])
    with Publisher(mapping=direct, transport=world.cluster.transport) as publisher:
        for start in range(begin, end, 10):
            words = [
                Word(f"w{number % 7}", number) for number in range(start, min(start + 10, end))
            ]
            if start % 20 == 0:
                publisher.publish_batch(words)
            else:
                with publisher.transaction() as txn:
                    for word in words:
                        txn.publish(word)
        publisher.flush()


def check(world, end, state=None):
    """Each word is counted once, in order; and so says the output."""
    found = sorted(
        (envelope.message for name in world.output_names for envelope in world.read(Count, name)),
        key=attrgetter("number"),
    )
    wanted, counts = [], {}
    for number in range(end):
        word = f"w{number % 7}"
        counts[word] = counts.get(word, 0) + 1
        wanted.append(Count(word, counts[word], number))
    assert found == wanted
    if state is not None:
        assert state == counts


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("with_log", [False, True])
def test_output_is_published_exactly_once_through_a_restart(world, with_log, is_async):
    async def scenario(begin, directory=None):
        primary = Primary(
            world, counter(world, is_async=is_async), with_log=with_log, directory=directory
        )
        await primary.start()
        await primary.caught_up()
        await primary.stop()
        return primary

    publish(world, 0, 100)
    primary = run(scenario(0))
    check(world, 100, primary.store.state)
    publish(world, 100, 200)
    again = run(scenario(100, None if with_log else primary.directory))
    check(world, 200, again.store.state)


@pytest.mark.parametrize("nth", [1, 3])
@pytest.mark.parametrize("step", CommitStep)
def test_a_crash_at_each_step_leaves_state_and_output_as_if_undisturbed(world, step, nth):
    async def crash():
        fault = CrashAt(step, nth)
        application = counter(world, max_txn_s=0.001)
        primary = await Primary(world, application, on_step=fault).start()
        error = await primary.failed()
        assert isinstance(error, InjectedCrashError)
        assert fault.has_crashed

    async def recover():
        primary = await Primary(world, counter(world)).start()
        await primary.caught_up()
        await primary.stop()
        return primary.store.state

    publish(world, 0, 2000)
    run(crash())
    publish(world, 2000, 2050)
    check(world, 2050, run(recover()))
