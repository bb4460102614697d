"""Cost of an open console for brokers: processor time, and latency of appends.

    python benchmarks/console.py [--journals 1200] [--polls 60] [--seconds 10] [--rounds 5] [--json]
    python benchmarks/console.py --tail 120 [--rate 2000] [--json]

Three brokers in three zones, each in a process of its own, hold all journals with three replicas. A
client makes the calls of the overview as the page does, at its pace. A browser on this machine
would take processor time from the brokers.

Other work of brokers takes more time than the console. So processor time is read at the ends of
short slices: the cost is that of slices with a poll beyond the median of slices without one.

With --tail a browser follows a journal for some seconds: how much memory and processor time its
page takes, and if a message is lost or comes twice. The primary is killed meanwhile, and the tab is
hidden for 35 s. At the default rate 60 s have 120,000 messages. 3600 is an hour.
"""

from __future__ import annotations

import shutil
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


# ---------------------------------------------------------------- a page that follows a journal

RECORD = """
(() => {
  // How often the page adds each message to its rows, by number; readers see no duplicates.
  const times = self.times = new Uint8Array(MOST);
  const { push } = Array.prototype;
  Array.prototype.push = function (...items) {
    const [item] = items;
    if (item && item.state && item.begin !== undefined && item.state !== "duplicate") {
      times[/"number":(\\d+)/.exec(item.text)[1]]++;
    }
    return push.apply(this, items);
  };
})();
"""
COUNT = """(most) => {
  const found = times.subarray(0, most);
  return found.filter((each) => each !== 1).length;
}"""
HIDE = """(hidden) => {
  Object.defineProperty(document, 'hidden', {configurable: true, get: () => hidden});
  document.dispatchEvent(new Event('visibilitychange'));
}"""
FOLLOWED = """
name: orders/part-000
replication: 2
labels: [{name: content-type, value: application/x-ndjson}]
fragment: {length: 16777216, compression_codec: GZIP, stores: ["file:///"], refresh_interval: 30m}
"""
HIDDEN_S = 35.0
HEAP_MB = 60.0


def keep_publishing(address: str, seconds: float, rate: int, count: list[int]) -> None:
    """Publish messages at a rate, and set their number."""
    transport = connect(address)
    try:
        with Publisher(mapping=mapping.direct("orders/part-000"), transport=transport) as publisher:
            began, number = time.monotonic(), 0
            while (spent := time.monotonic() - began) < seconds:
                while number < spent * rate:
                    order = {"number": number, "customer": f"c{number % 997}", "note": "x" * 60}
                    publisher.publish(order)
                    number += 1
                time.sleep(0.02)
            publisher.publish({"number": number, "note": "the last"}).result(120)
            count.append(number + 1)
    finally:
        run(transport.aclose(), 10)


def follow(data: str, seconds: float, rate: int) -> list[Figure]:
    """Follow a journal in a browser; return the figures of its page."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - of the extra dev

    with (
        LocalCluster(data, brokers=3, lease_ttl_s=2, sync_etcd=False) as cluster,
        sync_playwright() as playwright,
    ):
        cluster.apply(FOLLOWED)
        cluster.wait_until_ready()
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.goto(f"{cluster.address}/console/#/journals/orders/part-000?live=1")
        page.get_by_text("Waiting for messages").wait_for()
        primary = page.locator(".summary dd").nth(2).inner_text().partition("/")[2]
        survivor = next(each for each in cluster.brokers if each.name != primary)
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})

        def metric(name: str) -> float:
            found = session.send("Performance.getMetrics")["metrics"]
            return float(next(each["value"] for each in found if each["name"] == name))

        def heap_mb() -> float:
            session.send("HeapProfiler.collectGarbage")
            return metric("JSHeapUsedSize") / 1e6

        page.add_init_script(RECORD.replace("MOST", str(int(1.1 * seconds * rate))))
        page.goto("about:blank")
        page.goto(f"{survivor.address}/console/#/journals/orders/part-000?live=1")
        page.get_by_text("Waiting for messages").wait_for()
        count: list[int] = []
        publishing = threading.Thread(
            target=keep_publishing, args=(survivor.address, seconds, rate, count)
        )
        before, began = metric("TaskDuration"), time.monotonic()
        publishing.start()
        page.wait_for_timeout(seconds / 8 * 1000)
        cluster.broker(primary).kill()
        page.wait_for_timeout(seconds / 8 * 1000)
        page.evaluate(HIDE, True)
        page.wait_for_timeout(HIDDEN_S * 1000)
        page.evaluate(HIDE, False)
        heaps = []
        while publishing.is_alive():
            page.wait_for_timeout(5000)
            heaps.append(heap_mb())
        page.locator(".rows .row").filter(has_text="the last").wait_for(timeout=120_000)
        percent = 100 * (metric("TaskDuration") - before) / (time.monotonic() - began)
        heaps.append(heap_mb())
        wrong = page.evaluate(COUNT, count[0])
        browser.close()
    return [
        Figure("heap, greatest", max(heaps), HEAP_MB, "MB", 1.0, more_is_better=False),
        Figure("heap, at the end", heaps[-1], HEAP_MB, "MB", 1.0, more_is_better=False),
        Figure("processor time", percent, 100.0, "% of a core", None),
        Figure("shown once", count[0] - wrong, count[0], "messages", 1.0),
    ]


def main() -> None:
    """Measure, and print the figures."""
    options = arguments(__doc__ or "", journals=1200, polls=60, seconds=10, tail=0, rate=2000)
    if options.tail:
        with tempfile.TemporaryDirectory(prefix="gazette-bench-") as data:
            report(follow(data, options.tail, options.rate), options)
        return
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
