"""Handles that applications get: the shard that a hook is called for, and the process.

Interfaces of what a shard's runner works with: inputs, outputs, the recorder and its log.

Transaction of a shard, as its handler sees it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeAlias, TypeVar

from gazette_sdk.errors import ClosedError, ConfigurationError, GazetteError
from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.message.envelope import Envelope
from gazette_sdk.message.mapping import Mapping as JournalMapping
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.labels import values_of
from gazette_sdk.shard.recovery.fsm import FileChange
from gazette_sdk.transport.append.queue import AnyFuture
from gazette_sdk.user_code import notify

if TYPE_CHECKING:
    from gazette_sdk.protocol import consumer_pb2 as cpb
    from gazette_sdk.transport import Transport


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """A shard of which this process is the primary, as an application sees it.

    Attributes:
        id: its id.
        spec: its specification when the primary run began.
        directory: local directory of its store; empty, or recovered from the recovery log.
        full_name: its id behind the application's name: unique among all applications.
        transport: transport to its journals.
    """

    id: str
    spec: cpb.ShardSpec
    directory: Path
    full_name: str
    transport: Transport | None = None

    @property
    def journals(self) -> tuple[str, ...]:
        """Names of the journals that it reads."""
        return tuple(source.journal for source in self.spec.sources)

    def labels(self, name: str) -> tuple[str, ...]:
        """Return the values of a label of its specification."""
        return tuple(values_of(self.spec.labels, name))


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
        """By journal, the write head as the last answer of a broker told it."""

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

    def passed(self) -> Mapping[str, int]:
        """Return the offsets that were read through, by journal."""

    async def aclose(self) -> None:
        """Stop reading."""


class NewInput(Protocol):
    """Function that opens the input of a shard."""

    def __call__(self, checkpoint: Checkpoint, /) -> InputLike:
        """Return an input that reads on behind a checkpoint."""


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
        """Queue the acknowledgement of each journal, behind all appends to it.

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


S = TypeVar("S")


class DeferError(BaseException):
    """Control flow of :meth:`Transaction.defer`: no failure, and not caught as one."""


class Transaction(Generic[S]):
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
    """

    __slots__ = ("_output", "_touched", "envelope", "is_open", "shard", "store")

    def __init__(self, shard: Shard, store: S, output: OutputLike) -> None:
        self.shard = shard
        self.store = store
        self.envelope: Envelope[Any] | None = None
        self.is_open = False
        self._output = output
        self._touched: Envelope[Any] | None = None  # the last message that published something

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

    def defer(self) -> NoReturn:
        """Leave the message to the next transaction, which begins with it.

        Called before the message has changed or published anything.

        Raises:
            ConfigurationError: the message has published something, or there is none.
        """
        if self.envelope is None or self._touched is self.envelope:
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
