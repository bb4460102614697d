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
    UnavailableError,
    ValidationError,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.journal_spec import validate_journal_spec
from gazette_sdk.protocol.labels import (
    BROADCAST,
    MANAGED_BY,
    TABLE,
    label_set,
    value_of,
    values_of,
)
from gazette_sdk.protocol.shard_spec import validate_shard_id
from gazette_sdk.shard.application import generator
from gazette_sdk.shard.application.generator import (
    DELETION_GRACE_S,
    DeletedSources,
    KnownShard,
    ShardGenerator,
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


def known(specs):
    """The shards of specs, as they exist."""
    return {spec.id: KnownShard(spec, 1) for spec in specs}


def reads(shard_name, *journals):
    sources = [cpb.ShardSpec.Source(journal=each) for each in sorted(journals)]
    return cpb.ShardSpec(id=shard_name, sources=sources)


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
    existing = known([reads("totals/orders/a", "orders/a")])
    found = generated(declared(), [[journal("orders/a"), journal("orders/b")]], existing)
    assert [spec.id for spec in found.shards] == ["totals/orders/b"]
    assert len(found.logs) == 1


def test_recovery_logs_and_unreadable_journals_are_no_sources():
    log = journal("recovery/x", **{"content-type": "application/x-gazette-recoverylog"})
    hidden = journal("orders/hidden")
    hidden.flags = pb.JournalSpec.O_WRONLY
    assert generated(declared(), [[log, hidden]]) == ([], [], [], [], [])


def test_stores_without_files_have_no_log():
    class Remote(JsonStore):
        is_recorded = False

    application = shard.handler(message=Order, store=Remote, name="t")(lambda txn, order: None)
    found = generated(application, [[journal("orders/a")]])
    assert found.logs == []
    assert found.shards[0].recovery_log_prefix == ""


def test_a_journal_that_a_shard_of_another_id_reads_gets_no_second_one():
    by_hand = reads("by-hand", "orders/a", "orders/b")
    other = reads("totals/orders/c", "orders/x")
    journals = [journal(f"orders/{part}") for part in "abcd"]
    found = generated(declared(), [journals], known([by_hand, other]))
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
        return {}

    async def apply(changes):
        created.extend(each.upsert.id for each in changes)

    async def scenario():
        transport = MemoryTransport()
        names = ["orders/z", "orders/" + "x" * 510, "orders/a"]
        for name in names:
            transport.create(name)
        made = ShardGenerator(application, transport, (), existing=existing, apply=apply)
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

    async def apply(changes):
        specs = [each.upsert for each in changes]
        assert all(f"recovery/{spec.id}" in transport.specs for spec in specs)
        assert all(each.expect_mod_revision == 0 for each in changes)
        if loses:
            raise EtcdTransactionFailedError("exists")
        shards.extend(specs)

    async def existing():
        return known(shards)

    made = ShardGenerator(declared(), transport, (), existing=existing, apply=apply)
    journals = [journal("orders/a"), journal("orders/b")]
    for _ in range(2):
        with pytest.raises(EtcdTransactionFailedError) if loses else contextlib.nullcontext():
            asyncio.run(made.generate([journals]))
    made = [spec.id for spec in shards]
    assert made == ([] if loses else ["totals/orders/a", "totals/orders/b"])


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
        return {}

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
            apply=None,
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
        return known([reads(f"{totals.full_name}/orders/part-000", "orders/part-000")])

    async def apply(_):
        pytest.fail("the shard exists")

    async def scenario():
        made = ShardGenerator(
            totals, transport, selectors_of(totals.sources), existing=existing, apply=apply
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
    existing = known([reads("totals/orders/part-000", "orders/part-000", "customers/part-000")])
    found = generated(declared(sources=JOINED), topics, existing)
    assert (found.shards, found.unread) == ([], ["customers/part-001"])
    [fault] = found.faults
    assert isinstance(fault, ConfigurationError)
    assert "topic=orders has 1 partition, topic=customers has 2 partitions" in str(fault)


def test_journals_that_change_the_numbers_of_others_are_an_error():
    """`part-0000` sorts between `part-000` and `part-001`."""
    topics = [of_topic("orders", "000", "001"), of_topic("customers", "000", "0000")]
    existing = known(
        reads(f"totals/orders/{part}", f"orders/{part}", f"customers/{part}")
        for part in ["part-000", "part-001"]
    )
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
        return known(shards.values())

    async def apply(changes):
        shards.update({each.upsert.id: each.upsert for each in changes})

    def unread():
        found = REGISTRY.get_sample_value(
            "gazette_shard_unread_bytes", {"journal": "customers/part-001"}
        )
        return found is not None

    async def scenario():
        made = ShardGenerator(
            application, transport, JOINED.selectors, existing=existing, apply=apply
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


# ---------------------------------------------------------------- topics that every shard reads


RATES = shard.broadcast("topic=rates")
RATE_TABLE = shard.table(RATES, key=lambda order: order.customer, message=Order)
READS_RATES = declared(sources=shard.partitions("topic=orders", RATES))
KEEPS_RATES = declared(tables=[RATE_TABLE])


@pytest.mark.parametrize("application", [READS_RATES, KEEPS_RATES])
def test_new_partitions_of_a_topic_that_is_broadcast_are_added_to_the_shards(application):
    orders = of_topic("orders", "000", "001")
    before = generated(application, [orders, of_topic("rates", "000")])
    one, two = before.shards
    existing = known(before.shards)
    rates = of_topic("rates", "000", "001", "-first")
    found = generated(application, [orders, rates], existing)
    assert (found.shards, found.faults, found.unread) == ([], [], [])
    assert [each.spec.id for each in found.grown] == [one.id, two.id]
    assert [each.mod_revision for each in found.grown] == [1, 1]
    new = found.grown[0].spec
    read = ["rates/part--first", "rates/part-000", "rates/part-001"]
    assert [source.journal for source in new.sources] == ["orders/part-000", *read]
    assert [source.min_offset for source in new.sources] == [0] * 4
    assert values_of(new.labels, BROADCAST) == read
    assert values_of(new.labels, TABLE) == (read if application is KEEPS_RATES else [])
    assert new == generated(application, [orders, rates]).shards[0]
    assert found.grown[0].journals == ["rates/part--first", "rates/part-001"]
    # Then there is nothing to do.
    existing = {each.spec.id: KnownShard(each.spec, 2) for each in found.grown}
    assert generated(application, [orders, rates], existing) == ([], [], [], [], [])


@pytest.mark.parametrize("shard_name", ["by-hand", "totals/orders/part-000"])
def test_a_topic_is_not_added_to_a_shard_that_reads_none_of_it(shard_name):
    """Its state is of the time before, or somebody else has made it."""
    existing = known([made_by("totals", shard_name, "orders/part-000")])
    topics = [of_topic("orders", "000"), of_topic("rates", "000")]
    found = generated(READS_RATES, topics, existing)
    assert (found.shards, found.grown, found.unread) == ([], [], ["rates/part-000"])
    [fault] = found.faults
    assert "the application's topics have changed" in str(fault)


def test_a_shard_is_deleted_with_its_partition_and_not_with_one_that_all_read():
    [spec] = generated(
        READS_RATES, [of_topic("orders", "000"), of_topic("rates", "000", "001")]
    ).shards
    made = Looks(spec)
    for name in [f"recovery/{spec.id}", "orders/part-000", "rates/part-000"]:
        made.transport.create(name)
    assert made.look() == made.look(DELETION_GRACE_S) == []
    [fault] = made.deleted.faults
    assert "reads rates/part-001, which does not exist any more" in str(fault)
    made.transport.delete("orders/part-000")
    assert made.look() == []
    assert made.look(DELETION_GRACE_S) == [spec.id]


def test_a_shard_is_deleted_as_it_is_known_with_its_hints(monkeypatch, caplog):
    """The line in the log names the journal of its own, and what is kept."""
    monkeypatch.setattr(generator, "DELETION_GRACE_S", 0.0)
    topics = [of_topic("orders", "000"), of_topic("rates", "000")]
    [spec] = generated(READS_RATES, topics).shards
    transport, applied = MemoryTransport(), []
    for name in [f"recovery/{spec.id}", "rates/part-000"]:
        transport.create(name, topic=name.partition("/")[0])

    async def existing():
        return {} if applied else {spec.id: KnownShard(spec, 7)}

    async def apply(changes):
        applied.extend(changes)

    async def scenario():
        made = ShardGenerator(
            READS_RATES,
            transport,
            selectors_of(READS_RATES.sources),
            existing=existing,
            apply=apply,
            deletes=True,
        )
        running = asyncio.create_task(made.run())
        await until(lambda: applied)
        running.cancel()
        await asyncio.wait([running])

    run(scenario(), WAIT_S)
    [change] = applied
    assert (change.delete, change.expect_mod_revision, change.delete_hints) == (spec.id, 7, True)
    [text] = [each for each in caplog.messages if each.startswith("deleted")]
    assert f"{spec.id}, as orders/part-000 was deleted, which it read. Its recovery" in text
    assert f"`gazctl journals delete recovery/{spec.id} --with-fragments`" in text


def test_shards_that_grow_are_changed_as_they_are_known(caplog):
    [spec] = generated(READS_RATES, [of_topic("orders", "000"), of_topic("rates", "000")]).shards
    applied = []

    async def existing():
        return {spec.id: KnownShard(spec, 7)}

    async def apply(changes):
        applied.extend(changes)

    made = ShardGenerator(READS_RATES, MemoryTransport(), (), existing=existing, apply=apply)
    with caplog.at_level("INFO"):
        topics = [of_topic("orders", "000"), of_topic("rates", "000", "001")]
        asyncio.run(made.generate(topics))
    [change] = applied
    assert (change.upsert.id, change.expect_mod_revision) == (spec.id, 7)
    [text] = caplog.messages
    assert text == (
        "rates/part-001: added to the sources of totals/orders/part-000, to be read from the begin"
    )


# ---------------------------------------------------------------- sources that were deleted


def made_by(application, shard_name, *journals):
    spec = reads(shard_name, *journals)
    spec.recovery_log_prefix = "recovery"
    spec.labels.CopyFrom(label_set([(MANAGED_BY, application)]))
    return spec


class Looks:
    """Looks for deleted sources, at a time and over journals that the test changes."""

    def __init__(self, *specs):
        self.now = 0.0
        self.transport = MemoryTransport()
        self.existing = known(specs)
        self.deleted = DeletedSources("totals", self.transport, clock=lambda: self.now)

    def look(self, after_s=0.0):
        """Return the ids of the shards that are to be deleted."""
        self.now += after_s
        listing = [each.spec for each in self.transport.journals.values()]
        orders = [spec for spec in listing if spec.name.startswith("orders/")]
        ended = asyncio.run(self.deleted.look([orders], self.existing))
        return [each.spec.id for each in ended]


SHARD = made_by("totals", "totals/orders/a", "orders/a")
LOG = f"recovery/{SHARD.id}"
SHOWS = {"deleted", "there", "empty", "fails", "hidden"}


@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(SHOWS)), st.sampled_from([0.0, 10.0, DELETION_GRACE_S])),
        max_size=8,
    )
)
def test_a_shard_is_deleted_only_if_its_source_was_missing_for_all_of_the_grace(looks):
    """Whatever listings show in between: nothing at all, errors, or what a token allows."""
    made = Looks(SHARD)
    missing_since = None
    for shows, after_s in looks:
        journals = {"deleted": [LOG], "hidden": [LOG], "there": [LOG, "orders/a"]}.get(shows, [])
        made.transport.journals.clear()
        for name in journals:
            made.transport.create(name)
        made.transport.may_hide_journals = shows == "hidden"
        if shows == "fails":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(made.transport, "list", unavailable)
                with pytest.raises(UnavailableError):
                    made.look(after_s)
            continue
        ended = made.look(after_s)
        if shows != "deleted":
            missing_since = None
        elif missing_since is None:
            missing_since = made.now
        is_certain = missing_since is not None and made.now - missing_since >= DELETION_GRACE_S
        assert ended == ([SHARD.id] if is_certain else [])
        assert bool(made.deleted.faults) == (shows in {"empty", "hidden"})


async def unavailable(_):
    raise UnavailableError("no broker answers")
    yield


def test_a_shard_that_is_not_of_the_generator_is_not_deleted():
    by_hand = made_by("totals", "totals/by-hand", "orders/a")
    unlabeled = reads("totals/orders/a", "orders/a")
    made = Looks(by_hand, unlabeled)
    assert made.look() == made.look(DELETION_GRACE_S) == []
    assert (made.deleted.faults, made.deleted.waits) == ([], False)


def test_a_process_that_leads_again_begins_to_wait_again():
    made = Looks(SHARD)
    made.transport.create(LOG)
    assert made.look() == []
    made.deleted.forget()
    assert made.look(DELETION_GRACE_S) == []
    assert made.look(DELETION_GRACE_S) == [SHARD.id]


def test_a_journal_that_only_lost_its_labels_is_read_on():
    made = Looks(SHARD)
    made.transport.create("orders/a")
    listed = made.deleted.look([[]], made.existing)
    assert asyncio.run(listed) == []
    assert (made.deleted.faults, made.deleted.waits) == ([], False)


def test_a_shard_with_another_source_is_kept_and_shown():
    made = Looks(made_by("totals", "totals/orders/a", "customers/a", "orders/a"))
    for name in [LOG, "customers/a"]:
        made.transport.create(name)
    assert made.look() == made.look(DELETION_GRACE_S) == []
    [fault] = made.deleted.faults
    assert "the shard totals/orders/a reads orders/a, which does not exist any more" in str(fault)
    made.transport.delete("customers/a")
    assert made.look() == []
    assert (made.deleted.faults, made.deleted.waits) == ([], True)
    assert made.look(DELETION_GRACE_S) == ["totals/orders/a"]


@pytest.mark.parametrize("shows_another", [True, False])
def test_a_shard_without_a_log_is_deleted_if_another_source_is_listed(shows_another):
    spec = made_by("totals", "totals/orders/a", "orders/a")
    spec.ClearField("recovery_log_prefix")
    made = Looks(spec)
    if shows_another:
        made.transport.create("orders/b")
    assert made.look() == []
    assert made.look(DELETION_GRACE_S) == ([spec.id] if shows_another else [])
    assert len(made.deleted.faults) == (not shows_another)
