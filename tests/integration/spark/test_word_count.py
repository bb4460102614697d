"""The words that Spark counts over all history are those that shards have counted."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple
from urllib.parse import quote
from urllib.request import urlopen

import pytest
from pyspark.sql import SparkSession

from examples.demo.counter import counter
from examples.demo.words import Line
from examples.word_count import counter as word_count_example
from examples.word_count.grams import grams_of
from examples.word_count.word_count_pb2 import NGramCount
from gazette_sdk import Publisher, Reader, mapping
from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.message import PreparedTransaction
from gazette_sdk.shard import Application, EmbeddedConsumer
from gazette_spark.pipelines import word_count

pytest_plugins = ["support.spark"]

TIMEOUT_S = 60.0
TEXTS = [line for text in list(topics.values())[:4] for line in text.splitlines() if line.strip()]
LETTERS = r"\p{L}+"
"""Words of the n-gram example: letters of every alphabet."""

WORDS = """
name: examples/words/
replication: 1
labels: [{name: content-type, value: application/x-ndjson}, {name: topic, value: words}]
fragment: {length: 16384, compression_codec: GZIP, stores: ["file:///"], refresh_interval: 1s}
children: [{name: examples/words/part-000}, {name: examples/words/part-001}]
"""


class Case(NamedTuple):
    """An application that counts words, and how its messages are made and read."""

    specs: str
    prefix: str
    selector: str
    make: Callable[[str], Iterable[Any]]
    key: Callable[[Any], str]
    application: Callable[[], Application]
    path: str
    source: dict[str, str]
    column: str
    word: dict[str, str]


def of_lines() -> Case:
    """Lines of JSON, which the demo's shards split into words."""
    return Case(
        specs=WORDS,
        prefix="examples/words/",
        selector="topic=words",
        make=lambda text: [Line(text[:5], text)],
        key=attrgetter("topic"),
        application=lambda: counter,
        path="/api/words",
        source={},
        column="text",
        word={},
    )


def of_grams() -> Case:
    """Words as messages of protobuf, which the example of n-grams counts."""
    return Case(
        specs=Path("examples/word_count/journals.yaml").read_text(),
        prefix="examples/word-count/deltas/",
        selector=word_count_example.SELECTOR,
        make=lambda text: [NGramCount(n_gram=gram, count=1) for gram in grams_of(text, 1)],
        key=attrgetter("n_gram"),
        application=lambda: word_count_example.Counter(1),
        path="/api/grams",
        source={"message": "examples.word_count.word_count_pb2:NGramCount"},
        column="n_gram",
        word={"word": LETTERS},
    )


class RollBackError(Exception):
    pass


class History:
    """Writer of transactions that commit, roll back and stay open, and of frames written twice."""

    def __init__(self, cluster: EmbeddedCluster, case: Case) -> None:
        self.cluster, self.case = cluster, case
        self.random = random.Random(1)
        by_key = mapping.modulo(case.selector, key=case.key)
        self.publisher = Publisher(mapping=by_key, transport=cluster.transport)
        self.open: list[PreparedTransaction] = []

    def write(self, texts: list[str]) -> None:
        for begin in range(0, len(texts), 10):
            part = texts[begin : begin + 10]
            messages = [each for text in part for each in self.case.make(text)]
            kind = self.random.choice(["outside", "committed", "committed", "rolled back", "open"])
            if kind == "outside":
                self.publisher.publish_batch(messages).result(TIMEOUT_S)
                continue
            with suppress(RollBackError):
                self._transact(messages, kind)
        self.publisher.flush()

    def _transact(self, messages: list[Any], kind: str) -> None:
        with self.publisher.transaction() as transaction:
            for message in messages:
                transaction.publish(message)
            if kind == "rolled back":
                raise RollBackError
            if kind == "open":
                self.open.append(transaction.prepare())

    def repeat(self) -> int:
        """Write frames again, as appends are whose answer was lost; return their number."""
        [example] = self.case.make("a")[:1]
        contents: dict[str, bytes] = {}
        frames: dict[str, bytearray] = defaultdict(bytearray)
        reader = Reader(
            type(example),
            self.case.selector,
            transport=self.cluster.transport,
            isolation="uncommitted",
        )
        chosen = [envelope for envelope in reader if self.random.random() < 0.3]
        for envelope in chosen:
            name = envelope.journal
            if name not in contents:
                url = f"{self.cluster.address}/{quote(name)}?offset=0"
                with urlopen(url, timeout=TIMEOUT_S) as answer:
                    contents[name] = answer.read()
            frames[name] += contents[name][envelope.begin : envelope.end]
        self.publisher.acknowledge({name: bytes(each) for name, each in frames.items()}).result(30)
        return len(chosen)


def count_in_shards(cluster: EmbeddedCluster, case: Case) -> Counter[str]:
    """Let shards go on where they were, and return the counts of all of them."""
    words: Counter[str] = Counter()
    options = {"transport": cluster.transport, "etcd": cluster.etcd_endpoint}
    with EmbeddedConsumer(case.application(), **options) as consumer:
        consumer.wait_caught_up(TIMEOUT_S)
        for each in consumer.list_shards():
            url = f"{consumer.address}{case.path}?shard={quote(each.spec.id)}"
            with urlopen(url, timeout=TIMEOUT_S) as answer:
                for word, count in json.load(answer).items():
                    words[word.lower()] += count
    return words


def rows_of(spark: SparkSession, case: Case, **source: str) -> list[tuple[str, int]]:
    reader = spark.read.format("gazette").options(**source, **case.source)
    messages = reader.schema(f"{case.column} string").load()
    counts = word_count(messages, column=case.column, **case.word)
    return [tuple(row) for row in counts.collect()]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("make", [of_lines, of_grams])
def test_spark_counts_the_words_that_the_shards_count(
    spark: SparkSession, gazette: EmbeddedCluster, make: Callable[[], Case]
):
    case = make()
    gazette.apply(case.specs)
    history = History(gazette, case)
    middle = len(TEXTS) // 2
    history.write(TEXTS[:middle])
    assert history.repeat() > 20
    count_in_shards(gazette, case)
    history.write(TEXTS[middle:])
    assert history.repeat() > 20
    shards = count_in_shards(gazette, case)

    expected = sorted(shards.items(), key=lambda item: (-item[1], item[0]))
    assert len(expected) > 200
    assert len(history.open) > 2
    over_broker = {"address": gazette.address, "journals": case.selector}
    assert rows_of(spark, case, **over_broker) == expected
    every = Counter(dict(rows_of(spark, case, **over_broker, isolation="uncommitted")))
    assert every.total() > shards.total() * 1.5  # repeated, rolled back and open
    history.publisher.close()
    gazette.stop()  # a stop stores what was only local
    stored = {"store": f"file://{gazette.fragments}/", "journals": case.prefix}
    assert rows_of(spark, case, **stored) == expected
