"""``gazctl brokers drain`` against broker processes, which a supervisor starts again."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import threading
import time
from collections import Counter

import pytest

from gazette_sdk import Journals, connect
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Authority, Capability
from gazette_sdk.testing import gazette_cluster as cluster_of_processes
from gazette_sdk.transport import loop as sdk_loop
from support.numbered_load import Load, Tail, numbers_of
from support.tools import start_tool

TIMEOUT_S = 60.0
KEY = "c29tZSBzZWNyZXQgb2YgdGhlIGNsdXN0ZXI="
BYTES_PER_S = 1_000_000
ONE_BY_ONE = ("brokers", "drain", "--one-by-one", "--wait")

pytestmark = pytest.mark.timeout(300)
"""Three processes start twice, one after the other. On a busy machine each start took 40 s."""


class Supervisor:
    """Starts brokers again that end with status 0, as systemd does with ``Restart=always``.

    Attributes:
        statuses: exit statuses of the processes that ended, by name of the broker.
    """

    def __init__(self, brokers) -> None:
        self.statuses: dict[str, list[int]] = {broker.name: [] for broker in brokers}
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._watch, args=(each,)) for each in brokers]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()

    def _watch(self, broker) -> None:
        while not self._stopping.is_set():
            with contextlib.suppress(TimeoutError):
                self.statuses[broker.name].append(broker.wait_until_ended(0.2))
                broker.start(timeout_s=TIMEOUT_S)


@contextlib.contextmanager
def connected(address, **options):
    transport = connect(address, **options)
    try:
        yield transport
    finally:
        sdk_loop.run(transport.aclose(), TIMEOUT_S)


@pytest.fixture
def cluster(gazette_cluster, gazctl):
    """Three brokers in three zones, with four journals of two replicas."""
    running = gazette_cluster(3, zones=3, lease_ttl_s=20)
    gazctl.environ["GAZETTE_ADDRESS"] = running.address
    with connected(running.address) as transport:
        Journals(transport=transport).create("load", partitions=4, replication=2)
    running.wait_until_ready()
    return running


def listed(gazctl, *options):
    """Return the brokers by their ids."""
    shown = gazctl.ok("brokers", "list", "-o", "json", *options)
    return {each["id"]: each for each in json.loads(shown.text)["brokers"]}


def records(text):
    return [json.loads(line) for line in text.splitlines()]


def test_three_brokers_start_again_in_turn_and_no_message_is_lost(cluster, gazctl):
    before = listed(gazctl)
    with (
        connected(cluster.address) as transport,
        connected(cluster.addresses[1]) as reading,
        Supervisor(cluster.brokers) as supervisor,
        Tail(reading) as tail,
        Load(transport, BYTES_PER_S) as load,
    ):
        load.wait_for(200)
        drained = gazctl.ok(*ONE_BY_ONE)
        load.wait_for(200)
        load.end()
        tail.wait_for(load.published)
        assert load.error is None
        assert tail.error is None
        assert tail.counts == Counter(range(load.published)), "each is read once"
        assert numbers_of(reading, load.published) == list(range(load.published))
    assert supervisor.statuses == {f"broker-{number}": [0] for number in range(3)}
    lines = drained.text.splitlines()
    assert [line.split(":")[0] for line in lines] == ["a/broker-0", "b/broker-1", "c/broker-2"]
    version = before["broker-0"]["version"]
    for line in lines:
        assert re.search(rf"drained \d+ replicas?, and is back with version {version} after", line)
    shown = {line.partition(":")[0] for line in drained.stderr.splitlines() if ": it " in line}
    assert {"a/broker-0", "b/broker-1", "c/broker-2"} <= shown, "progress of each"
    after = listed(gazctl)
    for name, broker in after.items():
        assert broker["started"] > before[name]["started"]
        assert broker["state"] == "ok"
    again = gazctl.ok(*ONE_BY_ONE, "--started-before", "10m", "-o", "json")
    assert [each["outcome"] for each in records(again.text)] == ["passed"] * 3


def test_nothing_is_drained_if_the_others_lack_room(cluster, gazctl):
    with connected(cluster.address) as transport:
        Journals(transport=transport).create("wide", partitions=1, replication=3)
    cluster.wait_until_ready()
    before = listed(gazctl)
    for dry_run in ((), ("--dry-run",)):
        refused = gazctl(*ONE_BY_ONE, *dry_run)
        assert refused.status == 1
        assert refused.stderr.startswith(
            "gazctl: a/broker-0 cannot leave, since R = 3 needs 3 other brokers, and there are 2: "
            "start another one; wide/part-000; b/broker-1 cannot leave"
        )
        assert refused.stderr.endswith("nothing was drained\n")
    assert listed(gazctl)["broker-0"]["started"] == before["broker-0"]["started"]
    assert all(each["state"] == "ok" for each in listed(gazctl).values())


def test_a_plan_is_shown_without_a_change(cluster, gazctl):
    shown = gazctl.ok(*ONE_BY_ONE, "--dry-run", "--broker", "c/broker-2", "--broker", "a/broker-0")
    rows = [re.split(r"\s{2,}", line) for line in shown.text.splitlines()]
    assert rows[0] == ["BROKER", "VERSION", "STARTED", "REPLICAS", "PRIMARIES", "STEP"]
    assert [(row[0], row[-1]) for row in rows[1:]] == [
        ("c/broker-2", "drain"),
        ("a/broker-0", "drain"),
    ]
    version = listed(gazctl)["broker-0"]["version"]
    as_json = gazctl.ok(*ONE_BY_ONE, "--dry-run", "--to-version", version, "-o", "json")
    assert [each["outcome"] for each in records(as_json.text)] == ["passed"] * 3
    assert {each["text"] for each in records(as_json.text)} == {f"pass over: it runs {version}"}


def test_a_run_that_was_killed_is_continued_to_the_new_version(cluster, gazctl, monkeypatch):
    """Processes that start from now on find another version of the package."""
    installed = cluster.data / "installed" / "gazette_sdk-9.9.9.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: gazette-sdk\nVersion: 9.9.9\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(installed.parent), prepend=":")
    arguments = [*ONE_BY_ONE, "--to-version", "9.9.9"]
    environ = {"GAZETTE_ADDRESS": cluster.address}
    first = cluster.brokers[0]
    with start_tool("gazette_sdk.cli.gazctl", arguments, cluster.data, environ) as killed:
        assert first.wait_until_ended(TIMEOUT_S) == 0
        killed.send_signal(signal.SIGKILL)
        killed.communicate(timeout=TIMEOUT_S)
    first.start()
    with Supervisor(cluster.brokers) as supervisor:
        continued = gazctl.ok(*arguments, "-o", "json")
    assert [(each["id"], each["outcome"]) for each in records(continued.text)] == [
        ("broker-0", "passed"),
        ("broker-1", "restarted"),
        ("broker-2", "restarted"),
    ]
    assert supervisor.statuses == {"broker-0": [], "broker-1": [0], "broker-2": [0]}
    assert {each["version"] for each in listed(gazctl).values()} == {"9.9.9"}


def test_a_broker_of_the_old_version_ends_the_run(cluster, gazctl):
    with Supervisor(cluster.brokers) as supervisor:
        failed = gazctl(*ONE_BY_ONE, "--to-version", "9.9.9")
    assert failed.status == 1
    version = listed(gazctl)["broker-0"]["version"]
    assert (
        f"a/broker-0 is back with version {version}, and not 9.9.9: install that on its host; run "
        "the command again to continue" in failed.stderr
    )
    assert supervisor.statuses == {"broker-0": [0], "broker-1": [], "broker-2": []}


def test_a_broker_that_no_one_starts_again_ends_the_wait(cluster, gazctl):
    gazctl.environ["GAZETTE_ADDRESS"] = cluster.addresses[1]
    late = gazctl(*ONE_BY_ONE, "--wait-timeout", "20s")
    assert late.status == 124
    text = late.stderr.splitlines()[-1]
    assert text.startswith(
        "gazctl: a/broker-0 is not done within 20s (--wait-timeout): it has left, and has not "
        "started again; what supervises its process must start it also after exit status 0, as "
        "systemd does with Restart=always; start it. Then run the command again with "
        "--started-before 2"
    )
    named = gazctl("brokers", "drain", "--broker", "a/broker-0", "--wait")
    assert named.status == 1
    assert "there is no broker a/broker-0 now; there are b/broker-1, c/broker-2" in named.stderr


def test_one_broker_is_asked_and_drains_by_itself(cluster, gazctl):
    asked = gazctl.ok("brokers", "drain", "--broker", "b/broker-1", "-o", "json")
    [record] = records(asked.text)
    assert (record["zone"], record["id"], record["outcome"]) == ("b", "broker-1", "draining")
    assert cluster.broker("broker-1").wait_until_ended(TIMEOUT_S) == 0
    assert "asked to drain" in cluster.broker("broker-1").log.read_text()


def test_a_token_must_allow_changes_of_the_whole_cluster(gazctl):
    options = {"arguments": (f"--broker.auth-keys={KEY}",), "lease_ttl_s": 20}
    with cluster_of_processes(2, **options) as cluster:
        gazctl.environ["GAZETTE_ADDRESS"] = cluster.address
        names = ("brokers", "drain", "--broker", "local/broker-1")

        def with_token(rights, **selector):
            labels = pb.LabelSelector()
            for name, value in selector.items():
                labels.include.labels.add(name=name, value=value)
            token = Authority(KEY).sign(rights, labels, 600, time.time())
            return gazctl(*names, "--broker.auth-token", token)

        deadline = time.monotonic() + TIMEOUT_S
        while len(listed(gazctl, "--broker.auth-keys", KEY)) < 2:
            assert time.monotonic() < deadline
        may_list = Capability.LIST
        assert "missing authorization header" in gazctl(*names).stderr
        assert "lacks the required capability APPLY" in with_token(may_list).stderr
        assert "selector" in with_token(may_list | Capability.APPLY, topic="load").stderr
        assert cluster.broker("broker-1").status is None
        allowed = with_token(may_list | Capability.APPLY)
        assert allowed.status == 0, allowed.stderr
        assert cluster.broker("broker-1").wait_until_ended(TIMEOUT_S) == 0
