"""Script of the recorded consumer processes, in order: :func:`play` runs it on ours.

Ours differ on purpose, so that some steps do:

- Primaries are balanced: where one process led both shards, the standby of ``j-031`` leads it.
- A process that drains leaves once others have its shards, and does not wait for more processes.
- Hints of a running primary are written as its log grows.
"""

from __future__ import annotations

import base64
import shlex
from collections.abc import Mapping
from typing import Any

from google.protobuf.message import Message

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.rules import SHARD_RPCS_BY_NAME
from gazette_sdk.shard.recovery import hints as fsm_hints
from support.golden_consumers import HINTS, Change, GoldenConsumers, member, short, state
from support.vectors import golden

CALLS = golden("consumer/rpc/shard_grpc.json")
COMMANDS = golden("consumer/gazctl/shards.json")
LIFE = golden("consumer/etcd/lifecycle.json")
SNAPSHOTS = {each["state"]: each for each in LIFE["snapshots"]}
ITEM_REVISIONS = {
    event["mod_revision"]
    for event in LIFE["events"]
    if event["type"] == "PUT" and "/items/" in event["key"]
}
FOREIGN_CLUSTER = 1234
FAR_AHEAD = 100_000
SHORT_S = 0.5
"""Deadline of a call that waits until then."""

SPECS = """
name: gold/
replication: 1
fragment: {length: 1048576, compression_codec: NONE, refresh_interval: 10s, stores: ["file:///"]}
children:
- name: gold/in/
  labels: [{name: content-type, value: application/x-ndjson}]
  children: [{name: gold/in/hint-000}, {name: gold/in/hint-001}, {name: gold/in/j-030}, \
{name: gold/in/j-031}]
- name: gold/logs/
  labels: [{name: content-type, value: application/x-gazette-recoverylog}]
  children: [{name: gold/logs/hint-000}, {name: gold/logs/hint-001}, {name: gold/logs/j-030}, \
{name: gold/logs/j-031}]
- name: gold/out/
  labels: [{name: content-type, value: application/x-ndjson}, {name: topic, value: gold-out}]
  children: [{name: gold/out/part-000}, {name: gold/out/part-001}]
- name: gold/plain
  labels: [{name: content-type, value: text/plain}]
"""

BROKEN_HINTS = {
    55: b'{"log":"gold/logs/other"}',
    56: b"{bad",
    57: b"\xff\xff",
    58: b'{"log":"gold/logs/j-030","live_nodes":[{"fnode":5,"segments":'
    b'[{"author":1,"first_seq_no":6,"last_seq_no":7}]}]}',
}
"""Primary hints that calls find, by the number of the call."""

HINT_SHARDS = b"""
common: {recovery_log_prefix: gold/logs, hint_prefix: /gold/hints/hintgroup, hint_backups: 2, \
max_txn_duration: 1s, disable: true}
shards: [{id: hint-000}, {id: hint-001}]
"""

EDITORS = {
    24: 'cp "$1" shown',
    25: ': > "$1"',
    26: "exit 3",
    27: 'sed -i "s/min_txn_duration: 10ms/min_txn_duration: 20ms/" "$1"',
    28: 'cp "$1" "shown.$(ls shown.* 2>/dev/null | wc -l)"; if [ -e shown.1 ]; then'
    ' sed -i "s/max_txn_duration: 0s/max_txn_duration: 1s/" "$1";'
    ' else sed -i "s/max_txn_duration: 1s/max_txn_duration: 0s/" "$1"; fi',
}
"""Changes that the editor makes, by the number of the command."""


def recorded_phases() -> dict[str, list[Change]]:
    """Recorded changes, by what was done before them."""
    phases: dict[str, list[Change]] = {"": []}
    leases: dict[str, str] = {}
    for event in LIFE["events"]:
        if event["type"] == "MARK":
            phases[event["what"]] = []
            continue
        key = short(event["key"].encode())
        owner = event.get("lease") or ""
        if owner and key.startswith("members/"):
            leases[owner] = member(key)
        is_create = event.get("create_revision") == event["mod_revision"]
        value = None if event["type"] == "DELETE" else _value(event)
        change = Change(key, event["mod_revision"], value, is_create, leases.get(owner, ""))
        list(phases.values())[-1].append(change)
    return phases


def snapshot(name: str) -> dict[str, str]:
    """Recorded keys and their states."""
    entries = (*SNAPSHOTS[name]["keys"], *SNAPSHOTS[name]["hints"])
    keys = {short(entry["key"].encode()): _value(entry) for entry in entries}
    return {key: state(key, value) for key, value in keys.items()}


def _value(entry: Mapping[str, Any]) -> bytes:
    if entry["value_json"] is not None:
        return str(entry["value_json"]).encode()
    return bytes.fromhex(entry["value_hex"])


class Script:
    """Recorded calls and commands, made of our processes.

    Args:
        consumers: the processes.
    """

    def __init__(self, consumers: GoldenConsumers) -> None:
        self._consumers = consumers
        self._etcd = pb.Header.Etcd()

    def call(self, *numbers: int, **how: Any) -> None:
        """Make calls of the shard service."""
        for number in numbers:
            case = CALLS[number]
            rpc = SHARD_RPCS_BY_NAME[case["method"]]
            request = rpc.request_type.FromString(base64.b64decode(case["request_b64"]))
            self._settle(request)
            outcome = self._consumers.call(number, case, request, **how)
            if number == 0:
                listed = cpb.ListResponse.FromString(outcome.responses[0])
                self._etcd.CopyFrom(listed.header.etcd)

    def _settle(self, request: Message) -> None:
        """Put into a recorded request what is of our run: the cluster, revisions and hints."""
        if isinstance(request, cpb.StatRequest) and request.HasField("header"):
            etcd = request.header.etcd
            ahead = FAR_AHEAD if etcd.revision > FAR_AHEAD else 0
            cluster = etcd.cluster_id
            etcd.CopyFrom(self._etcd)
            etcd.revision += ahead
            if cluster == FOREIGN_CLUSTER:
                etcd.cluster_id = cluster
        if isinstance(request, cpb.ApplyRequest):
            keys = self._consumers.keys()
            for change in request.changes:
                if change.expect_mod_revision in ITEM_REVISIONS:
                    shard = change.upsert.id or change.delete
                    change.expect_mod_revision = keys[f"items/{shard}"].mod_revision
                if change.expect_mod_revision > 0 and change.primary_hints.live_nodes:
                    newest = keys[f"{change.upsert.id}.backup.0"]  # as in the recording
                    change.primary_hints.CopyFrom(fsm_hints.from_bytes(newest.value))

    def gazctl(self, *numbers: int, editor: str = "") -> None:
        """Call ``gazctl``."""
        environ = {"GAZ_EDITOR": f"sh -c {shlex.quote(editor)} sh"} if editor else None
        for number in numbers:
            case = COMMANDS[number]
            directory = str(self._consumers.directory)
            arguments = [each.replace("<dir>", directory) for each in case["args"]]
            stdin = case.get("stdin", "").encode()
            outcome = self._consumers.command(*arguments, stdin=stdin, environ=environ)
            self._consumers.commands[number] = outcome

    def wait_for(self, name: str) -> None:
        """Wait for the keys of a recorded snapshot."""
        self._consumers.wait_for_keys(snapshot(name))


def play(consumers: GoldenConsumers) -> None:
    """Do it all."""
    script = Script(consumers)
    _start(consumers, script)
    _two_processes(consumers, script)
    _fail_over(consumers, script)
    _drain(consumers, script)
    _failure(consumers, script)
    _hints(consumers, script)
    _end(consumers, script)


def _start(consumers: GoldenConsumers, script: Script) -> None:
    consumers.mark("json-a starts")
    consumers.start("json-a")
    script.wait_for("one member, no shards")
    script.call(0)
    script.gazctl(*range(13))
    consumers.mark("shards are applied")
    script.gazctl(13)
    script.wait_for("both shards primary at json-a")
    script.gazctl(14)
    for key, end in zip("abc", (64, 128, 192), strict=True):
        consumers.publish("gold/in/j-030", {"Key": key, "N": 1})
        consumers.wait_until_read("j-030", end)
    consumers.publish("gold/in/j-031", *({"Key": key, "N": 1} for key in "abc"))
    consumers.wait_until_read("j-031", 192)
    script.call(1, 2, 3)
    script.call(4, timeout_s=SHORT_S)
    script.call(*range(5, 11))


def _two_processes(consumers: GoldenConsumers, script: Script) -> None:
    consumers.mark("json-b starts")
    consumers.start("json-b")
    balanced = snapshot("json-a is standby of j-031")
    balanced["assign/j-030#local#json-a#0"] = balanced.pop("assign/j-030#local#json-b#0")
    del balanced["j-030.backup.1"]
    consumers.wait_for_keys(balanced)
    script.call(*range(11, 21))
    script.call(21, timeout_s=SHORT_S)
    script.call(*range(22, 40))
    for path in (*golden("consumer/rpc/debug_endpoints.json"), "/nothing/here"):
        consumers.look_at(path)
    consumers.look_at("/v1/shards/stat", "json-b", b'{"shard":"j-030"}')
    script.gazctl(*range(15, 24))
    for number, editor in EDITORS.items():
        script.gazctl(number, editor=editor)
    script.gazctl(*range(29, 38))


def _fail_over(consumers: GoldenConsumers, script: Script) -> None:
    consumers.mark("json-a is killed")
    consumers.processes["json-a"].crash()
    script.call(40)
    script.wait_for("json-b is primary of both after the kill")
    consumers.publish("gold/in/j-030", {"Key": "b", "N": 1}, {"Key": "b", "N": 10})
    consumers.wait_until_read("j-030", 321, "json-b")
    script.call(41, 42)
    consumers.publish("gold/in/j-031", {"Key": "b", "N": 1}, {"Key": "b", "N": 10})
    consumers.wait_until_read("j-031", 321, "json-b")
    consumers.mark("json-a starts again")
    consumers.start("json-a")
    balanced = snapshot("json-a is standby of j-031")
    del balanced["assign/j-031#local#json-b#0"], balanced["assign/j-031#local#json-a#1"]
    balanced["assign/j-031#local#json-a#0"] = "PRIMARY"
    balanced["assign/j-031#local#json-b#1"] = "STANDBY"
    consumers.wait_for_keys(balanced)


def _drain(consumers: GoldenConsumers, script: Script) -> None:
    consumers.mark("json-c starts")
    consumers.start("json-c")
    three = snapshot("json-b drained and exited") | {"members/local#json-b": "member"}
    three["assign/j-031#local#json-b#1"] = three.pop("assign/j-031#local#json-c#1")
    consumers.wait_for_keys(three)
    consumers.mark("json-b drains")
    consumers.processes["json-b"].drain()
    script.wait_for("json-b drained and exited")
    consumers.mark("json-c drains")
    script.call(43)
    moved = snapshot("json-c drained and exited") | {"members/local#json-c": "member"}
    moved["assign/j-031#local#json-c#0"] = moved.pop("assign/j-031#local#json-a#0")
    consumers.wait_for_keys(moved)
    consumers.processes["json-c"].drain()
    script.wait_for("json-c drained and exited")


def _failure(consumers: GoldenConsumers, script: Script) -> None:
    consumers.publish("gold/in/j-031", {"Key": "b", "N": 100})
    consumers.wait_until_read("j-031", 387)
    consumers.mark("j-031 fails")
    consumers.publish("gold/in/j-031", {"Key": "b", "N": 100, "Do": "fail"})
    script.wait_for("j-031 failed")
    script.call(*range(44, 48))
    script.gazctl(38, 39, 40)
    consumers.mark("j-031 is unassigned")
    script.call(48)
    script.gazctl(41)
    script.wait_for("j-031 recovered")
    consumers.publish("gold/in/j-031", {"Key": "b", "N": 1000})
    consumers.wait_until_read("j-031", 532)
    script.call(49)


def _hints(consumers: GoldenConsumers, script: Script) -> None:
    consumers.mark("j-030 is disabled")
    script.call(50)
    script.wait_for("j-030 disabled")
    script.call(51)
    script.gazctl(42)
    consumers.mark("j-030 is enabled")
    script.call(52)
    script.wait_for("j-030 enabled again, primary hints given")
    script.call(53)
    primary = f"{HINTS}j-030.primary"
    given = fsm_hints.from_bytes(consumers.keys()["j-030.primary"].value)
    consumers.put(primary, given.SerializeToString())
    script.call(54)
    for number, value in BROKEN_HINTS.items():
        consumers.put(primary, value)
        script.call(number)
    consumers.mark("j-030 has broken hints")
    script.call(59)
    script.wait_for("j-030 failed: broken hints")
    script.call(60)
    consumers.mark("broken hints are deleted")
    consumers.delete(primary)
    consumers.ask("json-a", "Unassign", cpb.UnassignRequest(shards=["j-030"], only_failed=True))
    script.wait_for("j-030 primary again from backup hints")


def _end(consumers: GoldenConsumers, script: Script) -> None:
    consumers.mark("j-030 is deleted")
    script.call(61)
    script.wait_for("j-030 deleted")
    script.gazctl(43, 44, *range(45, 55), 56)
    script.call(62)
    consumers.mark("more shards")
    consumers.command("shards", "apply", stdin=HINT_SHARDS)
    script.gazctl(55)
    consumers.wait_for_keys(
        {
            "members/local#json-a": "member",
            "items/hint-000": "shard",
            "items/hint-001": "shard",
            "assign/hint-000#local#json-a#0": "PRIMARY",
            "/gold/hints/hintgroup/hint-000.backup.0": "hints",
            **{key: value for key, value in snapshot("end").items() if value == "hints"},
        }
    )
    consumers.mark("json-a ends")
    consumers.processes["json-a"].drain()
