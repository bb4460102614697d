"""``gazctl consumers`` and ``gazctl shards scale``: applications, their processes and shards.

The processes that are given, one of each application, list its shards and processes; primaries are
asked how far their shards are, and brokers for the write heads. The age of the first message that
is not read is its publication time, which its UUID has.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

import orjson

from gazette_sdk.cli.client import (
    SHARDS_BROKER_CLIENT,
    SHARDS_ZONE,
    none_runs,
    open_broker,
    open_consumer,
    open_consumers,
)
from gazette_sdk.cli.formats import iec_bytes, write_table
from gazette_sdk.cli.program import CommandFailedError, Invocation, explain
from gazette_sdk.cli.shards.commands import DESCRIBE_CONSUMER, LIST_CONSUMERS, SCALE
from gazette_sdk.cli.shards.list import (
    heads_of,
    stat_of,
)
from gazette_sdk.errors import CallError, GazetteError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import cluster_pb2 as clpb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol import strict_yaml
from gazette_sdk.protocol.durations import SECOND_NS, format_duration
from gazette_sdk.protocol.labels import MANAGED_BY, values_of
from gazette_sdk.protocol.names import strip_meta
from gazette_sdk.protocol.shard_spec import error_text, reduce_status, status_name
from gazette_sdk.shard.consumer.client import ShardClient
from gazette_sdk.shard.consumer.lag import published_at, total, unread_bytes
from gazette_sdk.shard.transaction.timers import SECOND_US
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.loop import for_each

_log = logging.getLogger(__name__)

UNKNOWN = "-"
"""Cell of what is not known, or does not exist."""

RATE_PERIOD_S = 1.0
"""Time between two looks at how far shards are, of which the rate is that they read at."""


@dataclass(frozen=True, slots=True)
class SourceState:
    """Source journal of a shard.

    Attributes:
        journal: its name.
        read_through: offset through which it is read.
        lag_bytes: bytes from there to its write head; None if that is unknown.
        lag_seconds: age of the first message from there on, 0 if there is none; None if unknown.
    """

    journal: str
    read_through: int
    lag_bytes: int | None
    lag_seconds: float | None


@dataclass(frozen=True, slots=True)
class ShardState:
    """Shard of an application.

    Attributes:
        id: its id.
        state: greatest status of its replicas.
        primary: zone and id of the process that leads it; None if none does.
        standbys: those of the others that hold it.
        lag_bytes: bytes of its sources that are not read; None if that is unknown.
        lag_seconds: greatest age of a first unread message of its sources; None if unknown.
        rate: bytes of its sources that it reads in a second; None if unknown, or not measured.
        watermark: time that its event time has reached; None without event time.
        recovered_bytes: bytes of its log that are read, while it recovers; else None.
        recovery_bytes: estimate of the bytes to read, while it recovers; else None.
        error: why it has failed; empty if it has not.
        sources: what it reads; empty if its primary does not answer.
    """

    id: str
    state: str
    primary: str | None
    standbys: list[str]
    lag_bytes: int | None = None
    lag_seconds: float | None = None
    rate: int | None = None
    watermark: str | None = None
    recovered_bytes: int | None = None
    recovery_bytes: int | None = None
    error: str = ""
    sources: list[SourceState] = field(default_factory=list)


@dataclass(slots=True)
class ProcessState:
    """Process of an application.

    Attributes:
        zone: its zone.
        id: its id within the zone.
        endpoint: URL at which others reach it.
        primary: number of shards that it leads.
        standby: number of shards that it holds for others.
        is_exiting: it gives its shards away, to end; None if that is unknown.
    """

    zone: str
    id: str
    endpoint: str
    primary: int = 0
    standby: int = 0
    is_exiting: bool | None = None


@dataclass(frozen=True, slots=True)
class ApplicationState:
    """Application, as one of its processes shows it.

    Attributes:
        application: its name; None if neither the process nor the labels of its shards have it.
        address: of the process.
        processes: its processes; only those that hold shards, where the process does not list all.
        shards: its shards.
        faults: why source journals are not read.
    """

    application: str | None
    address: str
    processes: list[ProcessState]
    shards: list[ShardState]
    faults: list[str]

    def summary(self) -> dict[str, Any]:
        """Return the numbers of the application. Sums are those of the shards with known lag."""
        lags = [each.lag_bytes for each in self.shards if each.lag_bytes is not None]
        ages = [each.lag_seconds for each in self.shards if each.lag_seconds is not None]
        states = [each.state for each in self.shards]
        return {
            "application": self.application,
            "address": self.address,
            "processes": len(self.processes),
            "shards": len(states),
            "primary": states.count("PRIMARY"),
            "failed": states.count("FAILED"),
            "lag_bytes": sum(lags) if lags else None,
            "lag_bytes_unknown": len(states) - len(lags),
            "lag_seconds": max(ages, default=None),
            "lag_seconds_unknown": len(states) - len(ages),
            "faults": self.faults,
        }


async def run_list(invocation: Invocation) -> None:
    """List applications.

    Raises:
        ConfigurationError: an address is malformed, or none is known.
        GazetteError: a process did not answer; the others are listed.
    """
    settings = invocation.settings(LIST_CONSUMERS)
    found, errors = await _states(invocation)
    summaries = [each.summary() for each in found]
    if settings.format == "table":
        write_table(
            ["Application", "Address", "Processes", "Shards", "Primary", "Failed", "Lag", "Age"],
            map(_summary_cells, summaries),
        )
        _warn_of_faults(found)
    else:
        _write({"consumers": summaries}, settings.format)
    sys.stdout.flush()
    if errors:
        raise errors[0]


async def run_describe(invocation: Invocation) -> None:
    """Show an application, its processes and its shards.

    Raises:
        CommandFailedError: the application is at none of the addresses, or several are there and
            none is named.
        GazetteError: a process did not answer.
    """
    settings = invocation.settings(DESCRIBE_CONSUMER)
    found, errors = await _states(invocation, *invocation.arguments, measures_rate=True)
    if errors and not found:
        raise errors[0]
    (state,) = found
    if settings.format == "table":
        _write_described(state)
        _warn_of_faults(found)
    else:
        _write({**state.summary(), **asdict(state)}, settings.format)
    sys.stdout.flush()


async def run_scale(invocation: Invocation) -> None:
    """Show how many processes the shards of an application need.

    Raises:
        CommandFailedError: the process is of another implementation.
        GazetteError: it did not answer.
    """
    async with open_consumer(invocation) as client:
        try:
            wish = await client.scale()
        except CallError as error:
            if error.code != "UNIMPLEMENTED":
                raise
            raise CommandFailedError(
                "the process at --consumer.address does not say how many processes its shards need,"
                " as those of other implementations do not: `gazctl shards list --lag` shows what"
                " is unread"
            ) from error
    if invocation.settings(SCALE).format == "json":
        sys.stdout.write(orjson.dumps(scale_row(wish)).decode() + "\n")
    else:
        cells = [wish.processes, wish.shards_with_lag, _bytes(wish.lag_bytes)]
        write_table(
            ["Processes", "Shards With Lag", "Lag", "Age"],
            [[*map(str, cells), _seconds(wish.lag_seconds)]],
        )
    sys.stdout.flush()


def scale_row(wish: clpb.ScaleResponse) -> dict[str, object]:
    """Return the JSON object of an answer."""
    return {
        "processes": wish.processes,
        "shards_with_lag": wish.shards_with_lag,
        "lag_bytes": wish.lag_bytes,
        "lag_seconds": wish.lag_seconds,
    }


async def _states(
    invocation: Invocation, *named: str, measures_rate: bool = False
) -> tuple[list[ApplicationState], list[GazetteError]]:
    """Return the applications of all addresses, and the errors of those that do not answer.

    Args:
        invocation: the call of the command.
        named: the only application to return; without it all, once each.
        measures_rate: look twice, `RATE_PERIOD_S` apart, for the rates at which shards read.

    Raises:
        CommandFailedError: the named one is not there.
        ConfigurationError: no application runs beside ``gazette dev``.
    """
    errors: list[GazetteError] = []
    listed: dict[str, tuple[str, ShardClient, cpb.ListResponse]] = {}
    async with (
        open_consumers(invocation) as clients,
        open_broker(invocation, SHARDS_BROKER_CLIENT, SHARDS_ZONE) as transport,
    ):
        if not clients:
            raise none_runs(invocation.settings(SHARDS_BROKER_CLIENT).address)
        answers = await for_each(clients.items(), lambda each: _list(*each))
        for (address, client), answer in zip(clients.items(), answers, strict=True):
            if isinstance(answer, GazetteError):
                errors.append(answer)
            else:
                listed.setdefault(name_of(answer) or address, (address, client, answer))
        wanted = [key for key in listed if key in named or not named]
        if named and not wanted and not errors:
            raise CommandFailedError(
                f"no application {named[0]} is at the addresses of --consumer.address: they are of"
                f" {', '.join(listed)}; give the address of one of its processes"
            )
        found = [
            await _state(transport, *listed[key], measures_rate=measures_rate) for key in wanted
        ]
    return found, errors


async def _list(address: str, client: ShardClient) -> cpb.ListResponse | GazetteError:
    """Return what a process lists, or its error, with a warning."""
    try:
        return await client.list(with_processes=True)
    except GazetteError as error:
        _log.warning("no answer", extra={"address": address, "err": explain(error)})
        return error


def name_of(listing: cpb.ListResponse) -> str | None:
    """Return the name of the application, which its shards have as a label, too."""
    labels = {each for shard in listing.shards for each in values_of(shard.spec.labels, MANAGED_BY)}
    return listing.application or (labels.pop() if len(labels) == 1 else None)


class _Look(NamedTuple):
    """How far a shard is.

    Attributes:
        stat: what its primary has answered.
        at: when, in monotonic seconds.
    """

    stat: cpb.StatResponse
    at: float

    def rate_since(self, earlier: _Look) -> int:
        """Return the bytes of sources that were read in a second since an earlier look."""
        before = earlier.stat.read_through
        read = sum(
            max(offset - before[journal], 0)
            for journal, offset in self.stat.read_through.items()
            if journal in before
        )
        return round(read / (self.at - earlier.at))


async def _state(
    transport: Transport,
    address: str,
    client: ShardClient,
    listing: cpb.ListResponse,
    *,
    measures_rate: bool,
) -> ApplicationState:
    async def look(shard: cpb.ListResponse.Shard) -> _Look | None:
        return await _look(client, shard)

    looks = await for_each(listing.shards, look)
    rates: list[int | None] = [None] * len(looks)
    if measures_rate and any(looks):
        await asyncio.sleep(RATE_PERIOD_S)
        earlier, looks = looks, await for_each(listing.shards, look)
        rates = [
            None if before is None or now is None else now.rate_since(before)
            for before, now in zip(earlier, looks, strict=True)
        ]
    read = {journal for each in looks if each is not None for journal in each.stat.read_through}
    heads = await heads_of(transport, read)
    now_s = time.time()

    async def shard_state(
        known: tuple[cpb.ListResponse.Shard, _Look | None, int | None],
    ) -> ShardState:
        shard, look, rate = known
        stat = None if look is None else look.stat
        return replace(await _shard_state(transport, shard, stat, heads, now_s), rate=rate)

    return ApplicationState(
        name_of(listing),
        address,
        _processes(listing),
        await for_each(list(zip(listing.shards, looks, rates, strict=True)), shard_state),
        list(listing.faults),
    )


async def _look(client: ShardClient, shard: cpb.ListResponse.Shard) -> _Look | None:
    if shard.route.primary < 0:
        return None
    stat = await stat_of(client, shard.spec.id, at_once=True)
    return None if stat is None else _Look(stat, time.monotonic())


async def _shard_state(
    transport: Transport,
    shard: cpb.ListResponse.Shard,
    stat: cpb.StatResponse | None,
    heads: Mapping[str, int | None],
    now: float,
) -> ShardState:
    members = [_member(each) for each in shard.route.members]
    primary = shard.route.primary
    known = ShardState(
        id=shard.spec.id,
        state=status_name(reduce_status(shard.status)),
        primary=members[primary] if primary >= 0 else None,
        standbys=[each for index, each in enumerate(members) if index != primary],
        error=error_text(shard.status),
    )
    if stat is None:
        return known
    sources = [
        await _source_state(transport, journal, offset, heads[journal], now)
        for journal, offset in sorted(stat.read_through.items())
    ]
    is_recovering = stat.recovery_bytes > 0
    return replace(
        known,
        lag_bytes=total([each.lag_bytes for each in sources], sum),
        lag_seconds=total([each.lag_seconds for each in sources], max),
        watermark=_time_text(stat.watermark_us) if stat.watermark_us else None,
        recovered_bytes=stat.recovered_bytes if is_recovering else None,
        recovery_bytes=stat.recovery_bytes if is_recovering else None,
        sources=sources,
    )


async def _source_state(
    transport: Transport, journal: str, offset: int, head: int | None, now: float
) -> SourceState:
    lag_bytes = unread_bytes(head, offset)
    lag_seconds = None if lag_bytes is None else 0.0
    if lag_bytes:
        published = await _published_at(transport, strip_meta(journal), offset)
        lag_seconds = None if published is None else round(max(now - published, 0.0), 3)
    return SourceState(journal, offset, lag_bytes, lag_seconds)


async def _published_at(transport: Transport, journal: str, offset: int) -> float | None:
    """Return the publication time of the message at an offset, in Unix seconds; None if unknown."""
    try:
        return await published_at(transport, journal, offset)
    except GazetteError as error:
        _log.warning("the lag in time is unknown", extra={"journal": journal, "err": str(error)})
        return None


def _processes(listing: cpb.ListResponse) -> list[ProcessState]:
    """Return the processes, by the application's own list, or those that hold shards."""
    found: dict[str, ProcessState] = {}
    for spec in listing.processes:
        process = spec.process_spec
        found[_member(process.id)] = ProcessState(
            process.id.zone, process.id.suffix, process.endpoint, is_exiting=spec.exiting
        )
    for shard in listing.shards:
        route = shard.route
        for index, (member, endpoint) in enumerate(
            zip(route.members, route.endpoints, strict=True)
        ):
            state = found.setdefault(
                _member(member), ProcessState(member.zone, member.suffix, endpoint)
            )
            if index == route.primary:
                state.primary += 1
            else:
                state.standby += 1
    return [found[name] for name in sorted(found)]


def _member(process: pb.ProcessSpec.ID) -> str:
    return f"{process.zone}/{process.suffix}"


def _time_text(us: int) -> str:
    return datetime.fromtimestamp(us / SECOND_US, UTC).isoformat(timespec="milliseconds")


# ---------------------------------------------------------------- output


def _write(shown: Mapping[str, Any], form: str) -> None:
    if form == "yaml":
        sys.stdout.write(strict_yaml.document(shown))
    else:
        sys.stdout.write(orjson.dumps(shown).decode() + "\n")


def _summary_cells(summary: Mapping[str, Any]) -> list[str]:
    unknown = summary["lag_bytes_unknown"]
    lag = _bytes(summary["lag_bytes"])
    if unknown and lag != UNKNOWN:
        lag += f", and of {unknown} unknown"
    return [
        summary["application"] or UNKNOWN,
        summary["address"],
        *(str(summary[name]) for name in ("processes", "shards", "primary", "failed")),
        lag,
        _seconds(summary["lag_seconds"]),
    ]


def _write_described(state: ApplicationState) -> None:
    write_table(
        ["Application", "Address", "Processes", "Shards", "Primary", "Failed", "Lag", "Age"],
        [_summary_cells(state.summary())],
    )
    sys.stdout.write("\n")
    write_table(
        ["Process", "Zone", "Endpoint", "Primary", "Standby", "Exiting"],
        (
            [
                each.id,
                each.zone,
                each.endpoint or UNKNOWN,
                str(each.primary),
                str(each.standby),
                UNKNOWN if each.is_exiting is None else str(each.is_exiting).lower(),
            ]
            for each in state.processes
        ),
    )
    sys.stdout.write("\n")
    headers = ["Shard", "State", "Primary", "Standbys", "Lag", "Age", "Rate", "Watermark"]
    write_table([*headers, "Recovered", "Error"], map(_shard_cells, state.shards))


def _shard_cells(shard: ShardState) -> list[str]:
    recovered = UNKNOWN
    if shard.recovered_bytes is not None and shard.recovery_bytes is not None:
        recovered = f"{iec_bytes(shard.recovered_bytes)} of {iec_bytes(shard.recovery_bytes)}"
    return [
        shard.id,
        shard.state,
        shard.primary or UNKNOWN,
        ",".join(shard.standbys) or UNKNOWN,
        _bytes(shard.lag_bytes),
        _seconds(shard.lag_seconds),
        UNKNOWN if shard.rate is None else f"{iec_bytes(shard.rate)}/s",
        shard.watermark or UNKNOWN,
        recovered,
        shard.error or UNKNOWN,
    ]


def _bytes(count: int | None) -> str:
    return UNKNOWN if count is None else iec_bytes(count)


def _seconds(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else format_duration(round(seconds * 10) * SECOND_NS // 10)


def _warn_of_faults(found: Iterable[ApplicationState]) -> None:
    """Log why source journals are not read, which has no place in the tables."""
    for each in found:
        for fault in each.faults:
            _log.warning(
                "journals are not read", extra={"application": each.application, "err": fault}
            )
