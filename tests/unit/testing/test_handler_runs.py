"""Runs of applications in memory: messages as journals have them, and topics that are joined."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import copy
import math
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk import JsonMessage, mapping, shard
from gazette_sdk.errors import ConfigurationError, DecodeError, ValidationError
from gazette_sdk.framing import JsonLines
from gazette_sdk.message import CsvRecord
from gazette_sdk.message.uuid import OUTSIDE_TXN
from gazette_sdk.shard.transaction import consume as consume_module
from gazette_sdk.shard.transaction.failure import DeadLetter, HandlerFailedError
from gazette_sdk.shard.transaction.transaction import Output
from gazette_sdk.testing import Advance, run_handler
from gazette_sdk.testing.handler_runs import JOURNAL, MemoryOutput
from gazette_sdk.transport.loop import run
from support.memory_transport import MemoryTransport
from support.protobuf_messages import Gram
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


# ----------------------------------------------------- messages as in a journal

NOW = 1_700_000_000.0
OUT = "out/part-000"
TO_OUT = mapping.direct(OUT)


@dataclass
class Order(JsonMessage):
    customer: str
    cents: int
    tags: Any = None

    def validate(self):
        if self.customer == "refused":
            raise LookupError("a customer of no one")


@dataclass
class Own(JsonMessage):
    cents: float
    UUID: str = ""


class Model(pydantic.BaseModel):
    cents: int


def handler_of(function, message=Order, **declared):
    declared = {"store": shard.RocksStore, "name": "orders", **declared}
    return shard.handler(message=message, **declared)(function)


def republish(txn, message):
    txn.publish(message, mapping=TO_OUT)


def test_the_handler_gets_what_a_reader_gets_and_changes_no_message_that_was_given():
    seen = []

    def look(txn, order):
        seen.append((order.tags, txn.envelope.flags, txn.envelope.time))
        order.tags.append("seen")
        txn.publish(order, mapping=TO_OUT)
        order.tags.append("later")

    given = [Order("ada", 1, tags=("a", 1)), Order("bob", 2, tags=["b"])]
    messages = [given[0], Advance(NOW + 60), given[1]]
    run = run_handler(handler_of(look), messages, now=NOW)
    assert given == [Order("ada", 1, tags=("a", 1)), Order("bob", 2, tags=["b"])]
    assert run.published == [Order("ada", 1, ["a", 1, "seen"]), Order("bob", 2, ["b", "seen"])]
    times = [datetime.fromtimestamp(NOW + each, UTC) for each in (0, 60)]
    assert [(flags, time) for _, flags, time in seen] == [(OUTSIDE_TXN, at) for at in times]


@pytest.mark.parametrize(
    ("message", "uuid"),
    [
        (Own(1.5), lambda each: each.UUID),
        (Gram(text="a", count=2), lambda each: each.uuid),
        (CsvRecord(["", "a", "2"]), lambda each: each[0]),
        (Opened("ada"), lambda each: "none"),
        (Model(cents=1), lambda each: "none"),
        ({"cents": 1}, lambda each: "none"),
    ],
)
def test_a_field_for_the_uuid_is_set_for_the_handler_and_is_as_given_in_the_result(message, uuid):
    before, found = copy.deepcopy(message), []

    def look(txn, each):
        found.append(uuid(each))
        txn.publish(message, mapping=TO_OUT)

    run = run_handler(handler_of(look, type(message)), [copy.deepcopy(message)])
    assert all(found)
    assert run.published == [before]


def test_a_message_is_read_as_the_declared_class_whichever_class_wrote_it():
    def look(txn, message):
        txn.store[message["customer"]] = message

    run = run_handler(handler_of(look, dict), [Order("ada", 1)])
    assert run.state == {"ada": {"customer": "ada", "cents": 1, "tags": None}}


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (7, "int can carry no message UUID"),
        (
            Gram(),
            "memory/part-000: Gram is a protobuf message, but the journal's framing holds json",
        ),
        (Order("ada", object()), "Order cannot be encoded as JSON"),
        ({"UUID": 1}, "which publishing writes"),
        ({"text": "a" * (JsonLines().frame_bytes_max)}, "which readers take at most"),
    ],
)
def test_a_message_that_cannot_be_written_is_refused(message, text):
    with pytest.raises(ValidationError, match=text):
        run_handler(handler_of(republish), [Order("ada", 1), message])


def test_a_message_that_its_publisher_refuses_is_refused():
    with pytest.raises(LookupError, match="a customer of no one"):
        run_handler(handler_of(republish), [Order("refused", 1)])


@pytest.mark.parametrize("batch_count", [1, 2, 100])
def test_a_message_that_cannot_be_decoded_is_content_that_is_no_message(batch_count):
    bad = Order("cy", "2")
    given = [Order("ada", 1), Order("bo", 2), bad, bad, Order("di", 3)]
    options = {"batch_count": batch_count}
    with pytest.raises(
        DecodeError, match=r"memory/part-000: the message at offset 2 cannot.*Order"
    ):
        run_handler(handler_of(republish), given, **options)
    good = [each for each in given if each is not bad]
    run = run_handler(handler_of(republish, on_error="skip"), given, **options)
    assert run.published == good
    letters = shard.dead_letters("orders/rejected")
    run = run_handler(handler_of(republish, on_error=letters), given, **options)
    assert [each for each in run.published if isinstance(each, Order)] == good
    rejected = [each for each in run.published if isinstance(each, DeadLetter)]
    assert [(each.journal, each.offset) for each in rejected] == [(JOURNAL, 2), (JOURNAL, 3)]
    assert all(b'"cents":"2"' in base64.b64decode(each.record) for each in rejected)


def test_what_was_published_and_cannot_be_decoded_is_an_error():
    """Readers would fail; the publisher of a shard does not."""

    def publishes(txn, order):
        txn.publish(Own(math.nan), mapping=TO_OUT)

    with pytest.raises(
        DecodeError, match=rf"{OUT}: the message at offset 0 cannot be decoded as Own"
    ):
        run_handler(handler_of(publishes), [Order("ada", 1)])


def test_a_value_that_the_store_cannot_keep_is_refused():
    def keeps(txn, order):
        txn.store[order.customer] = "text"

    with pytest.raises(HandlerFailedError, match="a value of int is needed"):
        run_handler(handler_of(keeps, store=shard.RocksStore[str, int]), [Order("ada", 1)])


def fails(message):
    raise KeyError("no such customer")


BAD = [
    (Order("ada", 1), None),
    (Order("ada", 1), OUT),
    (Order("ada", 1), fails),
    (Order("ada", 1), lambda message: 7),
    (Order("ada", 1), lambda message: "out//part"),
    (Order("ada", 1), mapping.modulo("topic=out", key=fails)),
    (Order("ada", 1), mapping.modulo("topic=out", key=lambda message: 1.5)),
    (Order("refused", 1), TO_OUT),
    (Order("ada", object()), TO_OUT),
    (7, TO_OUT),
    (("ada", 1), TO_OUT),
    ({"UUID": 1}, TO_OUT),
    (Gram(), TO_OUT),
]


@pytest.mark.parametrize(("message", "given"), BAD)
def test_what_an_output_refuses_is_refused_with_the_same_error(message, given):
    transport = MemoryTransport()
    transport.create(OUT, topic="out")

    def refused(output):
        output.publish(Order("ada", 0), TO_OUT)  # so that the journal's form is known
        with pytest.raises(Exception) as caught:  # noqa: PT011 - of all kinds
            output.publish(copy.deepcopy(message), given)
        return type(caught.value), str(caught.value)

    async def in_a_cluster():
        output = Output(transport)
        try:
            return await asyncio.to_thread(refused, output)
        finally:
            await output.aclose()

    assert refused(MemoryOutput()) == run(in_a_cluster(), 20)


def test_a_batch_is_published_as_a_whole_or_not_at_all():
    def publishes(txn, order):
        with contextlib.suppress(ValidationError):
            txn.publish_batch([order, 7], mapping=TO_OUT)
        txn.publish_batch([order, order], mapping=TO_OUT)

    order = Order("ada", 1, [])
    assert run_handler(handler_of(publishes), [order]).published == [order, order]


def test_a_publish_needs_a_mapping():
    with pytest.raises(HandlerFailedError, match=r"missing 1 required keyword-only .* 'mapping'"):
        run_handler(handler_of(lambda txn, order: txn.publish(order)), [Order("ada", 1)])


# --------------------------------------------------------------------------- time


@pytest.mark.parametrize("to", [NOW - 1, math.nan, math.inf, "soon"])
def test_a_time_that_does_not_follow_is_refused(to):
    given = [Order("ada", 1), Advance(NOW + 5), Advance(to)]
    with pytest.raises(ValidationError, match=r"is no time at 1700000005\.0 or later"):
        run_handler(handler_of(republish), given, now=NOW)


def test_messages_are_published_when_they_arrive():
    marks = []

    def look(txn, order):
        marks.append((txn.now - NOW, txn.watermark - NOW))

    application = handler_of(look, event_time="published")
    given = [Order("ada", 1), Order("bo", 1), Advance(NOW + 7), Order("cy", 1), Order("di", 1)]
    run_handler(application, given, now=NOW, batch_count=1)
    assert [now for now, _ in marks] == [0, 0, 7, 7]
    assert [round(mark, 3) for _, mark in marks[1:]] == [0, 0, 7]


def test_time_that_passes_costs_no_time(monkeypatch):
    monkeypatch.setattr(consume_module, "LOOK_PERIOD_S", 1e6)

    def look(txn, order):
        for window in txn.windows(order):
            window.state = (window.state or 0) + order.cents

    application = handler_of(look, windows=shard.windows.Tumbling(60))
    application.closed(lambda txn, window: txn.publish({"sum": window.state}, mapping=TO_OUT))
    given = []
    for minutes in range(0, 20, 2):
        given += [Order("ada", minutes), Advance(NOW + 60 * minutes + 110)]
    run = run_handler(application, given, now=NOW)
    assert run.published == [{"sum": minutes} for minutes in range(0, 20, 2)]
