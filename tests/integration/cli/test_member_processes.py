"""``--processes``: members of one machine, each a process, and the parent that starts them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
import urllib.request
from collections import Counter
from pathlib import Path

import pytest

from gazette_sdk import Journals, Publisher, Reader, connect, mapping
from gazette_sdk.cluster.child_process import reserve_port
from gazette_sdk.errors import OffsetNotYetAvailableError
from gazette_sdk.transport import loop as sdk_loop
from support.order_totals import PROGRAM, publish, wait_for_totals
from support.tools import start_tool

GAZETTE = "gazette_sdk.cli.gazette"
TIMEOUT_S = 60.0


class Parent:
    """A parent, with its members' records and its own, all in one file."""

    def __init__(self, directory, arguments, environ):
        self.log = directory / f"log-{time.monotonic_ns()}"
        options = ["--log.level", "info", "--log.format", "json"]
        with self.log.open("wb") as log:
            self.process = start_tool(
                GAZETTE,
                [*arguments, *options],
                directory,
                environ,
                stdout=log,
                stderr=log,
            )

    def records(self, message):
        lines = self.log.read_text().splitlines()
        found = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return [record for record in found if record["msg"].startswith(message)]

    def wait(self, message, count):
        """Wait until there are as many records; return them."""
        deadline = time.monotonic() + TIMEOUT_S
        while len(found := self.records(message)) < count:
            assert time.monotonic() < deadline, self.log.read_text()
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)
        return found

    def serving(self, count):
        """Wait until members have begun to serve; return the newest endpoint of each."""
        return {record["member"]: record["endpoint"] for record in self.wait("serving", count)}

    def pids(self):
        """Process ids of the members, the newest of each."""
        found = self.records("started ")
        return {record["msg"].removeprefix("started "): record["pid"] for record in found}

    def end(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        status = self.process.wait(TIMEOUT_S)
        assert "Traceback" not in self.log.read_text()
        return status


@contextlib.contextmanager
def members(directory, arguments, **environ):
    parent = Parent(directory, arguments, environ)
    try:
        yield parent
    finally:
        parent.process.kill()
        parent.process.wait(TIMEOUT_S)


def ports(count):
    """Return the first of some free ports."""
    while True:
        first = reserve_port()
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for port in range(first + 1, first + count):
                probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


def brokers(etcd, name, directory, *arguments, count, port=None):
    (directory / "fragments").mkdir(exist_ok=True)
    return [
        *("serve", "--processes", str(count), "--broker.id", name),
        *("--broker.port", str(port or ports(count)), "--etcd.address", etcd.address),
        *("--broker.spool-dir", str(directory / "spools")),
        *("--broker.file-root", str(directory / "fragments")),
        *arguments,
    ]


@contextlib.contextmanager
def connected(address):
    transport = connect(address)
    try:
        yield transport
    finally:
        sdk_loop.run(transport.aclose(), TIMEOUT_S)


def publish_numbers(transport, numbers):
    with Publisher(mapping=mapping.modulo("topic=numbers", key=str), transport=transport) as to:
        to.publish_batch([{"n": number} for number in numbers])


def read_numbers(transport):
    """Read all messages, once brokers that took over have listed what others have stored."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            reader = Reader(dict, "topic=numbers", transport=transport)
            return sorted(each.message["n"] for each in reader)
        except OffsetNotYetAvailableError:
            assert time.monotonic() < deadline


def wait_until_gone(pids):
    deadline = time.monotonic() + TIMEOUT_S
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_brokers_of_one_machine_survive_a_kill_of_one_and_end_together(etcd, tmp_path):
    port = ports(3)
    arguments = brokers(etcd, "host", tmp_path, count=3, port=port)
    with members(tmp_path, arguments) as parent:
        endpoints = parent.serving(3)
        assert endpoints == {f"host-{n + 1}": f"http://localhost:{port + n}" for n in range(3)}
        assert {each.name for each in (tmp_path / "spools").iterdir()} == set(endpoints)
        with connected(endpoints["host-1"]) as transport:
            Journals(transport=transport).create("numbers", partitions=4, replication=3)
            publish_numbers(transport, range(100))
            os.kill(parent.pids()["host-2"], signal.SIGKILL)
            [record] = parent.wait("host-2 was ended by SIGKILL", 1)
            assert record["level"] == "error"
            parent.serving(4)
            publish_numbers(transport, range(100, 200))
        # No other broker can take their journals over, and none waits for the others.
        assert parent.end() == 0
    with members(tmp_path, arguments) as parent:
        endpoints = parent.serving(3)
        with connected(endpoints["host-3"]) as transport:
            publish_numbers(transport, range(200, 300))
            assert read_numbers(transport) == list(range(300))
        assert parent.end(signal.SIGQUIT) == 0


def test_a_killed_parent_leaves_no_brokers_and_the_next_one_continues(etcd, tmp_path):
    arguments = brokers(etcd, "host", tmp_path, count=2)
    with members(tmp_path, arguments) as parent:
        endpoints = parent.serving(2)
        with connected(endpoints["host-1"]) as transport:
            Journals(transport=transport).create("numbers", partitions=4, replication=2)
            publish_numbers(transport, range(100))
        parent.process.kill()
        parent.process.wait(TIMEOUT_S)
        wait_until_gone(parent.pids().values())
    with members(tmp_path, arguments) as parent:
        with connected(parent.serving(2)["host-2"]) as transport:
            publish_numbers(transport, range(100, 200))
            assert read_numbers(transport) == list(range(200))
        assert parent.end() == 0


def test_all_brokers_of_a_machine_drain_to_those_of_others(etcd, tmp_path):
    with contextlib.ExitStack() as stack:
        parents = []
        for name in ("left", "right"):
            directory = tmp_path / name
            directory.mkdir()
            arguments = brokers(etcd, name, directory, "--broker.zone", name, count=2)
            arguments += ["--broker.file-root", str(tmp_path)]
            parents.append(stack.enter_context(members(directory, arguments)))
        (leaving, staying) = parents
        leaving.serving(2)
        address = staying.serving(2)["right-1"]
        with connected(address) as transport:
            Journals(transport=transport).create("numbers", partitions=8, replication=2)
            publish_numbers(transport, range(100))
            assert zones_of_replicas(address) == {("left", "right"): 8}
            assert leaving.end() == 0
            assert not leaving.records("no other broker can take the journals over")
            publish_numbers(transport, range(100, 200))
            assert read_numbers(transport) == list(range(200))
            assert zones_of_replicas(address) == {("right", "right"): 8}
        assert staying.end() == 0


def zones_of_replicas(address):
    """Number of journals by the zones of their replicas."""
    selector = {"include": {"labels": [{"name": "topic", "value": "numbers"}]}}
    listed = post(f"{address}/v1/journals/list", {"selector": selector})["result"]["journals"]
    routes = [each["route"]["members"] for each in listed]
    return Counter(tuple(sorted(each["zone"] for each in route)) for route in routes)


def primaries(address):
    """Number of shards by the process that is their primary."""
    listed = post(f"{address}/v1/shards/list", {})["shards"]
    led = [each["route"] for each in listed if each["route"]["primary"] >= 0]
    return Counter(route["members"][route["primary"]]["suffix"] for route in led)


def post(url, request):
    body = json.dumps(request).encode()
    with urllib.request.urlopen(url, body, timeout=TIMEOUT_S) as answer:
        return json.loads(answer.readline())


def test_one_broker_that_is_asked_to_drain_comes_back_while_the_others_serve(etcd, tmp_path):
    arguments = brokers(etcd, "host", tmp_path, count=3)
    with members(tmp_path, arguments) as parent:
        address = parent.serving(3)["host-1"]
        with connected(address) as transport:
            Journals(transport=transport).create("numbers", partitions=4, replication=2)
            publish_numbers(transport, range(100))
            os.kill(parent.pids()["host-3"], signal.SIGTERM)
            parent.wait("host-3 has drained, and is started again", 1)
            parent.serving(4)
            assert read_numbers(transport) == list(range(100))
        assert parent.end() == 0


def test_a_broker_whose_port_is_taken_is_tried_again(etcd, tmp_path):
    port = ports(2)
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", port + 1))
        taken.listen()
        arguments = brokers(etcd, "host", tmp_path, count=2, port=port)
        with members(tmp_path, arguments) as parent:
            assert list(parent.serving(1)) == ["host-1"]
            parent.wait("host-2 ended with status 1; it is started again", 1)
            taken.close()
            assert set(parent.serving(2)) == {"host-1", "host-2"}
            assert parent.end() == 0


def test_options_with_which_no_broker_starts_end_the_parent(etcd, tmp_path):
    arguments = brokers(etcd, "host", tmp_path, "--broker.file-root=/no/such", count=2)
    with members(tmp_path, arguments) as parent:
        assert parent.process.wait(TIMEOUT_S) == 1
        [record] = parent.records("all 2 processes have failed")
        assert record["level"] == "fatal"
        assert "/no/such" in parent.log.read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT])
def test_a_signal_before_the_brokers_serve_ends_them(tmp_path, number):
    arguments = ["serve", "--processes=2", "--etcd.address=http://localhost:1"]
    with members(tmp_path, [*arguments, "--broker.spool-dir=s"]) as parent:
        parent.wait("started ", 2)
        assert parent.end(number) == 0
        wait_until_gone(parent.pids().values())


def test_consumers_of_one_machine_share_shards_and_survive_a_kill_of_one(tmp_path, gazette_cluster):
    cluster = gazette_cluster(1)
    (tmp_path / "orders.py").write_text(PROGRAM)
    journals = Journals(transport=cluster.transport)
    journals.create("orders", partitions=6, replication=1)
    journals.create("totals", partitions=2, replication=1)
    arguments = ["run-consumer", "orders:totals", "--processes", "3", "--consumer.id", "host"]
    arguments += ["--etcd.address", cluster.etcd_endpoint, "--etcd.lease", "2s"]
    environ = {"GAZETTE_ADDRESS": cluster.address}
    with members(tmp_path, arguments, **environ) as parent:
        endpoints = parent.serving(3)
        assert set(endpoints) == {"host-1", "host-2", "host-3"}
        publish(cluster.transport, 300)
        wait_for_totals(cluster.transport, 300)
        deadline = time.monotonic() + TIMEOUT_S
        while (found := primaries(endpoints["host-1"])) != dict.fromkeys(endpoints, 2):
            assert time.monotonic() < deadline, found
            time.sleep(0.1)
        os.kill(parent.pids()["host-2"], signal.SIGKILL)
        publish(cluster.transport, 300)
        wait_for_totals(cluster.transport, 600)
        parent.serving(4)
        assert parent.end() == 0
        wait_until_gone(parent.pids().values())
    with members(tmp_path, arguments, **environ) as parent:
        parent.serving(3)
        publish(cluster.transport, 100)
        parent.process.kill()
        parent.process.wait(TIMEOUT_S)
        wait_until_gone(parent.pids().values())
    with members(tmp_path, arguments, **environ) as parent:
        parent.serving(3)
        wait_for_totals(cluster.transport, 700)
        assert parent.end() == 0
