"""Content becomes record batches, or names the message that is wrong."""

import datetime as dt
import uuid

import orjson
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.errors import DecodeError
from gazette_sdk.framing import Csv, FixedProtobuf, JsonLines
from gazette_sdk.message.columns.decoders import column_decoder
from gazette_sdk.message.fetcher import Opened
from support.protobuf_messages import Gram

STAMP = uuid.UUID("1de6d13a-e5a8-11f1-a8ee-02fc00000001")
TIME = dt.datetime(1582, 10, 15, tzinfo=dt.UTC) + dt.timedelta(microseconds=STAMP.time // 10)

SCHEMA = pa.schema(
    [
        ("customer", pa.string()),
        ("cents", pa.int64()),
        ("_journal", pa.string()),
        ("_offset", pa.int64()),
        ("_end", pa.int64()),
        ("_uuid", pa.string()),
        ("_time", pa.timestamp("us", tz="UTC")),
        ("_flags", pa.int32()),
    ]
)


def lines(*rows: object) -> bytes:
    return b"".join(orjson.dumps(row) + b"\n" for row in rows)


def batch_of(
    message_type: type, content_type: str, block: bytes, begin: int, schema: pa.Schema
) -> pa.RecordBatch:
    opened = Opened("a/b", content_type, begin, continues=False, create_revision=0)
    run, error = column_decoder(message_type, schema, opened, sequenced=False).feed(block)
    if error is not None:
        raise error
    return run.items.batch


def json_batch(block: bytes, begin: int = 0, schema: pa.Schema = SCHEMA) -> pa.RecordBatch:
    return batch_of(dict, JsonLines.content_type, block, begin, schema)


def test_a_block_of_lines_becomes_a_batch_with_metadata_columns():
    block = lines(
        {"UUID": str(STAMP), "customer": "ada", "cents": 250, "more": [1]},
        {"uuid": str(STAMP), "customer": "bob"},
        {"cents": 3},
    )
    rows = json_batch(block, 1000).to_pylist()
    first = block.index(b"\n") + 1
    assert rows[0] == {
        "customer": "ada",
        "cents": 250,
        "_journal": "a/b",
        "_offset": 1000,
        "_end": 1000 + first,
        "_uuid": str(STAMP),
        "_time": TIME,
        "_flags": 0xEE,
    }
    assert rows[1]["_uuid"] == str(STAMP)
    assert rows[1]["cents"] is None
    assert rows[1]["_offset"] == 1000 + first
    assert rows[2]["_uuid"] is None
    assert rows[2]["_time"] is None


def test_uuids_at_their_usual_place_are_no_work_for_the_columnar_reader():
    block = lines(
        {"UUID": str(STAMP), "customer": "ädä", "cents": 250},
        {"UUID": str(STAMP)},
        {"UUID": str(STAMP), "cents": 1, "UUID2": "x", "_end": 5},
    )
    rows = json_batch(block, 0).to_pylist()
    assert [row["customer"] for row in rows] == ["ädä", None, None]
    assert [row["cents"] for row in rows] == [250, None, 1]
    assert {row["_uuid"] for row in rows} == {str(STAMP)}
    assert rows[-1]["_end"] == len(block)


def test_a_column_may_be_the_uuids_own_field():
    schema = pa.schema([("UUID", pa.string()), ("_uuid", pa.string())])
    rows = json_batch(lines({"UUID": str(STAMP)}), 0, schema).to_pylist()
    assert rows == [{"UUID": str(STAMP), "_uuid": str(STAMP)}]


def test_columns_keep_the_order_and_the_types_that_were_asked_for():
    schema = pa.schema(
        [
            ("_offset", pa.int32()),
            ("cents", pa.float64()),
            ("_time", pa.timestamp("ns")),
            ("_journal", pa.dictionary(pa.int32(), pa.string())),
        ]
    )
    batch = json_batch(lines({"cents": 1, "UUID": str(STAMP)}), 0, schema)
    assert batch.schema == schema
    assert batch.column("_time").to_pylist()[0].replace(tzinfo=dt.UTC) == TIME


def test_an_empty_block_is_an_empty_batch():
    assert json_batch(b"", 0).num_rows == 0


def test_without_columns_rows_are_counted_still():
    assert json_batch(lines({"a": 1}, {}), 0, pa.schema([])).num_rows == 2


def test_the_zero_uuid_and_one_that_is_none_have_no_time():
    block = lines(
        {"UUID": "00000000-0000-0000-0000-000000000000"}, {"UUID": "x" * 36}, {"UUID": ""}
    )
    rows = json_batch(block, 0).to_pylist()
    assert [row["_time"] for row in rows] == [None] * 3
    assert [row["_uuid"] for row in rows] == [str(uuid.UUID(int=0)), "x" * 36, None]


def test_a_uuid_may_have_any_of_its_forms():
    block = lines({"UUID": STAMP.hex}, {"uuid": STAMP.urn}, {"UUID": None, "uuid": str(STAMP)})
    rows = json_batch(block, 0).to_pylist()
    assert [row["_time"] for row in rows] == [TIME] * 3


def test_what_is_called_uuid_need_not_be_one():
    rows = json_batch(lines({"uuid": 7, "cents": 1}, {"uuid": "x"}), 0)
    assert rows.column("_uuid").to_pylist() == [None, None]
    assert rows.column("cents").to_pylist() == [1, None]


PLACED = b'{"UUID":"%s","cents":1}\n' % str(STAMP).encode()


@pytest.mark.parametrize(
    ("block", "offset"),
    [
        (b'{"cents":1}\nxx\n', 22),
        (b'{"cents":1}\n\n{"cents":2}\n', 22),
        (b"[1]\n", 10),
        (b'{"cents":1}\n{"cents":"many"}\n', 22),
        (b'{"cents":1}\n{"cents":2}{"cents":3}\n', 22),
        (b'{"cents":\n1}\n{"cents":2}{"cents":3}\n', 10),
        (b'{"cents":1}\n{"customer":"\xff"}\n', 22),
        (b'{"cents":1}\n{"UUID":5}\n', 22),
        (PLACED + PLACED.replace(b"1}", b"true}"), 10 + len(PLACED)),
        (PLACED + PLACED.replace(b',"cents":1', b","), 10 + len(PLACED)),
        (PLACED + PLACED.replace(b',"cents":1', b',"customer":"\xff"'), 10 + len(PLACED)),
        (PLACED * 7 + PLACED.replace(b"1}", b"1}}") + PLACED, 10 + 7 * len(PLACED)),
    ],
)
def test_a_bad_line_is_named_by_journal_and_offset(block, offset):
    with pytest.raises(DecodeError, match=f"a/b: the message at offset {offset}") as caught:
        json_batch(block, 10)
    assert (caught.value.journal, caught.value.offset) == ("a/b", offset)


def test_white_space_around_an_object_is_none_of_a_readers_business():
    block = b' {"cents":1} \r\n{"cents":2}\t\n'
    assert json_batch(block, 0).column("cents").to_pylist() == [1, 2]


@pytest.mark.parametrize("uuids", [True, False])
def test_types_that_the_columnar_reader_lacks_are_decoded_one_by_one(uuids):
    schema = pa.schema([("counts", pa.map_(pa.string(), pa.int64())), ("_offset", pa.int64())])
    first = {"UUID": str(STAMP)} if uuids else {}
    block = lines({**first, "counts": {"a": 1}}, {**first, "counts": {}})
    batch = json_batch(block, 0, schema)
    assert batch.to_pylist()[0] == {"counts": [("a", 1)], "_offset": 0}
    bad = lines({**first, "counts": {"a": 1}}, {**first, "counts": 5})
    with pytest.raises(DecodeError, match=f"offset {bad.index(10) + 1} "):
        json_batch(bad, 0, schema)


def test_protobuf_messages_become_columns():
    content = bytearray()
    for message in (Gram(uuid=STAMP.bytes, text="ada", count=2), Gram(count=3)):
        FixedProtobuf().encode(message.SerializeToString(), content)
    schema = pa.schema([("text", pa.string()), ("count", pa.int64()), *list(SCHEMA)[2:]])
    found = batch_of(Gram, FixedProtobuf.content_type, bytes(content), 7, schema)
    rows = found.to_pylist()
    assert [(row["text"], row["count"], row["_uuid"]) for row in rows] == [
        ("ada", 2, str(STAMP)),
        ("", 3, None),
    ]
    assert [row["_time"] for row in rows] == [TIME, None]
    assert rows[0]["_offset"] == 7
    assert rows[1]["_end"] == 7 + len(content)


def test_a_protobuf_message_that_does_not_fit_is_named():
    content = bytearray()
    for count in (1, 2, 1 << 40, 3):
        FixedProtobuf().encode(Gram(count=count).SerializeToString(), content)
    frames = FixedProtobuf().cut(bytes(content))
    schema = pa.schema([("count", pa.int32())])
    with pytest.raises(DecodeError, match="does not fit the schema") as caught:
        batch_of(Gram, FixedProtobuf.content_type, bytes(content), 0, schema)
    assert caught.value.offset == frames.begins[2]


CSV_SCHEMA = pa.schema([("text", pa.string()), ("n", pa.int64()), *list(SCHEMA)[2:]])


def csv_batch(content: bytes, schema: pa.Schema = CSV_SCHEMA) -> pa.RecordBatch:
    return batch_of(list, Csv.content_type, content, 3, schema)


def test_csv_columns_are_the_fields_behind_the_uuid():
    stamp = str(STAMP)
    content = f'{stamp},"a,""b""\nc",5,more\n\n{stamp},,,\n{stamp},\u00e4,-1,"x"\n'.encode()
    rows = csv_batch(content).to_pylist()
    assert [(row["text"], row["n"]) for row in rows] == [
        ('a,"b"\nc', 5),
        ("", None),
        ("\u00e4", -1),
    ]
    assert {row["_uuid"] for row in rows} == {stamp}
    assert [row["_time"] for row in rows] == [TIME] * 3
    assert rows[0]["_offset"] == 3
    assert rows[-1]["_end"] == 3 + len(content)


def test_csv_records_need_not_be_written_as_usual():
    content = f'"{STAMP}",a\rb,7\n{STAMP.hex},,8\n'.encode()
    rows = csv_batch(content).to_pylist()
    assert [(row["text"], row["n"], row["_time"]) for row in rows] == [
        ("a\rb", 7, TIME),
        ("", 8, TIME),
    ]


@pytest.mark.parametrize(
    ("second", "text"),
    [
        ("{stamp},b,many", "does not fit the schema"),
        ("{stamp},b,99999999999999999999", "does not fit the schema"),
        ("no-uuid,b,2", "UUID"),
    ],
)
def test_a_csv_record_that_does_not_fit_is_named(second, text):
    first = f"{STAMP},a,1\n"
    content = (first + second.format(stamp=STAMP) + "\n" + first).encode()
    with pytest.raises(DecodeError, match=text) as caught:
        csv_batch(content)
    assert caught.value.offset == 3 + len(first)


def test_a_csv_record_with_fewer_fields_than_columns_is_named():
    with pytest.raises(DecodeError, match="names 2 columns, but behind its UUID the record has 1"):
        csv_batch(f"{STAMP},a\n".encode())


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
    st.booleans(),
)
def test_every_line_is_found_at_its_offset(rows, begin, uuids):
    written = [{"UUID": str(STAMP), **row} for row in rows] if uuids else rows
    block = lines(*written)
    batch = json_batch(block, begin)
    for row, decoded in zip(written, batch.to_pylist(), strict=True):
        start = decoded["_offset"] - begin
        assert block[start : decoded["_end"] - begin] == orjson.dumps(row) + b"\n"
        assert decoded["customer"] == row["customer"]
        assert decoded["cents"] == row["cents"]
