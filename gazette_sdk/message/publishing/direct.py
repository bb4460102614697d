"""Appends by the very thread that waits for the receipt, where that is how a publisher is used.

A program that publishes a message and waits for its acknowledgement, over and over, gains nothing
from the event loop and pays for two hops between threads. Once an outbox shows that habit, its
next message is held instead of waking the loop; the call of ``result()`` that follows appends it.
If it doesn't follow, the loop calls the message in: after :data:`HOLD_S` where the habit is new,
later where it has lasted, since each look of the loop disturbs the caller.

A caller tries once. Whatever goes wrong, its batch goes back to the event loop, which knows what
to do about failures; the caller waits for that as if it had never tried.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable

from gazette_sdk.errors import CallCancelledError, GazetteError
from gazette_sdk.message.publishing.appends import Settle
from gazette_sdk.message.publishing.batch import Batch, closed_error, on_loop, running_loop
from gazette_sdk.message.publishing.handover import Effect, Holder, Input
from gazette_sdk.message.publishing.link import Link
from gazette_sdk.message.publishing.outbox import Handed, Outbox
from gazette_sdk.message.publishing.receipt import Receipt
from gazette_sdk.protocol import broker_pb2 as pb

__all__ = ["HOLD_S", "Directs"]

HOLD_S = 0.004
"""What a message is held for its caller at most, times :attr:`Habit.trust`: so it is up to 48 ms,
but only for one message, as the habit ends there. Event loops are up to a millisecond late."""

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

# What runs for every message has them at hand: to look up a member of an enum costs a call.
_ADDED, _ADDED_TO_HOLD, _CLAIMED = Input.ADDED, Input.ADDED_TO_HOLD, Input.CLAIMED
_HOLD, _APPEND, _HELD = Effect.HOLD, Effect.APPEND, Holder.HELD


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
        self._looks_at = math.inf
        self._next_look: asyncio.TimerHandle | None = None

    # ------------------------------------------------------ under the lock

    def try_hold(self, outbox: Outbox, receipt: Receipt, link: Link | None) -> bool:
        """Hold a message that was just added to an outbox with the habit, if it can be.

        Args:
            outbox: of its journal.
            receipt: the message's.
            link: the publisher's connection, if there is one.

        Returns:
            Whether it is held. If not, the outbox's task is to be asked for.
        """
        happened = _ADDED
        now = 0.0
        watched = self._watched
        if (
            link is not None
            and (outbox in watched or len(watched) < WATCHED_MAX)
            and link.loop.is_running()
            and receipt.last <= BYTES_MAX
            and running_loop() is None
        ):
            now = time.monotonic()
            if outbox.way is None or now - outbox.held_at > WAY_S:
                self.loop = link.loop
                outbox.way = link.transport.direct(outbox.route_key)
            if outbox.way is not None:
                happened = _ADDED_TO_HOLD
        if outbox.step(happened) is not _HOLD:
            return False
        if outbox.claim is None:
            outbox.claim = _Claim(self, outbox)
        batch = receipt.batch
        batch.claim = outbox.claim
        outbox.held_at = batch.published_at = now
        watched[outbox] = None
        ends_at = now + HOLD_S * outbox.habit.trust
        if ends_at < self._looks_at:
            self._looks_at = ends_at
            assert self.loop is not None
            self.loop.call_soon_threadsafe(self._plan_look)
        return True

    # ---------------------------------------------------------- the lookout

    def _look(self) -> None:
        """On the loop: call in what nobody claimed, and look again while there may be more."""
        late = []
        with self.lock:
            now = time.monotonic()
            next_s = math.inf
            for outbox in list(self._watched):
                habit = outbox.habit
                left_s = outbox.held_at + HOLD_S * habit.trust - now
                if outbox.holder == _HELD:
                    if left_s > 0:
                        next_s = min(next_s, left_s)
                        continue
                    outbox.step(Input.CALLED_IN)
                    habit.broken()
                    late.append(outbox)
                elif left_s + LOOKOUT_S < 0:
                    del self._watched[outbox]
                    continue
                elif left_s > 0:
                    habit.lasts()
                next_s = min(next_s, HOLD_S * habit.trust)
            self._looks_at = now + next_s
        if late:
            self.wake(late)
        if self._watched:
            self._plan_look()

    def _plan_look(self) -> None:
        """On the loop: look when it is time."""
        if self._next_look is not None:
            self._next_look.cancel()
        wait_s = max(0.0, self._looks_at - time.monotonic())
        self._next_look = asyncio.get_running_loop().call_later(wait_s, self._look)


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
                if outbox.holder == _HELD:
                    self._caller = threading.get_ident()
                if outbox.step(_CLAIMED) is not _APPEND:
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
        ends_at = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            call = outbox.call = way.append(batch.whole_content(), timeout_s)
        except GazetteError as error:
            self._hand_over(Handed(batch, way, error=error))
            return
        left_s = None if ends_at is None else max(0.0, ends_at - time.monotonic())
        if not call.wait(left_s):
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
