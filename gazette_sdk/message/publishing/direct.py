"""Appends by the very thread that publishes, where messages come one by one.

The way to the event loop and back costs several times as much as an append, and more than that
where a core has to be woken for it. Once messages of an outbox come one by one, the thread that
publishes the next sends it by itself, without waiting for anything. The answer is looked for by
whoever waits for the receipt, or by whoever publishes the next message, to whom it is mostly there
already. If neither happens, the loop calls the answer in: after :data:`AWAY_S` where the habit is
new, later where it has lasted, since each look of the loop disturbs the callers.

A caller tries once. Whatever goes wrong, its batch goes back to the event loop, which knows what
to do about failures; who waits for it does so as if nobody had ever tried.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
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
from gazette_sdk.transport.append.direct import DirectJournal

__all__ = ["AWAY_S", "Caller", "Directs"]

AWAY_S = 0.004
"""An answer that nobody looks for is called in after that at most, times :attr:`Habit.trust`: so
it is up to 48 ms, but only for one message. Event loops are up to a millisecond late."""

LOOKOUT_S = 0.01
"""The loop looks after what is away for so long after the last one."""

WAY_S = 1.0
"""A way that was not used for so long is looked up again; one that fails is at once."""

PREPARE_S = 1.0
"""Where there is no connection for a journal at hand, one is asked for no more often."""

WATCHED_MAX = 64
"""Callers send to so many journals at a time: what is away is looked after together."""

BYTES_MAX = 128 << 10
"""What is longer costs little beside its content, and is the loop's. So much a socket takes at
once, without making its caller wait."""

EARLY_S = 0.001
"""Who publishes the next message before the last one is answered waits so long for that, once or
twice until the habit ends. A coroutine does not."""

TIMEOUT_MIN_S = 0.05
"""A caller who waits for less than that rather looks than waits."""

# What runs for every message has them at hand: to look up a member of an enum costs a call.
_ADDED_TO_SEND, _CLAIMED, _SENT = Input.ADDED_TO_SEND, Input.CLAIMED, Input.SENT
_SEND, _RECEIVE = Effect.SEND, Effect.RECEIVE
_AWAY = Holder.AWAY

_log = logging.getLogger(__name__)


class Directs:
    """Lets callers append, and looks after what they leave.

    Args:
        lock: the publisher's.
        settle: tells receipts how batches ended.
        wake: asks for the tasks of outboxes on the event loop; from any thread, and if need be
            more than once.

    Attributes:
        is_shut: what is pending is given up: callers leave what they have to the event loop.
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
        self.is_shut = False
        self._watched: dict[Outbox, float] = {}  # when they had sent last at the last look
        self._looks_at = math.inf
        self._next_look: asyncio.TimerHandle | None = None
        self._preparing: set[DirectJournal] = set()
        self._callers: dict[Outbox, Caller] = {}

    # ------------------------------------------------------ under the lock

    def take(self, outbox: Outbox, receipt: Receipt, link: Link | None) -> Caller | None:
        """Take a message that was just added to an outbox with the habit, if it may be sent.

        Args:
            outbox: of its journal. Nobody appends what it has.
            receipt: the message's.
            link: the publisher's connection, if there is one.

        Returns:
            What the caller has to send; None if the outbox's task is to be asked for.
        """
        watched = self._watched
        if (
            link is None
            or receipt.last > BYTES_MAX
            or not (outbox in watched or len(watched) < WATCHED_MAX)
            or not link.loop.is_running()
        ):
            return None
        now = time.monotonic()
        if outbox.way is None or now - outbox.sent_at > WAY_S:
            self.loop = link.loop
            outbox.way = link.transport.direct(outbox.route_key)
            if outbox.way is None:
                return None
        outbox.sent_at = now
        caller = self._callers.get(outbox)
        if caller is None:
            caller = self._callers[outbox] = Caller(self, outbox)
        caller.thread = threading.get_ident()
        caller.way = outbox.way
        caller.begin(outbox.step(_ADDED_TO_SEND))
        return caller

    def watch(self, outbox: Outbox) -> None:
        """See to it that somebody looks for an answer in time."""
        self._watched.setdefault(outbox, outbox.sent_at)
        ends_at = outbox.sent_at + AWAY_S * outbox.habit.trust
        if ends_at < self._looks_at:
            assert self.loop is not None
            self.loop.call_soon_threadsafe(self._plan_look, ends_at)
            self._looks_at = ends_at

    def interrupted(self, outbox: Outbox, error: BaseException) -> None:
        """Without the lock: a caller was interrupted, perhaps at work on something of an outbox."""
        caller = self._callers.get(outbox)
        if caller is not None:
            caller.interrupted(error)
        elif outbox.holder == Holder.LOOP:  # it may have been about to tell
            self.wake([outbox])

    # ---------------------------------------------------------- the lookout

    def _look(self) -> None:
        """On the loop: call in what nobody looks for, and look again while there may be more."""
        late = []
        with self.lock:
            now = time.monotonic()
            next_s = math.inf
            for outbox, known_at in list(self._watched.items()):
                habit = outbox.habit
                left_s = outbox.sent_at + AWAY_S * habit.trust - now
                is_away = outbox.holder == _AWAY
                if is_away and left_s <= 0:
                    outbox.step(Input.CALLED_IN)
                    habit.slackened()
                    late.append(outbox)
                elif left_s + LOOKOUT_S < 0:
                    del self._watched[outbox]
                    continue
                elif outbox.sent_at != known_at:  # somebody looked for the answer before
                    habit.lasts()
                self._watched[outbox] = outbox.sent_at
                next_s = min(next_s, left_s if is_away and left_s > 0 else AWAY_S * habit.trust)
            self._looks_at = now + next_s
        if late:
            self.wake(late)
        if self._watched:
            self._plan_look(self._looks_at)

    def _plan_look(self, at: float) -> None:
        """On the loop: look when it is time."""
        if self._next_look is not None:
            self._next_look.cancel()
        wait_s = max(0.0, at - time.monotonic())
        self._next_look = asyncio.get_running_loop().call_later(wait_s, self._look)

    # ---------------------------------------------------------- connections

    def prepare(self, way: DirectJournal) -> None:
        """Let a way get a connection, in the background. From any thread."""
        assert self.loop is not None
        with contextlib.suppress(RuntimeError):  # a loop that has ended needs none
            self.loop.call_soon_threadsafe(self._prepare, way)

    def _prepare(self, way: DirectJournal) -> None:
        if way in self._preparing:
            return
        try:
            preparing = asyncio.get_running_loop().run_in_executor(None, way.prepare)
        except RuntimeError:  # the program ends
            return
        self._preparing.add(way)
        preparing.add_done_callback(lambda ended: self._prepared(way, ended))

    def _prepared(self, way: DirectJournal, ended: asyncio.Future[None]) -> None:
        self._preparing.discard(way)
        if not ended.cancelled() and (error := ended.exception()) is not None:
            _log.debug("no connection of their own for callers: %s", error)


class Caller:
    """Who has the right to append what an outbox has, while that is a thread which publishes.

    There is one for each outbox, whichever thread it is. It is the
    :class:`~gazette_sdk.message.publishing.batch.Claim` of what it has sent.

    Attributes:
        thread: identifies the thread.
        way: how it sends.
    """

    __slots__ = ("_batch", "_directs", "_handed", "_outbox", "_prepares_at", "thread", "way")

    def __init__(self, directs: Directs, outbox: Outbox) -> None:
        self.thread = 0
        self.way = outbox.way
        self._directs = directs
        self._outbox = outbox
        self._batch: Batch | None = None  # taken, to be sent
        self._handed: Handed | None = None  # away, to be received
        self._prepares_at = 0.0

    # ------------------------------------------------------ who publishes

    def begin(self, effect: Effect) -> None:
        """Under the lock: the caller got the right to append."""
        if effect is _SEND:
            self._take_next()
        else:
            assert effect is _RECEIVE, effect
            self._handed, self._outbox.handed = self._outbox.handed, None

    def send(self) -> None:
        """Send the message that was taken, or leave it to the event loop."""
        handed = self._handed
        if handed is not None:
            call, habit = handed.call, self._outbox.habit
            assert call is not None, "it is away"
            is_early = not call.wait(0)
            if is_early:
                habit.strained()
                if running_loop() is not None or not call.wait(EARLY_S):
                    self._hand_on(handed)
                    return
            if not self._received(handed):
                return
            if not is_early:
                habit.kept()
            self._directs.settle([handed.batch], handed.begin)
            with self._directs.lock:
                self._take_next()
        if self._batch is None:  # somebody closed the publisher meanwhile
            self._leave()
        else:
            self._send(self._batch)

    def interrupted(self, error: BaseException) -> None:
        """The caller was interrupted: what it had begun must not be left lying."""
        outbox = self._outbox
        if outbox.holder == Holder.LOOP:  # it may have been about to tell
            self._directs.wake([outbox])
        if outbox.holder != Holder.CALLER or self.thread != threading.get_ident():
            return
        handed = self._handed or outbox.handed
        if handed is None:
            with self._directs.lock:
                batch = outbox.taken()
            if batch is None or batch.is_done:
                self._leave()
                return
            assert self.way is not None
            handed = Handed(batch, self.way, outbox.call)
        elif handed.batch.is_done:
            handed.batch.tell()
            self._leave()
            return
        if handed.call is not None:
            handed.call.give_up("its caller was interrupted")
        cause = CallCancelledError(f"interrupted: {error!r}", journal=outbox.journal)
        handed.batch.attempt_error = cause
        self._failed(handed.batch, handed.way, cause)

    # --------------------------------------------------- who waits for it

    def call_in(self) -> None:
        """See :class:`~gazette_sdk.message.publishing.batch.Claim`."""
        with self._directs.lock:
            effect = self._outbox.step(Input.CALLED_IN)
        if effect is Effect.WAKE:
            self._directs.wake([self._outbox])

    def wait(self, batch: Batch, timeout_s: float | None) -> None:
        """See :class:`~gazette_sdk.message.publishing.batch.Claim`."""
        if timeout_s is not None and timeout_s < TIMEOUT_MIN_S:
            self.call_in()
            return
        if on_loop():
            return  # who waits there is refused
        outbox = self._outbox
        try:
            with self._directs.lock:
                if batch.is_done:
                    return
                if outbox.holder == _AWAY:
                    self.thread = threading.get_ident()
                if outbox.step(_CLAIMED) is not _RECEIVE:
                    return
                self.begin(_RECEIVE)
                handed = self._handed
                assert handed is not None
                call = outbox.call = handed.call
            assert call is not None, "it is away"
            if not call.wait(timeout_s):
                self._hand_on(handed)
            elif self._received(handed):
                outbox.note_habit(batch)
                if not self._directs.settle([batch], handed.begin, outbox):
                    self._leave()
        except BaseException as error:
            self.interrupted(error)
            raise

    # ---------------------------------------------------------------- parts

    def _take_next(self) -> None:
        """Under the lock."""
        self._handed = None
        batch = self._batch = self._outbox.take()
        if batch is not None:
            batch.claim = self

    def _send(self, batch: Batch) -> None:
        outbox, way = self._outbox, self.way
        assert way is not None
        if batch.length_bytes > BYTES_MAX:  # others added to it
            self._hand_on(Handed(batch, way))
            return
        try:
            call = outbox.call = way.append(batch.whole_content())
        except GazetteError as error:
            self._failed(batch, way, error)
            return
        if call is None:
            self._prepare(way)
            self._hand_on(Handed(batch, way))
            return
        handed = Handed(batch, way, call)
        with self._directs.lock:
            is_for_loop = outbox.has_waiting or batch.is_awaited or self._directs.is_shut
            if not (is_for_loop or call.over):
                outbox.call = None
                outbox.handed = handed
                self._batch = None
                outbox.step(_SENT)
                self._directs.watch(outbox)
                return
        outbox.habit.broken()
        self._hand_on(handed)

    def _prepare(self, way: DirectJournal) -> None:
        now = time.monotonic()
        if now >= self._prepares_at:
            self._prepares_at = now + PREPARE_S
            self._directs.prepare(way)

    def _received(self, handed: Handed) -> bool:
        """Whether the append that has ended is good; if not, the event loop goes on."""
        batch, way, call, outbox = handed.batch, handed.way, handed.call, self._outbox
        assert call is not None
        try:
            response = call.response()
            has_news = way.check(response)
        except GazetteError as error:
            batch.attempt_error = error
            self._failed(batch, way, error)
            return False
        if response.status != pb.OK:  # nothing was written, and the loop knows what to do
            self._failed(batch, way)
            return False
        if has_news:
            self._tell(way.learn, response)
            outbox.way = None
        batch.note(response)
        handed.begin = response.commit.begin
        outbox.call = None
        return True

    def _failed(self, batch: Batch, way: DirectJournal, error: Exception | None = None) -> None:
        self._outbox.habit.broken()
        self._hand_on(Handed(batch, way, error=error))

    def _leave(self) -> None:
        """What the caller had has ended."""
        outbox = self._outbox
        with self._directs.lock:
            outbox.call = None
            self._batch = self._handed = None
            if outbox.rest():
                return
            outbox.step(Input.HANDED_ON)
        self._directs.wake([outbox])

    def _hand_on(self, handed: Handed) -> None:
        """Let the event loop go on with a batch."""
        outbox = self._outbox
        with self._directs.lock:
            outbox.call = None
            if handed.call is None:
                outbox.way = None
            self._batch = self._handed = None
            outbox.handed = handed
            outbox.step(Input.HANDED_ON)
        try:
            self._directs.wake([outbox])
        except RuntimeError:  # the loop has ended, and with it the publisher
            handed.give_up()
            with self._directs.lock:
                outbox.handed = None
                behind = outbox.drop()
            self._directs.settle([handed.batch, *behind], closed_error())

    def _tell(self, call: Callable[[pb.AppendResponse], None], response: pb.AppendResponse) -> None:
        assert self._directs.loop is not None
        with contextlib.suppress(RuntimeError):  # a loop that has ended needs no routes
            self._directs.loop.call_soon_threadsafe(call, response)
