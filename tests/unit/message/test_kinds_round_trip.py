"""Messages of every kind, of every shape of class, are read back as they were written."""

from __future__ import annotations

import collections
import dataclasses
import json

import pytest

from gazette_sdk.message import Publisher, Reader
from gazette_sdk.message.kinds import kind_of
from gazette_sdk.message.uuid import ACK_TXN, CONTINUE_TXN, ZERO_UUID, build_uuid, uuid_of_text
from support.message_shapes import (
    FRAMINGS,
    JSON,
    OTHERS,
    OWN_FIELD,
    PRODUCER,
    FrozenOwn,
    Plain,
    comparable,
    form_of,
    name_of,
    read,
    stamp,
)
from support.protobuf_messages import Gram


@pytest.mark.parametrize("count", [1, 7])
@pytest.mark.parametrize("make", [*JSON, *OTHERS], ids=name_of)
def test_messages_are_read_back_with_their_uuids(make, count):
    message_type, form = type(make()), form_of(make())
    kind = kind_of(message_type, form)
    stamps = [stamp(160 * (index + 1)) for index in range(count)]
    envelopes, error = read(message_type, form, [kind.encode(make(), each) for each in stamps])
    assert error is None
    assert [comparable(each.message) for each in envelopes] == [comparable(make())] * count
    assert {type(each.message) for each in envelopes} == {message_type}
    assert [each.uuid.bytes for each in envelopes] == [each.raw() for each in stamps]
    assert {each.flags for each in envelopes} == {CONTINUE_TXN}


@pytest.mark.parametrize("make", [*JSON, *OTHERS], ids=name_of)
def test_messages_published_in_bulk_are_those_published_one_by_one(make, transport):
    framing = FRAMINGS[form_of(make())]
    transport.create("a/journal", content_type=framing.content_type)
    with Publisher(lambda _: "a/journal", transport=transport) as publisher:
        publisher.publish(make())
        publisher.publish_batch([make() for _ in range(6)])
    with Reader(type(make()), name="a/journal", transport=transport) as reader:
        envelopes = list(reader)
    assert [comparable(each.message) for each in envelopes] == [comparable(make())] * 7
    content = transport.content_of("a/journal")
    assert len({len(content[each.begin : each.end]) for each in envelopes}) == 1


@pytest.mark.parametrize("make", JSON, ids=name_of)
def test_a_json_uuid_is_the_first_key_or_a_field_of_the_class(make):
    message = make()
    payload = kind_of(type(message), "json").encode(message, stamp())
    own = type(message) in OWN_FIELD
    keys = list(json.loads(payload))
    key = getattr(type(message), "uuid_field", "UUID")
    assert keys.count(key) == 1
    assert (keys[0] == key) != own
    assert payload.count(stamp().text()) == 1


@pytest.mark.parametrize("count", [1, 6])
@pytest.mark.parametrize("key", ["UUID", "uuid"])
@pytest.mark.parametrize("make", JSON, ids=name_of)
def test_a_json_uuid_of_another_writer_is_found_in_any_place(make, key, count):
    message_type = type(make())
    if message_type in OWN_FIELD and key == "uuid":
        return  # the key of a class with a field for it is that field's
    kind = kind_of(message_type, "json")
    values = json.loads(kind.encode(make(), stamp()))
    text = values.pop(kind.key)
    for place in range(len(values) + 1):
        items = list(values.items())
        items.insert(place, (key, text.upper()))
        payload = json.dumps(dict(items)).encode()
        envelopes, error = read(message_type, "json", [payload] * count)
        assert error is None
        assert {each.uuid for each in envelopes} == {uuid_of_text(text)}
        expected = make()
        if message_type is dict and key == "uuid":
            expected["uuid"] = text.upper()
        assert comparable(envelopes[0].message) == comparable(expected)


@pytest.mark.parametrize("make", [*JSON, *OTHERS], ids=name_of)
def test_acknowledgements_are_written_and_read_among_messages(make, recwarn):
    message_type, form = type(make()), form_of(make())
    kind = kind_of(message_type, form)
    empty = kind.new_acknowledgement(make(), "a/journal")
    assert type(empty) is message_type
    acknowledgement = kind.encode(empty, stamp(320, ACK_TXN))
    whole = kind.encode(make(), stamp())
    envelopes, error = read(message_type, form, [*[whole] * 5, acknowledgement, whole])
    assert error is None
    assert [each.flags for each in envelopes] == [CONTINUE_TXN] * 5 + [ACK_TXN, CONTINUE_TXN]
    assert type(envelopes[5].message) is message_type
    assert [str(each.message) for each in recwarn] == []


@pytest.mark.parametrize("make", JSON, ids=name_of)
def test_the_emptiest_acknowledgement_is_read_by_the_strictest_class(make):
    message_type = type(make())
    kind = kind_of(message_type, "json")
    whole = kind.encode(make(), stamp())
    emptiest = b'{"%b":"%b"}' % (kind.key.encode(), stamp(320, ACK_TXN).text())
    for before in (0, 5):
        envelopes, error = read(message_type, "json", [*[whole] * before, emptiest, whole])
        assert error is None
        assert envelopes[before].uuid == build_uuid(PRODUCER, 320, ACK_TXN)
        assert type(envelopes[before].message) is message_type


def test_a_frozen_class_with_its_own_field_is_copied_without_being_checked():
    kind = kind_of(FrozenOwn, "json")
    message = FrozenOwn("ada")
    payload = kind.encode(message, stamp())
    assert message.UUID is None
    assert json.loads(payload)["UUID"] == str(build_uuid(PRODUCER, 160, CONTINUE_TXN))
    empty = kind.new_acknowledgement(message, "j")
    assert json.loads(kind.encode(empty, stamp(320, ACK_TXN)))["name"] == ""


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 36, 100])
def test_a_protobuf_uuid_of_another_length_is_filled_or_cut(length):
    raw = build_uuid(PRODUCER, 160, CONTINUE_TXN).bytes
    whole = (raw * 7)[:length]
    payload = Gram(text="a", uuid=whole).SerializeToString()
    for count in (1, 6):
        envelopes, error = read(Gram, "protobuf", [payload] * count)
        assert error is None
        assert {each.uuid.bytes for each in envelopes} == {whole[:16].ljust(16, b"\0")}
        assert all(each.message.uuid == whole for each in envelopes)
    assert length > 0 or envelopes[0].uuid == ZERO_UUID


def test_publishing_replaces_a_protobuf_uuid_and_a_csv_uuid_but_keeps_the_rest():
    message = Gram(text="a", uuid=b"x" * 40)
    kind_of(Gram, "protobuf").encode(message, stamp())
    assert (message.uuid, message.text) == (stamp().raw(), "a")
    record = ["x" * 40, "a"]
    kind_of(list, "csv").encode(record, stamp())
    assert record == [stamp().text().decode(), "a"]


@pytest.mark.parametrize("message_type", [collections.OrderedDict, collections.defaultdict])
def test_classes_of_dicts_are_published_and_read_as_dicts(message_type):
    message = message_type({"a": 1}) if message_type is not collections.defaultdict else None
    message = collections.defaultdict(list, a=1) if message is None else message
    payload = kind_of(message_type, "json").encode(message, stamp())
    envelopes, _ = read(message_type, "json", [payload])
    assert envelopes[0].message == {"a": 1}


def test_every_shape_is_of_a_class_of_its_own():
    made = [type(make()) for make in (*JSON, *OTHERS)]
    assert len(set(made)) == len(made)
    assert dataclasses.is_dataclass(Plain)
