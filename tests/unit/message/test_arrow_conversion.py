"""Columns have the types of the schema, whatever a parser makes of the text."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from gazette_sdk import Reader
from gazette_sdk.errors import DecodeError
from gazette_sdk.framing import Csv
from gazette_sdk.message.flags import ACK_TXN, CONTINUE_TXN
from gazette_sdk.message.uuid import build_uuid
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
