"""Messages of one journal on their way: stamped, encoded, batched, appended.

The thread that publishes does all the work for its message, under the publisher's lock: so a
later clock never stands before an earlier one in a journal. The event loop is woken once for
a batch, not for a message: while one append is in flight, what is published meanwhile gathers
in the next.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from gazette_sdk.errors import GazetteError, ValidationError
from gazette_sdk.framing import Framing, JsonLines
from gazette_sdk.message.kinds import kind_of
from gazette_sdk.message.kinds.base import Kind
from gazette_sdk.message.publishing.batch import Batch
from gazette_sdk.message.publishing.handover import TABLE, Effect, Habit, Holder, Input
from gazette_sdk.message.publishing.receipt import Receipt
from gazette_sdk.message.uuid import Stamp
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.names import strip_meta
from gazette_sdk.transport.append.direct import DirectCall, DirectJournal

__all__ = ["Handed", "Outbox"]

BATCH_BYTES_MAX = 4 << 20
"""A batch which is larger takes no further messages: a failed attempt sends all of it again, and
its first message waits for the last."""


STREAMING_COUNT_MIN = 16
"""A batch of so many messages says that its journal is being streamed to."""

_NEWLINE = 0x0A

# What runs for every message has them at hand: to look up a member of an enum costs a call.
_EMPTIED, _IMPOSSIBLE = Input.EMPTIED, Effect.IMPOSSIBLE

LINGER_BYTES_MAX = 256 << 10
"""A batch of this size costs little beside its content, and waits for nothing."""


class Handed:
    """A batch which its caller has sent, or could not send, for somebody else to go on with.

    Args:
        batch: the batch.
        way: how its caller tried.
        call: the append, if it is still under way.
        error: why it failed otherwise, if it did.

    Attributes:
        batch: the batch.
        way: how its caller tried.
        call: the append, if it is still under way.
        begin: offset of the batch's first byte, once its append has ended well.
    """

    __slots__ = ("_error", "batch", "begin", "call", "way")

    def __init__(
        self,
        batch: Batch,
        way: DirectJournal,
        call: DirectCall | None = None,
        error: Exception | None = None,
    ) -> None:
        self.batch = batch
        self.way = way
        self.call = call
        self.begin = 0
        self._error = error

    def give_up(self) -> None:
        """Nobody will go on with it."""
        self.batch.has_failed = True
        if self.call is not None:
            self.call.give_up("the publisher was closed")

    async def finish(self) -> pb.AppendResponse | None:
        """The good response of the append under way; None if it must be appended again."""
        if self.call is not None:
            await self.call.finish()
            try:
                response = self.call.response()
                self.way.check(response)
            except GazetteError as error:
                self.batch.attempt_error = self._error = error
            else:
                return response if response.status == pb.OK else None
        if self._error is not None:
            self.way.failed(self._error)
        return None


class Outbox:
    """What is published to one journal and not appended yet.

    All methods are called under the publisher's lock.

    Args:
        journal: name of the journal.
        framing: its framing.

    Attributes:
        journal: name of the journal.
        framing: its framing.
        route_key: the journal's name without metadata.
        sender: the task that appends its batches, while there are some.
        holder: who has the right to append.
        habit: whether its messages come one by one.
        sent_at: when a caller sent one the last time, in monotonic seconds.
        way: how callers send.
        call: the append of a caller who waits for it.
        handed: what a caller left: an append that is away, or anything for the event loop.
    """

    def __init__(self, journal: str, framing: Framing) -> None:
        self.journal = journal
        self.framing = framing
        self.sender: asyncio.Task[None] | None = None
        self.holder = Holder.NOBODY
        self.habit = Habit()
        self.sent_at = 0.0
        self.way: DirectJournal | None = None
        self.call: DirectCall | None = None
        self.handed: Handed | None = None
        self.route_key = strip_meta(journal)
        self._is_lines = type(framing) is JsonLines
        self._encoders: dict[type, Kind[Any]] = {}
        self._batches: deque[Batch] = deque()
        self._sent: list[Batch] = []
        self._is_flowing = False  # the last batch was one of many messages

    def add(self, message: Any, stamp: Stamp) -> Receipt:
        """Encode a message at the end of what waits.

        Raises:
            ValidationError: it cannot be encoded; nothing was added.
            FramingError: likewise.
        """
        kind = self._encoders.get(type(message)) or self.kind(type(message))
        payload = kind.encode(message, stamp)
        batches = self._batches
        batch = batches[-1] if batches else None
        if batch is None or batch.parts_bytes + len(batch.content) >= BATCH_BYTES_MAX:
            batch = Batch(self.journal)
        content = batch.content
        begin = len(content)
        try:
            if self._is_lines and _NEWLINE not in payload:
                # What JsonLines does, without the call: this is done for every message.
                content += payload
                content += b"\n"
            else:
                self.framing.encode(payload, content)
            batch.count += 1
            if batch.count == 1:
                batches.append(batch)
        except BaseException:  # an interruption must not leave half a frame
            del content[begin:]
            raise
        sealed = batch.parts_bytes
        return Receipt(batch, sealed + begin, sealed + len(content))

    def add_frames(self, frames: bytes, count: int) -> tuple[Batch, int]:
        """Add whole frames at the end of what waits; returns the batch, and where they begin."""
        batch = self._batches[-1] if self._batches else None
        if batch is None or batch.length_bytes >= BATCH_BYTES_MAX:
            batch = Batch(self.journal)
            self._batches.append(batch)
        begin = batch.length_bytes
        batch.add_part(frames)
        batch.count += count
        return batch, begin

    def frame(self, message: Any, stamp: Stamp) -> bytes:
        """The frame of a message, without adding it.

        Raises:
            ValidationError: it cannot be encoded.
            FramingError: likewise.
        """
        kind = self._encoders.get(type(message)) or self.kind(type(message))
        out = bytearray()
        self.framing.encode(kind.encode(message, stamp), out)
        return bytes(out)

    @property
    def is_streaming(self) -> bool:
        """Whether messages come so quickly that the next batch is worth a moment's wait.

        An append costs as much as encoding some hundred messages.
        """
        if not self._is_flowing:
            return False
        return not self._batches or self._batches[0].length_bytes < LINGER_BYTES_MAX

    def step(self, happened: Input) -> Effect:
        """Feed the machine of :mod:`~gazette_sdk.message.publishing.handover`."""
        effect, self.holder = TABLE[self.holder][happened]
        assert effect is not _IMPOSSIBLE, (self.holder, happened)
        return effect

    def rest(self) -> bool:
        """Give the right to append back, if nothing waits, nor is likely to come at once."""
        if self._batches or self._is_flowing:
            return False
        self._sent.clear()
        self.sender = None
        self.step(_EMPTIED)
        return True

    def note_habit(self, batch: Batch) -> None:
        """A batch was acknowledged: did its message come alone?"""
        if batch.count == 1 and not self._batches:
            self.habit.kept()
        else:
            self.habit.broken()

    def lose_way(self) -> None:
        """What a caller sent has failed: others look for another way, once there is the habit."""
        self.habit.broken()
        self.way = None

    @property
    def has_waiting(self) -> bool:
        """Whether anything waits to be taken."""
        return bool(self._batches)

    @property
    def waits_largely(self) -> bool:
        """Whether the next batch is so large that it is worth an append of its own."""
        return bool(self._batches) and self._batches[0].length_bytes >= LINGER_BYTES_MAX

    def take(self) -> Batch | None:
        """The oldest batch, which then takes no further messages; None if nothing waits."""
        if self._sent:
            self._sent = self.sent()
        if not self._batches:
            self._is_flowing = False
            return None
        batch = self._batches[0]
        self._is_flowing = batch.count >= STREAMING_COUNT_MIN
        self._sent.append(batch)
        self._batches.popleft()
        return batch

    def taken(self) -> Batch | None:
        """What was taken and has not ended, though taking it may have been interrupted."""
        batch = next(iter(self.sent()), None)
        if batch is not None and self._batches and self._batches[0] is batch:
            self._batches.popleft()
        return batch

    def sent(self) -> list[Batch]:
        """Batches which were taken and are not acknowledged, oldest first."""
        return [batch for batch in self._sent if not batch.is_done]

    def pending(self) -> list[Batch]:
        """Batches which are not acknowledged, oldest first."""
        return [*self.sent(), *self._batches]

    def drop(self) -> list[Batch]:
        """Everything that waits, which then will not be sent."""
        dropped = list(self._batches)
        self._batches.clear()
        for batch in dropped:
            batch.has_failed = True
        return dropped

    def kind(self, message_type: type[Any]) -> Kind[Any]:
        """The adapter of a class of messages.

        Raises:
            ValidationError: its objects can carry no UUID, or have no such form.
        """
        try:
            kind = kind_of(message_type, self.framing.form)
        except ValidationError as error:
            reason = f"{self.journal}: {error.reason}"
            raise ValidationError(reason, kind=error.kind, journal=self.journal) from error
        self._encoders[message_type] = kind
        return kind
