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
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from gazette_sdk.broker.replication.agreement import judge_acks
from gazette_sdk.broker.replication.peer_stream import Answer, PeerStream
from gazette_sdk.broker.spool.spool import Spool
from gazette_sdk.errors import (
    STATUS_NAMES,
    GazetteError,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.rules import equivalent

__all__ = ["Pipeline"]

TELL_DELAY_S = 0.001
"""Pause before the peers are told of an acknowledgement by a request of its own: the request of the
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
            nobody waits for that.
    """

    header: pb.Header
    spool: Spool
    streams: list[PeerStream] = field(default_factory=list)
    acknowledged_end: int = 0
    synchronized: pb.Fragment | None = None
    on_acknowledged: Callable[[pb.Fragment], None] | None = None
    _unanswered: set[asyncio.Future[Answer]] = field(default_factory=set)
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
        commit = pb.ReplicateRequest(proposal=committed, registers=registers, acknowledge=True)
        self._tell_with(commit)
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

        In the middle of an append it would roll back; then the append's commit has it.
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

    @property
    def may_leave_untold(self) -> bool:
        """True if peers may have committed what they were not told that all of them have."""
        return self._opened and (
            bool(self._unanswered)
            or (bool(self.streams) and self.acknowledged_end > self._told_end)
        )

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


def _assert_ok(status: pb.Status) -> None:
    assert status == pb.OK, f"our own spool refused a proposal: {STATUS_NAMES[status]}"
