"""The primary's side of replication: one stream to every other member, and the local spool.

A synchronized pipeline gives exclusive access to the journal: its streams own the spools of all
replicas (broker sections 1 and 6).

An append sends while it owns the pipeline exclusively. Each send that asks for an answer adds a
future to its stream, and answers resolve the futures in the order of the sends. So an append can
start before the one before it is acknowledged, and answers are attributed correctly also when an
append was cancelled: its futures are resolved nevertheless.

A :class:`Slot` is exclusive ownership of one thing, with a signal that ends the wait for it. A
replica has two slots: one holds its spool, the other its pipeline (broker sections 3 and 6). The
owner of a slot owns the thing until it puts it back. Waiting owners are served first come, first
served; taking a free slot costs no turn of the event loop.

:func:`judge_sync` and :func:`judge_acks` judge the answers of all peers to a proposal (broker
section 6.2).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from gazette_sdk.broker.append.machine import Input
from gazette_sdk.broker.replication.peer_stream import Answer, PeerStream, unexpected
from gazette_sdk.broker.spool.spool import Spool
from gazette_sdk.errors import STATUS_NAMES, GazetteError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.rules import equivalent

T = TypeVar("T")


class InvalidatedError(Exception):
    """The signal fired before the slot could be taken: resolve again.

    It never leaves the broker: every waiter for a slot resolves again.
    """


class Signal:
    """Event that fires once. The next change needs a new signal."""

    __slots__ = ("_callbacks", "fired")

    def __init__(self) -> None:
        self.fired = False
        self._callbacks: dict[int, Callable[[], None]] = {}

    def fire(self) -> None:
        """Fire, and run the callbacks. Firing again does nothing."""
        if self.fired:
            return
        self.fired = True
        callbacks, self._callbacks = self._callbacks, {}
        for callback in callbacks.values():
            callback()

    def on_fire(self, callback: Callable[[], None]) -> int:
        """Run ``callback`` when it fires, now if it has. Returns a handle for :meth:`forget`."""
        if self.fired:
            callback()
            return 0
        handle = id(callback)
        self._callbacks[handle] = callback
        return handle

    def forget(self, handle: int) -> None:
        """Remove the callback of ``handle``."""
        self._callbacks.pop(handle, None)

    async def wait(self) -> None:
        """Return when it has fired."""
        if self.fired:
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def wake() -> None:
            if not done.done():
                done.set_result(None)

        handle = self.on_fire(wake)
        try:
            await done
        finally:
            self.forget(handle)


class Slot(Generic[T]):
    """Holder of one thing that has one owner at a time.

    Args:
        thing: the thing; the slot begins free. Without it the slot begins owned, by the code
            that will put the thing there.

    Attributes:
        free: True if no one owns the thing.
    """

    __slots__ = ("_value", "_waiters", "free")

    def __init__(self, *thing: T) -> None:
        self.free = len(thing) == 1
        if self.free:
            (self._value,) = thing
        self._waiters: deque[asyncio.Future[T]] = deque()

    def take_now(self) -> T:
        """Take the thing of a free slot. No one waits for a free slot."""
        assert self.free, "a slot is taken when it is free"
        self.free = False
        return self._value

    async def take(self, signal: Signal | None = None) -> T:
        """Take the thing, after everybody who asked before.

        Args:
            signal: ends the waiting when it fires.

        Raises:
            InvalidatedError: ``signal`` fired first. It counts even where the slot became free
                in the same turn: what the caller resolved is old.
        """
        if signal is not None and signal.fired:
            raise InvalidatedError
        if self.free:
            self.free = False
            return self._value

        waiter: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)

        def give_up() -> None:
            if not waiter.done():
                waiter.set_exception(InvalidatedError())

        handle = signal.on_fire(give_up) if signal is not None else 0
        try:
            value = await waiter
        except asyncio.CancelledError:
            # Handed over and cancelled in the same turn: no one else knows that it is ours.
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.put(waiter.result())
            raise
        finally:
            if signal is not None:
                signal.forget(handle)
        if signal is not None and signal.fired:
            self.put(value)
            raise InvalidatedError
        return value

    def put(self, value: T) -> None:
        """Give the thing (or its successor) to the oldest waiter, or back to the slot."""
        assert not self.free, "a slot is put back by its owner"
        self._value = value
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(value)
                return
        self.free = True

    def peek(self) -> T:
        """Return the thing that was put last. The slot has held one."""
        return self._value


@dataclass(frozen=True, slots=True)
class Sync:
    """Result of the answers to a synchronizing proposal (broker section 6.2).

    Attributes:
        input: AGREED, ROLL, LATER or FAILED.
        roll_to: offset to roll to, 0 for none.
        registers: registers to adopt with it; ``None`` to keep ours.
        read_through: revision to resolve at, 0 for none.
        error: the first failure.
        failed: indices of the peers that failed.
    """

    input: Input
    roll_to: int = 0
    registers: pb.LabelSet | None = None
    read_through: int = 0
    error: GazetteError | None = None
    failed: tuple[int, ...] = ()


def judge_sync(
    header: pb.Header,
    peers: Sequence[pb.ProcessSpec.ID],
    head: int,
    answers: Sequence[Answer],
) -> Sync:
    """Classify the answers to a synchronizing proposal.

    Args:
        header: the pipeline's.
        peers: the peers that answered, in member order.
        head: end of our own spool.
        answers: of every peer.
    """
    roll_to, read_through = 0, 0
    registers: pb.LabelSet | None = None
    errors: dict[int, GazetteError] = {}

    for index, answer in enumerate(answers):
        if isinstance(answer, GazetteError):
            errors[index] = answer
        elif answer.status == pb.OK:
            pass
        elif (
            answer.status == pb.WRONG_ROUTE
            and not equivalent(answer.header.route, header.route)
            and answer.header.etcd.revision > header.etcd.revision
        ):
            read_through = max(read_through, answer.header.etcd.revision)
        elif answer.status == pb.PROPOSAL_MISMATCH and answer.fragment.end > max(head, roll_to):
            roll_to, registers = answer.fragment.end, answer.registers
        elif answer.status == pb.PROPOSAL_MISMATCH and (
            # It may lack the beginning of our fragment; or be ahead, but after another peer.
            answer.fragment.end > head
            or (answer.fragment.end == head and answer.fragment.begin == answer.fragment.end)
        ):
            roll_to = max(roll_to, answer.fragment.end)
        else:
            errors[index] = unexpected(peers[index], answer)

    if errors:
        given = Input.FAILED
    elif roll_to or any(_mismatches(answer) for answer in answers):
        given = Input.ROLL
    elif read_through:
        given = Input.LATER
    else:
        given = Input.AGREED
    return Sync(
        given,
        roll_to=roll_to,
        registers=registers,
        read_through=read_through,
        error=next(iter(errors.values()), None),
        failed=tuple(errors),
    )


def judge_acks(
    peers: Sequence[pb.ProcessSpec.ID], answers: Sequence[Answer]
) -> GazetteError | None:
    """Return the error of the first peer that did not acknowledge; ``None`` if all did."""
    for peer, answer in zip(peers, answers, strict=True):
        if isinstance(answer, GazetteError):
            return answer
        if answer.status != pb.OK:
            return unexpected(peer, answer)
    return None


def _mismatches(answer: Answer) -> bool:
    return not isinstance(answer, GazetteError) and answer.status == pb.PROPOSAL_MISMATCH


REPORT_DELAY_S = 0.001
"""Pause before the peers get an acknowledgement by a request of its own: the request of the
next append, if it comes first, saves it."""


@dataclass(slots=True, eq=False)
class Pipeline:
    """A set of Replicate streams, and the spool of this broker.

    Attributes:
        header: the resolution it was started with.
        spool: ours, owned until :meth:`tear_down`.
        streams: one per other member, in member order.
        acknowledged_end: offset through which all replicas are known to have the journal.
        synchronized: the fragment that all replicas had when they agreed; ``None`` before, and
            once it counts as acknowledged.
        on_acknowledged: called with each fragment that all replicas have acknowledged, also if
            no one waits for that.
    """

    header: pb.Header
    spool: Spool
    streams: list[PeerStream] = field(default_factory=list)
    acknowledged_end: int = 0
    synchronized: pb.Fragment | None = None
    on_acknowledged: Callable[[pb.Fragment], None] | None = None
    _unanswered: set[asyncio.Future[Answer]] = field(default_factory=set)
    _opened: bool = False
    _reported_end: int = -1  # of acknowledged_end: what the peers know
    _stored_end: int = 0
    _reported_stored_end: int = 0
    _has_sent_content: bool = False  # since the last proposal
    _proposed: pb.ReplicateRequest | None = None  # the last proposal sent
    _report_timer: asyncio.TimerHandle | None = None

    @property
    def error(self) -> GazetteError | None:
        """The error of the first broken stream; ``None`` while all streams work."""
        for stream in self.streams:
            if stream.error is not None:
                return stream.error
        return None

    @property
    def answer_timeout_s(self) -> float:
        """Bound of the answers of its peers; 0 without peers."""
        return max((stream.answer_timeout_s for stream in self.streams), default=0.0)

    def serves(self, header: pb.Header) -> bool:
        """Return True if it is synchronized over the route of ``header``."""
        return header is self.header or equivalent(header.route, self.header.route)

    async def propose(
        self,
        proposal: pb.Fragment,
        registers: pb.LabelSet,
        *,
        acknowledge: bool,
        traceparent: str = "",
    ) -> list[asyncio.Future[Answer]]:
        """Send a proposal to every replica, ours last; see :meth:`scatter`.

        Args:
            proposal: what the spools are to become.
            registers: the journal's, with it.
            acknowledge: True to ask peers for an answer.
            traceparent: context of the append's span; empty for none.
        """
        if self.streams:
            request = pb.ReplicateRequest(
                proposal=proposal, registers=registers, acknowledge=acknowledge
            )
            if traceparent:
                request.traceparent = traceparent
            return await self.scatter(request, must_agree=acknowledge)
        self._opened = True
        _assert_ok(await self.spool.propose(proposal, registers, primary=True))
        self._acknowledged(self.spool.fragment)
        return []

    async def scatter(
        self, request: pb.ReplicateRequest, *, must_agree: bool = False
    ) -> list[asyncio.Future[Answer]]:
        """Send a proposal to every replica, ours last.

        The first proposal of a pipeline is sent with its header, which names each peer in turn.

        Args:
            request: a proposal with its registers.
            must_agree: see :meth:`PeerStream.expect`.

        Returns:
            one future per peer if the request asks for acknowledgement, else none.

        Raises:
            AssertionError: our own spool refused what was derived from it: a bug.
        """
        answers: list[asyncio.Future[Answer]] = []
        self._report_in(request)
        self._proposed, self._has_sent_content = request, False
        for stream in self.streams:
            if self._opened:
                stream.send(request)
            else:
                first = pb.ReplicateRequest()
                first.CopyFrom(request)
                first.header.CopyFrom(self.header)
                first.header.process_id.CopyFrom(stream.peer)
                first.deprecated_journal = request.proposal.journal
                stream.send(first)
            if request.acknowledge:
                answers.append(stream.expect(must_agree=must_agree))
        self._opened = True
        note_ours = self._report(answers, request.proposal) if must_agree else None
        response = await self.spool.apply(request, primary=True)
        _assert_ok(response.status)
        if note_ours is not None:
            note_ours()
        return answers

    def scatter_content(
        self, content: bytes, content_delta: int, also: Any = None
    ) -> Coroutine[Any, Any, None]:
        """Send one chunk of an append to every replica.

        Args:
            content: the bytes.
            content_delta: bytes of this append before them.
            also: a hash which is to be fed with them; complete once our spool has settled.
        """
        if not self.streams:
            return self.spool.write(content, content_delta, also)
        return self._scatter_content(content, content_delta, also)

    async def _scatter_content(self, content: bytes, content_delta: int, also: Any) -> None:
        self._has_sent_content = True
        for stream in self.streams:
            stream.send(content)
        for stream in self.streams:
            await stream.room()
        await self.spool.write(content, content_delta, also)

    async def gather(self, answers: Sequence[asyncio.Future[Answer]]) -> list[Answer]:
        """Return the answers of all peers, in member order.

        A stream whose peer does not answer in time breaks, and that is the answer then.
        """
        if not answers:
            return []
        pending = [answer for answer in answers if not answer.done()]
        if pending:
            await asyncio.wait(pending)
        return [answer.result() for answer in answers]

    @property
    def has_room(self) -> bool:
        """True if less than :data:`SEND_BUFFER_BYTES` wait to be sent to every peer."""
        return all(stream.has_room for stream in self.streams)

    def replicate_now(
        self, content: bytes, committed: pb.Fragment, registers: pb.LabelSet, traceparent: str = ""
    ) -> list[asyncio.Future[Answer]]:
        """Send a whole append to every peer. Our own spool has committed it already.

        Args:
            content: all content of the append.
            committed: fragment that the append made of the spool's fragment.
            registers: the journal's registers after it.
            traceparent: context of its span; empty for none.

        Returns:
            one future per peer.
        """
        assert self._opened, "a pipeline is synchronized before its first append"
        commit = pb.ReplicateRequest(proposal=committed, registers=registers, acknowledge=True)
        if traceparent:
            commit.traceparent = traceparent
        self._report_in(commit)
        self._proposed = commit
        answers = []
        for stream in self.streams:
            stream.send(content)
            stream.send(commit)
            answers.append(stream.expect(must_agree=True))
        self._report(answers, committed)()
        return answers

    async def acknowledged(self, answers: Sequence[asyncio.Future[Answer]]) -> None:
        """Wait until every peer has acknowledged an append.

        Raises:
            GazetteError: a peer did not.
        """
        if answers:
            peers = [stream.peer for stream in self.streams]
            error = judge_acks(peers, await self.gather(answers))
            if error is not None:
                raise error

    async def settled(self) -> None:
        """Return when it is known of every append whether all peers have acknowledged it.

        A peer that does not answer in time has not: none is acknowledged later.
        """
        if self._unanswered:
            await asyncio.wait(list(self._unanswered))

    # ---------------------------------------- what is acknowledged, and stored

    def _report(
        self, answers: Sequence[asyncio.Future[Answer]], fragment: pb.Fragment
    ) -> Callable[[], None]:
        """Report a fragment when all answers say that the peers have it, and our spool has it, too.

        Returns:
            a function to be called when our spool has it: on disk, with durability ``persisted``.
        """
        left = len(answers) + 1
        self._unanswered.update(answers)

        def note_one() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                self._acknowledged(fragment)

        def answered(answer: asyncio.Future[Answer]) -> None:
            self._unanswered.discard(answer)
            if not answer.cancelled():
                response = answer.result()
                if not isinstance(response, GazetteError) and response.status == pb.OK:
                    note_one()

        for answer in answers:
            answer.add_done_callback(answered)
        return note_one

    def _acknowledged(self, fragment: pb.Fragment) -> None:
        if self.on_acknowledged is not None:
            self.on_acknowledged(fragment)
        self.tell_acknowledged(fragment.end)

    def tell_acknowledged(self, end: int) -> None:
        """Tell the peers that all replicas have acknowledged the journal through ``end``.

        The next request says so; without one soon, one of its own does.
        """
        if self.streams and end > self.acknowledged_end:
            self.acknowledged_end = end
            if self._report_timer is None:
                self._report_soon()

    def tell_stored(self, end: int) -> None:
        """Tell the peers likewise that the store has the journal through ``end``."""
        if self.streams and end > self._stored_end:
            self._stored_end = end
            if self._report_timer is None:
                self._report_soon()

    def _report_soon(self) -> None:
        loop = asyncio.get_running_loop()
        self._report_timer = loop.call_later(REPORT_DELAY_S, self._report_now)

    def _report_in(self, request: pb.ReplicateRequest) -> None:
        if self.acknowledged_end > self._reported_end:
            self._reported_end = request.acknowledged_through = self.acknowledged_end
        if self._stored_end > self._reported_stored_end:
            self._reported_stored_end = request.stored_through = self._stored_end

    def _report_now(self) -> None:
        """Repeat the last proposal, which changes nothing, with the acknowledged offset.

        In the middle of an append it would roll back; then the append's commit has it.
        """
        self._report_timer = None
        last = self._proposed
        is_reported = (self.acknowledged_end, self._stored_end) == (
            self._reported_end,
            self._reported_stored_end,
        )
        if is_reported or self._has_sent_content or last is None:
            return
        request = pb.ReplicateRequest(proposal=last.proposal, registers=last.registers)
        self._report_in(request)
        for stream in self.streams:
            stream.send(request)

    @property
    def peers_may_be_ahead(self) -> bool:
        """True if peers may have committed content without the notice that all of them have it."""
        return self._opened and (
            bool(self._unanswered)
            or (bool(self.streams) and self.acknowledged_end > self._reported_end)
        )

    # ------------------------------------------------------------------ end

    async def tear_down(self) -> Spool:
        """Roll back what is not committed, and half-close every stream.

        Returns:
            the spool, which the caller puts back into its slot. :meth:`ended` waits for peers.
        """
        if self._report_timer is not None:
            self._report_timer.cancel()
            self._report_now()
        for stream in self.streams:
            stream.half_close()
        await self.spool.roll_back()
        return self.spool

    async def ended(self, timeout_s: float | None = None) -> None:
        """Return when every peer has ended its stream, or was given up."""
        for stream in self.streams:
            await stream.ended(timeout_s)

    def fail(self, error: GazetteError) -> None:
        """Break every stream at once."""
        if self._report_timer is not None:
            self._report_timer.cancel()
        for stream in self.streams:
            stream.fail(error)


def _assert_ok(status: pb.Status) -> None:
    assert status == pb.OK, f"our own spool refused a proposal: {STATUS_NAMES[status]}"
