"""A class of messages is the schema of its columns, which hold what its publishers wrote."""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import uuid
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypedDict

import msgspec
import pyarrow as pa
import pydantic
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from gazette_sdk import JsonMessage, Publisher, Reader, mapping
from gazette_sdk.errors import ConfigurationError, DecodeError
from gazette_sdk.framing import FixedProtobuf, JsonLines
from gazette_sdk.message.columns.schema import DECIMAL, schema_of
from gazette_sdk.message.kinds import CsvRecord
from support.memory_transport import MemoryTransport
from support.protobuf_messages import Gram

TIME = dt.datetime(2026, 2, 3, 4, 5, 6, 789012, tzinfo=dt.UTC)
UTC_US = pa.timestamp("us", tz="UTC")


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1


class Extra(TypedDict):
    note: str


@dataclass
class Line:
    sku: str
    count: int
    price: decimal.Decimal | None = None


@dataclass
class Order(JsonMessage):
    customer: str
    cents: int
    weight: float
    paid: bool
    at: dt.datetime
    day: dt.date
    hour: dt.time
    took: dt.timedelta
    price: decimal.Decimal
    image: bytes
    color: Color
    level: Level
    size: Literal["s", "m"]
    reference: uuid.UUID
    lines: list[Line]
    tags: tuple[str, ...]
    pair: tuple[int, int]
    counts: dict[str, int]
    times: dict[int, dt.datetime]
    extra: Extra
    number: int | float = 0
    note: str | None = None
    best: Line | None = None
    more: list[list[int | None]] = field(default_factory=list)
    images: list[bytes] = field(default_factory=list)


ORDER = Order(
    "ada",
    250,
    1.5,
    True,
    TIME,
    TIME.date(),
    dt.time(4, 5, 6, 7),
    dt.timedelta(days=1, microseconds=5),
    decimal.Decimal("12.345"),
    b"\x00\xff",
    Color.BLUE,
    Level.LOW,
    "m",
    uuid.UUID(int=7),
    [Line("a", 1, decimal.Decimal("2.50")), Line("b", 2)],
    ("x", "y"),
    (1, 2),
    {"a": 1},
    {3: TIME},
    {"note": "n"},
    0.5,
    "text",
    Line("c", 3),
    [[1, None], []],
    [b"\xfe", b""],
)
LINE = pa.struct([("sku", pa.string()), ("count", pa.int64()), ("price", DECIMAL)])
ORDER_SCHEMA = pa.schema(
    [
        ("customer", pa.string()),
        ("cents", pa.int64()),
        ("weight", pa.float64()),
        ("paid", pa.bool_()),
        ("at", UTC_US),
        ("day", pa.date32()),
        ("hour", pa.time64("us")),
        ("took", pa.duration("us")),
        ("price", DECIMAL),
        ("image", pa.binary()),
        ("color", pa.string()),
        ("level", pa.int64()),
        ("size", pa.string()),
        ("reference", pa.string()),
        ("lines", pa.list_(LINE)),
        ("tags", pa.list_(pa.string())),
        ("pair", pa.list_(pa.int64())),
        ("counts", pa.map_(pa.string(), pa.int64())),
        ("times", pa.map_(pa.int64(), UTC_US)),
        ("extra", pa.struct([("note", pa.string())])),
        ("number", pa.float64()),
        ("note", pa.string()),
        ("best", LINE),
        ("more", pa.list_(pa.list_(pa.int64()))),
        ("images", pa.list_(pa.binary())),
    ]
)
ORDER_ROW = {
    "customer": "ada",
    "cents": 250,
    "weight": 1.5,
    "paid": True,
    "at": TIME,
    "day": TIME.date(),
    "hour": dt.time(4, 5, 6, 7),
    "took": dt.timedelta(days=1, microseconds=5),
    "price": decimal.Decimal("12.345"),
    "image": b"\x00\xff",
    "color": "blue",
    "level": 1,
    "size": "m",
    "reference": str(uuid.UUID(int=7)),
    "lines": [
        {"sku": "a", "count": 1, "price": decimal.Decimal("2.50")},
        {"sku": "b", "count": 2, "price": None},
    ],
    "tags": ["x", "y"],
    "pair": [1, 2],
    "counts": [("a", 1)],
    "times": [(3, TIME)],
    "extra": {"note": "n"},
    "number": 0.5,
    "note": "text",
    "best": {"sku": "c", "count": 3, "price": None},
    "more": [[1, None], []],
    "images": [b"\xfe", b""],
}


def written(messages: list[Any]) -> MemoryTransport:
    """Return a transport to the journal of messages, as a publisher writes them."""
    transport = MemoryTransport()
    is_json = not hasattr(messages[0], "DESCRIPTOR")
    framing = JsonLines if is_json else FixedProtobuf
    transport.create("a/journal", content_type=framing.content_type)
    with Publisher(
        mapping=mapping.direct("a/journal"), transport=transport, validate=False
    ) as publisher:
        for message in messages:
            publisher.publish(message)
    return transport


def columns_of(messages: list[Any]) -> pa.Table:
    reader = Reader(type(messages[0]), name="a/journal", transport=written(messages))
    return pa.table(reader.arrow())


def test_each_type_of_a_field_of_a_dataclass_has_its_arrow_type_and_value():
    table = columns_of([ORDER, ORDER])
    assert table.schema == ORDER_SCHEMA
    assert table.to_pylist() == [ORDER_ROW, ORDER_ROW]


@dataclass
class Plain(JsonMessage, uuid_field="id"):
    id: str
    name: str
    cents: int
    at: dt.datetime
    price: decimal.Decimal
    lines: list[Line]


def test_fields_that_arrow_parses_itself_are_the_same_and_the_uuid_is_left_out():
    price = decimal.Decimal("-0.000000000000000001")
    table = columns_of([Plain("", "a", 1, TIME, price, [Line("s", 2)])])
    assert table.column_names == ["name", "cents", "at", "price", "lines"]
    assert table.to_pylist() == [
        {
            "name": "a",
            "cents": 1,
            "at": TIME,
            "price": price,
            "lines": [{"sku": "s", "count": 2, "price": None}],
        }
    ]


class Part(pydantic.BaseModel):
    name: str = pydantic.Field(serialization_alias="partName")
    hidden: int = pydantic.Field(default=0, exclude=True)


class Model(pydantic.BaseModel):
    at: pydantic.AwareDatetime
    day: pydantic.PastDate | None
    price: Annotated[decimal.Decimal, pydantic.Field(max_digits=9, decimal_places=2)]
    total: decimal.Decimal
    count: pydantic.PositiveInt = pydantic.Field(alias="theCount")
    parts: list[Part]
    sizes: set[int]
    took: dt.timedelta
    by_name: dict[str, Part]
    color: Color
    image: bytes


@pytest.mark.parametrize("form", ["utf8", "base64"])
def test_a_pydantic_model_has_its_aliases_its_digits_and_its_form_of_bytes(form):
    made = pydantic.create_model("Made", __base__=Model)
    made.model_config["ser_json_bytes"] = form
    made.model_config["val_json_bytes"] = form
    made.model_rebuild(force=True)
    image = b"text" if form == "utf8" else b"\xfb\xff"
    message = made(
        at=TIME,
        day=dt.date(2020, 1, 2),
        price="12.34",
        total="0.125",
        theCount=3,
        parts=[Part(name="p")],
        sizes={5},
        took=dt.timedelta(hours=1),
        by_name={"q": Part(name="r")},
        color="red",
        image=image,
    )
    table = columns_of([message])
    part = pa.struct([("partName", pa.string())])
    assert table.schema == pa.schema(
        [
            ("at", UTC_US),
            ("day", pa.date32()),
            ("price", pa.decimal128(9, 2)),
            ("total", DECIMAL),
            ("theCount", pa.int64()),
            ("parts", pa.list_(part)),
            ("sizes", pa.list_(pa.int64())),
            ("took", pa.duration("us")),
            ("by_name", pa.map_(pa.string(), part)),
            ("color", pa.string()),
            ("image", pa.binary()),
        ]
    )
    assert table.to_pylist() == [
        {
            "at": TIME,
            "day": dt.date(2020, 1, 2),
            "price": decimal.Decimal("12.34"),
            "total": decimal.Decimal("0.125"),
            "theCount": 3,
            "parts": [{"partName": "p"}],
            "sizes": [5],
            "took": dt.timedelta(hours=1),
            "by_name": [("q", {"partName": "r"})],
            "color": "red",
            "image": image,
        }
    ]


class Renamed(msgspec.Struct, rename="camel"):
    unit_price: float
    images: list[bytes] = []


def test_a_struct_has_the_names_that_are_written():
    table = columns_of([Renamed(1.5, [b"\xff"])])
    assert table.to_pylist() == [{"unitPrice": 1.5, "images": [b"\xff"]}]


def test_a_bulk_of_typed_messages_equals_its_messages():
    messages = [Plain("", f"n{n}", n, TIME, decimal.Decimal(n), []) for n in range(1000)]
    rows = columns_of(messages).to_pylist()
    assert [(row["name"], row["cents"], row["price"]) for row in rows] == [
        (each.name, each.cents, each.price) for each in messages
    ]


def _order_class() -> type:
    """Return a generated class with a field of each kind."""
    file = descriptor_pb2.FileDescriptorProto(
        name="tests/all.proto", package="all", syntax="proto3"
    )
    color = file.enum_type.add(name="Color")
    color.value.add(name="RED", number=0)
    color.value.add(name="BLUE", number=1)
    made = file.message_type.add(name="All")
    part = made.nested_type.add(name="Part")
    entry = made.nested_type.add(name="CountsEntry")
    entry.options.map_entry = True
    kinds = descriptor_pb2.FieldDescriptorProto
    plain, many = kinds.LABEL_OPTIONAL, kinds.LABEL_REPEATED

    def add(to, name, kind, label=plain, type_name=None):
        to.field.add(
            name=name, number=len(to.field) + 1, type=kind, label=label, type_name=type_name
        )

    add(part, "name", kinds.TYPE_STRING)
    add(entry, "key", kinds.TYPE_STRING)
    add(entry, "value", kinds.TYPE_SINT32)
    add(made, "uuid", kinds.TYPE_BYTES)
    add(made, "image", kinds.TYPE_BYTES)
    add(made, "weight", kinds.TYPE_FLOAT)
    add(made, "size", kinds.TYPE_FIXED64)
    add(made, "color", kinds.TYPE_ENUM, type_name=".all.Color")
    add(made, "parts", kinds.TYPE_MESSAGE, many, ".all.All.Part")
    add(made, "counts", kinds.TYPE_MESSAGE, many, ".all.All.CountsEntry")
    add(made, "flags", kinds.TYPE_BOOL, many)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("all.All"))


def test_a_generated_protobuf_class_has_the_types_of_its_fields_but_its_uuid():
    made = _order_class()
    message = made(image=b"\xff", weight=0.5, size=2**63, color=1, flags=[True])
    message.parts.add(name="p")
    message.counts["a"] = -1
    table = columns_of([message])
    assert table.schema == pa.schema(
        [
            ("image", pa.binary()),
            ("weight", pa.float32()),
            ("size", pa.uint64()),
            ("color", pa.string()),
            ("parts", pa.list_(pa.struct([("name", pa.string())]))),
            ("counts", pa.map_(pa.string(), pa.int32())),
            ("flags", pa.list_(pa.bool_())),
        ]
    )
    assert table.to_pylist() == [
        {
            "image": b"\xff",
            "weight": 0.5,
            "size": 2**63,
            "color": "BLUE",
            "parts": [{"name": "p"}],
            "counts": [("a", -1)],
            "flags": [True],
        }
    ]
    assert schema_of(Gram).names == ["text", "count"]


# ------------------------------------------------------------------- refused


class Tree(msgspec.Struct):
    name: str
    children: list[Tree] = []


@dataclass
class Forest(JsonMessage):
    trees: list[Tree]


@dataclass
class Anything(JsonMessage):
    what: Any


@dataclass
class Either(JsonMessage):
    good: int
    what: int | str | None


@dataclass
class Pair(JsonMessage):
    pair: tuple[int, str]


class Link(pydantic.BaseModel):
    url: pydantic.HttpUrl


@dataclass
class Inner:
    deep: Any


@dataclass
class Outer(JsonMessage):
    inner: list[Inner]


class Metadata(msgspec.Struct):
    _offset: int


@dataclass
class Bare(JsonMessage):
    UUID: str


class Grade(enum.Enum):
    BEST = "a"
    NEXT = 2


class Mixed(pydantic.BaseModel):
    grade: Grade


@pytest.mark.parametrize(
    ("message_type", "text"),
    [
        (dict, "dict names no fields: give arrow.. a pyarrow.Schema"),
        (list, "list names no fields: give arrow.. a pyarrow.Schema"),
        (CsvRecord, "CsvRecord names no fields"),
        (Forest, "field 'trees.children' of Forest is recursive in Tree"),
        (Tree, "field 'children' of Tree is recursive in Tree"),
        (Anything, "field 'what' of Anything is Any, which has no Arrow type: give arrow.. a"),
        (Either, "field 'what' of Either has values of several types .int64, string."),
        (Pair, "field 'pair' of Pair has values of several types"),
        (Link, "field 'url' of Link is HttpUrl"),
        (Outer, "field 'inner.deep' of Outer is Any"),
        (Metadata, "field '_offset' of Metadata has the name of a metadata column: rename it"),
        (Bare, "Bare has no field but its UUID"),
        (Mixed, "field 'grade' of Mixed is of a type .Enums must contain either all str or all"),
    ],
)
def test_a_class_without_a_schema_is_refused_with_its_field_and_the_remedy(message_type, text):
    reader = Reader(message_type, name="a/journal", transport=MemoryTransport())
    with pytest.raises(ConfigurationError, match=text):
        reader.arrow()


def test_a_schema_that_is_given_wins_over_the_class():
    reader = Reader(Either, name="a/journal", transport=written([Either(1, "x")]))
    assert pa.table(reader.arrow([("good", pa.int64())])).to_pylist() == [{"good": 1}]


def test_metadata_columns_are_added_to_the_schema_of_the_class():
    transport = written([Renamed(1.5)])
    schema = Reader(Renamed, name="a/journal", transport=transport).arrow().schema
    wanted = pa.schema([*schema, ("_offset", pa.int64())])
    reader = Reader(Renamed, name="a/journal", transport=transport)
    assert pa.table(reader.arrow(wanted)).to_pylist() == [
        {"unitPrice": 1.5, "images": [], "_offset": 0}
    ]


@pytest.mark.parametrize(
    "kind", [pa.date32(), pa.date64(), pa.timestamp("us", "UTC"), pa.time64("us"), pa.duration("s")]
)
def test_a_number_is_no_time_whose_unit_is_not_known(kind):
    transport = written([{"n": 1}, {"n": 2, "at": 20_000}])
    reader = Reader(dict, name="a/journal", transport=transport)
    with pytest.raises(DecodeError, match="a/journal: the message at offset 54 cannot be decoded"):
        list(reader.arrow([("at", kind)]))


def test_a_value_that_is_no_base64_is_bad_content():
    transport = written([{"unitPrice": 1.0, "images": ["aGk=", "no base64!"]}])
    reader = Reader(Renamed, name="a/journal", transport=transport)
    with pytest.raises(DecodeError, match="does not fit the schema"):
        list(reader.arrow())
