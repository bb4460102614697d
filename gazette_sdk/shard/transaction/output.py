"""Output of a shard: what it publishes, by one producer, and its acknowledgements.

Messages of a transaction are appended as they are published, and stay invisible to committed
readers until their journals' acknowledgements follow. These are built before the transaction
commits, are stored with it, and are *queued when the commit starts*, behind the transaction's
messages, to wait there for the commit. So messages of the next transaction, published meanwhile,
stand behind them. Queued any later, an acknowledgement would stand behind messages of the next
transaction with larger clocks, which readers then drop (message section 13.2, shard section 8).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from gazette_sdk.errors import GazetteError, JournalNotFoundError
from gazette_sdk.message.bulk import publish_batch
from gazette_sdk.message.sender import AnyMapping, Producer, Sender, Sequences
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.names import strip_meta
from gazette_sdk.transport.append.appender import JournalAppender
from gazette_sdk.transport.append.queue import AnyFuture, PendingAppend
from gazette_sdk.transport.base import Transport

__all__ = ["FULL_BYTES", "Output"]

_log = logging.getLogger(__name__)

FULL_BYTES = 64 << 20
"""Content that is not acknowledged, with which an output is full."""

PENDING_BYTES_MAX = 4 * FULL_BYTES
"""Bound of content that is not acknowledged: one call of a handler may publish so much more."""


class Output:
    """Messages that a shard publishes. Made on the event loop that sends them.

    It has one producer, and appenders that it shares with nobody: an acknowledgement that waits
    for its commit holds back everything behind it in its journal. Any thread may publish, one at
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

    def publish(self, message: Any, mapping: AnyMapping) -> None:
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

    def publish_batch(self, messages: Sequence[Any], mapping: AnyMapping) -> None:
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
        """Queue the acknowledgements of the transaction that has ended, behind its messages.

        On the event loop, before anything else is published: what is, waits behind them.

        Args:
            intents: what :meth:`end` returned.
            after: the commit, which they wait for. If it fails, they and all behind them do.

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
        was published behind it and never committed. To be done before the first commit.

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
            task.exception()  # also if nobody waits for it, as the output is closed

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
