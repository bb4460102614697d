"""Reads of ranges: columns, content that is no message, and errors that name what is wrong."""

import sys
import weakref
from decimal import Decimal
from pathlib import Path

import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    CalendarIntervalType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    VariantType,
)

from gazette_sdk.errors import (
    ConfigurationError,
    CorruptFragmentError,
    DecodeError,
    FragmentNotFoundError,
    GazetteError,
    OversizedFrameError,
)
from gazette_sdk.framing import Framing
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_spark import range_read
from gazette_spark.source import GazetteBatchReader, GazetteDataSource
from support.fragment_files import fragment_of, store_fragment
from support.spark_stores import N, batch_rows, options_of, rows_of, store_history
from support.written_messages import History, frame

CORRUPT = StructType(
    [
        StructField("n", LongType()),
        StructField("_offset", LongType()),
        StructField("_corrupt_record", StringType()),
    ]
)
GOOD = frame(1, 1, 160), frame(2, 1, 320)
BAD = b'{"n": "many"}\n'


@pytest.fixture
def corrupted(tmp_path: Path) -> Path:
    """A store of a message, a line that fits no schema, one that is no JSON, and a message."""
    content = GOOD[0] + BAD + b"nonsense\n" + GOOD[1]
    store_fragment(tmp_path, fragment_of("a/part", 0, content), content)
    return tmp_path


@pytest.mark.parametrize("isolation", ["committed", "uncommitted"])
def test_corrupt_records_are_kept_in_their_column_or_dropped_or_an_error(
    corrupted: Path, isolation: str
):
    kept = batch_rows(corrupted, CORRUPT, isolation=isolation, mode="PERMISSIVE")
    first = len(GOOD[0])
    assert [(row["n"], row["_offset"], row["_corrupt_record"]) for row in kept] == [
        (1, 0, None),
        (None, first, '{"n": "many"}'),
        (None, first + len(BAD), "nonsense"),
        (2, first + len(BAD) + len(b"nonsense\n"), None),
    ]
    dropped = batch_rows(corrupted, CORRUPT, isolation=isolation, mode="dropmalformed")
    assert [row["n"] for row in dropped] == [1, 2]
    with pytest.raises(DecodeError) as raised:
        batch_rows(corrupted, CORRUPT, isolation=isolation)
    text = message_of(raised.value)
    assert f"a/part: the message at offset {first} cannot" in text
    assert next((corrupted / "a/part").iterdir()).name in text
    assert "mode=PERMISSIVE" in text


def test_corrupt_records_between_transactions_keep_the_order_of_their_journal(tmp_path: Path):
    """Small transactions are joined to one batch, in which bad content has its place."""
    history = History("a/part")
    lines: list[bytes] = []
    for _ in range(40):
        begin = len(history.content)
        history.pending(1)
        history.ack(1)
        lines += [bytes(history.content[begin:]), BAD]
    content = b"".join(lines)
    store_fragment(tmp_path, fragment_of("a/part", 0, content), content)
    rows = batch_rows(tmp_path, CORRUPT, mode="PERMISSIVE")
    offsets = [row["_offset"] for row in rows]
    assert offsets == sorted(offsets)
    assert [row["n"] is None for row in rows] == [False, True] * 40


def test_a_string_takes_any_value_as_it_is_written(tmp_path: Path):
    values = [
        '"x"', "1", "1.50", "-0", "true", "null", '{"a": 1, "b":[1.0]}', "[ ]", '"\\u00e9"',
        '"\\"1\\""', "123456789012345678901234567890",
    ]  # fmt: skip
    content = "".join(f'{{"v":{value},"n":{at}}}\n' for at, value in enumerate(values)).encode()
    store_fragment(tmp_path, fragment_of("a/part", 0, content), content)
    schema = StructType([StructField("v", StringType()), StructField("n", LongType())])
    rows = batch_rows(tmp_path, schema, isolation="uncommitted")
    texts = ["x", *values[1:5], None, *values[6:8], "é", '"1"', values[-1]]
    assert [(row["v"], row["n"]) for row in rows] == list(zip(texts, range(11), strict=True))
    bad = content + b'{"v":{"a":1},"n":"x"}\n'
    store_fragment(tmp_path / "bad", fragment_of("a/part", 0, bad), bad)
    kept = batch_rows(tmp_path / "bad", schema, isolation="uncommitted", mode="DROPMALFORMED")
    assert kept == rows
    nested = ArrayType(StructType([StructField("s", StringType())]))
    content = b'{"v":[{"s":1},{"s":"x"},null,{}],"m":{"k":{},"l":null}}\n'
    store_fragment(tmp_path / "nested", fragment_of("a/part", 0, content), content)
    schema = StructType(
        [StructField("v", nested), StructField("m", MapType(StringType(), StringType()))]
    )
    [row] = batch_rows(tmp_path / "nested", schema, isolation="uncommitted")
    assert row["v"] == [{"s": "1"}, {"s": "x"}, None, {"s": None}]
    assert row["m"] == [("k", "{}"), ("l", None)]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (VariantType(), "variant"),
        (ArrayType(VariantType()), "variant"),
        (CalendarIntervalType(), "interval"),
    ],
)
def test_a_type_that_spark_takes_from_no_python_source_is_refused(
    tmp_path: Path, kind: DataType, name: str
):
    source = GazetteDataSource({"store": tmp_path.as_uri(), "journals": "a/"})
    for make in (source.reader, source.streamReader):
        with pytest.raises(ConfigurationError, match=f"column 'v' is {name}.*declare it string"):
            make(StructType([StructField("v", kind)]))


def test_many_small_journals_are_read_by_few_tasks(tmp_path: Path):
    for number in range(200):
        content = frame(number, 1, 160)
        store_fragment(tmp_path, fragment_of(f"a/part-{number:03}", 0, content), content)
    for isolation in ("committed", "uncommitted"):
        reader = GazetteBatchReader(options_of(tmp_path, isolation=isolation), N)
        tasks = reader.partitions()
        assert len(tasks) == 17
        rows = list(rows_of(reader, tasks))
        assert [row["n"] for row in rows] == list(range(200))
        assert [row["_journal"] for row in rows] == [f"a/part-{at:03}" for at in range(200)]


@pytest.mark.parametrize("isolation", ["committed", "uncommitted"])
def test_records_that_are_too_long_are_corrupt_ones(
    tmp_path: Path, isolation: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Framing, "frame_bytes_max", 200)
    content = GOOD[0] + b'{"n":3,"pad":"%b"}\n' % (b"x" * (1 << 20)) + GOOD[1]
    store_fragment(tmp_path, fragment_of("a/part", 0, content), content)
    rows = batch_rows(tmp_path, CORRUPT, isolation=isolation, mode="PERMISSIVE")
    assert sorted(row["n"] for row in rows if row["n"]) == [1, 2]
    (corrupt,) = [row for row in rows if not row["n"]]
    assert corrupt["_offset"] == len(GOOD[0])
    assert "a frame of more than 200 bytes" in corrupt["_corrupt_record"]
    dropped = batch_rows(tmp_path, CORRUPT, isolation=isolation, mode="DROPMALFORMED")
    assert [row["n"] for row in dropped] == [1, 2]
    with pytest.raises(OversizedFrameError) as raised:
        batch_rows(tmp_path, CORRUPT, isolation=isolation)
    text = message_of(raised.value)
    assert f"a/part: offset {len(GOOD[0])}: a frame of more than 200 bytes" in text
    assert "mode=PERMISSIVE" in text


def test_errors_of_corrupt_records_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    content = BAD * 50
    store_fragment(tmp_path, fragment_of("a/part", 0, content), content)
    alive: list[weakref.ref[DecodeError]] = []

    def noted(error: DecodeError) -> str:
        alive.append(weakref.ref(error))
        assert sum(each() is not None for each in alive) <= 2
        return "text"

    monkeypatch.setattr(range_read, "_text_of", noted)
    rows = batch_rows(tmp_path, CORRUPT, mode="PERMISSIVE")
    assert [row["_corrupt_record"] for row in rows] == ["text"] * 50


def test_the_column_of_corrupt_records_has_the_name_that_is_asked_for(corrupted: Path):
    schema = StructType([StructField("bad", StringType()), StructField("n", LongType())])
    rows = batch_rows(corrupted, schema, mode="PERMISSIVE", columnNameOfCorruptRecord="bad")
    assert [row["bad"] for row in rows if row["bad"]] == ['{"n": "many"}', "nonsense"]
    assert len(rows) == 4


def test_labels_are_a_column_and_columns_come_as_they_are_asked_for(tmp_path: Path):
    history = History("a/part")
    history.outside(1)
    store_history(tmp_path, history, [1])
    schema = StructType(
        [
            StructField("_labels", MapType(StringType(), StringType())),
            StructField("missing", StringType()),
            StructField("_journal", StringType()),
        ]
    )
    [row] = batch_rows(tmp_path, schema)
    assert row == {"_labels": [], "missing": None, "_journal": "a/part"}
    labels = StructType([StructField("_labels", MapType(StringType(), StringType()))])
    assert len(batch_rows(tmp_path, labels)) == 1


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("_offset", DecimalType(10, 2)),
        ("_time", DoubleType()),
        ("_journal", LongType()),
        ("_labels", StringType()),
        ("_corrupt_record", LongType()),
    ],
)
def test_a_metadata_column_of_another_type_is_refused(corrupted: Path, name: str, kind: DataType):
    schema = StructType([StructField("n", LongType()), StructField(name, kind)])
    with pytest.raises(ConfigurationError, match=r"a/part: a column cannot .*_offset long"):
        batch_rows(corrupted, schema, mode="PERMISSIVE")


def test_a_null_in_a_column_that_is_not_null_is_refused(corrupted: Path, tmp_path: Path):
    required = StructType([StructField("n", LongType(), nullable=False)])
    with pytest.raises(ConfigurationError, match="a/part: column 'n' is NOT NULL"):
        batch_rows(corrupted, required, mode="PERMISSIVE")
    assert [row["n"] for row in batch_rows(corrupted, required, mode="DROPMALFORMED")] == [1, 2]
    content = frame(1, 1, 160) + b'{"day":"2026-01-31"}\n'
    store_fragment(tmp_path / "dates", fragment_of("a/part", 0, content), content)
    dated = StructType([*required, StructField("day", DateType())])
    with pytest.raises(DecodeError, match="column 'n' is not nullable, and the message lacks it"):
        batch_rows(tmp_path / "dates", dated)
    assert [row["n"] for row in batch_rows(tmp_path / "dates", dated, mode="DROPMALFORMED")] == [1]


@pytest.mark.parametrize("isolation", ["committed", "uncommitted"])
@pytest.mark.parametrize("mode", ["FAILFAST", "DROPMALFORMED", "PERMISSIVE"])
def test_acknowledgements_are_no_rows_where_columns_are_not_null(
    tmp_path: Path, isolation: str, mode: str
):
    history = History("a/part")
    for _ in range(3):
        history.pending(1)
        history.pending(1)
        history.ack(1)
    store_history(tmp_path, history, [4, 9])
    tags = ArrayType(StringType(), containsNull=False)
    schema = StructType([StructField("n", LongType(), nullable=False), StructField("tags", tags)])
    rows = batch_rows(tmp_path, schema, isolation=isolation, mode=mode)
    assert [row["n"] for row in rows] == [0, 1, 3, 4, 6, 7]


def test_binary_columns_of_json_are_base64_as_spark_writes_them(tmp_path: Path):
    content = b'{"a":"YWL_","nested":{"b":["YQ==",null]}}\n{"a":null}\n'
    store_fragment(tmp_path, fragment_of("a/part", 0, content), content)
    nested = StructType([StructField("b", ArrayType(BinaryType()))])
    schema = StructType([StructField("a", BinaryType()), StructField("nested", nested)])
    assert batch_rows(tmp_path, schema) == [
        {"a": b"ab\xff", "nested": {"b": [b"a", None]}},
        {"a": None, "nested": None},
    ]


def test_integers_of_more_digits_than_their_decimal_column_are_malformed(tmp_path: Path):
    content = b'{"a":1,"b":[1]}\n{"a":12345,"b":[2]}\n{"a":3,"b":[12345]}\n{"a":999.99}\n'
    store_fragment(tmp_path, fragment_of("a/part", 0, content), content)
    kind = DecimalType(5, 2)
    schema = StructType([StructField("a", kind), StructField("b", ArrayType(kind))])
    assert batch_rows(tmp_path, schema, mode="DROPMALFORMED") == [
        {"a": Decimal("1.00"), "b": [Decimal("1.00")]},
        {"a": Decimal("999.99"), "b": None},
    ]
    with pytest.raises(DecodeError, match=r"a/part: the message at offset 16 .*precision"):
        batch_rows(tmp_path, schema)


# ------------------------------------------------------------------- bad input


@pytest.fixture
def three_fragments(tmp_path: Path) -> Path:
    history = History("a/part")
    for _ in range(30):
        history.outside(1)
    store_history(tmp_path / "store", history, [10, 20, 30], pb.GZIP)
    return tmp_path / "store"


def message_of(error: GazetteError) -> str:
    assert "\n" not in str(error)
    return str(error)


@pytest.mark.parametrize("isolation", ["committed", "uncommitted"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_fragment_that_was_deleted_since_planning_is_named(
    three_fragments: Path, isolation: str, at: int
):
    reader = GazetteBatchReader(options_of(three_fragments, isolation=isolation), N)
    parts = reader.partitions()
    gone = sorted((three_fragments / "a/part").iterdir())[at]
    gone.unlink()
    with pytest.raises(FragmentNotFoundError) as raised:
        list(rows_of(reader, parts))
    text = message_of(raised.value)
    assert "a/part: content of offset" in text
    assert gone.name in text
    assert "load() again" in text


def test_a_corrupted_fragment_is_named(three_fragments: Path):
    reader = GazetteBatchReader(options_of(three_fragments), N)
    parts = reader.partitions()
    bad = sorted((three_fragments / "a/part").iterdir())[1]
    bad.write_bytes(bad.read_bytes()[:-40])
    with pytest.raises(CorruptFragmentError) as raised:
        list(rows_of(reader, parts))
    text = message_of(raised.value)
    assert "a/part" in text
    assert bad.name in text


def test_a_class_that_executors_cannot_import_is_named(
    three_fragments: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    module = tmp_path / "only_on_the_driver.py"
    module.write_text("class Order(dict):\n    pass\n")
    with monkeypatch.context() as driver:
        driver.syspath_prepend(str(tmp_path))
        options = options_of(three_fragments, message="only_on_the_driver:Order")
        reader = GazetteBatchReader(options, N)
        parts = reader.partitions()
    monkeypatch.delitem(sys.modules, "only_on_the_driver")
    with pytest.raises(ConfigurationError) as raised:
        list(rows_of(reader, parts))
    text = message_of(raised.value)
    assert "a/part" in text
    assert "only_on_the_driver:Order" in text
    assert "addPyFile" in text


def test_timestamps_without_a_zone_are_of_the_sessions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    content = b"".join(
        b'{"at":"%s","all":[{"at":"%s"}]}\n' % (text, text)
        for text in (b"2026-07-01T02:00:00", b"2026-07-01 02:00:00.5", b"2026-07-01T00:00:00Z")
    )
    store_fragment(tmp_path, fragment_of("a/part", 0, content), content)
    nested = ArrayType(StructType([StructField("at", TimestampType())]))
    schema = StructType([StructField("at", TimestampType()), StructField("all", nested)])
    times = {}
    for zone in ("Europe/Berlin", "UTC", "GMT+2"):
        monkeypatch.setenv("TZ", zone)
        rows = batch_rows(tmp_path, schema, isolation="uncommitted")
        assert [row["all"] for row in rows] == [[{"at": row["at"]}] for row in rows]
        times[zone] = [row["at"].isoformat() for row in rows]
    two = ["2026-07-01T02:00:00+00:00", "2026-07-01T02:00:00.500000+00:00"]
    none = [each.replace("T02", "T00") for each in two]
    last = "2026-07-01T00:00:00+00:00"
    assert times == {
        "UTC": [*two, last],
        "Europe/Berlin": [*none, last],
        "GMT+2": [*none, last],
    }
    monkeypatch.setenv("TZ", "Mars/Olympus")
    with pytest.raises(ConfigurationError, match=r"'Mars/Olympus' .*spark\.sql\.session\.timeZone"):
        batch_rows(tmp_path, schema, isolation="uncommitted")


def test_a_timestamp_ntz_has_no_zone(tmp_path: Path):
    content = b'{"at":"2026-07-01T02:00:00.1234567"}\n{"at":"2026-07-01T02:00:00Z"}\n'
    store_fragment(tmp_path, fragment_of("a/part", 0, content), content)
    schema = StructType([StructField("at", TimestampNTZType())])
    with pytest.raises(DecodeError, match=r"offset 37 .*has the zone 'Z', and its column has none"):
        batch_rows(tmp_path, schema, isolation="uncommitted")
    [row] = batch_rows(tmp_path, schema, isolation="uncommitted", mode="DROPMALFORMED")
    assert row["at"].isoformat() == "2026-07-01T02:00:00.123456"
