"""Transactions over an embedded broker: exactly once through restarts and crashes at each step."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import threading
import uuid
from dataclasses import dataclass
from operator import attrgetter

import pytest
import sqlalchemy as sa

from gazette_sdk import JsonMessage, Publisher, mapping, shard
from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.errors import DecodeError, FencedError
from gazette_sdk.message.uuid import ACK_TXN, CONTINUE_TXN
from gazette_sdk.shard.stores.json_store import JsonStore
from gazette_sdk.shard.stores.rocks_store import RocksStore
from gazette_sdk.shard.stores.sql_store import SqlStore
from gazette_sdk.shard.stores.sqlite_store import SqliteStore
from gazette_sdk.shard.transaction.failure import DeadLetter, HandlerFailedError
from gazette_sdk.shard.transaction.machine import CommitStep
from gazette_sdk.testing.store_faults import CrashAt, InjectedCrashError
from gazette_sdk.transport.append.appender import AppendService
from gazette_sdk.transport.loop import run
from support.postgres import running_postgres
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


class TableOfCounts(SqliteStore):
    """Counts in a table."""

    def __init__(self, directory):
        super().__init__(directory, schema=COUNTS)

    def get(self, word, default):
        row = self.execute("SELECT n FROM counts WHERE word = ?", (word,)).fetchone()
        return default if row is None else row[0]

    def __getitem__(self, word):
        return self.get(word, None)

    def __setitem__(self, word, count):
        self.execute("INSERT OR REPLACE INTO counts VALUES (?, ?)", (word, count))


COUNTS = "CREATE TABLE IF NOT EXISTS counts (word TEXT PRIMARY KEY, n INTEGER) STRICT;"
STORES = {"json": JsonStore, "rocks": RocksStore[str, int], "sqlite": TableOfCounts}


def state_of(store):
    if isinstance(store, JsonStore):
        return store.state
    if isinstance(store, RocksStore):
        return dict(store.items())
    with store.committed() as view:
        return {row[0]: row[1] for row in view.execute("SELECT word, n FROM counts").fetchall()}


def counter(world, *, is_async=False, store="json", **declared):
    """Counts words, and publishes each count."""
    by_word = mapping.modulo(f"topic={world.name}-out", key=attrgetter("word"))

    def count(txn, message):
        counts = txn.store.state if store == "json" else txn.store
        counts[message.word] = counts.get(message.word, 0) + 1
        txn.publish(Count(message.word, counts[message.word], message.number), mapping=by_word)

    async def count_later(txn, message):
        count(txn, message)

    made = STORES[store] if isinstance(store, str) else store
    return shard.handler(message=Word, store=made, name="count", **declared)(
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
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("step", CommitStep)
def test_a_crash_at_each_step_leaves_state_and_output_as_if_undisturbed(world, step, store, nth):
    async def crash():
        fault = CrashAt(step, nth)
        application = counter(world, store=store, max_txn_s=0.001)
        primary = await Primary(world, application, on_step=fault).start()
        error = await primary.failed()
        assert isinstance(error, InjectedCrashError)
        assert fault.has_crashed

    async def recover():
        primary = await Primary(world, counter(world, store=store)).start()
        await primary.caught_up()
        state = state_of(primary.store)
        await primary.stop()
        return state

    publish(world, 0, 2000)
    run(crash())
    publish(world, 2000, 2050)
    check(world, 2050, run(recover()))


class RemoteCounts(SqlStore):
    """Counts in a table of a remote database."""

    def get(self, word, default):
        row = self.execute("SELECT n FROM counts WHERE word = :word", {"word": word}).fetchone()
        return default if row is None else row[0]

    def __getitem__(self, word):
        return self.get(word, None)

    def __setitem__(self, word, count):
        self.execute(
            "INSERT INTO counts VALUES (:word, :n) ON CONFLICT (word) DO UPDATE SET n = :n",
            {"word": word, "n": count},
        )


@dataclass
class RemoteStores:
    """Makes the store of a shard in a database."""

    url: str

    def for_shard(self, handle):
        return RemoteCounts(self.url, handle.full_name)


@pytest.fixture(scope="module")
def server():
    with running_postgres() as url:
        yield url


@pytest.fixture
def remote(server):
    engine = sa.create_engine(server, poolclass=sa.NullPool)
    with engine.begin() as connection:
        connection.execute(sa.text("DROP TABLE IF EXISTS counts, gazette_checkpoints"))
        connection.execute(sa.text("CREATE TABLE counts (word TEXT PRIMARY KEY, n BIGINT)"))
    return RemoteStores(server)


@pytest.mark.parametrize("step", CommitStep)
def test_a_crash_at_each_step_leaves_a_remote_database_as_if_undisturbed(world, remote, step):
    async def crash():
        application = counter(world, store=remote, max_txn_s=0.02)
        fault = CrashAt(step, 2)
        primary = await Primary(world, application, on_step=fault, with_log=False).start()
        assert isinstance(await primary.failed(), InjectedCrashError)

    async def recover():
        primary = await Primary(world, counter(world, store=remote), with_log=False).start()
        await primary.caught_up()
        state = state_of(primary.store)
        await primary.stop()
        return state

    publish(world, 0, 500)
    run(crash())
    publish(world, 500, 520)
    check(world, 520, run(recover()))


# ------------------------------------------------------ order under slow commits


class SlowLog:
    """Recovery log whose commits become known late."""

    def __init__(self, log, delay_s):
        self.log = log
        self.delay_s = delay_s
        self.count = 0

    def append(self, contents, *, after):
        self.count += 1
        return asyncio.ensure_future(self.later(self.log.append(contents, after=after)))

    async def later(self, append):
        end = await append
        await asyncio.sleep(self.delay_s)
        return end


def test_acknowledgements_stand_before_the_messages_of_the_next_transaction(world):
    logs = []

    def slow(log):
        logs.append(SlowLog(log, 0.05))
        return logs[-1]

    async def scenario():
        primary = Primary(world, counter(world, max_txn_s=0.002), wrap_log=slow)
        await primary.start()
        await primary.caught_up()
        await primary.stop()

    publish(world, 0, 3000)
    run(scenario())
    assert logs[0].count > 3
    check(world, 3000)  # the real sequencer drops what is acknowledged out of order
    for name in world.output_names:
        last = 0
        for envelope in world.read(dict, name, "uncommitted"):
            assert envelope.flags in {CONTINUE_TXN, ACK_TXN}
            assert envelope.clock > last
            last = envelope.clock


def test_a_primary_whose_log_was_taken_over_fails_and_acknowledges_nothing(world):
    async def scenario():
        first = await Primary(world, counter(world)).start()
        await first.caught_up()
        second = await Primary(world, counter(world)).start()
        await asyncio.to_thread(publish, world, 100, 200)
        error = await first.failed()
        assert isinstance(error, FencedError)
        await second.caught_up()
        await second.stop()
        return second.store.state

    publish(world, 0, 100)
    check(world, 200, run(scenario()))


# ---------------------------------------------------------------- bad records


def refusing(world, bad, store="json", **declared):
    """Counts words but for those that are bad; what it did with these is undone."""
    direct = mapping.direct(world.output_names[0])

    def count(txn, message):
        counts = txn.store.state if store == "json" else txn.store
        counts[message.word] = counts.get(message.word, 0) + 1
        txn.publish(Count(message.word, counts[message.word], message.number), mapping=direct)
        if message.number in bad:
            raise ValueError(f"no {message.number}")

    return shard.handler(message=Word, store=STORES[store], name="count", **declared)(count)


async def run_through(world, application):
    primary = await Primary(world, application).start()
    await primary.caught_up()
    state = state_of(primary.store)
    await primary.stop()
    return state


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("policy", ["skip", "dead letters"])
def test_bad_records_are_left_out_and_their_effects_undone(world, policy, store):
    bad = {0, 37, 38, 155, 299}
    rejected = world.output_names[1]
    on_error = "skip" if policy == "skip" else shard.dead_letters(rejected)
    publish(world, 0, 300)
    application = refusing(world, bad, store=store, on_error=on_error, max_txn_s=0.01)
    state = run(run_through(world, application))
    counts, wanted = {}, []
    for number in sorted(set(range(300)) - bad):
        word = f"w{number % 7}"
        counts[word] = counts.get(word, 0) + 1
        wanted.append(Count(word, counts[word], number))
    found = [envelope.message for envelope in world.read(Count, world.output_names[0])]
    assert [each for each in found if each.word] == wanted
    assert state == counts
    letters = [envelope.message for envelope in world.read(DeadLetter, rejected)]
    if policy == "skip":
        assert letters == []
    else:
        assert [letter.record["number"] for letter in letters] == sorted(bad)
        assert letters[1].error == "ValueError: no 37"
        assert letters[1].journal == world.source_names[0]


def test_a_bad_record_fails_the_shard_and_says_where(world):
    async def fails():
        primary = await Primary(world, refusing(world, {60})).start()
        return await primary.failed()

    publish(world, 0, 100)
    error = run(fails())
    assert isinstance(error, HandlerFailedError)
    assert error.journal == world.source_names[0]
    [envelope] = [e for e in world.read(Word, error.journal) if e.begin == error.offset]
    assert envelope.message.number == 60
    publish(world, 100, 120)
    state = run(run_through(world, counter(world)))
    check(world, 120, state)  # nothing of the failed run stays


def append_raw(world, content):
    async def append():
        appends = AppendService(world.cluster.transport)
        await appends.appender(world.source_names[0]).append(content)
        await appends.aclose()

    run(append())


def create_rejected(world):
    """Return a new journal for dead letters."""
    rejected = f"{world.name}/log/rejected"
    world.cluster.apply(
        f"name: {rejected}\nreplication: 1\n"
        "labels: [{name: content-type, value: application/x-ndjson}]\n"
        'fragment: {length: 1048576, compression_codec: NONE, stores: ["file:///"],'
        " refresh_interval: 10s}\n"
    )
    return rejected


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("policy", ["skip", "dead letters"])
def test_content_that_is_no_message_is_passed_over_once(world, policy, is_async):
    rejected = create_rejected(world)
    on_error = "skip" if policy == "skip" else shard.dead_letters(rejected)
    application = counter(world, on_error=on_error, is_async=is_async)
    append_raw(world, b"{poison\n")
    run(run_through(world, application))  # the poison alone
    publish(world, 0, 15)
    append_raw(world, b"more poison\n")
    publish(world, 15, 30)
    for _ in range(2):  # the second run finds nothing left
        check(world, 30, run(run_through(world, application)))
    letters = [envelope.message for envelope in world.read(DeadLetter, rejected)]
    if policy == "skip":
        assert letters == []
    else:
        content = [base64.b64decode(letter.record) for letter in letters]
        assert content == [b"{poison\n", b"more poison\n"]
        assert letters[0].offset == 0
        assert "DecodeError" in letters[0].error


def test_content_that_is_no_message_fails_the_shard(world):
    async def fails():
        return await (await Primary(world, counter(world)).start()).failed()

    publish(world, 0, 10)
    append_raw(world, b"poison\n")
    error = run(fails())
    assert isinstance(error, DecodeError)
    assert error.journal == world.source_names[0]
    assert error.offset > 0


def transact(world, *messages, fails=False):
    direct = mapping.direct(world.source_names[0])
    with (
        Publisher(mapping=direct, transport=world.cluster.transport) as publisher,
        contextlib.suppress(LookupError),
        publisher.transaction() as txn,
    ):
        for message in messages:
            txn.publish(message).result(30)
        if fails:
            raise LookupError


@pytest.mark.parametrize("policy", ["fail", "skip", "dead letters"])
def test_a_message_of_another_class_that_was_rolled_back_is_no_bad_record(world, policy):
    rejected = create_rejected(world)
    on_error = shard.dead_letters(rejected) if policy == "dead letters" else policy
    application = counter(world, on_error=on_error)
    publish(world, 0, 10)
    transact(world, Word("w", 1), {"word": 7}, fails=True)
    publish(world, 10, 30)
    check(world, 30, run(run_through(world, application)))
    assert not list(world.read(DeadLetter, rejected))


def test_a_message_of_another_class_is_a_bad_record_once_when_it_is_committed(world):
    rejected = create_rejected(world)
    application = counter(world, on_error=shard.dead_letters(rejected))
    publish(world, 0, 10)
    transact(world, Word("w3", 10), {"word": 7}, Word("w4", 11), {"word": 8})
    publish(world, 12, 30)
    for _ in range(2):  # the second run finds nothing left
        check(world, 30, run(run_through(world, application)))
    letters = [envelope.message for envelope in world.read(DeadLetter, rejected)]
    records = [json.loads(base64.b64decode(letter.record)) for letter in letters]
    assert [record["word"] for record in records] == [7, 8]

    async def fails():
        return await (await Primary(world, counter(world)).start()).failed()

    transact(world, Word("w", 30), {"word": 9})
    error = run(fails())
    assert isinstance(error, DecodeError)
    [bad] = [e for e in world.read(dict, error.journal) if e.begin == error.offset]
    assert bad.message["word"] == 9


def test_a_call_that_runs_is_waited_for_when_a_shard_stops(world):
    entered, released, left = threading.Event(), threading.Event(), threading.Event()

    @shard.handler(message=Word, store=JsonStore, name="slow")
    def slow(txn, message):
        entered.set()
        assert released.wait(30)
        left.set()

    async def scenario():
        primary = await Primary(world, slow).start()
        await asyncio.to_thread(entered.wait, 30)
        stopping = asyncio.create_task(primary.stop())
        await asyncio.sleep(0.05)
        assert not stopping.done()
        released.set()
        await stopping
        assert left.is_set()

    publish(world, 0, 1)
    run(scenario())
