"""Each kind of message: where its UUID is written, how it is read back, and what is refused."""

from __future__ import annotations

import base64
import dataclasses
import json
import uuid
from dataclasses import dataclass, field

import msgspec
import pydantic
import pytest

from gazette_sdk.errors import DecodeError, ValidationError
from gazette_sdk.framing import Frames, Framing, JsonLines, framing_for
from gazette_sdk.message.kinds import kind_of
from gazette_sdk.message.kinds.base import JsonMessage
from gazette_sdk.message.uuid import (
    ACK_TXN,
    OUTSIDE_TXN,
    ZERO_UUID,
    Envelope,
    Stamp,
    build_uuid,
    uuid_of_text,
)
from support.protobuf_messages import Gram, NoUuid, TextUuid
from support.vectors import golden, group

PRODUCER = bytes.fromhex("0d04970419de")


@dataclass
class Item:
    name: str


@dataclass
class Order(JsonMessage):
    customer: str
    cents: int
    items: list[Item] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Lower(JsonMessage, uuid_field="uuid"):
    customer: str
    cents: int


@dataclass
class Own(JsonMessage):
    customer: str
    cents: int
    UUID: str = ""


@dataclass(frozen=True)
class FrozenOwn(JsonMessage):
    customer: str
    cents: int
    UUID: uuid.UUID | None = None


class Struct(msgspec.Struct):
    customer: str
    cents: int


class Strict(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    customer: str
    cents: int


class OwnStruct(msgspec.Struct, frozen=True):
    customer: str
    cents: int
    id: str = msgspec.field(default="", name="UUID")


class Model(pydantic.BaseModel):
    customer: str
    cents: int


class StrictModel(pydantic.BaseModel, extra="forbid"):
    customer: str
    cents: int


class OpenModel(pydantic.BaseModel, extra="allow"):
    customer: str
    cents: int


class AliasModel(pydantic.BaseModel):
    buyer: str = pydantic.Field(alias="customer")
    cents: int


class OwnModel(pydantic.BaseModel, frozen=True):
    customer: str
    cents: int
    id: uuid.UUID | None = pydantic.Field(default=None, alias="UUID")


SPLICED = [
    {"customer": "ada", "cents": 250},
    Order("ada", 250, [Item("x")]),
    Struct("ada", 250),
    Strict("ada", 250),
    Model(customer="ada", cents=250),
    StrictModel(customer="ada", cents=250),
    OpenModel(customer="ada", cents=250),
    AliasModel(customer="ada", cents=250),
]
OWN = [
    Own("ada", 250),
    FrozenOwn("ada", 250),
    OwnStruct("ada", 250),
    OwnModel(customer="ada", cents=250),
]


def stamp(clock: int = 160, flags: int = OUTSIDE_TXN) -> Stamp:
    made = Stamp(PRODUCER)
    made.clock, made.flags = clock, flags
    return made


def lines(*payloads: bytes) -> tuple[bytes, Frames]:
    out = bytearray()
    JsonLines().encode_many(payloads, out)
    return bytes(out), JsonLines().cut(bytes(out))


def decode(message_type, *payloads: bytes):
    return kind_of(message_type, "json").decode(JsonLines(), *lines(*payloads))


def uuids_of(decoded) -> list[uuid.UUID]:
    return [Envelope("j", 0, 1, None, raw).uuid for raw in decoded.uuids]


def name_of(value) -> str:
    return type(value).__name__


@pytest.mark.parametrize("message", SPLICED, ids=name_of)
@pytest.mark.parametrize("count", [1, 7])
def test_a_uuid_is_written_first_and_the_message_read_back(message, count):
    kind = kind_of(type(message), "json")
    stamps = [stamp(160 * (index + 1)) for index in range(count)]
    payloads = [kind.encode(message, each) for each in stamps]
    for payload, each in zip(payloads, stamps, strict=True):
        assert payload.startswith(b'{"UUID":"' + each.text() + b'",')
        assert json.loads(payload)["customer"] == "ada"
    decoded = decode(type(message), *payloads)
    assert decoded.error is None
    assert decoded.messages == [message] * count
    assert [found.bytes for found in uuids_of(decoded)] == [each.raw() for each in stamps]


@pytest.mark.parametrize("message", OWN, ids=name_of)
@pytest.mark.parametrize("count", [1, 7])
def test_a_class_with_its_own_uuid_field_has_it_filled(message, count):
    kind = kind_of(type(message), "json")
    payloads = [kind.encode(message, stamp(160 * (index + 1))) for index in range(count)]
    assert payloads[0].count(b"UUID") == 1
    decoded = decode(type(message), *payloads)
    assert decoded.error is None
    assert [found.bytes for found in uuids_of(decoded)] == [
        stamp(160 * (index + 1)).raw() for index in range(count)
    ]
    assert all(each.customer == "ada" for each in decoded.messages)
    assert (str(uuids_of(decoded)[-1]) in repr(message)) == isinstance(message, Own)


def test_a_class_chooses_the_key_of_its_uuid():
    kind = kind_of(Lower, "json")
    payload = kind.encode(Lower("ada", 1), stamp())
    assert payload.startswith(b'{"uuid":"0000000a-')
    decoded = decode(Lower, *[payload] * 5)
    assert decoded.messages == [Lower("ada", 1)] * 5
    assert uuids_of(decoded) == [build_uuid(PRODUCER, 160, 0)] * 5


@pytest.mark.parametrize(
    ("message_type", "key"),
    [
        *((each, "UUID") for each in (dict, Order, Strict, Model, StrictModel, OpenModel, Own)),
        *((each, "uuid") for each in (dict, Order, Struct, Model)),
    ],
)
def test_a_uuid_elsewhere_in_the_object_is_found(message_type, key):
    text = str(build_uuid(PRODUCER, 320, 1))
    payload = json.dumps({"customer": "ada", key: text.upper(), "cents": 250}).encode()
    decoded = decode(message_type, *[payload] * 5)
    assert decoded.error is None
    assert uuids_of(decoded) == [uuid_of_text(text)] * 5
    assert ("UUID" in repr(decoded.messages[0])) == (message_type is Own)


@pytest.mark.parametrize("message_type", [dict, Order, Struct, Model])
def test_a_message_without_uuid_opts_out_of_sequencing(message_type):
    decoded = decode(message_type, b'{"customer":"ada","cents":250}')
    assert uuids_of(decoded) == [ZERO_UUID]
    envelope = Envelope("j", 0, 1, decoded.messages[0], decoded.uuids[0])
    assert (envelope.clock, envelope.flags, envelope.producer) == (0, 0, bytes(6))
    assert envelope.time is None


@pytest.mark.parametrize("message_type", [dict, Order, Model])
def test_an_applications_own_uuid_of_another_form_is_no_message_uuid(message_type):
    decoded = decode(message_type, b'{"customer":"ada","cents":250,"uuid":42}')
    assert uuids_of(decoded) == [ZERO_UUID]


def test_a_zero_uuid_line_reads_as_recorded():
    line = group("message", "json_framing")["zero_uuid_line"]["expect_stream_utf8"].encode()
    decoded = decode(dict, line.rstrip(b"\n"))
    assert decoded.messages == [{"Str": "x"}]
    assert uuids_of(decoded) == [ZERO_UUID]


def test_an_acknowledgement_of_another_writer_is_read():
    line = group("message", "json_framing")["ack_example"]["line_utf8"].encode()
    decoded = decode(dict, line)
    assert decoded.messages == [{"BikeID": 0, "Steps": None}]
    assert Envelope("j", 0, 1, None, decoded.uuids[0]).flags == ACK_TXN


def test_a_dict_is_published_without_changing_it():
    message = {"a": 1, "uuid": "own"}
    payload = kind_of(dict, "json").encode(message, stamp())
    assert json.loads(payload) == {"UUID": "0000000a-0000-1000-8000-0d04970419de", **message}
    assert message == {"a": 1, "uuid": "own"}
    assert kind_of(dict, "json").encode({}, stamp()).count(b",") == 0


@pytest.mark.parametrize("value", ["own", None, "0000000a-0000-1000-8000-0d04970419de"])
def test_a_message_with_a_key_of_its_own_in_place_of_the_uuid_is_refused(value):
    class Open(pydantic.BaseModel, extra="allow"):
        a: int

    for message in ({"a": 1, "UUID": value}, Open(a=1, UUID=value)):
        with pytest.raises(ValidationError, match=r"'UUID', which publishing writes: .*rename"):
            kind_of(type(message), "json").encode(message, stamp())
    kind = kind_of(Open, "json")
    [read] = decode(Open, kind.encode(Open(a=1, b=2), stamp())).messages
    assert kind.encode(read, stamp()) == kind.encode(Open(a=1, b=2), stamp())


def test_a_computed_field_in_place_of_the_uuid_is_refused():
    class Computed(pydantic.BaseModel):
        a: int

        @pydantic.computed_field(alias="UUID")
        def id(self) -> str:
            return f"order {self.a}"

    with pytest.raises(ValidationError, match="Computed has a computed field 'UUID'"):
        kind_of(Computed, "json")


@pytest.mark.parametrize("message_type", [Order, Lower, Struct, Strict, Model, StrictModel, Own])
def test_an_empty_acknowledgement_is_read_as_an_empty_message(message_type):
    key = getattr(message_type, "uuid_field", "UUID")
    acknowledgement = b'{"%b":"%b"}' % (key.encode(), stamp(320, ACK_TXN).text())
    whole = kind_of(message_type, "json").encode(message_type(customer="ada", cents=1), stamp())
    decoded = decode(message_type, *[whole] * 4, acknowledgement, *[whole] * 3)
    assert decoded.error is None
    assert [each.customer for each in decoded.messages] == ["ada"] * 4 + [""] + ["ada"] * 3
    assert uuids_of(decoded)[4] == build_uuid(PRODUCER, 320, ACK_TXN)


@pytest.mark.parametrize("message", [*SPLICED[1:], Own("a", 1)], ids=name_of)
def test_a_new_acknowledgement_is_empty_and_can_be_framed(message):
    kind = kind_of(type(message), "json")
    empty = kind.new_acknowledgement(message, "a/journal")
    assert type(empty) is type(message)
    read = json.loads(kind.encode(empty, stamp(480, ACK_TXN)))
    assert read["customer"] == ""
    assert read["cents"] == 0


def test_a_class_says_what_its_acknowledgements_are():
    @dataclass
    class Routed(JsonMessage):
        region: str

        def new_acknowledgement(self, journal):
            return Routed(self.region + ":" + journal)

    made = kind_of(Routed, "json").new_acknowledgement(Routed("eu"), "a/b")
    assert made == Routed("eu:a/b")
    assert kind_of(dict, "json").new_acknowledgement({"a": 1}, "j") == {}


BAD = b'{"customer":"missing quote}'


@pytest.mark.parametrize("message_type", [dict, Order, Struct, Strict, Model])
@pytest.mark.parametrize(
    "bad",
    [BAD, b"", b"  ", b"[1]", b'{"a":1},{"b":2}', b'{"UUID":5}', b'"\xff"'],
    ids=["quote", "blank", "spaces", "array", "two", "number", "utf8"],
)
@pytest.mark.parametrize("position", [0, 3])
def test_a_bad_line_is_found_behind_the_good_ones(message_type, bad, position):
    if bad == b'{"UUID":5}' and message_type is dict:
        bad = b"5"
    good = kind_of(message_type, "json").encode(message_type(customer="a", cents=1), stamp())
    decoded = decode(message_type, *[good] * position, bad, *[good] * (6 - position))
    assert decoded.error is not None
    assert len(decoded.messages) == len(decoded.uuids) == position


def test_lines_that_only_together_are_an_array_are_bad():
    decoded = decode(dict, b'{"a":1},{"b":2}', b'{"c":[{}', b"{}]}")
    assert decoded.messages == []
    assert decoded.error is not None


def test_a_broken_acknowledgement_is_bad_like_any_line():
    good = kind_of(Order, "json").encode(Order("a", 1), stamp())
    broken = b'{"UUID":"%b","a":}' % stamp(320, ACK_TXN).text()
    for before in (0, 5):
        decoded = decode(Order, *[good] * before, broken, good)
        assert len(decoded.messages) == before
        assert decoded.error is not None


def test_a_key_of_ones_own_is_found_anywhere():
    @dataclass
    class Keyed(JsonMessage, uuid_field="message_id"):
        n: int

    text = str(build_uuid(PRODUCER, 160, 0))
    decoded = decode(
        Keyed,
        kind_of(Keyed, "json").encode(Keyed(1), stamp()),
        b'{"n":2,"message_id":"%b"}' % text.encode(),
        b'{"n":3,"UUID":"%b"}' % text.encode(),
        b'{"n":4}',
    )
    assert [each.n for each in decoded.messages] == [1, 2, 3, 4]
    assert uuids_of(decoded) == [uuid_of_text(text)] * 3 + [ZERO_UUID]


def test_what_stands_in_the_place_of_a_uuid_is_delivered_as_it_is():
    good = kind_of(Strict, "json").encode(Strict("a", 1), stamp())
    decoded = decode(Strict, *[good] * 5, b'{"UUID":"12","customer":"b","cents":2}')
    assert decoded.messages == [*[Strict("a", 1)] * 5, Strict("b", 2)]
    assert decoded.uuids[5] == "12"
    with pytest.raises(DecodeError, match="invalid UUID length"):
        uuids_of(decoded)


def test_a_dict_without_uuid_among_others_opts_out():
    good = kind_of(dict, "json").encode({"n": 1}, stamp())
    lower = b'{"uuid":"%b","n":2}' % stamp(320).text()
    decoded = decode(dict, good, b'{"n":3}', lower, b'{"uuid":"not one","n":4}')
    assert uuids_of(decoded) == [
        build_uuid(PRODUCER, 160, 0),
        ZERO_UUID,
        build_uuid(PRODUCER, 320, 0),
        ZERO_UUID,
    ]


def test_a_json_framing_of_ones_own_needs_no_lines():
    class Prefixed(Framing):
        content_type = "application/x-prefixed"
        form = "json"
        header_bytes = 4

        def encode(self, payload, out):
            out += len(payload).to_bytes(4, "big") + payload

        def cut(self, buffer, *, searched=0, final=False):
            begins, ends, at = [], [], 0
            while at + 4 <= len(buffer):
                end = at + 4 + int.from_bytes(buffer[at : at + 4], "big")
                begins.append(at)
                ends.append(end)
                at = end
            return Frames(begins, ends, at)

    framing = Prefixed()
    for message in ({"customer": "a\n", "cents": 1}, Order("a", 1), Model(customer="a", cents=1)):
        kind = kind_of(type(message), "json")
        out = bytearray()
        framing.encode_many([kind.encode(message, stamp())] * 6, out)
        decoded = kind.decode(framing, out, framing.cut(out))
        assert decoded.messages == [message] * 6
        assert uuids_of(decoded) == [build_uuid(PRODUCER, 160, 0)] * 6


def test_a_field_that_json_cannot_hold_is_refused():
    @dataclass
    class Odd(JsonMessage):
        either: dict[str, int] | Item

    with pytest.raises(ValidationError, match=r"has a field that JSON cannot hold, .either.:"):
        kind_of(Odd, "json")


class Loose(pydantic.BaseModel):
    anything: object


class Plain:
    pass


@dataclass
class NoBase:
    customer: str


class NoFields(JsonMessage):
    pass


class AsArray(msgspec.Struct, array_like=True):
    customer: str


@dataclass
class BadOwn(JsonMessage):
    UUID: int


@pytest.mark.parametrize(
    ("message_type", "remedy"),
    [
        (Plain, "use a dataclass on JsonMessage"),
        (str, "use a dataclass on JsonMessage"),
        (NoBase, "derive the dataclass from JsonMessage"),
        (NoFields, "decorate it with @dataclass"),
        (AsArray, "leave array_like off"),
        (BadOwn, "declare it as str"),
        (NoUuid, "give it a field `bytes uuid`"),
        (TextUuid, "give it a field `bytes uuid`"),
        (Order("a", 1), "no class"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_class_that_can_carry_no_uuid_is_refused_with_the_remedy(message_type, remedy):
    with pytest.raises(ValidationError, match=remedy):
        kind_of(message_type, "json")


@pytest.mark.parametrize(("message_type", "form"), [(Order, "protobuf"), (Gram, "json")])
def test_a_class_of_another_form_is_refused(message_type, form):
    with pytest.raises(ValidationError, match="or a journal with another content-type label"):
        kind_of(message_type, form)


@pytest.mark.parametrize(
    "message",
    [
        {"a": object()},
        Order("a", object()),
        Struct("a", object()),
        {"a": {1, object()}},
        Loose(anything=object()),
    ],
    ids=name_of,
)
def test_what_json_cannot_hold_is_refused(message):
    with pytest.raises(ValidationError, match="cannot be encoded as JSON"):
        kind_of(type(message), "json").encode(message, stamp())


def test_a_protobuf_message_carries_its_uuid_in_its_field():
    kind = kind_of(Gram, "protobuf")
    framing = framing_for("application/x-protobuf-fixed")
    message = Gram(text="wood chuck", count=300)
    out = bytearray()
    framing.encode_many([kind.encode(message, stamp(160 * i)) for i in range(1, 4)], out)
    decoded = kind.decode(framing, out, framing.cut(out))
    assert [each.text for each in decoded.messages] == ["wood chuck"] * 3
    assert [found.bytes for found in uuids_of(decoded)] == [stamp(160 * i).raw() for i in (1, 2, 3)]
    empty = kind.new_acknowledgement(message, "a/journal")
    assert kind.encode(empty, stamp(480, ACK_TXN)) == b"\x0a\x10" + stamp(480, ACK_TXN).raw()


def test_a_bad_protobuf_payload_is_found_behind_the_good_ones():
    kind = kind_of(Gram, "protobuf")
    framing = framing_for("application/x-protobuf-fixed")
    out = bytearray()
    framing.encode_many([kind.encode(Gram(text="a"), stamp()), b"test message content", b""], out)
    decoded = kind.decode(framing, out, framing.cut(out))
    assert [each.text for each in decoded.messages] == ["a"]
    assert decoded.error is not None


GOLDEN = golden("consumer/messages/framing.json")["frames"]


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["name"])
def test_golden_frames_are_decoded(case):
    if case["content_type"] == "text/csv":
        return
    framing = framing_for(case["content_type"])
    frame = base64.b64decode(case["frame"])
    message_type = dict if framing.form == "json" else Gram
    decoded = kind_of(message_type, framing.form).decode(framing, frame, framing.cut(frame))
    assert decoded.error is None
    found = uuids_of(decoded)[0]
    if framing.form == "json":
        plain = json.loads(frame)
        assert str(found) == plain.pop("UUID")
        assert decoded.messages == [plain]
    else:
        assert decoded.messages[0].SerializeToString() == frame[8:]
        assert found.bytes == decoded.messages[0].uuid.ljust(16, b"\0")


def test_a_validate_method_is_found_where_a_class_offers_one():
    @dataclass
    class Checked(JsonMessage):
        cents: int

        def validate(self):
            if self.cents < 0:
                raise ValueError("negative")

    check = kind_of(Checked, "json").validate
    assert check is not None
    check(Checked(1))
    with pytest.raises(ValueError, match="negative"):
        check(Checked(-1))
    assert kind_of(Order, "json").validate is None
    assert kind_of(Model, "json").validate is None


def test_dataclasses_keep_their_meaning_with_the_base():
    assert Order("ada", 1) == Order("ada", 1)
    assert [each.name for each in dataclasses.fields(Order)] == ["customer", "cents", "items"]
    assert repr(Lower("a", 1)).endswith("Lower(customer='a', cents=1)")
    assert Lower.uuid_field == "uuid"
    assert not hasattr(Lower("a", 1), "__dict__")
