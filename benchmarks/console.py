"""Cost of an open console for brokers: processor time, and latency of appends.

    python benchmarks/console.py [--journals 1200] [--polls 60] [--seconds 10] [--rounds 5] [--json]

Three brokers in three zones, each in a process of its own, hold all journals with three replicas. A
client makes the calls of the overview as the page does, at its pace. A browser on this machine
would take processor time from the brokers.

Other work of brokers takes more time than the console. So processor time is read at the ends of
short slices: the cost is that of slices with a poll beyond the median of slices without one.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

from measure import Figure, arguments, percentiles_in_turn, report

from gazette_sdk import Publisher, connect, mapping
from gazette_sdk.local_cluster import LocalCluster
from gazette_sdk.transport.loop import run

POLL_S = 3.0
"""Period of the overview: REFRESH_MS of cluster.js."""

SLICES = 5
SETTLE_S = 10.0
CORE_PERCENT_MAX = 1.0
P99_RATIO_MAX = 1.05


def journals(count: int) -> str:
    """Return specs of journals."""
    names = "".join(f"  - name: many/part-{i:04d}\n" for i in range(count))
    return f"""
name: many/
replication: 3
labels: [{{name: content-type, value: application/x-ndjson}}]
fragment:
  length: 16777216
  compression_codec: GZIP
  stores: ["file:///"]
  refresh_interval: 30m
children:
{names}"""


def processor_ns(pid: int) -> int:
    """Return the processor time of a process, to the nanosecond."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            total += int((task / "schedstat").read_text().split()[0])
        except FileNotFoundError:
            continue  # the thread has just ended
    return total


def poll(address: str) -> float:
    """Make the calls of the overview; return how long they took."""
    began = time.monotonic()
    with urlopen(f"{address}/v1/cluster/report", timeout=15) as answer:
        answer.read()
    return time.monotonic() - began


def cores_of_polls(cluster: LocalCluster, polls: int) -> tuple[list[float], float]:
    """Return percents of a core that polls cost each broker, and the median time of a poll.

    Args:
        cluster: the brokers; the first one is asked.
        polls: number of polls.
    """
    pids = [broker.pid for broker in cluster.brokers]
    spent: list[list[tuple[int, ...]]] = [[], []]
    taken = []
    ends = time.monotonic()
    for number in range(polls * SLICES):
        has_poll = number % SLICES == 0
        before = [processor_ns(pid) for pid in pids]
        if has_poll:
            taken.append(poll(cluster.brokers[0].address))
        ends += POLL_S / SLICES
        time.sleep(max(0.0, ends - time.monotonic()))
        after = [processor_ns(pid) for pid in pids]
        spent[has_poll].append(tuple(b - a for a, b in zip(before, after, strict=True)))
    percents = [
        (statistics.median(with_poll) - statistics.median(without)) / (POLL_S * 1e9) * 100
        for without, with_poll in zip(*(zip(*each, strict=True) for each in spent), strict=True)
    ]
    return percents, statistics.median(taken)


@contextmanager
def open_console(address: str) -> Iterator[None]:
    """Poll from another thread, as an open page does."""
    is_closed = threading.Event()

    def keep_polling() -> None:
        while True:
            poll(address)
            if is_closed.wait(POLL_S):
                return

    thread = threading.Thread(target=keep_polling)
    thread.start()
    try:
        yield
    finally:
        is_closed.set()
        thread.join()


def appends(publisher: Publisher, seconds: float) -> Sequence[float]:
    """Append one message after another; return how long each took, in milliseconds."""
    taken = []
    until = time.monotonic() + seconds
    while (began := time.monotonic()) < until:
        publisher.publish({"cents": 1}).result(30)
        taken.append(1000 * (time.monotonic() - began))
    return taken


def main() -> None:
    """Measure, and print the figures."""
    options = arguments(__doc__ or "", journals=1200, polls=60, seconds=10)
    with (
        tempfile.TemporaryDirectory(prefix="gazette-bench-") as data,
        LocalCluster(
            data,
            brokers=3,
            zones=3,
            sync_etcd=False,
            log_level="error",
            arguments=["--broker.limit", str(2 * options.journals)],
        ) as cluster,
    ):
        cluster.apply(journals(options.journals))
        cluster.wait_until_ready()
        time.sleep(SETTLE_S)
        percents, poll_s = cores_of_polls(cluster, options.polls)
        address = cluster.brokers[0].address
        transport = connect(address)
        with Publisher(mapping=mapping.direct("many/part-0000"), transport=transport) as publisher:

            def appends_with_console() -> Sequence[float]:
                with open_console(address):
                    return appends(publisher, options.seconds)

            found = percentiles_in_turn(
                options.rounds,
                [50, 99],
                ours=appends_with_console,
                baseline=lambda: appends(publisher, options.seconds),
            )
        run(transport.aclose(), 10)
    report(
        [
            Figure(
                "broker that is asked", percents[0], 1.0, "% of a core", CORE_PERCENT_MAX, False
            ),
            Figure("other brokers", max(percents[1:]), 1.0, "% of a core", CORE_PERCENT_MAX, False),
            Figure("time of a poll", 1000 * poll_s, 1000 * POLL_S, "ms", None, False),
            Figure("append p50", found["ours"][50], found["baseline"][50], "ms", None, False),
            Figure(
                "append p99", found["ours"][99], found["baseline"][99], "ms", P99_RATIO_MAX, False
            ),
        ],
        options,
    )


if __name__ == "__main__":
    main()
