"""Batches: the same messages as one by one, all or nothing, of every kind and from columns."""

from __future__ import annotations

import asyncio
import concurrent.futures
import datetime as dt
import decimal
import json
import os
import subprocess
import sys
import threading
import uuid
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter, itemgetter

import msgspec
import numpy as np
import pyarrow as pa
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk import GazetteError, JsonMessage, Publisher, Reader, mapping
from gazette_sdk.errors import (
    BackPressureError,
    ClosedError,
    FramingError,
    MappingError,
    NotAllowedError,
    ValidationError,
)
from gazette_sdk.framing import JsonLines, register
from gazette_sdk.message.clock import TICK, Clock
from gazette_sdk.message.mapping import Partitions, fnv1a32, fnv1a32_many
from gazette_sdk.message.publishing.receipt import ReceiptTimeoutError
from gazette_sdk.message.uuid import Stamp, build_uuid, parse_uuid, uuid_of_text
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.loop import run
from support.memory_transport import MemoryTransport
from support.protobuf_messages import Gram

WAIT_S = 10.0

TO = mapping.direct("a/journal")


@dataclass
class Order(JsonMessage):
    customer: str
    cents: int


class Sparse(msgspec.Struct, omit_defaults=True):
    n: int = 0


class Model(pydantic.BaseModel):
    n: int
    name: str = pydantic.Field(alias="the name", default="x")


@dataclass
class Own(JsonMessage):
    n: object
    UUID: str = ""


def lines(transport: MemoryTransport, journal: str) -> list[dict]:
    return [json.loads(line) for line in transport.content_of(journal).splitlines()]


def clocks(transport: MemoryTransport, journal: str) -> list[int]:
    return [parse_uuid(uuid_of_text(line["UUID"])).clock for line in lines(transport, journal)]


def bare(transport: MemoryTransport, journal: str) -> list[dict]:
    found = lines(transport, journal)
    assert all(next(iter(line)) == "UUID" for line in found)
    return [{key: value for key, value in line.items() if key != "UUID"} for line in found]


@pytest.fixture
def orders(transport):
    """A transport with four journals which the selector ``topic=orders`` finds."""
    for index in range(4):
        transport.create(f"orders/part-{index}", topic="orders")
    return transport


# ------------------------------------------------------------------ what is written


def test_a_batch_is_written_as_its_messages_would_be_one_by_one(orders):
    by_key = mapping.modulo("topic=orders", key=itemgetter("key"))
    messages = [{"key": f"user-{n % 50}", "amount": n * 0.5, "n": n} for n in range(5000)]
    with Publisher(by_key, transport=orders, clock=Clock()) as publisher:
        receipt = publisher.publish_batch(messages)
        assert receipt.result(WAIT_S) is receipt
        for index, message in enumerate(messages[:50]):
            assert publisher.publish(message).journal in receipt.journals, index
    assert receipt.count == 5000
    assert sum(landing.count for landing in receipt.landed.values()) == 5000
    seen = {}
    for journal, landing in receipt.landed.items():
        content = orders.content_of(journal)[landing.begin : landing.end]
        for line in content.splitlines():
            message = json.loads(line)
            stamp = parse_uuid(uuid_of_text(message.pop("UUID")))
            assert stamp.producer == publisher.producer
            assert stamp.clock == (message["n"] + 1) * TICK
            assert message == messages[message["n"]]
            seen.setdefault(journal, []).append(message["n"])
    for journal, numbers in seen.items():
        assert numbers == sorted(numbers)
        one_by_one = {line["key"] for line in bare(orders, journal)[len(numbers) :]}
        assert {messages[n]["key"] for n in numbers} == one_by_one
    assert repr(receipt).startswith("<BatchReceipt 5000 messages, orders/part-0")


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([{"a": 1}, {}, {"b": {}}], [{"a": 1}, {}, {"b": {}}]),
        ([{}], [{}]),
        ([{"UUID": "old", "a": 1}, {"b": 2, "UUID": 5}], [{"a": 1}, {"b": 2}]),
        ([{"text": '\n{"UUID":"\r\n}\n'}] * 2, [{"text": '\n{"UUID":"\r\n}\n'}] * 2),
        ([Sparse(), Sparse(1), Sparse()], [{}, {"n": 1}, {}]),
        ([Order("ada", 1), Order("ödön", 2)], [{"customer": "ada", "cents": 1},
                                              {"customer": "ödön", "cents": 2}]),
        ([Model(n=1), Model(n=2)], [{"n": 1, "the name": "x"}, {"n": 2, "the name": "x"}]),
        ([Own(1), Own(2)], [{"n": 1}, {"n": 2}]),
        ([{"n": 1}, Order("ada", 1), Sparse()], [{"n": 1}, {"customer": "ada", "cents": 1}, {}]),
        ([{"raw": msgspec.Raw(b'{"x":1}')}], [{"raw": {"x": 1}}]),
        ([], []),
    ],
)  # fmt: skip
def test_messages_of_every_kind_are_written(transport, messages, expected):
    transport.create("a/journal")
    with Publisher(TO, transport=transport) as publisher:
        receipt = publisher.publish_batch(messages)
        receipt.result(WAIT_S)
    found = lines(transport, "a/journal")
    uuids = [line.pop("UUID") for line in found]
    assert found == expected
    assert receipt.count == len(expected)
    assert all(one < other for one, other in pairwise(clocks(transport, "a/journal")))
    assert [getattr(message, "UUID", text) for message, text in zip(messages, uuids, strict=True)
            if not isinstance(message, dict)] == [
        text for message, text in zip(messages, uuids, strict=True) if not isinstance(message, dict)
    ]  # fmt: skip


def test_protobuf_messages_are_written_with_their_uuids(transport):
    transport.create("a/journal", content_type="application/x-protobuf-fixed")
    greetings = [Gram(text=f"hello {n}") for n in range(100)]
    with Publisher(TO, transport=transport) as publisher:
        publisher.publish_batch(greetings).result(WAIT_S)
    found = list(Reader(Gram, name="a/journal", transport=transport))
    assert [envelope.message for envelope in found] == greetings
    assert [envelope.message.uuid for envelope in found] == [each.uuid for each in greetings]


def test_messages_of_one_batch_may_go_to_journals_of_several_framings(transport):
    transport.create("json/journal")
    transport.create("pb/journal", content_type="application/x-protobuf-fixed")

    def by_class(message):
        return "json/journal" if isinstance(message, dict) else "pb/journal"

    with Publisher(by_class, transport=transport) as publisher:
        receipt = publisher.publish_batch([{"n": 1}, Gram(text="x"), {"n": 2}])
        assert receipt.result(WAIT_S).journals == ("json/journal", "pb/journal")
        with pytest.raises(ValidationError, match="message 1 of the batch"):
            publisher.publish_batch([{"n": 3}, Gram(text="y")], mapping=lambda _: "json/journal")
    assert bare(transport, "json/journal") == [{"n": 1}, {"n": 2}]


def test_a_framing_of_the_users_own_gets_its_messages(transport):
    class Shouting(JsonLines):
        content_type = "text/x-shouting"

        def encode(self, payload, out):
            out += payload.upper() + b"\n"

    register(Shouting())
    transport.create("a/journal", content_type="text/x-shouting")
    with Publisher(TO, transport=transport) as publisher:
        publisher.publish_batch([{"a": "b"}]).result(WAIT_S)
    assert b'"A":"B"' in transport.content_of("a/journal")


# --------------------------------------------------------------- all or nothing


@pytest.mark.parametrize(
    ("messages", "error", "text"),
    [
        ([{"n": n} for n in range(5000)] + [{"bad": object()}], ValidationError,
         "message 5000 of the batch: dict cannot be encoded"),
        ([{"n": 1}, {"raw": msgspec.Raw(b"[\n]")}], FramingError,
         "message 1 of the batch: a JSON line cannot hold a line break"),
        ([Own(1), Own(object())], ValidationError, "message 1 of the batch"),
        ([{"n": 1}, "text"], ValidationError, "str can carry no message UUID"),
        ([{"n": 1}, None], ValidationError, "NoneType"),
        ({"n": 1}, ValidationError, "not one dict"),
        ("text", ValidationError, "not one str"),
    ],
)  # fmt: skip
def test_if_one_message_is_refused_none_is_published(transport, messages, error, text):
    transport.create("a/journal")
    with Publisher(TO, transport=transport) as publisher:
        with pytest.raises(error, match=text):
            publisher.publish_batch(messages)
        publisher.publish_batch([{"good": 1}]).result(WAIT_S)
    assert bare(transport, "a/journal") == [{"good": 1}]


def test_a_message_that_fails_its_validation_refuses_the_batch(transport):
    class Checked(msgspec.Struct):
        n: int

        def validate(self):
            if self.n == 2:
                raise ValueError("two is bad")

    transport.create("a/journal")
    with Publisher(TO, transport=transport) as publisher:
        with pytest.raises(ValueError, match="two is bad"):
            publisher.publish_batch([Checked(1), Checked(2)])
        publisher.publish_batch([Checked(3)])
    assert bare(transport, "a/journal") == [{"n": 3}]


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([{"to": "a/journal"}, {"to": None}], "a journal's name"),
        ([{"to": "a/journal"}, {"to": "no/journal"}], r"'no/journal'.*does not exist"),
    ],
)
def test_a_message_that_maps_to_no_journal_refuses_the_batch(transport, messages, text):
    transport.create("a/journal")
    with Publisher(itemgetter("to"), transport=transport) as publisher:
        with pytest.raises(MappingError, match=rf"message 1 of the batch: .*{text}"):
            publisher.publish_batch(messages)
        with pytest.raises(KeyError):
            publisher.publish_batch([{}])
        with pytest.raises(MappingError, match="there is no mapping"):
            Publisher(transport=transport).publish_batch([{"n": 1}])
    assert transport.content_of("a/journal") == b""


def test_a_batch_is_refused_by_journals_without_framing(transport):
    transport.create("a/journal", content_type="text/plain")
    with (
        Publisher(TO, transport=transport) as publisher,
        pytest.raises(FramingError, match="a/journal: unrecognized"),
    ):
        publisher.publish_batch([{"n": 1}])


def test_what_is_not_kept_in_memory_is_encoded_again(transport, monkeypatch):
    monkeypatch.setattr("gazette_sdk.message.publishing.dispatch.KEPT_BYTES_MAX", 100_000)
    transport.create("a/journal")
    messages = [{"n": n} for n in range(20_000)]
    table = pa.Table.from_pylist(messages)
    with Publisher(TO, transport=transport) as publisher:
        publisher.publish_batch(messages)
        publisher.publish_batch(table)
    assert bare(transport, "a/journal") == messages * 2


# --------------------------------------------------------------------- mapping


@given(st.lists(st.binary(max_size=40), max_size=50))
def test_many_hashes_are_those_of_each(contents):
    assert fnv1a32_many(contents).tolist() == [fnv1a32(each) for each in contents]


class Subclass(str):
    __slots__ = ()


_KEYS = st.one_of(
    st.text(max_size=5), st.binary(max_size=5), st.integers(0, 9), st.just(Subclass("x"))
)


@given(st.lists(_KEYS, min_size=1, max_size=30), st.integers(1, 9), st.data())
def test_many_messages_are_mapped_as_each_is(keys, count, data):
    partitions = [
        Partitions([pb.JournalSpec(name=f"part/{index:03d}") for index in range(n)])
        for n in (count, count + 1)
    ]
    for make in (mapping.modulo, mapping.rendezvous):
        fresh = make("topic=x", key=itemgetter("k"))
        messages = [{"k": key} for key in keys]
        for _ in range(3):
            listed = data.draw(st.sampled_from(partitions))
            found = [listed.names[index] for index in fresh.pick_many(messages, listed)]
            assert found == [make("topic=x", key=itemgetter("k")).pick(m, listed) for m in messages]
            assert found == [fresh.pick(m, listed) for m in messages]


@pytest.mark.parametrize("key", [True, 1.0, None])
def test_keys_which_equal_others_but_are_none_are_refused_after_those(key):
    by_key = mapping.modulo("topic=x", key=itemgetter("k"))
    partitions = Partitions([pb.JournalSpec(name="part/000")])
    by_key.pick_many([{"k": 1}], partitions)
    with pytest.raises(MappingError, match="no agreed bytes"):
        by_key.pick_many([{"k": 1}, {"k": key}], partitions)
    with pytest.raises(MappingError, match="no agreed bytes"):
        by_key.pick({"k": key}, partitions)


def test_not_all_keys_are_kept(monkeypatch):
    monkeypatch.setattr("gazette_sdk.message.mapping._KEYS_KNOWN_MAX", 10)
    by_key = mapping.modulo("topic=x", key=itemgetter("k"))
    partitions = Partitions([pb.JournalSpec(name=f"part/{index:03d}") for index in range(3)])
    messages = [{"k": str(n)} for n in range(30)]
    for count in (8, 16, 4, 30):
        found = by_key.pick_many(messages[:count], partitions)
        assert list(found) == [fnv1a32(m["k"].encode()) % 3 for m in messages[:count]]
        assert len(by_key._known[1]) <= max(16, count)


def test_any_mapping_maps_batches(orders, transport):
    transport.create("a/journal")
    with Publisher(transport=orders) as publisher:
        messages = [{"n": n} for n in range(200)]
        random = publisher.publish_batch(messages, mapping=mapping.random("topic=orders"))
        assert len(random.result(WAIT_S).journals) == 4
        named = publisher.publish_batch(messages, mapping=lambda m: f"orders/part-{m['n'] % 2}")
        assert named.result(WAIT_S).journals == ("orders/part-0", "orders/part-1")
        with pytest.raises(MappingError, match="no journal matches"):
            publisher.publish_batch(messages, mapping=mapping.random("topic=none"))


# --------------------------------------------------------------------- columns


def test_columns_are_written_as_rows(transport):
    transport.create("a/journal")
    naive = dt.datetime(2024, 5, 6, 7, 8, 9, 123456)  # noqa: DTZ001 - columns may be naive
    aware = naive.replace(tzinfo=dt.UTC)
    batch = pa.record_batch(
        {
            "int": pa.array([1, None]),
            "float": pa.array([0.5, None]),
            "text": pa.array(["a\n{", None]),
            "flag": pa.array([True, None]),
            "naive": pa.array([naive, None]),
            "aware": pa.array([aware, None], pa.timestamp("us", "Europe/Budapest")),
            "nano": pa.array([1, None], pa.timestamp("ns", "UTC")),
            "nano_naive": pa.array([2**60 + 7, None], pa.timestamp("ns")),
            "date": pa.array([dt.date(2024, 1, 2), None]),
            "time": pa.array([dt.time(1, 2, 3), None]),
            "decimal": pa.array([decimal.Decimal("12.340"), None]),
            "bytes": pa.array([b"\x00\xff", None]),
            "list": pa.array([[1, None], None]),
            "struct": pa.array([{"x": 1, "y": [None]}, None]),
            "map": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int64())),
            "dictionary": pa.array(["d", None]).dictionary_encode(),
            "class": pa.array([1, None]),
            "not a name": pa.array([1, None]),
            "validate": pa.array([1, None]),
            "uuid_field": pa.array([1, None]),
            "UUID": pa.array(["old", None]),
            "null": pa.nulls(2),
        }
    )
    with Publisher(TO, transport=transport) as publisher:
        publisher.publish_batch(batch).result(WAIT_S)
    full, empty = bare(transport, "a/journal")
    assert full.pop("aware") == "2024-05-06T09:08:09.123456+02:00"
    assert full == {
        "int": 1,
        "float": 0.5,
        "text": "a\n{",
        "flag": True,
        "naive": "2024-05-06T07:08:09.123456",
        "nano": "1970-01-01T00:00:00.000000001Z",
        "nano_naive": str(np.datetime64(2**60 + 7, "ns")),
        "date": "2024-01-02",
        "time": "01:02:03",
        "decimal": "12.340",
        "bytes": "AP8=",
        "list": [1, None],
        "struct": {"x": 1, "y": [None]},
        "map": {"k": 1},
        "dictionary": "d",
        "class": 1,
        "not a name": 1,
        "validate": 1,
        "uuid_field": 1,
        "null": None,
    }
    assert set(empty) == {*full, "aware"}
    assert set(empty.values()) == {None}


KEYS = [
    itemgetter("customer"),
    attrgetter("customer"),
    lambda row: row["customer"],
    lambda row: row.customer,
]


@pytest.mark.parametrize("key", KEYS)
def test_mappings_see_rows_by_item_and_by_attribute(orders, key):
    rows = [{"customer": f"c{n}", "n": n} for n in range(300)]
    by_key = mapping.modulo("topic=orders", key=key)
    table = pa.Table.from_batches(
        [pa.RecordBatch.from_pylist(rows[:100]), pa.RecordBatch.from_pylist(rows[100:])]
    )
    with Publisher(by_key, transport=orders) as publisher:
        receipt = publisher.publish_batch(table).result(WAIT_S)
    assert receipt.count == 300
    for index, name in enumerate(receipt.journals):
        for row in bare(orders, name):
            assert fnv1a32(row["customer"].encode()) % 4 == index
            assert row == rows[row["n"]]


def test_a_key_that_is_no_column_is_an_error(orders):
    batch = pa.RecordBatch.from_pylist([{"n": 1}])
    with Publisher(transport=orders) as publisher:
        with pytest.raises(KeyError):
            publisher.publish_batch(
                batch, mapping=mapping.modulo("topic=orders", key=itemgetter("k"))
            )
        with pytest.raises(AttributeError):
            publisher.publish_batch(
                batch, mapping=mapping.modulo("topic=orders", key=attrgetter("k"))
            )
        by_n = mapping.modulo("topic=orders", key=itemgetter("n"))
        nothing = pa.RecordBatch.from_pylist([{"n": "x"}, {"n": None}])
        with pytest.raises(MappingError, match=r"message 1 of the batch.*NoneType"):
            publisher.publish_batch(nothing, mapping=by_n)


def test_columns_which_are_no_rows_are_refused(transport):
    transport.create("a/journal", content_type="application/x-protobuf-fixed")
    transport.create("b/journal")
    with Publisher(TO, transport=transport) as publisher:
        twice = pa.RecordBatch.from_arrays([pa.array([1]), pa.array([2])], ["a", "a"])
        with pytest.raises(ValidationError, match="same name: a"):
            publisher.publish_batch(twice)
        batch = pa.RecordBatch.from_pylist([{"n": 1}])
        with pytest.raises(ValidationError, match="json message, but the journal's framing"):
            publisher.publish_batch(batch)
        odd = pa.record_batch({"n": pa.array([(1, 2, 3)], pa.month_day_nano_interval())})
        to_b = mapping.direct("b/journal")
        assert publisher.publish_batch(odd, mapping=to_b).result(WAIT_S).count == 1  # a tuple
        none = pa.RecordBatch.from_pylist([{"n": 1}]).slice(0, 0)
        assert publisher.publish_batch(none, mapping=to_b).result(WAIT_S).journals == ()


def test_columns_in_a_transaction_are_acknowledged_without_columns(transport):
    transport.create("a/journal")
    with Publisher(TO, transport=transport) as publisher, publisher.transaction() as txn:
        txn.publish_batch(pa.RecordBatch.from_pylist([{"n": 1}, {"n": 2}]))
    assert bare(transport, "a/journal") == [{"n": 1}, {"n": 2}, {}]


def test_pyarrow_is_imported_for_columns_only():
    code = (
        "import sys; from gazette_sdk import Publisher, mapping\n"
        "from support.memory_transport import MemoryTransport\n"
        "t = MemoryTransport(); t.create('a/journal')\n"
        "with Publisher(mapping.direct('a/journal'), transport=t) as p:\n"
        "    p.publish_batch([{'n': 1}]).result(10)\n"
        "print('pyarrow' in sys.modules)\n"
    )
    path = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": path}, capture_output=True, check=True
    )
    assert done.stdout.split() == [b"False"]


# ----------------------------------------------------------------------- stamps


@given(st.integers(0, (1 << 60) - 1), st.integers(1, 40), st.integers(0, 3), st.booleans())
def test_texts_of_uuids_are_those_of_each(ticks, count, flags, near_overflow):
    stamp = Stamp(b"\x01\x02\x03\x04\x05\x00")
    stamp.flags = flags
    first = ticks if not near_overflow else (ticks | 0xFFFF_FFFF0) - 5 * TICK
    rows = stamp.texts(first, count, b"<", b">")
    assert [bytes(row) for row in rows] == [
        b"<%b>" % str(build_uuid(stamp.producer, first + n * TICK, flags)).encode()
        for n in range(count)
    ]


def test_a_shared_clock_is_ticked_for_each_message(transport):
    transport.create("a/journal")
    clock = Clock(10**19)
    with Publisher(TO, transport=transport, clock=clock) as publisher:
        publisher.publish_batch([{"n": n} for n in range(5000)])
        publisher.publish({"n": 5000})
        publisher.publish_batch([])
    assert clocks(transport, "a/journal") == [10**19 + n * TICK for n in range(1, 5002)]


def test_messages_and_batches_of_many_threads_stand_in_the_order_of_their_clocks(orders):
    by_key = mapping.modulo("topic=orders", key=itemgetter("n"))
    with Publisher(by_key, transport=orders) as publisher:

        def work(thread):
            for n in range(20):
                publisher.publish_batch([{"thread": thread, "n": n * 100 + i} for i in range(100)])
                publisher.publish({"thread": thread, "n": n})

        threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
    total = Counter()
    for index in range(4):
        found = clocks(orders, f"orders/part-{index}")
        assert all(one < other for one, other in pairwise(found))
        total.update(line["thread"] for line in lines(orders, f"orders/part-{index}"))
    assert set(total.values()) == {2020}


# ------------------------------------------------------- receipts, back-pressure


def test_a_batch_costs_one_append_for_each_journal(orders):
    by_key = mapping.modulo("topic=orders", key=itemgetter("n"))
    with Publisher(by_key, transport=orders) as publisher:
        publisher.publish_batch([{"n": n} for n in range(4000)]).result(WAIT_S)
        assert len(orders.appends) == 4
        with publisher.transaction() as txn:
            txn.publish_batch([{"n": n} for n in range(4000)])
        assert len(orders.appends) == 12  # the acknowledgements wait until all is durable


@pytest.fixture
def gated(transport, on_loop):
    transport.create("a/journal")
    transport.append_gate = on_loop(asyncio.Event)
    transport.opened = lambda: on_loop(transport.append_gate.set)
    return transport


def test_a_receipt_of_a_batch_waits_and_tells(gated):
    publisher = Publisher(TO, transport=gated)
    receipt = publisher.publish_batch([{"n": 1}, {"n": 2}])
    assert not receipt.done()
    assert "pending" in repr(receipt)
    for ask in (lambda: receipt.landed, lambda: receipt.total_chunks):
        with pytest.raises(GazetteError, match="not acknowledged yet"):
            ask()
    with pytest.raises(ReceiptTimeoutError):
        receipt.result(timeout=0.01)
    gated.opened()

    async def wait():
        async with asyncio.timeout(WAIT_S):
            return await receipt

    assert asyncio.run(wait()) is receipt
    assert receipt.length_bytes == len(gated.content_of("a/journal"))
    publisher.close()


def test_a_failed_batch_tells_why(gated):
    gated.append_faults = [pb.NOT_ALLOWED]
    publisher = Publisher(TO, transport=gated)
    receipt = publisher.publish_batch([{"n": 1}, {"n": 2}])
    gated.opened()
    with pytest.raises(NotAllowedError):
        receipt.result(WAIT_S)
    with pytest.raises(NotAllowedError):
        _ = receipt.landed
    assert "failed" in repr(receipt)
    with pytest.raises(NotAllowedError):
        publisher.close()


def test_delayed_chunks_are_told(transport):
    answers: concurrent.futures.Future[None] = concurrent.futures.Future()

    class Slow(MemoryTransport):
        async def append(self, requests, target=None):
            response = await super().append(requests)
            await asyncio.wrap_future(answers)
            response.total_chunks, response.delayed_chunks = 5, 3
            return response

    slow = Slow()
    slow.create("a/journal")
    with Publisher(TO, transport=slow) as publisher:
        one = publisher.publish({"n": 1})
        with pytest.raises(GazetteError):
            _ = one.total_chunks
        answers.set_result(None)
        one.result(WAIT_S)
        assert (one.total_chunks, one.delayed_chunks) == (5, 3)
        many = publisher.publish_batch([{"n": 1}]).result(WAIT_S)
        assert (many.total_chunks, many.delayed_chunks) == (5, 3)


def test_a_large_batch_waits_for_room(gated):
    publisher = Publisher(TO, transport=gated, pending_bytes_max=1000)
    done = threading.Event()
    messages = [{"n": n} for n in range(20_000)]

    def work():
        publisher.publish_batch(messages)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert not done.wait(0.05)
    assert publisher._sender._pending_bytes < 400_000
    gated.opened()
    assert done.wait(WAIT_S)
    thread.join()
    publisher.close()
    assert bare(gated, "a/journal") == messages


def test_where_waiting_is_not_wanted_a_batch_is_taken_or_refused_as_a_whole(gated):
    publisher = Publisher(TO, transport=gated, pending_bytes_max=1000, when_full="raise")
    for kind in (dict, Own):
        with pytest.raises(BackPressureError, match="publish smaller batches"):
            publisher.publish_batch([kind(n=n) for n in range(1000)])
    receipt = publisher.publish_batch([{"text": "x" * 960}])
    with pytest.raises(BackPressureError, match="not acknowledged yet"):
        publisher.publish_batch([{"n": 1}])
    gated.opened()
    receipt.result(WAIT_S)
    publisher.close()
    assert len(lines(gated, "a/journal")) == 1
    with pytest.raises(ClosedError):
        publisher.publish_batch([{"n": 1}])


def test_on_the_sdks_own_loop_batches_wait_for_their_listings(transport):
    transport.create("a/journal")

    async def publish():
        publisher = Publisher(TO, transport=transport)
        async with asyncio.timeout(WAIT_S):
            first = publisher.publish({"n": 0})
            many = publisher.publish_batch([{"n": n} for n in range(1, 10)])
            last = publisher.publish({"n": 10})
            bad = publisher.publish_batch([{"to": 1}], mapping=lambda _: "no/journal")
            assert "pending" in repr(many)
            assert await many is many
            await first
            await last
            with pytest.raises(MappingError, match="no/journal"):
                await bad
            with pytest.raises(MappingError, match="no/journal"):
                await publisher.aflush()
            assert await publisher.publish_batch([{"n": 11}])
            await publisher.aclose()

    run(publish(), WAIT_S)
    assert bare(transport, "a/journal") == [{"n": n} for n in range(12)]


def test_uuids_as_values_are_written(transport):
    transport.create("a/journal")
    with Publisher(TO, transport=transport) as publisher:
        publisher.publish_batch([{"id": uuid.UUID(int=5)}])
    assert bare(transport, "a/journal") == [{"id": str(uuid.UUID(int=5))}]
