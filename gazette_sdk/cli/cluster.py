"""``gazctl brokers list`` and ``gazctl report``: a cluster as a whole, as one broker sees it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import orjson

from gazette_sdk.cli.client import BROKER_CLIENT, call_cluster, open_broker
from gazette_sdk.cli.formats import iec_bytes, write_table
from gazette_sdk.cli.program import CommandFailedError, Invocation, explain
from gazette_sdk.cli.settings import LIST_BROKERS, REPORT
from gazette_sdk.errors import CallError, GazetteError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import cluster_pb2 as clpb
from gazette_sdk.protocol.durations import SECOND_NS, format_duration
from gazette_sdk.protocol.rules import MEMBERS_RPC, REPORT_RPC, Rpc
from gazette_sdk.server.json_gateway import message_json
from gazette_sdk.transport.listing import list_journals

CALL_TIMEOUT_S = 15.0
"""Longest time of the call. Brokers wait for their members for a few seconds at most."""

UNKNOWN = "-"
"""Cell of what is not known."""

WARNINGS, ERRORS = 1, 2
"""Exit statuses of a report that has warnings, and of one that has errors, or is missing."""

_log = logging.getLogger(__name__)


class ReportFailedError(CommandFailedError):
    """Report that has problems, or is missing.

    Args:
        message: what it has, or why it is missing.
        exit_status: exit status of the program.
    """

    def __init__(self, message: str, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerState:
    """Broker of a cluster. What is not known is None.

    Attributes:
        zone: its zone.
        id: its id within the zone.
        endpoint: URL at which others reach it.
        state: ``ok``, ``exiting``, ``silent``, ``refused`` or ``unknown``.
        error: why it did not answer; empty if it did.
        version: of its package.
        python: version of Python.
        started: time of its start.
        limit: greatest number of replicas that it takes.
        replicas: journals that it holds.
        primaries: journals that it leads.
        lease_left_s: time until its lease ends unless it is renewed.
        loop_lag_s: longest time for which its event loop was held lately.
        key_ids: names of the keys that it accepts.
        append_bytes: bytes appended since its start.
        read_bytes: bytes read since its start.
        disk_free: free bytes of its spool directory.
        etcd_version: version of the Etcd server that it is connected to.
    """

    zone: str
    id: str
    endpoint: str
    state: str = "unknown"
    error: str = ""
    version: str | None = None
    python: str | None = None
    started: str | None = None
    limit: int | None = None
    replicas: int | None = None
    primaries: int | None = None
    lease_left_s: float | None = None
    loop_lag_s: float | None = None
    key_ids: list[str] | None = None
    append_bytes: int | None = None
    read_bytes: int | None = None
    disk_free: int | None = None
    etcd_version: str | None = None


async def run_brokers(invocation: Invocation) -> None:
    """List the brokers of a cluster.

    Raises:
        GazetteError: the broker at the address did not answer.
    """
    settings = invocation.settings(LIST_BROKERS)
    try:
        answer = await _call(invocation, MEMBERS_RPC, clpb.MembersRequest())
    except CallError as error:
        if error.code != "UNIMPLEMENTED":
            raise
        _log.warning(
            "the broker at %s is of another implementation: only brokers that hold journals are "
            "listed, and what they alone know is not",
            invocation.settings(BROKER_CLIENT).address,
        )
        async with open_broker(invocation) as transport:
            brokers = brokers_of(await list_journals(transport, pb.LabelSelector()))
    else:
        brokers = [_broker(each) for each in answer.members if each.component == "broker"]
    if settings.format == "json":
        _write_json({"brokers": [asdict(each) for each in brokers]})
        return
    header = ["Zone", "Id", "Endpoint", "Version", "Replicas", "Primaries", "Lease", "Lag", "State"]
    write_table(header, [_cells(each) for each in brokers])
    for each in brokers:
        if each.error:
            _log.warning("%s/%s: %s", each.zone, each.id, each.error)


async def run_report(invocation: Invocation) -> None:
    """Show a report of a cluster.

    Raises:
        ReportFailedError: there are problems, or there is no report.
    """
    settings = invocation.settings(REPORT)
    try:
        report = await _call(invocation, REPORT_RPC, clpb.ReportRequest())
    except GazetteError as error:
        raise ReportFailedError(explain(error), ERRORS) from error
    if settings.format == "json":
        _write_json(message_json(report))
    else:
        sys.stdout.writelines(f"{line}\n" for line in report_lines(report))
    sys.stdout.flush()
    severities = [problem.severity for problem in report.problems]
    errors, warnings = severities.count(clpb.ERROR), severities.count(clpb.WARNING)
    if errors or warnings:
        counted = [_counted(errors, "error"), _counted(warnings, "warning")]
        text = f"the report has {' and '.join(filter(None, counted))}"
        raise ReportFailedError(text, ERRORS if errors else WARNINGS)


async def _call(invocation: Invocation, rpc: Rpc, request: Any) -> Any:
    return await call_cluster(invocation, rpc, request, CALL_TIMEOUT_S)


def _write_json(value: Any) -> None:
    sys.stdout.write(orjson.dumps(value).decode() + "\n")


# ---------------------------------------------------------------- brokers


def _broker(member: clpb.Member) -> BrokerState:
    """Return a broker as another broker of this implementation shows it."""
    known: dict[str, Any] = {
        "limit": member.limit,
        "replicas": member.replicas,
        "primaries": member.primaries,
        "error": member.error,
    }
    if member.version:
        started = datetime.fromtimestamp(member.started_us / 1e6, UTC)
        known |= {
            "version": member.version,
            "python": member.python,
            "started": started.isoformat(timespec="seconds"),
            "key_ids": list(member.key_ids),
            "etcd_version": member.etcd_version,
        }
    for name in ("lease_left_s", "loop_lag_s", "append_bytes", "read_bytes", "disk_free"):
        if member.HasField(name):
            known[name] = getattr(member, name)
    return BrokerState(
        zone=member.id.zone,
        id=member.id.suffix,
        endpoint=member.endpoint,
        state=_state(member),
        **known,
    )


def _state(member: clpb.Member) -> str:
    if member.error:
        return "refused" if member.refuses_token else "silent"
    if member.exiting:
        return "exiting"
    return "ok" if member.version else "unknown"


def brokers_of(listing: pb.ListResponse) -> Sequence[BrokerState]:
    """Return the brokers that the routes of a list of journals name, and the one that made it."""
    endpoints: dict[tuple[str, str], str] = {}
    replicas: dict[tuple[str, str], int] = {}
    primaries: dict[tuple[str, str], int] = {}
    author = listing.header.process_id
    if author.suffix:
        endpoints[author.zone, author.suffix] = UNKNOWN
    for journal in listing.journals:
        route = journal.route
        for index, member in enumerate(route.members):
            key = member.zone, member.suffix
            endpoints[key] = route.endpoints[index] if route.endpoints else UNKNOWN
            replicas[key] = replicas.get(key, 0) + 1
            primaries[key] = primaries.get(key, 0) + (index == route.primary)
    return [
        BrokerState(
            zone=zone,
            id=suffix,
            endpoint=endpoint,
            replicas=replicas.get((zone, suffix), 0),
            primaries=primaries.get((zone, suffix), 0),
        )
        for (zone, suffix), endpoint in sorted(endpoints.items())
    ]


def _cells(broker: BrokerState) -> Sequence[str]:
    limit = "" if broker.limit is None else f"/{broker.limit}"
    return (
        broker.zone,
        broker.id,
        broker.endpoint,
        broker.version or UNKNOWN,
        f"{broker.replicas}{limit}",
        str(broker.primaries),
        UNKNOWN if broker.lease_left_s is None else f"{broker.lease_left_s:.0f}s",
        UNKNOWN if broker.loop_lag_s is None else f"{broker.loop_lag_s * 1000:.0f}ms",
        UNKNOWN if broker.state == "unknown" else broker.state,
    )


# ---------------------------------------------------------------- report

_SEVERITIES = {clpb.ERROR: "ERROR", clpb.WARNING: "WARNING", clpb.INFO: "INFO"}


def report_lines(report: clpb.ReportResponse) -> Iterator[str]:
    """Yield the lines of a report for people."""
    at = datetime.fromtimestamp(report.clock_us / 1e6, UTC)
    yield f"{report.cluster} at {at:%Y-%m-%d %H:%M:%S} UTC"
    shards = sum(each.shards for each in report.applications)
    yield ", ".join(
        (
            f"{_counted(report.brokers, 'broker')} in {_counted(len(report.zones), 'zone')}",
            f"{_counted(report.journals, 'journal')} with {_counted(report.replicas, 'replica')}",
            _counted(len(report.stores), "store"),
            f"{_counted(len(report.applications), 'application')} with {_counted(shards, 'shard')}",
        )
    )
    rates = f"append {_rate(report, 'append_rate')}, read {_rate(report, 'read_rate')}"
    yield f"{rates}, {_unstored(report)}"
    if report.journals:
        states = sorted(report.states.items(), key=lambda each: -each[1])
        counted = (f"{count} {_state_name(name)}" for name, count in states)
        yield f"journals: {', '.join(counted)}"
    for application in report.applications:
        yield _application(application)
    yield ""
    for problem in report.problems:
        others = f" ({problem.others} more)" if problem.others else ""
        yield f"{_SEVERITIES[problem.severity]}  {problem.check}: {problem.text}{others}"
        yield f"    $ {problem.command}"
    if not report.problems:
        yield "nothing needs attention"


def _application(application: clpb.ReportResponse.Application) -> str:
    if application.error:
        return f"{application.name}: {_counted(application.processes, 'process')}, not known"
    parts = [
        _counted(application.processes, "process"),
        _counted(application.shards, "shard"),
        *(
            f"{count} {name}"
            for count, name in (
                (application.failed, "failed"),
                (application.without_primary, "without primary"),
                (application.recovering, "recovering"),
            )
            if count
        ),
    ]
    if application.HasField("lag_s"):
        parts.append(f"lag {_span(application.lag_s)}")
    return f"{application.name}: {', '.join(parts)}"


def _unstored(report: clpb.ReportResponse) -> str:
    if not report.HasField("unstored"):
        return f"in no store {UNKNOWN}"
    age = ""
    if report.HasField("oldest_unstored_s"):
        age = f" (oldest {_span(report.oldest_unstored_s)})"
    return f"in no store {iec_bytes(report.unstored)}{age}"


def _rate(report: clpb.ReportResponse, name: str) -> str:
    if not report.HasField(name):
        return UNKNOWN
    return f"{iec_bytes(round(getattr(report, name)))}/s"


def _state_name(name: str) -> str:
    """Return the name of a state in words, such as ``single zone``."""
    return name.removeprefix("JOURNAL_").lower().replace("_", " ")


def _span(seconds: float) -> str:
    return format_duration(round(seconds) * SECOND_NS)


def _counted(count: int, noun: str) -> str:
    """Return a number with its noun; empty for no errors and no warnings."""
    if noun in {"error", "warning"} and not count:
        return ""
    plural = "es" if noun.endswith("s") else "s"
    return f"{count} {noun}{'' if count == 1 else plural}"
