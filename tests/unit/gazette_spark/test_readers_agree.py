"""Readers of all classes, columns and Spark make the same of the same bytes, or refuse them."""

from __future__ import annotations

import datetime as dt
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pydantic
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyspark.sql.pandas.types import from_arrow_schema

from gazette_sdk import JsonMessage, Reader
from gazette_sdk.message.columns.schema import schema_of
from gazette_spark import options
from support.fragment_files import fragment_of, store_fragment
from support.memory_transport import MemoryTransport
from support.spark_stores import batch_rows

NAME = "a/part"


@dataclass
class Inner:
    x: int | None = None
    at: dt.datetime | None = None


class InnerModel(pydantic.BaseModel, strict=True):
    x: int | None = None
    at: dt.datetime | None = None


@dataclass
class Plain(JsonMessage):
    i: int | None = None
    f: float | None = None
    b: bool | None = None
    s: str | None = None
    at: dt.datetime | None = None
    day: dt.date | None = None
    hour: dt.time | None = None
    all: list[int] | None = None
    by: dict[str, int] | None = None
    inner: Inner | None = None
    many: list[Inner] | None = None


class Record(msgspec.Struct):
    i: int | None = None
    f: float | None = None
    b: bool | None = None
    s: str | None = None
    at: dt.datetime | None = None
    day: dt.date | None = None
    hour: dt.time | None = None
    all: list[int] | None = None
    by: dict[str, int] | None = None
    inner: Inner | None = None
    many: list[Inner] | None = None


class Model(pydantic.BaseModel, strict=True):
    i: int | None = None
    f: float | None = None
    b: bool | None = None
    s: str | None = None
    at: dt.datetime | None = None
    day: dt.date | None = None
    hour: dt.time | None = None
    all: list[int] | None = None
    by: dict[str, int] | None = None
    inner: InnerModel | None = None
    many: list[InnerModel] | None = None


SCHEMA = schema_of(Plain)
IN_SPARK = [name for name in SCHEMA.names if name not in {"hour", "s"}]
"""Spark has no type for hours, and takes any value as a string."""

# ------------------------------------------------------------- texts of other writers

NUMBERS = st.integers(-(1 << 63), (1 << 63) - 1).map(str)
FLOATS = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.sampled_from(["0", "-0.0", "1E5", "1e-7", "123456789012345678", "0.1e+2"]),
)
CHARACTERS = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=8
) | st.sampled_from(['UU"ID', "2026-01-01T00:00:00.9999999Z", "a\nb", '{"UUID":"x"}', "\U0001f600"])
TEXTS = st.builds(
    lambda text, escapes: json.dumps(text, ensure_ascii=escapes), CHARACTERS, st.booleans()
)
DAYS = st.dates(dt.date(1, 1, 2), dt.date(9999, 12, 30)).map(str)
FRACTIONS = st.text("0123456789", max_size=9).map(lambda digits: f".{digits}" if digits else "")
CLOCKS = st.builds(
    "{:%H:%M:%S}{}".format, st.times().map(lambda time: time.replace(microsecond=0)), FRACTIONS
)
ZONES = st.sampled_from(["", "Z", "z", "+00:00", "-00:00", "+05:30", "-11:00"])
TIMES = st.builds('"{}{}{}{}"'.format, DAYS, st.sampled_from("Tt "), CLOCKS, ZONES)
SPACES = st.sampled_from(["", " ", "\t"])


def joined(parts: list[tuple[str, str]], space: str) -> str:
    return "{" + ",".join(f'{space}"{key}"{space}:{value}' for key, value in parts) + space + "}"


def objects(*members: st.SearchStrategy[tuple[str, str]], max_size: int) -> st.SearchStrategy[str]:
    """Objects of some of the members, in any order, also with one twice."""
    return st.builds(joined, st.lists(st.one_of(*members), max_size=max_size), SPACES)


def arrays(items: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.lists(items, max_size=3).map(lambda found: "[" + ",".join(found) + "]")


def member(key: str, *values: st.SearchStrategy[str]) -> st.SearchStrategy[tuple[str, str]]:
    return st.tuples(st.just(key), st.one_of(*values))


NULL = st.just("null")
INNERS = objects(member("x", NUMBERS, NULL), member("at", TIMES, NULL), max_size=3)
COUNTS = st.dictionaries(CHARACTERS, st.integers(-5, 5), max_size=3).map(json.dumps)
ANY = st.one_of(NUMBERS, TEXTS, NULL, INNERS, arrays(TEXTS))

GOOD = [
    member("i", NUMBERS, NULL),
    member("f", FLOATS, NULL),
    member("b", st.sampled_from(["true", "false", "null"])),
    member("s", TEXTS, NULL),
    member("at", TIMES, NULL),
    member("day", DAYS.map('"{}"'.format), NULL),
    member("hour", CLOCKS.map('"{}"'.format), NULL),
    member("all", arrays(NUMBERS), NULL),
    member("by", COUNTS, NULL),
    member("inner", INNERS, NULL),
    member("many", arrays(INNERS), NULL),
    member("more", ANY),
]
# Not NaN, which is no JSON, but which pydantic reads.
BAD = [
    member("i", st.sampled_from(['"1"', "true", "[1]", "{}", "01", "+1", "1.5"])),
    member("f", st.sampled_from(['"NaN"', "true", ".5", "1.", "1e"])),
    member("b", st.sampled_from(["1", '"true"', "TRUE", "[]"])),
    member("s", st.sampled_from(["1", "true", "[]", "{}", '"\\x"', '"a', '"\t"'])),
    member("at", st.sampled_from(["1767225600", '"now"', '""', '"2026-02-30T00:00:00Z"', "[]"])),
    member("at", st.sampled_from(['"2026-01-01T24:00:00Z"', '"2026-01-01T00:00:00.Z"', "1.5"])),
    member("day", st.sampled_from(["20000", '"2026-02-30"', '"today"', '""', "true"])),
    member("hour", st.sampled_from(["3600", '"25:00:00"', '"noon"'])),
    member("all", st.sampled_from(["1", '["1"]', "[1,]", '{"a":1}'])),
    member("by", st.sampled_from(["1", '{"a":"b"}', "[1]", '{"a":1,}'])),
    member("inner", st.sampled_from(["1", '{"x":"y"}', '{"at":5}', "[]"])),
    member("many", st.sampled_from(['[{"x":"y"}]', "[1]", '{"x":1}'])),
]
UUIDS = [f"{n:08x}-e92a-11f1-8000-4d5c6485c10c" for n in range(1, 5)]
HABITS = ["{}", "{}", "urn:uuid:{}", "{{{}}}"]


@st.composite
def lines(draw: st.DrawFn) -> bytes:
    """Return a line with its UUID at any place, in any form, once or twice, or without one."""
    members = draw(st.lists(st.one_of(*GOOD), max_size=6))
    if draw(st.integers(0, 3)) == 0:
        bad = draw(st.one_of(*BAD))
        # Of a key twice, parsers look at the first value as well, or do not.
        members = [each for each in members if each[0] != bad[0]]
        members.insert(draw(st.integers(0, len(members))), bad)
    for _ in range(draw(st.sampled_from([0, 1, 1, 1, 2]))):
        text = draw(st.sampled_from(HABITS)).format(draw(st.sampled_from(UUIDS)))
        text = text.replace("-", "") if draw(st.integers(0, 4)) == 0 and len(text) == 36 else text
        place = draw(st.sampled_from([0, 0, 0, len(members)]))
        members.insert(place, ("UUID", json.dumps(text)))
    return joined(members, draw(st.sampled_from(["", "", "", " "]))).encode() + b"\n"


# ------------------------------------------------------------------------ comparison


def plain(value: Any) -> Any:
    """Return a value of any reader in one form; structs without nulls, maps as dicts."""
    if isinstance(value, dt.datetime):
        return (value if value.tzinfo else value.replace(tzinfo=dt.UTC)).astimezone(dt.UTC)
    if isinstance(value, Inner | InnerModel):
        value = {"x": value.x, "at": value.at}
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list):
        pairs = bool(value) and isinstance(value[0], tuple)
        return plain(dict(value)) if pairs else [plain(each) for each in value]
    return repr(value) if isinstance(value, float) else value


def row_of(values: dict[str, Any], names: list[str], uuid: str | None) -> dict[str, Any]:
    found = {name: plain(values[name]) for name in names}
    return (
        found | {"by": found["by"] or None} | {"_uuid": uuid}
        if "by" in found
        else (found | {"_uuid": uuid})
    )


def rows_of_class(kind: type[Any], content: bytes, names: list[str]) -> dict[int, Any]:
    """Return what a class makes of each message, by its offset; bad ones are left out."""
    transport = MemoryTransport()
    transport.create(NAME).content += content
    reader = Reader(kind, name=NAME, transport=transport, isolation="uncommitted", on_error="skip")
    return {
        each.begin: row_of(
            {name: getattr(each.message, name) for name in names},
            names,
            str(each.uuid) if each.uuid.int else None,
        )
        for each in reader
    }


def rows_of_columns(content: bytes, names: list[str]) -> dict[int, Any]:
    transport = MemoryTransport()
    transport.create(NAME).content += content
    reader = Reader(Plain, name=NAME, transport=transport, isolation="uncommitted", on_error="skip")
    fields = [*map(SCHEMA.field, names), ("_uuid", pa.string()), ("_offset", pa.int64())]
    rows = [row for batch in reader.arrow(pa.schema(fields)) for row in batch.to_pylist()]
    return {row["_offset"]: row_of(row, names, row["_uuid"]) for row in rows}


def rows_of_spark(content: bytes, names: list[str]) -> dict[int, Any]:
    fields = [*map(SCHEMA.field, names), ("_uuid", pa.string()), ("_offset", pa.int64())]
    schema = from_arrow_schema(pa.schema(fields), prefer_timestamp_ntz=True)
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "_local_zone", lambda: "UTC")
        store_fragment(Path(place), fragment_of(NAME, 0, content), content)
        rows = batch_rows(Path(place), schema, isolation="uncommitted", mode="DROPMALFORMED")
    return {row["_offset"]: row_of(row, names, row["_uuid"]) for row in rows}


def keys_of_dicts(content: bytes) -> dict[int, tuple[dict[str, Any], str | None]]:
    transport = MemoryTransport()
    transport.create(NAME).content += content
    reader = Reader(dict, name=NAME, transport=transport, isolation="uncommitted", on_error="skip")
    return {
        each.begin: (each.message, str(each.uuid) if each.uuid.int else None) for each in reader
    }


@settings(max_examples=150, deadline=None)
@given(st.lists(lines(), min_size=1, max_size=8), st.sets(st.sampled_from(SCHEMA.names)))
@example([b'{"at":"2026-01-01T23:59:59.9999999z"}\n'] * 5, {"at"})
@example([b'{"UUID":"","s":"%s"}\n' % (b"x" * 29)] * 5, {"s"})
@example([b'{"i":1,"i":2}\n'] * 5, {"i"})
def test_all_readers_agree(written: list[bytes], chosen: set[str]):
    content = b"".join(written)
    names = [name for name in SCHEMA.names if name in chosen] or ["i"]
    # Columns do not look at the values of keys that they do not name; classes do.
    everything = SCHEMA.names
    classes = {
        kind.__name__: rows_of_class(kind, content, everything) for kind in (Plain, Record, Model)
    }
    columns = rows_of_columns(content, everything)
    assert classes["Record"] == classes["Plain"]
    assert classes["Model"] == classes["Plain"]
    assert columns == classes["Plain"]

    some = rows_of_columns(content, names)
    wanted = [*names, "_uuid"]
    for offset, row in columns.items():
        assert some[offset] == {name: row[name] for name in wanted}
    in_spark = [name for name in names if name in IN_SPARK] or ["i"]
    assert rows_of_spark(content, in_spark) == rows_of_columns(content, in_spark)
    if "s" in names:
        found, texts = rows_of_spark(content, ["s"]), rows_of_columns(content, ["s"])
        assert {offset: found[offset] for offset in texts} == texts

    dicts = keys_of_dicts(content)
    assert set(dicts) >= set(some)
    for offset, row in columns.items():
        message, uuid = dicts[offset]
        assert uuid == row["_uuid"]
        for name in ("i", "b", "s", "all", "by"):
            value = message.get(name)
            assert row[name] == (value or None if name == "by" else value)
