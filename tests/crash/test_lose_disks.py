"""Brokers lost with their disks, one after the other, while nothing can be stored.

Four brokers over one Etcd, and a store that fails. After each loss the journal gets a new replica,
which copies what is in no store; then the next broker is lost. What was acknowledged is there,
although none of the brokers that acknowledged it first is left.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from crash.appends import History, append_over_http, make_content
from gazette_sdk.cluster.broker_keys import BrokerKeySpace, is_consistent
from gazette_sdk.cluster.child_process import reserve_port
from support.etcd import EtcdFixture, etcd, etcd_server, run

__all__ = ["etcd", "etcd_server"]

BROKERS = ("broker-1", "broker-2", "broker-3", "broker-4")
ROUNDS = max(1, int(os.environ.get("GAZETTE_KILLS", "6")) // 6)
NAME = "unstored/journal"
ZONE = "local"
LEASE_S = 5
LIMIT_S = 60.0
SEED = 12

JOURNAL = """
name: unstored/journal
replication: {replication}
labels: [{{name: content-type, value: application/x-ndjson}}]
fragment:
  length: 65536
  compression_codec: NONE
  stores: ["file:///there/"]
  refresh_interval: 1s
"""


def wait_until(holds: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline_s, f"not within {LIMIT_S:.0f} s: {what}"
        time.sleep(0.05)


class Brokers:
    """Processes of one cluster, which can be lost with their disks."""

    def __init__(self, etcd: EtcdFixture, directory: Path) -> None:
        self._etcd = etcd
        self._directory = directory
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.addresses = {broker: f"http://localhost:{reserve_port()}" for broker in BROKERS}
        self._store = directory / "fragments" / "there"
        self._store.mkdir(parents=True)
        self._stored = 0  # offset through which it had the journal when it failed

    def start(self, broker: str) -> None:
        port = self.addresses[broker].rpartition(":")[2]
        with (self._directory / f"{broker}.log").open("ab") as log:
            self._processes[broker] = subprocess.Popen(
                [
                    *(sys.executable, "-m", "gazette_sdk.cli.gazette", "serve"),
                    *(f"--broker.zone={ZONE}", f"--broker.id={broker}"),
                    *(f"--broker.port={port}", f"--etcd.address={self._etcd.address}"),
                    f"--etcd.lease={LEASE_S}s",
                    f"--broker.spool-dir={self._directory / broker}",
                    f"--broker.file-root={self._directory / 'fragments'}",
                ],
                stdout=log,
                stderr=log,
            )
        wait_until(lambda: self._is_ready(broker), f"{broker} is ready")

    def _is_ready(self, broker: str) -> bool:
        assert self._processes[broker].poll() is None, self.log(broker)
        return self._get(broker, "debug/ready") is not None

    def _get(self, broker: str, path: str) -> str | None:
        try:
            with urllib.request.urlopen(f"{self.addresses[broker]}/{path}", timeout=5) as answer:
                return str(answer.read().decode())
        except OSError:
            return None

    def log(self, broker: str) -> str:
        return (self._directory / f"{broker}.log").read_text()

    def apply(self, specs: str) -> None:
        subprocess.run(
            [sys.executable, "-m", "gazette_sdk.cli.gazctl", "journals", "apply"],
            input=specs.encode(),
            env={**os.environ, "GAZETTE_ADDRESS": self.addresses[BROKERS[0]]},
            check=True,
            timeout=LIMIT_S,
        )

    def lose(self, broker: str) -> None:
        """Kill a broker and its disk. It joins again later, as a new one."""
        self._processes[broker].kill()
        self._processes[broker].wait(LIMIT_S)
        shutil.rmtree(self._directory / broker)

    def fail_store(self) -> None:
        away = self._store.with_name("away")
        self._store.rename(away)
        ends = [path.name.split("-")[1] for path in away.rglob("*.raw")]
        self._stored = max((int(end, 16) for end in ends), default=0)

    def mend_store(self) -> None:
        self._store.with_name("away").rename(self._store)

    def members(self, replication: int) -> list[str]:
        """Return the journal's brokers, the primary first, if all replicas agree; else none."""

        async def load() -> BrokerKeySpace:
            async with self._etcd.client() as client:
                keyspace = BrokerKeySpace()
                await keyspace.load(client)
                return keyspace

        found = run(load()).assignments(NAME)
        if len(found) != replication or not is_consistent(found):
            return []
        return [entry.suffix for entry in sorted(found, key=lambda entry: entry.slot)]

    def is_safe(self, replication: int) -> bool:
        """Return True if as many brokers as required have all un-stored content again."""
        members = self.members(replication)
        contents = []
        for broker in members:
            metrics = self._get(broker, "debug/metrics") or ""
            if "gazette_unstored_missing_bytes{" in metrics:
                return False
            contents.append(self.content(broker, self._stored))
        return None not in contents and len(set(contents)) == 1

    def content(self, broker: str, offset: int = 0) -> bytes | None:
        """The journal as a broker reads it; None if it cannot."""
        url = f"{self.addresses[broker]}/{NAME}?offset={offset}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                content = answer.read()
                assert isinstance(content, bytes)
                begin = int(answer.headers["Content-Range"].split()[1].split("-")[0])
                return content if begin == offset else None
        except OSError:
            return None

    def stop(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait(LIMIT_S)


class Appender(threading.Thread):
    """Appends over any broker, one after the other."""

    def __init__(self, brokers: Brokers, chance: random.Random) -> None:
        super().__init__(daemon=True)
        self.history = History()
        self.stopping = threading.Event()
        self._urls = [f"{address}/{NAME}" for address in brokers.addresses.values()]
        self._chance = chance

    def run(self) -> None:
        """See :class:`threading.Thread`."""
        while not self.stopping.is_set():
            content = make_content(self._chance, self._chance.randint(100, 20_000))
            try:
                begin = append_over_http(self._chance.choice(self._urls), content, timeout_s=20)
            except OSError:
                self.history.unknown.append(content)
                self.stopping.wait(0.05)
            else:
                self.history.acknowledged[begin] = content
                self.stopping.wait(0.01)

    @property
    def acknowledged(self) -> int:
        return len(self.history.acknowledged)

    def progress(self, count: int) -> None:
        goal = self.acknowledged + count
        wait_until(lambda: self.acknowledged >= goal, f"{count} appends are acknowledged")


@pytest.fixture
def brokers(etcd: EtcdFixture, tmp_path: Path) -> Iterator[Brokers]:
    made = Brokers(etcd, tmp_path)
    try:
        for broker in BROKERS:
            made.start(broker)
        yield made
    finally:
        made.stop()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("replication", [2, 3])
def test_successive_losses_with_time_in_between_lose_nothing(
    brokers: Brokers, replication: int
) -> None:
    chance = random.Random(SEED + replication)
    brokers.apply(JOURNAL.format(replication=replication))
    wait_until(lambda: brokers.members(replication), "the journal has its replicas")
    appender = Appender(brokers, chance)
    appender.start()
    appender.progress(20)
    brokers.fail_store()
    first = brokers.members(replication)
    lost = set()
    try:
        while not lost >= set(first) or len(lost) < ROUNDS:
            appender.progress(30)
            members = brokers.members(replication)
            victim = next((m for m in members if m in first and m not in lost), members[0])
            brokers.lose(victim)
            lost.add(victim)
            appender.progress(10)
            brokers.start(victim)
            appender.stopping.set()  # what the replicas have is compared at rest
            appender.join(LIMIT_S)
            wait_until(lambda: brokers.is_safe(replication), "it is safe again")
            history, appender = appender.history, Appender(brokers, chance)
            appender.history = history
            appender.start()
        appender.progress(10)
    finally:
        appender.stopping.set()
        appender.join(LIMIT_S)
    wait_until(lambda: brokers.is_safe(replication), "it is safe again")
    brokers.mend_store()
    wait_until(lambda: brokers.content(BROKERS[0]), "what was stored can be read")
    content = brokers.content(BROKERS[0])
    assert content is not None
    appender.history.check(content)
    assert appender.acknowledged >= 60
