"""Interfaces of what a shard's runner works with: inputs, outputs, the recorder and its log."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias

from gazette_sdk.errors import GazetteError
from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.message.envelope import Envelope
from gazette_sdk.message.mapping import Mapping as JournalMapping
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.shard.recovery.file_change import FileChange
from gazette_sdk.transport.append.queue import AnyFuture
from gazette_sdk.user_code import notify

__all__ = [
    "AppendFuture",
    "BadRecord",
    "CommitFuture",
    "InputLike",
    "LogLike",
    "NewInput",
    "OutputLike",
    "RecorderLike",
    "new_commit",
]

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
