"""Runs of an application over messages in memory, without a cluster."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import copy
import itertools
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from gazette_sdk.errors import ConfigurationError, GazetteError, ValidationError
from gazette_sdk.framing import Csv, FixedProtobuf, Framing, JsonLines
from gazette_sdk.message.batch_reader import JournalDecoder
from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.message.kinds import Kind, known_kind, union_classes
from gazette_sdk.message.mapping import Mapping as JournalMapping
from gazette_sdk.message.mapping import (
    Partitions,
    SelectorMapping,
    check_mapping,
    checked_journal,
)
from gazette_sdk.message.sender import JournalEncoder, no_mapping
from gazette_sdk.message.uuid import TICK, Envelope, Stamp, clock_of_unix_ns
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.labels import TABLE, label_set
from gazette_sdk.shard.application.application import Application
from gazette_sdk.shard.application.sources import topics_of
from gazette_sdk.shard.transaction.consume import OnStep
from gazette_sdk.shard.transaction.runner import Runner
from gazette_sdk.shard.transaction.timers import SECOND_US, is_seconds
from gazette_sdk.shard.transaction.transaction import AppendFuture, Shard
from gazette_sdk.transport.append.queue import AnyFuture
from gazette_sdk.transport.loop import run
from gazette_sdk.user_code import call

JOURNAL = "memory/part-000"
"""Name of the journal that the messages come from."""

PRODUCER = bytes([1, 0, 0, 0, 0, 0])
"""Id of the producer of all messages."""

BATCH_COUNT = 100
"""Messages of a batch."""

IDLE_CHECK_S = 0.001
"""Time between two looks whether a run is idle, before time passes."""


class Advance(NamedTuple):
    """Time that passes between two messages of a run. Timers that are due by then fire.

    Attributes:
        to: the new time, in Unix seconds.
    """

    to: float


@dataclass(slots=True)
class Clock:
    """Wall clock of a run.

    Attributes:
        now: Unix seconds.
    """

    now: float


class HandlerRun(NamedTuple):
    """Result of a run.

    Attributes:
        state: what ``read`` returned; by default ``store.state``, or a dict of its items.
        published: messages that were published by committed transactions, in order, as readers get
            them. A field for the UUID has the value that the handler has given it.
    """

    state: Any
    published: list[Any]


class Record(NamedTuple):
    """Message as a journal has it.

    Attributes:
        journal: name of the journal.
        frame: its frame.
    """

    journal: str
    frame: bytes


class MemoryJournals:
    """Journals of a run: messages as frames, by the framing that their class has in a cluster.

    Args:
        message_types: class of the messages, or union of classes, of the journals that are read.
    """

    def __init__(self, message_types: Mapping[str, Any] | None = None) -> None:
        self._stamp = Stamp(PRODUCER)
        self._encoders: dict[str, JournalEncoder] = {}
        self._read = {
            journal: (self._open(journal, known_kind(of)), known_kind(of))
            for journal, of in (message_types or {}).items()
        }

    def write(self, journal: str, message: Any, now: float = 0.0) -> bytes:
        """Return the frame of a message, which gets a UUID.

        Args:
            journal: name of its journal.
            message: the message.
            now: time of its publication, in Unix seconds.

        Raises:
            ValidationError: it can carry no UUID, has no such form, or cannot be encoded.
            BaseException: that of the message's own ``validate``.
        """
        kind = known_kind(type(message))
        if kind.validate is not None:
            call(kind.validate, message)
        encoder = self._encoders.get(journal) or self._open(journal, kind)
        clock = clock_of_unix_ns(round(now * SECOND_US) * 1000)
        self._stamp.clock = max(self._stamp.clock + TICK, clock)
        return encoder.frame(message, self._stamp)

    def read(self, record: Record, offset: int) -> Envelope[Any]:
        """Return the message of a record of a journal that is read, at an offset.

        Raises:
            GazetteError: it cannot be decoded as the class of the journal's messages.
        """
        encoder, kind = self._read[record.journal]
        return _decoded(record, encoder.framing, kind, offset, sequenced=True)

    def read_own(self, record: Record, message_type: type[Any], offset: int) -> Any:
        """Return the message of a record by the class that wrote it.

        Raises:
            GazetteError: it cannot be decoded.
        """
        framing, kind = self._encoders[record.journal].framing, known_kind(message_type)
        return _decoded(record, framing, kind, offset, sequenced=False).message

    def _open(self, journal: str, kind: Kind[Any]) -> JournalEncoder:
        encoder = self._encoders[journal] = JournalEncoder(journal, _CONTENT_TYPES[kind.form])
        return encoder


_CONTENT_TYPES = {each.form: each.content_type for each in (JsonLines, FixedProtobuf, Csv)}


def _decoded(
    record: Record, framing: Framing, kind: Kind[Any], offset: int, *, sequenced: bool
) -> Envelope[Any]:
    decoder = JournalDecoder(record.journal, framing, kind, offset, sequenced=sequenced)
    run, error = decoder.feed(record.frame)
    if error is not None:
        raise error
    envelope: Envelope[Any] = run.items[0]
    return envelope


class MemoryInput:
    """Input of messages that are given; a message's offset is its index.

    Args:
        messages: the messages.
        checkpoint: position at which to begin.
        batch_count: messages of a batch.
        more: event that is set after messages were added; None if none will be.
        journal_of: returns the journal of a message.
        read: returns the envelope of a message of an offset, or raises; None if the messages are
            given as the handler gets them.
        journals: names of the journals.

    Attributes:
        on_undecodable: called by :meth:`poll` with the error of ``read``, and the message is
            passed over; None to raise it.
    """

    has_pending = False
    ended = False

    def __init__(
        self,
        messages: Sequence[Any],
        checkpoint: Checkpoint,
        *,
        batch_count: int = BATCH_COUNT,
        more: asyncio.Event | None = None,
        journal_of: Callable[[Any], str] = lambda _: JOURNAL,
        read: Callable[[Any, int], Envelope[Any]] | None = None,
        journals: Sequence[str] = (JOURNAL,),
    ) -> None:
        self.on_undecodable: Callable[[GazetteError], object] | None = None
        self._more = more or asyncio.Event()
        self._messages = messages
        self._batch_count = batch_count
        self._journal_of = journal_of
        self._read = read
        self._offsets = {**dict.fromkeys(journals, 0), **checkpoint.offsets}
        self._next = sum(self._offsets.values())
        self._last = JOURNAL

    def poll(self) -> list[Envelope[Any]] | None:
        """Return the next messages, of one journal; None if there are none.

        Raises:
            GazetteError: that of ``read``.
        """
        messages = self._messages[self._next : self._next + self._batch_count]
        if not messages:
            return None
        journal = self._last = self._journal_of(messages[0])
        begin = self._offsets.get(journal, 0)
        found: list[Envelope[Any]] = []
        for offset, message in enumerate(messages, begin):
            if self._journal_of(message) != journal:
                break
            try:
                found.append(self._envelope(journal, offset, message))
            except GazetteError as error:
                if found:
                    break  # the next call finds it again
                if self.on_undecodable is None:
                    raise
                self.on_undecodable(error)
                self._pass(journal, 1)
                return []
        self._pass(journal, len(found))
        return found

    def _envelope(self, journal: str, offset: int, message: Any) -> Envelope[Any]:
        if self._read is None:
            return Envelope(journal, offset, offset + 1, message)
        read = self._read(message, offset)
        return Envelope(journal, offset, offset + 1, read.message, read.raw_uuid)

    def _pass(self, journal: str, count: int) -> None:
        self._next += count
        self._offsets[journal] = self._offsets.get(journal, 0) + count

    @property
    def write_heads(self) -> Mapping[str, int]:
        """Offset after the last message, by journal."""
        return collections.Counter(map(self._journal_of, self._messages))

    async def arrived(self) -> None:
        """Wait until there are messages; without end if there will be none."""
        while self._next >= len(self._messages):
            self._more.clear()
            await self._more.wait()

    async def is_at_write_head(self, journal: str) -> bool:
        """Return True if all messages that have arrived were returned."""
        del journal
        return self._next >= len(self._messages)

    def checkpoint(self, left: int) -> Checkpoint:
        """Return the position, without the last ``left`` messages."""
        return Checkpoint({**self._offsets, self._last: self._offsets.get(self._last, 0) - left})

    def passed(self) -> Mapping[str, int]:
        """Return the offsets that were read through."""
        return dict(self._offsets)

    async def aclose(self) -> None:
        """Do nothing: nothing is open."""


class _Published(NamedTuple):
    """Message that was published: its frame, and the message as it was before."""

    record: Record
    message: Any


class MemoryOutput:
    """Output that keeps the messages of committed transactions.

    A mapping by selector chooses one journal, which has the selector's name.

    Attributes:
        appended: content that was appended as it is, with its journal.
    """

    is_full = False

    def __init__(self) -> None:
        self.appended: list[tuple[str, bytes]] = []
        self._journals = MemoryJournals()
        self._partitions: dict[str, Partitions] = {}
        self._committed: list[_Published] = []
        self._open: list[_Published] = []

    @property
    def published(self) -> list[tuple[str, Any]]:
        """Messages of committed transactions as readers get them, in order, with their journals.

        A field of a class for the UUID has the value that the handler has given it.

        Raises:
            GazetteError: one cannot be decoded.
        """
        found: list[tuple[str, Any]] = []
        ends = collections.Counter[str]()
        for record, given in self._committed:
            journal, of = record.journal, type(given)
            read = self._journals.read_own(record, of, ends[journal])
            found.append((journal, known_kind(of).with_uuid_of(read, given)))
            ends[journal] += len(record.frame)
        return found

    def publish(self, message: Any, mapping: JournalMapping) -> None:
        """Add a message to the open transaction.

        Raises:
            ValidationError: it can carry no UUID, or cannot be encoded.
            MappingError: there is no mapping, or it returned no name.
            ConfigurationError: it is no mapping.
            BaseException: that of the mapping, or of the message's own ``validate``.
        """
        given = copy.copy(message)  # publishing sets the UUID of some
        journal = self._journal_of(message, mapping)
        record = Record(journal, self._journals.write(journal, message))
        self._open.append(_Published(record, given))

    def _journal_of(self, message: Any, mapping: JournalMapping | None) -> str:
        if mapping is None:
            raise no_mapping()
        if isinstance(mapping, SelectorMapping):
            selector = mapping.selector
            if selector not in self._partitions:
                self._partitions[selector] = Partitions([pb.JournalSpec(name=selector)])
            return mapping.pick(message, self._partitions[selector])
        try:
            journal = call(mapping, message)
        except TypeError:
            check_mapping(mapping)
            raise
        return checked_journal(journal, mapping)

    def publish_batch(self, messages: Sequence[Any], mapping: JournalMapping) -> None:
        """Add messages to the open transaction: all or, if one is refused, none.

        Raises:
            BaseException: as :meth:`publish`.
        """
        count = len(self._open)
        try:
            for message in messages:
                self.publish(message, mapping)
        except BaseException:
            del self._open[count:]
            raise

    def append(self, journal: str, content: bytes) -> None:
        """Keep content."""
        self.appended.append((journal, content))

    def end(self) -> Mapping[str, bytes]:
        """Return an acknowledgement of each journal."""
        return {each.record.journal: b"acknowledged" for each in self._open}

    def pending(self) -> Sequence[AnyFuture]:
        """Return nothing: all is appended at once."""
        return ()

    def acknowledge(
        self, intents: Mapping[str, bytes], after: AnyFuture
    ) -> Mapping[str, AppendFuture]:
        """Keep the messages of the transaction once it is committed."""
        ended, self._open = self._open, []
        appends: dict[str, concurrent.futures.Future[pb.AppendResponse]]
        appends = {journal: concurrent.futures.Future() for journal in intents}

        def acknowledge(commit: AnyFuture) -> None:
            error = commit.exception()
            if error is None:
                self._committed.extend(ended)
            for append in appends.values():
                if error is None:
                    append.set_result(pb.AppendResponse(commit=pb.Fragment()))
                else:
                    append.set_exception(error)

        after.add_done_callback(acknowledge)
        return appends

    async def roll_back(self) -> None:
        """Drop the messages of the open transaction."""
        self._open.clear()

    def send_stored(self, intents: Mapping[str, bytes]) -> Mapping[str, AppendFuture]:
        """Return nothing: no acknowledgement outlives a run."""
        del intents
        return {}

    def interrupt(self) -> None:
        """Do nothing: no call waits."""

    async def aclose(self) -> None:
        """Do nothing: nothing is open."""


def run_handler(
    application: Application[Any, Any],
    messages: Sequence[Any],
    *,
    batch_count: int = BATCH_COUNT,
    now: float | None = None,
    timeout_s: float = 30.0,
    read: Callable[[Any], Any] | None = None,
    on_step: OnStep | None = None,
) -> HandlerRun:
    """Run an application over messages, in one shard with an empty store, until all are committed.

    The handler gets the messages as they are read from a journal, and what is published is returned
    as its readers get it: each went through the framing of its class. So what cannot be encoded or
    decoded is an error, as in a cluster.

    ::

        state, published = run_handler(totals, [Order("ada", 250), Order("ada", 50)])
        assert state == {"ada": 300}

    Args:
        application: the application. Its store works in a directory of its own.
        messages: the messages, in order, and :class:`Advance` where time passes between them. The
            topic of a message is the one for whose messages its class is declared.
        batch_count: messages that arrive at once.
        now: time of the run, in Unix seconds; None for that of its begin. Only :class:`Advance`
            changes it. Messages are published at the time at which they arrive.
        timeout_s: bound of the run, in seconds.
        read: returns the state of the store, after the last transaction.
        on_step: called at each step of a commit.

    Returns:
        State and messages published.

    Raises:
        ConfigurationError: the class of a message is declared for none of several topics.
        ValidationError: a message cannot be encoded, or a time is before that of the run.
        DecodeError: a message cannot be decoded as the declared class, and its application does not
            leave records out; or one that was published cannot be decoded as its class.
        HandlerFailedError: the handler raised, and its application does not leave records out.
        TimeoutError: the run took longer.
    """
    with tempfile.TemporaryDirectory(prefix="gazette-shard-") as directory:
        topics = {
            f"memory/{number}/part-000" if number else JOURNAL: topic
            for number, topic in enumerate(topics_of(application.all_sources) or (JOURNAL,))
        }
        sources = [cpb.ShardSpec.Source(journal=journal) for journal in topics]
        of_tables = {table.topic for table in application.tables}
        labels = label_set((TABLE, name) for name, topic in topics.items() if topic in of_tables)
        spec = cpb.ShardSpec(id="memory", sources=sources, labels=labels)
        name = f"{application.full_name}/memory"
        shard = Shard("memory", spec, Path(directory), name, topics=topics)
        return run(
            _run(
                application,
                shard,
                messages,
                batch_count=batch_count,
                clock=Clock(time.time() if now is None else now),
                timeout_s=timeout_s,
                read=read or _state_of,
                on_step=on_step,
            )
        )


async def _run(
    application: Application[Any, Any],
    shard: Shard,
    messages: Sequence[Any],
    *,
    batch_count: int,
    clock: Clock,
    timeout_s: float,
    read: Callable[[Any], Any],
    on_step: OnStep | None,
) -> HandlerRun:
    journal_of = _journal_of(application, shard)
    journals = MemoryJournals(_message_types(application, shard))
    _check(messages, journal_of, clock.now)
    store = application.new_store(shard)
    output = MemoryOutput()
    arrived: list[Record] = []
    more = asyncio.Event()
    completed = asyncio.Event()
    runner = Runner(
        application,
        shard,
        store,
        recorder=None,
        log=None,
        new_input=lambda checkpoint: MemoryInput(
            arrived,
            checkpoint,
            batch_count=batch_count,
            more=more,
            journal_of=attrgetter("journal"),
            read=journals.read,
            journals=shard.journals,
        ),
        output=output,
        on_step=on_step,
        on_completed=completed.set,
        wall_clock=lambda: clock.now,
    )

    async def feed() -> None:
        """Let messages arrive and time pass, until all are committed."""
        for is_time, given in itertools.groupby(messages, lambda each: isinstance(each, Advance)):
            if is_time:
                for each in given:
                    await _advance(runner, clock, each.to, completed)
            else:
                for each in given:
                    journal = journal_of(each)
                    frame = journals.write(journal, copy.copy(each), clock.now)
                    arrived.append(Record(journal, frame))
                more.set()
                await runner.progress.wait(collections.Counter(each.journal for each in arrived))
                await _advance(runner, clock, clock.now, completed)  # what is due at once

    try:
        async with asyncio.timeout(timeout_s):
            await _run_until_ended(runner, feed)
        state = read(store)
        published = [message for _, message in output.published]
    finally:
        store.destroy()
    return HandlerRun(state, published)


def _check(messages: Sequence[Any], journal_of: Callable[[Any], str], now: float) -> None:
    """Refuse messages of no topic, and times that cannot follow each other.

    Raises:
        ConfigurationError: there is such a message.
        ValidationError: there is such a time.
    """
    for each in messages:
        if not isinstance(each, Advance):
            journal_of(each)
            continue
        if not is_seconds(each.to) or each.to < now:
            raise ValidationError(
                f"{each!r} is no time at {now!r} or later, which it is by then: pass Unix seconds,"
                " as Advance(now + 60), and the begin of the run as now="
            )
        now = each.to


def _message_types(application: Application[Any, Any], shard: Shard) -> dict[str, Any]:
    """Return the class of the messages, or union of classes, of each journal."""
    declared = application.classes
    is_declared = type(application).new_message is Application.new_message
    return {
        journal: declared[topic]
        if is_declared and topic in declared
        else call(application.new_message, pb.JournalSpec(name=journal))
        for journal, topic in shard.topics.items()
    }


def _journal_of(application: Application[Any, Any], shard: Shard) -> Callable[[Any], str]:
    """Return a function from a message to the journal of its topic.

    It raises a ConfigurationError if there is none.
    """
    classes = application.classes
    if not isinstance(application.message, Mapping) and not application.tables:
        return lambda _: JOURNAL
    journals: dict[type[Any], str] = {}
    for journal, topic in shard.topics.items():
        for each in union_classes(classes[topic]) or (classes[topic],):
            journals.setdefault(each, journal)

    def journal_of(message: Any) -> str:
        journal = journals.get(type(message))
        if journal is None:
            raise ConfigurationError(
                f"{type(message).__name__} is the class of the messages of no topic that"
                f" {application.full_name} reads; use one of"
                f" {', '.join(each.__name__ for each in journals)}"
            )
        return journal

    return journal_of


async def _run_until_ended(runner: Runner, feed: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run until all messages are fed and committed."""
    await runner.restore()
    running = asyncio.create_task(runner.run())
    fed = asyncio.create_task(feed())
    try:
        await asyncio.wait({running, fed}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (running, fed):
            task.cancel()
        ends = await asyncio.gather(running, fed, return_exceptions=True)
    for error in ends:
        if isinstance(error, BaseException) and not isinstance(error, asyncio.CancelledError):
            raise error


async def _advance(runner: Runner, clock: Clock, to: float, completed: asyncio.Event) -> None:
    """Let time pass; the timers that are due by then fire, each at its time."""
    while True:
        while not runner.is_idle:  # noqa: ASYNC110 - the runner has no event for it
            await asyncio.sleep(IDLE_CHECK_S)
        due_at = runner.next_timer_at
        if due_at > to:
            clock.now = max(clock.now, to)
            return
        clock.now = max(clock.now, due_at)
        completed.clear()
        runner.look_at_clock()
        await completed.wait()


def _state_of(store: Any) -> Any:
    """Return a copy of a store's state; None of one that needs a query."""
    if hasattr(store, "state"):
        return copy.deepcopy(store.state)
    return dict(store.items()) if hasattr(store, "items") else None
