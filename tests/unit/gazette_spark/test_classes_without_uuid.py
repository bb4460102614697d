"""Protobuf classes without a field of the UUID: read as uncommitted, else one clear error."""

from pathlib import Path

import pytest
from pyspark.sql.types import StructType

from gazette_sdk.errors import ConfigurationError
from gazette_sdk.framing import framing_for
from gazette_spark.options import Options
from gazette_spark.schema import METADATA_FIELDS, fields_of_class
from gazette_spark.write_options import WriteOptions
from support.fragment_files import fragment_of, store_fragment
from support.protobuf_messages import Gram
from support.spark_stores import batch_rows, options_of

MESSAGE = "support.protobuf_messages:NoUuid"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    content = bytearray()
    for count in range(30):
        payload = Gram(uuid=bytes(range(16)), text="one", count=count).SerializeToString()
        framing_for("application/x-protobuf-fixed").encode(payload, content)
    store_fragment(tmp_path, fragment_of("a/part", 0, bytes(content)), bytes(content))
    return tmp_path


def test_their_messages_are_rows_of_an_uncommitted_read(store: Path):
    schema = StructType([*fields_of_class(MESSAGE), *METADATA_FIELDS])
    rows = batch_rows(store, schema, message=MESSAGE, isolation="uncommitted")
    assert [row["count"] for row in rows] == list(range(30))
    assert {(row["text"], row["_journal"], row["_uuid"], row["_time"]) for row in rows} == {
        ("one", "a/part", None, None)
    }
    assert len({row["_offset"] for row in rows}) == 30


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"isolation": "uncommitted", "begin": "2026-01-31T00:00:00Z"},
        {"isolation": "uncommitted", "end": "2026-01-31T00:00:00Z"},
    ],
    ids=["committed", "begin", "end"],
)
def test_a_read_that_needs_uuids_is_refused_by_its_options(store: Path, options: dict[str, str]):
    with pytest.raises(ConfigurationError) as raised:
        options_of(store, message=MESSAGE, **options)
    assert f"message '{MESSAGE}': tests.NoUuid can carry no message UUID" in str(raised.value)
    assert "isolation=uncommitted" in str(raised.value)


def test_a_write_is_refused_by_its_options():
    given = {"journals": "topic=grams", "message": MESSAGE}
    schema = StructType(fields_of_class(MESSAGE))
    with pytest.raises(ConfigurationError, match="give it a field `bytes uuid`"):
        WriteOptions.parse(given, schema, is_stream=False)


def test_other_classes_need_no_isolation(store: Path):
    options: Options = options_of(store, message="support.protobuf_messages:Gram")
    assert options.content_type == "application/x-protobuf-fixed"
