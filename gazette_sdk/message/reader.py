"""Reader of messages, for plain code and coroutines (message sections 12 to 14)."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import (
    AsyncIterator,
    Callable,
    Iterator,
    Mapping,
)
from functools import partial
from itertools import islice
from operator import length_hint
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar, overload

from gazette_sdk.contexts import AsyncClosable, Closable
from gazette_sdk.errors import (
    ConfigurationError,
    DeadlineExceededError,
    JournalNotFoundError,
    SuspendedError,
    check_number,
    needs_extra,
)
from gazette_sdk.message.batch_reader import (
    BatchReader,
    ContentDecoder,
    OnError,
    decoders_since,
    journal_decoder,
)
from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.message.delivery import (
    HORIZON_S,
    RING_BYTES_MAX,
    CommittedDelivery,
    Delivery,
    Select,
    chosen,
)
from gazette_sdk.message.fetcher import Offsets, OnMissing, Opened, plan_of, reading_loop
from gazette_sdk.message.kinds import known_kind
from gazette_sdk.message.sequencer import Sequencer
from gazette_sdk.message.uuid import Envelope, clock_of_time
from gazette_sdk.transport.base import Transport, check_transport
from gazette_sdk.transport.connect import connect
from gazette_sdk.transport.journal_reader import read_metadata
from gazette_sdk.transport.loop import for_each, on_loop, run

if TYPE_CHECKING:
    import pyarrow as pa
    from typing_extensions import TypeForm

    from gazette_sdk.message.columns.batches import RecordBatches


M = TypeVar("M")
T = TypeVar("T")

Isolation: TypeAlias = Literal["committed", "uncommitted"]
"""Messages that a reader delivers."""

RING_SIZE = 8192
"""Default number of messages of open transactions that are kept in memory."""

_ListIterator: type[Iterator[Any]] = type(iter([]))

POLL_LIMIT = 500
"""Default limit of the messages of a poll."""

BATCH_ROWS = 1 << 16
"""Default limit of the rows of a record batch."""


LAG_TIMEOUT_S = 5.0
"""Default time limit of a question for the lag, in seconds."""


class Lag(NamedTuple):
    """Messages that a reader has not taken of a journal.

    Attributes:
        bytes: number of bytes from the reader's position to the write head.
        seconds: time since the first message of them was published; 0 where there is none, None if
            it has no UUID.
    """

    bytes: int
    seconds: float | None


class Reader(Closable, AsyncClosable, Generic[M]):
    """Reader of the messages of all journals that match a selector, each in its journal's order.

    An iterable and an asynchronous iterable of :class:`~gazette_sdk.message.Envelope`::

        for envelope in Reader(Order, "topic=orders"):
            print(envelope.journal, envelope.begin, envelope.end, envelope.message)

    Without ``block``, iteration ends at the write heads; another iteration continues from there.
    Content is fetched ahead in the background and decoded a chunk at a time. After ``break`` or an
    interrupt, another iteration, plain or asynchronous, continues where it stopped. Several threads
    with a ``for`` loop each, or several tasks of one event loop, share the messages: each goes to
    one of them. One iterator is of one thread or task at a time; another one gets an error.
    :meth:`poll` and :meth:`apoll` wait no longer than a time limit. So does
    ``asyncio.wait_for(anext(iterator), 1)``, which does not end the iteration.

    Each message is delivered once, when it is committed. Duplicates of a producer's retries are
    dropped. Messages of a transaction are delivered when it is acknowledged, those of one journal
    together, and never if it was rolled back. Open transactions of one producer do not delay the
    messages of another. Acknowledgements, which are empty messages, are left out. A message
    without UUID is delivered as it is written.

    With ``isolation="uncommitted"`` every message is delivered as it is written: duplicates,
    messages of transactions that are open or were rolled back, and acknowledgements, whose
    ``envelope.flags`` are ``ACK_TXN``.

    Args:
        message_type: class of the messages: a dataclass on JsonMessage, a pydantic model, a
            msgspec Struct, ``dict``, ``list``, or a generated protobuf class; or a union of
            Structs with tags, ``Ride | Driver``. A protobuf class without a field ``bytes uuid``
            can be read as uncommitted, and not from a ``datetime``: its messages have no UUID.
        selector: label selector (``"topic=orders"``), or the name of one journal that exists;
            a name may have metadata (``a/journal;mine``), which envelopes and offsets keep.
        name: name of one journal, instead of a selector.
        transport: how to reach the journals; by default ``connect()`` of ``GAZETTE_ADDRESS``.
        block: follow the write heads, and new journals that match the selector, until the reader
            is closed.
        offsets: offsets at which journals begin: ``"begin"`` (as None), ``"end"`` for the write
            heads, or a mapping by journal, with 0 for others. The :attr:`offsets` of another
            reader can be given here. A ``datetime``, which must have a time zone, delivers the
            messages that were published at that time or later, and messages without UUID beside
            them.
        end_offsets: offsets at which journals end, by journal, each between two messages.
            Messages of transactions that are open there are not delivered. A reader of one journal
            ends there, also with ``block``.
        isolation: ``"committed"`` or ``"uncommitted"``; see above.
        checkpoint: :meth:`checkpoint` of another committed reader, also in its stored form: begin
            exactly there. ``offsets`` are then those of journals that it does not name.
        acknowledgements: deliver acknowledgements of committed messages, too.
        on_missing: treatment of an offset, or a checkpoint, that its journal does not have: an
            offset after the write head, or a checkpoint of a journal that was deleted, and
            created again under its name. ``"raise"``
            :class:`~gazette_sdk.errors.OffsetNotYetAvailableError` or
            :class:`~gazette_sdk.errors.CheckpointMismatchError` when reading begins, or begin at
            the journal's ``"begin"`` or ``"end"`` instead.
        on_error: treatment of content that is no message: a message that cannot be decoded
            or has no valid UUID, bytes that are no frame, a frame that is cut off. ``"raise"``
            its error, ``"skip"`` it after a warning in the log, or a function, which is called
            with the error, and raises, or returns to skip it. A frame that is cut off at the
            write head is not skipped, as its rest may be appended yet: it ends the iteration.
            With ``block`` the reader waits for its rest, without an error.
        ring_size: number of messages of open transactions that are kept in memory, of all
            journals. The begin of a longer transaction is read again once it is acknowledged.

    Raises:
        ValidationError: the class cannot hold a UUID, the classes of a union cannot be
            distinguished, or the selector is malformed.
        ConfigurationError: arguments exclude each other, or have unknown values.
        DecodeError: the stored checkpoint is malformed.
    """

    @overload
    def __init__(
        self,
        message_type: type[M],
        selector: str | None = None,
        *,
        name: str | None = None,
        transport: Transport | None = None,
        block: bool = False,
        offsets: Offsets = None,
        end_offsets: Mapping[str, int] | None = None,
        isolation: Isolation = "committed",
        checkpoint: Checkpoint | bytes | None = None,
        acknowledgements: bool = False,
        on_missing: OnMissing = "raise",
        on_error: OnError = "raise",
        ring_size: int = RING_SIZE,
    ) -> None: ...
    @overload
    def __init__(
        self,
        message_type: TypeForm[M],
        selector: str | None = None,
        *,
        name: str | None = None,
        transport: Transport | None = None,
        block: bool = False,
        offsets: Offsets = None,
        end_offsets: Mapping[str, int] | None = None,
        isolation: Isolation = "committed",
        checkpoint: Checkpoint | bytes | None = None,
        acknowledgements: bool = False,
        on_missing: OnMissing = "raise",
        on_error: OnError = "raise",
        ring_size: int = RING_SIZE,
    ) -> None: ...
    def __init__(
        self,
        message_type: Any,
        selector: str | None = None,
        *,
        name: str | None = None,
        transport: Transport | None = None,
        block: bool = False,
        offsets: Offsets = None,
        end_offsets: Mapping[str, int] | None = None,
        isolation: Isolation = "committed",
        checkpoint: Checkpoint | bytes | None = None,
        acknowledgements: bool = False,
        on_missing: OnMissing = "raise",
        on_error: OnError = "raise",
        ring_size: int = RING_SIZE,
    ) -> None:
        _check(isolation, checkpoint, on_error, acknowledgements=acknowledgements)
        check_number("ring_size", ring_size, is_whole=True)
        check_transport(transport)
        self._type: type[M] = message_type  # or a union
        restored = (
            Checkpoint.from_bytes(checkpoint) if isinstance(checkpoint, bytes) else checkpoint
        )
        plan = plan_of(
            selector,
            name,
            block=block,
            offsets=offsets,
            end_offsets=end_offsets,
            on_missing=on_missing,
        )
        self._plan = plan if restored is None else plan.restored(restored)
        self._transport = transport
        self._is_committed = isolation == "committed"
        # Refuses a class that is no message, before any read.
        known_kind(message_type, needs_uuid=self._parses_uuids)
        self._acknowledgements = acknowledgements
        self._on_error = on_error
        self._ring_size = ring_size
        self._restored = restored
        delivery: Delivery[Envelope[M]] = self._new_delivery()
        new_decoder = partial(journal_decoder, message_type, sequenced=self._parses_uuids)
        self._batches: BatchReader[Envelope[M]] = BatchReader(
            self._plan, transport, self._decoders(new_decoder), delivery, on_error=on_error
        )
        self._left: Iterator[Envelope[M]] = iter(())
        self._columns: RecordBatches | None = None

    def _new_delivery(self, select: Select[T] | None = None) -> Delivery[T]:
        if not self._is_committed:
            return Delivery(self._plan.offsets)
        sequencer = Sequencer[T](
            self._ring_size, ring_bytes_max=RING_BYTES_MAX, checkpoint=self._restored
        )
        return CommittedDelivery(
            sequencer,
            offsets=self._plan.offsets,
            acknowledgements=self._acknowledgements,
            **({} if select is None else {"select": select}),
        )

    @property
    def _parses_uuids(self) -> bool:
        """True if UUIDs are parsed with the messages, to be sequenced or for their time."""
        return self._is_committed or self._plan.since is not None

    def _decoders(
        self, new_decoder: Callable[[Opened], ContentDecoder[T]], select: Select[T] = chosen
    ) -> Callable[[Opened], ContentDecoder[T]]:
        """Return a function that makes decoders of the messages since the plan's time, if any.

        Decoders hold no reader, so that one that is dropped ends its reads.
        """
        since = self._plan.since
        if since is None:
            return new_decoder
        return decoders_since(
            new_decoder,
            clock_of_time(since),
            exempt=self._plan.offsets,
            select=select,
            keeps_acknowledgements=self._is_committed,
        )

    @property
    def offsets(self) -> dict[str, int]:
        """Offsets to read on from, by journal: after the last envelope that was taken.

        All journals of the argument ``offsets`` and those read since; -1 is a write head that is
        not known yet. A committed reader's offsets are not after the begin of any open
        transaction: a reader that begins there loses nothing, but may deliver messages again.
        :meth:`checkpoint` is exact.
        """
        if self._columns is not None:
            return self._columns.offsets
        return self._batches.offsets(length_hint(self._left))

    def checkpoint(self, *, horizon_s: float = HORIZON_S) -> Checkpoint:
        """Return the position of a committed reader: after the last envelope that was taken.

        A reader with this checkpoint continues with exactly the next message, even in the middle of
        a transaction.

        Args:
            horizon_s: producers without an open transaction are forgotten that were silent for
                so many seconds, a day by default, while others of their journal were not; 0 for
                none. Later duplicates of their messages would be delivered.

        Raises:
            ConfigurationError: the reader is an uncommitted one.
            ClosedError: the reader was interrupted at work on a message.
        """
        if self._columns is not None:
            return self._columns.checkpoint(horizon_s=horizon_s)
        return self._batches.checkpoint(length_hint(self._left), horizon_s=horizon_s)

    def lag(self, timeout_s: float = LAG_TIMEOUT_S) -> dict[str, Lag]:
        """Ask brokers how much the reader has not taken yet, by journal.

        For dashboards: it costs a call for each journal, and another one where there is a lag. Of a
        committed reader, open transactions are a part of it.

        Args:
            timeout_s: time limit, in seconds.

        Returns:
            For each journal of :attr:`offsets`, the :class:`~gazette_sdk.message.Lag`: bytes up
            to the write head, and seconds since the first message of them was published.

        Raises:
            DeadlineExceededError: brokers did not answer in time.
            GazetteError: a call failed.
        """
        transport = connect() if self._transport is None else self._transport
        return run(self._lag(transport, timeout_s), loop=reading_loop(transport, blocks=True))

    async def alag(self, timeout_s: float = LAG_TIMEOUT_S) -> dict[str, Lag]:
        """Ask brokers as :meth:`lag`, in a coroutine."""
        transport = connect() if self._transport is None else self._transport
        loop = reading_loop(transport, blocks=False)
        return await on_loop(loop, self._lag(transport, timeout_s))

    async def _lag(self, transport: Transport, timeout_s: float) -> dict[str, Lag]:
        offsets = self.offsets

        async def lag(journal: str) -> Lag | None:
            return await self._lag_of(transport, journal, offsets[journal])

        check_number("timeout_s", timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                found = await for_each(offsets, lag)
        except TimeoutError:
            raise DeadlineExceededError(f"the lag is not known within {timeout_s:g} s") from None
        finally:
            if self._transport is None:
                await transport.aclose()
        return {
            journal: each for journal, each in zip(offsets, found, strict=True) if each is not None
        }

    async def _lag_of(self, transport: Transport, journal: str, offset: int) -> Lag | None:
        """Return the lag of one journal; None if it was deleted."""
        try:
            head = (await read_metadata(transport, journal, -1)).write_head
        except SuspendedError:
            return Lag(0, 0.0)  # brokers have dropped a journal which holds nothing to read
        except JournalNotFoundError:
            return None
        if offset < 0 or offset >= head:
            return Lag(0, 0.0)
        first = Reader(
            self._type,
            name=journal,
            offsets={journal: offset},
            isolation="uncommitted",
            transport=transport,
            on_error="skip",
        )
        published = None
        async with first:
            async for envelope in first:
                published = envelope.time
                break
        age_s = None if published is None else max(time.time() - published.timestamp(), 0.0)
        return Lag(head - offset, age_s)

    # --------------------------------------------------------------- columns

    def arrow(
        self, schema: pa.Schema | None = None, *, batch_rows: int = BATCH_ROWS
    ) -> RecordBatches:
        """Return the same messages as ``pyarrow.RecordBatch``es, several times as fast.

        ::

            for batch in Reader(Order, "topic=orders").arrow():
                print(batch.num_rows, batch.column("cents"))

            schema = pa.schema([("customer", pa.string()), ("cents", pa.int64())])
            for batch in Reader(dict, "topic=orders").arrow(schema):
                print(batch.num_rows, batch.column("cents"))

        :attr:`offsets` and :meth:`checkpoint` are then after the last row of the last batch that
        was taken. Needs the extra ``arrow``.

        Columns are fields of messages, by name; in CSV journals, which have no names, fields
        after the UUID, by place. A field without a column is ignored, a column without a field
        is null. A message that does not fit the schema is content that is no message, see
        ``on_error``. Of a class of JSON messages only the key of its UUID is used: objects are not
        validated by the class.

        Columns named ``_journal``, ``_offset``, ``_end``, ``_uuid``, ``_time`` and ``_flags`` are
        no fields, but the attributes of the message's envelope.

        Args:
            schema: columns wanted, with their types: a ``pyarrow.Schema``, or an argument of
                ``pyarrow.schema()``. None for all fields of the class of messages but its UUID,
                with the Arrow types of their Python types; ``dict`` and ``list`` have none.
            batch_rows: limit of the rows of a batch.

        Returns:
            An iterable and an asynchronous iterable; another iteration continues where it stopped.

        Raises:
            ConfigurationError: the schema is malformed, or is missing and the class has no
                fields, or one that has no Arrow type; messages were taken from the reader
                already; or pyarrow is not installed.
        """
        with needs_extra("arrow", "columns"):
            from gazette_sdk.message.columns import batches as record_batches  # noqa: PLC0415 - an extra
            from gazette_sdk.message.columns import decoders  # noqa: PLC0415 - an extra
            from gazette_sdk.message.columns import schema as message_schema  # noqa: PLC0415
        if schema is None:
            schema = message_schema.schema_of(self._type)
        wanted = record_batches.checked_schema(schema)
        check_number("batch_rows", batch_rows, 1, is_whole=True)
        if self._columns is not None and self._columns.schema != wanted:
            raise ConfigurationError(
                "the reader delivers columns of another schema already: make another one"
            )
        if self._columns is None:
            if self._batches.has_begun:
                raise ConfigurationError(
                    "messages were taken from the reader already: make another one for columns"
                )
            new_decoder = partial(
                decoders.column_decoder, self._type, wanted, sequenced=self._parses_uuids
            )
            batches = BatchReader(
                dataclasses.replace(self._plan, item_bytes_max=record_batches.ITEM_BYTES_MAX),
                self._transport,
                self._decoders(new_decoder, record_batches.selected),
                self._new_delivery(record_batches.selected),
                on_error=self._on_error,
            )
            self._columns = record_batches.RecordBatches(wanted, batches, batch_rows)
        return self._columns

    # ------------------------------------------------------------- iteration

    def __iter__(self) -> Iterator[Envelope[M]]:
        self._check_delivers_messages()
        self._batches.begin(blocks=True)
        return self._envelopes()

    def _envelopes(self) -> Iterator[Envelope[M]]:
        """Yield the rest of the batch at hand, then each later batch.

        A generator, which refuses to be run by two threads at a time. Several of them take turns.
        """
        batches = self._batches
        while True:
            left = self._left
            if type(left) is _ListIterator:
                yield from left  # no Python code runs per envelope, except the consumer's own
            else:
                while True:
                    with batches.lock:
                        envelope = next(left, None)
                    if envelope is None:
                        break
                    yield envelope
            with batches.taking():
                if self._left is left:
                    batch = batches.next_batch()
                    if batch is None:
                        return
                    self._left = iter(batch)

    def __aiter__(self) -> AsyncIterator[Envelope[M]]:
        self._check_delivers_messages()
        self._batches.begin()
        return _Envelopes(self)

    async def _has_next_batch(self) -> bool:
        """Take the next batch, unless another task has. Return False at the end."""
        left = self._left
        async with self._batches.taking_async():
            if self._left is left:
                batch = await self._batches.next_batch_async()
                if batch is None:
                    return False
                self._left = iter(batch)
        return True

    # ------------------------------------------------------------------ poll

    def poll(self, timeout_s: float = 0.0, *, limit: int = POLL_LIMIT) -> list[Envelope[M]]:
        """Return the next messages: those that are there, or the first that come in time.

        Args:
            timeout_s: longest wait for the first message, in seconds; 0 returns what is there.
            limit: number of messages to return at most.

        Returns:
            The messages, of which the position counts as taken. Empty if none has come; and without
            ``block`` at once if all journals were read to their write heads: the next call looks
            for more there.

        Raises:
            ConfigurationError: an argument cannot be used.
            GazetteError: as in iteration.
        """
        until = self._until(timeout_s, limit)
        batches = self._batches
        batches.begin(blocks=True)
        with batches.taking():
            while not (found := list(islice(self._left, limit))):
                batch = batches.next_batch(until)
                if batch is None:
                    break
                self._left = iter(batch)
        return found

    async def apoll(self, timeout_s: float = 0.0, *, limit: int = POLL_LIMIT) -> list[Envelope[M]]:
        """Return the next messages as :meth:`poll`, in a coroutine."""
        until = self._until(timeout_s, limit)
        batches = self._batches
        batches.begin()
        async with batches.taking_async():
            while not (found := list(islice(self._left, limit))):
                batch = await batches.next_batch_async(until)
                if batch is None:
                    break
                self._left = iter(batch)
        return found

    def _until(self, timeout_s: float, limit: int) -> float:
        """Return the monotonic time at which a poll ends."""
        self._check_delivers_messages()
        check_number("timeout_s", timeout_s)
        check_number("limit", limit, 1, is_whole=True)
        return time.monotonic() + timeout_s

    def _check_delivers_messages(self) -> None:
        if self._columns is not None:
            raise ConfigurationError(
                "the reader delivers columns: iterate what arrow() returned, or make another one"
            )

    # ----------------------------------------------------------------- close

    def close(self) -> None:
        """End reading. ``with`` does so.

        An iteration, in any thread, ends after the envelopes of its chunk.
        """
        self._batches.close()
        if self._columns is not None:
            self._columns.close()

    async def aclose(self) -> None:
        """End reading as :meth:`close`, in a coroutine. ``async with`` does so."""
        await self._batches.aclose()
        if self._columns is not None:
            await self._columns.aclose()


class _Envelopes(AsyncIterator[Envelope[M]]):
    """Asynchronous iterator over the messages of a reader.

    It is no generator, which a cancelled wait would end, as with ``asyncio.wait_for``.

    Args:
        reader: the reader.
    """

    __slots__ = ("_has_ended", "_reader")

    def __init__(self, reader: Reader[M]) -> None:
        self._reader = reader
        self._has_ended = False

    async def __anext__(self) -> Envelope[M]:
        for envelope in self._reader._left:  # noqa: SLF001 - a part of the reader
            return envelope
        if not self._has_ended:
            while await self._reader._has_next_batch():  # noqa: SLF001
                for envelope in self._reader._left:  # noqa: SLF001 - a part of the reader
                    return envelope
            self._has_ended = True
        raise StopAsyncIteration


def _check(
    isolation: str,
    checkpoint: object,
    on_error: OnError,
    *,
    acknowledgements: bool,
) -> None:
    if isolation not in {"committed", "uncommitted"}:
        raise ConfigurationError(f"isolation={isolation!r}: use 'committed' or 'uncommitted'")
    if isolation == "uncommitted" and (checkpoint is not None or acknowledgements):
        raise ConfigurationError(
            "an uncommitted reader takes no checkpoint, and delivers acknowledgements anyway:"
            " leave checkpoint= and acknowledgements= off, and give offsets="
        )
    if checkpoint is not None and not isinstance(checkpoint, Checkpoint | bytes):
        raise ConfigurationError(
            f"checkpoint={checkpoint!r}: use what reader.checkpoint() returned, or its to_bytes()"
        )
    if not callable(on_error) and on_error not in {"raise", "skip"}:
        raise ConfigurationError(f"on_error={on_error!r}: use 'raise', 'skip' or a function")
