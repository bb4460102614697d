"""`kill -9` of primaries and replicas, with appends in flight that are to run after success.

Three brokers over one Etcd, and a journal of two replicas. What was acknowledged is there, once,
in order; what was told not to have run is not there; and nothing succeeds behind a failure. What
a killed primary recovers may end with appends that no other replica got and of which nobody was
told: it must not come to stand for what was acknowledged there since. ``GAZETTE_KILLS`` asks for
more kills than usual.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from crash.appends import History, append_over_http, make_content, read_over_http
from crash.pipelines import DEPTH_MAX, SIZES, WEIGHTS, Sequence
from gazette_sdk.cluster.broker_keys import BrokerKeySpace, is_consistent
from gazette_sdk.cluster.child_process import reserve_port
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.stream_calls import NOT_RUN
from gazette_sdk.protocol.stream_frames import CONTENT_BYTES_MAX
from support.etcd import EtcdFixture, run
from support.raw_stream import RawStream, append_frames, head_of

KILLS = int(os.environ.get("GAZETTE_KILLS", "4"))
BROKERS = ("broker-1", "broker-2", "broker-3")
ROUNDS = max(1, KILLS // 2)
NAME = "replicated/journal"
CONNECTIONS = 4
SEED = 12
ZONE = "local"
LIMIT_S = 60.0
BACKOFF_S = 0.05
AFTER_SUCCESS = head_of(after_success=True)

JOURNAL = """
name: replicated/journal
replication: 2
labels: [{name: content-type, value: application/x-ndjson}]
fragment:
  length: 262144
  compression_codec: SNAPPY
  stores: ["file:///"]
  refresh_interval: 1s
"""


class Brokers:
    """Processes of one cluster, which can be killed and started again."""

    def __init__(self, etcd: EtcdFixture, directory: Path) -> None:
        self._etcd = etcd
        self._directory = directory
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.addresses = {broker: f"http://localhost:{reserve_port()}" for broker in BROKERS}
        (directory / "fragments").mkdir()

    def start(self, *brokers: str) -> None:
        for broker in brokers:
            port = self.addresses[broker].rpartition(":")[2]
            with (self._directory / f"{broker}.log").open("ab") as log:
                self._processes[broker] = subprocess.Popen(
                    [
                        *(sys.executable, "-m", "gazette_sdk.cli.gazette", "serve"),
                        *(f"--broker.zone={ZONE}", f"--broker.id={broker}"),
                        *(f"--broker.port={port}", f"--etcd.address={self._etcd.address}"),
                        f"--broker.spool-dir={self._directory / broker}",
                        f"--broker.file-root={self._directory / 'fragments'}",
                    ],
                    stdout=log,
                    stderr=log,
                )
        for broker in brokers:
            self._until_ready(broker)

    def _until_ready(self, broker: str) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline_s:
            assert self._processes[broker].poll() is None, self.log(broker)
            try:
                urllib.request.urlopen(f"{self.addresses[broker]}/debug/ready", timeout=5).close()
            except OSError:
                time.sleep(0.02)
            else:
                return
        raise AssertionError(self.log(broker))

    def kill(self, broker: str) -> None:
        self._processes[broker].kill()
        self._processes[broker].wait(LIMIT_S)

    def stop(self) -> None:
        for broker in self._processes:
            self.kill(broker)

    def log(self, broker: str) -> str:
        return (self._directory / f"{broker}.log").read_text()

    def expire(self, broker: str) -> None:
        """Do what Etcd does when the lease of a killed one runs out, without the wait."""

        async def revoke() -> None:
            async with self._etcd.client() as client:
                key = BrokerKeySpace().member_key(ZONE, broker)
                (entry,) = (await client.range(key)).entries
                await client.revoke(entry.lease)

        run(revoke())

    def members(self, journal: str) -> list[str]:
        """Who serves a journal, the primary first; once all replicas agree upon that."""

        async def load() -> BrokerKeySpace:
            async with self._etcd.client() as client:
                keyspace = BrokerKeySpace()
                await keyspace.load(client)
                return keyspace

        deadline_s = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline_s:
            found = run(load()).assignments(journal)
            if len(found) == 2 and is_consistent(found):
                return [entry.suffix for entry in sorted(found, key=lambda entry: entry.slot)]
            time.sleep(0.05)
        raise AssertionError("the replicas never agree")

    def apply(self, specs: str) -> None:
        subprocess.run(
            [sys.executable, "-m", "gazette_sdk.cli.gazctl", "journals", "apply"],
            input=specs.encode(),
            env={**os.environ, "GAZETTE_ADDRESS": self.addresses[BROKERS[0]]},
            check=True,
            timeout=LIMIT_S,
        )


@pytest.fixture
def brokers(etcd: EtcdFixture, tmp_path: Path) -> Iterator[Brokers]:
    brokers = Brokers(etcd, tmp_path)
    try:
        brokers.start(*BROKERS)
        brokers.apply(JOURNAL)
        yield brokers
    finally:
        brokers.stop()


class Chain(threading.Thread):
    """Appends to a journal, each to run after the success of the one before it.

    When one fails, or the connection breaks, the next chain begins over another connection.

    Args:
        addresses: of all brokers.
        journal: appended to.
        history: of the journal.
        lock: of the history.
        chance: where contents come from, and who is connected to.

    Attributes:
        acknowledged: how many appends were.
        ends: how appends ended that were not.
        sequences: what was sent on each connection.
        failure: what must not have happened.
    """

    def __init__(
        self,
        addresses: list[str],
        journal: str,
        history: History,
        lock: threading.Lock,
        chance: random.Random,
    ) -> None:
        super().__init__(daemon=True)
        self.acknowledged = 0
        self.ends: Counter[str] = Counter()
        self.sequences: list[Sequence] = []
        self.failure: BaseException | None = None
        self.stopping = threading.Event()
        self._addresses = addresses
        self._journal = journal
        self._history = history
        self._lock = lock
        self._chance = chance
        self._in_flight: deque[bytes] = deque()
        self._is_broken = False

    def run(self) -> None:
        """See :class:`threading.Thread`."""
        try:
            while not self.stopping.is_set():
                self._connect()
                self.stopping.wait(BACKOFF_S)
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.failure = error

    def _connect(self) -> None:
        """Append over one connection, until something fails."""
        self.sequences.append(Sequence(self._journal, after_success=True))
        self._is_broken = False
        try:
            with RawStream(self._chance.choice(self._addresses)) as stream:
                while not (self._is_broken or self.stopping.is_set()):
                    self._send(stream, self._chance.randint(1, DEPTH_MAX))
                    for _ in range(self._chance.randint(1, len(self._in_flight))):
                        self._take(stream)
                while self._in_flight:
                    self._take(stream)
        except (OSError, EOFError):
            self.ends["connection lost"] += len(self._in_flight)
        with self._lock:
            self._history.unknown += self._in_flight
        self._in_flight.clear()

    def _send(self, stream: RawStream, depth: int) -> None:
        frames: list[bytes] = []
        while len(self._in_flight) < depth:
            content = make_content(self._chance, self._chance.choices(SIZES, WEIGHTS)[0])
            assert len(content) <= CONTENT_BYTES_MAX
            frames += append_frames(self._journal, content, head=AFTER_SUCCESS)
            self.sequences[-1].contents.append(content)
            self._in_flight.append(content)
        stream.send(*frames)

    def _take(self, stream: RawStream) -> None:
        """Take an answer."""
        frames, status = stream.answer()
        content = self._in_flight.popleft()
        if status.code == 0:
            response = pb.AppendResponse.FromString(frames[0].payload)
            if response.status == pb.OK:
                self._note(content, response.commit)
                return
        self._is_broken = True
        with self._lock:
            if status.code == 0 or status.kind == NOT_RUN:
                self._history.given_up.append(content)
                self.ends["not run" if status.code else "refused"] += 1
            else:
                self._history.unknown.append(content)
                self.ends["failed"] += 1

    def _note(self, content: bytes, commit: pb.Fragment) -> None:
        assert not self._is_broken, "a success behind a failure"
        assert commit.end - commit.begin == len(content)
        with self._lock:
            assert commit.begin not in self._history.acknowledged, "one offset was promised twice"
            self._history.acknowledged[commit.begin] = content
        self.acknowledged += 1


class Attack:
    """Appends to the journal, while its replica and its primary are killed in turn.

    Args:
        brokers: of the cluster.
        chance: what is left to it.
    """

    def __init__(self, brokers: Brokers, chance: random.Random) -> None:
        self._history = History()
        self._brokers = brokers
        self._chance = chance
        lock = threading.Lock()
        self.chains = [
            Chain(
                list(brokers.addresses.values()),
                NAME,
                self._history,
                lock,
                random.Random(chance.getrandbits(32)),
            )
            for _ in range(CONNECTIONS)
        ]

    def run(self) -> int:
        """Kill both, again and again, and check. How many appends are there."""
        for chain in self.chains:
            chain.start()
        for _ in range(ROUNDS):
            self._kill(1)
            self._kill(0)
        self._progress(50)
        for chain in self.chains:
            chain.stopping.set()
        for chain in self.chains:
            chain.join(LIMIT_S)
            assert not chain.is_alive()
            assert chain.failure is None, repr(chain.failure)
        return self._check()

    def _kill(self, place: int) -> None:
        """Kill one of the members, at a moment they could not know, and start it again."""
        chance, brokers = self._chance, self._brokers
        self._progress(chance.randint(10, 100))
        victim = brokers.members(NAME)[place]
        time.sleep(chance.random() * 0.05)
        brokers.kill(victim)
        time.sleep(chance.random() * 0.2)
        brokers.expire(victim)
        brokers.start(victim)

    def _progress(self, count: int) -> None:
        """Wait until each of them had so many more appends acknowledged."""
        goals = [chain.acknowledged + count for chain in self.chains]
        deadline_s = time.monotonic() + LIMIT_S
        while any(c.acknowledged < goal for c, goal in zip(self.chains, goals, strict=True)):
            for chain in self.chains:
                assert chain.failure is None, repr(chain.failure)
            assert time.monotonic() < deadline_s, "appends make no progress"
            time.sleep(0.002)

    def _check(self) -> int:
        primary = self._brokers.members(NAME)[0]
        url = f"{self._brokers.addresses[primary]}/{NAME}"
        last = make_content(self._chance, 100)
        begin = append_over_http(url, last)
        self._history.acknowledged[begin] = last
        content = _read(url, begin + len(last))
        self._history.check(content)
        return sum(each.check(content) for chain in self.chains for each in chain.sequences)


def _read(url: str, end: int) -> bytes:
    """The whole content of a journal, as soon as all of it is stored or with who is left."""
    deadline_s = time.monotonic() + LIMIT_S
    while len(content := read_over_http(url)) < end and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert len(content) == end, "content is missing"
    return content


@pytest.mark.slow
@pytest.mark.timeout(120 + 20 * KILLS)
def test_nothing_that_replicas_acknowledged_is_lost_or_out_of_order(brokers: Brokers):
    attack = Attack(brokers, random.Random(SEED))
    there = attack.run()
    sequences = [sequence for chain in attack.chains for sequence in chain.sequences]
    print(
        f"{2 * ROUNDS} kills: {sum(chain.acknowledged for chain in attack.chains)} appends"
        f" acknowledged over {len(sequences)} connections, {there} of"
        f" {sum(len(sequence.contents) for sequence in sequences)} are there;"
        f" {dict(sum((chain.ends for chain in attack.chains), Counter()))}"
    )
