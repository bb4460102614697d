"""Moves messages from journals to their consumer: content in, batches of what is delivered out.

The :class:`Pump` takes what :class:`~gazette_sdk.message.reading.prefetch.Prefetch` read, lets a
:class:`Decoder` of each journal turn it into runs, and asks a
:class:`~gazette_sdk.message.reading.delivery.Delivery` which of their messages are delivered, and
when. It knows neither envelopes nor record batches: what it moves is whatever its decoders make.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable
from typing import Generic, Literal, Protocol, TypeAlias, TypeVar

from gazette_sdk.errors import (
    ClosedError,
    FramingError,
    GazetteError,
    JournalNotFoundError,
    OffsetNotYetAvailableError,
    TornFrameError,
)
from gazette_sdk.message.reading.delivery import HORIZON_S, Batch, Delivery
from gazette_sdk.message.reading.flow import (
    Content,
    Ended,
    Failed,
    Finished,
    Flow,
    Item,
    Jumped,
    Opened,
)
from gazette_sdk.message.reading.plan import Plan
from gazette_sdk.message.reading.prefetch import Prefetch, Replay
from gazette_sdk.message.sequencing.checkpoint import Checkpoint
from gazette_sdk.message.sequencing.run import Run
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.loop import is_on_sdk_loop as on_loop
from gazette_sdk.transport.loop import on_sdk_loop, run

__all__ = ["Batch", "Decoder", "OnError", "Pump"]

T = TypeVar("T")

_log = logging.getLogger(__name__)

OnError: TypeAlias = Literal["raise", "skip"] | Callable[[GazetteError], object]
"""What becomes of content that is no message: raise its error, or pass over it after a warning,
or after a function was called with the error, which may raise."""


class Decoder(Protocol[T]):
    """Turns content of one journal into runs, as it arrives."""

    @property
    def offset(self) -> int:
        """Offset behind everything that was dealt with: where to read on from."""

    def feed(self, content: bytes) -> tuple[Run[T], FramingError | None]:
        """Decode the next content.

        Returns:
            The messages which became whole, and the error that stands behind them, if any: then
            :attr:`offset` is behind what the error is about, and ``feed(b"")`` goes on there.
        """

    def jump(self, offset: int) -> FramingError | None:
        """Go on at a later offset; an error, if content is missing within a message."""

    def finish(self) -> tuple[Run[T], FramingError | None]:
        """No more content comes for now.

        Returns:
            What only the end made whole, and an error, if content ends within a message.
        """


class Pump(Generic[T]):
    """Moves what a plan says to one consumer, which is plain code or coroutines, in turns.

    ::

        while (batch := pump.take()) is not None:
            for item in batch: ...

    A batch is either a sequence, whose messages all stand in one journal, or an iterator, which
    works on each message as it is taken. Iterators must be used up before the next ``take``.

    Args:
        plan: what to read.
        transport: how to reach the journals; None for ``connect()``.
        new_decoder: makes the decoder of a journal, or of a part of it that is read again.
        delivery: decides which messages are delivered, and when; keeps offsets and state.
        on_error: what becomes of content that is no message.
    """

    def __init__(
        self,
        plan: Plan,
        transport: Transport | None,
        new_decoder: Callable[[Opened], Decoder[T]],
        delivery: Delivery[T],
        *,
        on_error: OnError = "raise",
    ) -> None:
        self._plan = plan
        self._transport = transport
        self._new_decoder = new_decoder
        self._delivery = delivery
        self._on_error = on_error
        self._decoders: dict[str, Decoder[T]] = {}
        self._opened: dict[str, Opened] = {}
        self._pending: tuple[str, Decoder[T], FramingError] | None = None
        self._failure: Exception | None = None
        self._prefetch: Prefetch | None = None
        self._replay: Replay | None = None
        self._replay_decoder: Decoder[T] | None = None
        self._dropped: weakref.finalize[..., Pump[T]] | None = None
        self._is_closed = False
        self._process = os.getpid()

    # ------------------------------------------------------------ where it is

    @property
    def has_begun(self) -> bool:
        """Whether anything was ever asked of it."""
        return self._prefetch is not None or bool(self._opened)

    def checkpoint(self, left: int = 0, *, horizon_s: float = HORIZON_S) -> Checkpoint:
        """Where a committed reader stands: behind the last item that was taken.

        Args:
            left: how many items of the last batch, if that is a sequence, were not taken yet.
            horizon_s: producers are forgotten which were silent for so long, while others of their
                journal were not; 0 for none.

        Raises:
            ClosedError: work on a message was interrupted, so that nobody knows.
        """
        return self._delivery.checkpoint(left, horizon_s)

    def offsets(self, left: int = 0) -> dict[str, int]:
        """By journal, where to read on from, see :meth:`checkpoint`.

        Loses nothing, but behind a transaction that is open messages may be delivered again.
        """
        return self._delivery.offsets(left)

    # ------------------------------------------------------------------- take

    def take(self) -> Batch[T] | None:
        """The next batch; waits for one. None at the end: the next call looks for more.

        Raises:
            GazetteError: reading failed; it is raised again by every later call.
        """
        if self._was_closed_meanwhile():
            return None
        prefetch = self.begin()
        while True:
            batch = self._next()
            if batch is not None:
                return batch
            if self._is_closed:
                return None
            flow = self._replay or prefetch
            if self._accept(flow, flow.mailbox.first()):
                if prefetch.is_owner:
                    run(prefetch.stopped())
                return None

    async def atake(self) -> Batch[T] | None:
        """As :meth:`take`, in a coroutine of any loop."""
        if self._was_closed_meanwhile():
            return None
        prefetch = self.begin()
        while True:
            batch = self._next()
            if batch is not None:
                return batch
            if self._is_closed:
                return None
            flow = self._replay or prefetch
            if self._accept(flow, await flow.mailbox.afirst()):
                if prefetch.is_owner:
                    await on_sdk_loop(prefetch.stopped())
                return None

    def _was_closed_meanwhile(self) -> bool:
        """Closed between two batches, by another thread: that ends reading, and is no error."""
        return self._is_closed and self._prefetch is not None and self._failure is None

    def at_hand(self) -> Batch[T] | None:
        """The next batch, if there is one without reading more; None otherwise.

        Raises:
            GazetteError: as :meth:`take`.
        """
        return self._next()

    def interrupt(self) -> None:
        """The consumer was interrupted at work on a batch: where it stands is not known."""
        self._delivery.lose()
        self._interrupted()

    def begin(self) -> Prefetch:
        """Read ahead, unless that is under way.

        Raises:
            ClosedError: the pump is closed, or belongs to the process that was forked.
        """
        if self._is_closed:
            raise ClosedError(f"the reader is closed; make another one {self._delivery.advice}")
        if self._process != os.getpid():
            raise ClosedError(
                "the reader belongs to the process that was forked; make another one in the child,"
                f" {self._delivery.advice}"
            )
        if self._prefetch is None:
            self._prefetch = Prefetch(self._plan, self._transport)
            # A reader which is dropped without being closed ends its reads.
            self._dropped = weakref.finalize(self, self._prefetch.stop)
            self._dropped.atexit = False
        return self._prefetch

    def _next(self) -> Batch[T] | None:
        """The next batch of what is at hand; None if there is nothing left of it."""
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
                if self._replay is not None or self._pending is None:
                    return None
                self._pass_over(*self._pending)
            except Exception as error:
                self._failure = error
                raise
            except BaseException:
                self._delivery.lose()
                self._interrupted()
                raise

    def _pass_over(self, journal: str, decoder: Decoder[T], error: FramingError) -> None:
        """Everything before an error was delivered: what becomes of it?"""
        self._judge(error)
        self._pending = None
        if isinstance(error, TornFrameError) and decoder.offset == error.offset:
            return  # at the end of content: it may be completed yet
        self._delivery.passed(journal, decoder.offset)
        self._feed(journal, decoder, b"")

    def _judge(self, error: FramingError) -> None:
        # What has no end, which is a plain FramingError, cannot be passed over.
        if self._on_error == "raise" or type(error) is FramingError:
            raise error
        if self._on_error == "skip":
            _log.warning("passed over: %s", error)
        else:
            self._on_error(error)

    # ------------------------------------------------------------------ accept

    def _accept(self, flow: Flow, item: Item) -> bool:
        """Work on the first item of a mailbox; whether nothing more comes."""
        try:
            if flow is self._replay:
                self._accept_replayed(item)
            else:
                self._accept_read(item)
            flow.drop(item)
        except Exception as error:
            self._failure = error
            raise
        except BaseException:
            self._interrupted()
            raise
        if isinstance(item, Finished):
            self._finish()
            return True
        return False

    def _accept_read(self, item: Item) -> None:
        if isinstance(item, Content):
            self._feed(item.journal, self._decoders[item.journal], item.take())
        elif isinstance(item, Opened):
            self._open(item)
        elif isinstance(item, Jumped):
            decoder = self._decoders[item.journal]
            error = decoder.jump(item.offset)
            if error is None:
                self._delivery.passed(item.journal, item.offset)
            else:
                self._pending = (item.journal, decoder, error)
        elif isinstance(item, Ended):
            self._end(item)
        elif isinstance(item, Failed):
            self._failure = item.error

    def _feed(self, journal: str, decoder: Decoder[T], content: bytes) -> None:
        found, error = decoder.feed(content)
        self._delivery.add(found)
        self._pending = None if error is None else (journal, decoder, error)

    def _open(self, item: Opened) -> None:
        before = self._opened.get(item.journal)
        if item.continues and item.journal in self._decoders:
            return
        self._decoders[item.journal] = self._new_decoder(item)
        self._opened[item.journal] = item
        is_new = before is not None and before.create_revision != item.create_revision
        self._delivery.open(item.journal, item.offset, is_new=is_new)

    def _end(self, item: Ended) -> None:
        decoder = self._decoders[item.journal]
        found, error = decoder.finish()
        if len(found):
            self._delivery.add(found)
        elif error is None:
            # A read from the write head learns here where that is.
            self._delivery.passed(item.journal, max(item.offset, decoder.offset))
        if error is not None:
            self._pending = (item.journal, decoder, error)

    def _finish(self) -> None:
        """Everything was read: taking again looks for more."""
        if self._dropped is not None:
            self._dropped.detach()
        self._prefetch = None
        self._replay = None
        self._decoders = {}
        self._delivery.finish()
        self._plan = self._plan.continued(self._delivery.positions(), self._opened)

    def _interrupted(self) -> None:
        # Within a chunk there is no saying which messages were taken.
        self._failure = ClosedError(
            f"reading was interrupted; make another reader {self._delivery.advice}"
        )

    # ------------------------------------------------------------------ replay

    def _begin_replay(self) -> None:
        """A transaction's begin is not in memory any more: it is read again."""
        wanted = self._delivery.replay
        assert wanted is not None
        assert self._prefetch is not None
        if wanted.begin >= wanted.end:
            # A read that ends at 0 would have no end.
            self._delivery.end_replay()
            return
        self._replay = self._prefetch.replay(wanted.journal, wanted.begin, wanted.end)
        self._replay_decoder = self._new_decoder(self._opened[wanted.journal].at(wanted.begin))

    def _accept_replayed(self, item: Item) -> None:
        decoder = self._replay_decoder
        assert decoder is not None
        if isinstance(item, Content):
            self._feed_replayed(decoder, item.take())
        elif isinstance(item, Jumped):
            self._judge_replayed(decoder.jump(item.offset))
        elif isinstance(item, Ended):
            self._end_replay(decoder, item)
        elif isinstance(item, Failed):
            self._fail_replay(item.error)
        elif isinstance(item, Finished) and not self._is_closed:
            # To end here would be to lose a transaction without a word.
            raise ClosedError(
                "reading a transaction again was broken off; make another reader"
                f" {self._delivery.advice}"
            )

    def _end_replay(self, decoder: Decoder[T], item: Ended) -> None:
        wanted = self._delivery.replay
        assert wanted is not None
        _, error = decoder.finish()  # the range ends at a message's begin
        self._judge_replayed(error)
        if item.offset < wanted.end:
            raise OffsetNotYetAvailableError(
                f"offsets {item.offset} to {wanted.end} cannot be read again, where a transaction"
                " was written that is acknowledged now",
                journal=item.journal,
                offset=item.offset,
            )
        self._replay = None
        self._delivery.end_replay()

    def _fail_replay(self, error: Exception) -> None:
        wanted = self._delivery.replay
        assert wanted is not None
        if not self._plan.block or not isinstance(error, JournalNotFoundError):
            raise error
        # It will be seen to have vanished; others go on.
        _log.warning("%s was deleted, and with it a transaction to be delivered", wanted.journal)
        self._replay = None
        self._delivery.forget(wanted.journal)

    def _feed_replayed(self, decoder: Decoder[T], content: bytes) -> None:
        while True:
            found, error = decoder.feed(content)
            self._delivery.add_replayed(found)
            if error is None:
                return
            self._judge_replayed(error)
            content = b""

    def _judge_replayed(self, error: FramingError | None) -> None:
        """What was passed over when it was first read is passed over again, without a word."""
        if error is not None and self._on_error == "raise":
            raise error

    # ------------------------------------------------------------------- close

    def close(self) -> None:
        """End reading. A consumer, in any thread, ends behind its batch."""
        prefetch = self._closing()
        if prefetch is None:
            return
        if on_loop():
            prefetch.stop()
        else:
            run(prefetch.stopped())

    async def aclose(self) -> None:
        """As :meth:`close`, in a coroutine."""
        prefetch = self._closing()
        if prefetch is not None:
            await on_sdk_loop(prefetch.stopped())

    def _closing(self) -> Prefetch | None:
        self._is_closed = True
        if self._dropped is not None:
            self._dropped.detach()
        return self._prefetch if self._process == os.getpid() else None
