"""Reader of messages, for plain code and coroutines (message sections 12 to 14)."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Iterator, Mapping
from functools import partial
from itertools import chain
from operator import length_hint
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Literal, Self, TypeAlias, TypeVar

from gazette_sdk.errors import ConfigurationError
from gazette_sdk.message.envelope import Envelope
from gazette_sdk.message.kinds import validator_of
from gazette_sdk.message.reading.batch_reader import BatchReader, OnError
from gazette_sdk.message.reading.delivery import (
    HORIZON_S,
    RING_BYTES_MAX,
    CommittedDelivery,
    Delivery,
    Select,
)
from gazette_sdk.message.reading.journal_decoder import journal_decoder
from gazette_sdk.message.reading.plan import Offsets, plan_of
from gazette_sdk.message.sequencing.checkpoint import Checkpoint
from gazette_sdk.message.sequencing.sequencer import Sequencer
from gazette_sdk.transport.base import Transport

if TYPE_CHECKING:
    import pyarrow as pa

    from gazette_sdk.message.columns.record_batches import RecordBatches

__all__ = ["Isolation", "Offsets", "Reader"]

M = TypeVar("M")
T = TypeVar("T")

Isolation: TypeAlias = Literal["committed", "uncommitted"]
"""Which messages a reader delivers."""

RING_SIZE = 8192
"""Messages of open transactions which are kept in memory. Others are read again."""

BATCH_ROWS = 1 << 16
"""Rows of a record batch at most: what is read at once is mostly less."""


class Reader(Generic[M]):
    """Messages of all journals that match a selector, each in its journal's order.

    An iterable and an asynchronous iterable of :class:`~gazette_sdk.message.Envelope`::

        for envelope in Reader(Order, "topic=orders"):
            print(envelope.journal, envelope.begin, envelope.end, envelope.message)

    Without ``block``, iteration ends at the write heads; iterating again goes on from there.
    Content is read ahead in the background and decoded a chunk at a time. After ``break`` or an
    interrupt, iteration can be taken up again where it stopped, plain or asynchronous. One
    consumer at a time.

    Messages are delivered when they are committed, and once: what a producer's retry wrote twice
    comes once, messages of a transaction come when it is acknowledged, in one go for each
    journal, and those of a transaction which was rolled back do not come at all. The
    transactions of one producer never hold up the messages of another. Acknowledgements, whose
    message is empty, are left out. A message without UUID is delivered as it stands.

    With ``isolation="uncommitted"`` every message is delivered, as it stands in the journal:
    duplicates, messages of transactions which are open or were rolled back, and acknowledgements,
    whose ``envelope.flags`` are ``ACK_TXN``.

    Args:
        message_type: class of the messages: a dataclass on JsonMessage, a pydantic model, a
            msgspec Struct, ``dict``, ``list``, or a generated protobuf class.
        selector: label selector (``"topic=orders"``), or the name of one journal that exists;
            a name may carry metadata (``a/journal;mine``), which envelopes and offsets keep.
        name: name of one journal, instead of a selector.
        transport: how to reach the journals; without one, ``connect()`` of ``GAZETTE_ADDRESS``.
        block: follow the write heads, and journals which come to match the selector, until the
            reader is closed.
        offsets: where to begin: ``"begin"`` (as None), ``"end"`` for the write heads, or offsets
            by journal, with 0 for those not named. What :attr:`offsets` was can be given here.
        end_offsets: where to end, by journal; an offset between two messages. Messages of
            transactions which are open there are not delivered.
        isolation: ``"committed"`` or ``"uncommitted"``; see above.
        checkpoint: go on exactly where another committed reader stood, see :meth:`checkpoint`;
            also in its stored form. ``offsets`` then say where journals begin which it does not
            name.
        acknowledgements: deliver acknowledgements of committed messages, too.
        on_error: what becomes of content that is no message: a message that cannot be decoded
            or has no valid UUID, bytes that are no frame, a frame that is cut off. ``"raise"``
            its error, ``"skip"`` it after a warning in the log, or a function, which is called
            with the error, and raises or returns to pass over it. A frame that is cut off at the
            write head ends the iteration then, and is not passed over: its rest may come yet.
            Where ``block`` is set it is waited for, without an error.
        ring_size: messages of open transactions which are kept in memory, of all journals. Where
            that does not suffice, the begin of a transaction is read again once it is
            acknowledged.

    Raises:
        ValidationError: the class can carry no UUID, or the selector is malformed.
        ConfigurationError: arguments which do not go together, or are not known.
        DecodeError: the stored checkpoint is none.
    """

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
        on_error: OnError = "raise",
        ring_size: int = RING_SIZE,
    ) -> None:
        _check(isolation, checkpoint, on_error, acknowledgements=acknowledgements)
        validator_of(message_type)  # refuses a class that is no message, now and not in mid-read
        self._type = message_type
        restored = (
            Checkpoint.from_bytes(checkpoint) if isinstance(checkpoint, bytes) else checkpoint
        )
        plan = plan_of(selector, name, block=block, offsets=offsets, end_offsets=end_offsets)
        self._plan = plan if restored is None else plan.restored(restored)
        self._transport = transport
        self._is_committed = isolation == "committed"
        self._acknowledgements = acknowledgements
        self._on_error = on_error
        self._ring_size = ring_size
        self._restored = restored
        delivery: Delivery[Envelope[M]] = self._new_delivery()
        # Decoders hold no reader, so that one that is dropped ends its reads.
        new_decoder = partial(journal_decoder, message_type, sequenced=self._is_committed)
        self._batches: BatchReader[Envelope[M]] = BatchReader(
            self._plan, transport, new_decoder, delivery, on_error=on_error
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
    def offsets(self) -> dict[str, int]:
        """The offset to read on from, by journal: behind the last envelope that was taken.

        Holds what was given as ``offsets``, and every journal met since; -1 is a write head
        which is not known yet. A committed reader's offsets are not behind the begin of any
        transaction that is open: a reader which begins there loses nothing, but may deliver
        messages again. :meth:`checkpoint` is exact.
        """
        if self._columns is not None:
            return self._columns.offsets
        return self._batches.offsets(length_hint(self._left))

    def checkpoint(self, *, horizon_s: float = HORIZON_S) -> Checkpoint:
        """Where this committed reader stands: exactly behind the last envelope that was taken.

        Another reader that is given it delivers what this one would have delivered next, even
        in the middle of a transaction.

        Args:
            horizon_s: producers are forgotten which were silent for so many seconds, a day by
                default, while others of their journal were not; 0 for none. Copies of their
                messages, if any should come yet, would be delivered.

        Raises:
            ConfigurationError: the reader is an uncommitted one.
            ClosedError: the reader was interrupted at work on a message.
        """
        if self._columns is not None:
            return self._columns.checkpoint(horizon_s=horizon_s)
        return self._batches.checkpoint(length_hint(self._left), horizon_s=horizon_s)

    # --------------------------------------------------------------- columns

    def arrow(self, schema: pa.Schema, *, batch_rows: int = BATCH_ROWS) -> RecordBatches:
        """The same messages as ``pyarrow.RecordBatch``es, several times as fast.

        ::

            schema = pa.schema([("customer", pa.string()), ("cents", pa.int64())])
            for batch in Reader(dict, "topic=orders").arrow(schema):
                print(batch.num_rows, batch.column("cents"))

        What the reader says of itself, :attr:`offsets` and :meth:`checkpoint`, is then behind the
        last row of the last batch that was taken. Needs the extra ``arrow``.

        Columns are fields of messages, by name; in CSV journals, which have no names, fields
        behind the UUID, by place. A field without a column is passed over, a column without a
        field is null. A message that does not fit the schema is content that is no message, see
        ``on_error``. Of classes of JSON messages nothing but the place of their UUID matters:
        objects are not validated by the class.

        Columns named ``_journal``, ``_offset``, ``_end``, ``_uuid``, ``_time`` and ``_flags`` are
        no fields, but tell of the message what its envelope would.

        Args:
            schema: columns wanted, with their types: a ``pyarrow.Schema``, or what
                ``pyarrow.schema()`` takes.
            batch_rows: rows of a batch at most. Batches are smaller where less content was there.

        Returns:
            An iterable and an asynchronous iterable; asking again goes on where it stopped.

        Raises:
            ConfigurationError: the schema is none, messages were taken from the reader already,
                or pyarrow is not installed.
        """
        try:
            from gazette_sdk.message.columns import (  # noqa: PLC0415 - an extra
                decoders,
                record_batches,
                rows,
            )
        except ImportError as error:
            raise ConfigurationError(
                f"columns need pyarrow ({error}): pip install 'gazette-sdk[arrow]'"
            ) from error
        wanted = record_batches.checked_schema(schema)
        if batch_rows < 1:
            raise ConfigurationError(f"batch_rows={batch_rows}: use at least 1")
        if self._columns is not None and self._columns.schema != wanted:
            raise ConfigurationError("the reader delivers columns of another schema already")
        if self._columns is None:
            if self._batches.has_begun:
                raise ConfigurationError(
                    "messages were taken from the reader already: make another one for columns"
                )
            new_decoder = partial(
                decoders.column_decoder, self._type, wanted, sequenced=self._is_committed
            )
            batches = BatchReader(
                dataclasses.replace(self._plan, item_bytes_max=record_batches.ITEM_BYTES_MAX),
                self._transport,
                new_decoder,
                self._new_delivery(rows.selected),
                on_error=self._on_error,
            )
            self._columns = record_batches.RecordBatches(wanted, batches, batch_rows)
        return self._columns

    # ------------------------------------------------------------- iteration

    def __iter__(self) -> Iterator[Envelope[M]]:
        self._check_delivers_messages()
        self._batches.begin(blocks=True)
        # No Python code runs per envelope, except the consumer's own.
        return chain.from_iterable(self._iterators())

    def _iterators(self) -> Iterator[Iterator[Envelope[M]]]:
        """Yield an iterator of the rest of the batch at hand, then of each later batch."""
        while True:
            yield self._left
            batch = self._batches.next_batch()
            if batch is None:
                return
            self._left = iter(batch)

    async def __aiter__(self) -> AsyncIterator[Envelope[M]]:
        self._check_delivers_messages()
        self._batches.begin()
        while True:
            for envelope in self._left:
                yield envelope
            batch = await self._batches.next_batch_async()
            if batch is None:
                return
            self._left = iter(batch)

    def _check_delivers_messages(self) -> None:
        if self._columns is not None:
            raise ConfigurationError(
                "the reader delivers columns: iterate what arrow() returned, or make another one"
            )

    # ----------------------------------------------------------------- close

    def close(self) -> None:
        """End reading. ``with`` does so.

        An iteration, in any thread, ends behind the envelopes of its chunk.
        """
        self._batches.close()
        if self._columns is not None:
            self._columns.close()

    async def aclose(self) -> None:
        """As :meth:`close`, in a coroutine. ``async with`` does so."""
        await self._batches.aclose()
        if self._columns is not None:
            await self._columns.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()


def _check(
    isolation: str,
    checkpoint: Checkpoint | bytes | None,
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
    if not callable(on_error) and on_error not in {"raise", "skip"}:
        raise ConfigurationError(f"on_error={on_error!r}: use 'raise', 'skip' or a function")
