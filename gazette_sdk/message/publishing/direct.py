"""Appends by the very thread that waits for the receipt, where that is how a publisher is used.

A program that publishes a message and waits for its acknowledgement, over and over, gains nothing
from the event loop and pays for two hops between threads. Once an outbox shows that habit, its
next message is held instead of waking the loop; the call of ``result()`` that follows appends it.
If it doesn't follow, the loop calls the message in after :data:`HOLD_S`.

A caller tries once. Whatever goes wrong, its batch goes back to the event loop, which knows what
to do about failures; the caller waits for that as if it had never tried.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable

from gazette_sdk.errors import CallCancelledError, GazetteError
from gazette_sdk.message.publishing.appends import Settle
from gazette_sdk.message.publishing.batch import Batch, closed_error, on_loop
from gazette_sdk.message.publishing.handover import Effect, Holder, Input
from gazette_sdk.message.publishing.link import Link
from gazette_sdk.message.publishing.outbox import Handed, Outbox
from gazette_sdk.protocol import broker_pb2 as pb

__all__ = ["HOLD_S", "Directs"]

HOLD_S = 0.004
"""What a message is held for its caller at most. Event loops are up to a millisecond late."""

LOOKOUT_S = 0.01
"""The loop looks after held messages for so long after the last one."""

WAY_S = 1.0
"""A way that was not used for so long is looked up again; one that fails is at once."""

WATCHED_MAX = 64
"""Messages are held for callers of so many journals at a time: they are looked after together."""

BYTES_MAX = 256 << 10
"""What is longer costs little beside its content, and is the loop's."""

TIMEOUT_MIN_S = 0.05
"""A caller who waits for less than that rather looks than waits."""


class Directs:
    """Holds messages for their callers, and lets these append them.

    Args:
        lock: the publisher's.
        settle: tells receipts how batches ended.
        wake: asks for the tasks of outboxes on the event loop; from any thread, and if need be
            more than once.
    """

    def __init__(
        self,
        lock: threading.Lock,
        settle: Settle,
        wake: Callable[[list[Outbox]], None],
    ) -> None:
        self.lock = lock
        self.settle = settle
        self.wake = wake
        self.loop: asyncio.AbstractEventLoop | None = None
        self._watched: dict[Outbox, None] = {}

    # ------------------------------------------------------ under the lock

    def try_hold(self, outbox: Outbox, batch: Batch, link: Link | None) -> bool:
        """Hold a message that was just added to an outbox with the habit, if it can be.

        Returns:
            Whether it is held. If not, the outbox's task is to be asked for.
        """
        happened = Input.ADDED
        now = 0.0
        is_watched = outbox in self._watched
        if (
            link is not None
            and (is_watched or len(self._watched) < WATCHED_MAX)
            and link.loop.is_running()
            and batch.length_bytes <= BYTES_MAX
            and not _in_coroutine()
        ):
            now = time.monotonic()
            if outbox.way is None or now - outbox.held_at > WAY_S:
                self.loop = link.loop
                outbox.way = link.transport.direct(outbox.route_key)
            if outbox.way is not None:
                happened = Input.ADDED_TO_HOLD
        if outbox.step(happened) is not Effect.HOLD:
            return False
        if outbox.claim is None:
            outbox.claim = _Claim(self, outbox)
        batch.claim = outbox.claim
        outbox.held_at = batch.published_at = now
        if not is_watched:
            self._watched[outbox] = None
            if len(self._watched) == 1:
                assert self.loop is not None
                self.loop.call_soon_threadsafe(self._look)
        return True

    # ---------------------------------------------------------- the lookout

    def _look(self) -> None:
        """On the loop: call in what nobody claimed, and look again while there may be more."""
        late = []
        with self.lock:
            now = time.monotonic()
            next_s = HOLD_S
            for outbox in list(self._watched):
                left_s = outbox.held_at + HOLD_S - now
                if outbox.holder == Holder.HELD:
                    if left_s > 0:
                        next_s = min(next_s, left_s)
                    elif outbox.step(Input.CALLED_IN) is Effect.WAKE:
                        outbox.habit.broken()
                        late.append(outbox)
                elif left_s + LOOKOUT_S < 0:
                    del self._watched[outbox]
            if self._watched:
                asyncio.get_running_loop().call_later(next_s, self._look)
        if late:
            self.wake(late)


class _Claim:
    """What callers of one outbox do. See :class:`~gazette_sdk.message.publishing.batch.Claim`."""

    __slots__ = ("_caller", "_directs", "_outbox")

    def __init__(self, directs: Directs, outbox: Outbox) -> None:
        self._directs = directs
        self._outbox = outbox
        self._caller = 0

    def call_in(self) -> None:
        """See :class:`~gazette_sdk.message.publishing.batch.Claim`."""
        with self._directs.lock:
            effect = self._outbox.step(Input.CALLED_IN)
        if effect is Effect.WAKE:
            self._directs.wake([self._outbox])

    def append(self, timeout_s: float | None) -> None:
        """See :class:`~gazette_sdk.message.publishing.batch.Claim`."""
        if timeout_s is not None and timeout_s < TIMEOUT_MIN_S:
            self.call_in()
            return
        if on_loop():
            return  # who waits there is refused
        outbox = self._outbox
        batch: Batch | None = None
        try:
            with self._directs.lock:
                if outbox.holder == Holder.HELD:
                    self._caller = threading.get_ident()
                if outbox.step(Input.CLAIMED) is not Effect.APPEND:
                    return
                batch = outbox.take()
            assert batch is not None
            self._attempt(batch, timeout_s)
        except BaseException as error:
            self._interrupted(batch, error)
            raise

    # ---------------------------------------------------------------- parts

    def _attempt(self, batch: Batch, timeout_s: float | None) -> None:
        """Append a batch that was taken, or hand it over."""
        outbox, way = self._outbox, self._outbox.way
        assert way is not None
        began_at = time.monotonic()
        try:
            call = outbox.call = way.append(batch.whole_content(), timeout_s)
        except GazetteError as error:
            self._hand_over(Handed(batch, way, error=error))
            return
        if not call.wait(_left(timeout_s, began_at)):
            self._hand_over(Handed(batch, way, call))
            return
        try:
            response = call.response()
            has_news = way.check(response)
        except GazetteError as error:
            batch.attempt_error = error
            self._hand_over(Handed(batch, way, error=error))
            return
        if response.status != pb.OK:  # nothing was written, and the loop knows what to do
            self._hand_over(Handed(batch, way))
            return
        if has_news:
            self._tell(way.learn, response)
        batch.note(response)
        if batch.is_awaited:
            outbox.note_habit(batch)
        else:
            outbox.habit.strained()
        outbox.call = None
        if not self._directs.settle([batch], response.commit.begin, outbox):
            self._leave()

    def _leave(self) -> None:
        """The batch has ended."""
        outbox = self._outbox
        with self._directs.lock:
            outbox.call = None
            if outbox.rest():
                return
            outbox.step(Input.LEFT)
        self._directs.wake([outbox])

    def _hand_over(self, handed: Handed) -> None:
        """Let the event loop go on with a batch."""
        outbox = self._outbox
        with self._directs.lock:
            outbox.call = None
            outbox.habit.broken()
            outbox.way = None
            outbox.handed = handed
            outbox.step(Input.FAILED)
        try:
            self._directs.wake([outbox])
        except RuntimeError:  # the loop has ended, and with it the publisher
            handed.give_up()
            with self._directs.lock:
                outbox.handed = None
                behind = outbox.drop()
            self._directs.settle([handed.batch, *behind], closed_error())

    def _interrupted(self, batch: Batch | None, error: BaseException) -> None:
        """The caller was interrupted: what it had begun must not be left lying."""
        outbox = self._outbox
        if outbox.holder == Holder.LOOP:  # it may have been about to tell
            self._directs.wake([outbox])
        if outbox.holder != Holder.CALLER or self._caller != threading.get_ident():
            return
        if outbox.call is not None:
            outbox.call.give_up("its caller was interrupted")
        if batch is None:  # between having the right and having the batch
            with self._directs.lock:
                batch = next(iter(outbox.sent()), None)
        if batch is None or batch.is_done:
            self._leave()
            return
        way = outbox.way
        assert way is not None
        cause = CallCancelledError(f"interrupted: {error!r}", journal=outbox.journal)
        batch.attempt_error = cause
        self._hand_over(Handed(batch, way, error=cause))

    def _tell(self, call: Callable[[pb.AppendResponse], None], response: pb.AppendResponse) -> None:
        assert self._directs.loop is not None
        with contextlib.suppress(RuntimeError):  # a loop that has ended needs no routes
            self._directs.loop.call_soon_threadsafe(call, response)


def _left(timeout_s: float | None, began_at: float) -> float | None:
    if timeout_s is None:
        return None
    return max(0.0, timeout_s - (time.monotonic() - began_at))


def _in_coroutine() -> bool:
    """Whether any event loop runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
