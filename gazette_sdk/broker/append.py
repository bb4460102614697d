"""One append, from its request to its answer: the shell around the append machine.

The tables of `append_machine` say what follows what. This module does what they name: resolves,
takes the pipeline, synchronizes it, waits for the index and the store, streams the client's
content, collects acknowledgements. Nothing stays taken when an append ends, however it ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from gazette_sdk.broker.append_judgements import (
    Facts,
    judge_preconditions,
    judge_replicas,
    judge_resolution,
    next_proposal,
)
from gazette_sdk.broker.append_machine import (
    ENDS,
    SYNC_ROUNDS_MAX,
    ContentEffect,
    Effect,
    Input,
    State,
    step,
)
from gazette_sdk.broker.assignments import write_route, write_suspend
from gazette_sdk.broker.content import Content, Pace
from gazette_sdk.broker.pipeline import (
    Answer,
    OpenStream,
    PeerStream,
    Pipeline,
    judge_acks,
    judge_sync,
)
from gazette_sdk.broker.replica import Replica
from gazette_sdk.broker.resolver import Resolution, Resolver
from gazette_sdk.broker.slot import InvalidatedError
from gazette_sdk.broker.store_health import StoreUnhealthyError, await_health
from gazette_sdk.broker.suspend import may_carry_content
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.errors import CallError, GazetteError, UnavailableError
from gazette_sdk.fragment.registry import StoreRegistry
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Claims
from gazette_sdk.protocol.journal_spec import desired_replication, may_write
from gazette_sdk.protocol.labels import subtract, union
from gazette_sdk.transport.base import AppendItem, Target, Transport

__all__ = ["Appends"]

_EMPTY_REGISTERS = pb.LabelSet()


@dataclass(frozen=True, slots=True)
class Appends:
    """What all appends of a broker share.

    Attributes:
        resolver: resolves journals.
        etcd: where routes and suspensions are written.
        stores: fragment stores, for their health.
        peers: carries appends to other primaries, and replication.
        max_replication: cap of every journal's replication.
        now: Unix time, in seconds.
    """

    resolver: Resolver
    etcd: Etcd
    stores: StoreRegistry
    peers: Transport
    max_replication: int
    now: Callable[[], float] = field(default=time.time)

    async def append(
        self, request: pb.AppendRequest, items: AsyncIterator[AppendItem], claims: Claims
    ) -> pb.AppendResponse:
        """Append to a journal.

        Args:
            request: the opening request, already valid.
            items: what follows it.
            claims: what the caller may see.

        Returns:
            a response of any status.

        Raises:
            GazetteError: the append failed, and was rolled back unless a peer's failure makes its
                outcome unknown.
        """
        return await _Append(self, request, items, claims).run()


class _Append:
    """One append under way."""

    def __init__(
        self,
        shared: Appends,
        request: pb.AppendRequest,
        items: AsyncIterator[AppendItem],
        claims: Claims,
    ) -> None:
        self._shared = shared
        self._request = request
        self._items = items
        self._claims = claims
        self._started_at = asyncio.get_running_loop().time()

        # What was learned on the way.
        self._resolution: Resolution
        self._held: Replica | None = None  # whose pipeline slot is ours
        self._pipeline: Pipeline | None = None  # what we took out of it
        self._read_through = request.min_etcd_revision
        self._registers = _EMPTY_REGISTERS
        self._roll_to = 0
        self._sync_rounds = 0
        self._suspend = pb.JournalSpec.Suspend()
        self._status: pb.Status = pb.OK
        self._store_error = ""
        self._cause: BaseException | None = None

        # The outcome.
        self._answers: list[asyncio.Future[Answer]] = []
        self._acking: Pipeline
        self._commit: pb.Fragment
        self._total_chunks = 0
        self._delayed_chunks = 0

    async def run(self) -> pb.AppendResponse:
        """Go through the machine's states to one of its ends."""
        state = State.RESOLVE
        try:
            while state not in ENDS:
                given = await self._act(state)
                effects, state = step(state, given)
                for effect in effects:
                    await self._perform(effect)
        finally:
            # Reached with something in our hands only if the broker itself failed.
            if self._held is not None:
                await self._perform(Effect.TEAR_DOWN)
                await self._perform(Effect.RELEASE)

        if state is State.PROXY:
            return await self._proxy()
        if state is State.FINISHED:
            return self._response()
        if self._cause is not None:
            raise self._cause
        return self._response()

    async def _act(self, state: State) -> Input:
        """Perform the action of a state. What goes wrong is an input like any other."""
        try:
            return await self._ACTIONS[state](self)
        except InvalidatedError:
            return Input.INVALIDATED
        except asyncio.CancelledError as cancelled:
            self._cause = cancelled
            return Input.CANCELLED
        except StoreUnhealthyError as unhealthy:
            self._status = pb.FRAGMENT_STORE_UNHEALTHY
            self._store_error = str(unhealthy)
            return Input.REFUSED
        except GazetteError as failed:
            self._cause = failed
            return Input.FAILED

    async def _perform(self, effect: Effect) -> None:
        if effect is Effect.TEAR_DOWN and self._pipeline is not None:
            assert self._held is not None
            pipeline, self._pipeline = self._pipeline, None
            await _tear_down(self._held, pipeline)
        elif effect is Effect.RELEASE and self._held is not None:
            held, self._held = self._held, None
            pipeline_back, self._pipeline = self._pipeline, None
            held.pipeline.put(pipeline_back)

    # -------------------------------------------------------------- resolve

    async def _resolve(self) -> Input:
        request = self._request
        self._resolution = resolution = await self._shared.resolver.resolve(
            request.journal,
            self._claims,
            may_proxy=not request.do_not_proxy,
            require_primary=True,
            min_revision=self._read_through,
            proxy_header=request.header if request.HasField("header") else None,
        )
        self._status = resolution.status
        given = judge_resolution(
            resolution.status,
            request.suspend,
            is_local=resolution.is_local,
            holds_pipeline=self._held is not None,
        )
        if given is Input.SUSPENSION:
            assert resolution.spec is not None
            self._status = pb.OK
            self._suspend = pb.JournalSpec.Suspend(offset=resolution.spec.suspend.offset)
        elif given is Input.HELD and self._held is not resolution.replica:
            return Input.REPLACED
        return given

    # ------------------------------------------------------------- pipeline

    async def _acquire_pipeline(self) -> Input:
        replica = self._resolution.replica
        assert replica is not None, "a journal resolves to us only where we have its replica"
        self._pipeline = await replica.pipeline.take(self._resolution.invalidated)
        self._held = replica
        self._roll_to = 0
        return Input.ACQUIRED

    async def _start_pipeline(self) -> Input:
        resolution, replica = self._resolution, self._held
        assert replica is not None
        pipeline = self._pipeline
        if pipeline is not None:
            if pipeline.error is None and pipeline.serves(resolution.header):
                self._registers = pipeline.spool.registers
                return Input.REUSED
            self._pipeline = None
            await _tear_down(replica, pipeline)

        spool = await replica.spool.take(resolution.invalidated)
        open_stream = _opener(self._shared.peers, resolution.header.route)
        streams = [
            PeerStream(member, open_stream)
            for member in resolution.header.route.members
            if member != resolution.header.process_id
        ]
        self._pipeline = Pipeline(resolution.header, spool, streams)
        self._registers = spool.registers
        self._roll_to = 0
        return Input.STARTED

    async def _send_sync(self) -> Input:
        self._sync_rounds += 1
        if self._sync_rounds > SYNC_ROUNDS_MAX:
            raise CallError(
                f"the replicas of {self._resolution.journal} do not agree after "
                f"{SYNC_ROUNDS_MAX} rounds; compare their logs"
            )
        pipeline = self._current_pipeline()
        self._answers = await pipeline.scatter(
            pb.ReplicateRequest(
                proposal=self._next_proposal(pipeline),
                registers=self._registers,
                acknowledge=True,
            )
        )
        return Input.SENT

    async def _recv_sync(self) -> Input:
        pipeline = self._current_pipeline()
        sync = judge_sync(
            pipeline.header,
            [stream.peer for stream in pipeline.streams],
            pipeline.spool.fragment.end,
            await pipeline.gather(self._answers),
        )
        if sync.error is not None:
            raise sync.error
        if sync.input is Input.ROLL:
            self._roll_to = sync.roll_to
            if sync.registers is not None:
                self._registers = sync.registers
        elif sync.input is Input.LATER:
            self._read_through = sync.read_through
        return sync.input

    # ------------------------------------------------------ Etcd, replicas

    async def _update_assignments(self) -> Input:
        resolution, replica = self._resolution, self._held
        assert replica is not None
        if replica.settled is resolution:
            return Input.AGREED
        written = await write_route(self._shared.etcd, resolution)
        if written is None:
            replica.settled = resolution
            return Input.AGREED
        self._read_through = written
        return Input.WRITTEN

    async def _await_replicas(self) -> Input:
        resolution = self._resolution
        assert resolution.spec is not None
        given = judge_replicas(
            len(resolution.assignments),
            desired_replication(resolution.spec, self._shared.max_replication),
            is_local=resolution.is_local,
        )
        if given is Input.LATER:
            self._read_through = resolution.revision + 1
        elif given is Input.TOO_FEW:
            self._status = pb.INSUFFICIENT_JOURNAL_BROKERS
        return given

    async def _update_suspend(self) -> Input:
        self._read_through = await write_suspend(self._shared.etcd, self._resolution, self._suspend)
        return Input.WRITTEN

    # -------------------------------------------------------- preconditions

    async def _validate_preconditions(self) -> Input:
        resolution, replica, pipeline = self._resolution, self._held, self._current_pipeline()
        assert replica is not None
        assert resolution.spec is not None
        assert resolution.invalidated is not None
        await await_health(
            replica.index,
            self._shared.stores,
            resolution.spec,
            resolution.invalidated,
            started_at=self._started_at,
        )
        index_begin, index_end, index_mod_time = replica.index.summary()
        spool = pipeline.spool.fragment
        verdict = judge_preconditions(
            Facts(
                request=self._request,
                spec=resolution.spec,
                registers=self._registers,
                spool_begin=spool.begin,
                head=spool.end,
                index_begin=index_begin,
                index_end=index_end,
                index_mod_time=index_mod_time,
                now=self._shared.now(),
            )
        )
        self._status = verdict.status
        if verdict.roll_to:
            self._roll_to = verdict.roll_to
        if verdict.suspend is not None:
            self._suspend = verdict.suspend
        return verdict.input

    # -------------------------------------------------------------- content

    async def _stream_content(self) -> Input:
        """Broker section 5.3: scatter the client's content, then its commit or rollback."""
        resolution, replica, pipeline = self._resolution, self._held, self._current_pipeline()
        assert replica is not None
        assert resolution.spec is not None
        assert resolution.invalidated is not None
        request, spool = self._request, pipeline.spool

        content = Content(
            may_have_content=may_write(resolution.spec) and may_carry_content(request.suspend)
        )
        flow = replica.flow
        flow.reset(resolution.spec.max_append_rate, int(asyncio.get_running_loop().time() * 1000))
        await content.receive(self._items, pipeline, Pace(flow, resolution.invalidated), self._roll)
        self._total_chunks, self._delayed_chunks = flow.total_chunks, flow.delayed_chunks

        self._cause = content.error
        if content.effect is ContentEffect.DENY:
            self._status = pb.NOT_ALLOWED
        elif self._cause is None and content.length == 0 and _changes_registers(request):
            self._cause = CallError("append stream: a change of registers requires content")

        proposal = spool.fragment
        if self._cause is None and self._status == pb.OK and content.length > 0:
            await spool.settle()
            proposal = spool.next()
            if _changes_registers(request):
                self._registers = union(
                    request.union_registers, subtract(self._registers, request.subtract_registers)
                )
        self._answers = await pipeline.scatter(
            pb.ReplicateRequest(proposal=proposal, registers=self._registers, acknowledge=True)
        )
        if pipeline.error is not None:
            raise pipeline.error
        # Read off now: the next append may change the spool before this one is acknowledged.
        self._commit = pb.Fragment(
            journal=resolution.journal,
            begin=content.begin,
            end=content.begin + content.length,
            sum=content.sum(spool.fragment),
            compression_codec=spool.fragment.compression_codec,
        )
        self._acking = pipeline
        return Input.STREAMED

    async def _roll(self) -> None:
        """Close the spool's fragment at the client's first message, where it is time to.

        Nobody is asked to acknowledge: the pipeline is synchronized, so that every replica can.
        """
        pipeline = self._current_pipeline()
        proposal = self._next_proposal(pipeline)
        if proposal != pipeline.spool.fragment:
            await pipeline.scatter(
                pb.ReplicateRequest(proposal=proposal, registers=self._registers)
            )

    async def _read_acks(self) -> Input:
        pipeline = self._acking
        answers = await pipeline.gather(self._answers)
        error = judge_acks([stream.peer for stream in pipeline.streams], answers)
        if error is not None:
            raise error
        if isinstance(self._cause, asyncio.CancelledError):
            return Input.CANCELLED
        if self._cause is not None:
            return Input.FAILED
        if self._status != pb.OK:
            return Input.REFUSED
        assert self._resolution.replica is not None
        self._resolution.replica.write_head.set(self._commit.end)
        return Input.AGREED

    def _next_proposal(self, pipeline: Pipeline) -> pb.Fragment:
        assert self._resolution.spec is not None
        spool = pipeline.spool
        first_append = spool.first_append_time
        return next_proposal(
            spool.fragment,
            first_append.timestamp() if first_append is not None else None,
            self._resolution.spec.fragment,
            roll_to=self._roll_to,
            now=self._shared.now(),
        )

    # --------------------------------------------------------------- answers

    def _response(self) -> pb.AppendResponse:
        """The answer: an append's outcome, or the status which refused it."""
        response = pb.AppendResponse(status=self._status, header=self._resolution.header)
        if self._status != pb.OK:
            response.header.process_id.CopyFrom(self._shared.resolver.local_id)
        if self._status == pb.OK:
            response.commit.CopyFrom(self._commit)
            response.total_chunks = self._total_chunks
            response.delayed_chunks = self._delayed_chunks
        if self._status in (pb.OK, pb.REGISTER_MISMATCH):
            response.registers.CopyFrom(self._registers)
        if self._status == pb.FRAGMENT_STORE_UNHEALTHY:
            response.store_health_error = self._store_error
        return response

    async def _proxy(self) -> pb.AppendResponse:
        """Broker section 4: the primary answers, we relay."""
        header = self._resolution.header
        if not header.route.endpoints[header.route.primary]:
            raise UnavailableError(
                "the journal's primary is gone from Etcd; try again",
                journal=self._resolution.journal,
            )
        opening = pb.AppendRequest()
        opening.CopyFrom(self._request)
        opening.journal = self._resolution.journal
        opening.header.CopyFrom(header)
        return await self._shared.peers.append(
            _after(opening, self._items), Target(route=header.route, member=header.process_id)
        )

    def _current_pipeline(self) -> Pipeline:
        assert self._pipeline is not None, "the machine is in a state which has a pipeline"
        return self._pipeline

    _ACTIONS: ClassVar[Mapping[State, Callable[[_Append], Awaitable[Input]]]] = {
        State.RESOLVE: _resolve,
        State.ACQUIRE_PIPELINE: _acquire_pipeline,
        State.START_PIPELINE: _start_pipeline,
        State.SEND_SYNC: _send_sync,
        State.RECV_SYNC: _recv_sync,
        State.UPDATE_ASSIGNMENTS: _update_assignments,
        State.AWAIT_REPLICAS: _await_replicas,
        State.VALIDATE_PRECONDITIONS: _validate_preconditions,
        State.UPDATE_SUSPEND: _update_suspend,
        State.STREAM_CONTENT: _stream_content,
        State.READ_ACKS: _read_acks,
    }


async def _tear_down(replica: Replica, pipeline: Pipeline) -> None:
    """Release the spool, and let the streams end in the background."""
    try:
        await pipeline.tear_down()
    finally:
        replica.spool.put(pipeline.spool)
    replica.in_background(pipeline.ended())


def _changes_registers(request: pb.AppendRequest) -> bool:
    return request.HasField("union_registers") or request.HasField("subtract_registers")


def _opener(peers: Transport, route: pb.Route) -> OpenStream:
    def open_stream(
        peer: pb.ProcessSpec.ID, requests: AsyncIterator[pb.ReplicateRequest]
    ) -> AsyncIterator[pb.ReplicateResponse]:
        return peers.replicate(requests, Target(route=route, member=peer))

    return open_stream


async def _after(
    opening: pb.AppendRequest, items: AsyncIterator[AppendItem]
) -> AsyncIterator[AppendItem]:
    yield opening
    async for item in items:
        yield item
