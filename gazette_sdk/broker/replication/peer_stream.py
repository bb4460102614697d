"""A Replicate stream of the primary to one peer, with the answers that the peer owes.

Each send that asks for an answer adds a future, and answers resolve the futures in the order of the
sends.

:class:`PeerStreams` holds the Replicate streams, and other calls, that a broker has open to others.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypeVar

from gazette_sdk.broker.metrics import PEER_FAILURES
from gazette_sdk.cluster.membership import LEASE_TTL_S
from gazette_sdk.errors import (
    STATUS_NAMES,
    CallError,
    DeadlineExceededError,
    GazetteError,
    UnavailableError,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.wire import ReplicateItem

PEER_ANSWER_TIMEOUT_S = LEASE_TTL_S / 2
"""Default bound of a peer's answer. A peer that misses it counts as gone: its stream is broken, and
with it the pipeline. It is half of the lease, so that a peer which does not answer has not cost
more than its lease does anyway."""

SEND_BUFFER_BYTES = 4 << 20
"""Content waiting to be sent to one peer before the append waits for it."""

OpenStream: TypeAlias = Callable[
    [pb.ProcessSpec.ID, AsyncIterator[ReplicateItem]], AsyncIterator[pb.ReplicateResponse]
]
"""Opens a Replicate stream to exactly that member."""

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
        waited_s: how long the peer was waited for when the stream broke; 0 if it owed nothing.
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
        self.waited_s = 0.0
        self.answer_timeout_s = answer_timeout_s or PEER_ANSWER_TIMEOUT_S
        self._outgoing: deque[ReplicateItem] = deque()
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

    def send(self, item: ReplicateItem) -> None:
        """Queue an item. A stream which is broken ignores it."""
        if self.error is None:
            self._outgoing.append(item)
            if isinstance(item, bytes):
                self._outgoing_bytes += len(item)
            _wake(self._send_wanted)

    def expect(self, *, must_agree: bool = False) -> asyncio.Future[Answer]:
        """Return the future answer to the last request, which asked for one.

        Args:
            must_agree: any answer but OK breaks the stream: what was sent after that request
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
            _log.warning(
                "%s does not answer; its stream is given up",
                _name(self.peer),
                extra={"peer": f"{self.peer.zone}/{self.peer.suffix}"},
            )
            self._give_up(self.answer_timeout_s)
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
                self._give_up(self.answer_timeout_s)

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

    def _give_up(self, waited_s: float) -> None:
        """Break the stream: the peer does not answer, or takes nothing."""
        self.waited_s = waited_s
        self.fail(_no_answer(self.peer))

    async def ended(self, timeout_s: float | None = None) -> None:
        """Return when the peer has ended the stream; break it after ``timeout_s``."""
        timeout_s = timeout_s or self.answer_timeout_s
        done, _ = await asyncio.wait([self._task], timeout=timeout_s)
        if not done:
            self._give_up(timeout_s)
            await asyncio.wait([self._task])

    async def _requests(self) -> AsyncIterator[ReplicateItem]:
        while True:
            while self._outgoing:
                item = self._outgoing.popleft()
                if isinstance(item, bytes):
                    self._outgoing_bytes -= len(item)
                    _wake(self._room_wanted)
                yield item
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
                    self.error = self.error or unexpected(self.peer, response)
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
        if self._expected:
            asked_at = self._expected[0].asked_at
            self.waited_s = max(self.waited_s, asyncio.get_running_loop().time() - asked_at)
        while self._expected:
            answer = self._expected.popleft().answer
            if not answer.done():
                answer.set_result(error)


def unexpected(peer: pb.ProcessSpec.ID, answer: pb.ReplicateResponse) -> CallError:
    """Return the error of a peer that did not answer OK."""
    name = STATUS_NAMES[answer.status] if answer.status < len(STATUS_NAMES) else answer.status
    return CallError(f"{_name(peer)} answered {name} to a proposal")


def _no_answer(peer: pb.ProcessSpec.ID) -> GazetteError:
    return DeadlineExceededError(f"{_name(peer)} did not answer in time")


def _name(peer: pb.ProcessSpec.ID) -> str:
    return f"broker {peer.zone}/{peer.suffix}"


def _wake(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)


T = TypeVar("T")

_Name: TypeAlias = tuple[str, str]


@dataclass(slots=True)
class _Call:
    """Call to a peer about a journal, and the error that ended it early."""

    journal: str
    error: GazetteError | None = None


@dataclass(slots=True)
class PeerStreams:
    """Registry of Replicate streams, by peer.

    Attributes:
        answer_timeout_s: bound of a peer's answer.
        on_broken: called with each peer whose stream or call broke, the error, and how many
            seconds the stream had waited for the peer.
    """

    answer_timeout_s: float = PEER_ANSWER_TIMEOUT_S
    on_broken: Callable[[pb.ProcessSpec.ID, GazetteError, float], None] | None = None
    _open: dict[_Name, set[PeerStream]] = field(default_factory=dict)
    _calls: dict[_Name, dict[asyncio.Task[Any], _Call]] = field(default_factory=dict)
    _heard_at: dict[_Name, float] = field(default_factory=dict)

    def open(self, peer: pb.ProcessSpec.ID, open_stream: OpenStream) -> PeerStream:
        """Open a stream to a peer. It is forgotten when it ends."""
        stream = PeerStream(
            peer, open_stream, answer_timeout_s=self.answer_timeout_s, on_ended=self._ended
        )
        self._open.setdefault((peer.zone, peer.suffix), set()).add(stream)
        PEER_FAILURES.cell(f"{peer.zone}/{peer.suffix}")  # there before the first failure
        return stream

    async def until_gone(
        self, peer: pb.ProcessSpec.ID, call: Coroutine[Any, Any, T], journal: str = ""
    ) -> T:
        """Await a call to a journal's primary, until that has left the cluster or the journal.

        Raises:
            GazetteError: of :meth:`fail` or :meth:`lead_no_more`. The call was cancelled.
        """
        task = asyncio.ensure_future(call)
        name = peer.zone, peer.suffix
        self._calls.setdefault(name, {})[task] = _Call(journal)
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:  # no one wants the call's outcome any more
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            task.cancel()
            await asyncio.wait([task])  # it reads from what our caller closes next
            raise
        finally:
            error = self._calls[name].pop(task).error
            if not self._calls[name]:
                del self._calls[name]
        if error is not None and task.cancelled():
            raise error
        return task.result()

    def fail(self, zone: str, suffix: str, error: GazetteError) -> None:
        """Break all streams to a peer, and end all calls: no one waits for its answers any more."""
        for stream in list(self._open.get((zone, suffix), ())):
            stream.fail(error)
        for task, call in self._calls.get((zone, suffix), {}).items():
            call.error = error
            task.cancel()

    def lead_no_more(self, zone: str, suffix: str, journal: str, grace_s: float) -> None:
        """End the present calls to a journal's former primary, unless they end soon.

        It finishes its append in progress. If it is cut off from us, its answer never comes.
        """
        error = UnavailableError(
            f"broker {zone}/{suffix} leads the journal no more, and did not answer", journal=journal
        )

        def end() -> None:
            for task, call in calls.items():
                if not task.done():
                    call.error = error
                    task.cancel()

        present = self._calls.get((zone, suffix), {})
        calls = {task: call for task, call in present.items() if call.journal == journal}
        if calls:
            asyncio.get_running_loop().call_later(grace_s, end)

    def heard_at(self, zone: str, suffix: str) -> float:
        """Return the loop time of the last answer of a peer; -inf if there was none."""
        streams = self._open.get((zone, suffix), ())
        heard_at = self._heard_at.get((zone, suffix), -math.inf)
        return max(heard_at, *(stream.heard_at for stream in streams), -math.inf)

    def _ended(self, stream: PeerStream) -> None:
        name = stream.peer.zone, stream.peer.suffix
        streams = self._open[name]
        streams.discard(stream)
        self._heard_at[name] = max(self._heard_at.get(name, -math.inf), stream.heard_at)
        if not streams:
            del self._open[name]
        if stream.error is not None:
            PEER_FAILURES.inc(f"{stream.peer.zone}/{stream.peer.suffix}")
        if stream.error is not None and self.on_broken is not None:
            self.on_broken(stream.peer, stream.error, stream.waited_s)
