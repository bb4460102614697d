"""Speed of the timers of one shard with a `RocksStore`, and how late they fire on an idle shard.

    python benchmarks/timers.py [--timers 1000000] [--latencies 200] [--json] [--check]

The consumer has one core, the broker and Etcd have another one. Each message sets a timer, all for
one time, which is after all are set. The speed of setting is that after the first transaction, with
the message that sets the timer; that of firing counts from the timers' time until all are
committed. Then single timers fire on the idle shard, at times apart from each other.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import time
import urllib.request

from measure import Figure, add_outputs, percentile, report
from shard_words import LIMIT_S, messages_per_s
from timer_alarms import Alarm, alarms

from gazette_sdk import Journals, Publisher, mapping
from gazette_sdk.shard.application.generator import shard_id
from gazette_sdk.testing import gazette_cluster, run_shards
from gazette_sdk.testing.shards import RunningShards

JOURNAL = "alarms/part-000"
SPEED_MIN = 50_000.0
LATE_MS_MAX = 20.0
BATCH = 20_000
SETTING_S = 60.0
"""Time within which all timers are to be set, before they fire."""
APART_S = 0.05


def fired_count(shards: RunningShards) -> int:
    """Return how many timers have fired in transactions that are complete."""
    with urllib.request.urlopen(
        f"{shards.processes[0].address}/debug/metrics", timeout=LIMIT_S
    ) as response:
        text = response.read().decode()
    found = re.search(r"^gazette_shard_fired_timers_total\{.*\} (\S+)$", text, re.MULTILINE)
    return 0 if found is None else int(float(found[1]))


def publish(publisher: Publisher[Alarm], count: int, at: float) -> int:
    """Publish alarms of one time, and one more, and return their end offset."""
    for begin in range(0, count, BATCH):
        batch = [Alarm(f"alarm-{number}", at) for number in range(begin, min(begin + BATCH, count))]
        publisher.publish_batch(batch).result(timeout=LIMIT_S)
    last = publisher.publish(Alarm(f"alarm-{count}", at))
    last.result(timeout=LIMIT_S)
    return last.end


def speeds(shards: RunningShards, head: int, count: int, at: float) -> tuple[float, float]:
    """Return how many timers a second are set, and how many fire.

    Args:
        shards: the process, which has just started.
        head: end of the messages.
        count: number of timers.
        at: their time.
    """
    set_per_s = messages_per_s(shards, head, count, JOURNAL)
    left_s = at - time.time()
    assert left_s > 0, f"the timers were set {-left_s:.0f} s too late; use fewer"
    time.sleep(left_s)
    while fired_count(shards) < count:
        time.sleep(0.02)
    return set_per_s, count / (time.time() - at)


def late_ms(shards: RunningShards, publisher: Publisher[Alarm], count: int) -> list[float]:
    """Return how late single timers fire on the idle shard."""
    chosen = random.Random(1)
    at = time.time() + 1.0
    measured = []
    for number in range(count):
        at += APART_S * (0.5 + chosen.random())
        measured.append(Alarm(f"measured-{number}", at, is_measured=True))
    publisher.publish_batch(measured).result(timeout=LIMIT_S)
    time.sleep(max(0.0, at - time.time()) + 1.0)
    name = shard_id(alarms.full_name, JOURNAL)
    with urllib.request.urlopen(
        f"{shards.processes[0].address}/late?shard={name}", timeout=LIMIT_S
    ) as response:
        found = json.load(response)
    assert len(found) == count, f"{count - len(found)} timers have not fired"
    return [1e3 * late_s for late_s in found.values()]


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--timers", type=int, default=1_000_000)
    parser.add_argument("--latencies", type=int, default=200)
    add_outputs(parser)
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    with gazette_cluster(1) as cluster:
        transport = cluster.connect()
        Journals(transport=transport).create("alarms", partitions=1, replication=1)
        publisher = Publisher(
            mapping=mapping.direct(JOURNAL), transport=transport, delivery_timeout_s=LIMIT_S
        )
        os.sched_setaffinity(cluster.brokers[0].pid or 0, cores[1:] or cores)
        with publisher:
            at = time.time() + SETTING_S
            head = publish(publisher, options.timers, at)
            with run_shards(alarms, cluster=cluster) as shards:
                os.sched_setaffinity(shards.processes[0].pid, cores[:1])
                setting, firing = speeds(shards, head, options.timers, at)
                late = late_ms(shards, publisher, options.latencies)
    figures = [
        Figure("timers set, with their messages", setting, SPEED_MIN, "1/s", 1.0),
        Figure("timers fired", firing, SPEED_MIN, "1/s", 1.0),
    ]
    for percent, bar in ((50, None), (99, 1.0)):
        name, ms = f"late on an idle shard, p{percent}", percentile(late, percent)
        figures.append(Figure(name, ms, LATE_MS_MAX, "ms", bar, more_is_better=False))
    report(figures, options)


if __name__ == "__main__":
    main()
