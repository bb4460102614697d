"""Unions of classes: objects of several msgspec Structs, which their tags distinguish."""

from __future__ import annotations

import datetime as dt
import typing
import uuid
from dataclasses import dataclass

import msgspec
import pyarrow as pa
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk import JsonMessage, Publisher, Reader, mapping
from gazette_sdk.errors import ConfigurationError, DecodeError, ValidationError
from gazette_sdk.message.kinds import known_kind
from gazette_sdk.message.uuid import ACK_TXN
from support.memory_transport import MemoryTransport
from support.message_shapes import read, stamp
from support.protobuf_messages import Gram

NAME = "a/journal"
TO_IT = mapping.direct(NAME)


class Ride(msgspec.Struct, tag=True):
    driver: str
    cents: int


class Driver(msgspec.Struct, tag=True):
    driver: str
    car: str = ""


class Strict(msgspec.Struct, tag="s", forbid_unknown_fields=True):
    number: int


EVENTS = st.builds(Ride, st.text(), st.integers(0, 1 << 60)) | st.builds(
    Driver, st.text(), st.text()
)


def written(*lines: bytes) -> MemoryTransport:
    transport = MemoryTransport()
    transport.create(NAME).content += b"".join(line + b"\n" for line in lines)
    return transport


def messages(kind, transport, **options):
    reader = Reader(kind, name=NAME, transport=transport, **options)
    return [each.message for each in reader]


@given(st.lists(EVENTS, min_size=1, max_size=12))
def test_a_union_reads_what_its_classes_write(events):
    payloads = [known_kind(type(each)).encode(each, stamp()) for each in events]
    found, error = read(Ride | Driver, "json", payloads)
    assert error is None
    assert [each.message for each in found] == events
    assert {str(each.uuid) for each in found} == {stamp().text().decode()}


@pytest.mark.parametrize("union", [Ride | Driver, typing.Union[Driver, Ride]])  # noqa: UP007
def test_members_are_published_with_tags_and_are_read_once_in_their_order(union):
    events = [Ride("ada", 1), Driver("ada", "red"), *(Ride("bo", n) for n in range(9))]
    transport = written()
    with Publisher(TO_IT, transport=transport) as publisher:
        for each in events:
            publisher.publish(each)
        publisher.publish_batch(events)
        publisher.publish_batch(events[2:])
        with publisher.transaction() as txn:
            txn.publish(events[1])
            txn.publish_batch(events)
    assert transport.content_of(NAME).count(b',"type":"Driver",') == 5  # with an acknowledgement
    found = messages(union, transport)
    assert found == [*events, *events, *events[2:], events[1], *events]
    reader = Reader(union, name=NAME, transport=transport, acknowledgements=True)
    assert [each.message for each in reader if each.flags == ACK_TXN] == [Driver("", "")]


def test_tag_and_uuid_may_be_anywhere():
    text = stamp().text()
    lines = [
        b'{"UUID":"%b","driver":"a","cents":1,"type":"Ride"}' % text,
        b'{"type":"Driver","UUID":"%b","driver":"b"}' % text,
        b'{"driver":"c","cents":2,"uuid":"%b","type":"Ride"}' % text,
    ]
    expected = [Ride("a", 1), Driver("b"), Ride("c", 2)]
    for times in (1, 5):
        found = messages(Ride | Driver, written(*lines * times), isolation="uncommitted")
        assert found == expected * times


def test_an_object_of_no_class_of_the_union_cannot_be_decoded():
    lines = b'{"driver":"a","cents":1}', b'{"type":"Other","driver":"a"}'
    for line, text in zip(lines, ("missing required field `type`", "Other"), strict=True):
        with pytest.raises(DecodeError, match=rf"Ride \| Driver.*{text}"):
            messages(Ride | Driver, written(line), isolation="uncommitted")


def test_an_empty_acknowledgement_of_another_writer_is_an_empty_message():
    transport = written(b'{"UUID":"%b"}' % stamp(flags=ACK_TXN).text())
    [found] = Reader(Ride | Driver, name=NAME, transport=transport, isolation="uncommitted")
    assert (found.message, found.flags) == (Ride("", 0), ACK_TXN)


def test_a_class_that_forbids_unknown_fields_is_read_without_the_uuid():
    events = [Strict(1), Ride("a", 1)] * 3
    lines = [known_kind(type(each)).encode(each, stamp()) for each in events]
    for count in (1, 2, 6):
        transport = written(*lines[:count])
        found = messages(Ride | Strict, transport, isolation="uncommitted")
        assert found == events[:count]


class OwnRide(msgspec.Struct, tag=True):
    cents: int
    UUID: str = ""


class OwnDriver(msgspec.Struct, tag=True):
    driver: str
    UUID: str = ""


class OtherOwn(msgspec.Struct, tag=True):
    UUID: uuid.UUID | None = None


def test_classes_with_a_field_for_the_uuid_get_it():
    transport = written()
    with Publisher(TO_IT, transport=transport) as publisher:
        publisher.publish_batch([OwnRide(1), OwnDriver("ada")] * 3)
    found = list(Reader(OwnRide | OwnDriver, name=NAME, transport=transport))
    assert [type(each.message) for each in found] == [OwnRide, OwnDriver] * 3
    assert [each.message.UUID for each in found] == [str(each.uuid) for each in found]
    assert len({each.uuid for each in found}) == 6


class Timed(msgspec.Struct, tag=True):
    at: dt.datetime


class Text(msgspec.Struct, tag=True):
    at: str


@dataclass
class Holder(JsonMessage):
    event: Timed | Text


def test_times_of_one_class_are_truncated_and_texts_of_another_are_not():
    long = "2026-01-01T23:59:59.9999999Z"
    cut = dt.datetime(2026, 1, 1, 23, 59, 59, 999999, dt.UTC)
    objects = [f'{{"type":"{name}","at":"{long}"}}'.encode() for name in ("Timed", "Text")]
    expected = [Timed(cut), Text(long)]
    for times in (1, 5):
        lines = objects * times
        assert messages(Timed | Text, written(*lines), isolation="uncommitted") == expected * times
        held = written(*(b'{"event":%b}' % each for each in lines))
        found = messages(Holder, held, isolation="uncommitted")
        assert [each.event for each in found] == expected * times


class Untagged(msgspec.Struct):
    driver: str


class SameTag(msgspec.Struct, tag="Ride"):
    driver: str


class OtherField(msgspec.Struct, tag_field="kind"):
    driver: str


@dataclass
class Plain(JsonMessage):
    driver: str


class Model(pydantic.BaseModel):
    kind: typing.Literal["model"]


class Array(msgspec.Struct, tag=True, array_like=True):
    driver: str


class TagOfUuid(msgspec.Struct, tag_field="UUID"):
    driver: str


@pytest.mark.parametrize(
    ("union", "text"),
    [
        (Ride | Untagged, "Ride | Untagged is no class of messages.*Untagged is no msgspec Struct"),
        (Ride | SameTag, "unique `tag` values"),
        (Ride | OtherField, "same `tag_field`"),
        (Ride | Plain, "Plain is no msgspec Struct with a tag; declare all of them as `class"),
        (Plain | Model, "Plain is no msgspec Struct"),
        (Ride | Model, "Model is no msgspec Struct"),
        (Ride | dict, "dict is no msgspec Struct"),
        (Ride | None, "NoneType is no msgspec Struct"),
        (Ride | dict[str, int], "no msgspec Struct"),
        (Ride | Gram, "Gram is no msgspec Struct"),
        (Ride | list, "list is no msgspec Struct"),
        (Ride | Array, "written as an array|array_like"),
        (Ride | OwnRide, "have their UUIDs in different fields; give all of them the same"),
        (OtherOwn | OwnRide, "have their UUIDs in different fields"),
        (TagOfUuid, "has the tag 'UUID', which publishing writes"),
    ],
)
def test_classes_that_cannot_be_distinguished_are_refused(union, text):
    with pytest.raises(ValidationError, match=text.replace(" | ", r" \| ")):
        Reader(union, name=NAME, transport=written())


def test_columns_of_a_union_need_a_schema():
    transport = written()
    with Publisher(TO_IT, transport=transport) as publisher:
        publisher.publish_batch([Ride("ada", 1), Driver("bo", "red")])
    with pytest.raises(ConfigurationError, match=r"Ride \| Driver has fields of several classes"):
        Reader(Ride | Driver, name=NAME, transport=transport).arrow()
    schema = pa.schema([("type", pa.string()), ("driver", pa.string()), ("car", pa.string())])
    reader = Reader(Ride | Driver, name=NAME, transport=transport)
    rows = [row for batch in reader.arrow(schema) for row in batch.to_pylist()]
    assert rows == [
        {"type": "Ride", "driver": "ada", "car": None},
        {"type": "Driver", "driver": "bo", "car": "red"},
    ]
