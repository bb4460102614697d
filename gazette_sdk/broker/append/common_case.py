"""The common cases of appends and of pulses, in one synchronous function each (broker section 5).

Most appends are small, arrive whole, and find their journal as the append before them left it:
the same route, a free and synchronized pipeline, nothing to roll, nothing to wait for.
:func:`append_now` performs such an append in one step. It takes its decisions from the same
judgements as the append machine (`machine`), and declines whatever the machine would answer
otherwise than by a commit. It declines without any effect; the machine runs the append then.

Most pulses find a journal without peers as the pulse before them left it. :func:`is_at_rest`
recognizes it, so that a broker with thousands of idle journals need not run the machine for each.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from google.protobuf.message import DecodeError

from gazette_sdk.broker.append.append import Appends
from gazette_sdk.broker.append.machine import (
    Input,
    Terms,
    changed_registers,
    judge_preconditions,
    may_carry_content,
    next_proposal,
)
from gazette_sdk.broker.append.preconditions import continues_without
from gazette_sdk.broker.failover.pause_guard import KnownLease
from gazette_sdk.broker.fragments.index import Summary
from gazette_sdk.broker.metrics import SERVER_COMPLETED, SERVER_STARTED
from gazette_sdk.broker.replica import Replica
from gazette_sdk.broker.replication.peer_stream import Answer
from gazette_sdk.broker.replication.pipeline import Pipeline
from gazette_sdk.broker.spool.spool import Spool
from gazette_sdk.cluster.lease import BOOT_CLOCK
from gazette_sdk.errors import UnauthenticatedError, ValidationError
from gazette_sdk.fragment.registry import StoreHealth
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import AllowAll, Authority, Capability, Claims
from gazette_sdk.protocol.fragments import set_sum
from gazette_sdk.protocol.rules import validate
from gazette_sdk.server.authorization import Call
from gazette_sdk.tracing import ServedSpan, served_span

OPENING_BYTES_MAX = 1024
"""Longer opening requests go through the machine: short ones are kept."""

_OPENINGS_MAX = 4096
"""Opening requests kept. A client sends the same bytes for all of its appends to a journal."""

_APPENDS_STARTED = SERVER_STARTED.cell("Append")
_APPENDS_OK = SERVER_COMPLETED.cell("Append", "ok")

_MESSAGES = 2
"""Messages of a whole append after its opening: the chunk, and the one that commits."""


class StartedAppend(NamedTuple):
    """Append that our own spool has committed.

    Attributes:
        response: encoded response, valid when :meth:`acknowledged` has returned.
        pipeline: its pipeline. If an append fails, later ones of the same pipeline fail, too.
        answers: answers of the peers; none if there are no peers.
        known_lease: knowledge about this broker's lease.
        commit: what it has appended.
        span: its span, to be ended when it is acknowledged; None if it is not traced.
    """

    response: bytes
    pipeline: Pipeline
    answers: Sequence[asyncio.Future[Answer]]
    known_lease: KnownLease
    commit: pb.Fragment
    span: ServedSpan | None

    async def acknowledged(self) -> None:
        """Wait until every peer has acknowledged it.

        Raises:
            GazetteError: a peer did not, or this broker's lease may have ended meanwhile.
        """
        await self.pipeline.acknowledged(self.answers)
        if (error := self.known_lease.error(self.pipeline.spool.journal)) is not None:
            raise error


class InlineAppends:
    """Service of appends that can be made without waiting for anything.

    Args:
        shared: what all appends of the broker share.
        authority: verifies callers.
    """

    def __init__(self, shared: Appends, authority: Authority | AllowAll) -> None:
        self._shared = shared
        self._authority = authority

    def append_now(
        self, opening: bytes, content: bytes, call: Call, earlier: object | None
    ) -> StartedAppend | None:
        """Authorize, validate and count an append, and make it by :func:`append_now`.

        Args:
            opening: the encoded opening request.
            content: all content. The client has committed it.
            call: the call's metadata.
            earlier: see :func:`append_now`.

        Returns:
            the append, whose acknowledgement ``JournalService.append_acknowledged`` awaits if it
            has :attr:`~StartedAppend.answers`; ``None`` where ``JournalService.append`` has to be
            called instead. Nothing has changed then.
        """
        request = _valid_opening(opening) if len(opening) <= OPENING_BYTES_MAX else None
        if request is None:
            return None
        try:
            claims = self._authority.verify(
                call.authorization, Capability.APPEND, self._shared.now()
            )
        except UnauthenticatedError:
            return None
        parent = call.traceparent
        started = append_now(self._shared, request, content, claims, earlier=earlier, parent=parent)
        if started is not None:
            _APPENDS_STARTED.value += 1
            if not started.answers:
                _APPENDS_OK.value += 1
                if started.span is not None:
                    started.span.end(started.commit)
        return started


@lru_cache(_OPENINGS_MAX)
def _valid_opening(encoded: bytes) -> pb.AppendRequest | None:
    """Return an opening request, which is shared: do not change it. ``None`` if it is not valid."""
    try:
        request = pb.AppendRequest.FromString(encoded)
        validate(request)
    except (DecodeError, ValidationError):
        return None
    return request


def append_now(
    shared: Appends,
    request: pb.AppendRequest,
    content: bytes,
    claims: Claims,
    *,
    earlier: object | None = None,
    parent: str = "",
) -> StartedAppend | None:
    """Append small content that is at hand to a journal that is ready for it.

    Args:
        shared: what all appends of the broker share.
        request: the opening request, already valid.
        content: all content. The client has committed it.
        claims: what the caller may see.
        earlier: pipeline of the client's earlier appends that are not acknowledged yet; ``None``
            if there are none.
        parent: context of the caller's span; empty for none.

    Returns:
        the append; ``None`` if it has to go through the machine. Nothing has changed then.
    """
    begun_ns = time.time_ns() if parent else 0
    replica = _ready_replica(shared, request, claims)
    if replica is None or replica.ready is None or not content:
        return None
    _, pipeline, terms, encoded_header = replica.ready
    now = shared.now()
    if earlier is not None and earlier is not pipeline:
        return None
    may_go_on = not pipeline.streams or _may_await(pipeline, claims, now)
    if not (may_go_on and _is_alive(shared.known_lease)):
        return None

    spool = pipeline.spool
    fragment = spool.fragment
    if not _will_commit(request, terms, spool, replica.index.summary(), now):
        return None
    registers = changed_registers(request, spool.registers)
    committed = spool.append_now(content, registers)
    if committed is None:
        return None

    shared.carried.appended += len(content)
    replica.topic_bytes.value += len(content)
    response = pb.AppendResponse()  # keywords cost several times what assignments do
    response.registers.CopyFrom(registers)
    response.total_chunks = _MESSAGES
    commit = response.commit
    commit.CopyFrom(committed)
    commit.begin = fragment.end
    set_sum(commit.sum, hashlib.sha1(content, usedforsecurity=False).digest())
    encoded = encoded_header + response.SerializeToString()
    span = served_span("append", spool.journal, parent, begun_ns) if parent else None
    answers: Sequence[asyncio.Future[Answer]] = ()
    if pipeline.streams:
        parent = parent if span is None else span.traceparent
        answers = pipeline.replicate_now(content, committed, registers, parent)
    else:
        replica.acknowledge(committed)
    return StartedAppend(encoded, pipeline, answers, shared.known_lease, commit, span)


_PULSES: Mapping[int, pb.AppendRequest] = {
    mode: pb.AppendRequest(suspend=mode)
    for mode in (pb.AppendRequest.SUSPEND_NO_RESUME, pb.AppendRequest.SUSPEND_IF_FLUSHED)
}
"""Opening requests of pulses, by their mode."""


def is_at_rest(shared: Appends, replica: Replica, mode: int) -> bool:
    """Return True if a pulse of a journal that has no peers would do nothing.

    An earlier append has found the same route ready, and all is committed, acknowledged and
    reported. There is nothing to close, to flush or to suspend, and the store is healthy. A journal
    with peers is never at rest: a pulse tests them.

    Args:
        shared: what all appends of the broker share.
        replica: of the journal, whose primary we are.
        mode: the pulse's ``AppendRequest.Suspend``.
    """
    ready, index = replica.ready, replica.index
    if (
        ready is None
        or ready.pipeline.streams
        or not replica.pipeline.free
        or not index.first_refresh.is_set()
        or not shared.resolver.is_current(ready.resolution, replica)
        or shared.refusal(replica.journal)
        or not _is_alive(shared.known_lease)
    ):
        return False
    health = _store_health(shared, ready.terms)
    if health is not None and health.error is not None:
        return False
    spool, terms, now = ready.pipeline.spool, ready.terms, shared.now()
    fragment = spool.fragment
    if (
        replica.agreed is None
        or replica.agreed.end != fragment.end
        or replica.write_head.value != fragment.end
        or replica.head_is_known != (fragment.end > 0)
        or index.acknowledged_end < fragment.end
    ):
        return False
    verdict = judge_preconditions(
        _PULSES[mode], terms, spool.registers, fragment, index.summary(), now=now
    )
    is_refused = verdict.input is Input.REFUSED and verdict.status == pb.SUSPENDED
    if not (is_refused or (verdict.input is Input.AGREED and not verdict.roll_to)):
        return False
    if fragment.begin == fragment.end:
        return fragment.compression_codec == terms.codec
    return next_proposal(fragment, spool.first_append_s, terms, roll_to=0, now=now) is fragment


def _ready_replica(shared: Appends, request: pb.AppendRequest, claims: Claims) -> Replica | None:
    """Return our replica, if the machine would get to the preconditions without waiting.

    That holds if route and pipeline are those with which an earlier append got there, and the
    pipeline's slot is free: nothing between the two states depends on anything else.
    """
    if request.HasField("header"):
        return None
    resolution = shared.resolver.known(
        request.journal,
        claims,
        may_proxy=not request.do_not_proxy,
        require_primary=True,
        min_revision=request.min_etcd_revision,
    )
    if resolution is None or resolution.replica is None or resolution.invalidated is None:
        return None
    replica = resolution.replica
    ready = replica.ready
    if ready is None or ready.resolution is not resolution or resolution.invalidated.fired:
        return None
    health = _store_health(shared, ready.terms)
    if (
        health is not None
        and health.error is not None
        and not (
            replica.head_is_known
            and continues_without(
                health,
                asyncio.get_running_loop().time(),
                has_peers=bool(ready.pipeline.streams),
            )
        )
    ):
        return None
    is_head_known = replica.index.first_refresh.is_set() or replica.head_is_known
    return replica if replica.pipeline.free and is_head_known else None


def _store_health(shared: Appends, terms: Terms) -> StoreHealth | None:
    """Return the health of a journal's first store, if it has one, and request its next check.

    Looked up by URL each time: an instance which failed or was swept is replaced.
    """
    if terms.store is None:
        return None
    health = shared.stores.health(terms.store)
    health.request_soon()
    return health


def _is_alive(lease: KnownLease) -> bool:
    return (
        time.clock_gettime(BOOT_CLOCK) < lease.until_boot_s
        and lease.since_wall_s <= time.time() < lease.until_wall_s
    )


def _may_await(pipeline: Pipeline, claims: Claims, now: float) -> bool:
    """Return True if the acknowledgement of the peers can be awaited without a deadline."""
    is_valid_long_enough = claims.expires_at - now > pipeline.answer_timeout_s + 1
    return is_valid_long_enough and pipeline.error is None and pipeline.has_room


def _will_commit(
    request: pb.AppendRequest, terms: Terms, spool: Spool, index: Summary, now: float
) -> bool:
    """Return True if the preconditions hold, and content follows what the spool has."""
    if not terms.may_write or terms.max_append_rate or not may_carry_content(request.suspend):
        return False
    fragment = spool.fragment
    verdict = judge_preconditions(request, terms, spool.registers, fragment, index, now=now)
    if verdict.input is not Input.AGREED or verdict.status != pb.OK or verdict.roll_to:
        return False
    first_append_s = spool.first_append_s
    return next_proposal(fragment, first_append_s, terms, roll_to=0, now=now) is fragment
