"""Pages of shards over all processes of an application, and the wish of an autoscaler.

State, processes and errors of shards are those that Etcd has. How far a shard is, only its primary
knows: each process is asked for all shards that it leads, in one call with the caller's token.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message

from gazette_sdk.cluster.consumer_keys import ConsumerKeySpace
from gazette_sdk.errors import UnauthenticatedError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import cluster_pb2 as clpb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.authorization import Capability, Claims
from gazette_sdk.protocol.labels import Matcher
from gazette_sdk.protocol.rules import SCALE_RPC, SHARDS_PAGE_RPC, Rpc, unrouted_header
from gazette_sdk.protocol.shard_spec import (
    DEFAULT_MAX_HOT_STANDBYS,
    desired_replication,
    error_text,
    recovery_log,
    reduce_status,
    selector_labels,
    status_name,
)
from gazette_sdk.server.authorization import Authorization, Call
from gazette_sdk.server.grpc_server import Method
from gazette_sdk.server.json_gateway import JsonUnary
from gazette_sdk.server.paging import PageCut
from gazette_sdk.shard.consumer.lag import PERIOD_S, ShardLag, ShardLags
from gazette_sdk.shard.consumer.resolver import ServedShard, ShardResolver
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.loop import LoopSlices
from gazette_sdk.transport.member_calls import MemberAnswer, MemberCalls

LAGGING_S = 60.0
"""Lag from which on a shard counts for an autoscaler: less is caught up by itself."""

DISABLED = "DISABLED"
"""State of a shard that is assigned to no process, by its spec."""

_UNASKED = object()
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Listed:
    """Shard as Etcd has it.

    Attributes:
        spec: its spec.
        labels: its labels, and its id.
        code: greatest status of its replicas.
        state: its name.
        error: errors of its processes.
        primary: zone and id of the process that leads it.
        text: text that a search looks through.
    """

    spec: cpb.ShardSpec
    labels: pb.LabelSet
    code: int
    state: str
    error: str
    primary: tuple[str, str] | None
    text: str


_Progress = Mapping[str, clpb.ShardsPageResponse.Row]
"""By shard, what its primary knows."""

_VALUES: Mapping[int, Callable[[_Listed, clpb.ShardsPageResponse.Row | None], Any]] = {
    clpb.BY_ID: lambda _, __: None,
    clpb.BY_SHARD_STATE: lambda listed, _: listed.code,
    clpb.BY_LAG_BYTES: lambda _, row: _optional(row, "lag_bytes"),
    clpb.BY_LAG_SECONDS: lambda _, row: _optional(row, "lag_s"),
}


def _optional(row: clpb.ShardsPageResponse.Row | None, name: str) -> Any:
    return getattr(row, name) if row is not None and row.HasField(name) else None


class ShardPages:
    """Calls that show the shards of an application, and how many processes it needs.

    Args:
        resolver: has the shards of this process.
        keyspace: mirror of Etcd.
        transport: to the journals, for write heads and the ages of messages.
        members: calls other processes with the tokens of callers.
        authorization: verifies callers.
        application: name of the application.
        max_hot_standbys: cap of the standbys of all shards.
    """

    def __init__(
        self,
        *,
        resolver: ShardResolver[Any],
        keyspace: ConsumerKeySpace,
        transport: Transport,
        members: MemberCalls,
        authorization: Authorization,
        application: str = "",
        max_hot_standbys: int = DEFAULT_MAX_HOT_STANDBYS,
    ) -> None:
        self._resolver = resolver
        self._keyspace = keyspace
        self._members = members
        self._authorization = authorization
        self._application = application
        self._max_hot_standbys = max_hot_standbys
        self._lags = ShardLags(transport, self._led)
        self._listing = asyncio.Lock()
        self._listed: list[_Listed] = []
        self._listed_at = -1  # a revision of Etcd
        self._asked: dict[tuple[str, str | None], _Asked] = {}

    async def lags(self) -> Mapping[str, ShardLag]:
        """Return the lags of the shards that this process leads."""
        return await self._lags.measured()

    # ---------------------------------------------------------------- Page

    async def page(self, request: clpb.ShardsPageRequest, call: Call) -> clpb.ShardsPageResponse:
        """Return shards in an order, with their lag if the caller may read."""
        if request.local:
            claims = self._authorization.verify(call, Capability.LIST | Capability.READ)
            async with self._authorization.bound(claims, call):
                return await self._local_page(claims)
        claims, may_read = self._claims(call)
        cut = PageCut[_Listed].of(request, sorts=_VALUES, by_id=clpb.BY_ID)
        async with self._authorization.bound(claims, call):
            progress = await self._progress(call) if may_read else {}
            return await self._page(request, cut, claims, progress)

    def _claims(self, call: Call) -> tuple[Claims, bool]:
        """Return the claims of a caller that may list, and True if it may also read."""
        try:
            return self._authorization.verify(call, Capability.LIST | Capability.READ), True
        except UnauthenticatedError:
            return self._authorization.verify(call, Capability.LIST), False

    async def _page(
        self,
        request: clpb.ShardsPageRequest,
        cut: PageCut[_Listed],
        claims: Claims,
        progress: _Progress,
    ) -> clpb.ShardsPageResponse:
        response = clpb.ShardsPageResponse(header=self._header(), application=self._application)
        wanted, search = Matcher(request.selector), request.search.casefold()
        states, found = frozenset(request.states), Counter[str]()
        value_of, slices = _VALUES[request.sort], LoopSlices()
        async for listed in self._allowed(claims):
            await slices.rest()
            if not wanted.labels(listed.labels) or search not in listed.text:
                continue
            if request.source and not _reads(listed.spec, request.source):
                continue
            found[listed.state] += 1
            if states and listed.state not in states:
                continue
            response.total += 1
            shard = listed.spec.id
            cut.add(value_of(listed, progress.get(shard)), shard, listed)
        response.states.update(found)
        response.revision = self._listed_at
        members: dict[tuple[str, str], int] = {}
        rows, response.next = cut.rows()
        for listed in rows:
            row = response.rows.add()
            if (known := progress.get(listed.spec.id)) is not None:
                row.CopyFrom(known)
            self._fill(row, listed, members)
        response.members.extend(pb.ProcessSpec.ID(zone=zone, suffix=id_) for zone, id_ in members)
        return response

    def _fill(
        self,
        row: clpb.ShardsPageResponse.Row,
        listed: _Listed,
        members: dict[tuple[str, str], int],
    ) -> None:
        """Set what Etcd has of a shard."""
        row.id = listed.spec.id
        row.state = listed.state
        row.error = listed.error
        row.labels.CopyFrom(listed.spec.labels)
        row.recovery_log = recovery_log(listed.spec)
        for member in self._keyspace.shard_route(listed.spec.id).members:
            place = member.zone, member.suffix
            index = members.setdefault(place, len(members))
            row.members.append(index)
            if place == listed.primary:
                row.primary = index

    async def _allowed(self, claims: Claims) -> AsyncIterator[_Listed]:
        """Yield the shards that a caller may see, in order of their ids."""
        allowed = Matcher(claims.selector)
        for listed in await self._all():
            if allowed.labels(listed.labels):
                yield listed

    async def _all(self) -> Sequence[_Listed]:
        """Return all shards as of the mirror's revision."""
        async with self._listing:
            if self._listed_at != (revision := self._keyspace.header.revision):
                slices, listed = LoopSlices(), []
                for item in self._keyspace.items():
                    listed.append(self._listed_of(item.value))
                    await slices.rest()
                self._listed, self._listed_at = listed, revision
            return self._listed

    def _listed_of(self, spec: cpb.ShardSpec) -> _Listed:
        assignments = self._keyspace.assignments(spec.id)
        status = reduce_status(entry.value for entry in assignments)
        is_disabled = spec.disable and not assignments
        labels = [f"{label.name}={label.value}" for label in spec.labels.labels]
        return _Listed(
            spec=spec,
            labels=selector_labels(spec),
            code=-1 if is_disabled else status.code,
            state=DISABLED if is_disabled else status_name(status),
            error=error_text(entry.value for entry in assignments),
            primary=next(((each.zone, each.suffix) for each in assignments if not each.slot), None),
            text="\n".join((spec.id, *labels)).casefold(),
        )

    # ------------------------------------------------------------ progress

    async def _led(self) -> Mapping[str, ServedShard]:
        """Return the shards that this process leads."""
        me, local = self._resolver.local_id, self._resolver.local
        led: dict[str, ServedShard] = {}
        slices = LoopSlices()
        for entry in self._keyspace.local_assignments(me.zone, me.suffix):
            await slices.rest()
            if not entry.slot and (shard := local.get(entry.item)) is not None:
                led[entry.item] = shard
        return led

    async def _local_page(self, claims: Claims) -> clpb.ShardsPageResponse:
        """Return what this process knows of the shards that it leads."""
        response = clpb.ShardsPageResponse(header=self._header(), application=self._application)
        slices, lags, led = LoopSlices(), await self._lags.measured(), await self._led()
        async for listed in self._allowed(claims):
            await slices.rest()
            if (shard := led.get(listed.spec.id)) is None:
                continue
            row = response.rows.add(id=listed.spec.id)
            row.read_through.update(shard.read_through)
            if shard.watermark_us:
                row.watermark_us = shard.watermark_us
            read, to_read = shard.recovery
            if to_read:
                row.recovered_bytes, row.recovery_bytes = read, to_read
            if (lag := lags.get(listed.spec.id)) is not None:
                if lag.bytes is not None:
                    row.lag_bytes = lag.bytes
                if lag.seconds is not None:
                    row.lag_s = round(lag.seconds, 3)
        response.total = len(response.rows)
        return response

    async def _progress(self, call: Call) -> _Progress:
        """Return what the primaries know of the shards that the caller may read."""
        request = clpb.ShardsPageRequest(local=True)
        answers = await self._answers(SHARDS_PAGE_RPC, request, call, self.page)
        progress: dict[str, clpb.ShardsPageResponse.Row] = {}
        slices = LoopSlices()
        for answer in answers.values():
            for row in () if answer is None else answer.rows:
                progress[row.id] = row
                await slices.rest()
        return progress

    async def _answers(
        self,
        rpc: Rpc,
        request: Message,
        call: Call,
        answer_here: Callable[[Any, Call], Any],
    ) -> Mapping[tuple[str, str], Any]:
        """Return the answers of all processes that lead shards, of the last two seconds.

        Args:
            rpc: the call.
            request: the request, of an answer for the called process alone.
            call: the caller's, whose token others check again.
            answer_here: makes the answer of this process.
        """
        now = time.monotonic()
        for key in [key for key, each in self._asked.items() if each.is_over(now)]:
            del self._asked[key]
        asked = self._asked.setdefault((rpc.path, call.authorization), _Asked())
        async with asked.lock:
            if asked.is_stale(time.monotonic()):
                me, leading = self._resolver.local_id, list(self._leading())
                others = [(each, request) for each in leading if each.id != me]
                async with asyncio.TaskGroup() as group:
                    asking = group.create_task(self._members.ask(rpc, others, call))
                    answers = {}
                    if len(others) < len(leading):
                        answers[me.zone, me.suffix] = await answer_here(request, call)
                for each in asking.result():
                    answers[each.member.id.zone, each.member.id.suffix] = _response_of(each)
                asked.answers = answers
                asked.at = time.monotonic()
        return asked.answers

    def _leading(self) -> Iterator[pb.ProcessSpec]:
        """Yield the processes that lead shards."""
        for entry in self._keyspace.members():
            if any(not a.slot for a in self._keyspace.local_assignments(entry.zone, entry.suffix)):
                yield entry.value.process_spec

    # --------------------------------------------------------------- Scale

    async def scale(self, request: clpb.ScaleRequest, call: Call) -> clpb.ScaleResponse:
        """Return how many processes the shards need that the caller may list.

        Failed shards do not count: another process does not help them. The shards of a process that
        does not answer count as lagging: it has too much to do, or is gone.
        """
        claims = self._authorization.verify(call, Capability.LIST)
        async with self._authorization.bound(claims, call):
            if request.local:
                return await self._local_scale(claims)
            answers = await self._answers(
                SCALE_RPC, clpb.ScaleRequest(local=True), call, self.scale
            )
            response, count, least = clpb.ScaleResponse(), 0, 1
            slices = LoopSlices()
            async for listed in self._allowed(claims):
                await slices.rest()
                count += listed.state != DISABLED
                least = max(least, desired_replication(listed.spec, self._max_hot_standbys))
                if listed.primary is not None and answers.get(listed.primary, _UNASKED) is None:
                    response.shards_with_lag += listed.code != cpb.ReplicaStatus.FAILED
            for answer in answers.values():
                if answer is not None:
                    response.lag_bytes += answer.lag_bytes
                    response.lag_seconds = max(response.lag_seconds, answer.lag_seconds)
                    response.shards_with_lag += answer.shards_with_lag
            response.processes = max(min(response.shards_with_lag, count), least)
            return response

    async def _local_scale(self, claims: Claims) -> clpb.ScaleResponse:
        """Return the lag of the shards that this process leads."""
        slices, lags = LoopSlices(), await self._lags.measured()
        response = clpb.ScaleResponse()
        async for listed in self._allowed(claims):
            await slices.rest()
            lag = lags.get(listed.spec.id)
            if lag is None or listed.code == cpb.ReplicaStatus.FAILED:
                continue
            seconds = lag.seconds or 0.0
            response.lag_bytes += lag.bytes or 0
            response.lag_seconds = max(response.lag_seconds, round(seconds, 3))
            response.shards_with_lag += seconds > LAGGING_S
        return response

    def _header(self) -> pb.Header:
        me = self._resolver.local_id
        known = self._keyspace.member(me.zone, me.suffix) is not None
        return unrouted_header(me if known else None, self._keyspace.header)


def _response_of(answer: MemberAnswer) -> Any:
    """Return the answer of a process; None without one: what it alone knows is left out."""
    if answer.error is not None:
        process = f"{answer.member.id.zone}/{answer.member.id.suffix}"
        fields = {"process": process, "err": str(answer.error)}
        _log.debug("a process does not answer", extra=fields)
    return answer.response


@dataclass(slots=True)
class _Asked:
    """Answers of processes to one caller, and the lock of those who wait for them."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    at: float = -math.inf
    answers: Mapping[tuple[str, str], Any] = field(default_factory=dict)

    def is_stale(self, now: float) -> bool:
        return now - self.at >= PERIOD_S

    def is_over(self, now: float) -> bool:
        return self.is_stale(now) and not self.lock.locked()


def _reads(spec: cpb.ShardSpec, journal: str) -> bool:
    return any(source.journal == journal for source in spec.sources)


# ---------------------------------------------------------------- on the wires


def page_methods(pages: ShardPages) -> Iterator[Method]:
    """Return the methods to register with a :class:`~gazette_sdk.server.grpc_server.GrpcServer`."""
    yield Method(SHARDS_PAGE_RPC, pages.page)
    yield Method(SCALE_RPC, pages.scale)


def json_page_methods(pages: ShardPages) -> Mapping[str, JsonUnary]:
    """Return ``/v1/shards/page`` and ``/v1/shards/scale``, for a ``JsonGateway``."""
    return {
        "/v1/shards/page": JsonUnary(Capability.LIST, clpb.ShardsPageRequest, pages.page),
        "/v1/shards/scale": JsonUnary(
            Capability.LIST, clpb.ScaleRequest, pages.scale, allows_get=True
        ),
    }
