"""This tree beside the last release in one cluster, while processes are rolled between them.

Brokers, clients and consumers of both run under a load whose every acknowledged message is read
once, in order. `last-release.txt` names the commit of the last release.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gazette_sdk import Journals, connect
from gazette_sdk.errors import RegisterMismatchError
from gazette_sdk.local_cluster import LocalCluster
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.labels import label_set
from gazette_sdk.transport import loop as sdk_loop
from gazette_sdk.transport.append.append import append
from support.order_totals import PROGRAM, publish, wait_for_totals
from support.releases import (
    ROOT as TREE,
)
from support.releases import (
    NoHistoryError,
    imported_from,
    last_release,
    processes_of,
    unpack,
)
from support.tools import start_tool

CLIENT = Path(__file__).with_name("client_program.py")
TIMEOUT_S = 60.0
BETWEEN = 80
"""Messages of each client that are acknowledged between two steps."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """The tree of the last release."""
    return unpack(last_release(), tmp_path_factory.mktemp("release"))


class Client:
    """A process that publishes to a topic and verifies what it reads.

    Args:
        tree: packages that it imports.
        addresses: of brokers.
        topic: its topic.
        directory: where it runs.
    """

    def __init__(self, tree: Path, addresses: str, topic: str, directory: Path) -> None:
        self._log = directory / f"{topic}.log"
        with processes_of(tree), self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(CLIENT), addresses, topic],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=directory,
            )

    @property
    def acknowledged(self) -> int:
        """Number of acknowledged messages."""
        lines = [each for each in self._text().splitlines() if each.startswith("acknowledged ")]
        return int(lines[-1].split()[1]) if lines else 0

    def _text(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for(self, more: int) -> None:
        """Wait until so many more messages are acknowledged."""
        wanted, deadline = self.acknowledged + more, time.monotonic() + TIMEOUT_S
        while self.acknowledged < wanted:
            assert self.process.poll() is None, self._text()[-3000:]
            assert time.monotonic() < deadline, self._text()[-3000:]
            time.sleep(0.02)

    def verify(self) -> int:
        """End it, and return the number of messages, each of which was read once, in order."""
        self.process.stdin.close()
        assert self.process.wait(TIMEOUT_S) == 0, self._text()[-3000:]
        [last] = self._text().splitlines()[-1:]
        assert last.startswith("verified ")
        return int(last.split()[1])


def registers(transport, journal: str, before: str, after: str) -> None:
    """Append with a precondition on a register, which it changes."""
    request = pb.AppendRequest(journal=journal)
    request.check_registers.include.CopyFrom(label_set(version=before))
    request.union_registers.CopyFrom(label_set(version=after))
    request.subtract_registers.CopyFrom(label_set(version=before))
    sdk_loop.run(append(transport, request, [b"{}\n"]), TIMEOUT_S)


def test_brokers_and_clients_of_both_serve_one_cluster_and_nothing_is_lost(release, tmp_path):
    assert imported_from(release, tmp_path) == release
    assert imported_from(TREE, tmp_path) == TREE
    cluster = LocalCluster(
        tmp_path / "data",
        brokers=3,
        zones=3,
        lease_ttl_s=5.0,
        sync_etcd=False,
        logs=tmp_path / "logs",
        log_level="info",
    )
    with contextlib.ExitStack() as ending:
        with processes_of(release):
            ending.enter_context(cluster)
        addresses = ",".join(broker.address for broker in cluster.brokers)
        transport = connect(addresses)
        ending.callback(lambda: sdk_loop.run(transport.aclose(), TIMEOUT_S))
        journals = Journals(transport=transport)
        for topic in ("by-release", "by-tree", "registers"):
            journals.create(topic, partitions=4, replication=2)
        cluster.wait_until_ready()
        clients = []
        for topic, its_tree in (("by-release", release), ("by-tree", TREE)):
            clients.append(Client(its_tree, addresses, topic, tmp_path))
            ending.callback(clients[-1].process.kill)
        initial = pb.AppendRequest(journal="registers/part-000")
        initial.union_registers.CopyFrom(label_set(version="0"))
        sdk_loop.run(append(transport, initial, [b"{}\n"]), TIMEOUT_S)

        first, second, third = cluster.brokers
        onwards = [(first, TREE), (second, TREE), (third, TREE)]
        back = [(second, release), (third, release)]
        steps = [*onwards, *back]
        for number, (broker, to) in enumerate(steps):
            if broker is third:  # its spools have content then, in files of the other version
                broker.kill()
            else:
                broker.drain()
            with processes_of(to):
                broker.start()
            cluster.wait_until_ready()
            for client in clients:
                client.wait_for(BETWEEN)
            registers(transport, "registers/part-000", str(number), str(number + 1))
            with pytest.raises(RegisterMismatchError):
                registers(transport, "registers/part-000", str(number), "never")
        counts = [client.verify() for client in clients]
        assert all(count >= BETWEEN * len(steps) for count in counts)


def test_consumers_of_both_hand_shards_over_and_each_message_counts_once(
    release, tmp_path, gazette_cluster
):
    cluster = gazette_cluster(1)
    (tmp_path / "orders.py").write_text(PROGRAM)
    journals = Journals(transport=cluster.transport)
    journals.create("orders", partitions=2, replication=1)
    journals.create("totals", partitions=2, replication=1)
    count = 0
    with contextlib.ExitStack() as ending:

        def started(its_tree: Path, name: str) -> subprocess.Popen[bytes]:
            with processes_of(its_tree), (tmp_path / f"{name}.log").open("wb") as log:
                process = start_tool(
                    "gazette_sdk.cli.gazette",
                    [
                        *("run-consumer", "orders:totals", "--consumer.id", name),
                        *("--etcd.address", cluster.etcd_endpoint, "--etcd.lease", "5s"),
                    ],
                    tmp_path,
                    {"GAZETTE_ADDRESS": cluster.address},
                    stdout=log,
                    stderr=log,
                )
            ending.callback(process.wait)
            ending.callback(process.kill)
            return process

        def publish_more() -> None:
            nonlocal count
            publish(cluster.transport, 60)
            count += 60
            wait_for_totals(cluster.transport, count)

        running = started(release, "consumer-0")
        publish_more()
        for number, its_tree in enumerate((TREE, release), 1):
            following = started(its_tree, f"consumer-{number}")
            publish_more()
            running.terminate()
            publish_more()
            assert running.wait(TIMEOUT_S) == 0
            publish_more()
            running = following


def test_a_checkout_without_the_last_release_fails_with_the_remedy(tmp_path):
    with pytest.raises(NoHistoryError, match="git fetch --unshallow"):
        unpack("0" * 40, tmp_path)
