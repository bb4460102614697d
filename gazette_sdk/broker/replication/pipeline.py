"""The primary's side of replication: one stream to every other member, and the local spool.

A synchronized pipeline gives exclusive access to the journal: its streams own the spools of all
replicas (broker sections 1 and 6).

An append sends while it owns the pipeline exclusively. Each send that asks for an answer adds a
future to its stream, and answers resolve the futures in the order of the sends. So an append can
start before the one before it is acknowledged, and answers are attributed correctly also when an
append was cancelled: its futures are resolved nevertheless.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from gazette_sdk.broker.append.machine import Input
from gazette_sdk.broker.spool.spool import Spool
from gazette_sdk.cluster.membership import LEASE_TTL_S
from gazette_sdk.errors import (
    STATUS_NAMES,
    CallError,
    DeadlineExceededError,
    GazetteError,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.routes import equivalent

__all__ = [
    "PEER_ANSWER_TIMEOUT_S",
    "SEND_BUFFER_BYTES",
    "Answer",
    "OpenStream",
    "PeerStream",
    "Pipeline",
    "Sync",
    "judge_acks",
    "judge_sync",
]

PEER_ANSWER_TIMEOUT_S = LEASE_TTL_S / 2
"""Default bound of a peer's answer. A peer that misses it counts as gone: its stream is broken, and
with it the pipeline. It is half of the lease, so that a peer which does not answer has not cost
more than its lease does anyway."""

SEND_BUFFER_BYTES = 4 << 20
"""Content waiting to be sent to one peer before the append waits for it."""

OpenStream: TypeAlias = Callable[
    [pb.ProcessSpec.ID, AsyncIterator[pb.ReplicateRequest]], AsyncIterator[pb.ReplicateResponse]
]
"""Opens a Replicate stream to exactly that member."""

TELL_DELAY_S = 0.001
"""Pause before the peers are told of an acknowledgement by a request of its own: the request of the
next append, if it comes first, saves it."""

Answer: TypeAlias = pb.ReplicateResponse | GazetteError
"""Answer of a peer, or the error in its place."""

_log = logging.getLogger(__name__)


class _Expected(NamedTuple):
    """Answer that a peer owes, and the loop time at which it was asked for."""

    answer: asyncio.Future[Answer]
    must_agree: bool
    asked_at: float


class PeerStream:
    """A Replicate stream to one peer.

    Args:
        peer: id of the member.
        open_stream: opens it.
        answer_timeout_s: bound of what the peer lets us wait for.
        on_ended: called once, when the stream has ended or is broken.

    Attributes:
        error: the error that broke it; ``None`` while it works, and after an end that we wanted.
        answer_timeout_s: the same.
        heard_at: time of the event loop of the last answer; -inf before the first.
    """

    def __init__(
        self,
        peer: pb.ProcessSpec.ID,
        open_stream: OpenStream,
        *,
        answer_timeout_s: float | None = None,
        on_ended: Callable[[PeerStream], None] | None = None,
    ) -> None:
        self.peer = peer
        self.error: GazetteError | None = None
        self.heard_at = -math.inf
        self.answer_timeout_s = answer_timeout_s or PEER_ANSWER_TIMEOUT_S
        self._outgoing: deque[pb.ReplicateRequest] = deque()
        self._outgoing_bytes = 0
        self._expected: deque[_Expected] = deque()
        self._watching: asyncio.TimerHandle | None = None
        self._half_closed = False
        self._send_wanted: asyncio.Future[None] | None = None
        self._room_wanted: asyncio.Future[None] | None = None
        self._task = asyncio.get_running_loop().create_task(
            self._run(open_stream), name=f"replicate to {peer.zone}/{peer.suffix}"
        )
        if on_ended is not None:
            self._task.add_done_callback(lambda _: on_ended(self))

    def send(self, request: pb.ReplicateRequest) -> None:
        """Queue a request. A stream which is broken ignores it."""
        if self.error is None:
            self._outgoing.append(request)
            self._outgoing_bytes += len(request.content)
            _wake(self._send_wanted)

    def expect(self, *, must_agree: bool = False) -> asyncio.Future[Answer]:
        """Return the future answer to the last request, which asked for one.

        Args:
            must_agree: any answer but OK breaks the stream: what was sent behind that request
                is not acknowledged either.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer] = loop.create_future()
        if self.error is not None:
            answer.set_result(self.error)
        else:
            self._expected.append(_Expected(answer, must_agree, loop.time()))
            if self._watching is None:
                self._watching = loop.call_later(self.answer_timeout_s, self._watch)
        return answer

    def _watch(self) -> None:
        """Give the stream up if the oldest answer is overdue, whoever still waits for it."""
        self._watching = None
        if not self._expected or self.error is not None:
            return
        loop = asyncio.get_running_loop()
        due_at = self._expected[0].asked_at + self.answer_timeout_s
        if loop.time() >= due_at:
            _log.warning("%s does not answer; its stream is given up", _name(self.peer))
            self.fail(_no_answer(self.peer))
        else:
            self._watching = loop.call_at(due_at, self._watch)

    @property
    def has_room(self) -> bool:
        """True if less than :data:`SEND_BUFFER_BYTES` wait to be sent."""
        return self._outgoing_bytes <= SEND_BUFFER_BYTES

    async def room(self) -> None:
        """Return when less than :data:`SEND_BUFFER_BYTES` wait to be sent, or it is broken.

        A peer that takes nothing for as long as it may take to answer is given up.
        """
        while self._outgoing_bytes > SEND_BUFFER_BYTES and self.error is None:
            self._room_wanted = asyncio.get_running_loop().create_future()
            done, _ = await asyncio.wait([self._room_wanted], timeout=self.answer_timeout_s)
            if not done:
                self.fail(_no_answer(self.peer))

    def half_close(self) -> None:
        """Send nothing more; the peer rolls back and ends the stream."""
        self._half_closed = True
        _wake(self._send_wanted)

    def fail(self, error: GazetteError) -> None:
        """Break the stream: outstanding answers become ``error``."""
        if self.error is None:
            self.error = error
        self._outgoing.clear()
        self._outgoing_bytes = 0
        self._resolve_expected(self.error)
        _wake(self._send_wanted)
        _wake(self._room_wanted)
        self._task.cancel()

    async def ended(self, timeout_s: float | None = None) -> None:
        """Return when the peer has ended the stream; break it after ``timeout_s``."""
        done, _ = await asyncio.wait([self._task], timeout=timeout_s or self.answer_timeout_s)
        if not done:
            self.fail(_no_answer(self.peer))
            await asyncio.wait([self._task])

    async def _requests(self) -> AsyncIterator[pb.ReplicateRequest]:
        while True:
            while self._outgoing:
                request = self._outgoing.popleft()
                self._outgoing_bytes -= len(request.content)
                _wake(self._room_wanted)
                yield request
            if self._half_closed or self.error is not None:
                return
            self._send_wanted = asyncio.get_running_loop().create_future()
            await self._send_wanted

    async def _run(self, open_stream: OpenStream) -> None:
        ended = CallError(f"{_name(self.peer)} ended its stream before answering")
        loop = asyncio.get_running_loop()
        try:
            async for response in open_stream(self.peer, self._requests()):
                self.heard_at = loop.time()
                if not self._expected:
                    ended = CallError(f"{_name(self.peer)} sent an answer without a request")
                    self.error = ended
                    break
                expected = self._expected.popleft()
                if not expected.answer.done():
                    expected.answer.set_result(response)
                if expected.must_agree and response.status != pb.OK:
                    self.error = self.error or _unexpected(self.peer, response)
                    break
        except GazetteError as error:
            self.error = self.error or error
        finally:
            if self._expected or not self._half_closed:
                self.error = self.error or ended
            self._resolve_expected(self.error or ended)
            if self._watching is not None:
                self._watching.cancel()
            _wake(self._room_wanted)

    def _resolve_expected(self, error: GazetteError) -> None:
        """No more answers will come."""
        while self._expected:
            answer = self._expected.popleft().answer
            if not answer.done():
                answer.set_result(error)


@dataclass(slots=True, eq=False)
class Pipeline:
    """A set of Replicate streams, and the spool of this broker.

    Attributes:
        header: the resolution it was started with.
        spool: ours, owned until :meth:`tear_down`.
        streams: one per other member, in member order.
        acknowledged_end: offset through which all replicas are known to have the journal.
        on_acknowledged: called with each fragment that all replicas have acknowledged, also if
            nobody waits for that.
    """

    header: pb.Header
    spool: Spool
    streams: list[PeerStream] = field(default_factory=list)
    acknowledged_end: int = 0
    on_acknowledged: Callable[[pb.Fragment], None] | None = None
    _opened: bool = False
    _told_end: int = -1  # of acknowledged_end: what the peers know
    _stored_end: int = 0
    _told_stored_end: int = 0
    _has_sent_content: bool = False  # since the last proposal
    _proposed: pb.ReplicateRequest | None = None  # the last proposal sent
    _telling: asyncio.TimerHandle | None = None

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
        self, proposal: pb.Fragment, registers: pb.LabelSet, *, acknowledge: bool
    ) -> list[asyncio.Future[Answer]]:
        """Send a proposal to every replica, ours last; see :meth:`scatter`.

        Args:
            proposal: what the spools are to become.
            registers: the journal's, with it.
            acknowledge: True to ask peers for an answer.
        """
        if self.streams:
            request = pb.ReplicateRequest(
                proposal=proposal, registers=registers, acknowledge=acknowledge
            )
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
        self._tell_with(request)
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
        if must_agree:
            self._report(answers, request.proposal)
        response = await self.spool.apply(request, primary=True)
        _assert_ok(response.status)
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
        request = pb.ReplicateRequest(content=content, content_delta=content_delta)
        self._tell_with(request)
        self._has_sent_content = True
        for stream in self.streams:
            stream.send(request)
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
        self, content: bytes, committed: pb.Fragment, registers: pb.LabelSet
    ) -> list[asyncio.Future[Answer]]:
        """Send a whole append to every peer. Our own spool has committed it already.

        Args:
            content: all content of the append.
            committed: fragment that the append made of the spool's fragment.
            registers: the journal's registers after it.

        Returns:
            one future per peer.
        """
        assert self._opened, "a pipeline is synchronized before its first append"
        chunk = pb.ReplicateRequest(content=content)
        commit = pb.ReplicateRequest(proposal=committed, registers=registers, acknowledge=True)
        self._tell_with(commit)
        self._proposed = commit
        answers = []
        for stream in self.streams:
            stream.send(chunk)
            stream.send(commit)
            answers.append(stream.expect(must_agree=True))
        self._report(answers, committed)
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

    # ---------------------------------------- what is acknowledged, and stored

    def _report(self, answers: Sequence[asyncio.Future[Answer]], fragment: pb.Fragment) -> None:
        """Report a fragment when all answers say that the peers have it."""
        left = len(answers)

        def answered(answer: asyncio.Future[Answer]) -> None:
            nonlocal left
            if not answer.cancelled():
                response = answer.result()
                left -= not isinstance(response, GazetteError) and response.status == pb.OK
                if left == 0:
                    self._acknowledged(fragment)

        for answer in answers:
            answer.add_done_callback(answered)

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
            if self._telling is None:
                self._tell_soon()

    def tell_stored(self, end: int) -> None:
        """Tell the peers likewise that the store has the journal through ``end``."""
        if self.streams and end > self._stored_end:
            self._stored_end = end
            if self._telling is None:
                self._tell_soon()

    def _tell_soon(self) -> None:
        loop = asyncio.get_running_loop()
        self._telling = loop.call_later(TELL_DELAY_S, self._tell_now)

    def _tell_with(self, request: pb.ReplicateRequest) -> None:
        if self.acknowledged_end > self._told_end:
            self._told_end = request.acknowledged_through = self.acknowledged_end
        if self._stored_end > self._told_stored_end:
            self._told_stored_end = request.stored_through = self._stored_end

    def _tell_now(self) -> None:
        """Repeat the last proposal, which changes nothing, with the acknowledged offset.

        In the middle of an append it would roll back; then the append's next request has it.
        """
        self._telling = None
        last = self._proposed
        is_told = (self.acknowledged_end, self._stored_end) == (
            self._told_end,
            self._told_stored_end,
        )
        if is_told or self._has_sent_content or last is None:
            return
        request = pb.ReplicateRequest(proposal=last.proposal, registers=last.registers)
        self._tell_with(request)
        for stream in self.streams:
            stream.send(request)

    # ------------------------------------------------------------------ end

    async def tear_down(self) -> Spool:
        """Roll back what is not committed, and half-close every stream.

        Returns:
            the spool, which the caller puts back into its slot. :meth:`ended` waits for peers.
        """
        if self._telling is not None:
            self._telling.cancel()
            self._tell_now()
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
        if self._telling is not None:
            self._telling.cancel()
        for stream in self.streams:
            stream.fail(error)


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
            # It may lack the beginning of our fragment; or be ahead, but behind another peer.
            answer.fragment.end > head
            or (answer.fragment.end == head and answer.fragment.begin == answer.fragment.end)
        ):
            roll_to = max(roll_to, answer.fragment.end)
        else:
            errors[index] = _unexpected(peers[index], answer)

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
            return _unexpected(peer, answer)
    return None


def _assert_ok(status: pb.Status) -> None:
    assert status == pb.OK, f"our own spool refused a proposal: {STATUS_NAMES[status]}"


def _mismatches(answer: Answer) -> bool:
    return not isinstance(answer, GazetteError) and answer.status == pb.PROPOSAL_MISMATCH


def _unexpected(peer: pb.ProcessSpec.ID, answer: pb.ReplicateResponse) -> CallError:
    name = STATUS_NAMES[answer.status] if answer.status < len(STATUS_NAMES) else answer.status
    return CallError(f"{_name(peer)} answered {name} to a proposal")


def _no_answer(peer: pb.ProcessSpec.ID) -> GazetteError:
    return DeadlineExceededError(f"{_name(peer)} did not answer in time")


def _name(peer: pb.ProcessSpec.ID) -> str:
    return f"broker {peer.zone}/{peer.suffix}"


def _wake(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)
