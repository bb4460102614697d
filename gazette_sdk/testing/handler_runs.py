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
from pathlib import Path
from typing import Any, NamedTuple

from gazette_sdk.errors import ConfigurationError, GazetteError
from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.message.envelope import Envelope
from gazette_sdk.message.kinds import union_classes
from gazette_sdk.message.mapping import Mapping as JournalMapping
from gazette_sdk.message.mapping import SelectorMapping
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.labels import TABLE, label_set
from gazette_sdk.shard.application.application import Application
from gazette_sdk.shard.application.sources import topics_of
from gazette_sdk.shard.transaction.consume import OnStep
from gazette_sdk.shard.transaction.runner import Runner
from gazette_sdk.shard.transaction.transaction import AppendFuture, Shard
from gazette_sdk.transport.append.queue import AnyFuture
from gazette_sdk.transport.loop import run

JOURNAL = "memory/part-000"
"""Name of the journal that the messages come from."""

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
        published: messages that were published by committed transactions, in order.
    """

    state: Any
    published: list[Any]


class MemoryInput:
    """Input of messages that are given; a message's offset is its index.

    Args:
        messages: the messages.
        checkpoint: position at which to begin.
        batch_count: messages of a batch.
        more: event that is set after messages were added; None if none will be.
        journal_of: returns the journal of a message.

    Attributes:
        on_undecodable: is not called: all messages are given decoded.
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
    ) -> None:
        self.on_undecodable: Callable[[GazetteError], object] | None = None
        self._more = more or asyncio.Event()
        self._messages = messages
        self._batch_count = batch_count
        self._journal_of = journal_of
        self._offsets = dict(checkpoint.offsets)
        self._next = sum(self._offsets.values())
        self._last = JOURNAL

    def poll(self) -> list[Envelope[Any]] | None:
        """Return the next messages, of one journal; None if there are none."""
        messages = self._messages[self._next : self._next + self._batch_count]
        if not messages:
            return None
        journal = self._last = self._journal_of(messages[0])
        messages = list(
            itertools.takewhile(lambda each: self._journal_of(each) == journal, messages)
        )
        begin = self._offsets.get(journal, 0)
        self._next += len(messages)
        self._offsets[journal] = begin + len(messages)
        return [
            Envelope(journal, offset, offset + 1, message)
            for offset, message in enumerate(messages, begin)
        ]

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
        return {JOURNAL: 0, **self._offsets}

    async def aclose(self) -> None:
        """Do nothing: nothing is open."""


class MemoryOutput:
    """Output that keeps the messages of committed transactions.

    Attributes:
        published: messages of committed transactions, in order, each with its journal; a mapping
            by selector counts as the journal that the selector names.
        appended: content that was appended as it is, with its journal.
    """

    is_full = False

    def __init__(self) -> None:
        self.published: list[tuple[str, Any]] = []
        self.appended: list[tuple[str, bytes]] = []
        self._open: list[tuple[str, Any]] = []

    def publish(self, message: Any, mapping: JournalMapping) -> None:
        """Add a message to the open transaction."""
        given: Any = mapping
        journal = given.selector if isinstance(given, SelectorMapping) else given(message)
        self._open.append((journal, copy.deepcopy(message)))

    def publish_batch(self, messages: Sequence[Any], mapping: JournalMapping) -> None:
        """Add messages to the open transaction."""
        for message in messages:
            self.publish(message, mapping)

    def append(self, journal: str, content: bytes) -> None:
        """Keep content."""
        self.appended.append((journal, content))

    def end(self) -> Mapping[str, bytes]:
        """Return an acknowledgement of each journal."""
        return {journal: b"acknowledged" for journal, _ in self._open}

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
                self.published.extend(ended)
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

    ::

        state, published = run_handler(totals, [Order("ada", 250), Order("ada", 50)])
        assert state == {"ada": 300}

    Args:
        application: the application. Its store works in a directory of its own.
        messages: the messages, in order, and :class:`Advance` where time passes between them. The
            topic of a message is the one for whose messages its class is declared.
        batch_count: messages that arrive at once.
        now: time of the run, in Unix seconds; None for that of its begin. Only :class:`Advance`
            changes it.
        timeout_s: bound of the run, in seconds.
        read: returns the state of the store, after the last transaction.
        on_step: called at each step of a commit.

    Returns:
        State and messages published.

    Raises:
        ConfigurationError: the class of a message is declared for none of several topics.
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
    for each in messages:
        if not isinstance(each, Advance):
            journal_of(each)
    store = application.new_store(shard)
    output = MemoryOutput()
    arrived: list[Any] = []
    more = asyncio.Event()
    completed = asyncio.Event()
    runner = Runner(
        application,
        shard,
        store,
        recorder=None,
        log=None,
        new_input=lambda checkpoint: MemoryInput(
            arrived, checkpoint, batch_count=batch_count, more=more, journal_of=journal_of
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
                arrived.extend(given)
                more.set()
                await runner.progress.wait(collections.Counter(map(journal_of, arrived)))
                await _advance(runner, clock, clock.now, completed)  # what is due at once

    try:
        async with asyncio.timeout(timeout_s):
            await _run_until_ended(runner, feed)
        state = read(store)
    finally:
        store.destroy()
    return HandlerRun(state, [message for _, message in output.published])


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
