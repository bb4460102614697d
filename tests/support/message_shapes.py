"""Messages of every shape of class, of all kinds, and how they are read from what was written."""

from __future__ import annotations

import datetime as dt
import enum
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, ClassVar, Generic, Literal, TypeVar

import msgspec
import pydantic
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from gazette_sdk.errors import ValidationError
from gazette_sdk.framing import Csv, FixedProtobuf, Framing, JsonLines
from gazette_sdk.message.batch_reader import JournalDecoder
from gazette_sdk.message.kinds import kind_of
from gazette_sdk.message.kinds.base import JsonMessage
from gazette_sdk.message.kinds.others import CsvRecord
from gazette_sdk.message.uuid import CONTINUE_TXN, Envelope, Stamp
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
