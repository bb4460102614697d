"""Faults of transports: a transport around any other that drops, delays, duplicates and is cut.

::

    transport = FaultyTransport(
        connect(), TransportFaults(dropped_answers=0.1, delay_s=(0, 0.05)), seed=7
    )
    with Publisher(mapping=mapping.direct("notes"), transport=transport) as publisher:
        ...
        transport.cut("answers")       # calls have their effect, and no one learns of it
        transport.heal()

It fails calls, not packets. For processes and their connections there is
:class:`~gazette_sdk.testing.tcp_proxy.TcpProxy`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, TypeVar

from gazette_sdk.errors import ConfigurationError, UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.testing.store_faults import Chance
from gazette_sdk.testing.tcp_proxy import Direction
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.wire import ANYWHERE, AppendItem, ReadItem, ReplicateItem, Target

T = TypeVar("T")

CALLS: Final = (
    "list",
    "apply",
    "read",
    "append",
    "replicate",
    "list_fragments",
    "fragment_store_health",
)
"""Names of a transport's calls."""

INJECTED_MAX: Final = 10_000
"""Number of injected faults that a transport remembers: the last ones."""

_BROKEN_AFTER_MAX: Final = 8
"""A stream whose answers are dropped ends after at most so many of them."""


@dataclass(frozen=True, slots=True)
class TransportFaults:
    """Settings of a transport's faults. Rates are probabilities from 0 to 1, per call.

    Attributes:
        dropped_requests: rate of calls that fail without an effect.
        dropped_answers: rate of calls that have their effect, and then fail. Streams break off in
            the middle.
        duplicates: rate of appends and changes of journals that are made twice, as a network or a
            proxy does that sends again. The second answer is returned.
        delay_s: least and greatest additional time of a call before it is sent, in seconds.
        unreachable: True if every call fails.
        calls: names of the calls that are dropped, duplicated or delayed, of :data:`CALLS`.
    """

    dropped_requests: float = 0.0
    dropped_answers: float = 0.0
    duplicates: float = 0.0
    delay_s: tuple[float, float] = (0.0, 0.0)
    unreachable: bool = False
    calls: tuple[str, ...] = CALLS

    def __post_init__(self) -> None:
        for name in ("dropped_requests", "dropped_answers", "duplicates"):
            rate = getattr(self, name)
            if not 0 <= rate <= 1:
                raise ConfigurationError(f"{name}={rate}: give a probability from 0 to 1")
        low, high = self.delay_s
        if not 0 <= low <= high:
            raise ConfigurationError(
                f"delay_s={self.delay_s}: give the least and the greatest time, in seconds"
            )
        if unknown := set(self.calls) - set(CALLS):
            raise ConfigurationError(
                f"calls: a transport has no {', '.join(sorted(unknown))}; it has {', '.join(CALLS)}"
            )


NO_FAULTS: Final = TransportFaults()


@dataclass(frozen=True, slots=True)
class InjectedCallFault:
    """Fault that was injected.

    Attributes:
        call: name of the call, such as ``append``.
        subject: the journal, or empty.
        fault: the setting of :class:`TransportFaults` which it comes from, or ``cut``.
    """

    call: str
    subject: str
    fault: str


@dataclass(frozen=True, slots=True)
class _Decision:
    """Faults of one call."""

    subject: str
    drops_answer_after: int | None
    is_duplicated: bool


class FaultyTransport(Transport):
    """A transport with injected faults around another one. Switches work from any thread.

    Args:
        transport: the other one, which is closed with this one.
        faults: settings to begin with.
        seed: derives every random decision: the nth call of a kind for a journal has the same
            faults in every run.
    """

    def __init__(
        self, transport: Transport, faults: TransportFaults = NO_FAULTS, *, seed: int = 0
    ) -> None:
        self.injected: deque[InjectedCallFault] = deque(maxlen=INJECTED_MAX)
        self.knows_routes = transport.knows_routes
        self.may_hide_journals = transport.may_hide_journals
        self._transport = transport
        self._faults = faults
        self._chance = Chance(seed)
        self._cut: set[Direction] = set()
        self._healed = _Wakeups()

    # ------------------------------------------------------------ switches

    @property
    def faults(self) -> TransportFaults:
        """Settings of now."""
        return self._faults

    def change(self, **changes: object) -> None:
        """Change some of the settings, by name."""
        self._faults = dataclasses.replace(self._faults, **changes)  # type: ignore[arg-type]

    def fail(self) -> None:
        """Make every call fail from now on."""
        self.change(unreachable=True)

    def cut(self, direction: Direction = "both") -> None:
        """Let nothing pass from now on: calls wait until the cut is healed, those under way, too.

        Args:
            direction: ``requests``, ``answers``, or ``both``. With ``answers``, calls have their
                effect.
        """
        self._cut |= {"requests", "answers"} if direction == "both" else {direction}

    def heal(self) -> None:
        """End all faults. Calls that wait continue."""
        self._faults = NO_FAULTS
        self._cut = set()
        self._healed.wake()

    # ------------------------------------------------------------ transport

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """See :class:`Transport`."""
        return self._transport.loop

    def list(self, request: pb.ListRequest) -> AsyncGenerator[pb.ListResponse]:
        """See :meth:`Transport.list`."""
        return self._stream("list", "", lambda: self._transport.list(request))

    async def apply(self, request: pb.ApplyRequest) -> pb.ApplyResponse:
        """See :meth:`Transport.apply`."""
        return await self._call("apply", "", lambda: self._transport.apply(request))

    def read(self, request: pb.ReadRequest, target: Target = ANYWHERE) -> AsyncGenerator[ReadItem]:
        """See :meth:`Transport.read`."""
        return self._stream("read", request.journal, lambda: self._transport.read(request, target))

    async def append(
        self, requests: AsyncIterator[AppendItem], target: Target = ANYWHERE
    ) -> pb.AppendResponse:
        """See :meth:`Transport.append`. An append that is duplicated is held in memory."""
        first = await anext(requests, None)
        if first is None:
            return await self._transport.append(requests, target)
        journal = first.journal if isinstance(first, pb.AppendRequest) else ""
        decision = await self._before("append", journal)
        if not decision.is_duplicated:
            sent = self._sent(_chained(first, requests))
            response = await self._transport.append(sent, target)
        else:
            items = [first, *[item async for item in requests]]
            await self._transport.append(_replayed(items), target)
            response = await self._transport.append(_replayed(items), target)
        return await self._answered("append", decision, response)

    def replicate(
        self, requests: AsyncIterator[ReplicateItem], target: Target
    ) -> AsyncGenerator[pb.ReplicateResponse]:
        """See :meth:`Transport.replicate`."""
        return self._stream(
            "replicate", "", lambda: self._transport.replicate(self._sent(requests), target)
        )

    async def list_fragments(
        self, request: pb.FragmentsRequest, target: Target = ANYWHERE
    ) -> pb.FragmentsResponse:
        """See :meth:`Transport.list_fragments`."""
        return await self._call(
            "list_fragments",
            request.journal,
            lambda: self._transport.list_fragments(request, target),
        )

    async def fragment_store_health(
        self, request: pb.FragmentStoreHealthRequest, target: Target = ANYWHERE
    ) -> pb.FragmentStoreHealthResponse:
        """See :meth:`Transport.fragment_store_health`."""
        return await self._call(
            "fragment_store_health",
            "",
            lambda: self._transport.fragment_store_health(request, target),
        )

    async def aclose(self) -> None:
        """Close the other transport. Calls that wait at a cut continue, and fail there."""
        self._cut = set()
        self._healed.wake()
        await self._transport.aclose()

    # -------------------------------------------------------------- inside

    async def _call(self, name: str, subject: str, call: Callable[[], Awaitable[T]]) -> T:
        decision = await self._before(name, subject)
        if decision.is_duplicated and name == "apply":
            await call()
        return await self._answered(name, decision, await call())

    async def _stream(
        self, name: str, subject: str, call: Callable[[], AsyncGenerator[T]]
    ) -> AsyncGenerator[T]:
        decision = await self._before(name, subject)
        count = 0
        async with aclosing(call()) as answers:
            async for answer in answers:
                await self._passable(name, subject, "answers")
                if count == decision.drops_answer_after:
                    break
                count += 1
                yield answer
        await self._answered(name, decision, None)

    async def _before(self, name: str, subject: str) -> _Decision:
        """Delay or fail a call before it is sent, and decide what follows."""
        faults = self._faults
        if name not in faults.calls:
            faults = NO_FAULTS
        chance = self._chance.about(f"{name} {subject}")
        delay_s = chance.uniform(*faults.delay_s)
        # All numbers are drawn, so that one setting does not change the decisions of another.
        drops_request, drops_answer, duplicates = (chance.random() for _ in range(3))
        broken_after = chance.randrange(_BROKEN_AFTER_MAX)
        if delay_s:
            self._note(name, subject, "delay_s")
            await asyncio.sleep(delay_s)
        await self._passable(name, subject, "requests")
        if self._faults.unreachable:
            raise self._failure(name, subject, "unreachable")
        if drops_request < faults.dropped_requests:
            raise self._failure(name, subject, "dropped_requests")
        is_duplicated = name in {"append", "apply"} and duplicates < faults.duplicates
        if is_duplicated:
            self._note(name, subject, "duplicates")
        drops = drops_answer < faults.dropped_answers
        return _Decision(subject, broken_after if drops else None, is_duplicated)

    async def _answered(self, name: str, decision: _Decision, answer: T) -> T:
        """Return the answer of a call that had its effect, or drop it."""
        await self._passable(name, decision.subject, "answers")
        if decision.drops_answer_after is not None:
            raise self._failure(name, decision.subject, "dropped_answers")
        return answer

    async def _sent(self, requests: AsyncIterator[T]) -> AsyncIterator[T]:
        async for request in requests:
            await self._passable("request", "", "requests")
            yield request

    async def _passable(self, name: str, subject: str, direction: Direction) -> None:
        if direction in self._cut:
            self._note(name, subject, "cut")
            await self._healed.wait(lambda: direction not in self._cut)

    def _failure(self, name: str, subject: str, fault: str) -> UnavailableError:
        self._note(name, subject, fault)
        what = f"{name} of {subject}" if subject else name
        return UnavailableError(
            f"injected: {what}: {fault.replace('_', ' ')}; try again",
            journal=subject or None,
        )

    def _note(self, name: str, subject: str, fault: str) -> None:
        self.injected.append(InjectedCallFault(name, subject, fault))


class _Wakeups:
    """Coroutines of any event loop that wait for a condition."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()
        self._lock = threading.Lock()

    async def wait(self, holds: Callable[[], bool]) -> None:
        """Wait until a condition holds, which is evaluated again at each wake-up."""
        while True:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            with self._lock:
                self._waiting.add(future)
            try:
                if holds():
                    return
                await future
            finally:
                with self._lock:
                    self._waiting.discard(future)

    def wake(self) -> None:
        """Let everybody evaluate its condition again. Any thread may call."""
        with self._lock:
            for future in self._waiting:
                future.get_loop().call_soon_threadsafe(_resolve, future)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _chained(first: T, rest: AsyncIterator[T]) -> AsyncIterator[T]:
    yield first
    async for item in rest:
        yield item


async def _replayed(items: list[T]) -> AsyncIterator[T]:
    for item in items:
        yield item
