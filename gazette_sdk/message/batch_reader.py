"""Batches of messages of journals, for one consumer.

The :class:`BatchReader` takes the content that a :class:`~gazette_sdk.message.fetcher.Fetcher` put
into its queue, decodes it by a :class:`ContentDecoder` for each journal, and asks a
:class:`~gazette_sdk.message.delivery.Delivery` which messages are delivered, and when. It does so
in the thread or coroutine of its consumer. Messages are envelopes or rows of record batches:
whatever the decoders return.

A :class:`ContentDecoder` turns content of a journal, in chunks, into runs of messages (message
section 12); :class:`JournalDecoder` is that of envelopes. For readers that begin at a time,
:func:`messages_since` leaves out earlier messages. Decoders are pure.
"""

from __future__ import annotations

import abc
import asyncio
import logging
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from itertools import repeat
from typing import Any, Generic, Literal, TypeAlias, TypeVar, cast

import msgspec
import numpy as np

from gazette_sdk.errors import (
    ClosedError,
    DecodeError,
    DesyncError,
    FramingError,
    GazetteError,
    JournalNotFoundError,
    OffsetNotYetAvailableError,
    OversizedFrameError,
    TornFrameError,
    ValidationError,
)
from gazette_sdk.framing import Cut, Cutter, Frames, Framing, framing_for
from gazette_sdk.framing.base import NO_FRAMING_REMEDY
from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.message.delivery import HORIZON_S, Batch, Delivery, Select
from gazette_sdk.message.fetcher import (
    ContentQueue,
    FetchedContent,
    FetchEnded,
    Fetcher,
    FetchFailed,
    Finished,
    Item,
    Jumped,
    Opened,
    Plan,
    reading_loop,
)
from gazette_sdk.message.kinds import Decoded, Kind, kind_of
from gazette_sdk.message.kinds.json import uuid_of_json
from gazette_sdk.message.runs import (
    NO_OFFSETS,
    NO_STAMPS,
    InvalidUuidError,
    Message,
    Run,
    ShortRun,
    parse_text_uuids,
    valid_stamps,
)
from gazette_sdk.message.uuid import ACK_TXN, Envelope, parse_raw_uuid
from gazette_sdk.tracing import enabled
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.connect import connect
from gazette_sdk.transport.loop import OwnedLock, guarded, is_running
from gazette_sdk.user_code import call, check_done, check_raised, text_of

T = TypeVar("T")


def decoders_since(
    new_decoder: Callable[[Opened], ContentDecoder[T]],
    clock: int,
    *,
    exempt: Collection[str],
    select: Select[T],
    keeps_acknowledgements: bool,
) -> Callable[[Opened], ContentDecoder[T]]:
    """Return a function that makes decoders which leave out messages of an earlier clock.

    Args:
        new_decoder: makes decoders of all messages, which parse UUIDs.
        clock: least clock of messages that are decoded.
        exempt: journals whose decoders decode all messages.
        select: returns chosen items of a run.
        keeps_acknowledgements: see :func:`messages_since`.
    """

    def new(opened: Opened) -> ContentDecoder[T]:
        decoder = new_decoder(opened)
        if opened.journal not in exempt:
            decoder.select_run = lambda run: messages_since(
                run, clock, select, keeps_acknowledgements=keeps_acknowledgements
            )
        return decoder

    return new


def messages_since(
    run: Run[T], clock: int, select: Select[T], *, keeps_acknowledgements: bool
) -> Run[T]:
    """Return the messages of a run that do not have an earlier clock.

    Messages without UUID have no time, and are kept.

    Args:
        run: messages with their UUIDs' parts.
        clock: least clock of the messages to keep.
        select: returns chosen items of the run.
        keeps_acknowledgements: keep all acknowledgements of transactions. One that rolls back has
            the clock of an earlier message; without it, later messages of the transaction would
            be committed by the next one.
    """
    if not len(run):
        return run
    kept = (run.clocks >= np.uint64(clock)) | (run.clocks == 0)
    if keeps_acknowledgements:
        kept |= run.flags == ACK_TXN
    if kept.all():
        return run
    indices = np.flatnonzero(kept)
    if type(run) is ShortRun and len(indices):
        messages = run.messages()
        return ShortRun(run.journal, [messages[index] for index in indices])
    return Run(
        run.journal,
        run.begins[indices],
        run.ends[indices],
        run.producers[indices],
        run.clocks[indices],
        run.flags[indices],
        select(run.items, indices),
    )


M = TypeVar("M")

_log = logging.getLogger(__name__)

_SHORT_MAX = 8
"""Up to so many messages are decoded one by one: arrays of them would take several times as long.
A reader at the write head mostly finds one."""


AFTER_BAD_COUNT = 64
"""Frames that are decoded after a bad one; twice as many after these, and so on. To decode all
that is left in vain, for each bad one, would take milliseconds."""


class ContentDecoder(abc.ABC, Generic[T]):
    """Decoder of one journal's content, which arrives in chunks of any size.

    Args:
        journal: name of the journal, as the user gave it.
        framing: its framing.
        offset: offset at which content begins, at the boundary of a frame.
        empty: a run without messages.
        described: name of what messages are decoded to, for errors.

    Attributes:
        offset: offset after the last frame that was decoded or skipped.
        select_run: returns the messages of a run that are wanted; None if all are.
    """

    def __init__(
        self, journal: str, framing: Framing, offset: int, empty: Run[T], described: str
    ) -> None:
        self.journal = journal
        self.framing = framing
        self.offset = offset
        self.described = described
        self.select_run: Callable[[Run[T]], Run[T]] | None = None
        self._empty = empty
        self._cutter = Cutter(framing, offset)
        # Frames after a bad one, and the error after all frames.
        self._rest: Cut | None = None
        self._behind: FramingError | None = None
        # Frames to decode next: few after a bad one, as others may follow it.
        self._count_max = sys.maxsize

    @abc.abstractmethod
    def decode(self, cut: Cut) -> tuple[Run[T], Exception | None]:
        """Return the messages of frames, up to the first bad one, and why that is bad.

        Args:
            cut: at least one frame.
        """

    def feed(self, *pieces: bytes) -> tuple[Run[T], FramingError | None]:
        """Decode the next content, in pieces.

        Returns:
            All messages that became whole, and the error after them, if any: then :attr:`offset`
            is after the content that the error is about, and ``feed()`` continues there. After an
            error it may return some of the messages, while :attr:`has_more`.
        """
        if self.has_more:
            assert not any(pieces), "what stands behind an error comes first"
            return self._selected(*self._decode_rest())
        return self._selected(*self._decode_cut(self._cutter.feed(*pieces)))

    @property
    def has_more(self) -> bool:
        """True if content that was fed is not decoded yet."""
        return self._rest is not None or self._behind is not None

    def finish(self) -> tuple[Run[T], FramingError | None]:
        """Decode the last content, after which the journal has no more for now.

        Returns:
            A message that only the end of content made whole, and an error, if there is content
            left that is no message.
        """
        return self._selected(*self._decode_cut(self._cutter.finish()))

    def jump(self, offset: int) -> FramingError | None:
        """Continue at a later offset: the content between was deleted.

        Returns:
            An error, if the deleted content begins within a message.
        """
        before = self._cutter.offset
        if offset == before + self._cutter.pending_bytes:
            return None
        torn = self._cutter.jump(offset)
        self.offset = offset
        if torn is not None:
            return self._explained(torn)
        if before >= 0:
            _log.warning(
                "%s: content of offsets %d to %d is gone; reading on at %d",
                self.journal,
                before,
                offset,
                offset,
            )
        return None

    def _selected(
        self, run: Run[T], error: FramingError | None
    ) -> tuple[Run[T], FramingError | None]:
        return (run if self.select_run is None else self.select_run(run)), error

    def _decode_cut(self, cut: Cut) -> tuple[Run[T], FramingError | None]:
        frames = cut.frames
        if frames.error is not None:
            self._behind = self._explained(frames.error)
        if len(frames.ends):
            self._rest = cut
        return self._decode_rest()

    def _decode_rest(self) -> tuple[Run[T], FramingError | None]:
        """Decode the frames that are left up to the first bad one, or the error after them."""
        whole, self._rest = self._rest, None
        run = self._empty
        if whole is not None:
            cut, self._rest = _divided(whole, self._count_max)
            try:
                run, cause = self.decode(cut)
            except BaseException as error:  # of code of the framing, or of the class
                check_raised(error, self.decode)
                raise
            if cause is not None:
                frames, bad = cut.frames, len(run)
                self.offset = cut.offset + int(frames.ends[bad])
                self._count_max = AFTER_BAD_COUNT
                self._rest = _divided(whole, bad + 1)[1]
                return run, self._undecodable(cut, bad, cause)
            self._count_max = min(2 * self._count_max, sys.maxsize)
            if self._rest is not None:
                self.offset = cut.offset + int(cut.frames.ends[-1])
                return run, None
        self.offset = self._cutter.offset
        behind, self._behind = self._behind, None
        return run, behind

    def _undecodable(self, cut: Cut, bad: int, cause: Exception) -> DecodeError:
        begin, end = int(cut.frames.begins[bad]), int(cut.frames.ends[bad])
        offset = cut.offset + begin
        what = (
            "has no valid UUID"
            if isinstance(cause, InvalidUuidError)
            else f"cannot be decoded as {self.described}"
        )
        error = DecodeError(
            f"{self.journal}: the message at offset {offset} {what}: {_in_one_line(cause)};"
            f" {_REMEDY}",
            frame=bytes(cut.buffer[begin:end]),
            journal=self.journal,
            offset=offset,
        )
        error.__cause__ = cause
        return error

    def _explained(self, error: FramingError) -> FramingError:
        """Return the error of a framing with the journal's name, which framings do not know."""
        offset = self._cutter.offset if error.offset is None else error.offset
        text = f"{self.journal}: offset {offset}: {error}"
        if isinstance(error, DesyncError):
            return DesyncError(
                f"{text}; the content is no {self.framing.content_type}, or its writer is broken",
                skipped=error.skipped,
                journal=self.journal,
                offset=offset,
            )
        for kind in (TornFrameError, DecodeError, OversizedFrameError):
            if isinstance(error, kind):
                return kind(f"{text}; {_REMEDY}", journal=self.journal, offset=offset)
        return FramingError(f"{text}; {_REMEDY}", journal=self.journal, offset=offset)


def _in_one_line(cause: Exception) -> str:
    lines = [line.strip() for line in text_of(cause).splitlines()]
    return "; ".join(filter(None, lines)) or type(cause).__name__


_REMEDY = "mend its writer, or pass over it with on_error='skip'"


class JournalDecoder(ContentDecoder[Envelope[M]]):
    """Decoder of one journal's messages to envelopes.

    Args:
        journal: name of the journal, as the user gave it.
        framing: its framing.
        kind: adapter of the messages' class.
        offset: offset at which content begins, at the boundary of a frame.
        sequenced: parse UUIDs, too: runs are to be sequenced. Without it, the arrays of their
            parts are empty, and an invalid UUID is an error when it is asked for.
    """

    def __init__(
        self,
        journal: str,
        framing: Framing,
        kind: Kind[M],
        offset: int,
        *,
        sequenced: bool = False,
    ) -> None:
        empty: Run[Envelope[M]] = Run(journal, NO_OFFSETS, NO_OFFSETS, *NO_STAMPS, [])
        super().__init__(journal, framing, offset, empty, kind.name)
        self._kind = kind
        self._sequenced = sequenced
        self._finds_parents = enabled() is not None

    def decode(self, cut: Cut) -> tuple[Run[Envelope[M]], Exception | None]:
        """Decode frames in bulk; a few one by one."""
        frames = cut.frames
        decoded = self._kind.decode(self.framing, cut.buffer, frames)
        is_short = self._sequenced and len(frames.ends) <= _SHORT_MAX
        run, cause = (self._decode_few if is_short else self._decode_many)(cut, decoded)
        if self._finds_parents:
            self._set_parents(run, cut, decoded)
        return run, cause

    def _set_parents(self, run: Run[Envelope[M]], cut: Cut, decoded: Decoded[M]) -> None:
        """Give envelopes, which no one else has yet, the contexts of their traces."""
        parents = self._kind.parents(self.framing, cut.buffer, cut.frames, decoded.messages)
        for index, parent in parents.items():
            if index < len(run):
                msgspec.structs.force_setattr(run.items[index], "traceparent", parent)

    def _decode_many(
        self, cut: Cut, decoded: Decoded[M]
    ) -> tuple[Run[Envelope[M]], Exception | None]:
        """Return the envelopes of frames, by arrays."""
        frames = cut.frames
        cause = decoded.error
        stamps = NO_STAMPS
        if self._sequenced:
            found = None if decoded.texts is None else parse_text_uuids(decoded.texts)
            stamps, invalid = valid_stamps(decoded.uuids) if found is None else (found, None)
            cause = invalid or cause
        begins, ends = (each + cut.offset for each in frames.arrays())
        if cause is not None:
            count = len(stamps.clocks) if self._sequenced else len(decoded.messages)
            begins, ends = begins[:count], ends[:count]
        # The shortest argument ends it: messages stop before one that cannot be decoded.
        envelopes = list(
            map(
                Envelope,
                repeat(self.journal),
                begins.tolist(),
                ends.tolist(),
                decoded.messages,
                decoded.uuids,
            )
        )
        return Run(self.journal, begins, ends, *stamps, envelopes), cause

    def _decode_few(
        self, cut: Cut, decoded: Decoded[M]
    ) -> tuple[Run[Envelope[M]], Exception | None]:
        """Return the same as :meth:`_decode_many`, without arrays."""
        journal, offset, frames = self.journal, cut.offset, cut.frames
        found: list[Message[Envelope[M]]] = []
        cause = decoded.error
        # The shortest argument ends it: messages stop before one that cannot be decoded.
        rows = zip(frames.begins, frames.ends, decoded.messages, decoded.uuids, strict=False)
        for at, until, message, raw in rows:
            try:
                producer, clock, flags = parse_raw_uuid(raw)
            except ValueError as error:
                cause = InvalidUuidError(len(found), str(error))
                break
            begin, end = at + offset, until + offset
            envelope = Envelope(journal, begin, end, message, raw)
            found.append(Message(journal, begin, end, producer, clock, flags, envelope))
        return ShortRun(journal, found) if found else self._empty, cause


def framing_and_kind(
    opened: Opened, message_type: type[M], *, sequenced: bool
) -> tuple[Framing, Kind[M]]:
    """Return the framing of a journal, and the adapter of the messages' class.

    Args:
        opened: the journal.
        message_type: class of the messages.
        sequenced: they are to be sequenced, for which the class must hold UUIDs.

    Raises:
        FramingError: its content type has no framing.
        ValidationError: its framing holds no messages of the class.
    """
    journal = opened.journal
    try:
        framing = framing_for(opened.content_type)
        return framing, kind_of(message_type, framing.form, needs_uuid=sequenced)
    except FramingError as error:
        raise FramingError(
            f"{journal}: determining framing: {error}; {NO_FRAMING_REMEDY}", journal=journal
        ) from error
    except ValidationError as error:
        reason = f"{journal}: {error.reason}"
        raise ValidationError(reason, kind=error.kind, journal=journal) from error


def journal_decoder(message_type: type[M], opened: Opened, *, sequenced: bool) -> JournalDecoder[M]:
    """Return the decoder of a journal to envelopes; raises as :func:`framing_and_kind`."""
    framing, kind = framing_and_kind(opened, message_type, sequenced=sequenced)
    return JournalDecoder(opened.journal, framing, kind, opened.offset, sequenced=sequenced)


OnError: TypeAlias = Literal["raise", "skip"] | Callable[[GazetteError], object]
"""Treatment of content that is no message: raise its error, or skip it after a warning, or after
a call of a function with the error, which may raise."""


def _divided(cut: Cut, count: int) -> tuple[Cut, Cut | None]:
    """Return the first frames of a cut, and the others, if there are any."""
    frames = cut.frames
    if len(frames) <= count:
        return cut, None
    first = Frames(frames.begins[:count], frames.ends[:count], 0)
    others = Frames(frames.begins[count:], frames.ends[count:], 0)
    return replace(cut, frames=first), replace(cut, frames=others)


class BatchReader(Generic[T]):
    """Reader of batches, for plain code and for coroutines, also in turns.

    ::

        while (batch := batches.next_batch()) is not None:
            for message in batch: ...

    A batch is either a sequence, of messages of one journal, or an iterator, which sequences each
    message as it is taken. An iterator must be exhausted before the next call.

    Args:
        plan: what to read.
        transport: how to reach the journals; None for ``connect()``.
        new_decoder: returns the decoder of a journal, or of a range of it that is read again.
        delivery: decides which messages are delivered, and when; keeps offsets and state.
        on_error: treatment of content that is no message.
        returns_after_errors: :meth:`poll` returns an empty batch after content that is no message,
            so that its caller gets a turn.

    Attributes:
        lock: held by the consumer that takes a batch, or a message of an iterator.
    """

    def __init__(
        self,
        plan: Plan,
        transport: Transport | None,
        new_decoder: Callable[[Opened], ContentDecoder[T]],
        delivery: Delivery[T],
        *,
        on_error: OnError = "raise",
        returns_after_errors: bool = False,
    ) -> None:
        self._returns_after_errors = returns_after_errors
        self._plan = plan
        self._transport = transport
        self._new_decoder = new_decoder
        self._delivery = delivery
        self._on_error = on_error
        self._decoders: dict[str, ContentDecoder[T]] = {}
        self._opened: dict[str, Opened] = {}
        # An error after everything that was delivered of a journal.
        # A journal with content that is not decoded yet, and the error before that.
        self._pending: tuple[str, ContentDecoder[T], FramingError | None] | None = None
        self._failure: Exception | None = None
        self._fetcher: Fetcher | None = None
        self._replay: ContentQueue | None = None
        self._replay_decoder: ContentDecoder[T] | None = None
        self._replay_pending: tuple[ContentDecoder[T], FramingError | None] | None = None
        self._stop_when_dropped: weakref.finalize[..., BatchReader[T]] | None = None
        self._is_closed = False
        self._process_id = os.getpid()
        self.lock = cast("OwnedLock", threading.RLock())
        self._turn = asyncio.Lock()

    # --------------------------------------------------------------- position

    @property
    def has_begun(self) -> bool:
        """True if reading has begun."""
        return self._fetcher is not None or bool(self._opened)

    def checkpoint(self, left: int = 0, *, horizon_s: float = HORIZON_S) -> Checkpoint:
        """Return the position of a committed reader: after the last message that was taken.

        Args:
            left: how many messages of the last batch, if that is a sequence, were not taken yet.
            horizon_s: producers without an open transaction are forgotten which were silent for
                so long, while others of their journal were not; 0 for none.

        Raises:
            ClosedError: work on a message was interrupted, so that the position is unknown.
        """
        checkpoint = self._delivery.checkpoint(left, horizon_s)
        for name in checkpoint.offsets:
            opened = self._opened.get(name)
            revision = (opened and opened.create_revision) or self._plan.revisions.get(name)
            if revision:
                checkpoint.create_revisions[name] = revision
        return checkpoint

    def offsets(self, left: int = 0) -> dict[str, int]:
        """Return the offset to read on from, by journal; arguments as of :meth:`checkpoint`.

        Loses nothing, but after a transaction that is open messages may be delivered again.
        """
        return self._delivery.offsets(left)

    # ------------------------------------------------------------------- turns

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Take batches in turns with other threads, each of which waits here.

        Raises:
            ReentrantCallError: the thread takes one already, below this call.
        """
        if self._process_id != os.getpid():
            yield  # another thread of the parent may have it; what follows is refused
            return
        with guarded(self.lock):
            yield

    @asynccontextmanager
    async def taking_async(self) -> AsyncIterator[None]:
        """Take batches in turns with other tasks of the event loop, each of which waits here.

        Raises:
            GazetteError: a thread, or a task of another event loop, takes one.
        """
        try:
            await self._turn.acquire()
        except RuntimeError as error:  # it is of another loop
            raise _in_use() from error
        try:
            if not self.lock.acquire(blocking=False):
                raise _in_use()
            try:
                yield
            finally:
                self.lock.release()
        finally:
            self._turn.release()

    # -------------------------------------------------------------------- next

    def next_batch(self, until: float = math.inf) -> Batch[T] | None:
        """Return the next batch; blocks until there is one, or until a monotonic time.

        Returns:
            None at the end: the next call looks for more. And if none has come in time.

        Raises:
            GazetteError: reading failed. Every later call raises the same error.
        """
        fetcher = self._current(blocks=True)
        if fetcher is None:
            return None
        while (batch := self.ready_batch()) is None and not self._is_closed:
            queue = self._replay or fetcher.queue
            if not queue.wait(until):
                break
            if self._accept(queue):
                if fetcher.owns_transport:
                    fetcher.close()
                break
        return batch

    async def next_batch_async(self, until: float = math.inf) -> Batch[T] | None:
        """Return the next batch as :meth:`next_batch`, in a coroutine of any loop."""
        fetcher = self._current(blocks=False)
        if fetcher is None:
            return None
        while (batch := self.ready_batch()) is None and not self._is_closed:
            queue = self._replay or fetcher.queue
            if until == math.inf:
                await queue.wait_async()
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout(until - time.monotonic()):
                        await queue.wait_async()
                if queue.is_empty:
                    break
            if self._accept(queue):
                if fetcher.owns_transport:
                    await fetcher.aclose()
                break
        return batch

    def poll(self) -> Batch[T] | None:
        """Return the next batch of what has arrived, without waiting; in any thread.

        Only after :meth:`begin`.

        Returns:
            None if nothing has; and at the end, see :attr:`has_ended`.

        Raises:
            GazetteError: as :meth:`next_batch`.
        """
        while (batch := self.ready_batch()) is None and (fetcher := self._fetcher) is not None:
            queue = self._replay or fetcher.queue
            if queue.is_empty:
                break
            self._accept(queue)
        return batch

    async def arrived(self) -> None:
        """Wait until there is something to :meth:`poll`, or reading has ended; on any loop."""
        fetcher = self._fetcher
        if fetcher is not None:
            await (self._replay or fetcher.queue).wait_async()

    @property
    def write_heads(self) -> Mapping[str, int]:
        """By journal, the last write head that a broker reported; while it reads."""
        return {} if self._fetcher is None else self._fetcher.write_heads

    @property
    def has_ended(self) -> bool:
        """All journals were read to their ends, or the reader was closed."""
        return self._fetcher is None

    def ready_batch(self) -> Batch[T] | None:
        """Return the next batch of what is decoded already; None if more content is needed.

        Raises:
            GazetteError: as :meth:`next_batch`.
        """
        while True:
            if self._failure is not None:
                raise self._failure
            try:
                batch = self._delivery.next()
                if batch is not None:
                    return batch
                if self._replay is None and self._delivery.replay is not None:
                    self._begin_replay()
                    continue
                if self._replay is None and self._pending is not None:
                    error = self._pending[2]
                    self._feed_pending(*self._pending)
                elif self._replay is not None and self._replay_pending is not None:
                    error = self._replay_pending[1]
                    self._feed_replayed(*self._replay_pending)
                else:
                    return None
                if error is not None and self._returns_after_errors:
                    return ()
            except Exception as error:
                self._failure = error
                raise
            except BaseException:
                self.interrupt()
                raise

    def interrupt(self) -> None:
        """Fail, as the consumer was interrupted at work on a batch: its position is unknown."""
        self._delivery.lose()
        self._fail_interrupted()

    def begin(self, *, blocks: bool = False) -> Fetcher:
        """Begin to fetch journals, unless that was done.

        Args:
            blocks: True if the caller is plain code.

        Raises:
            ClosedError: the reader is closed, or belongs to the process that was forked.
            GazetteError: plain code would block the event loop that fetches.
        """
        if self._is_closed:
            raise ClosedError(f"the reader is closed; make another one {self._delivery.advice}")
        if self._process_id != os.getpid():
            raise ClosedError(
                "the reader belongs to the process that was forked; make another one in the child,"
                f" {self._delivery.advice}"
            )
        # Another thread may begin, too, or be at the end and about to forget its fetcher.
        if not self.lock.acquire(blocking=blocks):
            raise _in_use()
        try:
            return self._begun(blocks=blocks)
        finally:
            self.lock.release()

    def _begun(self, *, blocks: bool) -> Fetcher:
        """Return the fetcher; make it if there is none. The caller holds the lock."""
        fetcher = self._fetcher
        if fetcher is None:
            transport = connect() if self._transport is None else self._transport
            loop = reading_loop(transport, blocks=blocks)
        else:
            loop = fetcher.loop
        if blocks and is_running(loop):
            raise GazetteError(
                "plain iteration would block the event loop that fetches: use `async for`"
            )
        if fetcher is None:
            fetcher = self._fetcher = Fetcher(
                self._plan, transport, loop, owns_transport=self._transport is None
            )
            # A reader that is dropped without being closed ends its reads.
            self._stop_when_dropped = weakref.finalize(self, fetcher.stop)
            self._stop_when_dropped.atexit = False
        return fetcher

    def _current(self, *, blocks: bool) -> Fetcher | None:
        """Return the fetcher; None if another thread closed the reader between two batches."""
        fetcher = self._fetcher
        if fetcher is not None and not self._is_closed and self._process_id == os.getpid():
            return fetcher
        if fetcher is not None and self._is_closed and self._failure is None:
            return None
        return self.begin(blocks=blocks)

    def _feed_pending(
        self, journal: str, decoder: ContentDecoder[T], error: FramingError | None
    ) -> None:
        """Raise or skip the error after everything that was delivered, and decode the rest."""
        if error is not None:
            bad = _undecodable(decoder, error)
            if bad is None or not self._delivery.leave_out(bad):
                self._raise_or_skip(error)
            self._pending = None
            if isinstance(error, TornFrameError) and decoder.offset == error.offset:
                return  # at the end of content: the rest of the frame may be appended yet
            self._delivery.passed(journal, decoder.offset)
        self._feed(journal, decoder)

    def _raise_or_skip(self, error: FramingError) -> None:
        # The end of what a plain FramingError is about is not known: it cannot be skipped.
        if self._on_error == "raise" or type(error) is FramingError:
            raise error
        if self._on_error == "skip":
            _log.warning("passed over: %s", error)
        else:
            check_done(call(self._on_error, error), self._on_error)

    # ------------------------------------------------------------------ accept

    def _accept(self, queue: ContentQueue) -> bool:
        """Work on the first item of a queue. Return True if it was the last."""
        try:
            item = queue.pop()
            if queue is self._replay:
                self._accept_replayed(item)
            elif type(item) is FetchedContent:
                self._feed(item.journal, self._decoders[item.journal], *item.pieces)
            else:
                self._accept_event(item)
        except Exception as error:
            self._failure = error
            raise
        except BaseException:
            self._fail_interrupted()
            raise
        return type(item) is Finished

    def _accept_event(self, item: Item) -> None:
        """Work on an item of a journal's read, or of all reads, other than content."""
        if isinstance(item, Opened):
            self._open(item)
        elif isinstance(item, Jumped):
            decoder = self._decoders[item.journal]
            error = decoder.jump(item.offset)
            if error is None:
                self._delivery.passed(item.journal, item.offset)
            else:
                self._pending = (item.journal, decoder, error)
        elif isinstance(item, FetchEnded):
            self._end(item)
        elif isinstance(item, FetchFailed):
            self._failure = item.error
        else:
            self._finish()

    def _feed(self, journal: str, decoder: ContentDecoder[T], *pieces: bytes) -> None:
        found, error = decoder.feed(*pieces)
        self._delivery.add(found)
        has_more = error is not None or decoder.has_more
        self._pending = (journal, decoder, error) if has_more else None

    def _open(self, item: Opened) -> None:
        before = self._opened.get(item.journal)
        if item.continues and item.journal in self._decoders:
            return
        self._decoders[item.journal] = self._new_decoder(item)
        self._opened[item.journal] = item
        is_new = item.is_new or (
            before is not None and before.create_revision != item.create_revision
        )
        self._delivery.open(item.journal, item.offset, is_new=is_new)

    def _end(self, item: FetchEnded) -> None:
        decoder = self._decoders[item.journal]
        found, error = decoder.finish()
        if len(found):
            self._delivery.add(found)
        elif error is None:
            # The offset of a read that began at the write head becomes known here.
            self._delivery.passed(item.journal, max(item.offset, decoder.offset))
        if error is not None:
            self._pending = (item.journal, decoder, error)

    def _finish(self) -> None:
        """Forget the fetcher, as all journals were read to their ends."""
        if self._stop_when_dropped is not None:
            self._stop_when_dropped.detach()
        self._fetcher = None
        self._decoders = {}
        self._delivery.finish()
        self._plan = self._plan.continued(self._delivery.positions(), self._opened)

    def _fail_interrupted(self) -> None:
        # Which messages of a piece of content were taken is unknown.
        self._failure = ClosedError(
            f"reading was interrupted; make another reader {self._delivery.advice}"
        )

    # ------------------------------------------------------------------ replay

    def _begin_replay(self) -> None:
        """Read the begin of a transaction again, as it is not in memory any more."""
        wanted = self._delivery.replay
        assert wanted is not None
        assert self._fetcher is not None
        if wanted.begin >= wanted.end:
            # A read with the end offset 0 has no end.
            self._delivery.end_replay()
            return
        self._replay = self._fetcher.replay(wanted.journal, wanted.begin, wanted.end)
        self._replay_decoder = self._new_decoder(self._opened[wanted.journal].at(wanted.begin))

    def _accept_replayed(self, item: Item) -> None:
        decoder, wanted = self._replay_decoder, self._delivery.replay
        assert decoder is not None
        assert wanted is not None
        if isinstance(item, FetchedContent):
            self._feed_replayed(decoder, None, *item.pieces)
        elif isinstance(item, Jumped):
            self._raise_replayed(decoder.jump(item.offset))
        elif isinstance(item, FetchEnded):
            _, error = decoder.finish()  # the range ends at a message's begin
            self._raise_replayed(error)
            if item.offset < wanted.end:
                raise OffsetNotYetAvailableError(
                    f"offsets {item.offset} to {wanted.end} cannot be read again, where a"
                    " transaction was written that is acknowledged now",
                    journal=item.journal,
                    offset=item.offset,
                )
            self._replay = None
            self._delivery.end_replay()
        elif isinstance(item, FetchFailed):
            is_deleted = isinstance(item.error, JournalNotFoundError)
            if not self._plan.block or self._plan.is_fixed or not is_deleted:
                raise item.error
            # The listing will follow, and other journals are read on.
            _log.warning(
                "%s was deleted, and with it a transaction to be delivered", wanted.journal
            )
            self._replay = None
            self._delivery.forget(wanted.journal)
        elif not self._is_closed:
            # To end here would lose a transaction without an error.
            raise ClosedError(
                "reading a transaction again was broken off; make another reader"
                f" {self._delivery.advice}"
            )
        else:
            self._replay = None
            self._finish()

    def _feed_replayed(
        self, decoder: ContentDecoder[T], error: FramingError | None, *pieces: bytes
    ) -> None:
        """Raise or skip the error after all that was delivered of a replay, and decode the rest."""
        if error is not None:
            bad = _undecodable(decoder, error)
            if bad is None:
                self._raise_replayed(error)
            elif self._delivery.is_due(bad):
                self._raise_or_skip(error)
                self._delivery.pass_replayed(bad)
        found, error = decoder.feed(*pieces)
        self._delivery.add_replayed(found)
        has_more = error is not None or decoder.has_more
        self._replay_pending = (decoder, error) if has_more else None

    def _raise_replayed(self, error: FramingError | None) -> None:
        """Raise an error, or skip it again as when it was first read, without a warning."""
        if error is not None and self._on_error == "raise":
            raise error

    # ------------------------------------------------------------------- close

    def close(self) -> None:
        """End reading. An iteration, in any thread, ends after its batch."""
        fetcher = self._closing()
        if fetcher is not None:
            fetcher.close()

    async def aclose(self) -> None:
        """End reading as :meth:`close`, in a coroutine."""
        fetcher = self._closing()
        if fetcher is not None:
            await fetcher.aclose()

    def _closing(self) -> Fetcher | None:
        self._is_closed = True
        if self._stop_when_dropped is not None:
            self._stop_when_dropped.detach()
        return self._fetcher if self._process_id == os.getpid() else None


def _undecodable(decoder: ContentDecoder[Any], error: FramingError) -> Message[None] | None:
    """Return a JSON message that its class cannot read, without its item.

    Returns:
        None if the error is of something else, or the message has no UUID.
    """
    if not isinstance(error, DecodeError) or decoder.framing.form != "json":
        return None
    if error.frame is None or error.journal is None or error.offset is None:
        return None
    uuid = uuid_of_json(error.frame)
    if uuid is None:
        return None
    try:
        producer, clock, flags = parse_raw_uuid(uuid)
    except ValueError:
        return None
    end = error.offset + len(error.frame)
    return Message(error.journal, error.offset, end, producer, clock, flags, None)


def _in_use() -> GazetteError:
    return GazetteError(
        "another thread or event loop waits for messages of this reader: give each a Reader of its"
        " own, or take all messages in one and hand them over by a queue"
    )
