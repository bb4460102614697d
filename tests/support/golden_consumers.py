"""Consumer processes named as the recorded ones: their shards' calls, keys and commands.

:func:`running` gives a broker, an Etcd and processes of the application :data:`gold`, which does
what the recorded application did: it sums, publishes each sum, and fails when a message says so.
"""

from __future__ import annotations

import base64
import contextlib
import io
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from google.protobuf.message import Message

from gazette_sdk import Publisher, mapping, shard
from gazette_sdk.cli.gazctl import GAZCTL
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_messages import KeyValue
from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol import recoverylog_pb2 as rpb
from gazette_sdk.protocol.rules import SHARD_RPCS_BY_NAME
from gazette_sdk.testing.shards import ShardProcess
from gazette_sdk.transport.loop import run
from support.golden import Outcome, RawClient
from support.golden_compare import Revisions, message_pairs, path_problems
from support.tools import Outcome as ToolOutcome
from support.tools import Tool

ROOT = "/gold/json4/"
HINTS = "/gold/hints/json4/"
RECORDED_ENDPOINTS = {
    "http://127.0.0.1:38094": "json-a",
    "http://127.0.0.1:38095": "json-b",
    "http://127.0.0.1:38096": "json-c",
}
VARYING_OF_HINTS = re.compile(rb'("(?:fnode|author|(?:first|last)_\w+)":)\d+')
LEASE_S = 3
WAIT_S = 60.0
"""Bound of a wait, in seconds, behind which something counts as never happening."""


class Gold(shard.Application[dict[str, Any], shard.JsonStore[dict[str, int]]]):
    """Sums by key. A message that says so makes it fail, or sleep."""

    message, store, name = dict, shard.JsonStore[dict[str, int]], "gold"
    _to_output = staticmethod(mapping.modulo("topic=gold-out", key=lambda total: total["Key"]))

    def consume(self, txn, message):
        if message.get("Do") == "fail":
            raise RuntimeError("told to fail")
        if message.get("Do") == "sleep":
            time.sleep(message["Ms"] / 1000)
        sums, key = txn.store.state, message["Key"]
        sums[key] = sums.get(key, 0) + message["N"]
        txn.publish({"Key": key, "Total": sums[key]}, mapping=self._to_output)


gold = Gold()


# ------------------------------------------------------------------ the processes


@dataclass(frozen=True)
class Change:
    """Change of a key of Etcd.

    Attributes:
        key: key without its prefix.
        revision: revision of the change.
        value: None if the key was deleted.
        is_create: True if the key was not there before.
        owner: member whose lease the key has; empty for none.
    """

    key: str
    revision: int
    value: bytes | None
    is_create: bool
    owner: str


class GoldenConsumers:
    """Processes of the application, and what came of them.

    Attributes:
        cluster: the broker.
        directory: directory of files.
        problems: differences of each call of the shard service, by the number of the recorded one.
        commands: outcomes of ``gazctl``, by the number of the recorded one.
        pages: statuses and texts of pages, by their paths.
        marks: last revision before each phase.
        changes: changes of Etcd, once all has ended.
    """

    def __init__(self, cluster: EmbeddedCluster, etcd: Etcd, directory: Path, gazctl: Tool) -> None:
        self.cluster = cluster
        self.directory = directory
        self.problems: dict[int, list[str]] = {}
        self.commands: dict[int, ToolOutcome] = {}
        self.marks: dict[str, int] = {}
        self.changes: list[Change] = []
        self.pages: dict[str, tuple[int, str]] = {}
        self.processes: dict[str, ShardProcess] = {}
        self._etcd = etcd
        self._gazctl = gazctl
        self._clients: dict[str, RawClient] = {}
        self._revisions = Revisions()

    def start(self, name: str) -> None:
        """Start a process, again after its end."""
        if name not in self.processes:
            command = [
                *("support.golden_consumers:gold", "--broker.address", self.cluster.address),
                *("--etcd.address", self.cluster.etcd_endpoint, "--etcd.lease", f"{LEASE_S}s"),
                *("--etcd.prefix", ROOT.rstrip("/"), "--consumer.limit", "32"),
            ]
            self.processes[name] = ShardProcess(name, command, self.directory)
        self.processes[name].start()

    def publish(self, journal: str, *messages: Mapping[str, Any]) -> None:
        """Publish messages in one append."""
        with Publisher(mapping=mapping.direct(journal), transport=self.cluster.transport) as sender:
            sender.publish_batch(list(messages)).result(WAIT_S)

    # ------------------------------------------------------------------ Etcd

    def put(self, key: str, value: bytes) -> None:
        """Write a key."""
        run(self._etcd.put(key.encode(), value), WAIT_S)

    def delete(self, key: str) -> None:
        """Delete a key."""
        run(self._etcd.delete(key.encode()), WAIT_S)

    def mark(self, phase: str) -> None:
        """Begin a phase."""
        self.marks[phase] = run(self._etcd.range(b"/gold/x"), WAIT_S).header.revision

    def keys(self) -> dict[str, KeyValue]:
        """All keys of shards, members and hints, by their names without prefix."""
        found = run(self._etcd.range(b"/gold/", b"/gold0"), WAIT_S).entries
        return {short(kv.key): kv for kv in found}

    def wait_for_keys(self, wanted: Mapping[str, str]) -> dict[str, KeyValue]:
        """Wait until these keys are there with these states, and no others but primary hints.

        All processes among them know of them then.
        """
        deadline = time.monotonic() + WAIT_S
        while True:
            keys = self.keys()
            states = {
                key: state(key, kv.value)
                for key, kv in keys.items()
                if key in wanted or not key.endswith(".primary")
            }
            if states == wanted:
                break
            assert time.monotonic() < deadline, f"{states} where {wanted} is to be"
            time.sleep(0.02)  # between two looks
        for name, process in self.processes.items():
            if process.is_running and f"members/local#{name}" in wanted:
                self._wait_for_mirror(name)
        return keys

    def _wait_for_mirror(self, name: str) -> None:
        """Wait until a process has the present revision."""
        etcd = run(self._etcd.range(b"/gold/x"), WAIT_S).header
        header = pb.Header(process_id=pb.ProcessSpec.ID(zone="local", suffix=name), etcd=etcd)
        request = cpb.StatRequest(shard="none", header=header)
        outcome = self.ask(name, "Stat", request, timeout_s=WAIT_S)
        assert outcome.code == "OK", outcome.message

    def end(self) -> None:
        """Stop what runs, and note all changes."""
        for client in self._clients.values():
            client.close()
        for process in self.processes.values():
            process.stop()
        self.changes = run(self._history(), WAIT_S)

    async def _history(self) -> list[Change]:
        last = await self._etcd.put(b"/gold/end", b"")
        found: list[Change] = []
        leases: dict[int, str] = {}
        async with contextlib.aclosing(self._etcd.watch(b"/gold/", 1)) as batches:
            async for batch in batches:
                for event in batch.events:
                    kv = event.kv
                    if kv.mod_revision == last:
                        return found
                    if kv.lease and short(kv.key).startswith("members/"):
                        leases[kv.lease] = member(short(kv.key))
                    is_create = kv.create_revision == kv.mod_revision
                    value = None if event.is_delete else kv.value
                    owner = leases[kv.lease] if kv.lease else ""
                    found.append(Change(short(kv.key), kv.mod_revision, value, is_create, owner))
        raise AssertionError("the watch ended")

    def phase(self, name: str) -> list[Change]:
        """Changes of a phase."""
        begin = self.marks[name]
        end = min((mark for mark in self.marks.values() if mark > begin), default=sys.maxsize)
        return [each for each in self.changes if begin < each.revision <= end]

    # ----------------------------------------------------------- calls, commands

    def ask(self, name: str, method: str, request: Message, **how: Any) -> Outcome:
        """Call a process; arguments as for :class:`support.golden.Stream`."""
        if name not in self._clients:
            self._clients[name] = RawClient(self.processes[name].address, SHARD_RPCS_BY_NAME)
        return self._clients[name].call(method, [request.SerializeToString()], **how)

    def wait_until_read(self, shard_id: str, offset: int, name: str = "json-a") -> None:
        """Wait until a shard has read through an offset of its source."""
        request = cpb.StatRequest(shard=shard_id, read_through={f"gold/in/{shard_id}": offset})
        outcome = self.ask(name, "Stat", request, timeout_s=WAIT_S)
        assert outcome.code == "OK", outcome.message
        assert cpb.StatResponse.FromString(outcome.responses[0]).status == cpb.OK

    def call(self, number: int, case: dict[str, Any], request: Message, **how: Any) -> Outcome:
        """Make a recorded call, and note how its outcome differs."""
        outcome = self.ask(case["asked"], case["method"], request, **how)
        self.problems[number] = list(self._problems(case, outcome))
        return outcome

    def command(self, *arguments: str, **how: Any) -> ToolOutcome:
        """Call ``gazctl``, of which a process and a broker are known."""
        self._gazctl.environ["CONSUMER_ADDRESS"] = self.processes["json-a"].address
        self._gazctl.environ["BROKER_ADDRESS"] = self.cluster.address
        return self._gazctl(*arguments, **how)

    def look_at(self, path: str, name: str = "json-a", body: bytes | None = None) -> None:
        """Get a page of a process, or post to it."""
        try:
            with urlopen(f"{self.processes[name].address}{path}", body, timeout=WAIT_S) as page:
                self.pages[path] = page.status, page.read().decode()
        except HTTPError as error:
            self.pages[path] = error.code, error.read().decode()

    def _problems(self, case: dict[str, Any], outcome: Outcome) -> Iterable[str]:
        error = case.get("grpc_error", {"code": "OK", "details": ""})
        kind: Any = SHARD_RPCS_BY_NAME[case["method"]].response_type
        if outcome.code != error["code"]:
            text = outcome.message
            if outcome.responses:
                text = cpb.Status.Name(kind.FromString(outcome.responses[0]).status)
            yield f"code {outcome.code} ({text}) where {error['code']} was recorded"
            return
        yield from path_problems({"code": error["code"], "message": error["details"]}, outcome)
        if "response_b64" not in case:
            return
        expected = kind.FromString(base64.b64decode(case["response_b64"]))
        actual = kind.FromString(outcome.responses[0])
        if len(getattr(actual, "publish_at", ())) < 2:  # the order of a map's entries is any
            assert actual.SerializeToString() == outcome.responses[0]
        for there, here in message_pairs(expected, actual):
            yield from self._settle(there, here)
        if expected != actual:
            yield f"ours:\n{actual}\nrecorded:\n{expected}"

    def _settle(self, there: Any, here: Any) -> Iterable[str]:
        """Put into a recorded message what varies between runs, from ours."""
        if isinstance(there, pb.Header.Etcd):
            if note := self._revisions.note_header(there.revision, here.revision):
                yield note
            there.CopyFrom(here)
        elif isinstance(there, cpb.ListResponse.Shard):
            yield from self._revisions.settle_key(there, here)
            if len(there.status) == 2:  # our allocator balances primaries: the standby leads
                there.route.primary = 1 - there.route.primary
                there.status.reverse()
        elif isinstance(there, pb.Route):
            there.endpoints[:] = [
                self.processes[RECORDED_ENDPOINTS[each]].address for each in there.endpoints
            ]
        elif isinstance(there, cpb.StatResponse):
            for journal in list(there.publish_at):  # others wrote to the recorded outputs, too
                there.publish_at[journal] = here.publish_at.get(journal, -1)
        elif isinstance(there, cpb.ReplicaStatus):
            there.errors[:] = [settled_error(each) for each in there.errors]
            here.errors[:] = [settled_error(each) for each in here.errors]
        elif isinstance(there, cpb.GetHintsResponse):
            if not there.primary_hints.HasField("hints"):  # ours are written as the log grows
                here.primary_hints.ClearField("hints")
        elif isinstance(there, rpb.FSMHints):
            settle_hints(there)
            settle_hints(here)


# ------------------------------------------------------------------ what is compared


def short(key: bytes) -> str:
    """A key without its prefix, such as ``items/j-030`` or ``j-030.primary``."""
    return key.decode().removeprefix(ROOT).removeprefix(HINTS)


def member(key: str) -> str:
    """The process of a key of a member or an assignment."""
    return key.split("#")[1 if key.startswith("members/") else 2]


def state(key: str, value: bytes) -> str:
    """Return the state that the value of a key tells."""
    if key.startswith("assign/"):
        return cpb.ReplicaStatus.Code.Name(cpb.ReplicaStatus.FromString(value).code)
    if key.startswith("members/"):
        return "exiting" if cpb.ConsumerSpec.FromString(value).exiting else "member"
    return "shard" if key.startswith("items/") else "hints"


def settled_error(text: str) -> str:
    """An error by its step and its cause. Ours name the exception and the record, too."""
    step, _, rest = text.partition(": ")
    for cause in ("told to fail", "expected Fnode to match Segment"):
        if cause in rest:
            return f"{step}: {cause}"
    return text


def settle_hints(hints: rpb.FSMHints) -> None:
    """Clear what varies: authors, checksums and offsets; numbers count from the file's creation.

    A file has more numbers before it if its shard moved more often.
    """
    for node in hints.live_nodes:
        for segment in node.segments:
            segment.first_seq_no -= node.fnode
            segment.last_seq_no -= node.fnode
            for name in ("author", "first_offset", "first_checksum", "last_offset"):
                segment.ClearField(name)
        node.fnode = 0


def shown(change: Change) -> tuple[str, ...]:
    """A change as a text that does not vary: its key, value, and whose lease it has."""
    if change.value is None:
        return ("DELETE", change.key)
    value: object = state(change.key, change.value)
    if change.key.startswith("assign/"):
        status = cpb.ReplicaStatus.FromString(change.value)
        status.errors[:] = [settled_error(each) for each in status.errors]
        value = status.SerializeToString()
    elif change.key.startswith("members/"):
        spec = cpb.ConsumerSpec.FromString(change.value)
        assert spec.process_spec.endpoint.startswith("http://")
        spec.process_spec.endpoint = ""
        value = spec.SerializeToString()
    elif change.key.startswith("items/"):
        value = change.value
    else:
        value = VARYING_OF_HINTS.sub(rb"\1", change.value)
    word = "CREATE" if change.is_create else "PUT"
    return (word, change.key, repr(value), change.owner)


def transactions(changes: Iterable[Change], about: str) -> list[list[tuple[str, ...]]]:
    """Changes of the keys that begin with a text, as they were made together, in order.

    A value that is written again as it is, is left out.
    """
    found: dict[int, list[tuple[str, ...]]] = {}
    known: dict[str, bytes | None] = {}
    for change in changes:
        if not change.key.startswith(about) or (
            not change.is_create and known.get(change.key) == change.value is not None
        ):
            continue
        known[change.key] = change.value
        found.setdefault(change.revision, []).append(shown(change))
    return [sorted(made) for made in found.values()]


# ------------------------------------------------------------------ where it runs


class _Capture:
    """Standard output and error of ``gazctl``, which runs within this process."""

    def __enter__(self) -> Self:
        self._streams = sys.stdout, sys.stderr
        self._begin()
        return self

    def _begin(self) -> None:
        self._written = io.BytesIO(), io.BytesIO()
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(each, encoding="utf-8", write_through=True) for each in self._written
        )

    def readouterr(self) -> Any:
        """Return the text written since the last call."""
        out, err = (each.getvalue() for each in self._written)
        self._begin()
        return SimpleNamespace(out=out, err=err)

    def __exit__(self, *_: object) -> None:
        sys.stdout, sys.stderr = self._streams


@contextlib.contextmanager
def running(directory: Path, specs: str) -> Iterator[GoldenConsumers]:
    """A broker with journals, and an Etcd. Processes are to be started."""
    with (
        pytest.MonkeyPatch.context() as patch,
        EmbeddedCluster(directory / "cluster", sync_etcd=False) as cluster,
        _Capture() as capture,
    ):
        cluster.apply(specs)
        etcd = run(Etcd.connect(cluster.etcd_endpoint), WAIT_S)
        (directory / "gazctl").mkdir()
        gazctl = Tool(GAZCTL, directory / "gazctl", capture, patch)
        consumers = GoldenConsumers(cluster, etcd, directory, gazctl)
        try:
            yield consumers
        finally:
            consumers.end()
            run(etcd.aclose(), WAIT_S)
