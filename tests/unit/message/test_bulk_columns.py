"""Batches of columns: each row is written as a message, and mapped as one."""

from __future__ import annotations

import datetime as dt
import decimal
import os
import subprocess
import sys
from operator import attrgetter, itemgetter

import numpy as np
import pyarrow as pa
import pytest

from gazette_sdk import Publisher, mapping
from gazette_sdk.errors import (
    MappingError,
    ValidationError,
)
from gazette_sdk.message.mapping import fnv1a32
from support.published import TO, WAIT_S, bare


def test_columns_are_written_as_rows(transport):
    transport.create("a/journal")
    naive = dt.datetime(2024, 5, 6, 7, 8, 9, 123456)  # noqa: DTZ001 - columns may be naive
    aware = naive.replace(tzinfo=dt.UTC)
    batch = pa.record_batch(
        {
            "int": pa.array([1, None]),
            "float": pa.array([0.5, None]),
            "text": pa.array(["a\n{", None]),
            "flag": pa.array([True, None]),
            "naive": pa.array([naive, None]),
            "aware": pa.array([aware, None], pa.timestamp("us", "Europe/Budapest")),
            "nano": pa.array([1, None], pa.timestamp("ns", "UTC")),
            "nano_naive": pa.array([2**60 + 7, None], pa.timestamp("ns")),
            "date": pa.array([dt.date(2024, 1, 2), None]),
            "time": pa.array([dt.time(1, 2, 3), None]),
            "decimal": pa.array([decimal.Decimal("12.340"), None]),
            "bytes": pa.array([b"\x00\xff", None]),
            "list": pa.array([[1, None], None]),
            "struct": pa.array([{"x": 1, "y": [None]}, None]),
            "map": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int64())),
            "dictionary": pa.array(["d", None]).dictionary_encode(),
            "class": pa.array([1, None]),
            "not a name": pa.array([1, None]),
            "validate": pa.array([1, None]),
            "uuid_field": pa.array([1, None]),
            "null": pa.nulls(2),
        }
    )
    with Publisher(TO, transport=transport) as publisher:
        publisher.publish_batch(batch).result(WAIT_S)
    full, empty = bare(transport, "a/journal")
    assert full.pop("aware") == "2024-05-06T09:08:09.123456+02:00"
    assert full == {
        "int": 1,
        "float": 0.5,
        "text": "a\n{",
        "flag": True,
        "naive": "2024-05-06T07:08:09.123456",
        "nano": "1970-01-01T00:00:00.000000001Z",
        "nano_naive": str(np.datetime64(2**60 + 7, "ns")),
        "date": "2024-01-02",
        "time": "01:02:03",
        "decimal": "12.340",
        "bytes": "AP8=",
        "list": [1, None],
        "struct": {"x": 1, "y": [None]},
        "map": {"k": 1},
        "dictionary": "d",
        "class": 1,
        "not a name": 1,
        "validate": 1,
        "uuid_field": 1,
        "null": None,
    }
    assert set(empty) == {*full, "aware"}
    assert set(empty.values()) == {None}


def test_maps_are_objects_at_any_depth(transport):
    transport.create("a/journal")
    counts = pa.map_(pa.string(), pa.int64())
    nested = {
        "list": pa.array([[[("k", 1)], None], None], pa.list_(counts)),
        "struct": pa.array(
            [{"m": [("k", 1)], "n": 2}, None], pa.struct([("m", counts), ("n", pa.int64())])
        ),
        "map": pa.array([[("a", [("k", 1)])], []], pa.map_(pa.string(), counts)),
    }
    with Publisher(TO, transport=transport) as publisher:
        publisher.publish_batch(pa.record_batch(nested)).result(WAIT_S)
    assert bare(transport, "a/journal") == [
        {"list": [{"k": 1}, None], "struct": {"m": {"k": 1}, "n": 2}, "map": {"a": {"k": 1}}},
        {"list": None, "struct": None, "map": {}},
    ]


@pytest.mark.parametrize(
    "column",
    [
        pa.array([10**18], pa.timestamp("us", "UTC")),
        pa.array([[([1], 1)]], pa.map_(pa.list_(pa.int64()), pa.int64())),
    ],
    ids=["time after the year 9999", "map with lists as keys"],
)
def test_a_value_that_python_cannot_hold_is_refused_with_its_column(transport, column):
    transport.create("a/journal")
    with (
        Publisher(TO, transport=transport) as publisher,
        pytest.raises(ValidationError, match=r"a value of column 'odd', of type .*cast the column"),
    ):
        publisher.publish_batch(pa.record_batch({"odd": column}))


NAN, INF = float("nan"), float("-inf")
FLOATS = pa.list_(pa.float32())


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1.5, NAN]),
        pa.array([1.5, None, INF], pa.float32()),
        pa.array([np.float16("nan")], pa.float16()),
        pa.array([[1.5], None, [None, NAN]], FLOATS),
        pa.array([{"x": [{"y": INF}]}]),
        pa.array([[("k", NAN)]], pa.map_(pa.string(), pa.float64())),
        pa.array([1.5, NAN]).dictionary_encode(),
    ],
    ids=lambda column: str(column.type),
)
@pytest.mark.parametrize("rows", [0, 5000])
def test_numbers_that_json_cannot_hold_are_refused_with_their_column(transport, column, rows):
    transport.create("a/journal")
    column = pa.chunked_array([pa.nulls(rows, column.type), column])
    table = pa.table({"n": pa.array(range(len(column))), "odd": column})
    with Publisher(TO, transport=transport) as publisher:
        with pytest.raises(ValidationError, match=r"column 'odd' has NaN or an infinite number"):
            publisher.publish_batch(table)
        publisher.publish_batch(table.slice(0, rows)).result(WAIT_S)
        publisher.publish_batch(table.select(["n"])).result(WAIT_S)
    assert len(bare(transport, "a/journal")) == 2 * rows + len(column) - rows


def test_a_column_in_place_of_the_uuid_is_refused(transport):
    transport.create("a/journal")
    batch = pa.record_batch({"UUID": pa.array(["mine"]), "n": pa.array([1])})
    with (
        Publisher(TO, transport=transport) as publisher,
        pytest.raises(ValidationError, match=r"the batch has a column 'UUID', .*rename"),
    ):
        publisher.publish_batch(batch)


KEYS = [
    itemgetter("customer"),
    attrgetter("customer"),
    lambda row: row["customer"],
    lambda row: row.customer,
]


@pytest.mark.parametrize("key", KEYS)
def test_mappings_see_rows_by_item_and_by_attribute(orders, key):
    rows = [{"customer": f"c{n}", "n": n} for n in range(300)]
    by_key = mapping.modulo("topic=orders", key=key)
    table = pa.Table.from_batches(
        [pa.RecordBatch.from_pylist(rows[:100]), pa.RecordBatch.from_pylist(rows[100:])]
    )
    with Publisher(by_key, transport=orders) as publisher:
        receipt = publisher.publish_batch(table).result(WAIT_S)
    assert receipt.count == 300
    for index, name in enumerate(receipt.journals):
        for row in bare(orders, name):
            assert fnv1a32(row["customer"].encode()) % 4 == index
            assert row == rows[row["n"]]


def test_a_key_that_is_no_column_is_an_error(orders):
    batch = pa.RecordBatch.from_pylist([{"n": 1}])
    with Publisher(transport=orders) as publisher:
        with pytest.raises(KeyError):
            publisher.publish_batch(
                batch, mapping=mapping.modulo("topic=orders", key=itemgetter("k"))
            )
        with pytest.raises(AttributeError):
            publisher.publish_batch(
                batch, mapping=mapping.modulo("topic=orders", key=attrgetter("k"))
            )
        by_n = mapping.modulo("topic=orders", key=itemgetter("n"))
        nothing = pa.RecordBatch.from_pylist([{"n": "x"}, {"n": None}])
        with pytest.raises(MappingError, match=r"message 1 of the batch.*NoneType"):
            publisher.publish_batch(nothing, mapping=by_n)


def test_columns_which_are_no_rows_are_refused(transport):
    transport.create("a/journal", content_type="application/x-protobuf-fixed")
    transport.create("b/journal")
    with Publisher(TO, transport=transport) as publisher:
        twice = pa.RecordBatch.from_arrays([pa.array([1]), pa.array([2])], ["a", "a"])
        with pytest.raises(ValidationError, match="same name: a"):
            publisher.publish_batch(twice)
        batch = pa.RecordBatch.from_pylist([{"n": 1}])
        with pytest.raises(ValidationError, match="json message, but the journal's framing"):
            publisher.publish_batch(batch)
        odd = pa.record_batch({"n": pa.array([(1, 2, 3)], pa.month_day_nano_interval())})
        to_b = mapping.direct("b/journal")
        assert publisher.publish_batch(odd, mapping=to_b).result(WAIT_S).count == 1  # a tuple
        none = pa.RecordBatch.from_pylist([{"n": 1}]).slice(0, 0)
        assert publisher.publish_batch(none, mapping=to_b).result(WAIT_S).journals == ()


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", "\x00"])
def test_a_column_whose_name_cannot_be_written_is_refused(transport, name):
    transport.create("a/journal")
    with Publisher(TO, transport=transport) as publisher:
        with pytest.raises(ValidationError, match="in its name: rename it"):
            publisher.publish_batch(pa.table({name: [1]}))
        publisher.publish({name: 1})
    assert bare(transport, "a/journal") == [{name: 1}]


def test_a_column_without_a_name_is_no_table(transport):
    transport.create("a/journal")
    with Publisher(TO, transport=transport) as publisher:
        with pytest.raises(ValidationError, match="a ChunkedArray is no table"):
            publisher.publish_batch(pa.chunked_array([[1]]))
        publisher.publish_batch(pa.table({"n": [1]}))
    assert bare(transport, "a/journal") == [{"n": 1}]


def test_columns_in_a_transaction_are_acknowledged_without_columns(transport):
    transport.create("a/journal")
    with Publisher(TO, transport=transport) as publisher, publisher.transaction() as txn:
        txn.publish_batch(pa.RecordBatch.from_pylist([{"n": 1}, {"n": 2}]))
    assert bare(transport, "a/journal") == [{"n": 1}, {"n": 2}, {}]


def test_pyarrow_is_imported_for_columns_only():
    code = (
        "import sys; from gazette_sdk import Publisher, mapping\n"
        "from support.memory_transport import MemoryTransport\n"
        "t = MemoryTransport(); t.create('a/journal')\n"
        "with Publisher(mapping.direct('a/journal'), transport=t) as p:\n"
        "    p.publish_batch([{'n': 1}]).result(10)\n"
        "print('pyarrow' in sys.modules)\n"
    )
    path = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": path}, capture_output=True, check=True
    )
    assert done.stdout.split() == [b"False"]
