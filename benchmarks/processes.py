"""Speed of two members on one machine beside one: `--processes` of brokers and of consumers.

    python benchmarks/processes.py [--rounds 7] [--appends 24000] [--messages 320000] [--json]

- **appends**: of 200 bytes to eight journals, 64 in flight, by raw connections to the journals'
  primaries, as in `broker_append.py`; the client shares the cores with the brokers
- **messages**: words that four shards count exactly once, each with a `RocksStore` and a recovery
  log, as in `shard_words.py`; one broker, in a process of its own, shares the cores

One and two members run at once, over clusters of their own, and take turns: those whose turn it is
not are idle. Consumers are stopped (SIGSTOP) while the messages of their turn are published, so
that only consuming is measured. The processor time is that of the members, without their parent.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from broker_append import JOURNALS, TOPIC, Client, processor_time_s
from measure import Figure, arguments, report, rounds_of
from peers.gazette import apply, specs_of
from shard_words import words
from word_counter import counter

from gazette_sdk import Publisher, Transport, connect, mapping
from gazette_sdk.cluster.etcd_server import EtcdServer
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.shard.application.generator import shard_id
from gazette_sdk.shard.consumer.client import ShardClient
from gazette_sdk.testing import gazette_cluster
from gazette_sdk.transport import loop as sdk_loop
from gazette_sdk.transport.listing import list_journals

COUNTS = (1, 2)
PARTITIONS = 4
SOURCES = [f"words/part-{number:03}" for number in range(PARTITIONS)]
LEASE_S = 60
LIMIT_S = 120.0
POLL_S = 0.05


class Members:
    """Members of a parent process of `gazette`.

    Args:
        directory: for their files and their log.
        count: number of members.
        arguments: command and options.
    """

    def __init__(self, directory: Path, count: int, *arguments: str) -> None:
        self._log = directory / "log"
        self._count = count
        with self._log.open("wb") as log:
            self._parent = subprocess.Popen(
                [
                    *(sys.executable, "-m", "gazette_sdk.cli.gazette", *arguments),
                    *("--processes", str(count), "--etcd.lease", f"{LEASE_S}s"),
                    *("--log.level", "info", "--log.format", "json"),
                ],
                cwd=directory,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdout=log,
                stderr=log,
            )
        self.addresses: list[str] = []
        self.pids: list[int] = []

    def wait_until_serving(self) -> None:
        """Wait until all serve; note their addresses and their process ids."""
        deadline = time.monotonic() + LIMIT_S
        while len(self.pids) < self._count:
            assert self._parent.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(POLL_S)
            lines = [line for line in self._log.read_text().splitlines() if line.startswith("{")]
            records = [json.loads(line) for line in lines if line.endswith("}")]
            serving = [record for record in records if record["msg"].startswith("serving")]
            self.addresses = [record["endpoint"] for record in serving]
            if len(serving) == self._count:
                started = [record for record in records if record["msg"].startswith("started ")]
                self.pids = [record["pid"] for record in started] or [self._parent.pid]

    def spent_s(self) -> float:
        """Return the processor time that they have used."""
        return sum(map(processor_time_s, self.pids))

    def signal(self, number: signal.Signals) -> None:
        """Send them a signal."""
        for pid in self.pids:
            os.kill(pid, number)

    def close(self) -> None:
        """End them at once."""
        self._parent.send_signal(signal.SIGQUIT)
        self._parent.wait(LIMIT_S)


@contextmanager
def members(directory: Path, count: int, *arguments: str) -> Iterator[Members]:
    """Run members."""
    found = Members(directory, count, *arguments)
    try:
        found.wait_until_serving()
        yield found
    finally:
        found.close()


# ------------------------------------------------------------------------- brokers


def appending(stack: ExitStack, count: int) -> Callable[[int], tuple[float, float]]:
    """Start brokers; return what measures appends per second, and processor time for each."""
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gazette-bench-")))
    etcd = EtcdServer(directory / "etcd", sync_writes=False)
    etcd.start_blocking()
    stack.callback(etcd.stop_blocking)
    (directory / "fragments").mkdir()
    arguments_ = (
        *("serve", "--broker.id", "broker", "--broker.host", "localhost"),
        *("--broker.file-root", str(directory / "fragments")),
        *("--broker.spool-dir", str(directory / "spools"), "--etcd.address", etcd.endpoint),
    )
    brokers = stack.enter_context(members(directory, count, *arguments_))
    transport = connect(brokers.addresses[0])
    stack.callback(lambda: sdk_loop.run(transport.aclose(), LIMIT_S))
    apply(transport, specs_of(TOPIC, JOURNALS))
    addresses = sdk_loop.run(primaries(transport, count), LIMIT_S)

    def measured(appends: int) -> tuple[float, float]:
        client = Client(*addresses)
        before, begun = brokers.spent_s(), time.perf_counter()
        client.many_in_flight(appends)
        elapsed_s = time.perf_counter() - begun
        client.close()
        return appends / elapsed_s, (brokers.spent_s() - before) / appends * 1e6

    return measured


async def primaries(transport: Transport, count: int) -> list[str]:
    """Return the address of each journal's primary, once the brokers share them evenly."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            listed = (await list_journals(transport, f"topic={TOPIC}")).journals
            found = {
                each.spec.name: each.route.endpoints[each.route.primary]
                for each in listed
                if each.route.primary >= 0
            }
            shares = Counter(found.values())
            if len(found) == JOURNALS and set(shares.values()) == {JOURNALS // count}:
                return [found[name] for name in sorted(found)]
            await asyncio.sleep(POLL_S)


# ----------------------------------------------------------------------- consumers


def counting(stack: ExitStack, count: int) -> Callable[[int], tuple[float, float]]:
    """Start consumers; return what measures words per second, and processor time for each."""
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gazette-bench-")))
    cluster = stack.enter_context(gazette_cluster(1, lease_ttl_s=LEASE_S))
    cluster.apply(specs_of("words", PARTITIONS))
    arguments_ = (
        *("run-consumer", "word_counter:counter", "--consumer.id", "consumer"),
        *("--consumer.host", "localhost", "--consumer.directory", str(directory / "state")),
        *("--broker.address", cluster.address, "--etcd.address", cluster.etcd_endpoint),
    )
    publisher = Publisher(transport=cluster.connect())
    stack.enter_context(publisher)
    consumers = stack.enter_context(members(directory, count, *arguments_))
    client = ShardClient(consumers.addresses[0])
    stack.callback(lambda: sdk_loop.run(client.aclose(), LIMIT_S))
    wait_until_shared(client, count)

    def measured(messages: int) -> tuple[float, float]:
        consumers.signal(signal.SIGSTOP)
        try:
            heads = published(publisher, messages)
        finally:
            before, begun = consumers.spent_s(), time.perf_counter()
            consumers.signal(signal.SIGCONT)
        for journal, head in heads.items():
            wait_until_read(client, journal, head)
        elapsed_s = time.perf_counter() - begun
        return messages / elapsed_s, (consumers.spent_s() - before) / messages * 1e6

    return measured


def published(publisher: Publisher, count: int) -> dict[str, int]:
    """Publish words, as many to each journal; return the journals' heads."""
    heads: dict[str, int] = {}
    for journal in SOURCES:
        there = mapping.direct(journal)
        for batch in words(count // PARTITIONS):
            receipt = publisher.publish_batch(batch, mapping=there)
            receipt.result(timeout=LIMIT_S)
            heads[journal] = receipt.landed[journal].end
    return heads


def wait_until_shared(client: ShardClient, count: int) -> None:
    """Wait until all shards read, and the consumers share them evenly."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        shards = sdk_loop.run(client.list(), LIMIT_S).shards
        primaries_ = [
            each.route.members[each.route.primary].suffix
            for each in shards
            if each.route.primary >= 0
            and each.status[each.route.primary].code == cpb.ReplicaStatus.PRIMARY
        ]
        if sorted(Counter(primaries_).values()) == [PARTITIONS // count] * count:
            return
        assert time.monotonic() < deadline, shards
        time.sleep(POLL_S)


def wait_until_read(client: ShardClient, journal: str, head: int) -> None:
    """Wait until the shard of a journal has committed what it has read up to an offset."""
    shard = shard_id(counter.full_name, journal)
    request = cpb.StatRequest(shard=shard, read_through={journal: head})
    response = sdk_loop.run(client.stat(request), LIMIT_S)
    assert response.status == cpb.OK, response


# ---------------------------------------------------------------------------- main


def main() -> None:
    """Measure, and print a table."""
    options = arguments(__doc__ or "", rounds=7, appends=24_000, messages=320_000)
    figures = []
    for name, start, amount in (
        ("append", appending, options.appends),
        ("message", counting, options.messages),
    ):
        with ExitStack() as stack:
            runs = {str(count): partial(start(stack, count), amount) for count in COUNTS}
            found = rounds_of(options.rounds, runs)
        (one, one_us), (two, two_us) = (
            map(statistics.median, zip(*found[str(count)], strict=True)) for count in COUNTS
        )
        figures += [
            Figure(f"{name}s, two processes, one = baseline", two, one, "1/s", None),
            Figure(
                f"processor time per {name}, two processes, one = baseline",
                two_us,
                one_us,
                "µs",
                None,
                more_is_better=False,
            ),
        ]
    report(figures, options)


if __name__ == "__main__":
    main()
