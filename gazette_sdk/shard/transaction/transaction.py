"""Transaction of a shard, as its handler sees it.

:class:`Shard` and :class:`Process` are handles that applications get. :class:`InputLike` and the
other protocols are the interfaces of a shard's runner to its input, output, recorder and log.

An :class:`Output` publishes messages by one producer, and their acknowledgements. Messages of a
transaction are appended as they are published, and stay invisible to committed readers until their
journals' acknowledgements follow. These are built before the transaction commits, are stored with
it, and are *queued when the commit starts*, after the transaction's messages, to wait there for the
commit. So messages of the next transaction, published meanwhile, stand after them. Queued any
later, an acknowledgement would stand after messages of the next transaction with larger clocks,
which readers then drop (message section 13.2, shard section 8).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeAlias, TypeVar

from gazette_sdk.errors import ClosedError, ConfigurationError, GazetteError, JournalNotFoundError
from gazette_sdk.message.bulk import publish_batch
from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.message.mapping import Mapping as JournalMapping
from gazette_sdk.message.sender import Producer, Sender, Sequences
from gazette_sdk.message.uuid import Envelope
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.labels import RESET, SKIP, values_of
from gazette_sdk.protocol.names import strip_meta
from gazette_sdk.shard.transaction.tables import OpenTable, Table, Tables, undeclared
from gazette_sdk.shard.transaction.timers import SECOND_US, EventTime, Timers
from gazette_sdk.shard.transaction.windows import Window, Windows, no_windows
from gazette_sdk.transport.append.appender import JournalAppender
from gazette_sdk.transport.append.queue import AnyFuture, PendingAppend
from gazette_sdk.transport.base import Transport
from gazette_sdk.user_code import notify

if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    from gazette_sdk.protocol import consumer_pb2 as cpb
    from gazette_sdk.shard.recovery.hints import FileChange


@dataclass(slots=True, eq=False)
class Shard:
    """A shard of which this process is the primary, as an application sees it.

    Attributes:
        id: its id.
        spec: its specification when its journals were opened last.
        directory: local directory of its store; empty, or recovered from the recovery log.
        full_name: its id after the application's name: unique among all applications.
        transport: transport to its journals.
        topics: label selectors of its journals, as the application declares them, or their names.
    """

    id: str
    spec: cpb.ShardSpec
    directory: Path
    full_name: str
    transport: Transport | None = None
    topics: dict[str, str] = field(default_factory=dict)

    @property
    def journals(self) -> tuple[str, ...]:
        """Names of the journals that it reads."""
        return tuple(source.journal for source in self.spec.sources)

    def labels(self, name: str) -> tuple[str, ...]:
        """Return the values of a label of its specification."""
        return tuple(values_of(self.spec.labels, name))

    @property
    def reset(self) -> str:
        """Name of its last reset that kept its state; empty if there was none."""
        return next(iter(self.labels(RESET)), "")

    def skipped(self, checkpoint: Checkpoint) -> dict[str, tuple[int, int]]:
        """Return the offsets, by journal, between which it leaves out all messages.

        Without those that are passed at a checkpoint.
        """
        found = {}
        for value in self.labels(SKIP):
            journal, _, offsets = value.rpartition("=")
            begin, _, end = offsets.partition("-")
            if not (begin.isdecimal() and end.isdecimal()):
                continue  # not of `gazctl shards skip`
            if int(end) > checkpoint.needed_from(journal):
                found[journal] = int(begin), int(end)
        return found

    def begin_offsets(self, checkpoint: Checkpoint) -> dict[str, int]:
        """Return the offsets from which it reads its journals on after a checkpoint."""
        return {
            source.journal: max(source.min_offset, checkpoint.offsets.get(source.journal, 0))
            for source in self.spec.sources
        }


@dataclass(frozen=True, slots=True, eq=False)
class Process:
    """A consumer process, as the hook ``start`` sees it.

    Attributes:
        name: name of the application.
        zone: failure zone of the process.
        suffix: its name within the zone.
        endpoint: URL at which others reach it.
        transport: transport to the journals.
        settings: settings that the application declared, by name.
    """

    name: str
    zone: str
    suffix: str
    endpoint: str
    transport: Transport
    settings: dict[str, str] = field(default_factory=dict)


CommitFuture: TypeAlias = concurrent.futures.Future[None]
"""Future of a commit. It ends on the event loop; any thread may wait for it."""


class _Commit(concurrent.futures.Future[None]):
    """Future whose callbacks, which are user code, cannot fail who ends it."""

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        super().add_done_callback(partial(notify, fn))


def new_commit() -> CommitFuture:
    """Return the future of a commit that begins."""
    return _Commit()


BadRecord: TypeAlias = tuple[str, int]
"""Journal and begin of a record for which the handler raised."""


class AppendFuture(AnyFuture, Protocol):
    """Future of one append."""

    def result(self) -> pb.AppendResponse | None:
        """Return the response of an append that was acknowledged; None of one left out."""


class InputLike(Protocol):
    """Committed messages of a shard's sources, from a checkpoint on.

    Attributes:
        on_undecodable: called by :meth:`poll` with the error of content that is no message, which
            is then passed over; None to raise it.
    """

    on_undecodable: Callable[[GazetteError], object] | None

    @property
    def has_pending(self) -> bool:
        """A sequence was read whose acknowledgement was not."""

    @property
    def write_heads(self) -> Mapping[str, int]:
        """By journal, the last write head that a broker reported."""

    @property
    def ended(self) -> bool:
        """The input has ended: once `poll` returns None, nothing more follows."""

    def poll(self) -> list[Envelope[Any]] | None:
        """Return the messages that have arrived, without waiting; None if there are none.

        Called on a worker thread, one call at a time.

        Raises:
            GazetteError: a source cannot be read or decoded.
        """

    async def arrived(self) -> None:
        """Wait until `poll` may return something, or raise, or the input has ended."""

    def checkpoint(self, left: int) -> Checkpoint:
        """Return the position, without the last ``left`` messages of the last batch."""

    async def is_at_write_head(self, journal: str) -> bool:
        """Return True if a source is read through to its write head, which a broker is asked for.

        And no transaction of it is open. On the event loop, between two calls of :meth:`poll`.

        Raises:
            GazetteError: no broker answered.
        """

    def passed(self) -> Mapping[str, int]:
        """Return the offsets that were read through, by journal."""

    async def aclose(self) -> None:
        """Stop reading."""


class NewInput(Protocol):
    """Function that opens the input of a shard."""

    def __call__(self, checkpoint: Checkpoint, /) -> InputLike:
        """Return an input that reads on after a checkpoint."""


class OutputLike(Protocol):
    """Messages that a shard publishes: one producer for a primary run."""

    @property
    def is_full(self) -> bool:
        """So much is not acknowledged that the transaction should take no further message."""

    def publish(self, message: Any, mapping: JournalMapping) -> None:
        """Publish a message in the open transaction; any thread.

        Raises:
            GazetteError: it maps to no journal, or cannot be written.
        """

    def publish_batch(self, messages: Sequence[Any], mapping: JournalMapping) -> None:
        """Publish messages in the open transaction; any thread."""

    def append(self, journal: str, content: bytes) -> None:
        """Append bytes as they are, at least once; any thread."""

    def end(self) -> Mapping[str, bytes]:
        """End the open transaction, and return its framed acknowledgement of each journal."""

    def pending(self) -> Collection[AnyFuture]:
        """Return the appends that are not acknowledged."""

    def acknowledge(
        self, intents: Mapping[str, bytes], after: AnyFuture
    ) -> Mapping[str, AppendFuture]:
        """Queue the acknowledgement of each journal, after all appends to it.

        Args:
            intents: framed acknowledgements.
            after: commit that they wait for.
        """

    async def roll_back(self) -> None:
        """Discard the open transaction, and wait until its journals say so."""

    def send_stored(self, intents: Mapping[str, bytes]) -> Mapping[str, AppendFuture]:
        """Append the acknowledgements of a restored checkpoint.

        A journal that does not exist is left out, with a warning.
        """

    def interrupt(self) -> None:
        """Refuse messages, and end the waits of a thread that publishes. On the event loop."""

    async def aclose(self) -> None:
        """Stop sending."""


class RecorderLike(Protocol):
    """Recorder of file changes (recovery log 1)."""

    def record(self, changes: Sequence[FileChange], *, continues: bool = False) -> list[bytes]:
        """Return the contents of appends, in order; the last one commits.

        Changes which continue those of the last call are committed with them.
        """

    def appended(self, end: int) -> None:
        """Note the end of the last append that was acknowledged."""

    def failed(self, error: Exception) -> None:
        """Note that an append has failed for good."""

    def rerecord_due(self) -> str | None:
        """Return the path of a file that is to be recorded anew, if any is."""


class LogLike(Protocol):
    """Fenced appends to a recovery log."""

    def append(
        self, contents: Sequence[bytes], *, after: Collection[AnyFuture]
    ) -> asyncio.Future[int]:
        """Append contents in order, once all of ``after`` have succeeded.

        Without contents, an empty append makes sure that no other primary has taken over the log.

        Returns:
            The future of the end offset; it fails with an error that ends the shard.
        """


M = TypeVar("M")

if TYPE_CHECKING:
    S_co = TypeVarWithDefault("S_co", default=Any, covariant=True)
else:  # `typing` has no defaults before Python 3.13
    S_co = TypeVar("S_co", covariant=True)


class DeferError(BaseException):
    """Control flow of :meth:`Transaction.defer`: no failure, and not caught as one."""


class Transaction(Generic[S_co]):
    """Open transaction of a shard: messages consumed, and what they change, committed together.

    There is one object for all transactions of a shard, used on one thread at a time. What it
    publishes is visible to committed readers once the transaction is committed.

    Args:
        shard: the shard.
        store: its store.
        output: its output.

    Attributes:
        shard: the shard.
        store: its store; what a handler changes is committed with the transaction.
        envelope: envelope of the message that is consumed; None in other hooks.
        now: time at which it began, in Unix seconds: the same in all of its hooks.
        timers: timers of the shard, see :meth:`Timers.set
            <gazette_sdk.shard.transaction.timers.Timers.set>` and ``cancel``.
        times: watermarks of the sources; None of an application without event time.
        all_windows: open windows of the shard; None of an application without windows.
        all_tables: tables of the shard; None of an application without tables.
    """

    __slots__ = (
        "_output",
        "_touched",
        "all_tables",
        "all_windows",
        "envelope",
        "is_open",
        "now",
        "shard",
        "store",
        "timers",
        "times",
    )

    def __init__(self, shard: Shard, store: S_co, output: OutputLike) -> None:
        self.shard = shard
        self.store = store
        self.envelope: Envelope[Any] | None = None
        self.is_open = False
        self.now = 0.0
        self.timers = Timers(store, self._check_open)
        self.times: EventTime | None = None
        self.all_windows: Windows | None = None
        self.all_tables: Tables | None = None
        self._output = output
        self._touched: Envelope[Any] | None = None  # the last message that published something

    @property
    def source(self) -> str:
        """Label selector of the message's topic, as the application declares it.

        It is the name of a journal that is declared by its name; empty outside of ``consume``.
        """
        envelope = self.envelope
        if envelope is None:
            return ""
        return self.shard.topics.get(envelope.journal, envelope.journal)

    def publish(self, message: Any, *, mapping: JournalMapping) -> None:
        """Publish a message: readers see it once the transaction is committed.

        Args:
            message: the message.
            mapping: chooses its journal, see :mod:`gazette_sdk.message.mapping`.

        Raises:
            ClosedError: no transaction is open.
            MappingError: it maps to no journal.
            ValidationError: it cannot be written in the journal's form.
            GazetteError: its journal has failed.
        """
        self._check_open()
        self._touched = self.envelope
        self._output.publish(message, mapping)

    def publish_batch(self, messages: Sequence[Any], *, mapping: JournalMapping) -> None:
        """Publish messages, encoded in bulk. See :meth:`publish`.

        Args:
            messages: the messages.
            mapping: chooses the journal of each.

        Raises:
            ClosedError: no transaction is open.
            MappingError: one maps to no journal.
            ValidationError: one cannot be written in its journal's form.
            GazetteError: a journal has failed.
        """
        self._check_open()
        self._touched = self.envelope
        self._output.publish_batch(messages, mapping)

    def append(self, journal: str, content: bytes) -> None:
        """Append bytes as they are, at least once, before the transaction commits.

        They are visible at once, and are appended again if the transaction is run again.

        Args:
            journal: name of the journal.
            content: whole frames.

        Raises:
            ClosedError: no transaction is open.
            GazetteError: the journal has failed.
        """
        self._check_open()
        self._touched = self.envelope
        self._output.append(journal, content)

    def windows(self, message: Any) -> list[Window[Any]]:
        """Return the open windows of the message that is consumed, the earliest first.

        One window where they are tumbling or sessions, several where they are hopping; none where
        it is late. Its state is what the handler assigns or changes::

            for window in txn.windows(ride):
                window.state = (window.state or 0) + ride.cents

        Args:
            message: the message, from which their key is taken.

        Raises:
            ClosedError: no transaction is open.
            ConfigurationError: the application has no windows.
            ValidationError: no message is consumed; or its key cannot be the key of a window.
            ShardStoreError: the store failed.
        """
        self._check_open()
        if self.all_windows is None:
            raise no_windows()
        return self.all_windows.of(message)

    def table(self, declared: Table[M]) -> OpenTable[M]:
        """Return a table of the application, for reading: the newest message of each key.

        ::

            driver = txn.table(drivers).get(ride.driver)

        Args:
            declared: the table, as ``tables=`` has it.

        Raises:
            ConfigurationError: the application does not declare it.
        """
        if self.all_tables is None:
            raise undeclared(declared)
        return self.all_tables.open(declared)

    @property
    def watermark(self) -> float | None:
        """Event time before which no message is expected, in Unix seconds; None if unknown."""
        watermark_us = 0 if self.times is None else self.times.watermark_us
        return watermark_us / SECOND_US if watermark_us else None

    @property
    def has_published(self) -> bool:
        """True if the message that is consumed has published something."""
        return self.envelope is not None and self._touched is self.envelope

    def defer(self) -> NoReturn:
        """Leave the message to the next transaction, which begins with it.

        Called before the message has changed or published anything.

        Raises:
            ConfigurationError: the message has published something, or there is none.
        """
        windows = self.all_windows
        is_touched = windows is not None and windows.is_touched
        if self.envelope is None or self.has_published or is_touched:
            raise ConfigurationError(
                "a message is deferred before it has any effect; call `defer` first, in `consume`"
            )
        raise DeferError

    def _check_open(self) -> None:
        if not self.is_open:
            raise ClosedError(
                "no transaction is open: publish in `begin`, `consume` or `finalize`, before they"
                " return"
            )


_log = logging.getLogger(__name__)

FULL_BYTES = 64 << 20
"""Content that is not acknowledged, with which an output is full."""

PENDING_BYTES_MAX = 4 * FULL_BYTES
"""Bound of content that is not acknowledged: one call of a handler may publish so much more."""


class Output:
    """Messages that a shard publishes. Made on the event loop that sends them.

    It has one producer, and appenders that it shares with no one: an acknowledgement that waits
    for its commit holds back everything after it in its journal. Any thread may publish, one at
    a time; the other methods are called between two calls of the shard's hooks.

    Args:
        transport: how to reach the journals.
        pending_bytes_max: bound of content that is not acknowledged, in bytes. Threads that
            publish more wait for room, unless an acknowledgement waits for its commit, which might
            need the thread: then it is an error.
    """

    def __init__(self, transport: Transport, *, pending_bytes_max: int = PENDING_BYTES_MAX) -> None:
        self._sender = Sender(
            transport,
            None,
            None,
            pending_bytes_max=pending_bytes_max,
            blocks=True,
            delivery_timeout_s=None,
            mapping_timeout_s=None,
            validates=False,  # a handler has no remedy: its shard would fail
        )
        self._full_bytes = pending_bytes_max * FULL_BYTES // PENDING_BYTES_MAX
        self._appends = self._sender.connection().appends
        self._producer = Producer()
        # Of the transaction that is open, and of the one that has ended and is not acknowledged.
        self._open: Sequences | None = None
        self._ended: Sequences | None = None
        self._raw: set[PendingAppend] = set()
        self._unacknowledged: set[PendingAppend] = set()
        self._stored: set[asyncio.Task[pb.AppendResponse | None]] = set()

    # -------------------------------------------------------------- publishing

    @property
    def is_full(self) -> bool:
        """So much is not acknowledged that the transaction should take no further message."""
        return self._appends.pending_bytes >= self._full_bytes

    def publish(self, message: Any, mapping: JournalMapping) -> None:
        """Publish a message in the open transaction; on any thread.

        A thread waits until its journal is listed, also while no broker can be reached. What a
        coroutine publishes waits, and :meth:`end` waits for it.

        Raises:
            ValidationError: the message cannot carry a UUID, or be encoded.
            MappingError: it maps to no journal.
            FramingError: the journal's content type has no framing.
            BackPressureError: too much is pending.
            ClosedError: the shard ends.
            GazetteError: an append of the transaction to the same journal has failed.
            Exception: whatever the message's own ``validate`` raises.
        """
        self._sender.publish(message, mapping, self._open or self._begin())

    def publish_batch(self, messages: Sequence[Any], mapping: JournalMapping) -> None:
        """Publish messages in the open transaction, in bulk: all or, if one is refused, none.

        Raises:
            Exception: as :meth:`publish`.
        """
        publish_batch(self._sender, messages, mapping, self._open or self._begin())

    def append(self, journal: str, content: bytes) -> None:
        """Append bytes as they are, at least once, before the open transaction commits.

        Raises:
            ClosedError: the output is closed.
        """
        self._raw.add(self._appender(journal).append(content))

    def _begin(self) -> Sequences:
        self._open = Sequences(self._sender, self._producer)
        return self._open

    # ------------------------------------------------------------- transactions

    def end(self) -> dict[str, bytes]:
        """End the open transaction; on a worker thread, as publishing may wait for a listing.

        Returns:
            By journal, the framed acknowledgement of its messages.

        Raises:
            GazetteError: a message could not be published, after its call had returned.
        """
        assert self._ended is None, "the transaction before is acknowledged, or rolled back"
        sequences, self._open = self._open, None
        if sequences is None:
            return {}
        self._ended = sequences
        for deferred in sequences.deferred:
            deferred.wait()
            deferred.result()
        return dict(sequences.end())

    def pending(self) -> set[AnyFuture]:
        """Return the appends of the transaction that has ended, which its commit waits for.

        Those that have failed are among them.
        """
        found: set[AnyFuture] = {each for each in self._raw if not _has_succeeded(each)}
        for part in () if self._ended is None else self._ended.parts.values():
            part.forget_acknowledged()
            found.update(part.appends)
        return found

    def acknowledge(
        self, intents: Mapping[str, bytes], after: AnyFuture
    ) -> dict[str, PendingAppend]:
        """Queue the acknowledgements of the transaction that has ended, after its messages.

        On the event loop, before anything else is published: what is, waits after them.

        Args:
            intents: what :meth:`end` returned.
            after: the commit, which they wait for. If it fails, they and all after them do.

        Returns:
            Their appends, by journal.

        Raises:
            GazetteError: messages of the transaction could not be appended.
            ClosedError: the output is closed.
        """
        sequences, self._ended = self._ended, None
        self._raw = set()
        if sequences is None:
            assert not intents, "intents are those of the transaction that has ended"
            return {}
        appends = sequences.acknowledge(intents, frozenset({after}))
        if appends is None:
            raise _failure(sequences)
        sequences.note_acknowledged()
        self._sender.blocks = False
        self._unacknowledged.update(appends)
        for append in appends:
            append.add_done_callback(self._acknowledged)
        return dict(zip(sequences.parts, appends, strict=True))

    def _acknowledged(self, append: PendingAppend) -> None:
        self._unacknowledged.discard(append)
        self._sender.blocks = not self._unacknowledged

    async def roll_back(self) -> None:
        """Discard what is published and not acknowledged, and wait until its journals say so.

        Only when the acknowledgements before have been written.

        Raises:
            GazetteError: a journal cannot be written to.
        """
        assert not self._unacknowledged, "the transaction before is acknowledged first"
        discarded = [each for each in (self._ended, self._open) if each is not None]
        self._ended = self._open = None
        self._raw = set()
        is_in_doubt = False
        for sequences in discarded:
            for append in sequences.roll_back():
                await append
            is_in_doubt |= any(part.is_in_doubt for part in sequences.parts.values())
        if is_in_doubt:
            # Messages that a failed attempt may yet write must not be part of the next sequence.
            self._producer = Producer()

    # ------------------------------------------------------------------ restart

    def send_stored(
        self, intents: Mapping[str, bytes]
    ) -> dict[str, asyncio.Future[pb.AppendResponse | None]]:
        """Append the acknowledgements of a restored checkpoint; on the event loop.

        They acknowledge, once more, what the checkpoint's transaction published, and discard what
        was published after it and never committed. To be done before the first commit.

        Returns:
            By journal, the future of its append, which is None of a journal that does not exist
            any more: that is left out, with a warning.
        """
        futures: dict[str, asyncio.Future[pb.AppendResponse | None]] = {}
        for journal, frame in intents.items():
            append = self._appender(journal).append(frame)
            task = asyncio.get_running_loop().create_task(
                _sent(journal, append), name=f"stored acknowledgement of {journal}"
            )
            self._stored.add(task)
            task.add_done_callback(self._stored_ended)
            futures[journal] = task
        return futures

    def _stored_ended(self, task: asyncio.Task[pb.AppendResponse | None]) -> None:
        self._stored.discard(task)
        if not task.cancelled():
            task.exception()  # also if no one waits for it, as the output is closed

    def _appender(self, journal: str) -> JournalAppender:
        return self._appends.appender(strip_meta(journal))

    def interrupt(self) -> None:
        """Refuse messages, and end the waits of a thread that publishes. On the event loop."""
        self._sender.interrupt()

    async def aclose(self) -> None:
        """Stop sending, and give up what is not acknowledged."""
        connection = self._sender.detach()
        if connection is not None:
            await connection.aclose(self._sender.deferred)
        if self._stored:
            await asyncio.wait(self._stored)


async def _sent(journal: str, append: PendingAppend) -> pb.AppendResponse | None:
    """Wait for a stored acknowledgement."""
    try:
        return await append
    except JournalNotFoundError:
        _log.warning(
            "%s does not exist: an acknowledgement that was stored for it is left out", journal
        )
        return None


def _has_succeeded(append: PendingAppend) -> bool:
    return append.done() and append.exception() is None


def _failure(sequences: Sequences) -> BaseException:
    """Return the error of messages that could not be appended."""
    for part in sequences.parts.values():
        failed = part.failed
        if failed is not None and (error := failed.exception() or failed.failure) is not None:
            return error
    return GazetteError(f"messages to {', '.join(sequences.parts)} could not be appended")
