"""``gazette capacity``: the size of a cluster for a load, on paper.

:data:`UNIT_COSTS` has what one unit of work costs, each with the program in ``benchmarks/`` that
measures it. The documentation's table is made of it. :func:`sheet` is pure: it multiplies.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Annotated, Final, Literal, NamedTuple

import orjson
from pydantic import Field

from gazette_sdk.cli.formats import write_table
from gazette_sdk.cli.program import Command, Invocation
from gazette_sdk.server.options import Bytes, Group, Option, Seconds, Settings

Codec = Literal["none", "gzip", "zstd", "snappy"]


class UnitCost(NamedTuple):
    """Cost of one unit of work or of one thing.

    Attributes:
        value: the cost.
        unit: its unit.
        what: noun phrase of what costs it.
        program: program in ``benchmarks/`` that measures it.
    """

    value: float
    unit: str
    what: str
    program: str


UNIT_COSTS: Final = {
    "appended_ms": UnitCost(2.0, "ms/MB", "a megabyte appended, at its primary", "unit_costs.py"),
    "replicated_ms": UnitCost(
        2.0, "ms/MB", "the same, for each further replica, at both ends", "unit_costs.py"
    ),
    "append_us": UnitCost(65, "µs", "an append, at its primary", "unit_costs.py"),
    "append_replicated_us": UnitCost(
        310, "µs", "the same, for each further replica, at both ends", "unit_costs.py"
    ),
    "read_ms": UnitCost(0.25, "ms/MB", "a megabyte read, for each reader", "unit_costs.py"),
    "none_ms": UnitCost(0.0, "ms/MB", "a megabyte stored, uncompressed", "unit_costs.py"),
    "gzip_ms": UnitCost(3.9, "ms/MB", "a megabyte stored with gzip", "unit_costs.py"),
    "zstd_ms": UnitCost(1.5, "ms/MB", "a megabyte stored with zstd", "unit_costs.py"),
    "snappy_ms": UnitCost(0.6, "ms/MB", "a megabyte stored with snappy", "unit_costs.py"),
    "idle_us": UnitCost(2.0, "µs/s", "an idle replica of a journal", "idle.py"),
    "replica_kib": UnitCost(33, "KiB", "memory of a replica of a journal", "idle.py"),
    "broker_mib": UnitCost(85, "MiB", "memory of a broker without journals", "idle.py"),
    "spec_bytes": UnitCost(
        260, "bytes", "a journal's spec and the record of its route, in Etcd", "unit_costs.py"
    ),
    "assignment_bytes": UnitCost(
        130, "bytes", "an assignment of a replica, in Etcd", "unit_costs.py"
    ),
    "shard_bytes": UnitCost(
        2000, "bytes", "a shard's spec, assignments and hints, in Etcd", "unit_costs.py"
    ),
    "message_us": UnitCost(
        10, "µs", "a message at a handler with a RocksStore, exactly once", "shard_words.py"
    ),
    "shard_mib": UnitCost(
        0.4, "MiB", "memory of an idle shard with a RocksStore", "idle_shards.py"
    ),
    "log_ratio": UnitCost(2.5, "", "bytes of a recovery log for each live byte", "recovery.py"),
    "played_mb_s": UnitCost(180, "MB/s", "playback of a recovery log", "recovery.py"),
    "solved_us": UnitCost(
        100, "µs", "first assignment, for each journal of three replicas", "allocator.py"
    ),
    "round_us": UnitCost(
        5, "µs", "the allocator's round, for each journal of three replicas", "allocator.py"
    ),
}
"""Costs by name, of a core of the machine in the documentation: processor time where it is time."""

LEFT: Final[dict[Codec, float]] = {"none": 1.0, "gzip": 0.25, "zstd": 0.25, "snappy": 0.4}
"""Part of JSON messages that each codec leaves, unless another one is given."""

MONTH_S: Final = 30 * 24 * 3600.0

LEASE_RENEWALS_S: Final = 10.0
"""Period of the renewals of a member's lease: a third of its time."""

PULSE_PERIOD_S: Final = 60.0
"""Period of the pulses of an idle journal with several replicas."""

LIST_OBJECTS: Final = 1000
"""Objects in an answer of a store's listing."""

REQUESTS_OF_A_FRAGMENT: Final = 3
"""The fragment's upload, a look before it, and one after it."""

JOURNAL_LIMIT: Final = 1024
"""Default of --broker.limit."""


class CapacitySettings(Settings):
    """Options of ``gazette capacity``."""

    rate: Annotated[Bytes, Option("Rate", "Content appended per second, such as 50MB/s")] = (
        10_000_000
    )
    append_size: Annotated[
        Bytes,
        Option("AppendSize", "Length of an append: many messages of a publisher share one"),
        Field(ge=1),
    ] = 65536.0
    message_size: Annotated[
        Bytes, Option("MessageSize", "Length of a message, for consumers"), Field(ge=1)
    ] = 500.0
    journals: Annotated[int, Option("Journals", "Number of journals"), Field(ge=1, le=10**7)] = 100
    replication: Annotated[
        int, Option("Replication", "Replicas of each journal"), Field(ge=1, le=9)
    ] = 3
    readers: Annotated[
        float, Option("Readers", "Readers of all content, shards included"), Field(ge=0)
    ] = 1.0
    codec: Annotated[Codec, Option("Codec", "Compression codec of the fragments")] = "zstd"
    left: Annotated[
        float,
        Option("Left", "Part of the content that the codec leaves; 0 for what JSON leaves"),
        Field(ge=0, le=1),
    ] = 0.0
    length: Annotated[
        Bytes, Option("Length", "Length of a fragment in the specs"), Field(ge=1024)
    ] = 2**26
    flush_s: Annotated[
        Seconds,
        Option("Flush", "Flush interval in the specs; 0 for none", long="flush"),
        Field(ge=0),
    ] = 0.0
    refresh_s: Annotated[
        Seconds, Option("Refresh", "Refresh interval in the specs", long="refresh"), Field(ge=1)
    ] = 300.0
    retention_s: Annotated[
        Seconds,
        Option("Retention", "Time for which fragments are kept", long="retention"),
        Field(ge=0),
    ] = 30 * 24 * 3600.0
    outage_s: Annotated[
        Seconds,
        Option("Outage", "Outage of the store that spools have to bear", long="outage"),
        Field(ge=0),
    ] = 3600.0
    network: Annotated[
        Bytes, Option("Network", "Rate of a broker's network, one way"), Field(ge=1)
    ] = 1_250_000_000
    limit: Annotated[
        int, Option("Limit", "Most replicas of a broker, its --broker.limit"), Field(ge=1)
    ] = JOURNAL_LIMIT
    usage: Annotated[
        float, Option("Usage", "Part of a core and of the network to use"), Field(gt=0, le=1)
    ] = 0.5
    shards: Annotated[int, Option("Shards", "Number of shards of consumers"), Field(ge=0)] = 0
    state: Annotated[Bytes, Option("State", "Live state of a shard")] = 100_000_000
    format: Annotated[Literal["table", "json"], Option("Format", "Output format", short="o")] = (
        "table"
    )


CAPACITY = Group("capacity", CapacitySettings)

COMMAND = Command(
    "capacity",
    "Estimate brokers, network, disks, store requests and Etcd for a load, without a cluster",
    "gazette_sdk.cli.capacity:run",
    (CAPACITY,),
    details=(
        "Multiplies the load by unit costs that programs in benchmarks/ measure on one machine; "
        "-o json has them, too. Measure your own cluster with `gazette bench` before you rely on "
        "it. A broker process uses one core: run one for each core of a machine.\n\n"
        "Sizes are written as 200, 64MiB or 50MB/s."
    ),
    examples=(
        (
            "gazette capacity --rate 50MB/s --journals 400 --replication 3 --codec zstd",
            "the sheet of a cluster",
        ),
        (
            "gazette capacity --rate 5MB/s --journals 64 --shards 64 --state 1GB -o json",
            "with an application, for scripts",
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Line:
    """Line of a sheet.

    Attributes:
        name: its name for programs.
        value: the estimate; bytes and seconds have no prefix.
        unit: its unit.
        why: how it was made.
    """

    name: str
    value: float
    unit: str
    why: str


def _cost(name: str) -> float:
    return UNIT_COSTS[name].value


def sheet(plan: CapacitySettings) -> list[Line]:
    """Return the estimates for a load."""
    lines = _brokers(plan)
    lines += _disks(plan) + _stores(plan) + _etcd(plan, int(lines[0].value))
    if plan.shards:
        lines += _shards(plan)
    return lines


def _brokers(plan: CapacitySettings) -> list[Line]:
    copies, mb_s = plan.replication - 1, plan.rate / 1e6
    appends_s, replicas = plan.rate / plan.append_size, plan.journals * plan.replication
    cores = (
        mb_s * (_cost("appended_ms") + copies * _cost("replicated_ms")) / 1e3
        + appends_s * _append_us(copies) / 1e6
        + mb_s * (_cost(f"{plan.codec}_ms") + plan.readers * _cost("read_ms")) / 1e3
        + replicas * _cost("idle_us") / 1e6
        + (plan.journals * _append_us(copies) / PULSE_PERIOD_S / 1e6 if copies else 0.0)
    )
    received = plan.rate * plan.replication
    sent = plan.rate * (copies + plan.readers + _left(plan))
    needs = {
        "processor time": math.ceil(cores / plan.usage),
        "network": math.ceil(max(received, sent) / (plan.network * plan.usage)),
        "replicas": math.ceil(replicas / plan.limit),
        "replication, and one to spare": plan.replication + (plan.replication > 1),
    }
    reason = max(needs, key=needs.__getitem__)
    brokers = max(1, needs[reason])
    memory = _cost("broker_mib") * 2**20 + replicas / brokers * _cost("replica_kib") * 1024
    by = ", ".join(f"{name} {count}" for name, count in needs.items())
    return [
        Line("brokers", brokers, "", f"by {reason} ({by})"),
        Line("cores", cores, "cores", f"of all brokers; {plan.usage:.0%} of each is used"),
        Line("broker_memory", memory, "B", f"of each, with {replicas / brokers:.0f} replicas"),
        Line("received", received, "B/s", "of all brokers: rate x replication"),
        Line("sent", sent, "B/s", "rate x (replication - 1 + readers), and uploads"),
    ]


def _append_us(copies: int) -> float:
    """Return the processor time of an append but for its content; also of a pulse."""
    return _cost("append_us") + copies * _cost("append_replicated_us")


def _left(plan: CapacitySettings) -> float:
    return plan.left or LEFT[plan.codec]


def _disks(plan: CapacitySettings) -> list[Line]:
    of_journal = plan.length
    if plan.flush_s:
        of_journal = min(of_journal, plan.rate / plan.journals * plan.flush_s)
    open_spools = plan.journals * plan.replication * of_journal
    outage = plan.outage_s * plan.rate * plan.replication
    why = f"open fragments {_text(open_spools, 'B')}, an outage of the store {_text(outage, 'B')}"
    return [Line("spool_disk", open_spools + outage, "B", f"of all brokers: {why}")]


def _fragments_s(plan: CapacitySettings) -> float:
    """Return the number of fragments that are closed in a second."""
    by_length = plan.rate / plan.length
    return max(by_length, plan.journals / plan.flush_s) if plan.flush_s else by_length


def _stores(plan: CapacitySettings) -> list[Line]:
    fragments = _fragments_s(plan) * MONTH_S
    kept = _fragments_s(plan) * plan.retention_s / plan.journals
    pages = max(1, math.ceil(kept / LIST_OBJECTS))
    listings = plan.journals * plan.replication * pages * MONTH_S / plan.refresh_s
    stored = plan.rate * MONTH_S * _left(plan)
    return [
        Line("fragments", fragments, "/month", "rate / length, or one of a journal each flush"),
        Line(
            "store_requests",
            fragments * REQUESTS_OF_A_FRAGMENT,
            "/month",
            "an upload and two looks for each fragment; reads of clients are not counted",
        ),
        Line(
            "store_listings",
            listings,
            "/month",
            f"each replica every {plan.refresh_s:g} s, {pages} page(s) of {kept:.0f} objects",
        ),
        Line("stored", stored, "B/month", f"{_left(plan):.0%} of the content is left"),
        Line(
            "kept",
            plan.rate * plan.retention_s * _left(plan),
            "B",
            "with the retention that is given",
        ),
    ]


def _etcd(plan: CapacitySettings, brokers: int) -> list[Line]:
    replicas = plan.journals * plan.replication
    keys = 2 * plan.journals + replicas + brokers + 4 * plan.shards
    size = (
        plan.journals * _cost("spec_bytes")
        + replicas * _cost("assignment_bytes")
        + plan.shards * _cost("shard_bytes")
    )
    lost = 2 * replicas / brokers * _cost("assignment_bytes") * brokers
    renewals_s = brokers / LEASE_RENEWALS_S
    solved_s = replicas * _cost("solved_us") / 3e6
    round_s = replicas * _cost("round_us") / 3e6
    return [
        Line("etcd_keys", keys, "", "specs, records of routes, assignments, members and shards"),
        Line("etcd_size", size, "B", "of the newest revision; keep the quota at ten times this"),
        Line("etcd_writes", renewals_s, "/s", "renewals of leases; idle journals write nothing"),
        Line("etcd_watch_of_a_loss", lost, "B", "to all brokers together when one is lost"),
        Line("allocation", solved_s, "s", "first assignment of all journals, in a thread"),
        Line("allocator_round", round_s, "s", "of the leading broker's loop, after each change"),
    ]


def _shards(plan: CapacitySettings) -> list[Line]:
    messages_s = plan.rate / plan.message_size
    cores = messages_s * _cost("message_us") / 1e6
    processes = min(plan.shards, max(1, math.ceil(cores / plan.usage)))
    log = plan.state * _cost("log_ratio")
    played_s = log / (_cost("played_mb_s") * 1e6)
    each = plan.shards / processes
    return [
        Line("processes", processes, "", f"{messages_s:.0f} messages/s, one core for each process"),
        Line("shards_per_process", each, "", "shards / processes"),
        Line("shards_memory", each * _cost("shard_mib") * 2**20, "B", "of each process, idle"),
        Line("recovery_log", log, "B", f"of a shard: live state x {_cost('log_ratio'):g}"),
        Line("recovery", played_s, "s", "of a shard without a standby"),
        Line(
            "recovery_of_process", played_s * each, "s", "of all shards of a lost process, by one"
        ),
    ]


# ------------------------------------------------------------------ output

_PREFIXES: Final = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def _text(value: float, unit: str) -> str:
    """Return a value with a prefix, and three digits."""
    for factor, prefix in _PREFIXES:
        if value >= factor and unit not in {"cores", "s"}:
            return f"{value / factor:.3g} {prefix}{unit}"
    shown = f"{value:.0f}" if value == int(value) or value >= 100 else f"{value:.3g}"
    return f"{shown}{unit}" if unit.startswith("/") else f"{shown} {unit}".strip()


def run(invocation: Invocation) -> None:
    """Print the sheet of a load."""
    plan = invocation.settings(CAPACITY)
    lines = sheet(plan)
    if plan.format == "json":
        found = {
            "plan": plan.model_dump(exclude={"format"}),
            "sheet": [
                {"name": each.name, "value": each.value, "unit": each.unit, "why": each.why}
                for each in lines
            ],
            "unit_costs": {name: cost._asdict() for name, cost in UNIT_COSTS.items()},
        }
        sys.stdout.write(orjson.dumps(found).decode() + "\n")
        return
    rows = [(each.name.replace("_", " "), _text(each.value, each.unit), each.why) for each in lines]
    write_table(["What", "Estimate", "Why"], rows)
