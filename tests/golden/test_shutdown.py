"""How a broker's process starts and ends, as recorded of another broker.

Real processes, all cases of one broker; those of several are not comparable yet. Texts of logs
are no contract; levels of what ends a process are, and exit statuses, and what open calls see.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gazette_sdk.cluster.child_process import reserve_port
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_messages import KeyValue
from gazette_sdk.cluster.etcd_server import EtcdServer
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.loop import run
from support.golden import TIMEOUT_S, Outcome, RawClient, Stream, etcd_of, spec_of
from support.raw_http import Answer, exchange
from support.vectors import golden

pytestmark = pytest.mark.serial

RECORDED = golden("broker/shutdown.json")
MEMBER = b"/gazette/cluster/members/zone-a#broker-1"
ROOT, ROOT_END = b"/gazette/cluster/", b"/gazette/cluster0"
ITEMS = b"/gazette/cluster/items/"
JOURNALS = ("http/data", "http/other")
TTL_S = 3
ALONE_S = 10.0
"""Bound of the end of the only broker, which stores everything."""

BUSY_S = 4.0
"""What a busy machine may add to a recorded time."""


# ------------------------------------------------------------------ a process


class Process:
    """A broker's process, over an Etcd.

    Args:
        directory: of its files.
        etcd: address of its Etcd.
        port: its port; a free one by default.
        options: further options.
    """

    def __init__(self, directory: Path, etcd: str, *options: str, port: int | None = None) -> None:
        self.port = port or reserve_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        (directory / "fragments").mkdir(exist_ok=True)
        self._log = directory / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "gazette_sdk.cli.gazette", "serve"),
                    *("--broker.zone=zone-a", "--broker.id=broker-1", "--broker.host=127.0.0.1"),
                    *(f"--broker.port={self.port}", f"--broker.spool-dir={directory / 'spools'}"),
                    *(f"--etcd.address={etcd}", f"--etcd.lease={TTL_S}s"),
                    *("--log.format=json", "--log.level=info"),
                    *(options or (f"--broker.file-root={directory / 'fragments'}",)),
                ],
                stdout=subprocess.DEVNULL,
                stderr=log,
            )

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        return self._process.wait(TIMEOUT_S)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def text(self) -> str:
        """What it wrote to standard error."""
        return self._log.read_text()

    def wait_for_log(self, level: str) -> dict[str, Any]:
        """Wait for the first record of a level."""
        ends_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < ends_s:
            for line in self.text.splitlines(keepends=True):
                if line.endswith("\n") and (record := json.loads(line))["level"] == level:
                    return dict(record)
            # A file tells nobody of its growth.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.05)
        raise AssertionError(f"no {level} in {self.text}")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(TIMEOUT_S)


@contextlib.contextmanager
def broker(directory: Path, etcd: str, *options: str, port: int | None = None) -> Iterator[Process]:
    process = Process(directory, etcd, *options, port=port)
    try:
        yield process
    finally:
        process.kill()


@contextlib.contextmanager
def client_of(process: Process) -> Iterator[RawClient]:
    client = RawClient(process.endpoint)
    try:
        yield client
    finally:
        client.close()


def list_all(client: RawClient, **how: Any) -> Outcome:
    return client.call("List", [pb.ListRequest().SerializeToString()], **how)


# ------------------------------------------------------------------ Etcd


def with_etcd(etcd: EtcdServer, use: Callable[[Etcd], Any]) -> Any:
    """Run something with a client of an Etcd."""

    async def scenario() -> Any:
        async with aclosing(await Etcd.connect(etcd.endpoint)) as client:
            return await use(client)

    return run(scenario(), 2 * TIMEOUT_S)


def keys(etcd: EtcdServer) -> list[KeyValue]:
    async def read(client: Etcd) -> list[KeyValue]:
        return list((await client.range(ROOT, ROOT_END)).entries)

    found: list[KeyValue] = with_etcd(etcd, read)
    return found


def wait_for_member(etcd: EtcdServer, is_so: Callable[[KeyValue | None], bool]) -> None:
    """Wait until the member key is as wanted; ``None`` stands for no key."""

    async def until(client: Etcd) -> None:
        found = await client.range(MEMBER)
        if is_so(found.entries[0] if found.entries else None):
            return
        async with aclosing(client.watch(MEMBER, found.header.revision + 1)) as batches:
            async for batch in batches:
                for event in batch.events:
                    if is_so(None if event.is_delete else event.kv):
                        return

    with_etcd(etcd, until)


# ------------------------------------------------------------------ what is seen


@dataclass
class Seen:
    """What came of a case."""

    status: int | None = None
    seconds: float = 0.0
    text: str = ""
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def log(self) -> list[dict[str, Any]]:
        """What it logged."""
        return [json.loads(line) for line in self.text.splitlines()]


def ending(process: Process, begun_s: float, **more: Any) -> Seen:
    status = process.wait()
    return Seen(status, time.monotonic() - begun_s, process.text, more)


def lone_broker_with_journals(directory: Path) -> Seen:
    """SIGTERM: it stores its journals, and ends. The recorded broker served on for ever."""
    with contextlib.ExitStack() as stack:
        etcd = stack.enter_context(etcd_of(directory))
        process = stack.enter_context(broker(directory, etcd.endpoint))
        with client_of(process) as client, ThreadPoolExecutor() as threads:
            make_journals(client)
            watch_request = pb.ListRequest(watch=True).SerializeToString()
            watch = Stream(client, "List", [watch_request], timeout_s=60)
            read_request = pb.ReadRequest(journal=JOURNALS[0], offset=23, block=True)
            read = Stream(client, "Read", [read_request.SerializeToString()], timeout_s=60)
            target = f"/{JOURNALS[0]}?offset=12&block=true"
            get = threads.submit(get_while_it_stops, process, target)
            watch.wait_for(2)
            append(client, JOURNALS[0], b"late\n")
            read.wait_for(2)
            before = keys(etcd)
            process.signal(signal.SIGTERM)
            seen = ending(process, time.monotonic(), before=before)
            outcomes = {"watch": watch.finish(), "read": read.finish(), "get": get.result()}
            seen.more |= outcomes | {"left": keys(etcd)}
            return seen


def make_journals(client: RawClient) -> None:
    request = pb.ApplyRequest()
    for journal in JOURNALS:
        request.changes.add(upsert=spec_of(journal))
    assert client.call("Apply", [request.SerializeToString()]).code == "OK"
    append(client, JOURNALS[1], b"other\n")
    append(client, JOURNALS[0], b"first line\n")
    append(client, JOURNALS[0], b"second line\n")


def append(client: RawClient, journal: str, content: bytes) -> pb.AppendResponse:
    """Append once there is a primary."""
    messages = [
        pb.AppendRequest(journal=journal),
        pb.AppendRequest(content=content),
        pb.AppendRequest(),
    ]
    while True:
        outcome = client.call("Append", [message.SerializeToString() for message in messages])
        response = pb.AppendResponse.FromString(outcome.responses[0])
        if response.status == pb.OK:
            return response
        # Its answer comes once the journal is assigned, which is at a later revision.
        assert response.status in {pb.NO_JOURNAL_PRIMARY_BROKER, pb.INSUFFICIENT_JOURNAL_BROKERS}
        messages[0].min_etcd_revision = response.header.etcd.revision + 1


def get_while_it_stops(process: Process, target: str) -> Answer:
    return run(exchange(process.endpoint, "GET", target, timeout_s=60), 90)


def lone_broker_without_journals(directory: Path) -> Seen:
    with etcd_of(directory) as etcd, broker(directory, etcd.endpoint) as process:
        with client_of(process) as client:
            assert list_all(client).code == "OK"
        begun_s = time.monotonic()
        process.signal(signal.SIGTERM)
        seen = ending(process, begun_s)
        seen.more["left"] = keys(etcd)
        return seen


def port_is_taken(directory: Path) -> Seen:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        begun_s = time.monotonic()
        with broker(directory, "http://127.0.0.1:1", port=port) as process:
            return ending(process, begun_s)


def file_only_without_root(directory: Path) -> Seen:
    begun_s = time.monotonic()
    with broker(directory, "http://127.0.0.1:1", "--broker.file-only") as process:
        return ending(process, begun_s)


def lease_is_revoked(directory: Path) -> Seen:
    with etcd_of(directory) as etcd, broker(directory, etcd.endpoint) as process:
        with client_of(process) as client:
            assert list_all(client).code == "OK"
        (member,) = keys(etcd)
        begun_s = time.monotonic()
        with_etcd(etcd, lambda client: client.revoke(member.lease))
        return ending(process, begun_s)


def etcd_is_killed(directory: Path) -> Seen:
    with contextlib.ExitStack() as stack:
        etcd = stack.enter_context(etcd_of(directory))
        process = stack.enter_context(broker(directory, etcd.endpoint))
        with client_of(process) as client:
            make_journals(client)
        begun_s = time.monotonic()
        run(etcd.stop(), TIMEOUT_S)
        return ending(process, begun_s)


def killed(directory: Path) -> Seen:
    """``kill -9``: the member key goes when the lease ends."""
    with etcd_of(directory) as etcd, broker(directory, etcd.endpoint) as process:
        with client_of(process) as client:
            assert list_all(client).code == "OK"
        begun_s = time.monotonic()
        process.kill()
        wait_for_member(etcd, lambda kv: kv is None)
        return Seen(process.wait(), time.monotonic() - begun_s)


def id_is_taken(directory: Path) -> Seen:
    with etcd_of(directory) as etcd:
        with_etcd(etcd, lambda client: client.put(MEMBER, b"another's"))
        with broker(directory, etcd.endpoint) as process, client_of(process) as client:
            warning = process.wait_for_log("warning")
            with socket.socket() as probe:
                accepts = probe.connect_ex(("127.0.0.1", process.port)) == 0
            listed = list_all(client, timeout_s=1.0)
            running = process.is_running
            begun_s = time.monotonic()
            process.signal(signal.SIGTERM)
            return ending(
                process, begun_s, warning=warning, accepts=accepts, listed=listed, running=running
            )


def etcd_is_unreachable(directory: Path) -> Seen:
    with broker(directory, f"http://127.0.0.1:{reserve_port()}") as process:
        warning = process.wait_for_log("warning")
        running = process.is_running
        begun_s = time.monotonic()
        process.signal(signal.SIGTERM)
        return ending(process, begun_s, warning=warning, running=running)


CASES = (
    lone_broker_with_journals,
    lone_broker_without_journals,
    lease_is_revoked,
    etcd_is_killed,
    killed,
    id_is_taken,
    etcd_is_unreachable,
    port_is_taken,
    file_only_without_root,
)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Seen]]:
    """The cases, of which some run at a time: most of their time is waiting."""
    with ThreadPoolExecutor(3) as threads:
        running: dict[str, Future[Seen]] = {
            case.__name__: threads.submit(case, tmp_path_factory.mktemp(case.__name__))
            for case in CASES
        }
        yield lambda name: running[name].result()


# ------------------------------------------------------------------ tests


def test_a_lone_broker_with_journals_stores_them_and_ends(seen) -> None:
    """The recorded one serves on until its journals are gone, and waits 15 s for the watch then."""
    there = RECORDED["SIGTERM_of_the_only_broker_holding_journals"]
    found = seen("lone_broker_with_journals")
    assert found.status == there["exit"]["code"] == 0
    assert found.seconds < ALONE_S + BUSY_S
    items = [kv for kv in found.more["before"] if kv.key.startswith(ITEMS)]
    assert found.more["left"] == items
    assert found.log[-1]["msg"] == "goodbye"
    assert found.more["watch"].code == "OK"
    assert found.more["read"].code == there["blocked_read_open_meanwhile"]["code"] == "OK"


def test_an_http_read_sees_the_end_as_recorded(seen) -> None:
    there = RECORDED["SIGTERM_of_the_only_broker_holding_journals"]["http_get_open_meanwhile"]
    answer: Answer = seen("lone_broker_with_journals").more["get"]
    assert answer.status_line == there["status_line"]
    assert answer.body.decode() == there["body"]
    assert [list(trailer) for trailer in answer.trailers] == there["trailers"]
    assert answer.complete == there["complete"]


def test_a_lone_broker_without_journals_ends_at_once(seen) -> None:
    there = RECORDED["SIGTERM_of_a_lone_broker_without_journals"]
    found = seen("lone_broker_without_journals")
    assert found.status == there["exit_code"] == 0
    assert found.seconds < there["seconds"] + BUSY_S
    assert found.log[-1]["msg"] == there["log"][-1]["msg"] == "goodbye"
    # Ours also warns of an Etcd that can lose data, as the bundled one is.
    records = [record for record in found.log if "Etcd is version" not in record["msg"]]
    assert {record["level"] for record in records} == {"info"}
    assert {record["level"] for record in RECORDED["start_of_a_broker"]["log"]} == {"info"}
    assert found.more["left"] == []


def test_a_port_that_is_taken_is_fatal(seen) -> None:
    found = seen("port_is_taken")
    assert found.status == RECORDED["port_is_taken"]["exit_code"] == 1
    assert_fatal(found.log)


def test_a_missing_file_root_is_told(seen) -> None:
    """The recorded broker logs it; ours finds it with the options, before there is a log."""
    there = RECORDED["file_only_without_root"]
    found = seen("file_only_without_root")
    assert found.status == there["exit_code"] == 1
    (line,) = found.text.splitlines()
    assert "--broker.file-root" in line


def assert_fatal(log: list[dict[str, Any]]) -> None:
    """The last record says why. What stands in the recorded ones as ``err`` is ours' message."""
    last = log[-1]
    assert last["level"] == "fatal"
    assert {"level", "msg", "time"} <= set(last)


def test_a_lost_lease_ends_the_process(seen) -> None:
    there = RECORDED["lease_revoked_lone_broker"]
    found = seen("lease_is_revoked")
    assert found.status == there["exit_code"] == 1
    assert found.seconds < there["seconds"] + BUSY_S
    assert_fatal(found.log)


def test_without_etcd_the_process_ends_within_a_lease(seen) -> None:
    there = RECORDED["etcd_killed"]
    assert there["seconds"] < there["lease_ttl_s"]
    found = seen("etcd_is_killed")
    assert found.status == there["exit_code"] == 1
    assert found.seconds < TTL_S + BUSY_S
    assert_fatal(found.log)


def test_the_member_key_goes_with_the_lease(seen) -> None:
    """6.1 s were recorded, at a lease of 6 s."""
    assert RECORDED["member_key_gone_after_s"] < 6 + 1
    assert seen("killed").seconds < TTL_S + BUSY_S


def test_a_broker_whose_id_is_taken_waits(seen) -> None:
    """The recorded one dies of SIGTERM meanwhile; ours takes it as what it is.

    The recorded one accepts connections, and their calls hang. Ours refuses them, so that peers go
    on without it; a client tries again until its deadline.
    """
    there = RECORDED["id_is_taken_at_start"]
    found = seen("id_is_taken")
    assert found.more["running"] == there["running"]
    assert there["port_accepts"]
    assert not found.more["accepts"]
    assert [found.more["listed"].code, len(found.more["listed"].responses)] == there["list_call"]
    assert found.status == 0
    assert found.seconds < BUSY_S


def test_a_broker_without_etcd_waits(seen) -> None:
    there = RECORDED["etcd_unreachable_at_start"]
    found = seen("etcd_is_unreachable")
    assert found.more["running"] == there["running"]
    assert found.more["warning"]["level"] == there["log_after_6_s"][0]["level"]
    assert found.status == 0
    assert found.seconds < BUSY_S
