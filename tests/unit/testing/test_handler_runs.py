"""Runs in memory of an application that joins topics."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk import JsonMessage, shard
from gazette_sdk.errors import ConfigurationError
from gazette_sdk.shard.transaction.failure import HandlerFailedError
from gazette_sdk.testing import run_handler
from support.ride_join import DRIVERS, RIDES, Driver, Joined, Ride, joined

NAMES = st.sampled_from(["ada", "bo", "cy"])


def expected(messages):
    cars, counts, found = {}, {}, []
    for each in messages:
        if isinstance(each, Driver):
            cars[each.driver] = each.car
        else:
            counts[each.driver] = counts.get(each.driver, 0) + 1
            car = cars.get(each.driver, "")
            found.append(Joined(each.driver, each.number, car, counts[each.driver]))
    return found


@given(
    st.lists(
        st.builds(Ride, NAMES, st.integers(0, 99)) | st.builds(Driver, NAMES, st.text(max_size=3)),
        min_size=1,
        max_size=30,
    ),
    st.integers(1, 7),
)
def test_messages_of_several_topics_keep_the_order_in_which_they_are_given(messages, batch_count):
    found = run_handler(joined, messages, batch_count=batch_count)
    assert found.published == expected(messages)


def test_each_topic_has_a_watermark_of_its_own():
    seen = []

    @shard.handler(
        message={RIDES: Ride, DRIVERS: Driver},
        sources=shard.partitions(RIDES, DRIVERS),
        store=shard.JsonStore,
        name="watermarks",
        event_time=lambda message: message.number if isinstance(message, Ride) else 5,
        idle_s=None,
    )
    def watermarks(txn, message):
        seen.append((txn.source, txn.envelope.journal, txn.watermark))

    run_handler(watermarks, [Ride("ada", 10), Driver("ada", "red"), Ride("ada", 20)])
    assert [topic for topic, *_ in seen] == [RIDES, DRIVERS, RIDES]
    assert len({journal for _, journal, _ in seen}) == 2
    assert seen[-1][2] == 5  # of the drivers


def test_a_message_of_another_class_has_no_topic():
    @dataclass
    class Other(JsonMessage):
        driver: str

    with pytest.raises(ConfigurationError, match="Other is the class of the messages of no topic"):
        run_handler(joined, [Ride("ada", 1), Other("ada")])


class Opened(msgspec.Struct, tag=True):
    driver: str


class Closed(msgspec.Struct, tag=True):
    driver: str


def test_a_topic_has_messages_of_each_class_of_its_union():
    newest = shard.table(
        "topic=newest", key=attrgetter("driver"), message=Opened | Closed, bootstrap=True
    )

    @shard.handler(
        message={RIDES: Ride, DRIVERS: Opened | Closed},
        sources=shard.partitions(RIDES, DRIVERS),
        store=shard.JsonStore[dict[str, list[str]]],
        name="doors",
    )
    def doors(txn, message):
        txn.store.state.setdefault(message.driver, []).append(type(message).__name__)

    events = [Opened("ada"), Ride("ada", 1), Closed("ada"), Closed("bo")]
    assert run_handler(doors, events).state == {
        "ada": ["Opened", "Ride", "Closed"],
        "bo": ["Closed"],
    }

    @shard.handler(
        message=Ride, sources=RIDES, tables=[newest], store=shard.RocksStore[str, str], name="last"
    )
    def last(txn, ride):
        txn.store[ride.driver] = type(txn.table(newest)[ride.driver]).__name__

    assert run_handler(last, events).state == {"ada": "Opened"}


def test_an_error_names_the_journal_of_its_topic():
    @shard.handler(
        message={RIDES: Ride, DRIVERS: Driver},
        sources=shard.partitions(RIDES, DRIVERS),
        store=shard.JsonStore,
        name="failing",
    )
    def failing(txn, message):
        if txn.source == DRIVERS:
            raise ValueError(message.car)

    with pytest.raises(HandlerFailedError) as caught:
        run_handler(failing, [Ride("ada", 1), Ride("bo", 1), Driver("ada", "red")])
    assert (caught.value.journal, caught.value.offset) == ("memory/1/part-000", 0)
