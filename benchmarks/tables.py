"""Speed of the join of one shard with a table of a `RocksStore`, and the take-over by a standby.

    python benchmarks/tables.py [--keys 1000000] [--rides 1000000] [--json] [--check]

The consumer has one core, the broker and Etcd have another one. The table is read first; then the
process starts again, and reads rides, each of a driver of the table. The speed is that after the
first transaction. At last a standby, which has the table, takes over from the process that is
killed: the time until it has read one more ride.
"""

from __future__ import annotations

import argparse
import os
import time

from measure import Figure, add_outputs, report
from shard_words import LIMIT_S, messages_per_s
from table_rides import Driver, Ride, rides

from gazette_sdk import Journals, Publisher, mapping
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.testing import gazette_cluster, run_shards
from gazette_sdk.testing.shards import RunningShards

RIDES, DRIVERS = "rides/part-000", "drivers/part-000"
RIDES_MIN = 100_000.0
TAKE_OVER_S_MAX = 2.0
BATCH = 20_000
STRIDE = 7919
"""Distance of the drivers of two rides: far from each other in the table."""


def publish(publisher: Publisher[Driver | Ride], messages: list[Driver | Ride]) -> int:
    """Publish messages, and return the end offset."""
    for begin in range(0, len(messages) - 1, BATCH):
        batch = messages[begin : min(begin + BATCH, len(messages) - 1)]
        publisher.publish_batch(batch).result(timeout=LIMIT_S)
    last = publisher.publish(messages[-1])
    last.result(timeout=LIMIT_S)
    return last.end


def take_over_s(shards: RunningShards, publisher: Publisher[Ride]) -> float:
    """Kill the primary once the other process is a standby; return the time to read one ride."""
    shards.start(1)
    shards.wait_until(
        lambda found: (
            {status.code for status in found[0].status}
            == {cpb.ReplicaStatus.PRIMARY, cpb.ReplicaStatus.STANDBY}
        ),
        LIMIT_S,
    )
    time.sleep(1.0)
    shards.crash(0)
    began = time.perf_counter()
    publisher.publish(Ride("driver-0", 1)).result(timeout=LIMIT_S)
    shards.wait_caught_up(LIMIT_S)
    return time.perf_counter() - began


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--rides", type=int, default=1_000_000)
    add_outputs(parser)
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    with gazette_cluster(1) as cluster:
        transport = cluster.connect()
        for topic in ("rides", "drivers"):
            Journals(transport=transport).create(topic, partitions=1, replication=1)
        os.sched_setaffinity(cluster.brokers[0].pid or 0, cores[1:] or cores)
        with (
            Publisher(
                mapping=mapping.direct(DRIVERS), transport=transport, delivery_timeout_s=LIMIT_S
            ) as drivers,
            Publisher(
                mapping=mapping.direct(RIDES), transport=transport, delivery_timeout_s=LIMIT_S
            ) as publisher,
        ):
            names = [f"driver-{number}" for number in range(options.keys)]
            publish(drivers, [Driver(name, f"car of {name}") for name in names])
            with run_shards(rides, processes=2, cluster=cluster) as shards:
                shards.crash(1)
                shards.wait_caught_up(LIMIT_S)
                shards.crash(0)
                chosen = (names[number * STRIDE % len(names)] for number in range(options.rides))
                head = publish(publisher, [Ride(name, 250) for name in chosen])
                shards.start(0)
                os.sched_setaffinity(shards.processes[0].pid, cores[:1])
                joined = messages_per_s(shards, head, options.rides, RIDES)
                take_over = take_over_s(shards, publisher)
    report(
        [
            Figure("rides joined", joined, RIDES_MIN, "1/s", 1.0),
            Figure("take-over", take_over, TAKE_OVER_S_MAX, "s", 1.0, more_is_better=False),
        ],
        options,
    )


if __name__ == "__main__":
    main()
