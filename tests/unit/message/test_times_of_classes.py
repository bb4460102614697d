"""Classes truncate times to microseconds, as columns and pydantic do."""

from __future__ import annotations

import datetime as dt
import decimal
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pyarrow as pa
import pydantic
import pytest

from gazette_sdk import JsonMessage, Reader
from support.memory_transport import MemoryTransport

NAME = "a/journal"


@dataclass
class Within:
    at: dt.datetime
    more: list[Within] = field(default_factory=list)


@dataclass
class Plain(JsonMessage):
    at: dt.datetime
    text: str = ""
    any: Any = None
    hour: dt.time | None = None
    price: decimal.Decimal | None = None
    within: Within | None = None
    by_name: dict[str, list[dt.datetime]] = field(default_factory=dict)
    pair: tuple[str, dt.datetime] | None = None


class Renamed(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    was_at: dt.datetime | None = None


class Model(pydantic.BaseModel):
    at: dt.datetime


def messages(kind: type[Any], *lines: bytes) -> list[Any]:
    transport = MemoryTransport()
    transport.create(NAME).content += b"".join(line + b"\n" for line in lines)
    options: dict[str, Any] = {"name": NAME, "transport": transport, "isolation": "uncommitted"}
    return [each.message for each in Reader(kind, **options)]


LONG = "2026-01-01T23:59:59.9999999Z"
CUT = dt.datetime(2026, 1, 1, 23, 59, 59, 999999, dt.UTC)


@pytest.mark.parametrize("count", [1, 10])
def test_times_of_any_place_are_truncated_and_no_text_is(count: int):
    line = (
        b'{"at":"%s","text":"%s","any":{"at":"%s"},"hour":"01:02:03.1234567","price":1.10,'
        b'"within":{"at":"%s","more":[{"at":"%s"}]},"by_name":{"a":["%s"]},"pair":["%s","%s"]}'
    ) % ((LONG.encode(),) * 8)
    found = messages(Plain, *[line] * count)
    assert (
        found
        == [
            Plain(
                CUT,
                LONG,
                {"at": LONG},
                dt.time(1, 2, 3, 123456),
                decimal.Decimal("1.10"),
                Within(CUT, [Within(CUT)]),
                {"a": [CUT]},
                (LONG, CUT),
            )
        ]
        * count
    )


@pytest.mark.parametrize("count", [1, 10])
def test_strict_classes_and_aliases_truncate_too(count: int):
    line = b'{"UUID":"8e7c5c00-e92a-11f1-8000-4d5c6485c10c","wasAt":"%s"}' % LONG.encode()
    assert messages(Renamed, *[line] * count) == [Renamed(CUT)] * count


@pytest.mark.parametrize("digits", range(10))
def test_classes_and_columns_have_the_same_times(digits: int):
    fraction = f".{'987654321'[:digits]}" if digits else ""
    texts = [f"2026-01-01{t}00:00:00{fraction}{z}" for t in "Tt" for z in ("Z", "z", "-05:30")]
    lines = [b'{"at":"%s"}' % text.encode() for text in texts]
    plain = [each.at for each in messages(Plain, *lines)]
    assert plain == [each.at for each in messages(Model, *lines)]
    transport = MemoryTransport()
    transport.create(NAME).content += b"".join(line + b"\n" for line in lines)
    reader = Reader(Model, name=NAME, transport=transport, isolation="uncommitted")
    assert pa.table(reader.arrow()).column("at").to_pylist() == plain


def test_columns_of_hours_are_truncated():
    lines = [b'{"hour":"01:02:03.9999999"}', b'{"hour":null}', b'{"text":"01:02:03.9999999"}']
    transport = MemoryTransport()
    transport.create(NAME).content += b"".join(line + b"\n" for line in lines)
    reader = Reader(dict, name=NAME, transport=transport, isolation="uncommitted")
    table = pa.table(reader.arrow([("hour", pa.time64("us")), ("text", pa.string())]))
    assert table.column("hour").to_pylist() == [dt.time(1, 2, 3, 999999), None, None]
    assert table.column("text").to_pylist() == [None, None, "01:02:03.9999999"]
