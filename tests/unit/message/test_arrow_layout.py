"""Lines that are written alike are sliced into the columns that a parser would make of them."""

from __future__ import annotations

import uuid

import numpy as np
import orjson
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gazette_sdk.message.columns import json as arrow_json
from gazette_sdk.message.columns.json import JsonColumns, Lines
from gazette_sdk.message.columns.layout import sliced_columns
from gazette_sdk.message.uuid import build_uuid, parse_uuid

SCHEMA = pa.schema(
    [
        ("s", pa.string()),
        ("i", pa.int64()),
        ("f", pa.float64()),
        ("b", pa.bool_()),
        ("x", pa.int8()),
    ]
)


def stamped(*rows: dict) -> bytes:
    """Lines as a publisher writes them; a message without fields is its acknowledgement."""
    return b"".join(
        orjson.dumps({"UUID": str(build_uuid(b"\x01bcdef", 160 * at, 0 if row else 2)), **row})
        + b"\n"
        for at, row in enumerate(rows, start=1)
    )


def lines_of(block: bytes) -> Lines:
    ends = np.flatnonzero(np.frombuffer(block, np.uint8) == 10) + 1
    return Lines(block, np.append(0, ends[:-1]), ends)


def sliced(block: bytes, schema: pa.Schema = SCHEMA):
    lines = lines_of(block)
    bare = (lines.ends - lines.begins) == 48
    return sliced_columns(block, lines.begins, lines.ends, bare, list(schema))


def parsed(block: bytes, *, slices: bool) -> tuple:
    """What becomes of a block, and how many of its lines are good."""
    with pytest.MonkeyPatch.context() as patch:
        if not slices:
            patch.setattr(arrow_json, "sliced_columns", lambda *_: None)
        found = JsonColumns(SCHEMA).parse(lines_of(block))
    columns = {
        name: column.to_pylist() for name, column in found.columns.items() if column is not None
    }
    return columns, found.stamps.clocks.tolist(), found.cause is None


def filled(columns: dict, count: int) -> dict:
    return {name: columns.get(name) or [None] * count for name in SCHEMA.names}


def assert_sliced_as_parsed(block: bytes) -> None:
    columns, clocks, is_good = parsed(block, slices=True)
    others, other_clocks, other_is_good = parsed(block, slices=False)
    assert (clocks, is_good) == (other_clocks, other_is_good)
    assert filled(columns, len(clocks)) == filled(others, len(clocks))


def test_texts_numbers_and_truths_are_sliced():
    rows = [
        {"s": "a", "i": 1, "f": 0.5, "b": True, "more": "x", "deep": 5},
        {"s": "", "i": -20, "f": 1e300, "b": False, "more": "", "deep": 0},
    ]
    columns = sliced(stamped(*rows))
    assert {name: column.to_pylist() for name, column in columns.items()} == {
        name: [row[name] for row in rows] for name in "sifb"
    }


def test_acknowledgements_between_are_null():
    rows = [{}, {"s": "a", "i": 1}, {"s": "b", "i": 2}, {}, {"s": "c", "i": 3}, {}]
    columns = sliced(stamped(*rows))
    assert columns["s"].to_pylist() == [None, "a", "b", None, "c", None]
    assert columns["i"].to_pylist() == [None, 1, 2, None, 3, None]
    assert sliced(stamped({}, {})) == {}


@pytest.mark.parametrize(
    "rows",
    [
        [{"s": 'a"'}],
        [{"s": "a"}, {"s": None}],
        [{"s": "a"}, {"i": 1}],
        [{"s": "a", "i": 1}, {"i": 1, "s": "a"}],
        [{"i": [1]}],
        [{"i": {"j": 1}}],
        [{"i": 1.5}],
        [{"i": "1"}],
        [{"s": 1}],
        [{"f": True}],
        [{"x": 300}],
        [{"i": 1 << 63}],
    ],
)
def test_others_are_left_to_the_parser(rows):
    block = stamped(*rows)
    assert sliced(block) is None
    assert_sliced_as_parsed(block)


@pytest.mark.parametrize(
    "number",
    [
        *("1", "-1", "0", "-0", "10", "0.5", "1.5e3", "1E-2", "2e+1", "0e1", "1e400"),
        *("01", "-01", "00", "1.", ".5", "-", "+1", "1e", "1e+", "0x1F", "nan", "inf", "1-2"),
        *("--1", "1.2.3", "1e5e5", "1e5.5", "1.e5", "", " 1", "1 ", "null", "tru", "1,", "1}"),
        *("-.5", "1_0"),
    ],
)
@pytest.mark.parametrize("key", ["f", "i", "unknown"])
def test_numbers_are_those_of_json(number, key):
    line = b'{"UUID":"%s","%s":%s,"s":"a"}\n'
    first = line % (str(build_uuid(b"\x01bcdef", 160, 0)).encode(), key.encode(), b"7")
    second = line % (
        str(build_uuid(b"\x01bcdef", 320, 0)).encode(),
        key.encode(),
        number.encode(),
    )
    assert_sliced_as_parsed(first + second)
    assert_sliced_as_parsed(first.replace(b',"s":"a"', b"") + second.replace(b',"s":"a"', b""))


ROWS = st.lists(
    st.one_of(
        st.just({}),
        st.fixed_dictionaries(
            {
                "s": st.text("ab{}:,é ", max_size=5),
                "i": st.integers(-(2**63), 2**63 - 1) | st.integers(-20, 20),
                "f": st.floats(allow_nan=False, allow_infinity=False) | st.integers(-5, 5),
                "b": st.booleans(),
                "other": st.text("xy", max_size=3),
                "last": st.integers(0, 100),
            }
        ).map(lambda row: {key: row[key] for key in ("s", "i", "f", "b", "other", "last")}),
    ),
    min_size=1,
    max_size=12,
)


@given(ROWS)
def test_what_is_sliced_is_what_is_parsed(rows):
    block = stamped(*rows)
    assert_sliced_as_parsed(block)
    assert sliced(block) is not None


@given(ROWS, st.integers(0), st.sampled_from(list(b'"{}:,-+.e019 \\\n\ttrufalsnx\xff\xc3')))
@settings(max_examples=200)
@example([{"s": "a", "i": 1, "f": 0, "b": True, "other": "", "last": 1}], 60, ord(","))
@example([{}] * 4, 1716878992, ord('"'))
def test_a_changed_byte_is_noticed(rows, at, byte):
    block = bytearray(stamped(*rows))
    block[at % (len(block) - 1)] = byte
    assert_sliced_as_parsed(bytes(block))


@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=20), st.binary(min_size=8, max_size=8)
)
def test_uuids_which_are_alike_say_what_they_say_one_by_one(times, written):
    base = str(uuid.UUID("00000000-e5a8-11f1-a8ee-02fc00000001"))
    block = b"".join(b'{"UUID":"%08x%s","s":"a"}\n' % (low, base[8:].encode()) for low in times)
    assert_sliced_as_parsed(block)
    clocks = JsonColumns(SCHEMA).parse(lines_of(block)).stamps.clocks.tolist()
    parts = [parse_uuid(uuid.UUID(f"{low:08x}{base[8:]}")) for low in times]
    assert clocks == [each.clock for each in parts]
    if b"\n" not in written:
        bad = block[:9] + written + block[17:]
        assert_sliced_as_parsed(bad)
