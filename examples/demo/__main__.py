"""Demo: publish text, count its words in shards, read it with Spark, and compare the counts.

Runs a cluster within this process: a real Etcd and a real broker, whose fragments are plain files
in `demo-data/`. It runs shards, too, and shares them with another process, which is killed. The
exit status is 1 if counts differ.
"""

import json
import logging
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from urllib.request import urlopen

from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from examples.demo.counter import counter
from examples.demo.words import all_lines, count
from gazette_sdk import GazetteError, Publisher, mapping
from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.shard import EmbeddedConsumer
from gazette_spark import GazetteDataSource

DATA = Path("demo-data")
MARK = DATA / "made-by-the-demo"
PARTITIONS = 4
TIMEOUT_S = 60.0

JOURNALS = f"""
name: examples/words/
replication: 1
labels:
  - name: content-type
    value: application/x-ndjson
  - name: topic
    value: words
fragment:
  length: 1048576
  compression_codec: GZIP
  stores: ["file:///"]
  refresh_interval: 10s
children:
{"".join(f"  - name: examples/words/part-{i:03d}{chr(10)}" for i in range(PARTITIONS))}
"""


def main() -> int:
    """Run the demo; return the exit status."""
    logging.getLogger("gazette_sdk").setLevel(logging.ERROR)
    _make_directory()
    expected = count(line.text for line in all_lines())
    with EmbeddedCluster(DATA) as cluster:
        print(f"A cluster runs at {cluster.address}; its data is in {DATA}/.")
        cluster.apply(JOURNALS)
        counted = _count_in_shards(cluster)
    print("\nThe ten most frequent words:")
    for word, occurrences in counted.most_common(10):
        print(f"  {occurrences:>6}  {word}")
    in_files = _count_with_spark()
    agrees = _compare("The shards", counted, expected) & _compare("Spark", in_files, expected)
    return 0 if agrees else 1


def _make_directory() -> None:
    """Make an empty directory. Delete only the directory of an earlier demo."""
    if DATA.exists():
        if not MARK.exists():
            raise GazetteError(f"{DATA}/ exists and was not created by the demo; move it away")
        shutil.rmtree(DATA)
    DATA.mkdir()
    MARK.touch()


def _publish(cluster: EmbeddedCluster) -> None:
    by_topic = mapping.modulo("topic=words", key=attrgetter("topic"))
    begun = time.perf_counter()
    published = 0
    with Publisher(mapping=by_topic, transport=cluster.transport) as publisher:
        for line in all_lines():
            publisher.publish(line)
            published += 1
    elapsed = time.perf_counter() - begun
    print(
        f"Published {published:,} lines of text to {PARTITIONS} journals"
        f" in {elapsed:.1f} s; every one is acknowledged."
    )


def _count_in_shards(cluster: EmbeddedCluster) -> Counter[str]:
    words: Counter[str] = Counter()
    with (
        EmbeddedConsumer(counter, transport=cluster.transport, etcd=cluster.etcd_endpoint) as ours,
        _another_process(cluster) as other,
    ):
        _wait_until_shared(ours)
        _publish(cluster)
        other.kill()
        begun = time.perf_counter()
        ours.wait_caught_up(TIMEOUT_S)
        print(
            f"{PARTITIONS} shards count the words: here, and in a process that was killed. This"
            f" one had taken over and caught up after {time.perf_counter() - begun:.1f} s."
        )
        for each in ours.list_shards():
            with urlopen(f"{ours.address}/api/words?shard={each.spec.id}") as answer:
                words.update(json.load(answer))
    return words


@contextmanager
def _another_process(cluster: EmbeddedCluster) -> Iterator[subprocess.Popen[bytes]]:
    """Run the same application in another process, as on another terminal."""
    command = [
        *(sys.executable, "-m", "gazette_sdk.cli.gazette"),
        *("run-consumer", "examples.demo.counter:counter"),
        *("--broker.address", cluster.address, "--etcd.address", cluster.etcd_endpoint),
        *("--etcd.lease", "2s", "--log.level", "error"),
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


def _wait_until_shared(consumer: EmbeddedConsumer) -> None:
    """Wait until each of two processes has shards."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        routes = [each.route for each in consumer.list_shards()]
        leaders = {route.members[route.primary].suffix for route in routes if route.primary >= 0}
        if len(routes) == PARTITIONS and len(leaders) == 2:
            return
        time.sleep(0.1)
    raise GazetteError(f"two processes do not share the shards after {TIMEOUT_S:g} s")


def _count_with_spark() -> Counter[str]:
    spark = (
        SparkSession.builder.master("local[2]")
        .appName("gazette demo")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "ERROR")
        .config("spark.sql.shuffle.partitions", "2")
        .getOrCreate()
    )
    try:
        spark.dataSource.register(GazetteDataSource)
        words = (
            spark.read.format("gazette")
            .option("store", f"file://{(DATA / 'fragments').resolve()}/")
            .option("journals", "examples/words/")
            .schema("topic string, text string")
            .load()
            .select(f.explode(f.split(f.lower("text"), "[^a-z]+")).alias("word"))
            .where("word != ''")
            .groupBy("word")
            .count()
        )
        counts = Counter({row["word"]: row["count"] for row in words.collect()})
    finally:
        spark.stop()
    files = sorted((DATA / "fragments" / "examples").rglob("*.gz"))
    print(f"\nSpark read the same journals from {len(files)} fragment files, such as\n  {files[0]}")
    return counts


def _compare(reader: str, counted: Counter[str], expected: Counter[str]) -> bool:
    if counted == expected:
        print(f"{reader} counted {counted.total():,} words: the same as a plain Counter.")
        return True
    differing = sorted(word for word in counted | expected if counted[word] != expected[word])
    print(
        f"{reader} counted {counted.total():,} words, a plain Counter {expected.total():,};"
        f" they differ in {len(differing)} words, such as {differing[:5]}",
        file=sys.stderr,
    )
    return False


if __name__ == "__main__":
    try:
        sys.exit(main())
    except GazetteError as error:
        sys.exit(f"demo: {error}")
