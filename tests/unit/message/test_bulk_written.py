"""Batches are written as their messages would be one by one, of every kind, with their stamps."""

from __future__ import annotations

import json
import threading
import uuid
from collections import Counter
from itertools import pairwise
from operator import itemgetter

import msgspec
import pyarrow as pa
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk import Publisher, Reader, mapping
from gazette_sdk.errors import (
    ValidationError,
)
from gazette_sdk.framing import JsonLines, register
from gazette_sdk.message.uuid import TICK, Clock, Stamp, build_uuid, parse_uuid, uuid_of_text
from support.protobuf_messages import Gram
from support.published import TO, WAIT_S, Order, Own, bare, clocks, lines


class Sparse(msgspec.Struct, omit_defaults=True):
    n: int = 0


class Model(pydantic.BaseModel):
    n: int
    name: str = pydantic.Field(alias="the name", default="x")


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


def test_uuids_as_values_are_written(transport):
    transport.create("a/journal")
    with Publisher(TO, transport=transport) as publisher:
        publisher.publish_batch([{"id": uuid.UUID(int=5)}])
    assert bare(transport, "a/journal") == [{"id": str(uuid.UUID(int=5))}]


def test_what_is_not_kept_in_memory_is_encoded_again(transport, monkeypatch):
    monkeypatch.setattr("gazette_sdk.message.bulk.KEPT_BYTES_MAX", 100_000)
    transport.create("a/journal")
    messages = [{"n": n} for n in range(20_000)]
    table = pa.Table.from_pylist(messages)
    with Publisher(TO, transport=transport) as publisher:
        publisher.publish_batch(messages)
        publisher.publish_batch(table)
    assert bare(transport, "a/journal") == messages * 2


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
