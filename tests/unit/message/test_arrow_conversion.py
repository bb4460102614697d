"""Columns have the types of the schema, whatever a parser makes of the text."""

from __future__ import annotations

import datetime as dt
import json
from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow as pa
import pydantic
import pytest

from gazette_sdk import JsonMessage, Reader
from gazette_sdk.errors import ConfigurationError, DecodeError
from gazette_sdk.framing import Csv
from gazette_sdk.message.uuid import ACK_TXN, CONTINUE_TXN, build_uuid
from support.memory_transport import MemoryTransport
from support.written_messages import TICK, producer_id

NAME = "a/journal"


def reader(content: bytes, message_type: type[Any] = dict, **options: Any) -> Reader[Any]:
    transport = MemoryTransport()
    kind = Csv.content_type if message_type is list else "application/x-ndjson"
    transport.create(NAME, content_type=kind).content += content
    return Reader(message_type, name=NAME, transport=transport, **options)


def rows_of(content: bytes, fields: list[pa.Field], **options: Any) -> list[dict[str, Any]]:
    batches = reader(content, **options).arrow(pa.schema(fields))
    return [row for batch in batches for row in batch.to_pylist()]


def uuid_text(clock: int, flags: int) -> str:
    return str(build_uuid(producer_id(1), clock * TICK, flags))


def transactions(rows: list[str], *, last: bool = False) -> bytes:
    """Transactions of one message each: objects without a UUID as JSON, with it first or last."""
    lines = []
    for at, row in enumerate(rows):
        pending, ack = uuid_text(2 * at + 1, CONTINUE_TXN), uuid_text(2 * at + 2, ACK_TXN)
        if last:
            lines.append(f'{row[:-1]},"UUID":"{pending}"}}\n{{"n":null,"UUID":"{ack}"}}\n')
        else:
            lines.append(f'{{"UUID":"{pending}",{row[1:]}\n{{"UUID":"{ack}"}}\n')
    return "".join(lines).encode()


def required(kind: pa.DataType) -> pa.DataType:
    """A type whose parts are not nullable, either."""
    if pa.types.is_struct(kind):
        return pa.struct(
            [pa.field(each.name, required(each.type), nullable=False) for each in kind]
        )
    if pa.types.is_map(kind):
        return pa.map_(kind.key_type, pa.field("value", kind.item_type, nullable=False))
    if pa.types.is_list(kind):
        return pa.list_(pa.field("item", required(kind.value_type), nullable=False))
    return kind


UTC = pa.timestamp("us", tz="UTC")
BERLIN = pa.timestamp("us", tz="Europe/Berlin")

TIMES: list[tuple[str, pa.DataType, str | None]] = [
    ("2026-01-01T00:00:00Z", UTC, "2026-01-01T00:00:00+00:00"),
    ("2026-01-01t00:00:00z", UTC, "2026-01-01T00:00:00+00:00"),
    ("2026-01-01 00:00:00Z", UTC, "2026-01-01T00:00:00+00:00"),
    *(
        (
            f"2026-01-01T00:00:00.{'9' * n}Z",
            UTC,
            f"2026-01-01T00:00:00.{('9' * n).ljust(6, '0')[:6]}+00:00",
        )
        for n in range(1, 10)
    ),
    ("1960-01-01T00:00:00.0000009Z", UTC, "1960-01-01T00:00:00+00:00"),
    ("2026-01-01T00:00:00.123456789+05:30", UTC, "2025-12-31T18:30:00.123456+00:00"),
    ("2026-01-01T00:00:00-0800", UTC, "2026-01-01T08:00:00+00:00"),
    ("2026-01-01T00:00", UTC, "2026-01-01T00:00:00+00:00"),
    ("2026-01-01", UTC, "2026-01-01T00:00:00+00:00"),
    ("2026-01-01T00:00:00.1234567Z", pa.timestamp("s", tz="UTC"), "2026-01-01T00:00:00+00:00"),
    ("2026-01-01T00:00:00.1239Z", pa.timestamp("ms", tz="UTC"), "2026-01-01T00:00:00.123000+00:00"),
    # Without a zone: of the column's.
    ("2026-01-01T00:00:00", UTC, "2026-01-01T00:00:00+00:00"),
    ("2026-07-01T00:00:00.5", BERLIN, "2026-07-01T00:00:00.500000+02:00"),
    ("2026-07-01T00:00:00Z", BERLIN, "2026-07-01T02:00:00+02:00"),
    ("2026-03-29T02:30:00", BERLIN, "2026-03-29T03:30:00+02:00"),
    ("2026-10-25T02:30:00", BERLIN, "2026-10-25T02:30:00+02:00"),
    ("2026-01-01T00:00:00", pa.timestamp("us"), "2026-01-01T00:00:00"),
    ("2026-01-01T00:00:00.1234567", pa.timestamp("us"), "2026-01-01T00:00:00.123456"),
    ("2026-01-01T00:00:00Z", pa.timestamp("us"), None),
    ("2026-01-01T00:00:00.1234567+01:00", pa.timestamp("us"), None),
    # No times.
    ("2026-01-01T00:00:00.Z", UTC, None),
    ("2026-01-01T24:00:00Z", UTC, None),
    ("2026-02-30T00:00:00Z", UTC, None),
    ("0000-01-01T00:00:00Z", UTC, None),
    ("2026-01-01T00:00:00+24:00", UTC, None),
    ("2263-01-01T00:00:00.1234567891Z", pa.timestamp("ns", tz="UTC"), None),
    ("", UTC, None),
    ("yesterday", UTC, None),
]


@pytest.mark.parametrize(("text", "kind", "wanted"), TIMES)
@pytest.mark.parametrize("form", ["sliced", "parsed", "nested", "map", "csv"])
def test_timestamps_of_all_forms_are_read_alike(form, text, kind, wanted):
    head = f'{{"UUID":"{uuid_text(1, 0)}","n":1,"v":'
    content = f'{head}"{text}"}}\n'.encode()
    field, options = pa.field("v", kind), {}
    if form == "parsed":
        content = f'{{"v":"{text}"}}\n{{"v":null}}\n'.encode()
        options = {"isolation": "uncommitted"}
    elif form == "nested":
        content = f'{head}[{{"x":"{text}"}},null,{{}}]}}\n'.encode()
        field = pa.field("v", pa.list_(pa.struct([("x", kind)])))
    elif form == "map":
        content = f'{head}{{"x":"{text}","y":null}}}}\n'.encode()
        field = pa.field("v", pa.map_(pa.string(), kind))
    elif form == "csv":
        if not text:
            return  # an empty field is null
        content = f"{uuid_text(1, 0)},{text}\n".encode()
        options = {"message_type": list}
    if wanted is None:
        with pytest.raises(DecodeError, match=r"at offset 0 .*does not fit the schema"):
            rows_of(content, [field], **options)
        return
    value: Any = rows_of(content, [field], **options)[0]["v"]
    if form == "nested":
        assert value[1:] == [None, {"x": None}]
        value = value[0]["x"]
    elif form == "map":
        assert value[1] == ("y", None)
        value = value[0][1]
    assert value.isoformat() == wanted


@pytest.mark.parametrize("options", [{}, {"isolation": "uncommitted"}])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.int64(), [1, 2, 3]),
        (pa.string(), ["a", "b\n", ""]),
        (pa.timestamp("us", tz="UTC"), ["2026-01-01T00:00:00Z"] * 3),
        (pa.date32(), ["2026-01-01"] * 3),
        (pa.struct([("x", pa.int64())]), [{"x": 1}, {"x": 2}, {"x": 3}]),
        (pa.struct([("x", pa.list_(pa.date32()))]), [{"x": []}, {"x": ["2026-01-01"]}, {"x": []}]),
        (pa.list_(pa.string()), [["a"], [], ["b", "c"]]),
        (pa.large_list(pa.string()), [["a"], [], ["b", "c"]]),
        (pa.map_(pa.string(), pa.int64()), [{"a": 1}, {}, {"b": 2}]),
    ],
)
def test_a_column_that_is_not_nullable_has_the_rows_of_one_that_is(kind, values, last, options):
    content = transactions([json.dumps({"v": each}) for each in values], last=last)
    nullable = rows_of(content, [pa.field("v", kind)], **options)
    assert len([row for row in nullable if row["v"] is not None]) == 3
    schema = pa.schema([pa.field("v", required(kind), nullable=False)])
    table = pa.table(reader(content, **options).arrow(schema))
    assert table.schema == schema
    assert table.to_pylist() == nullable


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        (pa.int64(), "{}"),
        (pa.int64(), '{"v":null}'),
        (pa.int64(), '{"more":1}'),
        (pa.string(), '{"v":null,"more":"\\n"}'),
        (pa.date32(), '{"v":null}'),
        (pa.struct([("x", pa.int64())]), '{"v":{}}'),
        (pa.struct([("x", pa.struct([("y", pa.int64())]))]), '{"v":{"x":{"y":null}}}'),
        (pa.list_(pa.string()), '{"v":["a",null]}'),
        (pa.map_(pa.string(), pa.int64()), '{"v":{"a":1,"b":null}}'),
    ],
)
@pytest.mark.parametrize("before", [0, 5])
def test_a_message_that_lacks_a_value_is_bad_content(kind, bad, before):
    good = {"x": {"y": 1}} if "y" in bad else {"x": 1} if pa.types.is_struct(kind) else None
    texts = {"int64": 1, "string": "a", "date32[day]": "2026-01-01"}
    if good is None:
        good = texts.get(str(kind), [] if pa.types.is_list(kind) else {})
    line = json.dumps({"UUID": uuid_text(1, 0), "v": good}, separators=(",", ":")).encode() + b"\n"
    lines = [
        line.replace(uuid_text(1, 0).encode(), uuid_text(at, 0).encode()) for at in range(1, 8)
    ]
    head = f'{{"UUID":"{uuid_text(6, 0)}"' + (bad[1:] if bad == "{}" else "," + bad[1:]) + "\n"
    content = b"".join(lines[:before]) + head.encode() + lines[6]
    fields = [pa.field("v", required(kind), nullable=False)]
    with pytest.raises(
        DecodeError, match="'v' is not nullable, and the message lacks it"
    ) as caught:
        rows_of(content, fields)
    assert caught.value.offset == sum(map(len, lines[:before]))
    assert len(rows_of(content, fields, on_error="skip")) == before + 1


def test_a_csv_record_without_a_value_is_bad_content_and_an_acknowledgement_is_none():
    lines = [
        f"{uuid_text(1, CONTINUE_TXN)},a,1",
        f"{uuid_text(2, ACK_TXN)},,",
        f"{uuid_text(3, 0)},b,",
        f"{uuid_text(4, 0)},c,3",
    ]
    content = "\n".join(lines).encode() + b"\n"
    fields = [pa.field("s", pa.string(), nullable=False), pa.field("n", pa.int64(), nullable=False)]
    with pytest.raises(DecodeError, match="'n' is not nullable") as caught:
        rows_of(content, fields, message_type=list)
    assert caught.value.offset == content.index(lines[2].encode())
    rows = rows_of(content, fields, message_type=list, on_error="skip")
    assert rows == [{"s": "a", "n": 1}, {"s": "c", "n": 3}]


def test_a_time_zone_that_is_not_known_is_refused():
    schema = [("all", pa.list_(pa.timestamp("s", "Mars/Olympus")))]
    with pytest.raises(ConfigurationError, match="'all' has the time zone 'Mars/Olympus'"):
        reader(b"").arrow(schema)


@dataclass
class Twice(JsonMessage):
    a: int | None = None
    s: dict[str, int] | None = None
    all: list[dict[str, int]] | None = None
    day: dt.date | None = None


class TwiceStruct(msgspec.Struct):
    a: int | None = None
    s: dict[str, int] | None = None
    all: list[dict[str, int]] | None = None
    day: dt.date | None = None


class TwiceModel(pydantic.BaseModel):
    a: int | None = None
    s: dict[str, int] | None = None
    all: list[dict[str, int]] | None = None
    day: dt.date | None = None


@pytest.mark.parametrize("places", [True, False])
@pytest.mark.parametrize("kind", [pa.map_(pa.string(), pa.int64()), pa.struct([("x", pa.int64())])])
@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ('"a":1,"a":2', {"a": 2}),
        ('"a":1,"a":null', {}),
        ('"a":null,"a":3', {"a": 3}),
        ('"a":1,"\\u0061":2', {"a": 2}),
        ('"s":{"x":1},"a":1,"s":{"x":2}', {"a": 1, "s": {"x": 2}}),
        ('"s":{"x":1,"x":2}', {"s": {"x": 2}}),
        ('"all":[{"x":1,"x":2},{"x":3}]', {"all": [{"x": 2}, {"x": 3}]}),
        ('"more":1,"more":2,"a":1', {"a": 1}),
    ],
)
def test_of_a_key_twice_the_last_value_counts(line, wanted, kind, places):
    head = f'"UUID":"{uuid_text(1, 0)}",' if places else ""
    good = f'{{{head}"a":7}}\n'
    content = f"{good}{{{head}{line}}}\n{good}".encode()
    found = []
    for message_type in (Twice, TwiceStruct, TwiceModel):
        options = {"message_type": message_type, "isolation": "uncommitted"}
        [_, envelope, _] = reader(content, **options)
        found.append({key: getattr(envelope.message, key) for key in ("a", "s", "all")})
    assert found == [{"a": None, "s": None, "all": None} | wanted] * 3
    [_, envelope, _] = reader(content, isolation="uncommitted")
    assert {key: envelope.message.get(key) for key in ("a", "s", "all")} == found[0]

    schema = pa.schema([("a", pa.int64()), ("s", kind), ("all", pa.list_(kind))])
    rows = [
        {name: plain(value) for name, value in row.items()}
        for row in rows_of(content, list(schema), isolation="uncommitted")
    ]
    empty = {"a": 7, "s": None, "all": None}
    assert rows == [empty, found[0], empty]


def plain(value: Any) -> Any:
    """Return a value of a column as that of a message: maps are dicts there."""
    if isinstance(value, list):
        is_map = any(isinstance(each, tuple) for each in value)
        return dict(value) if is_map else [plain(each) for each in value]
    return value


def test_a_line_that_is_bad_is_named_among_others_with_a_key_twice():
    lines = [b'{"a":1,"a":2}\n'] * 5 + [b'{"a":"x","a":"y"}\n'] + [b'{"a":3,"a":4}\n'] * 5
    fields = [pa.field("a", pa.int64())]
    with pytest.raises(DecodeError) as caught:
        rows_of(b"".join(lines), fields, isolation="uncommitted")
    assert caught.value.offset == 5 * len(lines[0])
    rows = rows_of(b"".join(lines), fields, isolation="uncommitted", on_error="skip")
    assert [row["a"] for row in rows] == [2] * 5 + [4] * 5


@pytest.mark.parametrize("line", ['{"n":1}', '{"v":null}', '{"all":[null]}', '{"v":{"in":null}}'])
def test_timestamps_of_a_struct_that_is_null_are_null(line):
    inner = pa.struct([("at", UTC)])
    kind = pa.struct([("at", UTC), ("in", inner)])
    fields = [pa.field("v", kind), pa.field("all", pa.list_(inner))]
    content = f'{line}\n{{"v":{{"at":"2026-01-01T00:00:00Z"}}}}\n'.encode()
    [row, other] = rows_of(content, fields, isolation="uncommitted")
    wanted: Any = {"v": {"at": None, "in": None}} if "in" in line else {}
    assert row == {"v": None, "all": [None] if "all" in line else None} | wanted
    assert other["v"]["at"].isoformat() == "2026-01-01T00:00:00+00:00"


@pytest.mark.parametrize(
    ("kind", "number"), [(pa.float16(), "70000"), (pa.float32(), "1e39"), (pa.float64(), "1e400")]
)
@pytest.mark.parametrize("beside", [pa.string(), pa.dictionary(pa.int32(), pa.string())])
def test_a_number_that_is_too_large_for_its_column_is_bad_content(kind, number, beside):
    content = b'{"n":1,"s":"x"}\n{"n":%b,"s":"x"}\n' % number.encode()
    fields = [pa.field("n", kind), pa.field("s", beside)]
    errors = []
    assert rows_of(content, fields, on_error=errors.append) == [{"n": 1.0, "s": "x"}]
    [error] = errors
    assert isinstance(error, DecodeError)
    assert error.offset == 16
