"""Names that programs of users depend on, as the code has them, and as they are promised.

The promised names are the lists of ``tests/compatibility/stable``. Run this file to add new names
to them: ``python tests/support/stable_names.py``. It removes none: see docs/compatibility.md.
"""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import orjson
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from prometheus_client import REGISTRY
from prometheus_client.metrics import MetricWrapperBase

from gazette_sdk.broker.mirror import incarnation_key, journal_path, members_path, shard_path
from gazette_sdk.broker.recovery.routes import RecordedRoutes
from gazette_sdk.cli.allocator import report_json
from gazette_sdk.cli.backup import commands as backup
from gazette_sdk.cli.backup.archive import Backup, SavedJournal, SavedMember, SavedShard
from gazette_sdk.cli.backup.capture import Stored
from gazette_sdk.cli.backup.restore import JournalRow, Plan, ShardRow
from gazette_sdk.cli.bench.report import Histogram, Report, Throughput, Verification
from gazette_sdk.cli.bench.verify import Findings
from gazette_sdk.cli.cluster import BrokerState
from gazette_sdk.cli.doctor.checks import Result, Status
from gazette_sdk.cli.doctor.command import shown_json
from gazette_sdk.cli.doctor.facts import Facts, Source
from gazette_sdk.cli.drain import Step, show_plan
from gazette_sdk.cli.formats import fragment_json
from gazette_sdk.cli.gazctl import GAZCTL
from gazette_sdk.cli.gazette import GAZETTE
from gazette_sdk.cli.journals.fragments import Pruned
from gazette_sdk.cli.journals.list import Move, show_moves, show_outcomes
from gazette_sdk.cli.shards import reset
from gazette_sdk.cli.shards.commands import ResetSettings
from gazette_sdk.cli.shards.consumers import ApplicationState, scale_row
from gazette_sdk.cli.shards.specs import show_changed, show_generated
from gazette_sdk.cli.shards.topics import Grown
from gazette_sdk.cli.spark import commands as spark
from gazette_sdk.cli.tokens import KeyState, ShownToken
from gazette_sdk.cluster.allocator.simulation import (
    ChangedItem,
    Load,
    MemberId,
    MemberLoads,
    Simulation,
    Unplaced,
)
from gazette_sdk.cluster.broker_keys import BrokerKeySpace
from gazette_sdk.cluster.consumer_keys import CONSUMERS_PREFIX
from gazette_sdk.cluster.items import ItemEntry, assignment_key, item_key, member_key
from gazette_sdk.cluster.verification import Challenges
from gazette_sdk.journals.changes import AppliedChange
from gazette_sdk.local_cluster.cluster import BrokerStatus
from gazette_sdk.meters import PlainHistogram
from gazette_sdk.protocol import (
    broker_pb2,
    cluster_pb2,
    consumer_pb2,
    recoverylog_pb2,
    stream_pb2,
)
from gazette_sdk.protocol.fragments import content_path
from gazette_sdk.protocol.names import parse_store_url
from gazette_sdk.protocol.rules import RPCS_BY_REQUEST
from gazette_sdk.protocol.shard_spec import hint_keys
from gazette_sdk.server.options import BoundOption
from gazette_sdk.shard.application.generator import HINT_PREFIX
from gazette_spark.transactions import LogState

ROOT = Path(__file__).parents[2]
STABLE = ROOT / "tests" / "compatibility" / "stable"


def names() -> dict[str, set[str]]:
    """Return the names of today, by the list that they are in."""
    return {
        "commands": set(commands()),
        "metrics": set(metrics()),
        "json": set(json_keys()),
        "etcd": set(etcd_keys()),
        "stores": set(store_paths()),
        "protobuf": set(protobuf_fields()),
    }


def promised(name: str) -> set[str]:
    """Return the names of a list."""
    return {
        line
        for line in (STABLE / f"{name}.txt").read_text("utf-8").splitlines()
        if line and not line.startswith("#")
    }


# ------------------------------------------------------------------ commands


def commands() -> Iterator[str]:
    """Yield commands with their groups of options, and the options of each group."""
    users: dict[tuple[str, Sequence[str]], str] = {}
    for program in (GAZETTE, GAZCTL):
        for command in program.commands:
            called = f"{program.name} {command.name}"
            yield called
            for group in program.groups_of(command):
                lines = [line for option in group.options for line in _of_option(option)]
                users.setdefault((group.title, tuple(lines)), called)
    titles = [title for title, _ in users]
    for program in (GAZETTE, GAZCTL):
        for command in program.commands:
            for group in program.groups_of(command):
                lines = [line for option in group.options for line in _of_option(option)]
                name = group.title
                if titles.count(name) > 1:  # of several groups: each is named by its first command
                    name += f" of {users[name, tuple(lines)]}"
                yield f"{program.name} {command.name} [{name}]"
                yield from (f"[{name}] {line}" for line in lines)


def _of_option(option: BoundOption) -> Iterator[str]:
    """Yield the names of an option, and its choices."""
    long = f"--{option.long}"
    yield from option.names
    if option.env:
        yield f"{long} ${option.env}"
    if option.option.in_ini:
        yield f"{long} {option.option.key}"
    yield from (f"{long}={choice}" for choice in option.choices)


# ------------------------------------------------------------------- metrics

_WITH_METRICS = (
    "gazette_sdk.broker.api.served",
    "gazette_sdk.message",
    "gazette_sdk.shard.consumer.embedded",
)


def metrics() -> Iterator[str]:
    """Yield metrics as they are exposed, with the names of their labels, and their types."""
    for module in _WITH_METRICS:
        importlib.import_module(module)
    for collector in list(REGISTRY._collector_to_names):
        for name, labels, kind in _exposed(collector):
            if name.startswith(("gazette_", "grpc_")):
                total = "_total" if kind == "counter" and not name.endswith("_total") else ""
                yield f"{name}{total}{{{','.join(labels)}}} {kind}"


def _exposed(collector: Any) -> Iterator[tuple[str, Sequence[str], str]]:
    if isinstance(collector, MetricWrapperBase):
        yield collector._name, collector._labelnames, collector._type
        return
    labels = getattr(collector, "_label_names", None)
    if isinstance(collector, PlainHistogram):
        labels = [collector._label] if collector._label else []
    for family in collector.collect():
        own = labels if labels is not None else getattr(family, "_labelnames", ())
        yield family.name, own, family.type


# ---------------------------------------------------------------------- JSON


def json_keys() -> Iterator[str]:
    """Yield the keys of what commands write as JSON. Those of messages are in their own list."""
    samples: dict[str, Any] = {
        "gazette doctor --json": shown_json(
            Facts(missing={Source.ETCD: ""}), [Result("", Status.OK, "", [], "", "")]
        ),
        "gazette bench --json": _bench_report().as_json(),
        "gazette capacity -o json": _printed(
            *("capacity", "--rate", "1MB/s", "--journals", "4", "-o", "json")
        ),
        "gazette allocator simulate --format json": orjson.loads(report_json(_simulation())),
        "gazctl journals fragments -o json": orjson.loads(fragment_json(_fragment_answer())),
        "gazctl consumers list -o json": {
            "consumers": [ApplicationState(None, "", [], [], []).summary()]
        },
        "gazctl shards scale -o json": scale_row(cluster_pb2.ScaleResponse()),
    }
    for called, value in samples.items():
        yield from (f"{called}: {path}" for path in _paths_of(value))
    for called, lines in _written_lines().items():
        for line in lines:
            yield from (f"{called}: {path}" for path in _paths_of(line))
    classes: dict[str, Any] = {
        "gazctl brokers list -o json: brokers[]": BrokerState,
        "gazctl consumers describe -o json: ": ApplicationState,
        "gazctl topics grow -o json: ": Grown,
        "gazctl token show -o json: ": ShownToken,
        "gazctl keys check -o json: keys[]": KeyState,
        "gazctl journals prune -o json: ": Pruned,
        "gazette dev status -o json: ": BrokerStatus,
    }
    for begin, declared in classes.items():
        for path in _paths_of_class(declared):
            yield f"{begin}.{path}".replace(": .", ": ")


def _written_lines() -> Mapping[str, Sequence[Any]]:
    """Return objects as commands write them, one for each kind of line, by command."""
    spec = broker_pb2.JournalSpec(name="a/journal", replication=1)
    journal = SavedJournal(name="a/journal", spec_bytes=spec.SerializeToString())
    shard_spec = consumer_pb2.ShardSpec(id="a/shard", recovery_log_prefix="logs")
    shard_spec.sources.add(journal="a/journal")
    shard = SavedShard(application="a", id="a/shard", spec_bytes=shard_spec.SerializeToString())
    saved = Backup(
        prefix="/a",
        journals=[journal],
        shards=[shard],
        members=[SavedMember(prefix="/a", id="a/b", endpoint="")],
    )
    plan = Plan(
        journals=[
            JournalRow(
                name="a/journal",
                state="created",
                saved_head=0,
                stored_end=0,
                floor=0,
                claimed_by=(),
                level="",
                skips=False,
                guessed=(),
                spec_bytes=b"",
            )
        ],
        shards=[
            ShardRow(
                application="a",
                id="a/shard",
                state="created",
                hints=0,
                log="",
                problem="",
                shard=shard,
            )
        ],
        continues=False,
        endpoints=(),
    )
    step = Step(MemberId("a", "broker-1"), cluster_pb2.Member())
    applied = _written(lambda: show_outcomes([AppliedChange("created", spec)], "json"))
    changed = _written(lambda: show_changed({"a/shard": "created"}, "json"))
    changes = [consumer_pb2.ApplyRequest.Change(upsert=shard_spec)]
    listed = [consumer_pb2.ListResponse.Shard(spec=shard_spec)]
    logs = [LogState("a", "a/log", "done", 1, 1)]
    return {
        **{f"gazctl journals {verb} -o json": applied for verb in ("apply", "create", "delete")},
        "gazctl journals move-store -o json": _written(
            lambda: show_moves([Move("a/journal")], "json", parse_store_url("file:///"))
        ),
        **{f"gazctl shards {verb} -o json": changed for verb in ("apply", "delete")},
        "gazctl shards generate -o json": _written(lambda: show_generated(changes, "json")),
        "gazctl shards reset -o json": _written(
            lambda: reset._show(listed, {"a/journal": 0}, ResetSettings(format="json"))
        ),
        "gazctl brokers drain -o json": _written(lambda: show_plan([step], "json")),
        "gazctl backup show -o json": [backup._shown(saved)],
        "gazctl backup verify -o json": _written(
            lambda: backup._write_verified(
                [(journal, Stored(journal="a/journal"))], {"a/shard": ""}
            )
        ),
        "gazctl restore cluster -o json": _written(lambda: backup._show_plan(plan, {}, "json")),
        "gazette spark transactions list -o json": _written(lambda: spark._show(logs, "json")),
        "gazette spark transactions delete -o json": _written(
            lambda: spark._show(logs, "json", ["deleted"])
        ),
    }


def _written(write: Callable[[], None]) -> Sequence[Any]:
    """Return the objects that a function writes to standard output, one a line."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        write()
    return [orjson.loads(line) for line in output.getvalue().splitlines()]


def _paths_of(value: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of all keys of a value."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            named = f"{path}.{key}".lstrip(".")
            yield named
            yield from _paths_of(each, named)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _paths_of(each, f"{path}[]")


def _paths_of_class(declared: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of all fields of a dataclass, as JSON has them."""
    hints = get_type_hints(declared)
    for each in fields(declared):
        named = f"{path}.{each.name}".lstrip(".")
        yield named
        yield from _paths_of_hint(hints[each.name], named)


def _paths_of_hint(hint: Any, path: str) -> Iterator[str]:
    if isinstance(hint, type) and is_dataclass(hint):
        yield from _paths_of_class(hint, path)
    elif get_origin(hint) in {Union, UnionType}:
        for each in get_args(hint):
            if each is not NoneType:
                yield from _paths_of_hint(each, path)
    elif get_origin(hint) in {list, tuple, Sequence}:
        yield from _paths_of_hint(get_args(hint)[0], f"{path}[]")


def _printed(*arguments: str) -> Any:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert GAZETTE.main(arguments) == 0
    return orjson.loads(output.getvalue())


def _bench_report() -> Report:
    throughput, latency = Throughput(1, 1, 1.0), Histogram()
    latency.record(1)
    return Report(
        {},
        publish=throughput,
        tail=throughput,
        tail_rate=1,
        latency=latency,
        read=throughput,
        verification=Verification(Findings()),
    )


def _simulation() -> Simulation:
    member = MemberId("a", "broker-1")
    load = Load(*[0] * len(Load._fields))
    item = ChangedItem("a/journal", (member,), (member,))
    return Simulation(
        before=None,  # type: ignore[arg-type] - it is not shown
        after=None,  # type: ignore[arg-type]
        members=(MemberLoads(member, 1, load, load),),
        changed=(item,),
        moves_min=0,
        pending=(item,),
        unplaced=(Unplaced("a/journal", 1, ""),),
        single_zone=(),
        staying=(),
        rounds=1,
        is_settled=True,
    )


def _fragment_answer() -> broker_pb2.FragmentsResponse._Fragment:
    return broker_pb2.FragmentsResponse._Fragment(spec=_fragment(), signed_url="file:///x")


def _fragment() -> broker_pb2.Fragment:
    """Return a fragment of a journal ``JOURNAL``."""
    found = broker_pb2.Fragment(
        journal="JOURNAL",
        begin=0x10,
        end=0x2F,
        compression_codec=broker_pb2.GZIP,
        backing_store="file:///",
        mod_time=1,
        path_postfix="POSTFIX",
    )
    found.sum.part1, found.sum.part2, found.sum.part3 = 1, 2, 3
    return found


# --------------------------------------------------------------- Etcd, stores

_CLUSTER, _APPLICATION = "/gazette/cluster", f"{CONSUMERS_PREFIX}/APPLICATION"


def etcd_keys() -> Iterator[str]:
    """Yield the keys in Etcd, with the default prefixes. Names in capitals stand for names."""
    for root, item in ((_CLUSTER, "JOURNAL"), (_APPLICATION, "SHARD")):
        yield item_key(root, item).decode()
        yield member_key(root, "ZONE", "ID").decode()
        yield assignment_key(root, item, "ZONE", "ID", 7).decode().replace("#7", "#SLOT")
    shard = consumer_pb2.ShardSpec(
        id="SHARD", hint_prefix=HINT_PREFIX, hint_backups=1, recovery_log_prefix="logs"
    )
    yield from hint_keys(shard)
    yield incarnation_key(_CLUSTER).decode()
    keyspace, member = BrokerKeySpace(), broker_pb2.ProcessSpec.ID(zone="ZONE", suffix="ID")
    journal = ItemEntry(
        key=b"",
        create_revision=7,
        mod_revision=7,
        version=1,
        lease=0,
        raw=b"",
        id="JOURNAL",
        value=broker_pb2.JournalSpec(),
    )
    yield RecordedRoutes(keyspace, member).key(journal).decode().replace("#7", "#CREATE_REVISION")
    challenges = Challenges(None, keyspace, member, 0, None)  # type: ignore[arg-type]
    for directory in ("answering", "challenges"):
        yield challenges._key(directory, member).decode()


def store_paths() -> Iterator[str]:
    """Yield the paths of what is written into fragment stores."""
    yield content_path(_fragment())
    yield journal_path("INCARNATION", "JOURNAL")
    yield shard_path("INCARNATION", "APPLICATION", "SHARD")
    yield members_path("INCARNATION")


# ------------------------------------------------------------------ protobuf

_MODULES = (broker_pb2, cluster_pb2, consumer_pb2, recoverylog_pb2, stream_pb2)


def protobuf_fields() -> Iterator[str]:
    """Yield calls, and fields of messages and values of enums with their numbers."""
    for rpc in RPCS_BY_REQUEST.values():
        request, response = rpc.request_type.DESCRIPTOR, rpc.response_type.DESCRIPTOR
        yield f"rpc {rpc.path}({request.full_name}) returns ({response.full_name})"
    for module in _MODULES:
        file = module.DESCRIPTOR
        yield from _of_enums(file.enum_types_by_name.values())
        for message in file.message_types_by_name.values():
            yield from _of_message(message)


def _of_message(message: Descriptor) -> Iterator[str]:
    for field in message.fields:
        repeated = "repeated " if field.is_repeated else ""
        yield f"{message.full_name}.{field.name} = {field.number} {repeated}{_type(field)}"
    yield from _of_enums(message.enum_types)
    for nested in message.nested_types:
        yield from _of_message(nested)


def _of_enums(enums: Iterable[EnumDescriptor]) -> Iterator[str]:
    for enum in enums:
        yield from (f"{enum.full_name}.{each.name} = {each.number}" for each in enum.values)


_TYPES = {
    getattr(FieldDescriptor, name): name.removeprefix("TYPE_").lower()
    for name in dir(FieldDescriptor)
    if name.startswith("TYPE_")
}


def _type(field: FieldDescriptor) -> str:
    declared = field.message_type or field.enum_type
    return declared.full_name if declared is not None else _TYPES[field.type]


def new_small_numbers(added: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return new fields of Gazette's own messages with numbers that Gazette may take itself.

    Args:
        added: new lines of the list of fields.
        known: its lines.
    """
    messages = {line.split(" = ")[0].rpartition(".")[0] for line in known if " = " in line}
    found = []
    for line in added:
        name, separator, rest = line.partition(" = ")
        message = name.rpartition(".")[0]
        if separator and message in messages and message.startswith(_GAZETTES):
            number = int(rest.split()[0])
            if number < OWN_NUMBER_MIN and not message.startswith(_OWN_MESSAGES):
                found.append(line)
    return found


OWN_NUMBER_MIN = 100
"""Least number of a field of ours in a message of Gazette."""

_GAZETTES = ("protocol.", "consumer.", "recoverylog.")
_OWN_MESSAGES = ("consumer.State",)
"""Messages of ours in a package of Gazette."""


# ------------------------------------------------------------------- writing


def write(directory: Path, found: Mapping[str, Iterable[str]]) -> None:
    """Add names to the lists of a directory."""
    directory.mkdir(exist_ok=True)
    for name, lines in found.items():
        file = directory / f"{name}.txt"
        known = promised(name) if file.exists() else set()
        text = "\n".join(sorted({*known, *lines}))
        file.write_text(f"# Made by tests/support/stable_names.py\n{text}\n", encoding="utf-8")


if __name__ == "__main__":
    write(STABLE, names())
