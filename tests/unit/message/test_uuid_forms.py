"""Readers of all classes, and columns, find the same UUID in the same bytes, as others write it."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow as pa
import pydantic
import pytest

from gazette_sdk import JsonMessage, Reader
from gazette_sdk.errors import DecodeError
from gazette_sdk.message.uuid import parse_raw_uuid
from support.memory_transport import MemoryTransport

NAME = "a/journal"
ONE = uuid.UUID("8e7c5c00-e92a-11f1-8000-4d5c6485c10c")
TWO = uuid.UUID("8e7c5c01-e92a-11f1-8000-4d5c6485c10c")
ZERO = uuid.UUID(int=0)


@dataclass
class Plain(JsonMessage):
    a: int = 0
    k: Any = None


class Record(msgspec.Struct):
    a: int = 0
    k: Any = None


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    a: int = 0
    k: Any = None


class Model(pydantic.BaseModel):
    a: int = 0
    k: Any = None


CLASSES = [dict, Plain, Record, Strict, Model]


def reader(kind: type[Any], line: bytes, count: int) -> Reader[Any]:
    transport = MemoryTransport()
    transport.create(NAME).content += line * count
    return Reader(kind, name=NAME, transport=transport, isolation="uncommitted")


def uuid_of(kind: type[Any], line: bytes, count: int) -> uuid.UUID | None:
    """Return the UUID of all messages; None if there is an error."""
    try:
        found = {(each.uuid, str(each.message)) for each in reader(kind, line, count)}
    except (DecodeError, ValueError):
        return None
    [(one, _)] = found
    return one


def column_of(line: bytes, count: int, *, other: pa.DataType) -> set[str | None]:
    schema = pa.schema([("a", pa.int64()), ("x", other), ("_uuid", pa.string())])
    batches = reader(dict, line, count).arrow(schema)
    return {row["_uuid"] for batch in batches for row in batch.to_pylist()}


FORMS: list[tuple[str, uuid.UUID]] = [
    (f'{{"UUID":"{ONE}","a":1}}', ONE),
    (f'{{"UUID":"{ONE}"}}', ONE),
    (f'{{"UUID":"{str(ONE).upper()}","a":1}}', ONE),
    (f'{{"UUID":"{ONE.hex}","a":1}}', ONE),
    (f'{{"UUID":"{ONE.hex}","k":1}}', ONE),
    (f'{{"UUID":"{ONE.urn}","a":1}}', ONE),
    (f'{{"UUID":"{{{ONE}}}","a":1}}', ONE),
    (f'{{"UUID":"\\u0038{str(ONE)[1:]}","a":1}}', ONE),
    (f'{{"a":1,"UUID":"{ONE.hex}"}}', ONE),
    (f'{{"uuid":"{ONE.hex}","a":1}}', ONE),
    ('{"a":1}', ZERO),
    ('{"UUID":null,"a":1}', ZERO),
    ('{"UUID":"","k":"%s","a":1}' % ("x" * 29), ZERO),
    ('{"UUID":"","%s":"y"}' % ("x" * 33), ZERO),
    # The last of several counts.
    (f'{{"UUID":"{ONE}","UUID":"{TWO}","a":1}}', TWO),
    (f'{{"UUID":"{ONE}","a":1,"UUID":"{TWO.hex}"}}', TWO),
    (f'{{"UUID":"{ONE}","a":1,"UUID":null}}', ZERO),
    # Keys and texts of a message are none.
    (f'{{"UUID":"{ONE}","k":{{"UUID":"{TWO}"}}}}', ONE),
    (f'{{"UUID":"{ONE}","k":["UUID","UU"],"a":1}}', ONE),
]


@pytest.mark.parametrize("count", [1, 10])
@pytest.mark.parametrize(("line", "wanted"), FORMS)
def test_a_uuid_is_the_same_for_all_classes_and_columns(line: str, wanted: uuid.UUID, count: int):
    content = line.encode() + b"\n"
    found = {kind.__name__: uuid_of(kind, content, count) for kind in CLASSES}
    if "x" * 33 in line:
        del found["Strict"]  # which refuses the key
    assert found == dict.fromkeys(found, wanted)
    columns = [column_of(content, count, other=each) for each in (pa.int64(), pa.date32())]
    assert columns == [{str(wanted) if wanted != ZERO else None}] * 2


@pytest.mark.parametrize("count", [1, 10])
@pytest.mark.parametrize(
    "text", ["garbage", "x" * 36, str(ONE)[:-1], f"{ONE}0", '\\"' * 18, "ä" * 18, "\\\\" * 18]
)
def test_a_text_that_is_no_uuid_is_refused_alike(text: str, count: int):
    content = f'{{"UUID":"{text}","a":1}}\n'.encode()
    for kind in CLASSES:
        assert uuid_of(kind, content, count) is None, kind
        transport = MemoryTransport()
        transport.create(NAME).content += content * count
        with pytest.raises(DecodeError, match="offset 0 has no valid UUID"):
            list(Reader(kind, name=NAME, transport=transport))
    transport = MemoryTransport()
    transport.create(NAME).content += content * count
    with pytest.raises(DecodeError, match="offset 0 has no valid UUID"):
        list(Reader(dict, name=NAME, transport=transport).arrow([("a", pa.int64())]))


@pytest.mark.parametrize(
    "text",
    [
        "e8c1a2b4-4d5e-11ee-8012-0242ac120002",
        "E8C1A2B4-4D5E-11EE-8012-0242AC120002",
        "e8c1a2b-44d5e-11ee-8012-0242ac120002",
        "e8c1a2b4-4d5e-11ee-8012-0242ac12-002",
        "e8c1a2b4-4d5e-11ee-8012-0242ac12000g",
        "e8c1a2b4-4d5e-11ee-8012-0242ac12 002",
        "e8c1a2b4-4d5e-11ee-8012-0242ac12_002",
        "+8c1a2b4-4d5e-11ee-8012-0242ac120002",
        '{"x":"e8c1a2b44d5e11ee80120242ac12"}',
    ],
)
def test_text_as_bytes_is_read_as_text(text):
    def outcome(raw):
        try:
            return parse_raw_uuid(raw)
        except ValueError as error:
            return str(error)

    assert outcome(text.encode()) == outcome(text)
