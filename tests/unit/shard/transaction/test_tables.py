"""Tables of the newest message of each key of a topic."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.word_count.word_count_pb2 import NGramCount
from gazette_sdk import JsonMessage, mapping, shard
from gazette_sdk.errors import ConfigurationError, ShardStoreError, ValidationError
from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.labels import label_set
from gazette_sdk.shard.application.application import Query
from gazette_sdk.shard.application.generator import generated
from gazette_sdk.shard.consumer.state import read_state
from gazette_sdk.shard.transaction.failure import HandlerFailedError
from gazette_sdk.shard.transaction.tables import Tables
from gazette_sdk.testing import run_handler
from support.ride_join import Driver, Ride


@dataclass
class Trip(JsonMessage):
    number: int
    car: str


STORES = {
    "RocksStore": shard.RocksStore[str, int],
    "JsonStore": shard.JsonStore,
    "SqliteStore": shard.SqliteStore,
    "SqlStore": lambda directory: shard.SqlStore(
        f"sqlite:///{directory.parent}/{directory.name}.remote.sqlite", "a/shard"
    ),
}
DRIVERS = shard.table(
    "topic=drivers", key=attrgetter("driver"), message=Driver, removes=lambda each: not each.car
)
TO_TRIPS = mapping.direct("trips/part-000")


def application(store=shard.JsonStore, *, tables=(DRIVERS,), **declared):
    def consume(txn, ride):
        driver = txn.table(DRIVERS).get(ride.driver)
        assert (ride.driver in txn.table(DRIVERS)) == (driver is not None)
        txn.publish(Trip(ride.number, driver.car if driver else "none"), mapping=TO_TRIPS)

    given = {"message": Ride, "sources": "topic=rides", "name": "trips", **declared}
    return shard.handler(store=store, tables=tables, **given)(consume)


def expected(messages):
    cars, trips = {}, []
    for each in messages:
        if isinstance(each, Driver):
            cars[each.driver] = each.car
        else:
            trips.append(Trip(each.number, cars.get(each.driver) or "none"))
    return trips


NAMES = st.sampled_from(["ada", "bo", "a\0", ""])
MESSAGES = st.lists(
    st.builds(Ride, NAMES, st.integers(0, 99))
    | st.builds(Driver, NAMES, st.sampled_from(["", "red", "blue"])),
    max_size=30,
)


@given(MESSAGES, st.integers(1, 5))
def test_rides_find_the_newest_message_of_their_driver(messages, batch_count):
    found = run_handler(application(), messages, batch_count=batch_count)
    assert found.published == expected(messages)


@pytest.mark.parametrize("store", STORES)
def test_tables_are_kept_by_every_store(store):
    messages = [
        Ride("ada", 1),
        Driver("ada", "red"),
        Driver("bo", "blue"),
        Ride("ada", 2),
        Ride("bo", 3),
        Driver("ada", ""),
        Driver("bo", "green"),
        Ride("ada", 4),
        Ride("bo", 5),
    ]
    # Without reading the state at the end: two of the stores have none of their own here.
    found = run_handler(
        application(STORES[store]), messages, batch_count=1, read=lambda store: None
    )
    assert found.published == expected(messages)


@pytest.mark.parametrize("store", STORES)
def test_a_table_is_as_it_was_committed_after_a_restart(store, tmp_path):
    directory = tmp_path / "shard"
    directory.mkdir()
    topics = {"drivers/part-000": "topic=drivers"}

    def opened():
        made = STORES[store](directory)
        made.restore()
        tables = Tables([DRIVERS], made, topics)
        tables.restore()
        made.begin()
        return made, tables

    first, tables = opened()
    for name, car in [("ada", "red"), ("bo", "blue"), ("ada", "green")]:
        tables.put(DRIVERS, Driver(name, car))
    assert tables.open(DRIVERS)["ada"] == Driver("ada", "green")
    first.put_rows(tables.changes)
    first.start_commit(Checkpoint({"drivers/part-000": 1}))
    first.finish_commit()
    tables.committed()
    first.begin()
    tables.put(DRIVERS, Driver("bo", ""))  # is not committed
    assert tables.open(DRIVERS).get("bo") is None
    with first.committed() as view:
        query = Query(view, None, tables=[DRIVERS])
        assert query.table(DRIVERS)["bo"] == Driver("bo", "blue")
        assert query.table(DRIVERS).get("cy") is None
    first.destroy()

    second, tables = opened()
    found = tables.open(DRIVERS)
    assert (found["ada"], found["bo"]) == (Driver("ada", "green"), Driver("bo", "blue"))
    with pytest.raises(KeyError, match="cy"):
        found["cy"]
    second.destroy()


WHOLE = shard.table(
    shard.broadcast("topic=drivers"),
    key=attrgetter("driver"),
    message=Driver,
    removes=lambda each: not each.car,
)


@given(MESSAGES, st.integers(1, 5))
def test_a_table_that_every_shard_has_is_read_by_a_handler(messages, batch_count):
    def consume(txn, ride):
        driver = txn.table(WHOLE).get(ride.driver)
        txn.publish(Trip(ride.number, driver.car if driver else "none"), mapping=TO_TRIPS)

    made = shard.handler(
        message=Ride, sources="topic=rides", tables=[WHOLE], store=shard.JsonStore, name="trips"
    )(consume)
    found = run_handler(made, messages, batch_count=batch_count)
    assert found.published == expected(messages)


def test_a_handler_consumes_a_topic_that_every_shard_reads():
    def consume(txn, message):
        trip = Trip(0, message.car) if isinstance(message, Driver) else Trip(message.number, "")
        txn.publish(trip, mapping=mapping.direct(txn.source.replace("=", "/")))

    sources = shard.partitions("topic=rides", shard.broadcast("topic=drivers"))
    classes = {"topic=rides": Ride, "topic=drivers": Driver}
    made = shard.handler(message=classes, sources=sources, store=shard.JsonStore, name="trips")
    messages = [Ride("ada", 1), Driver("ada", "red"), Ride("ada", 2)]
    assert run_handler(made(consume), messages).published == [
        Trip(1, ""),
        Trip(0, "red"),
        Trip(2, ""),
    ]


@pytest.mark.parametrize("store", STORES)
def test_the_newest_message_of_several_partitions_is_that_which_was_published_last(store, tmp_path):
    """Also after a key was removed: an older message does not bring it back."""
    directory = tmp_path / "shard"
    directory.mkdir()
    made = STORES[store](directory)
    made.restore()
    tables = Tables([WHOLE], made, {})
    tables.restore()
    made.begin()
    clock = 0
    for name, car, clock in [
        ("ada", "red", 5),
        ("ada", "blue", 3),
        ("bo", "green", 1),
        ("bo", "red", 2),
        ("cy", "red", 3),
        ("cy", "", 7),
        ("cy", "blue", 6),
    ]:
        tables.put(WHOLE, Driver(name, car), clock)
        if clock == 3:  # across a commit
            made.put_rows(tables.changes)
            made.start_commit(Checkpoint({"drivers/part-000": clock}))
            made.finish_commit()
            tables.committed()
            made.begin()
    found = tables.open(WHOLE)
    assert (found["ada"], found["bo"]) == (Driver("ada", "red"), Driver("bo", "red"))
    assert "cy" not in found
    tables.put(WHOLE, Driver("cy", "new"), 8)
    assert found["cy"] == Driver("cy", "new")
    made.destroy()


def test_a_table_that_every_shard_has_is_shown_without_its_removed_keys(tmp_path):
    store = shard.RocksStore[str, int](tmp_path)
    store.restore()
    tables = Tables([WHOLE], store, {})
    tables.restore()
    store.begin()
    for clock, (name, car) in enumerate([("ada", "red"), ("bo", ""), ("cy", "blue")]):
        tables.put(WHOLE, Driver(name, car), clock)
    store.put_rows(tables.changes)
    store.start_commit(Checkpoint({"drivers/part-000": 3}))
    store.finish_commit()

    def shown(**request):
        with store.committed() as view:
            found = read_state(view, cpb.StateRequest(what="tables", **request), [WHOLE.topic])
        return [(each.place, each.key) for each in found.entries], found.more

    ada, cy = (WHOLE.topic, '"ada"'), (WHOLE.topic, '"cy"')
    assert shown() == ([ada, cy], False)
    assert shown(limit=1) == ([ada], True)
    assert shown(key="cy") == ([cy], False)
    assert shown(key="bo") == ([], False)
    store.destroy()


def test_what_a_failed_transaction_has_put_is_dropped():
    """The record that fails aborts its transaction, which is run again without it."""

    def consume(txn, ride):
        if ride.number == 2:
            txn.publish(Trip(2, "never"), mapping=TO_TRIPS)
            raise ValueError("a mistake")
        txn.publish(Trip(ride.number, txn.table(DRIVERS)["ada"].car), mapping=TO_TRIPS)

    made = shard.handler(
        message=Ride,
        sources="topic=rides",
        tables=[DRIVERS],
        store=shard.JsonStore,
        name="skips",
        on_error="skip",
    )(consume)
    messages = [Driver("ada", "red"), Ride("ada", 1), Driver("ada", "blue"), Ride("ada", 2)]
    found = run_handler(made, [*messages, Ride("ada", 3)])
    assert found.published == [Trip(1, "red"), Trip(3, "blue")]


def test_coroutine_functions_read_tables():
    async def consume(txn, ride):
        txn.publish(Trip(ride.number, txn.table(DRIVERS)[ride.driver].car), mapping=TO_TRIPS)

    made = shard.handler(
        message=Ride,
        sources="topic=rides",
        tables=[DRIVERS],
        store=shard.JsonStore,
        name="coroutines",
    )(consume)
    found = run_handler(made, [Driver("ada", "red"), Ride("ada", 1)])
    assert found.published == [Trip(1, "red")]


def test_messages_of_a_table_have_no_event_time():
    """They have no function of it, and a table that is never written to holds nothing up."""
    seen = []

    def consume(txn, ride):
        seen.append(txn.watermark)

    made = shard.handler(
        message=Ride,
        sources="topic=rides",
        tables=[DRIVERS],
        store=shard.JsonStore,
        name="times",
        event_time=attrgetter("number"),
        idle_s=None,
    )(consume)
    run_handler(made, [Ride("ada", 10), Driver("ada", "red"), Ride("ada", 20), Ride("ada", 30)])
    assert seen == [None, 10.0, 20.0]


@pytest.mark.parametrize(
    ("key", "error"),
    [
        (lambda _: 1.5, "1.5 cannot be a key of <table of topic=drivers>"),
        (lambda _: "x" * 600, "use one of less than"),
        (lambda _: next(iter(())), "StopIteration"),
    ],
)
def test_a_message_without_a_usable_key_is_a_record_that_fails(key, error):
    bad = shard.table("topic=drivers", key=key, message=Driver)
    made = application(tables=[bad])
    with pytest.raises(HandlerFailedError, match=error) as caught:
        run_handler(made, [Driver("ada", "red")])
    assert caught.value.journal == "memory/1/part-000"
    skipping = application(tables=[bad], on_error="skip")
    run_handler(skipping, [Driver("ada", "red")])


def test_another_class_than_the_one_that_wrote_a_table_is_an_error():
    class Car(msgspec.Struct):
        number: int

    encoded = DRIVERS.codec.encode(Driver("ada", "red"))
    other = shard.table("topic=drivers", key=attrgetter("driver"), message=Car)
    with pytest.raises(ShardStoreError, match="declare the class that wrote it"):
        other.decode(encoded)


def test_protobuf_messages_and_dicts_are_kept():
    counts = shard.table("topic=counts", key=attrgetter("n_gram"), message=NGramCount)
    count = NGramCount(n_gram="a b", count=2)
    assert counts.decode(counts.codec.encode(count)) == count
    dicts = shard.table("topic=dicts", key=lambda each: each["key"], message=dict)
    assert dicts.decode(dicts.codec.encode({"key": 1})) == {"key": 1}


class Model(pydantic.BaseModel):
    driver: str


@pytest.mark.parametrize(
    ("declared", "error"),
    [
        ({"key": "driver", "message": Driver}, "the key of a table is a function"),
        ({"key": len, "message": Driver, "removes": True}, "`removes` of a table is a function"),
        ({"key": len, "message": Model}, "the table of topic=drivers: .*Model.* cannot be"),
        ({"key": len, "message": int}, "int can carry no message UUID"),
    ],
)
def test_what_is_no_table_is_refused_where_it_is_declared(declared, error):
    with pytest.raises(ConfigurationError, match=error):
        shard.table("topic=drivers", **declared)


@pytest.mark.parametrize(
    ("declared", "error"),
    [
        ({"tables": DRIVERS}, "use tables="),
        ({"tables": ["topic=drivers"]}, "use tables="),
        ({"tables": [DRIVERS, DRIVERS]}, "several different topics"),
        ({"tables": [DRIVERS], "sources": "topic=drivers"}, "several different topics"),
        ({"tables": [DRIVERS], "sources": None}, "has tables, which are joined with topics"),
        ({"tables": [DRIVERS], "sources": ["rides/one"]}, "has tables, which are joined with"),
        ({"tables": [WHOLE], "sources": None}, "has tables, which are joined with topics"),
        ({"tables": [WHOLE], "sources": "topic=drivers"}, "several different topics"),
        ({"tables": [DRIVERS], "store": type("Store", (), {})}, "has tables, which Store does not"),
    ],
)
def test_an_application_whose_tables_cannot_be_joined_is_refused(declared, error):
    with pytest.raises(ConfigurationError, match=error):
        application(**declared)


def test_a_table_that_is_not_declared_is_an_error():
    with pytest.raises(HandlerFailedError, match=r"does not declare <table of topic=drivers>"):
        run_handler(application(tables=()), [Ride("ada", 1)])
    with pytest.raises(ConfigurationError, match="add it to `tables=`"):
        Query(None, None).table(DRIVERS)


def test_the_shard_of_a_partition_reads_that_of_its_tables():
    made = application(sources=shard.partitions("topic=rides", "topic=zones"))
    topics = [
        [pb.JournalSpec(name=f"{name}/part-000", labels=label_set(topic=name))]
        for name in ("rides", "zones", "drivers")
    ]
    [spec] = generated(made, topics).shards
    assert spec.id == "trips/rides/part-000"
    handle = shard.Shard(spec.id, spec, None, spec.id)
    assert handle.journals == ("drivers/part-000", "rides/part-000", "zones/part-000")
    assert handle.labels("app.gazette.dev/table") == ("drivers/part-000",)
    assert [made.new_message(topic[0]) for topic in topics] == [Ride, Ride, Driver]


def test_keys_of_a_table_are_of_several_types():
    rows = {DRIVERS.row_of(key) for key in ["1", b"1", 1, ("1",), ("1", 1), ("1", "1")]}
    assert len(rows) == 6
    with pytest.raises(ValidationError, match="cannot be a key"):
        DRIVERS.row_of(None)
