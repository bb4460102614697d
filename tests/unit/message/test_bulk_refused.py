"""Batches are published as a whole or not at all."""

from __future__ import annotations

from operator import itemgetter

import msgspec
import pyarrow as pa
import pytest

from gazette_sdk import Publisher, Reader
from gazette_sdk.errors import (
    FramingError,
    MappingError,
    ValidationError,
)
from gazette_sdk.framing import Framing, JsonLines
from gazette_sdk.framing.base import FRAME_BYTES_MAX
from gazette_sdk.message import CsvRecord
from support.protobuf_messages import Gram
from support.published import TO, WAIT_S, Own, bare


@pytest.mark.parametrize(
    ("messages", "error", "text"),
    [
        ([{"n": n} for n in range(5000)] + [{"bad": object()}], ValidationError,
         "message 5000 of the batch: dict cannot be encoded"),
        ([{"n": 1}, {"raw": msgspec.Raw(b"[\n]")}], FramingError,
         "message 1 of the batch: a JSON line cannot hold a line break"),
        ([Own(1), Own(object())], ValidationError, "message 1 of the batch"),
        ([{"n": 1}, "text"], ValidationError, "str can carry no message UUID"),
        ([{"n": 1}, {"UUID": "own"}], ValidationError, "the dict has the key 'UUID'"),
        ([{"n": 1}, None], ValidationError, "NoneType"),
        ({"n": 1}, ValidationError, "not one dict"),
        ("text", ValidationError, "not one str; publish"),
        (Own(1), ValidationError, "not one Own"),
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


LIMIT = 300
PAD = "x" * 400


def published_by(publisher: Publisher, how: str, messages: list) -> None:
    if how == "publish":
        for message in messages:
            publisher.publish(message).result(WAIT_S)
    elif how == "batch":
        publisher.publish_batch(messages).result(WAIT_S)
    elif how == "columns":
        publisher.publish_batch(pa.Table.from_pylist(messages)).result(WAIT_S)
    else:
        with publisher.transaction() as txn:
            if how == "transaction":
                for message in messages:
                    txn.publish(message)
            else:
                txn.publish_batch(messages)


HOWS = ["publish", "batch", "transaction", "batch of a transaction"]
KINDS = {
    "dict": ("application/x-ndjson", lambda text: {"text": text}),
    "dataclass": ("application/x-ndjson", Own),
    "protobuf": ("application/x-protobuf-fixed", lambda text: Gram(text=text)),
    "csv": ("text/csv", lambda text: CsvRecord(["", text])),
}


@pytest.mark.parametrize(
    ("how", "content_type", "make"),
    [
        pytest.param(how, *kind, id=f"{name}, {how}")
        for name, kind in KINDS.items()
        for how in [*HOWS, *(["columns"] if name == "dict" else [])]
    ],
)
def test_a_message_is_as_long_as_readers_take_at_most(
    transport, monkeypatch, how, content_type, make
):
    monkeypatch.setattr(Framing, "frame_bytes_max", LIMIT)
    transport.create("a/journal", content_type=content_type)
    with Publisher(TO, transport=transport) as publisher:
        with pytest.raises(ValidationError, match=f"a/journal: .* than {LIMIT} bytes, which read"):
            published_by(publisher, how, [make(PAD)])
        publisher.publish(make("")).result(WAIT_S)
        longest = LIMIT - len(transport.content_of("a/journal"))
        before = len(transport.content_of("a/journal"))
        if content_type == "application/x-protobuf-fixed":
            longest -= 3  # tag and length of the text
        published_by(publisher, how, [make("x" * longest)])
        assert transport.content_of("a/journal")[before:].count(b"x" * longest) == 1
        before = len(transport.content_of("a/journal"))
        with pytest.raises(ValidationError, match=f"message of {LIMIT + 1} bytes") as caught:
            published_by(publisher, how, [make("x" * (longest + 1))])
        assert caught.value.journal == "a/journal"
        assert len(transport.content_of("a/journal")) == before, "nothing of it is written"
        if "batch" in how or how == "columns":
            with pytest.raises(ValidationError, match="message 1 of the batch: a/journal"):
                published_by(publisher, how, [make("short"), make("x" * (longest + 1))])
            assert len(transport.content_of("a/journal")) == before


def test_a_longer_limit_is_that_of_the_framing(transport, monkeypatch):
    monkeypatch.setattr(JsonLines, "frame_bytes_max", 1 << 30)
    transport.create("a/journal")
    with Publisher(TO, transport=transport) as publisher:
        publisher.publish({"pad": "x" * FRAME_BYTES_MAX}).result(WAIT_S)
    (found,) = Reader(dict, name="a/journal", transport=transport)
    assert len(found.message["pad"]) == FRAME_BYTES_MAX


# ----------------------------------------------------------------- CSV records


def record(*fields):
    return ["", *fields]


def test_a_record_with_another_number_of_fields_is_refused(transport):
    transport.create("a/journal", content_type="text/csv")
    with Publisher(TO, transport=transport) as publisher:
        publisher.publish(record("1"))
        for refused in (record("2", "3"), record()):
            with pytest.raises(ValidationError, match="fields, after records of 2: readers would"):
                publisher.publish(refused)
            with pytest.raises(ValidationError, match=r"message 1 of the batch: .* after"):
                publisher.publish_batch([record("4"), refused])
            with pytest.raises(ValidationError), publisher.transaction() as txn:
                txn.publish(refused)
        publisher.publish_batch([record("5")] * 5000)
    found = [each.message[1:] for each in Reader(list, name="a/journal", transport=transport)]
    assert found == [["1"], *[["5"]] * 5000]


def test_a_batch_of_records_that_is_refused_fixes_no_number_of_fields(transport):
    transport.create("a/journal", content_type="text/csv")
    with Publisher(TO, transport=transport) as publisher:
        for refused in ([record("1", "2"), record("3")], [*[record("1")] * 5000, record(4)]):
            with pytest.raises(ValidationError):
                publisher.publish_batch(refused)
        publisher.publish_batch([record("5", "6", "7")])
    found = [each.message[1:] for each in Reader(list, name="a/journal", transport=transport)]
    assert found == [["5", "6", "7"]]


def test_an_acknowledgement_has_as_many_fields_as_its_message(transport):
    class Short(CsvRecord):
        def new_acknowledgement(self, journal):
            return Short([""])

    transport.create("a/journal", content_type="text/csv")
    with Publisher(TO, transport=transport) as publisher:
        publisher.publish(record("1"))
        refused = pytest.raises(ValidationError, match="1 fields, and its message 2")
        with refused, publisher.transaction() as txn:
            txn.publish(Short(["", "1"]))
    found = [each.message[1:] for each in Reader(list, name="a/journal", transport=transport)]
    assert found == [["1"]]
