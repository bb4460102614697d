"""Fragment stores in files for tests of the Spark source, and its readers without a session."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes
from pyspark.sql.types import LongType, StringType, StructField, StructType

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_spark.options import Options
from gazette_spark.source import GazetteBatchReader
from gazette_spark.stream import GazetteStreamReader
from support.fragment_files import fragment_of, store_fragment
from support.written_messages import History

N = StructType([StructField("n", LongType()), StructField("_journal", StringType())])
"""Columns of the messages of a History."""


def store_history(root: Path, history: History, stops: Iterable[int], codec: int = pb.NONE) -> None:
    """Write messages of a history as fragments, which end behind so many messages each."""
    ends = [0, *(history.messages[stop - 1].end for stop in stops)]
    for begin, end in itertools.pairwise(ends):
        content = bytes(history.content[begin:end])
        store_fragment(root, fragment_of(history.journal, begin, content, codec), content)


def random_history(chance: random.Random, journal: str, length: int) -> History:
    """Messages of three producers, in and outside of transactions, some of them written twice."""
    history = History(journal)
    while len(history.messages) < length:
        producer = chance.randrange(1, 4)
        kind = chance.random()
        if kind < 0.3:
            history.outside(producer + 10)
        elif kind < 0.75:
            history.pending(producer)
        elif kind < 0.9:
            history.ack(producer)
        else:
            history.retried(chance.choice([producer, producer + 10]), chance.randrange(1, 4))
    return history


def random_stops(chance: random.Random, length: int, count: int) -> list[int]:
    """Draw the ends of the fragments of a history; the last is its own end."""
    return [*sorted(chance.sample(range(1, length), count)), length]


def options_of(root: Path, **given: str) -> Options:
    return Options.parse({"store": root.as_uri(), "journals": "a/", **given})


def batch_rows(root: Path, schema: StructType = N, **given: str) -> list[dict[str, Any]]:
    """Rows of a batch read, task by task."""
    reader = GazetteBatchReader(options_of(root, **given), schema)
    return list(rows_of(reader, reader.partitions()))


def rows_of(
    reader: GazetteBatchReader | GazetteStreamReader, parts: Iterable[Any]
) -> Iterator[dict[str, Any]]:
    for part in parts:
        for batch in reader.read(part):
            yield from batch.to_pylist()


class Stream:
    """Streaming query without a sink: it holds the last offset, as Spark's offset log does."""

    def __init__(self, root: Path, schema: StructType = N, **given: str) -> None:
        self.options, self.schema = options_of(root, **given), schema
        self.reader = GazetteStreamReader(self.options, schema)
        self.offset = json.dumps(self.reader.initialOffset())

    def restart(self) -> None:
        self.reader.stop()
        self.reader = GazetteStreamReader(self.options, self.schema)

    def plan(self) -> tuple[str, str] | None:
        """Offsets of the next micro-batch; None if there is nothing new."""
        limit = self.options.bytes_per_trigger_max
        found = self.reader.latestOffset(
            json.loads(self.offset), ReadMaxBytes(limit) if limit else ReadAllAvailable()
        )
        end = json.dumps(found)
        return None if end == self.offset else (self.offset, end)

    def rows_between(self, start: str, end: str) -> list[dict[str, Any]]:
        parts = self.reader.partitions(json.loads(start), json.loads(end))
        return list(rows_of(self.reader, parts))

    def next_rows(self) -> list[dict[str, Any]]:
        """Rows of the next micro-batch, which there must be."""
        return next(self.micro_batches())

    def micro_batches(self, *, restarts: bool = False) -> Iterator[list[dict[str, Any]]]:
        """Rows of each micro-batch, until there is nothing new.

        With ``restarts`` the query ends before it logs an offset, after that, and before it logs
        that the batch is done. Each time the same is planned and read again.
        """
        while (planned := self.plan()) is not None:
            if restarts:
                self.restart()
                assert self.plan() == planned
                self.restart()
                first = self.rows_between(*planned)
                self.restart()
                assert self.rows_between(*planned) == first
            rows = self.rows_between(*planned)
            self.offset = planned[1]
            yield rows

    def rows(self, *, restarts: bool = False) -> list[dict[str, Any]]:
        return list(itertools.chain.from_iterable(self.micro_batches(restarts=restarts)))
