"""The common case of an append, in one synchronous function (broker section 5).

Most appends are small, arrive whole, and find their journal as the append before them left it:
the same route, a free and synchronized pipeline, nothing to roll, nothing to wait for.
:func:`append_now` performs such an append in one step. It takes its decisions from the same
judgements as the append machine (`inputs`), and declines whatever the machine would answer
otherwise than by a commit. It declines without any effect; the machine runs the append then.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from gazette_sdk.broker.append.append import Appends
from gazette_sdk.broker.append.inputs import (
    Terms,
    changed_registers,
    judge_preconditions,
    may_carry_content,
    next_proposal,
)
from gazette_sdk.broker.append.machine import Input
from gazette_sdk.broker.append.store_health import is_healthy
from gazette_sdk.broker.fragments.index import Summary
from gazette_sdk.broker.replica import Replica
from gazette_sdk.broker.replication.pipeline import (
    PEER_ANSWER_TIMEOUT_S,
    Answer,
    Pipeline,
)
from gazette_sdk.broker.spool.spool import Spool
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Claims
from gazette_sdk.protocol.fragments import set_sum

__all__ = ["StartedAppend", "append_now"]

_MESSAGES = 2
"""Messages of a whole append behind its opening: the chunk, and the one that commits."""


@dataclass(frozen=True, slots=True)
class StartedAppend:
    """Append that our own spool has committed.

    Attributes:
        response: encoded response, valid when :meth:`acknowledged` has returned.
        pipeline: its pipeline. If an append fails, later ones of the same pipeline fail, too.
        answers: answers of the peers; none if there are no peers.
    """

    response: bytes
    pipeline: Pipeline
    answers: Sequence[asyncio.Future[Answer]]
    _replica: Replica
    _committed: pb.Fragment

    async def acknowledged(self) -> None:
        """Wait until every peer has acknowledged it.

        Raises:
            GazetteError: a peer did not.
        """
        await self.pipeline.acknowledged(self.answers)
        self._replica.acknowledge(self._committed)


def append_now(
    shared: Appends,
    request: pb.AppendRequest,
    content: bytes,
    claims: Claims,
    *,
    behind: object | None = None,
) -> StartedAppend | None:
    """Append small content that is at hand to a journal that is ready for it.

    Args:
        shared: what all appends of the broker share.
        request: the opening request, already valid.
        content: all content. The client has committed it.
        claims: what the caller may see.
        behind: pipeline of the client's earlier appends that are not acknowledged yet; ``None``
            if there are none.

    Returns:
        the append; ``None`` if it has to go through the machine. Nothing has changed then.
    """
    replica = _ready_replica(shared, request, claims)
    if replica is None or replica.ready is None or not content:
        return None
    _, pipeline, terms, encoded_header = replica.ready
    now = shared.now()
    if behind is not None and behind is not pipeline:
        return None
    if pipeline.streams and not _may_await(pipeline, claims, now):
        return None

    spool = pipeline.spool
    fragment = spool.fragment
    if not _will_commit(request, terms, spool, replica.index.summary(), now):
        return None
    registers = changed_registers(request, spool.registers)
    committed = spool.append_now(content, registers)
    if committed is None:
        return None

    response = pb.AppendResponse(registers=registers, total_chunks=_MESSAGES)
    commit = response.commit
    commit.CopyFrom(committed)
    commit.begin = fragment.end
    set_sum(commit.sum, hashlib.sha1(content, usedforsecurity=False).digest())
    encoded = encoded_header + response.SerializeToString()
    answers: Sequence[asyncio.Future[Answer]] = ()
    if pipeline.streams:
        answers = pipeline.replicate_now(content, committed, registers)
    else:
        replica.acknowledge(committed)
    return StartedAppend(encoded, pipeline, answers, replica, committed)


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
    is_ready = replica.pipeline.free and is_healthy(replica.index, shared.stores, ready.terms.store)
    return replica if is_ready else None


def _may_await(pipeline: Pipeline, claims: Claims, now: float) -> bool:
    """Return True if the acknowledgement of the peers can be awaited without a deadline."""
    is_valid_long_enough = claims.expires_at - now > PEER_ANSWER_TIMEOUT_S + 1
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
