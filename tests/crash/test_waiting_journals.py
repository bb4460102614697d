"""Journals go on by themselves when brokers that alone have their last bytes are back.

Real brokers over a real etcd, killed with content that no store has. Each test compares all bytes.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from crash.appends import append_over_http, make_content, read_over_http
from gazette_sdk.cluster.child_process import reserve_port
from gazette_sdk.cluster.etcd_server import EtcdServer

TTL_S = 5
LIMIT_S = 60.0
"""Bound of every wait: far above what it takes, for loaded machines."""

STOPPED_S = 10.0
"""Bound of the end of a broker which is told to stop."""


class Cluster:
    """Broker processes over an etcd, each with a spool directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.etcd = EtcdServer(directory / "etcd", sync_writes=False)
        self.brokers: dict[str, subprocess.Popen[bytes]] = {}
        self._ports: dict[str, int] = {}
        (directory / "stores").mkdir(parents=True)

    def __enter__(self) -> Self:
        self.etcd.start_blocking()
        return self

    def __exit__(self, *_: object) -> None:
        for broker in list(self.brokers):
            self.kill(broker)
        self.etcd.stop_blocking()

    def start(self, *brokers: str, spools: str = "") -> None:
        """Start brokers, and wait until they serve."""
        for broker in brokers:
            self._ports[broker] = reserve_port()
            with self._log(broker).open("wb") as log:
                self.brokers[broker] = subprocess.Popen(
                    [
                        *(sys.executable, "-m", "gazette_sdk.cli.gazette", "serve"),
                        *("--broker.id", broker, "--broker.port", str(self._ports[broker])),
                        *("--broker.spool-dir", str(self.directory / f"spools-{spools or broker}")),
                        *("--broker.file-root", str(self.directory / "stores")),
                        *("--etcd.address", self.etcd.endpoint, "--etcd.lease", f"{TTL_S}s"),
                        "--log.level=info",
                    ],
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                )
        for broker in brokers:
            self._await_serving(broker)

    def _await_serving(self, broker: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while b"msg=serving" not in self._log(broker).read_bytes():
            is_running = self.brokers[broker].poll() is None
            assert is_running, self._log(broker).read_text()
            assert time.monotonic() < deadline, self._log(broker).read_text()
            time.sleep(0.02)

    def _log(self, broker: str) -> Path:
        return self.directory / f"{broker}.log"

    def kill(self, *brokers: str) -> None:
        for broker in brokers:
            self.brokers[broker].kill()
        for broker in brokers:
            self.brokers.pop(broker).wait(LIMIT_S)

    def url(self, journal: str) -> str:
        broker = next(iter(self.brokers))
        return f"http://localhost:{self._ports[broker]}/{journal}"

    def gazctl(self, *arguments: str, given: str = "") -> str:
        address = f"http://localhost:{self._ports[next(iter(self.brokers))]}"
        done = subprocess.run(
            [sys.executable, "-m", "gazette_sdk.cli.gazctl", *arguments],
            input=given.encode(),
            env={**os.environ, "GAZETTE_ADDRESS": address},
            capture_output=True,
            check=False,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode()

    def create(self, *journals: str, replication: int) -> None:
        children = "".join(f"  - name: {journal}\n" for journal in sorted(journals))
        specs = f"""
name: a/
replication: {replication}
labels: [{{name: content-type, value: application/octet-stream}}]
fragment: {{length: 1048576, compression_codec: NONE, stores: ["file:///"], refresh_interval: 1s}}
children:
{children}"""
        self.gazctl("journals", "apply", given=specs)

    def append(self, journal: str, content: bytes) -> int:
        """Append once the journal takes it; return the offset. Nothing else may be answered."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            try:
                return append_over_http(self.url(journal), content)
            except urllib.error.HTTPError as error:
                text = error.read().decode()
                assert "INDEX_HAS_GREATER_OFFSET" not in text, text
                assert time.monotonic() < deadline, text
            except OSError:  # the broker ended while it was asked
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.02)

    def refusal(self, journal: str) -> str:
        """Append until the journal waits for a broker; return the answer's text."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            try:
                append_over_http(self.url(journal), b"never acknowledged")
            except urllib.error.HTTPError as error:
                text = error.read().decode()
                if "only brokers that are away" in text:
                    return text
            else:
                raise AssertionError("an append over a route without the holders")
            time.sleep(0.05)
        raise AssertionError("it does not wait")

    def listed(self, journal: str) -> list[str]:
        """Ids of the brokers that a journal waits for, as `gazctl journals list` has them."""
        listing = json.loads(self.gazctl("journals", "list", journal, "-o", "json"))
        waiting = listing["journals"][0].get("waiting") or {"brokers": []}
        return [f"{broker['zone']}/{broker['suffix']}" for broker in waiting["brokers"]]

    def wait_until_synced(self, journal: str) -> None:
        """Wait until Etcd has that the replicas of a journal are synchronized."""
        body = json.dumps(
            {"selector": {"include": {"labels": [{"name": "name", "value": journal}]}}}
        )
        address = self.url("v1/journals/page")
        deadline = time.monotonic() + LIMIT_S
        while True:
            request = urllib.request.Request(address, body.encode(), method="POST")
            with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
                [row] = json.load(answer)["rows"]
            if row.get("state", "JOURNAL_OK") == "JOURNAL_OK":
                return
            assert time.monotonic() < deadline, row
            time.sleep(0.02)

    def content(self, journal: str, length: int) -> bytes:
        """The journal's content once as much as that can be read."""
        deadline = time.monotonic() + LIMIT_S
        content = b""
        while len(content) < length and time.monotonic() < deadline:
            try:
                content = read_over_http(self.url(journal))
            except OSError:
                content = b""
            time.sleep(0.05)
        return content

    def stored(self, journal: str) -> bytes:
        """Return the stored content of a journal, from offset 0 up to the first hole."""
        spans = {}
        for path in (self.directory / "stores" / journal).glob("*"):
            if not path.name.startswith("."):
                begin, end = (int(part, 16) for part in path.name.split("-")[:2])
                spans[begin] = (end, path)
        content = b""
        while len(content) in spans:
            end, path = spans[len(content)]
            content += path.read_bytes()
            assert len(content) == end
        return content


class Journal:
    """A journal, and everything that it acknowledged."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.name = name
        self.content = b""
        self._random = random.Random(name)

    def append(self, count: int = 1) -> None:
        for _ in range(count):
            piece = make_content(self._random, 200)
            assert self.cluster.append(self.name, piece) == len(self.content)
            self.content += piece

    def check(self) -> None:
        assert self.cluster.content(self.name, len(self.content)) == self.content


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as cluster:
        yield cluster


def journals_of(cluster: Cluster, count: int, *, replication: int) -> list[Journal]:
    names = [f"a/journal-{number}" for number in range(count)]
    cluster.create(*names, replication=replication)
    journals = [Journal(cluster, name) for name in names]
    for journal in journals:
        journal.append(3)
    return journals


def go_on(journals: list[Journal]) -> None:
    for journal in journals:
        journal.append(2)
    for journal in journals:
        journal.check()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("ending", ["killed", "without etcd"])
def test_all_brokers_end_and_one_that_has_nothing_is_back_first(cluster, ending):
    cluster.start("broker-1", "broker-2", "broker-3")
    journals = journals_of(cluster, 4, replication=2)
    cluster.start("former")  # it joins when the journals are assigned
    everybody = ("broker-1", "broker-2", "broker-3", "former")
    if ending == "killed":
        cluster.kill(*everybody)
        time.sleep(TTL_S + 1)  # their leases end: nobody revokes them
    else:
        cluster.etcd.stop_blocking()
        for broker in everybody:  # each of them gives up when its lease ends
            assert cluster.brokers[broker].wait(LIMIT_S) != 0
            cluster.kill(broker)
        cluster.etcd.start_blocking()
    cluster.start("former")
    cluster.start("broker-1", "broker-2", "broker-3")
    go_on(journals)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("spools", ["the same id", "another id"])
def test_a_single_replica_is_killed_and_its_disk_comes_back(cluster, spools):
    cluster.start("broker-1")
    journals = journals_of(cluster, 3, replication=1)
    cluster.kill("broker-1")
    cluster.start("broker-2")
    for journal in journals:
        assert "local/broker-1" in cluster.refusal(journal.name)
        assert cluster.listed(journal.name) == ["local/broker-1"]
    if spools == "the same id":
        cluster.start("broker-1")
    else:
        cluster.start("broker-9", spools="broker-1")
    go_on(journals)
    assert [cluster.listed(journal.name) for journal in journals] == [[], [], []]


@pytest.mark.timeout(240)
def test_a_new_journal_without_a_stored_byte_waits_too(cluster):
    cluster.start("broker-1")
    cluster.create("a/new", "a/empty", replication=1)
    journal, empty = Journal(cluster, "a/new"), Journal(cluster, "a/empty")
    for name in (empty.name, journal.name):
        assert cluster.append(name, b"") == 0
        cluster.wait_until_synced(name)  # else its first spool is stored with the change of routes
    journal.append(1)
    assert not (cluster.directory / "stores" / "a").exists()
    cluster.kill("broker-1")
    cluster.start("broker-2")
    cluster.refusal("a/new")
    cluster.start("broker-1")
    go_on([journal, empty])


@pytest.mark.timeout(300)
def test_all_are_killed_and_others_start_over_their_disks(cluster):
    names = ("broker-1", "broker-2", "broker-3", "broker-4")
    cluster.start(*names)
    journals = journals_of(cluster, 8, replication=2)
    cluster.kill(*names)
    time.sleep(TTL_S + 1)
    for name in names:
        cluster.start(f"new-{name}", spools=name)
    go_on(journals)


@pytest.mark.timeout(240)
def test_the_operator_gives_up_what_an_absent_broker_has(cluster):
    cluster.start("broker-1")
    (journal,) = journals_of(cluster, 1, replication=1)
    deadline = time.monotonic() + LIMIT_S
    while not (stored := cluster.stored(journal.name)) and time.monotonic() < deadline:
        time.sleep(0.05)  # the second append closed the first one's fragment
    assert 0 < len(stored) < len(journal.content)
    cluster.kill("broker-1")
    cluster.start("broker-2")
    cluster.refusal(journal.name)
    while (found := cluster.content(journal.name, len(stored))) != stored:
        assert time.monotonic() < deadline + LIMIT_S, found
    cluster.gazctl("journals", "reset-head", journal.name)
    journal.content = stored
    journal.append(2)
    cluster.start("broker-1")
    go_on([journal])


@pytest.mark.timeout(240)
def test_a_lone_broker_that_is_told_to_stop_stores_everything_and_ends(cluster):
    cluster.start("broker-1")
    journals = journals_of(cluster, 4, replication=1)
    process = cluster.brokers["broker-1"]
    told_at = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 0
    assert time.monotonic() - told_at < STOPPED_S
    for journal in journals:
        assert cluster.stored(journal.name) == journal.content
    cluster.brokers.pop("broker-1")

    # Nothing is only on its disk: others go on behind what is stored.
    cluster.start("broker-2")
    assert [cluster.listed(journal.name) for journal in journals] == [[], [], [], []]
    go_on(journals)
