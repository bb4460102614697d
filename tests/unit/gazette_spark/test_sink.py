"""Tasks of the sink, without Spark: how long they wait for brokers, and how they fail."""

from __future__ import annotations

import asyncio

import pyarrow as pa
import pytest
from pyspark.sql import types as st

from gazette_sdk import Reader
from gazette_sdk.errors import (
    ConfigurationError,
    DeadlineExceededError,
    MappingError,
    UnavailableError,
    ValidationError,
)
from gazette_spark import planning, sink
from gazette_spark.sink import GazetteBatchWriter, PreparedCommit, TaskTransaction
from gazette_spark.write_options import WriteOptions
from support.memory_transport import MemoryTransport

SCHEMA = st.StructType([st.StructField("n", st.LongType())])
STREAM = TaskTransaction("gazette-spark/transactions/a-query", 3, "")


class Restarting(MemoryTransport):
    """A cluster whose brokers do not answer the first listings, or freeze."""

    failures = 0
    is_frozen = False

    async def list(self, request):
        if self.is_frozen:
            await asyncio.Event().wait()
        if self.failures:
            self.failures -= 1
            raise UnavailableError("cannot connect to the brokers")
        async for response in super().list(request):
            yield response


@pytest.fixture
def transport(monkeypatch) -> Restarting:
    made = Restarting()
    made.create("a/target", topic="target")
    monkeypatch.setattr(sink, "open_transport", lambda _url: made)
    monkeypatch.setattr(sink, "open_transport", lambda _url: made)
    monkeypatch.setattr(sink, "_idle", {})
    return made


def write(transaction: TaskTransaction, *numbers: int | None) -> PreparedCommit:
    options = WriteOptions.parse({"journals": "topic=target", "key": "n"}, SCHEMA, is_stream=True)
    batch = pa.record_batch({"n": pa.array(numbers or (1, 2), pa.int64())})
    return sink._write(options, transaction, iter([batch]))


def test_a_task_waits_for_brokers_that_are_started_again(transport):
    transport.failures = 3
    assert write(STREAM).rows == 2
    assert transport.content_of("a/target").count(b"\n") == 2


def test_a_task_gives_up_brokers_that_do_not_come_back_and_says_which(transport, monkeypatch):
    monkeypatch.setattr(planning, "FAILING_MAX_S", 0.1)
    transport.failures = 1000
    with pytest.raises(UnavailableError, match="cannot connect to the brokers"):
        write(STREAM)
    assert transport.closed


def test_no_write_waits_for_frozen_brokers_without_end(transport, monkeypatch):
    monkeypatch.setattr(sink, "ANSWER_MAX_S", 0.05)
    monkeypatch.setattr(planning, "FAILING_MAX_S", 0.1)
    transport.is_frozen = True
    with pytest.raises(DeadlineExceededError, match="did not answer within"):
        write(STREAM)
    options = WriteOptions.parse({"journals": "topic=target"}, SCHEMA, is_stream=False)
    with pytest.raises(DeadlineExceededError, match="did not answer within"):
        GazetteBatchWriter(options)


def test_a_batch_write_without_brokers_fails_before_its_tasks(transport):
    transport.failures = 1
    options = WriteOptions.parse({"journals": "topic=target"}, SCHEMA, is_stream=False)
    with pytest.raises(UnavailableError, match="cannot connect to the brokers"):
        GazetteBatchWriter(options)


def test_the_error_of_a_row_without_a_key_names_the_column(transport):
    with pytest.raises(MappingError, match=r"message 1 of the batch: .*the key is the column 'n'"):
        write(STREAM, 1, None)


def test_what_json_cannot_hold_is_refused_by_its_column(transport):
    fields = [st.StructField("x", st.DoubleType()), st.StructField("UUID", st.StringType())]
    options = {"journals": "topic=target"}
    with pytest.raises(
        ConfigurationError, match=r"column 'UUID' cannot .*a/target.*rename or drop"
    ):
        GazetteBatchWriter(WriteOptions.parse(options, st.StructType(fields), is_stream=False))
    parsed = WriteOptions.parse(options, st.StructType(fields[:1]), is_stream=True)
    for value in (float("nan"), float("-inf")):
        batch = pa.record_batch({"x": pa.array([0.5, value])})
        with pytest.raises(ValidationError, match="column 'x' has NaN or an infinite number"):
            sink._write(parsed, STREAM, iter([batch]))
    assert not transport.content_of("a/target")


def test_csv_journals_hold_what_json_cannot(transport):
    transport.create("a/records", topic="records", content_type="text/csv")
    fields = [st.StructField("x", st.DoubleType()), st.StructField("UUID", st.StringType())]
    options = {"journals": "topic=records"}
    parsed = WriteOptions.parse(options, st.StructType(fields), is_stream=True)
    values = [0.5, float("nan"), float("-inf"), None]
    batch = pa.record_batch({"x": pa.array(values), "UUID": pa.array(["mine"] * 4)})
    sink._write(parsed, STREAM, iter([batch]))
    schema = pa.schema([("x", pa.float64()), ("UUID", pa.string())])
    reader = Reader(list, name="a/records", transport=transport, isolation="uncommitted")
    assert str(pa.table(reader.arrow(schema)).to_pylist()) == str(batch.to_pylist())
