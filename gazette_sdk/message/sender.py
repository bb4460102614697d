"""Sends the messages of a publisher: validates, maps, stamps and encodes them.

A publisher is one producer for messages outside of transactions, and as many others as it has had
transactions open at once (:class:`Sequences`): of one producer, at most one sequence of messages
can be open in a journal, and a message outside of it would discard that (message section 11). Their
messages to a journal share its :class:`Outbox`, and so its appends.

:class:`AckIntents` are what is left to be written of a transaction that is decided. A transaction
over several journals is acknowledged in each of them by one message. These are built when
everything else is durable, can be stored together with whatever the transaction stands for, and can
be written again after a crash: readers take an acknowledgement which they have seen before for the
duplicate that it is (message section 11).

:class:`Deferred` holds calls of ``publish`` that were made on the publisher's event loop before
their journals are listed. That loop must not be blocked, and the first listing comes over it: until
then the calls wait, in their order.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from collections.abc import Mapping as AbstractMapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

from google.protobuf.message import DecodeError

from gazette_sdk.errors import (
    BackPressureError,
    ClosedError,
    FramingError,
    MappingError,
    ValidationError,
)
from gazette_sdk.errors import DecodeError as DamagedError
from gazette_sdk.framing import JsonLines, framing_for
from gazette_sdk.framing.base import NO_FRAMING_REMEDY
from gazette_sdk.message.checkpoint import sealed, unsealed
from gazette_sdk.message.kinds import kind_of, known_kind
from gazette_sdk.message.kinds.base import Kind
from gazette_sdk.message.mapping import Mapping as JournalMapping
from gazette_sdk.message.mapping import (
    Partitions,
    SelectorMapping,
    Watches,
    check_mapping,
    checked_journal,
)
from gazette_sdk.message.receipt import Receipt
from gazette_sdk.message.uuid import (
    ACK_TXN,
    CONTINUE_TXN,
    OUTSIDE_TXN,
    PRODUCER_BYTES,
    Clock,
    Stamp,
    new_producer_id,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2
from gazette_sdk.tracing import ROOM_BYTES, SendTraces, enabled, traceparent_of
from gazette_sdk.transport.append.appender import AppendService, JournalAppender
from gazette_sdk.transport.append.queue import AnyFuture, PendingAppend
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.connect import connect
from gazette_sdk.transport.loop import (
    OwnedLock,
    check_reentry,
    guarded,
    home_loop,
    is_in_coroutine,
    is_running,
    new_lock,
    on_loop,
    reentrant_call,
    run,
    sdk_loop,
)
from gazette_sdk.user_code import call


class AckIntents(AbstractMapping[str, bytes]):
    """The framed acknowledgement of each journal of a transaction, in the order of first use.

    Args:
        frames: by journal.
    """

    __slots__ = ("_frames",)

    def __init__(self, frames: AbstractMapping[str, bytes] | None = None) -> None:
        self._frames = dict(frames or {})

    def __getitem__(self, journal: str) -> bytes:
        return self._frames[journal]

    def __iter__(self) -> Iterator[str]:
        return iter(self._frames)

    def __len__(self) -> int:
        return len(self._frames)

    def __hash__(self) -> int:
        return hash(frozenset(self._frames.items()))

    def to_bytes(self) -> bytes:
        """Return a stored ``Checkpoint`` that holds nothing else, with a checksum."""
        message = consumer_pb2.Checkpoint(ack_intents=self._frames)
        return sealed(message.SerializeToString(deterministic=True))

    @classmethod
    def from_bytes(cls, stored: bytes) -> AckIntents:
        """Intents which :meth:`to_bytes` wrote, or those of a stored checkpoint.

        Raises:
            ValidationError: ``stored`` is no checkpoint, or is damaged.
        """
        try:
            checkpoint = consumer_pb2.Checkpoint.FromString(unsealed(bytes(stored)))
        except (DamagedError, DecodeError, TypeError, ValueError) as error:
            raise ValidationError(
                f"these {len(stored)} bytes are no stored acknowledgement intents: {error}",
                kind="ack_intents",
            ) from error
        return cls(checkpoint.ack_intents)

    def __repr__(self) -> str:
        return f"<AckIntents of {', '.join(self._frames) or 'no journal'}>"


NEWLINE = 0x0A


class JournalEncoder:
    """Encoder of messages as frames of one journal.

    Args:
        journal: name of the journal.
        content_type: of the journal's label.

    Attributes:
        framing: its framing.
        frame_bytes_max: greatest length of a frame, which readers take.
        is_lines: the framing is that of JSON lines.
        journal: name of the journal.
        kinds: adapters of the classes of messages that were published to it.
        record_fields: number of fields of its records, which the first one fixes; 0 before it, and
            of framings whose messages may differ.

    Raises:
        FramingError: the content type has no framing.
    """

    __slots__ = ("frame_bytes_max", "framing", "is_lines", "journal", "kinds", "record_fields")

    def __init__(self, journal: str, content_type: str) -> None:
        self.journal = journal
        try:
            self.framing = framing_for(content_type)
        except FramingError as error:
            raise FramingError(
                f"{self.journal}: {error}; {NO_FRAMING_REMEDY}", journal=self.journal
            ) from error
        self.frame_bytes_max = self.framing.frame_bytes_max
        self.is_lines = type(self.framing) is JsonLines
        self.kinds: dict[type, Kind[Any]] = {}
        self.record_fields = 0

    def fields_of(self, kind: Kind[Any], message: Any) -> int:
        """Return the number of fields that the journal's records have with this one.

        Raises:
            ValidationError: it is another number than that of the records before.
        """
        count = kind.record_fields(message)
        if self.record_fields not in {0, count}:
            raise ValidationError(
                f"{self.journal}: a record of {count} fields, after records of"
                f" {self.record_fields}: readers would refuse it; publish records of one number of"
                " fields, and others to another journal",
                kind="message",
                journal=self.journal,
            )
        return count

    def encode(self, payload: bytes, content: bytearray) -> int:
        """Append the frame of a payload, and return its length.

        Raises:
            FramingError: it cannot be framed; nothing was added.
            ValidationError: the frame is too long; nothing was added.
        """
        begin = len(content)
        try:
            call(self.framing.encode, payload, content)
        except BaseException:  # half a frame must not stay
            del content[begin:]
            raise
        length_bytes = len(content) - begin
        if length_bytes > self.frame_bytes_max:
            del content[begin:]
            raise self.oversized(length_bytes)
        return length_bytes

    def oversized(self, length_bytes: int) -> ValidationError:
        """Return the error of a frame that readers do not take."""
        return ValidationError(
            f"{self.journal}: a message of {length_bytes} bytes is longer than"
            f" {self.frame_bytes_max} bytes, which readers take at most: publish it in parts, or"
            " store it elsewhere and publish where; a longer"
            f" {type(self.framing).__name__}.frame_bytes_max must be set in all readers, too",
            kind="message",
            journal=self.journal,
        )

    def frame(self, message: Any, stamp: Stamp) -> bytes:
        """Return the frame of a message, without adding it.

        Raises:
            ValidationError: it cannot be encoded, or has another number of fields.
            FramingError: it cannot be encoded.
        """
        kind = self.kinds.get(type(message)) or self.kind(type(message))
        count = self.fields_of(kind, message)
        out = bytearray()
        self.encode(kind.encode(message, stamp), out)
        self.record_fields = count
        return bytes(out)

    def check_frames(self, content: object) -> None:
        """Check that bytes are whole frames of the journal.

        Raises:
            ValidationError: they are not; readers would refuse them, or what follows.
        """
        if isinstance(content, bytes):
            found = self.framing.stream().cut(content)
            if len(found) and found.error is None and found.consumed == len(content):
                return
        raise ValidationError(
            f"{self.journal}: the acknowledgement is no frame of this journal; give intents as"
            " `save` got them",
            kind="ack_intents",
            journal=self.journal,
        )

    def kind(self, message_type: type[Any]) -> Kind[Any]:
        """Return the adapter of a class of messages.

        Raises:
            ValidationError: its objects can carry no UUID, or have no such form.
        """
        try:
            kind = kind_of(message_type, self.framing.form)
        except ValidationError as error:
            reason = f"{self.journal}: {error.reason}"
            raise ValidationError(reason, kind=error.kind, journal=self.journal) from error
        self.kinds[message_type] = kind
        return kind


class Outbox(JournalEncoder):
    """Messages of one journal on their way into its appends.

    The thread that publishes encodes its message, under the publisher's lock: so a later clock
    never stands before an earlier one in a journal.

    Args:
        appender: of the journal.
        content_type: of the journal's label.

    Attributes:
        appender: of the journal.
        tail: returns the append that takes the next frame.

    Raises:
        FramingError: the content type has no framing.
    """

    __slots__ = ("appender", "tail")

    def __init__(self, appender: JournalAppender, content_type: str) -> None:
        super().__init__(appender.journal, content_type)
        self.appender = appender
        self.tail = appender.queue.tail

    def add_frames(
        self, frames: bytes, after: frozenset[AnyFuture] = frozenset()
    ) -> tuple[PendingAppend, int]:
        """Add whole frames to the append that takes them. The lock is held.

        Args:
            frames: the frames.
            after: futures that must succeed before they are sent.

        Returns:
            The append, to be pushed to the appender, and the frames' position in it.
        """
        append = self.tail(None, after)
        begin = append.length_bytes
        append.add_part(frames)
        return append, begin


BATCH_BYTES_MAX = 4 << 20
"""An append of this length takes no further messages: a failed attempt sends all of it again, and
its first message waits for the last."""


class PublisherConnection:
    """Connection of a publisher, from its first message until it is closed.

    It works on the event loop on which the publisher is first used; in plain code, on the SDK's.

    Args:
        transport: how to reach the cluster; None connects to ``GAZETTE_ADDRESS``, and closes
            that connection at the end.
        lock: the publisher's, which guards all queues.
        is_background: it works on the SDK's background loop.
        pending_bytes_max: bound of messages that are not acknowledged.
        delivery_timeout_s: bound of the time to the acknowledgement; None for none.
        mapping_timeout_s: bound of waits for listings; None for none.
        on_settled: called with appends that end, under the lock.
    """

    def __init__(
        self,
        transport: Transport | None,
        lock: OwnedLock,
        *,
        is_background: bool,
        pending_bytes_max: int,
        delivery_timeout_s: float | None,
        mapping_timeout_s: float | None,
        on_settled: Callable[[list[PendingAppend], Exception | None], None],
    ) -> None:
        self._is_owner = transport is None
        self.transport = connect() if transport is None else transport
        self.loop = loop_of(self.transport, is_background=is_background)
        self.appends = AppendService(
            self.transport,
            loop=self.loop,
            lock=lock,
            batch_bytes_max=BATCH_BYTES_MAX,
            pending_bytes_max=pending_bytes_max,
            delivery_timeout_s=delivery_timeout_s,
            is_sticky=False,
            on_settled=on_settled,
        )
        self.watches = Watches(self.transport, mapping_timeout_s)
        self._closing: asyncio.Task[None] | None = None

    def close(self, deferred: Deferred) -> None:
        """Close everything, from plain code; what is pending is given up.

        On the event loop itself nothing can be waited for: there it is closed soon.

        Args:
            deferred: calls to give up.
        """
        if not self.loop.is_running():
            self.appends.abandon()
        elif is_running(self.loop):
            self._close_soon(deferred)
        else:
            run(self._aclose(deferred), loop=self.loop)

    async def aclose(self, deferred: Deferred) -> None:
        """As :meth:`close`, in a coroutine."""
        if self.loop.is_running():
            await on_loop(self.loop, self._aclose(deferred))
        else:
            self.appends.abandon()

    def abandon(self) -> None:
        """Close it some time soon, from any thread; of a publisher that no one closed."""
        # A loop that has ended took its tasks and connections with it.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._close_soon)

    def _close_soon(self, deferred: Deferred | None = None) -> None:
        self._closing = self.loop.create_task(self._aclose(deferred))

    async def _aclose(self, deferred: Deferred | None) -> None:
        if deferred is not None:
            await deferred.aclose()
        await self.watches.aclose()
        await self.appends.aclose()
        if self._is_owner:
            await self.transport.aclose()


def loop_of(transport: Transport | None, *, is_background: bool) -> asyncio.AbstractEventLoop:
    """Return the event loop of a publisher that is first used now."""
    fixed = None if transport is None else transport.loop
    return (fixed or sdk_loop()) if is_background else home_loop(fixed)


DEFERRED_MAX = 10_000
"""Bound of calls that wait."""

_NO_RESPONSE = pb.AppendResponse()
"""Outcome of a placeholder that was replaced."""


class _Following(Protocol):
    """Receipt that becomes another once its message is mapped."""

    def follow(self, receipt: Any, /) -> None: ...


R = TypeVar("R", bound=_Following)


@dataclass(slots=True)
class _Call:
    publish: Callable[[], Awaitable[Any]]
    receipt: _Following
    placeholder: PendingAppend
    has_transaction: bool


class Deferred:
    """Queue of calls, in order. Belongs to the publisher's event loop.

    Args:
        sender: the publisher's.

    Attributes:
        calls: oldest first.
    """

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self.calls: deque[_Call] = deque()
        self._publishing: asyncio.Task[None] | None = None

    def add(
        self,
        publish: Callable[[], Awaitable[R]],
        new_receipt: Callable[[PendingAppend], R],
        sequences: Sequences | None = None,
    ) -> R:
        """Make a call when those before it are made.

        Args:
            publish: makes it, and returns the receipt which the caller's becomes then.
            new_receipt: returns the caller's receipt, which waits for a placeholder until then.
            sequences: of its transaction, which reports a failure; else ``flush`` does.

        Raises:
            BackPressureError: too many wait.
            ClosedError: the publisher is closed.
        """
        loop = self._sender.connection().loop
        if self._sender.is_closed:
            raise self._sender.closed_error()
        if len(self.calls) >= DEFERRED_MAX:
            raise BackPressureError(
                f"{DEFERRED_MAX} messages wait for the first listing of their journals;"
                " `await publisher.ready()` before publishing"
            )
        placeholder = PendingAppend(loop=loop)
        receipt = new_receipt(placeholder)
        self.calls.append(_Call(publish, receipt, placeholder, sequences is not None))
        if sequences is not None:
            sequences.deferred.append(placeholder)
        if self._publishing is None or self._publishing.done():
            self._publishing = loop.create_task(self._publish())
        return receipt

    def pending(self) -> list[PendingAppend]:
        """Return the futures of the calls that wait; they end when the calls were made."""
        return [call.placeholder for call in list(self.calls)]

    async def aclose(self) -> None:
        """Give up the calls that wait."""
        if self._publishing is not None:
            self._publishing.cancel()
            await asyncio.wait([self._publishing])
        for waiting in self.calls:
            waiting.placeholder.settle(self._sender.closed_error())
        self.calls.clear()

    async def _publish(self) -> None:
        while self.calls:
            call = self.calls[0]
            try:
                call.receipt.follow(await call.publish())
                call.placeholder.settle(_NO_RESPONSE)
            except BackPressureError:
                await self._sender.room()
                continue
            except asyncio.CancelledError:
                call.placeholder.settle(self._sender.closed_error())
                self.calls.popleft()
                raise
            except BaseException as error:  # noqa: BLE001 - receipt and flush raise it
                call.placeholder.settle(error)
                if not call.has_transaction:
                    self._sender.note_failure(error)
            self.calls.popleft()


class Producer:
    """Producer id with its clock, used by one transaction after the other.

    Attributes:
        stamp: writes its UUIDs.
        acknowledged: the clock of its last acknowledgement, by journal.
    """

    def __init__(self) -> None:
        self.stamp = Stamp(new_producer_id())
        self.stamp.flags = CONTINUE_TXN
        self.acknowledged: dict[str, int] = {}


@dataclass(slots=True)
class Part:
    """Messages of a transaction to one journal.

    Attributes:
        outbox: the journal's.
        acknowledgement: the message that will end it.
        first_clock: clock of the first message.
        appends: appends of the messages, without those that are known to be acknowledged.
        was_retried: one of those was written after a failed attempt.
    """

    outbox: Outbox
    acknowledgement: Any
    first_clock: int
    appends: list[PendingAppend] = field(default_factory=list)
    was_retried: bool = False

    def note(self, append: PendingAppend) -> None:
        """Note an append that carries messages, or the acknowledgement."""
        if self.appends and self.appends[-1] is append:
            return
        self.forget_acknowledged()
        self.appends.append(append)

    def forget_acknowledged(self) -> None:
        """Forget appends that were acknowledged."""
        kept = []
        for append in self.appends:
            if append.done() and append.failure is None:
                self.was_retried |= append.last_error is not None
            else:
                kept.append(append)
        self.appends = kept

    @property
    def is_in_doubt(self) -> bool:
        """A failed attempt may yet write messages, also after what ends their sequence."""
        self.forget_acknowledged()
        return bool(self.appends) or self.was_retried

    @property
    def failed(self) -> PendingAppend | None:
        """The first append that failed for good, if any did."""
        return next((append for append in self.appends if append.failure is not None), None)


class Sequences:
    """Sequences of messages that a transaction has open, one in each journal.

    Args:
        sender: the publisher's, whose producers are reused.
        producer: the producer of the messages, of which nothing else is open and not ended;
            without one, any of the sender's.

    Attributes:
        parts: by journal, in the order of first use.
        deferred: futures of calls that wait for a first listing.
        is_ended: messages are refused.

    Raises:
        ClosedError: the publisher is closed.
    """

    def __init__(self, sender: Sender, producer: Producer | None = None) -> None:
        self.parts: dict[str, Part] = {}
        self.deferred: list[PendingAppend] = []
        self.is_ended = False
        self._sender = sender
        self._acknowledgements: dict[str, Any] = {}
        self._clocks: dict[str, int] = {}  # of the acknowledgements, once they are built
        with guarded(sender.lock):
            if sender.is_closed:
                raise sender.closed_error()
            idle = sender.idle_producers
            self._producer = producer or (idle.pop() if idle else Producer())

    @property
    def stamp(self) -> Stamp:
        """Stamp of the next message. The lock is held.

        Raises:
            ClosedError: the transaction has ended.
        """
        if self.is_ended:
            raise ended_error()
        return self._producer.stamp

    def expect(self, outbox: Outbox, message: Any) -> None:
        """Prepare the acknowledgement of a message that will be added.

        Raises:
            GazetteError: an earlier append of the transaction to the journal has failed.
            Exception: whatever the message's own ``new_acknowledgement`` raises.
        """
        part = self.parts.get(outbox.journal)
        if part is not None:
            if part.appends and (failure := part.appends[-1].failure) is not None:
                raise failure
            return
        if outbox.journal not in self._acknowledgements:
            kind = outbox.kind(type(message))
            acknowledgement = kind.new_acknowledgement(message, outbox.journal)
            outbox.frame(acknowledgement, Stamp(bytes(PRODUCER_BYTES)))  # an error is raised now
            self._acknowledgements.setdefault(outbox.journal, acknowledgement)

    def note(self, outbox: Outbox, append: PendingAppend, clock: int) -> None:
        """Note a message that was added. The lock is held."""
        part = self.parts.get(outbox.journal)
        if part is None:
            acknowledgement = self._acknowledgements[outbox.journal]
            part = self.parts[outbox.journal] = Part(outbox, acknowledgement, clock)
        part.note(append)

    # --------------------------------------------------------------- their end

    def end(self) -> AckIntents:
        """Refuse further messages, and build the acknowledgement of each journal.

        Raises:
            ClosedError: the transaction has ended.
        """
        clock = self._sender.clock
        with guarded(self._sender.lock):
            stamp = self.stamp
            self.is_ended = True
            frames = {}
            for journal, part in self.parts.items():
                if clock is None:
                    stamp.tick_now()
                else:
                    stamp.clock = clock.tick()
                frames[journal] = self._acknowledging_frame(part, stamp.clock)
                self._clocks[journal] = stamp.clock
            return AckIntents(frames)

    def acknowledge(
        self, intents: AbstractMapping[str, bytes], after: frozenset[AnyFuture] = frozenset()
    ) -> list[PendingAppend] | None:
        """Write the acknowledgements after all messages.

        Args:
            intents: what :meth:`end` returned.
            after: futures that must succeed before. What is published later waits for them, too.

        Returns:
            Their appends; None if an append of the messages has failed.

        Raises:
            ClosedError: the publisher is closed.
        """
        with guarded(self._sender.lock):
            if any(part.failed for part in self.parts.values()):
                return None
            frames = [(part.outbox, intents[name]) for name, part in self.parts.items()]
            added, must_send = self._sender.add_frames(frames, after)
        for appender in must_send:
            appender.send()
        return [append for append, _, _ in added]

    def roll_back(self) -> list[PendingAppend]:
        """Refuse further messages, and write the frames that discard those of each journal.

        Such a frame repeats the last acknowledged clock.

        Raises:
            ClosedError: the publisher is closed.
        """
        acknowledged = self._producer.acknowledged
        with guarded(self._sender.lock):
            self.is_ended = True
            frames = []
            for journal, part in self.parts.items():
                clock = acknowledged.setdefault(journal, part.first_clock - 1)
                frames.append((part.outbox, self._acknowledging_frame(part, clock)))
            added, must_send = self._sender.add_frames(frames)
        for appender in must_send:
            appender.send()
        return [append for append, _, _ in added]

    def reuse_producer(self, *, is_acknowledged: bool) -> None:
        """Give the producer to later transactions, as nothing of this one can be written any more.

        Args:
            is_acknowledged: the transaction was acknowledged in all journals; else rolled back.
        """
        if is_acknowledged:
            self.note_acknowledged()
        with guarded(self._sender.lock):
            self._sender.idle_producers.append(self._producer)

    def note_acknowledged(self) -> None:
        """Have later roll-backs of the producer keep what is acknowledged here.

        The acknowledgements may be queued still: a roll-back is written after them.
        """
        self._producer.acknowledged.update(self._clocks)

    def _acknowledging_frame(self, part: Part, clock: int) -> bytes:
        """Return the frame that ends the sequence of one journal."""
        stamp = self._producer.stamp
        stamp.flags, stamp.clock, before = ACK_TXN, clock, stamp.clock
        try:
            return part.outbox.frame(part.acknowledgement, stamp)
        finally:
            stamp.flags, stamp.clock = CONTINUE_TXN, before


def ended_error() -> ClosedError:
    """Return the error of use of a transaction that has ended."""
    return ClosedError("the transaction has ended: begin another with publisher.transaction()")


def _both(
    validate: Callable[[Any], object] | None, check: Callable[[Any], object]
) -> Callable[[Any], object]:
    if validate is None:
        return check

    def both(message: Any) -> None:
        call(validate, message)
        check(message)

    return both


DOUBT_MAX = 8
"""Journals that an error names at most."""


class Sender:
    """Producer of messages: its id, its clock, its outboxes, and what is not acknowledged yet.

    Any thread may publish. One lock guards stamping, encoding and the queues of all journals.
    Plain code waits for journals that are not listed yet. On the publisher's loop nothing can
    wait: there the calls are deferred until the journals are listed.

    Args:
        transport: how to reach the cluster; None connects to ``GAZETTE_ADDRESS``.
        clock: a shared clock; None follows the wall clock.
        mapping: where none is given with the messages.
        pending_bytes_max: bound of encoded messages which are not acknowledged.
        blocks: threads wait for room; else they get an error.
        delivery_timeout_s: bound of the time to the acknowledgement; None for none.
        mapping_timeout_s: bound of waits for listings; None for none.
        validates: messages are checked to be readable: all, none, or, None, the first of a class.

    Attributes:
        outboxes: by journal.
        deferred: calls that wait for a first listing.
        mapping: where none is given with the messages.
        idle_producers: of transactions that have ended.
        lock: guards stamping, encoding and all queues.
        stamp: of messages outside of transactions.
        clock: the shared clock, if there is one.
        pending_bytes_max: bound of encoded messages which are not acknowledged.
        blocks: threads wait for room; else they get an error.
        is_background: it works on the SDK's background loop, also where a loop runs (notebooks).
        is_closed: messages are refused.
        is_forked: it belongs to the parent of this process.
        traces: spans of its appends; None where traces are not enabled.
    """

    def __init__(
        self,
        transport: Transport | None,
        clock: Clock | None,
        mapping: JournalMapping | None,
        *,
        pending_bytes_max: int,
        blocks: bool,
        delivery_timeout_s: float | None,
        mapping_timeout_s: float | None,
        validates: bool | None = None,
    ) -> None:
        self._validates = validates
        tracing = enabled()
        self.traces = None if tracing is None else SendTraces(tracing)
        self.outboxes: dict[str, Outbox] = {}
        self.idle_producers: list[Producer] = []
        self.lock = new_lock()
        self.stamp = Stamp(new_producer_id())
        self.stamp.flags = OUTSIDE_TXN
        self.clock = clock
        self.is_background = self.is_closed = self.is_forked = False
        self.deferred = Deferred(self)
        self.mapping = mapping
        self._validators: dict[type, Callable[[Any], object] | None] = {}
        self._listed: dict[str, Partitions] = {}  # the connection's, once there is one
        self._transport = transport
        self.pending_bytes_max = pending_bytes_max
        self.blocks = blocks
        self._delivery_timeout_s = delivery_timeout_s
        self._mapping_timeout_s = mapping_timeout_s
        self._has_room = threading.Condition(cast("Any", self.lock))
        self._room_waiters = 0
        self._failure: BaseException | None = None
        self._interruption: ClosedError | None = None
        self._connection: PublisherConnection | None = None
        self._abandoned: weakref.finalize[..., Sender] | None = None
        _senders.add(self)

    # ------------------------------------------------------------- one message

    def publish(
        self, message: Any, mapping: JournalMapping | None, sequences: Sequences | None = None
    ) -> Receipt:
        """Publish a message. See :meth:`Publisher.publish`.

        Args:
            message: the message.
            mapping: None for the publisher's own.
            sequences: of its transaction; None outside of transactions.
        """
        message_type: type = type(message)
        try:
            validate = self._validators[message_type]
        except KeyError:
            validate = self.validator(message_type, (message,))
        if validate is not None:
            call(validate, message)
        chosen = self.mapping if mapping is None else mapping
        if chosen is None:
            raise no_mapping()
        outbox = self.outbox(message, chosen)
        if outbox is not None and not (self.deferred.calls and self.is_on_loop):
            return self._add(outbox, message, sequences)

        context = contextvars.copy_context()  # with the span in which it is published

        async def publish() -> Receipt:
            await self.list_journals([message], chosen)
            known = self.outbox(message, chosen)
            assert known is not None
            return context.run(self._add, known, message, sequences)

        return self.deferred.add(publish, lambda append: Receipt(append, 0, 0), sequences)

    def validator(
        self, message_type: type[Any], messages: Sequence[Any]
    ) -> Callable[[Any], object] | None:
        """Return the function that refuses messages of a class; None if there is none.

        Args:
            message_type: the class.
            messages: some of it among them. If it is new to the publisher, the first is checked.

        Raises:
            ValidationError: objects of the class cannot hold a UUID, or it cannot read the first.
        """
        if message_type in self._validators:
            return self._validators[message_type]
        kind = known_kind(message_type)
        validate = kind.validate
        if self._validates:
            validate = _both(validate, kind.check_readable)
        elif self._validates is None:
            first = next(each for each in messages if type(each) is message_type)
            call(kind.check_readable, first)
        self._validators[message_type] = validate
        return validate

    def _add(  # noqa: C901, PLR0912 - done for every message, without further calls
        self, outbox: Outbox, message: Any, sequences: Sequences | None
    ) -> Receipt:
        """Stamp and encode a message after what waits for its journal.

        Raises:
            ValidationError: the message cannot be encoded.
            BackPressureError: too much is pending, and waiting is not wanted or not possible.
            ClosedError: the publisher is closed.
        """
        if sequences is not None:
            sequences.expect(outbox, message)
        appender = outbox.appender
        if self.lock._is_owned():  # noqa: SLF001 - guarded() without the call
            raise reentrant_call()
        is_adding = False
        try:
            with self.lock:
                if appender.service.pending_bytes >= self.pending_bytes_max:
                    self.wait_for_room()
                if self.is_closed:
                    raise self.closed_error()  # noqa: TRY301 - one way to end for all errors
                stamp = self.stamp if sequences is None else sequences.stamp
                if self.clock is None:
                    stamp.tick_now()
                else:
                    stamp.clock = self.clock.tick()
                kind = outbox.kinds.get(type(message)) or outbox.kind(type(message))
                payload = kind.encode(message, stamp)
                append = outbox.tail()
                traces = self.traces
                if traces is not None and traces.now() is not traces.untraced:
                    payload = self._traced(outbox, append, message, payload, stamp)
                first = append.length_bytes
                if outbox.is_lines and NEWLINE not in payload:
                    # What encode() does, without the call: this is done for every message.
                    length_bytes = len(payload) + 1
                    if length_bytes > outbox.frame_bytes_max:
                        raise outbox.oversized(length_bytes)  # noqa: TRY301 - as above
                    is_adding = True
                    append.content += payload + b"\n"
                else:
                    count = outbox.fields_of(kind, message)
                    length_bytes = outbox.encode(payload, append.content)
                    outbox.record_fields = count
                is_adding = True
                append.length_bytes = last = first + length_bytes
                must_send = appender.push(append, length_bytes)
                if sequences is None:
                    append.context = self
                else:
                    sequences.note(outbox, append, stamp.clock)
            if must_send:
                appender.send()
        except BaseException as error:
            self.note_interrupt(error, is_adding=is_adding)
            raise
        return Receipt(append, first, last)

    def _traced(
        self, outbox: Outbox, append: PendingAppend, message: Any, payload: bytes, stamp: Stamp
    ) -> bytes:
        """Return an encoded message with the context of the current span, if that is sampled."""
        traces = self.traces
        assert traces is not None, "traces are enabled"
        context = traces.sampled()
        if context is None or len(payload) + ROOM_BYTES > outbox.frame_bytes_max:
            return payload
        traces.note(append, context, lambda: stamp.text().decode())
        return outbox.kinds[type(message)].with_parent(message, payload, traceparent_of(context))

    def note_interrupt(self, error: BaseException, *, is_adding: bool = False) -> None:
        """Fail the publisher if its thread was interrupted at work.

        Args:
            error: the exception.
            is_adding: messages were being added: also an Exception is an interrupt then, which a
                signal handler raised.
        """
        if isinstance(error, Exception) and not is_adding:
            return
        doubt = "what that call published"
        if self.pending():
            doubt += f", and {self.doubt}"
        self._interruption = ClosedError(
            f"the publisher was interrupted within publish() ({type(error).__name__}) and takes no"
            f" further messages; in doubt: {doubt}; make another Publisher"
        )
        self.note_failure(self._interruption)
        self.refuse_more()

    def add_frames(
        self, frames: Iterable[tuple[Outbox, bytes]], after: frozenset[AnyFuture] = frozenset()
    ) -> tuple[list[tuple[PendingAppend, int, bytes]], list[JournalAppender]]:
        """Write frames as they are, one to each outbox. They do not wait for room.

        The lock is held.

        Args:
            frames: the frames, whole ones.
            after: futures that must succeed before they are sent.

        Returns:
            For each its append, its position in it, and the frame; and the appenders whose
            ``send`` is to be called, without the lock.

        Raises:
            ClosedError: the publisher is closed.
        """
        if self.is_closed:
            raise self.closed_error()
        added = []
        must_send = []
        for outbox, frame in frames:
            append, begin = outbox.add_frames(frame, after)
            added.append((append, begin, frame))
            if outbox.appender.push(append, len(frame)):
                must_send.append(outbox.appender)
        return added, must_send

    # ---------------------------------------------------------------- journals

    def outbox(self, message: Any, mapping: JournalMapping) -> Outbox | None:
        """Return the outbox of a message's journal; None if that must be awaited.

        Raises:
            ConfigurationError: ``mapping`` is no mapping.
            MappingError: the message maps to no journal.
            FramingError: the journal's content type has no framing.
        """
        if isinstance(mapping, SelectorMapping):
            partitions = self._listed.get(mapping.selector) or self.partitions(mapping)
            if partitions is None:
                return None
            journal = mapping.pick(message, partitions)
            return self.outboxes.get(journal) or self.open_listed(journal, partitions)
        try:
            journal = call(mapping, message)
        except TypeError:
            check_mapping(mapping)
            raise
        if type(journal) is not str or journal not in self.outboxes:
            return self.outbox_of(checked_journal(journal, mapping))
        return self.outboxes[journal]

    def outbox_of(self, journal: str) -> Outbox | None:
        """Return the outbox of a journal by its name; None if that must be awaited.

        Raises:
            MappingError: there is no such journal.
            FramingError: its content type has no framing.
        """
        known = self.outboxes.get(journal)
        if known is not None or self.is_on_loop:
            return known
        connection = self.connection()
        content_type = run(connection.watches.content_type(journal), loop=connection.loop)
        return self._open(journal, content_type)

    def partitions(self, mapping: SelectorMapping) -> Partitions | None:
        """Return the journals of a mapping; None if that must be awaited."""
        connection = self.connection()
        self._listed = connection.watches.current
        partitions = self._listed.get(mapping.selector)
        if partitions is None and not self.is_on_loop:
            partitions = run(connection.watches.partitions(mapping), loop=connection.loop)
        return partitions

    async def list_journals(self, messages: Iterable[Any], mapping: JournalMapping | None) -> None:
        """Wait until the journals of messages are listed.

        Args:
            messages: the messages, or, without a mapping, names of journals.
            mapping: which journal a message goes to.

        Raises:
            MappingError: no listing came in time, or there is no such journal.
            FramingError: a journal's content type has no framing.
        """
        watches = self.connection().watches
        if isinstance(mapping, SelectorMapping):
            await watches.partitions(mapping)
            return
        for message in messages:
            journal = message
            if mapping is not None:
                journal = checked_journal(call(mapping, message), mapping)
            if journal not in self.outboxes:
                self._open(journal, await watches.content_type(journal))

    async def listed(self, messages: Iterable[Any], mapping: JournalMapping | None) -> None:
        """Wait until the journals of messages are listed, in a coroutine of any loop.

        The publisher's own loop has its queue of deferred calls for that.
        """
        chosen = self.mapping if mapping is None else mapping
        if chosen is None or self.is_on_loop:
            return
        check_mapping(chosen)
        if isinstance(chosen, SelectorMapping):
            if chosen.selector in self._listed:
                return
        elif all(call(chosen, message) in self.outboxes for message in messages):
            return
        await on_loop(self.connection().loop, self.list_journals(messages, chosen))

    def open_listed(self, journal: str, partitions: Partitions) -> Outbox:
        """Return the outbox of a journal that is listed, which is new."""
        return self._open(journal, partitions.content_types[journal])

    def _open(self, journal: str, content_type: str) -> Outbox:
        opened = Outbox(self.connection().appends.appender(journal), content_type)
        with guarded(self.lock):
            return self.outboxes.setdefault(journal, opened)

    # ------------------------------------------------------- room and failures

    @property
    def may_block(self) -> bool:
        """The calling code may wait for room."""
        return self.blocks and not self.is_on_loop and not is_in_coroutine()

    def wait_for_room(self) -> None:
        """Wait until less is pending than the bound. The lock is held, and released meanwhile.

        Raises:
            BackPressureError: waiting is not wanted or not possible.
        """
        appends = None if self._connection is None else self._connection.appends
        if appends is None or appends.pending_bytes < self.pending_bytes_max:
            return
        if not self.may_block:
            raise BackPressureError(
                f"{appends.pending_bytes} bytes of messages are not acknowledged yet, of at most"
                f" {self.pending_bytes_max} bytes; `await publisher.apublish(message)`, wait for"
                " receipts, or raise pending_bytes_max"
            )
        self._room_waiters += 1
        try:
            while appends.pending_bytes >= self.pending_bytes_max and not self.is_closed:
                self._has_room.wait()
        finally:
            self._room_waiters -= 1

    async def room(self) -> None:
        """Wait until less is pending than the bound."""
        if self._connection is not None:
            await self._connection.appends.room()

    def check_reentry(self) -> None:
        """Refuse to wait within a call of the same thread, which this would wait for.

        Raises:
            ReentrantCallError: it is one.
        """
        check_reentry()
        if self._connection is not None:
            self._connection.appends.check_reentry()

    def pending(self) -> list[PendingAppend]:
        """Return all appends that are not acknowledged."""
        return [] if self._connection is None else self._connection.appends.pending()

    @property
    def doubt(self) -> str:
        """Messages that may be written or not, in words."""
        pending = self.pending()
        journals = sorted({each.journal for each in pending}) or ["journals not listed yet"]
        shown = ", ".join(journals[:DOUBT_MAX])
        if len(journals) > DOUBT_MAX:
            shown += f" and {len(journals) - DOUBT_MAX} more journals"
        return f"messages to {shown} whose receipts have no result"

    def note_failure(self, error: BaseException) -> None:
        """Remember a failure, unless there is an earlier one."""
        with guarded(self.lock):
            self._failure = self._failure or error

    def raise_failure(self) -> None:
        """Raise the first failure since this was last called."""
        with guarded(self.lock):
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    # -------------------------------------------------------------- connection

    def connection(self) -> PublisherConnection:
        """Return the connection, which the first message opens.

        Raises:
            ClosedError: the publisher is closed.
        """
        connection = self._connection
        if connection is None:
            with guarded(self.lock):
                if self.is_closed:
                    raise self.closed_error()
                connection = self._connection
                if connection is None:
                    connection = self._connection = PublisherConnection(
                        self._transport,
                        self.lock,
                        is_background=self.is_background,
                        pending_bytes_max=self.pending_bytes_max,
                        delivery_timeout_s=self._delivery_timeout_s,
                        mapping_timeout_s=self._mapping_timeout_s,
                        on_settled=_settled_of(weakref.ref(self)),
                    )
                    self._abandoned = weakref.finalize(self, connection.abandon)
                    self._abandoned.atexit = False
        connection.appends.check_loop()
        connection.appends.check_open()
        return connection

    @property
    def is_on_loop(self) -> bool:
        """The calling code runs on the publisher's event loop, which must not be blocked."""
        if self._connection is not None:
            return is_running(self._connection.loop)
        return is_running(loop_of(self._transport, is_background=self.is_background))

    @property
    def is_connected(self) -> bool:
        """The connection is open."""
        return self._connection is not None

    @property
    def can_send(self) -> bool:
        """Messages are taken, and the event loop runs."""
        connection = self._connection
        return not self.is_closed and connection is not None and connection.loop.is_running()

    def refuse_more(self) -> None:
        """Refuse messages from now on; threads that wait for room get an error."""
        with guarded(self.lock):
            self.is_closed = True
            self._has_room.notify_all()

    def interrupt(self) -> None:
        """Refuse messages from now on, and end the waits of threads. On the event loop."""
        self.refuse_more()
        if self._connection is not None:
            self._connection.watches.end()

    def closed_error(self) -> ClosedError:
        """Return the error of a message that a closed publisher refuses."""
        if self.is_forked:
            return ClosedError(
                "the publisher belongs to the process that was forked, which sends what it was"
                " given; make another Publisher in the child"
            )
        return self._interruption or ClosedError(
            "the publisher is closed; messages which it had not sent are given up"
        )

    def detach(self) -> PublisherConnection | None:
        """Refuse messages from now on, and return the connection, to be closed."""
        self.refuse_more()
        if self._abandoned is not None:
            self._abandoned.detach()
        connection, self._connection = self._connection, None
        return connection

    def forked(self) -> None:
        """In a forked child: refuse everything. The parent sends what it was given."""
        self.lock = new_lock()  # another thread of the parent may have held it
        self._has_room = threading.Condition(cast("Any", self.lock))
        self.is_forked = True
        if self.clock is not None:
            self.clock.unlock()
        connection = self.detach()
        if connection is not None:
            connection.appends.forked(self.lock, self.closed_error())

    def _settled(self, appends: list[PendingAppend], error: Exception | None) -> None:
        """Remember the failure of appends that end. The lock is held."""
        if error is not None and any(append.context is self for append in appends):
            self._failure = self._failure or error
        if self._room_waiters:
            self._has_room.notify_all()


def no_mapping() -> MappingError:
    """Return the error of a message without a mapping."""
    return MappingError("there is no mapping: give one to the Publisher or to publish()")


_senders: weakref.WeakSet[Sender] = weakref.WeakSet()


def open_senders() -> list[Sender]:
    """Return all senders that have published, and were not closed."""
    return [sender for sender in list(_senders) if sender.is_connected]


def _settled_of(
    sender: weakref.ref[Sender],
) -> Callable[[list[PendingAppend], Exception | None], None]:
    """Return a callback that does not keep the sender, which its connection must not."""

    def settled(appends: list[PendingAppend], error: Exception | None) -> None:
        found = sender()
        if found is not None:
            found._settled(appends, error)  # noqa: SLF001 - of this module

    return settled


def _forked() -> None:
    for sender in list(_senders):
        sender.forked()


os.register_at_fork(after_in_child=_forked)
