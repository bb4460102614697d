"""Events of a cluster: members, journals, routes, stores, and warnings of logs, as one stream.

Each process keeps its latest events in a ring. What Etcd shows is seen by every broker, so a stream
takes it from the ring of the broker that serves it; what only one process sees, it takes from the
rings of all brokers. An event's id has the process and a number, the microseconds since 1970 made
unique: a stream that is resumed at any broker continues from there, also if the process is gone.

Recording is cheap: an event is a tuple, which is put into words when someone reads it, and a batch
of changes records few of them and the number of the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import time
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from operator import attrgetter
from typing import Any, NamedTuple

from gazette_sdk.cluster.broker_keys import BrokerKeySpace, implied_route
from gazette_sdk.cluster.items import AssignmentEntry, ItemEntry, MemberEntry
from gazette_sdk.cluster.keyspace import Entry
from gazette_sdk.errors import CallError, GazetteError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import cluster_pb2 as clpb
from gazette_sdk.protocol.rules import EVENTS_RPC
from gazette_sdk.server.authorization import AuditEvent, Call
from gazette_sdk.server.logging import RECENT, RecentRecord
from gazette_sdk.transport.member_calls import MemberCalls

RING_EVENTS = 1000
"""Events that a process keeps."""

AUDIT = "audit"
"""Kind of the records of the audit log."""

AUDIT_EVENTS = 200
"""Events of that kind that a process keeps beside the others: callers decide how many there are."""

BATCH_EVENTS_MAX = 100
"""Events of one kind that a batch of changes in Etcd records. The others are counted."""

QUEUE_EVENTS_MAX = 1000
"""Events that wait for the reader of a stream. One that is slower than that is refused."""

STREAMS_MAX = 256
"""Greatest number of streams of one process."""

ORDER_S = 0.25
"""Time for which a stream holds an event, so that those of other brokers are sorted into it."""

OVERLAP_US = 2_000_000
"""Time before an id of another broker from which changes in Etcd are repeated, if the stream that
had it was served by another broker: that may have seen them later than this one."""

AGAIN_S = 2.0
"""Pause before another broker is asked again whose stream has ended."""

FOREIGN_AGAIN_S = 60.0
"""The same of a broker that has no such call."""

_QUIET_LOGGERS = ("gazette.audit", "gazette_sdk.fragment.registry")
"""Loggers whose records are no events of kind log: the audit log, and one of events of stores."""

_INFO, _WARNING, _ERROR = clpb.INFO, clpb.WARNING, clpb.ERROR


class Recorded(NamedTuple):
    """Event in a ring.

    Attributes:
        number: microseconds since 1970, made unique in the process.
        kind: kind of its subject.
        subject: name of its subject.
        text: one sentence, or a function that returns it.
        severity: its severity.
        is_shared: True if all brokers see it: it is in Etcd.
    """

    number: int
    kind: str
    subject: str
    text: str | Callable[[], str]
    severity: clpb.Severity
    is_shared: bool


class Position(NamedTuple):
    """Place in the events of a cluster: all with a greater number, and process, follow."""

    number: int = 0
    process: str = ""

    @classmethod
    def parse(cls, event_id: str) -> Position:
        """Return the place after an event.

        Raises:
            CallError: it is no id of an event.
        """
        if not event_id:
            return cls()
        process, separator, number = event_id.rpartition(":")
        if not separator or not number.isascii() or not number.isdigit() or len(number) > 18:
            raise CallError(
                f"{event_id[:80]!r} is no id of an event: give the id of one that was received, "
                "or none for all that are kept",
                code="INVALID_ARGUMENT",
            )
        return cls(int(number), process)


class EventRing:
    """Latest events of this process. It belongs to the event loop.

    Args:
        process: zone and suffix of this process.
        now: Unix time in seconds.
    """

    def __init__(self, process: str, *, now: Callable[[], float] = time.time) -> None:
        self.process = process
        self._now = now
        self._ring: deque[Recorded] = deque(maxlen=RING_EVENTS)
        self._audit: deque[Recorded] = deque(maxlen=AUDIT_EVENTS)
        self._readers: set[EventQueue] = set()
        self._passed_on: OrderedDict[Position, None] = OrderedDict()
        self._last = 0

    def record(
        self,
        kind: str,
        subject: str,
        text: str | Callable[[], str],
        severity: clpb.Severity = _INFO,
        *,
        is_shared: bool = False,
    ) -> None:
        """Add an event, for the readers, too."""
        self._last = number = max(self._last + 1, int(self._now() * 1e6))
        recorded = Recorded(number, kind, subject, text, severity, is_shared)
        (self._audit if kind == AUDIT else self._ring).append(recorded)
        for reader in self._readers:
            reader.put(self.event(recorded), is_shared=is_shared)

    def after(self, position: Position, *, only_local: bool) -> Iterator[clpb.Event]:
        """Yield kept events from a place on.

        Args:
            position: the place.
            only_local: leave out what all brokers see.
        """
        overlaps = position.process != self.process and position not in self._passed_on
        for recorded in list(heapq.merge(self._ring, self._audit, key=attrgetter("number"))):
            number = recorded.number
            if recorded.is_shared:
                after = position.number - (OVERLAP_US if overlaps else 0)
                is_wanted = not only_local and number > after
            else:
                is_wanted = (number, self.process) > position
            if is_wanted:
                yield self.event(recorded)

    def pass_on(self, event: clpb.Event) -> None:
        """Note that a stream of this broker has an event of another, after those before it."""
        self._passed_on[Position(event.time_us, event.member)] = None
        while len(self._passed_on) > RING_EVENTS:
            self._passed_on.popitem(last=False)

    @contextlib.contextmanager
    def reading(self, queue: EventQueue) -> Iterator[None]:
        """Put further events into a queue while the context is open.

        Raises:
            CallError: there are too many readers.
        """
        if len(self._readers) >= STREAMS_MAX:
            raise CallError(
                f"{STREAMS_MAX} streams of events are open here: end one, or ask another broker",
                code="RESOURCE_EXHAUSTED",
            )
        self._readers.add(queue)
        try:
            yield
        finally:
            self._readers.discard(queue)

    def event(self, recorded: Recorded) -> clpb.Event:
        """Return an event in words."""
        text = recorded.text
        return clpb.Event(
            id=f"{self.process}:{recorded.number}",
            time_us=recorded.number,
            kind=recorded.kind,
            subject=recorded.subject,
            text=text if isinstance(text, str) else text(),
            severity=recorded.severity,
            member=self.process,
        )


class EventQueue:
    """Events that wait for one reader. Bounded.

    Args:
        only_local: leave out what all brokers see.
    """

    def __init__(self, *, only_local: bool = False) -> None:
        self._only_local = only_local
        self._events: deque[clpb.Event] = deque()
        self._woken = asyncio.Event()
        self.has_overflowed = False

    def put(self, event: clpb.Event, *, is_shared: bool = False) -> None:
        """Add an event. One too many ends the stream."""
        if is_shared and self._only_local:
            return
        if len(self._events) >= QUEUE_EVENTS_MAX:
            self.has_overflowed = True
        else:
            self._events.append(event)
        self._woken.set()

    def take(self) -> Sequence[clpb.Event]:
        """Remove and return all events that wait."""
        events = list(self._events)
        self._events.clear()
        self._woken.clear()
        return events

    async def wait(self, timeout_s: float | None) -> None:
        """Wait for an event, or for some time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._woken.wait()


class EventRecorder:
    """Recorder of what this broker sees, in its ring.

    Args:
        ring: the ring.
        keyspace: mirror of Etcd, observed from :meth:`begin` on.
    """

    def __init__(self, ring: EventRing, keyspace: BrokerKeySpace) -> None:
        self._ring = ring
        self._keyspace = keyspace
        self._loop: asyncio.AbstractEventLoop | None = None

    def begin(self) -> None:
        """Begin to record. Call it on the event loop, once the mirror is loaded."""
        self._loop = asyncio.get_running_loop()
        self._keyspace.observers.append(self._observe)
        RECENT.observers.append(self._note_record)

    def end(self) -> None:
        """Record no more."""
        if self._loop is None:
            return
        self._loop = None
        self._keyspace.observers.remove(self._observe)
        RECENT.observers.remove(self._note_record)

    def store_changed(self, url: str, error: str | None) -> None:
        """Record that a store is healthy again, or why it is not."""
        if error is None:
            self._ring.record("store", url, "the store is healthy again")
        else:
            self._ring.record("store", url, f"the store is not healthy: {error}", _WARNING)

    def audited(self, event: AuditEvent | None, count: int) -> None:
        """Record a record of the audit log.

        Args:
            event: the event; None for events that were left out of the log.
            count: repetitions of the event, or the number of those left out.
        """
        if event is None:
            self._ring.record(AUDIT, "", f"{count} calls were left out: there were too many")
            return
        fields = event.fields(count)
        who = f"{fields.get('subject', 'someone')} at {fields.get('peer', 'an unknown address')}"
        repeated = f", {count} more times" if count else ""
        self._ring.record(
            AUDIT,
            str(fields.get("journal") or fields.get("shard") or ""),
            f"{event.method} by {who}{repeated}: {fields.get('outcome', '')}",
            _WARNING if event.is_refusal else _INFO,
        )

    def _note_record(self, record: RecentRecord) -> None:
        """Record a warning or an error of the log. Any thread may call."""
        loop = self._loop
        if loop is None or record.logger.startswith(_QUIET_LOGGERS):
            return
        severity = _ERROR if record.level >= logging.ERROR else _WARNING
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(
                lambda: self._ring.record("log", record.logger, record.text, severity)
            )

    def _observe(self) -> None:
        """Record the last batch of changes of the mirror."""
        batch = _Batch(self._ring)
        routes: dict[str, None] = {}
        for _, old, new in self._keyspace.changes:
            entry = new if new is not None else old
            match entry:
                case AssignmentEntry():
                    if (old is None) != (new is None):
                        routes[entry.item] = None
                case ItemEntry():
                    batch.record("journal", entry.id, _journal_text(old, new))
                case MemberEntry():
                    text = _member_text(old, new)
                    if text:
                        batch.record("member", f"{entry.zone}/{entry.suffix}", text)
        for journal in routes:
            batch.record("route", journal, self._route_text(journal))
        batch.end()

    def _route_text(self, journal: str) -> Callable[[], str]:
        """Return a function that puts the route of now into words."""
        assignments = self._keyspace.assignments(journal)
        return lambda: _route_in_words(implied_route(assignments))


class _Batch:
    """Events of one batch of changes."""

    def __init__(self, ring: EventRing) -> None:
        self._ring = ring
        self._counts: dict[str, int] = {}

    def record(self, kind: str, subject: str, text: str | Callable[[], str]) -> None:
        """Record an event, or count it."""
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        if count <= BATCH_EVENTS_MAX:
            self._ring.record(kind, subject, text, is_shared=True)

    def end(self) -> None:
        """Record how many there were of those that were only counted."""
        for kind, count in self._counts.items():
            more = count - BATCH_EVENTS_MAX
            if more > 0:
                text = f"{more} more changes of this kind came at the same time"
                self._ring.record(kind, "", text, is_shared=True)


def _journal_text(old: object, new: object) -> str:
    if old is None:
        return "the journal was created"
    return "the spec of the journal was changed" if new is not None else "the journal was deleted"


def _member_text(old: Entry[Any] | None, new: Entry[Any] | None) -> str:
    """Return the change of a broker in words; empty if nothing is worth a word."""
    if new is None:
        return "the broker has left"
    spec: pb.BrokerSpec = new.value
    if old is None:
        return f"the broker has joined, at {spec.process_spec.endpoint}"
    before: pb.BrokerSpec = old.value
    for text, applies in (
        ("the broker drains, and will leave", spec.exiting and not before.exiting),
        (
            f"the broker takes up to {spec.journal_limit} replicas",
            spec.journal_limit != before.journal_limit,
        ),
        (
            f"the broker is now at {spec.process_spec.endpoint}",
            spec.process_spec.endpoint != before.process_spec.endpoint,
        ),
    ):
        if applies:
            return text
    return ""


def _route_in_words(route: pb.Route) -> str:
    names = [f"{member.zone}/{member.suffix}" for member in route.members]
    if not names:
        return "no broker holds the journal"
    if route.primary < 0:
        return f"the journal has no primary; replicas: {', '.join(names)}"
    primary = names.pop(route.primary)
    return f"the primary is {primary}" + (f"; replicas: {', '.join(names)}" if names else "")


class ClusterEvents:
    """Streams of the events of a cluster.

    Args:
        ring: that of this process.
        members: calls the other brokers.
        now: Unix time in seconds.
    """

    def __init__(
        self, ring: EventRing, members: MemberCalls, *, now: Callable[[], float] = time.time
    ) -> None:
        self._ring = ring
        self._members = members
        self._now = now

    async def stream(self, request: clpb.EventsRequest, call: Call) -> AsyncGenerator[clpb.Event]:
        """Yield events from a place on, sorted by time as far as they come in time.

        Args:
            request: the request.
            call: that of the caller, whose token is passed on.

        Raises:
            CallError: the id is none, or the reader is too slow.
        """
        position = Position.parse(request.after)
        queue = EventQueue(only_local=request.local)
        with self._ring.reading(queue):
            kept = list(self._ring.after(position, only_local=request.local))
            if request.local:
                followed = _Followed(queue, immediate=True)
            else:
                kept += await self._kept_by_others(request.after, call)
                followed = _Followed(queue)
            kept.sort(key=_order)
            for event in kept:
                self._note(event)
                yield event
            if request.no_wait:
                return
            async with contextlib.AsyncExitStack() as stack:
                if not request.local:
                    await stack.enter_async_context(
                        self._following(request.after, kept, queue, call)
                    )
                async for event in followed.events(self._now):
                    self._note(event)
                    yield event

    def _note(self, event: clpb.Event) -> None:
        if event.member != self._ring.process:
            self._ring.pass_on(event)

    async def _kept_by_others(self, after: str, call: Call) -> list[clpb.Event]:
        """Return what other brokers keep, of those that answer in time."""
        request = clpb.EventsRequest(after=after, no_wait=True, local=True)

        async def kept(member: pb.ProcessSpec) -> list[clpb.Event]:
            found: list[clpb.Event] = []
            with contextlib.suppress(GazetteError, TimeoutError):
                async with (
                    asyncio.timeout(self._members.time_limit_s),
                    aclosing(self._members.stream(EVENTS_RPC, request, member, call)) as events,
                ):
                    async for event in events:
                        if isinstance(event, clpb.Event):
                            found.append(event)  # noqa: PERF401 - those before an error count
            return found

        answers = await asyncio.gather(*map(kept, self._members.others()))
        return [event for answer in answers for event in answer]

    @contextlib.asynccontextmanager
    async def _following(
        self, after: str, kept: Iterable[clpb.Event], queue: EventQueue, call: Call
    ) -> AsyncGenerator[None]:
        """Follow all other brokers, also those that join, while the context is open."""
        last = {event.member: event.id for event in kept}
        task = asyncio.create_task(self._follow_all(after, last, queue, call))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _follow_all(
        self, after: str, last: dict[str, str], queue: EventQueue, call: Call
    ) -> None:
        following: dict[tuple[str, str], asyncio.Task[None]] = {}
        try:
            while True:
                for member in self._members.others():
                    key = (member.id.zone, member.id.suffix)
                    if key not in following or following[key].done():
                        following[key] = asyncio.create_task(
                            self._follow(member, after, last, queue, call)
                        )
                await asyncio.sleep(AGAIN_S)
        finally:
            for task in following.values():
                task.cancel()
            await asyncio.gather(*following.values(), return_exceptions=True)

    async def _follow(
        self,
        member: pb.ProcessSpec,
        after: str,
        last: dict[str, str],
        queue: EventQueue,
        call: Call,
    ) -> None:
        """Put the events of one broker into a queue, until its stream ends."""
        name = f"{member.id.zone}/{member.id.suffix}"
        request = clpb.EventsRequest(after=last.get(name, after), local=True)
        try:
            async with aclosing(self._members.stream(EVENTS_RPC, request, member, call)) as events:
                async for event in events:
                    if isinstance(event, clpb.Event):
                        last[name] = event.id
                        queue.put(event)
        except CallError as error:
            if error.code == "UNIMPLEMENTED":
                await asyncio.sleep(FOREIGN_AGAIN_S)
        except GazetteError:
            pass  # it is down, or has ended the stream: it is followed again while it is a member


class _Followed:
    """Events of a queue in the order of their time.

    Args:
        queue: the queue.
        immediate: True if they are sorted already.
    """

    def __init__(self, queue: EventQueue, *, immediate: bool = False) -> None:
        self._queue = queue
        self._held_us = 0 if immediate else int(ORDER_S * 1e6)

    async def events(self, now: Callable[[], float]) -> AsyncGenerator[clpb.Event]:
        """Yield events, each some time after it happened.

        Raises:
            CallError: the reader is too slow.
        """
        held: list[tuple[tuple[int, str], int, clpb.Event]] = []
        numbers = itertools.count()
        last_id = ""
        while True:
            for event in self._queue.take():
                heapq.heappush(held, (_order(event), next(numbers), event))
            if self._queue.has_overflowed or len(held) > QUEUE_EVENTS_MAX:
                last = f"; resume after {last_id}" if last_id else ""
                raise CallError(
                    f"the reader of these events is too slow: {QUEUE_EVENTS_MAX} wait for it{last}",
                    code="RESOURCE_EXHAUSTED",
                )
            due_us = int(now() * 1e6) - self._held_us
            while held and (held[0][0][0] <= due_us or not self._held_us):
                event = heapq.heappop(held)[-1]
                last_id = event.id
                yield event
            wait_s = (held[0][0][0] - due_us) / 1e6 if held else None
            await self._queue.wait(wait_s)


def _order(event: clpb.Event) -> tuple[int, str]:
    return event.time_us, event.member
