"""Every kind of message, of every shape of class, keeps the same promises."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import enum
import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import msgspec
import pydantic
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from gazette_sdk.errors import DecodeError, ValidationError
from gazette_sdk.framing import Csv, FixedProtobuf, Framing, JsonLines
from gazette_sdk.message import Publisher, Reader
from gazette_sdk.message.envelope import Envelope
from gazette_sdk.message.flags import ACK_TXN, CONTINUE_TXN
from gazette_sdk.message.kinds import kind_of
from gazette_sdk.message.kinds.base import JsonMessage
from gazette_sdk.message.kinds.csv_kind import CsvRecord
from gazette_sdk.message.reading.journal_decoder import JournalDecoder
from gazette_sdk.message.uuid import ZERO_UUID, Stamp, build_uuid, uuid_of_text
from support.protobuf_messages import Gram

PRODUCER = bytes.fromhex("0d04970419de")
T = TypeVar("T")
FRAMINGS: dict[str, Framing] = {"json": JsonLines(), "protobuf": FixedProtobuf(), "csv": Csv()}


def stamp(clock: int = 160, flags: int = CONTINUE_TXN) -> Stamp:
    made = Stamp(PRODUCER)
    made.clock, made.flags = clock, flags
    return made


class Color(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


RICH = {
    "when": dt.datetime(2024, 2, 29, 12, 30, 0, 500, tzinfo=dt.UTC),
    "day": dt.date(2024, 2, 29),
    "took": dt.timedelta(seconds=90),
    "price": Decimal("1.50"),
    "raw": b"bytes",
    "color": Color.RED,
    "level": Level.HIGH,
    "id": uuid.UUID(int=5),
    "tags": {"a"},
    "pair": (1, "x"),
    "maybe": None,
    "side": "left",
}


@dataclass
class Item:
    name: str
    count: int = 1


# ------------------------------------------------------------------ dataclasses


@dataclass
class Plain(JsonMessage):
    name: str
    count: int


@dataclass(frozen=True, slots=True)
class Frozen(JsonMessage):
    name: str
    count: int


@dataclass(frozen=True, slots=True)
class FrozenOwn(JsonMessage):
    name: str
    UUID: uuid.UUID | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a name is missing")


@dataclass
class Derived(Plain):
    more: list[int] = field(default_factory=list)


@dataclass(kw_only=True)
class KeywordsOnly(JsonMessage):
    count: int = 0
    name: str
    unit: ClassVar[str] = "m"


@dataclass
class Lower(JsonMessage, uuid_field="uuid"):
    name: str


@dataclass
class Box(JsonMessage, Generic[T]):
    item: T


@dataclass
class IntBox(Box[int]):
    pass


@dataclass
class Nested(JsonMessage):
    item: Item
    items: list[Item]
    by_name: dict[str, Item]
    maybe: Item | None = None
    children: list[Nested] = field(default_factory=list)


@dataclass
class Rich(JsonMessage):
    when: dt.datetime
    day: dt.date
    took: dt.timedelta
    price: Decimal
    raw: bytes
    color: Color
    level: Level
    id: uuid.UUID
    tags: set[str]
    pair: tuple[int, str]
    maybe: int | None
    side: Literal["left", "right"]


# ------------------------------------------------------------------ Structs


class Struct(msgspec.Struct):
    name: str
    count: int = 0


class StrictStruct(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    name: str
    count: int


class OwnStruct(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    name: str
    id: str = msgspec.field(default="", name="UUID")


class RenamedStruct(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    order_name: str


class TaggedStruct(msgspec.Struct, tag=True, omit_defaults=True):
    name: str = ""


class StructBox(msgspec.Struct, Generic[T]):
    item: T


class RichStruct(msgspec.Struct):
    when: dt.datetime
    day: dt.date
    took: dt.timedelta
    price: Decimal
    raw: bytes
    color: Color
    level: Level
    id: uuid.UUID
    tags: set[str]
    pair: tuple[int, str]
    maybe: int | None
    side: Literal["left", "right"]


# ------------------------------------------------------------------ pydantic models


class Model(pydantic.BaseModel):
    name: str
    count: int = 0


class StrictModel(pydantic.BaseModel, extra="forbid", frozen=True):
    name: str
    count: int


class OpenModel(pydantic.BaseModel, extra="allow"):
    name: str


class AliasModel(pydantic.BaseModel, extra="forbid", populate_by_name=True):
    order_name: str = pydantic.Field(alias="orderName")


class OwnModel(pydantic.BaseModel, extra="forbid", frozen=True):
    name: str
    id: uuid.UUID | None = pydantic.Field(default=None, alias="UUID")


class KeyedModel(pydantic.BaseModel, extra="forbid"):
    uuid_field: ClassVar[str] = "message_id"

    name: str


class ModelBox(pydantic.BaseModel, Generic[T]):
    item: T


class RichModel(pydantic.BaseModel):
    when: dt.datetime
    day: dt.date
    took: dt.timedelta
    price: Decimal
    raw: bytes
    color: Color
    level: Level
    id: uuid.UUID
    tags: set[str]
    pair: tuple[int, str]
    maybe: int | None
    side: Literal["left", "right"]


# ------------------------------------------------------------------ others


def required_class(name: str) -> type:
    """A generated class of proto2 with required fields, one of them a message."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name=f"tests/{name}.proto", package="tests", syntax="proto2"
    )
    part = file.message_type.add(name=f"{name}Part")
    part.field.add(name="text", number=1, type=kinds.TYPE_STRING, label=kinds.LABEL_REQUIRED)
    made = file.message_type.add(name=name)
    made.field.add(name="uuid", number=1, type=kinds.TYPE_BYTES, label=kinds.LABEL_OPTIONAL)
    made.field.add(name="count", number=2, type=kinds.TYPE_INT64, label=kinds.LABEL_REQUIRED)
    made.field.add(
        name="part",
        number=3,
        type=kinds.TYPE_MESSAGE,
        label=kinds.LABEL_REQUIRED,
        type_name=f".tests.{name}Part",
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"tests.{name}"))


Required = required_class("Required")


def required() -> Any:
    made = Required(count=7)
    made.part.text = "x"
    return made


JSON: list[Callable[[], Any]] = [
    lambda: {"name": "ada", "count": 3, "nested": {"UUID": "not this one"}},
    lambda: Plain("ada", 3),
    lambda: Frozen("ada", 3),
    lambda: FrozenOwn("ada"),
    lambda: Derived("ada", 3, [1]),
    lambda: KeywordsOnly(name="ada"),
    lambda: Lower("ada"),
    lambda: Box("ada"),
    lambda: IntBox(3),
    lambda: Nested(Item("a"), [Item("b", 2)], {"c": Item("c")}, None, [Nested(Item("d"), [], {})]),
    lambda: Rich(**RICH),
    lambda: Struct("ada", 3),
    lambda: StrictStruct("ada", 3),
    lambda: OwnStruct("ada"),
    lambda: RenamedStruct("ada"),
    lambda: TaggedStruct("ada"),
    lambda: StructBox([1, "b"]),
    lambda: RichStruct(**RICH),
    lambda: Model(name="ada", count=3),
    lambda: StrictModel(name="ada", count=3),
    lambda: OpenModel(name="ada", extra=3),
    lambda: AliasModel(order_name="ada"),
    lambda: OwnModel(name="ada"),
    lambda: KeyedModel(name="ada"),
    lambda: ModelBox[int](item=3),
    lambda: RichModel(**RICH),
]
OTHERS: list[Callable[[], Any]] = [
    lambda: Gram(text="wood", count=3),
    required,
    lambda: ["", "ada", 'a "b", c\n'],
    lambda: CsvRecord(["", "ada", ""]),
]
OWN_FIELD = {FrozenOwn: "UUID", OwnStruct: "id", OwnModel: "id"}


def name_of(make: Callable[[], Any]) -> str:
    return type(make()).__name__


def form_of(message: Any) -> str:
    return next(form for form in FRAMINGS if _has_form(type(message), form))


def _has_form(message_type: type, form: str) -> bool:
    try:
        return kind_of(message_type, form).form == form
    except ValidationError:
        return False


def read(message_type: type, form: str, payloads: list[bytes]) -> tuple[list[Envelope[Any]], Any]:
    framing = FRAMINGS[form]
    content = bytearray()
    framing.encode_many(payloads, content)
    decoder = JournalDecoder("a/journal", framing, kind_of(message_type, form), 1000)
    run, error = decoder.feed(bytes(content))
    return list(run.items), error


def comparable(message: Any) -> Any:
    """The message without the UUID it was published with."""
    own = OWN_FIELD.get(type(message))
    if own is not None:
        values = {
            name: getattr(message, name)
            for name in (*getattr(type(message), "__annotations__", {}),)
        }
        return values | {own: None}
    if isinstance(message, list):
        return message[1:]
    if type(message) in {Gram, Required}:
        copied = type(message)()
        copied.CopyFrom(message)
        copied.ClearField("uuid")
        return copied
    return message


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


class RefusalError(Exception):
    """An application's own error."""


@dataclass
class Refusing(JsonMessage):
    name: str

    def __post_init__(self) -> None:
        if self.name == "bad":
            raise RefusalError("no name of ours")
        assert self.name != "worse"
        if self.name == "worst":
            raise KeyError("one line\n and another")


class RefusingModel(pydantic.BaseModel):
    name: str

    @pydantic.field_validator("name")
    @classmethod
    def check(cls, name: str) -> str:
        if name == "bad":
            raise RefusalError("no name of ours")
        return name


@pytest.mark.parametrize(
    ("message_type", "good", "bad", "text"),
    [
        (Plain, b'{"name":"a","count":1}', b'{"name":"a"}', "missing required field `count`"),
        (Plain, b'{"name":"a","count":1}', b'{"name":"a","count":"1"}', "$.count"),
        (StrictStruct, b'{"name":"a","count":1}', b'{"name":"a","count":1,"x":1}', "field `x`"),
        (Model, b'{"name":"a"}', b'{"count":[]}', "name: Field required; count: Input should be"),
        (StrictModel, b'{"name":"a","count":1}', b'{"name":"a","count":1,"x":1}', "x: Extra"),
        (Refusing, b'{"name":"a"}', b'{"name":"bad"}', "no name of ours"),
        (Refusing, b'{"name":"a"}', b'{"name":"worse"}', "cannot be decoded as Refusing: "),
        (Refusing, b'{"name":"a"}', b'{"name":"worst"}', "one line"),
        (RefusingModel, b'{"name":"a"}', b'{"name":"bad"}', "no name of ours"),
        (Rich, None, b'{"when":"yesterday"}', "RFC3339"),
        (list, None, b"no-uuid,b", "no valid UUID: invalid UUID length: 7"),
        (Gram, None, b"\x0a\x99", "Gram"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
@pytest.mark.parametrize("before", [0, 5])
def test_a_bad_message_is_one_error_in_one_line_that_names_its_class(
    message_type, good, bad, text, before
):
    form = next(form for form in FRAMINGS if _has_form(message_type, form))
    payloads = [*([good] * before if good else []), bad, *([good] if good else [])]
    envelopes, error = read(message_type, form, payloads)
    assert len(envelopes) == len(payloads) - (2 if good else 1)
    assert type(error) is DecodeError
    assert error.journal == "a/journal"
    assert error.offset == 1000 + (before * (len(good) + 1) if good else 0)
    assert text in str(error)
    assert form == "csv" or message_type.__qualname__ in str(error)
    assert "\n" not in str(error)


def test_what_a_class_raises_when_memory_is_short_is_no_bad_message():
    @dataclass
    class Huge(JsonMessage):
        name: str

        def __post_init__(self) -> None:
            raise MemoryError

    with pytest.raises(MemoryError):
        read(Huge, "json", [b'{"name":"a"}'])


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


class Rooted(pydantic.RootModel[dict[str, int]]):
    pass


class Pair(NamedTuple):
    name: str


class ArrayLike(msgspec.Struct, array_like=True):
    name: str


@dataclass
class NoBase:
    name: str


@dataclass
class NumberOwn(JsonMessage):
    UUID: int


class Rewritten(pydantic.BaseModel):
    name: str

    @pydantic.model_serializer
    def serialize(self) -> list[str]:
        return [self.name]


@pytest.mark.parametrize(
    ("message_type", "remedy"),
    [
        (Rooted, "use a model with fields"),
        (Pair, "use a dataclass on JsonMessage"),
        (ArrayLike, "leave array_like off"),
        (NoBase, "derive the dataclass from JsonMessage"),
        (NumberOwn, "declare it as str"),
        (int, "use a dataclass on JsonMessage"),
        (Box[int], "derive a class from it, or use Box"),
        (dict[str, int], "or use dict"),
    ],
    ids=str,
)
@pytest.mark.parametrize("form", FRAMINGS)
def test_a_class_that_can_carry_no_uuid_is_refused_with_the_remedy(message_type, form, remedy):
    with pytest.raises(ValidationError, match=remedy) as caught:
        kind_of(message_type, form)
    assert "\n" not in str(caught.value)


def test_a_model_whose_serializer_makes_no_object_is_refused():
    with pytest.raises(ValidationError, match=r"Rewritten cannot be encoded .* no object"):
        kind_of(Rewritten, "json").encode(Rewritten(name="a"), stamp())


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
