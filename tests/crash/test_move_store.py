"""`kill -9` of `gazctl journals move-store` under publishers and readers.

Three brokers, journals of two replicas. The tool is killed at random moments, and run again. When a
move has ended before its kill, the next one moves the journals on to another store.
"""

from __future__ import annotations

import json
import random
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest

from crash.broker_processes import BrokerProcesses
from gazette_sdk import Publisher, Reader, connect
from gazette_sdk.cli.journals.specs import request_of
from gazette_sdk.errors import ClosedError, GazetteError
from gazette_sdk.fragment.content import open_fragment
from gazette_sdk.fragment.listing import list_stored
from gazette_sdk.fragment.stores import open_store
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import content_path
from gazette_sdk.transport.listing import apply_journals, list_all_fragments, list_journals
from gazette_sdk.transport.loop import run
from gazette_sdk.transport.wire import Target

SEED = 11
NAMES = tuple(f"moving/part-{part:03d}" for part in range(3))
SELECTOR = "topic=moving"
SPECS = """
name: moving/
replication: 2
labels: [{name: topic, value: moving}, {name: content-type, value: application/x-ndjson}]
fragment:
  length: 16384
  compression_codec: GZIP
  stores: ["file:///store-0/"]
  refresh_interval: 2s
children:
""" + "".join(f"  - name: {name}\n" for name in NAMES)

BODY_BYTES = 600
FRAGMENTS_BEFORE = 24
RATE = "1MB/s"
"""Rate of the copies: a move takes some seconds."""

KILL_WITHIN_S = 5.0
"""Longest time from the begin of the work of the tool until it is killed."""

STORES_MAX = 20

TOOL_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 60.0
WAIT_S = 60.0

LEASE_S = 30
"""No broker is killed, and a busy machine must end no lease."""


class Background:
    """A thread that repeats a function until it is stopped. Its failure is raised by `stop`."""

    def __init__(self, call):
        self._call = call
        self._failure = None
        self.stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        try:
            while not self.stopping.is_set():
                self._call()
        except BaseException as error:  # noqa: BLE001 - `check` raises it
            self._failure = error

    def check(self):
        if self._failure is not None:
            raise self._failure

    def stop(self):
        self.stopping.set()
        self._thread.join(STOP_TIMEOUT_S)
        self.check()
        assert not self._thread.is_alive()


class World:
    """Brokers, a publisher, and readers that must never see an error or a gap."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.addresses = list(cluster.urls.values())
        self.root = cluster.directory / "fragments"
        self.chance = random.Random(SEED)
        self.transports = [connect(address) for address in self.addresses]
        self.acknowledged = 0
        self.followed = []
        self.passes = 0
        self._publisher = Publisher(
            mapping=lambda item: NAMES[item["number"] % len(NAMES)], transport=self.transports[0]
        )
        self._follower = Reader(dict, SELECTOR, transport=self.transports[1])
        self.running = []

    def publish(self):
        """Publish a few messages, and wait until they are acknowledged."""
        numbers = range(self.acknowledged, self.acknowledged + 12)
        receipts = [
            self._publisher.publish(
                {"number": number, "body": self.chance.randbytes(BODY_BYTES // 2).hex()}
            )
            for number in numbers
        ]
        for receipt in receipts:
            receipt.result(timeout=STOP_TIMEOUT_S)
        self.acknowledged += len(numbers)
        self.running[0].stopping.wait(0.05)

    def follow(self):
        """Take the messages of a reader that follows the write heads, until it is closed."""
        try:
            for envelope in self._follower:
                self.followed.append(envelope.message["number"])
        except ClosedError:
            if not self.running[1].stopping.is_set():
                raise

    def read(self):
        """Read everything from the beginning, at one of the brokers."""
        least = self.acknowledged
        transport = self.transports[self.passes % len(self.transports)]
        with Reader(dict, SELECTOR, block=False, transport=transport) as reader:
            numbers = [envelope.message["number"] for envelope in reader]
        check_numbers(numbers, least)
        self.passes += 1

    def check(self):
        for each in self.running:
            each.check()

    def end(self):
        """Stop, and check that the following reader has each message once."""
        publisher, follower, reader = self.running
        publisher.stop()
        self._publisher.close()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while len(self.followed) < self.acknowledged:
            follower.check()
            assert time.monotonic() < deadline, f"{len(self.followed)} of {self.acknowledged}"
            time.sleep(0.05)
        reader.stop()
        follower.stopping.set()
        self._follower.close()
        follower.stop()
        check_numbers(self.followed, self.acknowledged)

    def __enter__(self):
        self.running = [Background(self.publish), Background(self.follow), Background(self.read)]
        return self

    def __exit__(self, *_):
        for each in self.running:
            each.stopping.set()
        self._follower.close()
        for each in self.transports:
            run(each.aclose())

    def stored(self, url):
        """The fragments of all journals in a store, by content path."""
        store = open_store(url, file_root=self.root)
        return {
            content_path(each.fragment): each for name in NAMES for each in list_stored(store, name)
        }

    def stores(self):
        found = run(list_journals(self.transports[0], SELECTOR))
        return {tuple(each.spec.fragment.stores) for each in found.journals}

    def tool(self, *arguments):
        return subprocess.Popen(
            [sys.executable, "-m", "gazette_sdk.cli.gazctl", "journals", *arguments],
            env={"GAZETTE_ADDRESS": self.addresses[2], "PYTHONPATH": ":".join(sys.path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def move(self, number, *options):
        return self.tool(
            *("move-store", "-l", SELECTOR, "--to", f"file:///store-{number}/", "-o", "json"),
            *("--rate", RATE, "--file-root", str(self.root), *options),
        )


def check_numbers(numbers, least):
    """Each message once: all that were acknowledged, and maybe later ones; in order of each
    journal."""
    twice = [number for number, count in Counter(numbers).items() if count > 1]
    assert not twice, f"read twice: {twice[:5]}"
    missing = set(range(least)) - set(numbers)
    assert not missing, f"acknowledged and not read: {sorted(missing)[:5]} of {least}"
    for part in range(len(NAMES)):
        of_part = [number for number in numbers if number % len(NAMES) == part]
        assert of_part == sorted(of_part)


def until(is_so, what):
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.1)


def create(world):
    request = request_of(SPECS)
    for change in request.changes:
        change.expect_mod_revision = -1

    def is_created():
        try:
            for each in world.transports:
                run(apply_journals(each, request))
        except GazetteError:  # the brokers are starting
            return False
        return True

    until(is_created, "the journals are created")


def run_cluster(directory, kills):
    with BrokerProcesses(directory, count=3, ttl_s=LEASE_S) as cluster:
        world = World(cluster)
        for number in range(STORES_MAX):
            (world.root / f"store-{number}").mkdir()
        create(world)
        with world:
            move_under_kills(world, kills)


def move_under_kills(world, kills):
    until(lambda: len(world.stored(url_of(0))) >= FRAGMENTS_BEFORE, "fragments are stored")
    target, fell = moved_until_killed(world, kills)
    print(f"{kills} kills at stores {dict(fell)}; {target} moves; {world.passes} passes")
    check_moved(world, target)
    passes = world.passes
    until(lambda: world.check() or world.passes > passes + 1, "all is read again")
    world.end()
    for transport in world.transports:
        with Reader(dict, SELECTOR, block=False, transport=transport) as reader:
            numbers = [envelope.message["number"] for envelope in reader]
        check_numbers(numbers, world.acknowledged)


def moved_until_killed(world, kills):
    """Run the tool until it was killed so many times, and then to its end.

    Returns:
        the number of the last store, and which stores journals had at the kills.
    """
    target, fell = 1, Counter()
    begun_at = time.monotonic()
    world.move(target, "--dry-run").communicate(timeout=TOOL_TIMEOUT_S)
    starts_in_s = time.monotonic() - begun_at
    while fell.total() < kills:
        tool = world.move(target)
        try:
            kill_after_s = world.chance.uniform(starts_in_s / 2, starts_in_s + KILL_WITHIN_S)
            _, errors = tool.communicate(timeout=kill_after_s)
        except subprocess.TimeoutExpired:
            fell.update([" or ".join(sorted(map("+".join, world.stores())))])
            tool.kill()
            tool.communicate()
        else:
            assert tool.returncode == 0, errors.decode()
            target += 1
        world.check()
    output, errors = world.move(target).communicate(timeout=TOOL_TIMEOUT_S)
    rows = [json.loads(line) for line in output.splitlines()]
    assert {row["outcome"] for row in rows} <= {"moved", "unchanged"}, errors.decode()
    assert len(rows) == len(NAMES)
    for command in (command for row in rows for command in row["remove"]):
        subprocess.run(shlex.split(command), check=True)
    return target, fell


def check_moved(world, target):
    """Check that the last store has everything, and remove all others."""
    assert world.stores() == {(url_of(target),)}
    found = world.stored(url_of(target))
    store = open_store(url_of(target), file_root=world.root)
    for each in found.values():
        with open_fragment(store, each.fragment, each.fragment.begin) as reader:
            assert reader.readall(), "its SHA-1 is compared at its end"
    for number in range(target):
        assert set(world.stored(url_of(number))) <= set(found)
    until(lambda: used(world) <= {url_of(target)}, "no broker reads other stores")
    for number in range(target):
        shutil.rmtree(world.root / f"store-{number}")


def used(world):
    """The stores that the indexes of all brokers name."""

    async def ask():
        urls = set()
        for journal in (await list_journals(world.transports[0], SELECTOR)).journals:
            for member in journal.route.members:
                request = pb.FragmentsRequest(journal=journal.spec.name, do_not_proxy=True)
                target = Target(journal.route, member)
                answer = await list_all_fragments(world.transports[0], request, target)
                urls |= {each.spec.backing_store for each in answer.fragments} - {""}
        return urls

    return run(ask())


def url_of(number):
    return f"file:///store-{number}/"


@pytest.mark.timeout(240)
def test_a_move_that_is_killed_loses_nothing(tmp_path):
    run_cluster(tmp_path, 3)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_move_that_is_killed_ten_times_loses_nothing(tmp_path):
    run_cluster(tmp_path, 10)
