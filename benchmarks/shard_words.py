"""Speed of one shard that counts words with a `RocksStore`, and the latency of a single message.

    python benchmarks/shard_words.py [--messages 2000000] [--latencies 200] [--json] [--check]
    scripts/peers words [--quix-messages 500000]    # beside quixstreams over Kafka

The consumer has one core, the broker and Etcd have another one. First the messages are published;
then the consumer starts, and reads all of them. Its speed is that behind its first
transaction. State and position are committed exactly once, with a recovery log.

Then single messages are published to the idle shard. Their latency is the time from the publish
until the shard tells that it has committed and acknowledged the transaction: it has one round trip
more than the transaction itself.

`scripts/peers words` then has quixstreams count such words, exactly once, with state in RocksDB,
from a Kafka that runs already. It has the consumer's core, and Kafka the other ones.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

from measure import Figure, add_outputs, percentile, report
from word_counter import Word, counter

from gazette_sdk import Publisher, mapping
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.shard.consumer.client import ShardClient
from gazette_sdk.testing import gazette_cluster, run_shards
from gazette_sdk.testing.shards import RunningShards
from gazette_sdk.transport import loop as sdk_loop
from gazette_sdk.transport.append.append import append

JOURNAL = "words/part-000"
SPEED_MIN = 100_000.0
LATENCY_MS_MAX = 10.0
QUIX_RATIO_MIN = 5.0
WORDS = 20_000
BATCH = 20_000
LIMIT_S = 300.0

JOURNALS = f"""
name: words/
replication: 1
labels:
  - {{name: content-type, value: application/x-ndjson}}
  - {{name: topic, value: words}}
fragment: {{length: 268435456, compression_codec: NONE, stores: ["file:///"], refresh_interval: 1m}}
children:
  - name: {JOURNAL}
"""


def words(count: int) -> Iterator[list[Word]]:
    """Yield batches of words, whose frequencies are as those of a text."""
    chosen = random.Random(1)
    weights = list(accumulate(1 / (rank + 1) for rank in range(WORDS)))
    for begin in range(0, count, BATCH):
        ranks = chosen.choices(range(WORDS), cum_weights=weights, k=min(BATCH, count - begin))
        yield [Word(f"word-{rank:06d}") for rank in ranks]


class Stats:
    """Progress of the only shard.

    Args:
        shards: its process.
        journal: its source.
    """

    def __init__(self, shards: RunningShards, journal: str = JOURNAL) -> None:
        self._shards = shards
        self._journal = journal
        self._client = ShardClient(shards.processes[0].address)
        (found,) = shards.list_shards()
        self._shard = found.spec.id

    def read_through(self, offset: int = 0) -> int:
        """Return how far the shard has read; wait until it has read through ``offset``."""
        request = cpb.StatRequest(shard=self._shard, read_through={self._journal: offset})
        response = sdk_loop.run(self._client.stat(request), LIMIT_S)
        return int(response.read_through.get(self._journal, 0))

    def close(self) -> None:
        """Disconnect."""
        sdk_loop.run(self._client.aclose(), LIMIT_S)


def messages_per_s(shards: RunningShards, head: int, count: int, journal: str = JOURNAL) -> float:
    """Return how many messages a second the shard reads, behind its first transaction."""
    shards.wait_until(lambda found: bool(found and found[0].status), LIMIT_S)
    stats = Stats(shards, journal)
    while not (first := stats.read_through()):
        time.sleep(0.005)
    assert first < head, "it was read in one transaction: publish more messages"
    began = time.perf_counter()
    stats.read_through(head)
    elapsed_s = time.perf_counter() - began
    stats.close()
    return count * (head - first) / head / elapsed_s


def latencies_ms(shards: RunningShards, publisher: Publisher[Word], count: int) -> list[float]:
    """Return the latency of single messages to an idle shard."""
    stats = Stats(shards)
    found = []
    for _ in range(count):
        began = time.perf_counter()
        receipt = publisher.publish(Word("once"))
        receipt.result(timeout=LIMIT_S)
        stats.read_through(receipt.end)
        found.append(1e3 * (time.perf_counter() - began))
    stats.close()
    return found


def quix_messages_per_s(python: str, kafka_pid: int, count: int) -> float:
    """Return how many words a second quixstreams counts.

    Args:
        python: interpreter of the environment that has quixstreams.
        kafka_pid: process of Kafka.
        count: number of words.
    """
    cores = sorted(os.sched_getaffinity(0))
    for thread in Path(f"/proc/{kafka_pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores[1:] or cores)
    with tempfile.NamedTemporaryFile("w") as text:
        text.writelines(f"{word.word}\n" for batch in words(count) for word in batch)
        text.flush()
        program = Path(__file__).parent / "peers" / "quix_words.py"
        ran = subprocess.run(
            [python, str(program), text.name], check=True, capture_output=True, text=True
        )
    return count / float(ran.stdout.split()[-1])


def options_of_command() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--messages", type=int, default=2_000_000)
    parser.add_argument("--latencies", type=int, default=200)
    parser.add_argument("--quix", default="", help="Python with quixstreams; empty to leave it out")
    parser.add_argument("--kafka-pid", type=int, default=0, help="process of Kafka")
    parser.add_argument("--quix-messages", type=int, default=500_000)
    add_outputs(parser)
    return parser.parse_args()


def main() -> None:
    """Measure, and print a table."""
    options = options_of_command()
    cores = sorted(os.sched_getaffinity(0))
    with gazette_cluster(1) as cluster:
        cluster.apply(JOURNALS)
        publisher = Publisher(
            mapping=mapping.direct(JOURNAL), transport=cluster.connect(), delivery_timeout_s=LIMIT_S
        )
        with publisher:
            for batch in words(options.messages):
                publisher.publish_batch(batch).result(timeout=LIMIT_S)
            transport = cluster.connect()
            barrier = append(transport, pb.AppendRequest(journal=JOURNAL), [])
            head = sdk_loop.run(barrier, LIMIT_S).commit.end
            sdk_loop.run(transport.aclose(), LIMIT_S)
            os.sched_setaffinity(cluster.brokers[0].pid or 0, cores[1:] or cores)
            with run_shards(counter, cluster=cluster) as shards:
                os.sched_setaffinity(shards.processes[0].pid, cores[:1])
                speed = messages_per_s(shards, head, options.messages)
                taken = latencies_ms(shards, publisher, options.latencies)
    figures = [Figure("messages counted, exactly once", speed, SPEED_MIN, "1/s", 1.0)]
    for percent, bar in ((50, 1.0), (99, None)):
        name, ms = f"a message to an idle shard, p{percent}", percentile(taken, percent)
        figures.append(Figure(name, ms, LATENCY_MS_MAX, "ms", bar, more_is_better=False))
    if options.quix:
        peer = quix_messages_per_s(options.quix, options.kafka_pid, options.quix_messages)
        figures.append(Figure("the same, quixstreams", speed, peer, "1/s", QUIX_RATIO_MIN))
    report(figures, options)


if __name__ == "__main__":
    main()
