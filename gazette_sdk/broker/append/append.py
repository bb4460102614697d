"""The driver of the append machine: one append, from its request to its response.

The tables of `machine` define which state follows which. This module performs the action of each
state: it resolves, takes the pipeline, synchronizes it, waits for the index and the store, streams
the client's content, and collects acknowledgements. An append releases everything it holds when it
ends, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from gazette_sdk.broker.append.content import ClientContent
from gazette_sdk.broker.append.machine import (
    ENDS,
    SYNC_ROUNDS_MAX,
    ContentEffect,
    Effect,
    Input,
    State,
    Terms,
    changed_registers,
    changes_registers,
    judge_preconditions,
    judge_replicas,
    judge_resolution,
    may_carry_content,
    next_proposal,
    step,
)
from gazette_sdk.broker.append.preconditions import (
    WAIT_MAX_S,
    RecordRoute,
    StoreUnhealthyError,
    await_health,
    proxy_append,
    write_route,
    write_suspend,
)
from gazette_sdk.broker.failover.pause_guard import KnownLease
from gazette_sdk.broker.metrics import APPEND_SECONDS, CarriedBytes
from gazette_sdk.broker.recovery.routes import unlisted_text, waiting_text
from gazette_sdk.broker.replica import ReadyRoute, Replica
from gazette_sdk.broker.replication.peer_stream import Answer, PeerStreams
from gazette_sdk.broker.replication.pipeline import InvalidatedError, Pipeline, judge_sync
from gazette_sdk.broker.replication.replicate import (
    start_pipeline,
    tear_down_pipeline,
    while_routed,
)
from gazette_sdk.broker.resolver import Resolution, Resolver
from gazette_sdk.cluster.broker_keys import JournalEntry, is_consistent
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_messages import Compare
from gazette_sdk.errors import CallError, GazetteError, UnavailableError
from gazette_sdk.fragment.registry import StoreRegistry
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Claims
from gazette_sdk.protocol.journal_spec import desired_replication
from gazette_sdk.protocol.rules import complete
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.wire import AppendItem

CLAIMS_PAUSE_S = 0.05
"""Pause of an append until claims to its journal are known that Etcd has."""

_UNKNOWN_CLAIMS = (
    "its primary does not know yet which brokers have its last bytes: its watch of Etcd is late; "
    "try again"
)

_EMPTY_REGISTERS = pb.LabelSet()

_WAIT_SECONDS = APPEND_SECONDS.buckets("wait")
_SYNC_SECONDS = APPEND_SECONDS.buckets("sync")
_REPLICATE_SECONDS = APPEND_SECONDS.buckets("replicate")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Appends:
    """Dependencies that all appends of a broker share.

    Attributes:
        resolver: resolves journals.
        etcd: where routes and suspensions are written.
        stores: fragment stores, for their health.
        peers: carries appends to other primaries, and replication.
        max_replication: cap of every journal's replication.
        streams: Replicate streams to other brokers.
        waits_for: returns the brokers that are away and alone have a journal's last bytes; none if
            we have them, too, or if it is not known.
        known_lease: knowledge about this broker's lease.
        is_all_stored: returns True if the last broker of a journal left when all of its content was
            stored, and no one continued it since.
        record_route: returns the operations that record a journal's last route.
        known_claims: returns the condition that no other brokers claim a journal than we know: no
            route is written by a broker that does not know them yet.
        stored_end: returns the offset up to which a journal was stored when its last broker left;
            0 if that is not known, or somebody continued it since.
        refusal: returns why a journal that we lead takes no append now; empty if it does.
        carried: counts appended bytes.
        now: Unix time, in seconds.
    """

    resolver: Resolver
    etcd: Etcd
    stores: StoreRegistry
    peers: Transport
    max_replication: int
    streams: PeerStreams = field(default_factory=PeerStreams)
    waits_for: Callable[[str], Sequence[pb.ProcessSpec.ID]] = lambda _: ()
    known_lease: KnownLease = field(default_factory=KnownLease)
    is_all_stored: Callable[[str], bool] = lambda _: False
    record_route: RecordRoute = lambda *_: ()
    known_claims: Callable[[JournalEntry], Sequence[Compare]] = lambda _: ()
    refusal: Callable[[str], str] = lambda _: ""
    stored_end: Callable[[str], int] = lambda _: 0
    carried: CarriedBytes = field(default_factory=CarriedBytes)
    now: Callable[[], float] = field(default=time.time)

    async def append(
        self,
        request: pb.AppendRequest,
        items: AsyncIterator[AppendItem],
        claims: Claims,
        traceparent: str = "",
    ) -> pb.AppendResponse:
        """Append to a journal.

        Args:
            request: the opening request, already valid.
            items: what follows it.
            claims: what the caller may see.
            traceparent: context of its span, for other brokers; empty for none.

        Returns:
            a response of any status.

        Raises:
            GazetteError: the append failed, and was rolled back unless a peer's failure makes its
                outcome unknown.
        """
        return await _Append(self, request, items, claims, traceparent).run()


class _Append:
    """One append in progress."""

    # Facts that the states find out.
    _resolution: Resolution
    _terms: Terms  # of the journal, if it is ours
    _held: Replica | None = None  # whose pipeline slot is ours
    _pipeline: Pipeline | None = None  # what we took out of it
    _registers = _EMPTY_REGISTERS
    _roll_to = 0
    _sync_rounds = 0
    _sync_at = 0.0  # loop time of the first round
    _suspend: pb.JournalSpec.Suspend
    _status: pb.Status = pb.OK
    _detail = ""  # of a refusal
    _cause: BaseException | None = None

    # The outcome.
    _acking: Pipeline
    _commit: pb.Fragment
    _total_chunks = 0
    _delayed_chunks = 0

    def __init__(
        self,
        shared: Appends,
        request: pb.AppendRequest,
        items: AsyncIterator[AppendItem],
        claims: Claims,
        traceparent: str,
    ) -> None:
        self._shared = shared
        self._request = request
        self._items = items
        self._claims = claims
        self._traceparent = traceparent
        self._loop = asyncio.get_running_loop()
        self._started_at = self._loop.time()
        self._read_through = request.min_etcd_revision
        self._answers: list[asyncio.Future[Answer]] = []

    async def run(self) -> pb.AppendResponse:
        """Go through the machine's states to one of its ends."""
        state = State.RESOLVE
        try:
            while state not in ENDS:
                try:
                    given = await self._ACTIONS[state](self)
                except asyncio.CancelledError as cancelled:
                    self._cause = cancelled
                    given = Input.CANCELLED
                except Exception as failed:  # noqa: BLE001 - sorted, and else raised again
                    given = self._failed(failed)
                effects, state = step(state, given)
                for effect in effects:
                    if effect is Effect.TEAR_DOWN:
                        await self._tear_down()
                    else:
                        self._release()
        finally:
            # Something is held here only if the broker itself failed.
            if self._held is not None:
                await self._tear_down()
                self._release()

        if state is State.PROXY:
            return await self._proxy()
        if state is State.ERROR and self._cause is not None:
            raise self._cause
        return self._response()

    async def _proxy(self) -> pb.AppendResponse:
        """Let the primary make the append. A frozen one is given up when it leaves."""
        shared, resolution = self._shared, self._resolution
        primary = resolution.header.process_id
        call = proxy_append(shared.peers, resolution, self._request, self._items, self._traceparent)
        try:
            return await shared.streams.until_gone(primary, call, resolution.journal)
        except UnavailableError as error:
            if shared.streams.on_broken is not None:
                shared.streams.on_broken(primary, error, 0.0)
            raise

    def _failed(self, error: Exception) -> Input:
        """Return the input that an error of an action stands for.

        Raises:
            Exception: the error itself, if it is a bug.
        """
        if isinstance(error, InvalidatedError):
            return Input.INVALIDATED
        if isinstance(error, StoreUnhealthyError):
            self._status = pb.FRAGMENT_STORE_UNHEALTHY
            self._detail = str(error)
            return Input.REFUSED
        if isinstance(error, GazetteError):
            self._cause = error
            return Input.FAILED
        raise error

    async def _tear_down(self) -> None:
        if self._pipeline is not None:
            assert self._held is not None
            pipeline, self._pipeline = self._pipeline, None
            await tear_down_pipeline(self._held, pipeline)

    def _release(self) -> None:
        if self._held is not None:
            held, self._held = self._held, None
            pipeline, self._pipeline = self._pipeline, None
            held.pipeline.put(pipeline)

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
        if resolution.replica is not None and resolution.spec is not None:
            self._terms = Terms(resolution.spec)
        self._status = resolution.status
        if resolution.status == pb.OK and resolution.is_local:
            self._detail = self._shared.refusal(request.journal)
            if self._detail:
                self._status = pb.INSUFFICIENT_JOURNAL_BROKERS
                return Input.REFUSED
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
        asked_at = self._loop.time()
        self._pipeline = await replica.pipeline.take(self._resolution.invalidated)
        _WAIT_SECONDS.observe(self._loop.time() - asked_at)
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
            await tear_down_pipeline(replica, pipeline)

        shared = self._shared
        self._pipeline = pipeline = await start_pipeline(
            replica, resolution, shared.peers, shared.streams
        )
        self._registers = pipeline.spool.registers
        self._roll_to = 0
        return Input.STARTED

    async def _send_sync(self) -> Input:
        self._sync_at = self._sync_at or self._loop.time()
        self._sync_rounds += 1
        if self._sync_rounds > SYNC_ROUNDS_MAX:
            raise CallError(
                f"the replicas of {self._resolution.journal} do not agree after "
                f"{SYNC_ROUNDS_MAX} rounds; compare their logs"
            )
        pipeline = self._current_pipeline()
        proposal = self._next_proposal(pipeline)
        replica = self._held
        assert replica is not None
        if pipeline.streams:
            replica.proposed_end = max(replica.proposed_end, proposal.end)
        self._answers = await pipeline.scatter(
            pb.ReplicateRequest(
                proposal=proposal,
                registers=self._registers,
                acknowledge=True,
            )
        )
        return Input.SENT

    async def _recv_sync(self) -> Input:
        pipeline, replica = self._current_pipeline(), self._held
        assert replica is not None
        try:
            answers = await while_routed(
                pipeline.gather(self._answers),
                self._shared.resolver,
                replica,
                pipeline.header,
            )
        except InvalidatedError:
            return Input.LATER  # the mirror has the new route already
        sync = judge_sync(
            pipeline.header,
            [stream.peer for stream in pipeline.streams],
            pipeline.spool.fragment.end,
            answers,
        )
        if sync.error is not None:
            raise sync.error
        if sync.input is Input.ROLL:
            if self._held is not None and sync.roll_to > pipeline.spool.fragment.end:
                self._held.head_is_known = True  # by a peer
            self._roll_to = sync.roll_to
            if sync.registers is not None:
                self._registers = sync.registers
        elif sync.input is Input.LATER:
            self._read_through = sync.read_through
        elif sync.input is Input.AGREED:
            self._synchronized(pipeline)
        return sync.input

    def _synchronized(self, pipeline: Pipeline) -> None:
        """Note what the members of a new pipeline have."""
        replica, spec = self._held, self._resolution.spec
        assert replica is not None
        assert spec is not None
        pipeline.synchronized = pipeline.spool.fragment
        if pipeline.streams:
            replica.want_copies()
        elif desired_replication(spec, self._shared.max_replication) == 1:
            replica.show_commits(pipeline.spool.fragment.end)

    # ------------------------------------------------------ Etcd, replicas

    async def _update_assignments(self) -> Input:
        resolution, replica = self._resolution, self._held
        assert replica is not None
        if replica.settled is resolution:
            replica.synchronized(self._current_pipeline())
            return Input.AGREED
        if self._judge_replicas() is Input.TOO_FEW:
            # Members that are away may have more bytes than these: to them, a route without them
            # would mean that the journal continued.
            return Input.TOO_FEW
        if refused := await self._refuse_unless_complete():
            return refused
        if await self._is_all_content_stored():
            return Input.ROLL
        return await self._write_route(resolution, replica)

    async def _write_route(self, resolution: Resolution, replica: Replica) -> Input:
        """Write the synchronized route, unless Etcd has it."""
        assert resolution.item is not None
        claims = self._shared.known_claims(resolution.item)
        written = await write_route(
            self._shared.etcd, resolution, self._shared.record_route, claims
        )
        if written is None or written.succeeded:
            replica.synchronized(self._current_pipeline())
        if written is None:
            replica.settled = resolution
            return Input.AGREED
        if written.succeeded:
            self._read_through = written.revision
        elif not claims or (await self._shared.etcd.txn(claims, [])).succeeded:
            self._read_through = resolution.revision + 1
        elif self._loop.time() < self._started_at + WAIT_MAX_S:  # others may claim it: we hear soon
            await asyncio.sleep(CLAIMS_PAUSE_S)
        else:
            self._status, self._detail = pb.INSUFFICIENT_JOURNAL_BROKERS, _UNKNOWN_CLAIMS
            return Input.REFUSED
        return Input.WRITTEN

    async def _refuse_unless_complete(self) -> Input | None:
        """Refuse an append where acknowledged bytes are neither here nor listed by the stores."""
        shared, journal = self._shared, self._resolution.journal
        if absent := shared.waits_for(journal):
            return await self._refuse_unless_given_up(absent)
        stored_end = shared.stored_end(journal)
        return await self._refuse_unless_listed(stored_end) if stored_end else None

    async def _refuse_unless_given_up(self, absent: Sequence[pb.ProcessSpec.ID]) -> Input | None:
        """Refuse an append to a journal whose last bytes only brokers have that are away.

        By the explicit offset after all stored content the operator gives these bytes up. Then
        ``None`` is returned.
        """
        resolution, replica, request = self._resolution, self._held, self._request
        assert replica is not None
        self._status, self._detail = pb.INSUFFICIENT_JOURNAL_BROKERS, waiting_text(absent)
        if request.offset == 0:
            return Input.REFUSED
        await self._await_store()
        head = self._current_pipeline().spool.fragment.end
        if request.offset != max(head, replica.index.summary()[1]):
            self._status = pb.WRONG_APPEND_OFFSET
            return Input.REFUSED
        _log.warning(
            "%s continues at %d by a request with this offset: what %s did not store after it is "
            "given up",
            resolution.journal,
            request.offset,
            ", ".join(f"{broker.zone}/{broker.suffix}" for broker in absent),
            extra={"journal": resolution.journal},
        )
        self._status, self._detail = pb.OK, ""
        return None

    async def _refuse_unless_listed(self, stored_end: int) -> Input | None:
        """Refuse an append to a journal whose stores do not list all that was stored.

        It waits for another listing first. By the explicit offset after all listed content the
        operator gives the rest up. Then, and when all is listed, ``None`` is returned.
        """
        replica, request = self._held, self._request
        assert replica is not None
        index, head = replica.index, self._current_pipeline().spool.fragment.end
        if head >= stored_end:
            return None
        await self._await_store()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._started_at + WAIT_MAX_S):
                while index.listed_end < stored_end and request.offset == 0:
                    await index.list_again()
        if index.listed_end >= stored_end:
            return None
        text = unlisted_text(index.listed_end, stored_end)
        if request.offset == 0:
            self._status, self._detail = pb.INSUFFICIENT_JOURNAL_BROKERS, text
            return Input.REFUSED
        if request.offset != max(head, index.summary()[1]):
            self._status, self._detail = pb.WRONG_APPEND_OFFSET, text
            return Input.REFUSED
        _log.warning(
            "%s continues at %d by a request with this offset: what was stored from there up to %d "
            "is given up", replica.journal, request.offset, stored_end,
            extra={"journal": replica.journal},
        )  # fmt: skip
        return None

    async def _is_all_content_stored(self) -> bool:
        """Return True if every acknowledged byte is stored.

        The journal may then continue at the end of its last fragment.
        """
        replica = self._held
        assert replica is not None
        is_head_known = self._current_pipeline().spool.fragment.end > 0
        if is_head_known or not self._shared.is_all_stored(self._resolution.journal):
            return False
        await self._await_store()
        self._roll_to = replica.index.summary()[1] if self._terms.may_write else 0
        return self._roll_to > 0

    async def _await_store(self, *, head_is_known: bool = False) -> None:
        """Wait until the stores are listed, and the first one is healthy.

        Args:
            head_is_known: True if the journal's head is known without the stores.
        """
        invalidated, replica = self._resolution.invalidated, self._held
        assert replica is not None
        assert invalidated is not None
        await await_health(
            replica.index,
            self._shared.stores,
            self._terms.store,
            invalidated,
            started_at=self._started_at,
            head_is_known=head_is_known,
            has_peers=bool(self._current_pipeline().streams),
        )

    async def _await_replicas(self) -> Input:
        resolution, replica = self._resolution, self._held
        given = self._judge_replicas()
        if given is Input.LATER:
            self._read_through = resolution.revision + 1
        elif given is Input.LOCAL:
            assert replica is not None
            assert replica.settled is resolution
            pipeline = self._current_pipeline()
            replica.ready = ReadyRoute(
                resolution,
                pipeline,
                self._terms,
                encoded_header=_encoded(pb.AppendResponse(header=resolution.header)),
            )
        return given

    def _judge_replicas(self) -> Input:
        resolution = self._resolution
        assert resolution.spec is not None
        members = len(resolution.assignments)
        desired = desired_replication(resolution.spec, self._shared.max_replication)
        given = judge_replicas(
            members,
            desired,
            is_local=resolution.is_local,
            is_consistent=members <= desired or is_consistent(resolution.assignments),
        )
        if given is Input.TOO_FEW:
            self._status = pb.INSUFFICIENT_JOURNAL_BROKERS
        return given

    async def _update_suspend(self) -> Input:
        shared = self._shared
        self._read_through = await write_suspend(
            shared.etcd, self._resolution, self._suspend, shared.record_route
        )
        return Input.WRITTEN

    # -------------------------------------------------------- preconditions

    async def _validate_preconditions(self) -> Input:
        replica = self._held
        assert replica is not None
        if self._sync_at:
            _SYNC_SECONDS.observe(self._loop.time() - self._sync_at)
            self._sync_at = 0.0
        # Whether a journal can be suspended depends on what is stored.
        can_be_suspended = not may_carry_content(self._request.suspend)
        await self._await_store(head_is_known=replica.head_is_known and not can_be_suspended)
        pipeline = self._current_pipeline()
        fragment, has_peers = pipeline.spool.fragment, bool(pipeline.streams)
        verdict = judge_preconditions(
            self._request,
            self._terms,
            self._registers,
            fragment,
            replica.index.summary(),
            now=self._shared.now(),
            is_followed=has_peers and replica.head_is_known and replica.index.follows(fragment),
        )
        self._status = verdict.status
        if verdict.roll_to:
            self._roll_to = verdict.roll_to
        if verdict.suspend is not None:
            self._suspend = verdict.suspend
        return verdict.input

    # -------------------------------------------------------------- content

    async def _stream_content(self) -> Input:
        """Send the client's content to every replica, then its commit or rollback (5.3)."""
        invalidated, replica = self._resolution.invalidated, self._held
        assert replica is not None
        assert invalidated is not None
        pipeline, flow = self._current_pipeline(), replica.flow
        request, terms, spool = self._request, self._terms, pipeline.spool

        content = ClientContent(
            may_have_content=terms.may_write and may_carry_content(request.suspend)
        )
        flow.reset(terms.max_append_rate, int(self._loop.time() * 1000))
        await content.receive(self._items, pipeline, flow, invalidated, self._roll)
        self._total_chunks, self._delayed_chunks = flow.total_chunks, flow.delayed_chunks

        self._cause = content.error
        if content.effect is ContentEffect.DENY:
            self._status = pb.NOT_ALLOWED
        elif self._cause is None and content.length == 0 and changes_registers(request):
            self._cause = CallError("append stream: a change of registers requires content")

        if self._cause is None:
            self._cause = self._shared.known_lease.error(self._resolution.journal)
        proposal = spool.fragment
        if self._cause is None and self._status == pb.OK and content.length > 0:
            await spool.flush()
            proposal = spool.next()
            self._registers = changed_registers(request, self._registers)
        self._answers = await pipeline.propose(
            proposal, self._registers, acknowledge=True, traceparent=self._traceparent
        )
        if pipeline.error is not None:
            raise pipeline.error
        # Built now: the next append may change the spool before this one is acknowledged.
        self._commit = content.commit(spool.fragment)
        self._acking = pipeline
        return Input.STREAMED

    async def _roll(self) -> None:
        """Close the spool's fragment at the client's first message, if it is time to.

        No one is asked to acknowledge: the pipeline is synchronized, so that every replica can.
        """
        pipeline = self._current_pipeline()
        proposal = self._next_proposal(pipeline)
        if proposal != pipeline.spool.fragment:
            await pipeline.propose(proposal, self._registers, acknowledge=False)

    async def _read_acks(self) -> Input:
        if self._answers:
            asked_at = self._loop.time()
            await self._acking.acknowledged(self._answers)
            _REPLICATE_SECONDS.observe(self._loop.time() - asked_at)
        else:
            await self._acking.acknowledged(self._answers)
        if self._cause is None:
            self._cause = self._shared.known_lease.error(self._resolution.journal)
        if self._cause is not None:
            is_cancelled = isinstance(self._cause, asyncio.CancelledError)
            return Input.CANCELLED if is_cancelled else Input.FAILED
        if self._status != pb.OK:
            return Input.REFUSED
        return Input.AGREED

    def _next_proposal(self, pipeline: Pipeline) -> pb.Fragment:
        spool = pipeline.spool
        return next_proposal(
            spool.fragment,
            spool.first_append_s,
            self._terms,
            roll_to=self._roll_to,
            now=self._shared.now(),
        )

    # -------------------------------------------------------------- response

    def _response(self) -> pb.AppendResponse:
        """Return the append's outcome, or the status which refused it."""
        response = pb.AppendResponse(status=self._status, header=self._resolution.header)
        if self._status == pb.OK:
            response.commit.CopyFrom(self._commit)
            length_bytes = self._commit.end - self._commit.begin
            self._shared.carried.appended += length_bytes
            if (replica := self._resolution.replica) is not None:
                replica.topic_bytes.value += length_bytes
            response.registers.CopyFrom(self._registers)
            response.total_chunks = self._total_chunks
            response.delayed_chunks = self._delayed_chunks
            return response
        response.header.process_id.CopyFrom(self._shared.resolver.local_id)
        if self._status == pb.REGISTER_MISMATCH:
            response.registers.CopyFrom(self._registers)
        # The one field that has a text.
        if self._status in {pb.FRAGMENT_STORE_UNHEALTHY, pb.INSUFFICIENT_JOURNAL_BROKERS}:
            response.store_health_error = self._detail
        return response

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


def _encoded(response: pb.AppendResponse) -> bytes:
    return complete(response).SerializeToString()
