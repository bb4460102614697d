"""Generator of shards and logs of source journals."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from gazette_sdk import JsonMessage, shard
from gazette_sdk.errors import (
    ClosedError,
    ConfigurationError,
    EtcdTransactionFailedError,
    EtcdUnavailableError,
    ValidationError,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.journal_spec import validate_journal_spec
from gazette_sdk.protocol.labels import label_set, value_of
from gazette_sdk.protocol.shard_spec import validate_shard_id
from gazette_sdk.shard.application import generator
from gazette_sdk.shard.application.generator import (
    ShardGenerator,
    existing_shards,
    generated,
    shard_id,
)
from gazette_sdk.shard.application.sources import selectors_of
from gazette_sdk.shard.stores.json_store import JsonStore
from gazette_sdk.transport.loop import run
from support.log_records import on_record
from support.memory_transport import MemoryTransport
from support.order_totals import totals
from support.spools import until


@dataclass
class Order(JsonMessage):
    customer: str


def declared(**given):
    given = {"name": "totals", "sources": "topic=orders", "store": JsonStore, **given}
    return shard.handler(message=Order, **given)(lambda txn, order: None)


def journal(name, **labels):
    spec = pb.JournalSpec(name=name, replication=3, labels=label_set(sorted(labels.items())))
    spec.fragment.length = 1 << 20
    spec.fragment.compression_codec = pb.GZIP
    spec.fragment.stores.append("s3://bucket/")
    spec.fragment.refresh_interval.seconds = 60
    spec.fragment.retention.seconds = 3600
    return spec


NAMES = st.lists(st.sampled_from("ab/+=%235BD"), min_size=4, max_size=12).map("".join)


@given(NAMES, NAMES)
def test_different_journals_have_different_shards(one, other):
    assert (shard_id("app", one) == shard_id("app", other)) == (one == other)


@pytest.mark.parametrize("name", ["orders/part-000", "a+b=c%20/d"])
def test_ids_are_valid(name):
    validate_shard_id(shard_id("totals", name))


def test_each_journal_has_a_shard_and_a_log():
    application = declared(hot_standbys=2, min_txn_s=0.25, max_txn_s=2.5, waits_for_acks=False)
    found = generated(application, [[journal("orders/b"), journal("orders/a=1")]])
    assert [spec.id for spec in found.shards] == ["totals/orders/a+3D1", "totals/orders/b"]
    spec = found.shards[1]
    assert [source.journal for source in spec.sources] == ["orders/b"]
    assert (spec.hot_standbys, spec.hint_backups, spec.hint_prefix) == (2, 2, "/gazette/hints")
    assert (spec.max_txn_duration.ToMilliseconds(), spec.min_txn_duration.ToMilliseconds()) == (
        2500,
        250,
    )
    assert spec.disable_wait_for_ack
    assert value_of(spec.labels, "app.gazette.dev/managed-by") == "totals"
    log = found.logs[1]
    assert log.name == "recovery/totals/orders/b"
    assert value_of(log.labels, "content-type") == "application/x-gazette-recoverylog"
    assert (log.replication, list(log.fragment.stores)) == (3, ["s3://bucket/"])
    assert not log.fragment.HasField("retention")
    validate_journal_spec(log)


def test_what_exists_is_left_as_it_is():
    found = generated(declared(), [[journal("orders/a"), journal("orders/b")]], {"totals/orders/a"})
    assert [spec.id for spec in found.shards] == ["totals/orders/b"]
    assert len(found.logs) == 1


def test_recovery_logs_and_unreadable_journals_are_no_sources():
    log = journal("recovery/x", **{"content-type": "application/x-gazette-recoverylog"})
    hidden = journal("orders/hidden")
    hidden.flags = pb.JournalSpec.O_WRONLY
    assert generated(declared(), [[log, hidden]]) == ([], [], [], [])


def test_stores_without_files_have_no_log():
    class Remote(JsonStore):
        is_recorded = False

    application = shard.handler(message=Order, store=Remote, name="t")(lambda txn, order: None)
    found = generated(application, [[journal("orders/a")]])
    assert found.logs == []
    assert found.shards[0].recovery_log_prefix == ""


def test_a_journal_that_a_shard_of_another_id_reads_gets_no_second_one():
    by_hand = cpb.ShardSpec(
        id="by-hand",
        sources=[cpb.ShardSpec.Source(journal=f"orders/{part}") for part in "ab"],
    )
    other = cpb.ShardSpec(id="totals/orders/c", sources=[cpb.ShardSpec.Source(journal="orders/x")])
    journals = [journal(f"orders/{part}") for part in "abcd"]
    found = generated(declared(), [journals], existing_shards([by_hand, other]))
    assert [spec.id for spec in found.shards] == ["totals/orders/d"]
    assert [log.name for log in found.logs] == ["recovery/totals/orders/d"]


def test_names_that_are_too_long_are_refused():
    name = "orders/" + "x" * 500
    found = generated(declared(), [[journal(name)]])
    assert (found.shards, found.unread) == ([], [name])
    [fault] = found.faults
    assert isinstance(fault, ValidationError)


def test_a_name_that_is_too_long_does_not_keep_others_from_their_shards():
    class Remote(JsonStore):
        is_recorded = False

    application = shard.handler(message=Order, store=Remote, name="t")(lambda txn, order: None)
    created = []

    async def existing():
        return ()

    async def create(specs):
        created.extend(spec.id for spec in specs)

    async def scenario():
        transport = MemoryTransport()
        names = ["orders/z", "orders/" + "x" * 510, "orders/a"]
        for name in names:
            transport.create(name)
        made = ShardGenerator(application, transport, (), existing=existing, create=create)
        with pytest.raises(ValidationError, match="invalid length") as caught:
            await made.generate([[journal(name) for name in names]])
        assert caught.value.journal == names[1]

    asyncio.run(scenario())
    assert created == ["t/orders/a", "t/orders/z"]


# ---------------------------------------------------------------- generator


class Listing:
    """Transport that lists and applies journals."""

    def __init__(self, *specs):
        self.specs = {spec.name: spec for spec in specs}

    async def list(self, request):
        response = pb.ListResponse(header=pb.Header(etcd=pb.Header.Etcd(revision=5, cluster_id=1)))
        names = {label.value for label in request.selector.include.labels}
        for spec in self.specs.values():
            if spec.name in names:
                response.journals.add(spec=spec, mod_revision=3)
        yield response

    async def apply(self, request):
        for change in request.changes:
            if change.upsert.name in self.specs:
                raise EtcdTransactionFailedError("exists")
            self.specs[change.upsert.name] = change.upsert
        return pb.ApplyResponse()


@pytest.mark.parametrize("loses", [False, True])
def test_logs_are_created_before_shards(loses):
    transport, shards = Listing(), []

    async def create(specs):
        assert all(f"recovery/{spec.id}" in transport.specs for spec in specs)
        if loses:
            raise EtcdTransactionFailedError("exists")
        shards.extend(spec.id for spec in specs)

    async def existing():
        return shards

    made = ShardGenerator(declared(), transport, (), existing=existing, create=create)
    journals = [journal("orders/a"), journal("orders/b")]
    for _ in range(2):
        with pytest.raises(EtcdTransactionFailedError) if loses else contextlib.nullcontext():
            asyncio.run(made.generate([journals]))
    assert shards == ([] if loses else ["totals/orders/a", "totals/orders/b"])


class Ended:
    """Watch that has ended for good: each wait for it fails at once."""

    snapshot = None

    def __init__(self, error):
        self.error = error
        self.waits = 0

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass

    async def changed(self):
        self.waits += 1
        assert self.waits < 10, "the event loop stands still"
        raise self.error


@pytest.mark.parametrize(
    "error", [ClosedError("closed"), ConfigurationError("no TLS"), EtcdUnavailableError("ended")]
)
@pytest.mark.parametrize("of_journals", [True, False])
def test_a_watch_that_has_ended_for_good_ends_the_generator(monkeypatch, error, of_journals):
    ended = Ended(error)

    async def existing():
        return ()

    async def never():
        await asyncio.Event().wait()

    async def scenario():
        if of_journals:
            monkeypatch.setattr(generator, "WatchedList", lambda *_: ended)
        made = ShardGenerator(
            declared(),
            Listing(),
            selectors_of(declared().sources),
            existing=existing,
            create=None,
            until_changed=never if of_journals else ended.changed,
        )
        async with asyncio.timeout(20):
            with pytest.raises(type(error)) as caught:
                await made.run()
        assert caught.value is error

    asyncio.run(scenario())


WAIT_S = 10.0


def test_sources_without_journals_are_warned_of_once(caplog):
    transport = MemoryTransport()
    warned, asked = asyncio.Event(), asyncio.Semaphore(0)

    async def existing():
        asked.release()
        return [f"{totals.full_name}/orders/part-000"]

    async def create(_):
        pytest.fail("the shard exists")

    async def scenario():
        made = ShardGenerator(
            totals, transport, selectors_of(totals.sources), existing=existing, create=create
        )
        with on_record(generator.__name__, warned.set):
            running = asyncio.create_task(made.run())
            await warned.wait()
            await asked.acquire()
            transport.create("orders/part-000", topic="orders")
            await asked.acquire()
            transport.delete("orders/part-000")
            await asked.acquire()
            running.cancel()
            await asyncio.wait([running])

    run(scenario(), WAIT_S)
    [record] = caplog.records
    assert record.getMessage().startswith(
        f"no journal matches the sources of {totals.full_name}, topic=orders; it waits for one"
    )


# ---------------------------------------------------------------- partitions of several topics


JOINED = shard.partitions("topic=orders", "topic=customers")


def of_topic(topic, *parts):
    return [journal(f"{topic}/part-{part}", topic=topic) for part in parts]


def reading(**shards):
    return existing_shards(
        cpb.ShardSpec(
            id=f"totals/{name}/part-000",
            sources=[cpb.ShardSpec.Source(journal=each) for each in journals],
        )
        for name, journals in shards.items()
    )


def test_partitions_of_one_number_have_one_shard():
    topics = [of_topic("orders", "000", "001"), of_topic("customers", "000", "001")]
    found = generated(declared(sources=JOINED), topics)
    assert [spec.id for spec in found.shards] == [
        "totals/orders/part-000",
        "totals/orders/part-001",
    ]
    assert [[each.journal for each in spec.sources] for spec in found.shards] == [
        ["customers/part-000", "orders/part-000"],
        ["customers/part-001", "orders/part-001"],
    ]
    assert [log.name for log in found.logs] == [f"recovery/{spec.id}" for spec in found.shards]
    assert (found.faults, found.unread) == ([], [])


def test_a_topic_that_grows_under_a_join_is_not_read_further():
    topics = [of_topic("orders", "000"), of_topic("customers", "000", "001")]
    existing = reading(orders=["orders/part-000", "customers/part-000"])
    found = generated(declared(sources=JOINED), topics, existing)
    assert (found.shards, found.unread) == ([], ["customers/part-001"])
    [fault] = found.faults
    assert isinstance(fault, ConfigurationError)
    assert "topic=orders has 1 partition, topic=customers has 2 partitions" in str(fault)


def test_journals_that_change_the_numbers_of_others_are_an_error():
    """`part-0000` sorts between `part-000` and `part-001`."""
    topics = [of_topic("orders", "000", "001"), of_topic("customers", "000", "0000")]
    existing = {
        "totals/orders/part-000": ["orders/part-000", "customers/part-000"],
        "totals/orders/part-001": ["orders/part-001", "customers/part-001"],
    }
    found = generated(declared(sources=JOINED), topics, existing)
    assert (found.shards, found.unread) == ([], ["customers/part-0000"])
    [fault] = found.faults
    assert "totals/orders/part-001 reads customers/part-001, orders/part-001, and" in str(fault)


def test_the_generator_shows_what_is_not_read_and_goes_on_once_it_can_be(caplog):
    class Remote(JsonStore):
        is_recorded = False

    application = declared(sources=JOINED, store=Remote)
    transport, shards = MemoryTransport(), {}

    async def existing():
        return existing_shards(shards.values())

    async def create(specs):
        shards.update({spec.id: spec for spec in specs})

    def unread():
        found = REGISTRY.get_sample_value(
            "gazette_shard_unread_bytes", {"journal": "customers/part-001"}
        )
        return found is not None

    async def scenario():
        made = ShardGenerator(
            application, transport, JOINED.selectors, existing=existing, create=create
        )
        for name in ["orders/part-000", "customers/part-000"]:
            transport.create(name, topic=name.partition("/")[0])
        running = asyncio.create_task(made.run())
        await until(lambda: len(shards) == 1)
        assert made.faults == []
        transport.create("customers/part-001", topic="customers")
        await until(lambda: len(made.faults) == 1)
        await until(unread)
        transport.create("orders/part-001", topic="orders")
        await until(lambda: len(shards) == 2)
        await until(lambda: not unread())
        assert made.faults == []
        running.cancel()
        await asyncio.wait([running])

    with caplog.at_level("WARNING"):
        run(scenario(), 3 * WAIT_S)
    failed, works = caplog.messages
    assert "creation of shards of totals failed, and is tried again" in failed
    assert "topic=orders has 1 partition, topic=customers has 2 partitions" in failed
    assert works.startswith("creation of shards of totals works again")
