"""Blocks of frames become record batches, or name the message that is wrong."""

import datetime as dt
import uuid

import orjson
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.errors import DecodeError, TornFrameError
from gazette_sdk.message.arrow import decode_json_block, decode_message_block

SCHEMA = pa.schema(
    [
        ("customer", pa.string()),
        ("cents", pa.int64()),
        ("_journal", pa.string()),
        ("_offset", pa.int64()),
        ("_uuid", pa.string()),
        ("_time", pa.timestamp("us", tz="UTC")),
    ]
)


def lines(*rows: object) -> bytes:
    return b"".join(orjson.dumps(row) + b"\n" for row in rows)


def test_a_block_of_lines_becomes_a_batch_with_metadata_columns():
    stamp = uuid.UUID("1de6d13a-e5a8-11f1-a8ee-02fc00000001")
    block = lines(
        {"UUID": str(stamp), "customer": "ada", "cents": 250, "more": [1]},
        {"uuid": str(stamp), "customer": "bob"},
        {"cents": 3},
    )
    rows = decode_json_block(block, "a/b", 1000, SCHEMA).to_pylist()
    time = dt.datetime(1582, 10, 15, tzinfo=dt.UTC) + dt.timedelta(microseconds=stamp.time // 10)
    first = block.index(b"\n") + 1
    assert rows[0] == {
        "customer": "ada",
        "cents": 250,
        "_journal": "a/b",
        "_offset": 1000,
        "_uuid": str(stamp),
        "_time": time,
    }
    assert rows[1]["_uuid"] == str(stamp)
    assert rows[1]["cents"] is None
    assert rows[1]["_offset"] == 1000 + first
    assert rows[2]["_uuid"] is None
    assert rows[2]["_time"] is None


def test_columns_keep_the_order_and_the_types_that_were_asked_for():
    schema = pa.schema(
        [("_offset", pa.int32()), ("cents", pa.float64()), ("_time", pa.timestamp("ns"))]
    )
    batch = decode_json_block(lines({"cents": 1}), "a/b", 0, schema)
    assert batch.schema == schema


def test_an_empty_block_is_an_empty_batch():
    assert decode_json_block(b"", "a/b", 0, SCHEMA).num_rows == 0


def test_the_zero_uuid_has_no_time():
    block = lines({"UUID": "00000000-0000-0000-0000-000000000000"})
    row = decode_json_block(block, "a/b", 0, SCHEMA).to_pylist()[0]
    assert row["_time"] is None


@pytest.mark.parametrize(
    ("block", "offset"),
    [
        (b'{"cents":1}\nxx\n', 22),
        (b'{"cents":1}\n\n{"cents":2}\n', 22),
        (b"[1]\n", 10),
        (b'{"cents":1}\n{"cents":"many"}\n', 22),
    ],
)
def test_a_bad_line_is_named_by_journal_and_offset(block, offset):
    with pytest.raises(DecodeError, match=f"a/b: the message at offset {offset}") as caught:
        decode_json_block(block, "a/b", 10, SCHEMA)
    assert (caught.value.journal, caught.value.offset) == ("a/b", offset)


def test_a_block_that_ends_within_a_line_is_torn():
    with pytest.raises(TornFrameError) as caught:
        decode_json_block(b'{"cents":1}\n{"cen', "a/b", 5, SCHEMA)
    assert caught.value.offset == 17


def test_types_that_the_columnar_reader_lacks_are_decoded_one_by_one():
    schema = pa.schema([("counts", pa.map_(pa.string(), pa.int64())), ("_offset", pa.int64())])
    batch = decode_json_block(lines({"counts": {"a": 1}}, {"counts": {}}), "a/b", 0, schema)
    assert batch.to_pylist()[0] == {"counts": [("a", 1)], "_offset": 0}


def test_messages_decoded_elsewhere_get_the_same_metadata_columns():
    stamp = "1de6d13a-e5a8-11f1-a8ee-02fc00000001"
    batch = decode_message_block([{"cents": 1}, {}], [stamp, None], [7, 20], "a/b", SCHEMA)
    assert batch.column("_offset").to_pylist() == [7, 20]
    assert batch.column("_time").to_pylist()[1] is None
    assert batch.column("cents").to_pylist() == [1, None]


@given(
    st.lists(
        st.builds(
            lambda name, cents: {"customer": name, "cents": cents},
            st.text(max_size=8),
            st.integers(-(2**63), 2**63 - 1),
        ),
        max_size=20,
    ),
    st.integers(0, 2**40),
)
def test_every_line_is_found_at_its_offset(rows, begin):
    block = lines(*rows)
    batch = decode_json_block(block, "a/b", begin, SCHEMA)
    for row, decoded in zip(rows, batch.to_pylist(), strict=True):
        start = decoded["_offset"] - begin
        assert block[start:].startswith(orjson.dumps(row))
        assert decoded["customer"] == row["customer"]
        assert decoded["cents"] == row["cents"]
