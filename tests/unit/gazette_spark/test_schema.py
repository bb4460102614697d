"""Schemas of classes of messages, and of samples of JSON messages."""

import datetime as dt
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pydantic
import pytest
from pyspark.sql.types import StructType

from gazette_sdk import JsonMessage
from gazette_sdk.errors import ConfigurationError
from gazette_sdk.fragment.content import CoverSet
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport import loop as sdk_loop
from gazette_spark.planning import JournalContent, list_content
from gazette_spark.schema import fields_of_class, fields_of_messages, sample_of
from gazette_spark.source import GazetteDataSource
from support.fragment_files import fragment_of, store_fragment
from support.spark_stores import options_of, store_history
from support.written_messages import History


@dataclass
class Order(JsonMessage):
    customer: str
    cents: int
    paid: bool = False
    tags: list[str] = field(default_factory=list)
    at: dt.datetime | None = None


class Place(msgspec.Struct):
    latitude: float
    longitude: float


class Visit(msgspec.Struct):
    UUID: str
    place: Place
    visitors: dict[str, int]


class Payment(pydantic.BaseModel):
    UUID: str = ""
    cents: int
    note: str | None = None


class Odd(pydantic.BaseModel):
    UUID: str = ""
    anything: object


def text_of(message: type) -> str:
    fields = fields_of_class(f"{message.__module__}:{message.__qualname__}")
    return StructType(fields).simpleString()


def test_the_columns_of_a_class_are_its_fields():
    assert text_of(Order) == (
        "struct<customer:string,cents:bigint,paid:boolean,tags:array<string>,at:timestamp>"
    )
    assert text_of(Visit) == (
        "struct<place:struct<latitude:double,longitude:double>,visitors:map<string,bigint>>"
    )
    assert text_of(Payment) == "struct<cents:bigint,note:string>"


def test_a_field_without_a_type_is_named():
    with pytest.raises(ConfigurationError, match=r"'anything' of Odd .* has no Arrow type"):
        text_of(Odd)


def test_the_columns_of_a_sample_are_those_that_spark_infers():
    messages = [
        {"UUID": "u", "a": 1, "b": None, "c": [1, 2], "d": {"e": True}},
        {"UUID": "u", "a": 1.5, "c": [], "d": {"f": "x"}, "_offset": 3},
        {"UUID": "u"},
        {"UUID": "u", "g": 1 << 70},
    ]
    assert StructType(fields_of_messages(messages)).simpleString() == (
        "struct<a:double,b:string,c:array<bigint>,d:struct<e:boolean,f:string>,g:double>"
    )


def test_objects_that_are_always_empty_have_no_column():
    messages = [{"a": {}, "b": [{}], "c": {"d": {}, "e": [[{}]]}, "f": {"g": {}, "h": None}}]
    found = StructType(fields_of_messages(messages)).simpleString()
    assert found == "struct<f:struct<h:string>>"


def test_journals_without_content_are_no_sample(tmp_path: Path):
    history = History("a/part")
    history.outside(1)
    store_history(tmp_path, history, [1])
    options = options_of(tmp_path)
    contents = sdk_loop.run(list_content(options))
    empty = JournalContent(pb.JournalSpec(name="a/empty"), 0, CoverSet())
    assert [each["n"] for each in sample_of([*[empty] * 9, *contents], options)] == [0]


def test_values_of_several_types_are_strings_as_spark_infers_them():
    messages = [{"d": {"e": 1}, "f": [1], "g": [1]}, {"d": {"e": "1"}, "f": 2, "g": [{}]}]
    found = StructType(fields_of_messages(messages)).simpleString()
    assert found == "struct<d:struct<e:string>,f:string,g:array<string>>"


def test_a_sample_without_messages_has_no_schema():
    with pytest.raises(ConfigurationError, match="no messages from which a schema"):
        fields_of_messages([])


def schema_of(root: Path, **given: str) -> str:
    source = GazetteDataSource({"store": root.as_uri(), "journals": "a/", **given})
    return source.schema().simpleString()


def test_a_read_without_a_schema_has_that_of_its_messages_and_metadata(tmp_path: Path):
    content = b'{"UUID":"","n":1}\n{"UUID":"","n":2,"m":"x"}\n'
    store_fragment(tmp_path, fragment_of("a/part", 0, content), content)
    metadata = "_journal:string,_offset:bigint,_uuid:string,_time:timestamp>"
    assert schema_of(tmp_path) == f"struct<n:bigint,m:string,{metadata}"
    assert schema_of(tmp_path, mode="PERMISSIVE") == (
        f"struct<n:bigint,m:string,_corrupt_record:string,{metadata}"
    )
    with pytest.raises(ConfigurationError, match="holds no JSON"):
        schema_of(tmp_path, framing="text/csv")


def test_an_older_pyspark_is_one_clear_error():
    program = "import pyspark; pyspark.__version__ = '4.1.2'; import gazette_spark"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert run.stderr.decode().strip().splitlines()[-1] == (
        "gazette_sdk.errors.ConfigurationError: gazette_spark needs PySpark 4.2 or later, and"
        " 4.1.2 is installed: pip install 'pyspark>=4.2'"
    )


def test_planning_a_query_imports_little():
    program = """
import sys
import gazette_spark
assert gazette_spark.GazetteDataSource.name() == "gazette"
assert not {"gazette_sdk.transport", "gazette_sdk.message", "pydantic"} & sys.modules.keys()
import gazette_spark.planning, gazette_spark.planning
assert not {"gazette_sdk.message", "pydantic"} & sys.modules.keys()
from gazette_spark import lag, partition_by_journal, transactions
assert callable(lag) and callable(partition_by_journal) and callable(transactions.complete)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_options_are_checked():
    source = {"store": "file:///nowhere", "journals": "a/"}
    for name, value, problem in [
        ("isolation", "serializable", "isolation 'serializable' is not one of committed"),
        ("mode", "LENIENT", "mode 'LENIENT' is not one of FAILFAST"),
        ("maxBytesPerTrigger", "much", "maxBytesPerTrigger 'much' is no size"),
        ("maxBytesPerTrigger", "0", "maxBytesPerTrigger '0' is no size"),
        ("failOnDataLoss", "perhaps", "failOnDataLoss 'perhaps' is not one of true, false"),
        ("message", "json:dumps", "message 'json:dumps'"),
        ("message", "json:nothing", "module:Class of a class that the driver and all executors"),
    ]:
        with pytest.raises(ConfigurationError, match=problem):
            GazetteDataSource({**source, name: value}).schema()
