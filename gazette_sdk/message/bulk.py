"""Batches of messages, encoded and stamped in bulk.

Beside its own encoding a message costs a key, a slice of the encoded lines and a UUID's text out of
a matrix: all in loops of C. All messages are checked before the first one is stamped.

The rows of record batches are messages of a class that is made for their columns (:class:`Row`).
"""

from __future__ import annotations

import contextvars
import functools
import keyword
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from gazette_sdk.errors import (
    BackPressureError,
    FramingError,
    MappingError,
    UserCodeError,
    ValidationError,
)
from gazette_sdk.framing import JsonLines
from gazette_sdk.message.kinds.base import Spliced
from gazette_sdk.message.kinds.json import KEY, own_uuid, spliced
from gazette_sdk.message.mapping import Direct, SelectorMapping, check_mapping, checked_journal
from gazette_sdk.message.mapping import Mapping as JournalMapping
from gazette_sdk.message.receipt import BatchReceipt
from gazette_sdk.message.sender import Outbox, Sender, Sequences, no_mapping
from gazette_sdk.message.uuid import PRODUCER_BYTES, TICK, Stamp, build_uuid
from gazette_sdk.tracing import ROOM_BYTES, traceparent_of
from gazette_sdk.transport.loop import guarded
from gazette_sdk.user_code import call, call_each

if TYPE_CHECKING:
    import pyarrow as pa


_CLASSES_KNOWN_MAX = 64
"""Classes of so many sets of columns are kept: each costs as much as encoding thousands of rows."""

_MEANT = frozenset({"uuid_field", "validate"})
"""Attributes which mean something where a class of messages has them."""


class Row(msgspec.Struct, gc=False):
    """A row: its values are attributes, where their names allow that, and items."""

    fields_by_column: ClassVar[dict[str, str]] = {}

    def __getitem__(self, column: str) -> Any:
        return getattr(self, self.fields_by_column[column])

    def new_acknowledgement(self, journal: str) -> dict[str, Any]:
        """An object without any column."""
        del journal
        return {}


class Rows(list[Row]):
    """Rows of a record batch.

    Attributes:
        columns: the values of each column.
    """

    columns: dict[str, list[Any]]


def is_arrow(messages: object) -> bool:
    """Return True for columns: pyarrow's, or anything that hands out an Arrow stream."""
    kind = type(messages)
    return hasattr(kind, "__arrow_c_stream__") or hasattr(kind, "__arrow_c_array__")


def table_of(messages: Any) -> pa.Table:
    """Columns as a table; nothing is copied.

    Raises:
        ValidationError: two columns have one name, or one has that of the message UUID, or one
            that cannot be written; or these are no columns of rows.
    """
    import pyarrow as pa  # noqa: PLC0415 - only where columns are given

    if isinstance(messages, pa.Table):
        table = messages
    elif isinstance(messages, pa.RecordBatch):
        table = pa.Table.from_batches([messages])
    else:
        try:
            table = pa.table(messages)
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise ValidationError(
                f"a {type(messages).__name__} is no table: {error}; give columns with their names,"
                " as pyarrow.table({'name': column})",
                kind="columns",
            ) from error
    twice = {name for name in table.column_names if table.column_names.count(name) > 1}
    if twice:
        raise ValidationError(
            f"columns of a batch have the same name: {', '.join(sorted(twice))}", kind="columns"
        )
    if KEY in table.column_names:
        raise own_uuid(f"the batch has a column {KEY!r}")
    for name in table.column_names:
        if _unusual(name):
            raise ValidationError(
                f"column {name!r} has a quote, a backslash or a control character in its name:"
                " rename it, or publish the rows as dicts",
                kind="columns",
            )
    return table


_unusual = re.compile(r'["\\\x00-\x1f]').search
"""Finds what no field of a class can be renamed to."""


def rows_of(table: pa.Table, begin: int, count: int) -> Rows:
    """Rows of a table, in order.

    Raises:
        ValidationError: a column has a value that no Python object is for, or JSON cannot hold.
    """
    from gazette_sdk.message.columns.schema import is_finite  # noqa: PLC0415 - imports pyarrow

    part = table.slice(begin, count)
    columns: dict[str, list[Any]] = {}
    for name in part.column_names:
        if not is_finite(part.column(name)):
            raise ValidationError(
                f"column {name!r} has NaN or an infinite number, which JSON cannot hold; write null"
                " in its place, or cast the column to string",
                kind="columns",
            )
        try:
            columns[name] = _values(part.column(name))
        except (TypeError, ValueError, OverflowError) as error:
            raise ValidationError(
                f"a value of column {name!r}, of type {part.column(name).type}, cannot be written:"
                f" {error}; cast the column to string, or leave these rows out",
                kind="columns",
            ) from error
    made = _row_class(tuple(columns))
    rows = Rows(map(made, *columns.values())) if columns else Rows(made() for _ in range(count))
    rows.columns = columns
    return rows


def known_keys(messages: Sequence[Any], key: Callable[[Any], Any]) -> list[Any] | None:
    """The key of each message, if they are rows, and the key is a column; else None."""
    if not isinstance(messages, Rows) or not isinstance(key, itemgetter | attrgetter):
        return None
    names = key.__reduce__()[1]
    return messages.columns.get(names[0]) if len(names) == 1 else None


@functools.lru_cache(maxsize=_CLASSES_KNOWN_MAX)
def _row_class(columns: tuple[str, ...]) -> type[Row]:
    fields: list[Any] = []
    by_column = {}
    taken = _MEANT.union(dir(Row))
    for index, column in enumerate(columns):
        usable = column.isidentifier() and not keyword.iskeyword(column)
        name = column if usable and column not in taken else f"column_{index}_"
        by_column[column] = name
        fields.append((name, Any, msgspec.field(name=column)))
    made: type[Any] = msgspec.defstruct(
        "Row", fields, bases=(Row,), namespace={"fields_by_column": by_column}, gc=False
    )
    return made


def _values(column: pa.ChunkedArray) -> list[Any]:
    """The values of a column as Python objects which JSON can hold."""
    import pyarrow as pa  # noqa: PLC0415 - only where columns are given

    kind = column.type
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        return _nanosecond_texts(column)
    values: list[Any] = column.to_pylist()
    if "map<" in str(kind):
        return [_with_objects(value, kind) for value in values]
    return values


def _with_objects(value: Any, kind: pa.DataType) -> Any:
    """Return a value whose maps, which are lists of pairs, are dictionaries at any depth."""
    import pyarrow as pa  # noqa: PLC0415 - only where columns are given

    if value is None:
        return None
    if pa.types.is_map(kind):
        return {key: _with_objects(item, kind.item_type) for key, item in value}
    if isinstance(value, list):
        return [_with_objects(item, kind.value_type) for item in value]
    if pa.types.is_struct(kind):
        return {field.name: _with_objects(value[field.name], field.type) for field in kind}
    return value


def _nanosecond_texts(column: pa.ChunkedArray) -> list[str | None]:
    """RFC 3339 texts: datetimes would lose the last three digits."""
    suffix = "Z" if column.type.tz is not None else ""
    times = column.cast("int64").fill_null(0).to_numpy()
    missing = column.is_null().to_numpy()
    texts = np.datetime_as_string(times.astype("datetime64[ns]"), unit="ns")
    return [
        None if absent else f"{text}{suffix}"
        for text, absent in zip(texts.tolist(), missing.tolist(), strict=True)
    ]


SLICE_COUNT = 4096
"""Messages which are stamped at once: others of the publisher wait for them. More of them make
each no cheaper."""

KEPT_BYTES_MAX = 64 << 20
"""Encoded messages of a batch which are kept until it is their turn. What is encoded beyond that,
to see that it can be, is encoded once more when it is sent."""

_STAMP_BYTES = 64
"""More than the bytes of a UUID and of the punctuation around it."""


def publish_batch(
    sender: Sender,
    messages: Any,
    mapping: JournalMapping | None,
    sequences: Sequences | None = None,
) -> BatchReceipt:
    """Publish a batch. See :meth:`Publisher.publish_batch`.

    Args:
        sender: the publisher's.
        messages: the messages.
        mapping: None for the publisher's own.
        sequences: of their transaction; None outside of transactions.
    """
    chosen = sender.mapping if mapping is None else mapping
    if chosen is None:
        raise no_mapping()
    check_mapping(chosen)
    batch = _Batch(sender, messages, chosen, sequences)
    if not (sender.deferred.calls and sender.is_on_loop):
        slices = batch.slices()
        if slices is not None:
            return batch.add(slices)

    context = contextvars.copy_context()  # with the span in which it is published

    async def publish() -> BatchReceipt:
        await batch.list_journals()
        known = batch.slices()
        assert known is not None
        return context.run(batch.add, known)

    return sender.deferred.add(publish, lambda append: BatchReceipt(append, batch.count), sequences)


class _Batch:
    """Messages of one call."""

    def __init__(
        self, sender: Sender, messages: Any, mapping: JournalMapping, sequences: Sequences | None
    ) -> None:
        self._sender = sender
        self._mapping = mapping
        self._sequences = sequences
        self._is_adding = False
        self._table = None
        self._messages: Sequence[Any] = ()
        if is_arrow(messages):
            self._table = table_of(messages)
            self.count: int = self._table.num_rows
            return
        if isinstance(messages, Mapping | str | bytes) or not isinstance(messages, Iterable):
            raise ValidationError(
                f"a batch is a list of messages, or columns, and not one {type(messages).__name__}"
                "; publish() takes one message",
                kind="batch",
            )
        self._messages = messages if isinstance(messages, list | tuple) else list(messages)
        self.count = len(self._messages)

    def _load(self, begin: int) -> Sequence[Any]:
        """Return the slice that begins at a position."""
        if self._table is not None:
            return rows_of(self._table, begin, SLICE_COUNT)
        return self._messages[begin : begin + SLICE_COUNT]

    async def list_journals(self) -> None:
        """Wait until the journals of all messages are listed."""
        for begin in range(0, self.count, SLICE_COUNT):
            await self._sender.list_journals(self._load(begin), self._mapping)

    def slices(self) -> list[Slice] | None:
        """Return all messages, found to be good; None if their journals must be awaited."""
        fixed: list[Outbox] = []
        try:
            return self._slices(fixed)
        except BaseException:
            for outbox in fixed:
                outbox.record_fields = 0  # none of its records is published
            raise

    def _slices(self, fixed: list[Outbox]) -> list[Slice] | None:
        """Return all messages, found to be good; None if their journals must be awaited.

        Args:
            fixed: gets the outboxes whose number of fields is fixed by this batch.
        """
        slices = []
        kept_bytes = 0
        for begin in range(0, self.count, SLICE_COUNT):
            messages = self._load(begin)
            try:
                _validate(self._sender, messages)
                routed = _route(self._sender, messages, self._mapping)
            except MappingError as error:
                raise self._located(error, begin, messages) from error
            except UserCodeError as error:
                raise _located(error, begin) from error.error
            if routed is None:
                return None
            if self._sequences is not None:
                for index in routed.firsts():
                    self._sequences.expect(routed.of(index), messages[index])
            part = Slice(begin, messages, routed, self._load, fixed)
            kept_bytes += part.length_bytes
            if kept_bytes > KEPT_BYTES_MAX:
                part.forget()
            slices.append(part)
        return slices

    def _located(self, error: MappingError, begin: int, messages: Sequence[Any]) -> MappingError:
        """Return the same error with the position of its message."""
        for index, message in enumerate(messages):
            try:
                self._sender.outbox(message, self._mapping)
            except MappingError as found:
                text = f"message {begin + index} of the batch: {found}"
                return MappingError(text, journal=found.journal)
        return error

    def add(self, slices: list[Slice]) -> BatchReceipt:
        """Stamp all messages, and add them after what waits for their journals.

        Raises:
            BackPressureError: too much is pending, and waiting is not wanted or not possible.
            ClosedError: the publisher is closed.
        """
        receipt = BatchReceipt()
        self._check_room(sum(part.length_bytes for part in slices))
        for part in slices:
            try:
                self._add(part, receipt)
            except BaseException as error:
                self._sender.note_interrupt(error, is_adding=self._is_adding)
                raise
        return receipt

    def _check_room(self, length_bytes: int) -> None:
        """Refuse the batch where its caller must not wait, and there is no room."""
        sender = self._sender
        if sender.may_block:
            return
        if length_bytes > sender.pending_bytes_max:
            raise BackPressureError(
                f"the batch has {length_bytes} bytes of messages, and at most"
                f" {sender.pending_bytes_max} bytes may be pending; publish smaller batches, or"
                " raise pending_bytes_max"
            )
        with guarded(sender.lock):
            sender.wait_for_room()

    def _add(self, part: Slice, receipt: BatchReceipt) -> None:
        sender, sequences = self._sender, self._sequences
        must_send = []
        with guarded(sender.lock):
            if sender.may_block:
                sender.wait_for_room()
            if sender.is_closed:
                raise sender.closed_error()
            stamp = sender.stamp if sequences is None else sequences.stamp
            if sender.clock is None:
                first = stamp.reserve(part.count)
            else:
                first = sender.clock.tick(part.count)
                stamp.clock = first + (part.count - 1) * TICK
            framed = part.frames(stamp, first)
            context = None
            if sender.traces is not None and (context := sender.traces.sampled()) is not None:
                framed = part.traced(framed, traceparent_of(context))
            self._is_adding = True
            for outbox, first_index, frames, count in framed:
                append, begin = outbox.add_frames(frames)
                if context is not None and sender.traces is not None:
                    clock = first + first_index * TICK
                    uuid = functools.partial(build_uuid, stamp.producer, clock, stamp.flags)
                    sender.traces.note(append, context, uuid)
                if sequences is None:
                    append.context = sender
                else:
                    sequences.note(outbox, append, first + first_index * TICK)
                receipt.add(append, begin, begin + len(frames), count)
                if outbox.appender.push(append, len(frames), count):
                    must_send.append(outbox.appender)
        for appender in must_send:
            appender.send()
        self._is_adding = False


def _located(error: UserCodeError, begin: int) -> UserCodeError:
    """Return the same error with the position of its message, where that is known."""
    if error.index is None:
        return error
    index = begin + error.index
    return UserCodeError(f"message {index} of the batch: {error}", error=error.error, index=index)


def _validate(sender: Sender, messages: Sequence[Any]) -> None:
    types: set[type[Any]] = set(map(type, messages))
    validators = {each: sender.validator(each, messages) for each in types}
    if len(types) == 1:
        [validate] = validators.values()
        if validate is not None:
            call_each(validate, messages)
    elif any(validators.values()):
        for message in messages:
            validate = validators[type(message)]
            if validate is not None:
                call(validate, message)


def _route(sender: Sender, messages: Sequence[Any], mapping: JournalMapping) -> Routed | None:
    """Return the outboxes of messages, at least one; None if that must be awaited.

    Raises:
        MappingError: a message maps to no journal.
        FramingError: a journal's content type has no framing.
    """
    if isinstance(mapping, SelectorMapping):
        return _route_listed(sender, messages, mapping)
    if isinstance(mapping, Direct):
        outbox = sender.outbox_of(mapping.journal)
        return None if outbox is None else Routed([outbox])
    names = call_each(mapping, messages)
    if set(map(type, names)) != {str}:
        names = [checked_journal(name, mapping) for name in names]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    outboxes = []
    for name in numbers:
        opened = sender.outbox_of(checked_journal(name, mapping))
        if opened is None:
            return None
        outboxes.append(opened)
    if len(outboxes) == 1:
        return Routed(outboxes)
    return Routed(outboxes, np.array(list(map(numbers.__getitem__, names)), dtype=np.intp))


def _route_listed(
    sender: Sender, messages: Sequence[Any], mapping: SelectorMapping
) -> Routed | None:
    partitions = sender.partitions(mapping)
    if partitions is None:
        return None
    keys = None if mapping.key is None else known_keys(messages, mapping.key)
    picked = mapping.pick_many(messages, partitions, keys)
    indexes: npt.NDArray[Any] = (
        np.frombuffer(picked, dtype=np.uint8)
        if isinstance(picked, bytes)
        else np.array(picked, dtype=np.intp)
    )
    used = np.flatnonzero(np.bincount(indexes)).tolist()
    outboxes = [
        sender.outboxes.get(journal) or sender.open_listed(journal, partitions)
        for journal in map(partitions.names.__getitem__, used)
    ]
    if len(outboxes) == 1:
        return Routed(outboxes)
    if used[-1] >= len(used):
        indexes = np.searchsorted(np.array(used), indexes)
    return Routed(outboxes, indexes)


@dataclass(slots=True)
class Routed:
    """Outboxes of messages.

    Attributes:
        outboxes: of their journals.
        indexes: index of each message's outbox; None if there is one only.
    """

    outboxes: list[Outbox]
    indexes: npt.NDArray[np.integer[Any]] | None = None

    def of(self, index: int) -> Outbox:
        """Return the outbox of one message."""
        return self.outboxes[0 if self.indexes is None else int(self.indexes[index])]

    def firsts(self) -> list[int]:
        """Return the index of each journal's first message, ascending."""
        if self.indexes is None:
            return [0]
        firsts: list[int] = np.sort(np.unique(self.indexes, return_index=True)[1]).tolist()
        return firsts


class Slice:
    """Successive messages of a batch, which were checked.

    Args:
        begin: index of the first one in the batch.
        messages: the messages.
        routed: their outboxes.
        load: returns the messages again.
        fixed: gets the outboxes whose number of fields they fix.

    Attributes:
        count: number of messages.
        routed: their outboxes.
        length_bytes: about the length of their frames.

    Raises:
        ValidationError: one cannot be encoded; says which.
        FramingError: likewise.
    """

    __slots__ = (
        "_begin",
        "_fixed",
        "_load",
        "_prefix",
        "_spliced",
        "count",
        "length_bytes",
        "routed",
    )

    def __init__(
        self,
        begin: int,
        messages: Sequence[Any],
        routed: Routed,
        load: Callable[[int], Sequence[Any]],
        fixed: list[Outbox],
    ) -> None:
        self._fixed = fixed
        self.count = len(messages)
        self.routed = routed
        self._begin = begin
        self._load = load
        self._spliced = self._encode(messages)
        self._prefix = b"" if self._spliced is None else self._spliced.prefix
        if self._spliced is None:
            self.length_bytes = self._check(messages)
        else:
            self.length_bytes = len(self._spliced.lines)

    def forget(self) -> None:
        """Give the memory back; the messages are encoded again when they are sent."""
        self._spliced = None

    def frames(self, stamp: Stamp, first: int) -> list[tuple[Outbox, int, bytes, int]]:
        """Return the messages' frames, stamped with successive ticks. Only once.

        Args:
            stamp: of their producer.
            first: clock of the first message.

        Returns:
            For each journal its outbox, the index of its first message, the frames, and their
            number.
        """
        spliced, self._spliced = self._spliced, None
        if spliced is None:
            messages = self._load(self._begin)
            spliced = self._encode(messages)
            if spliced is None:
                return self._frames_one_by_one(messages, stamp, first)
        pieces, joint = _cut(spliced.lines)
        rows = stamp.texts(first, self.count, b"\n" + spliced.prefix, joint)
        indexes = self.routed.indexes
        if indexes is None:
            return [(self.routed.outboxes[0], 0, _lines(rows, pieces), self.count)]
        found = []
        for number, outbox in enumerate(self.routed.outboxes):
            chosen = np.flatnonzero(indexes == number)
            own: Sequence[bytes] = [pieces[index] for index in chosen[:1]]
            if len(chosen) > 1:
                own = itemgetter(*chosen.tolist())(pieces)
            if own:
                found.append((outbox, int(chosen[0]), _lines(rows[chosen], own), len(own)))
        return found

    def traced(
        self, framed: list[tuple[Outbox, int, bytes, int]], parent: str
    ) -> list[tuple[Outbox, int, bytes, int]]:
        """Return frames with the context of a trace in a batch's first message of each journal.

        Args:
            framed: what :meth:`frames` returned.
            parent: the context. Messages that are not encoded in bulk get none.
        """
        if self._begin or not self._prefix:
            return framed
        found = []
        for outbox, index, frames, count in framed:
            has_room = frames.find(b"\n", 0, outbox.frame_bytes_max - ROOM_BYTES) >= 0
            traced = spliced(frames, self._prefix, parent) if has_room else frames
            found.append((outbox, index, traced, count))
        return found

    # ---------------------------------------------------------------- pieces

    def _encode(self, messages: Sequence[Any]) -> Spliced | None:
        outboxes = self.routed.outboxes
        types = set(map(type, messages))
        spliced = None
        try:
            if len(types) == 1 and all(type(box.framing) is JsonLines for box in outboxes):
                message_type = types.pop()
                kinds = [box.kind(message_type) for box in outboxes]
                spliced = kinds[0].encode_many(messages)
                if spliced is not None and self._may_be_oversized(spliced):
                    self._check(messages)
        except (ValidationError, UserCodeError):
            self._check(messages)
            raise
        return spliced

    def _may_be_oversized(self, spliced: Spliced) -> bool:
        """Return True if a message is near the limit of frames, or above it."""
        limit = min(box.frame_bytes_max for box in self.routed.outboxes)
        limit -= len(spliced.prefix) + _STAMP_BYTES
        lines = spliced.lines
        return len(lines) > limit and max(map(len, lines.split(b"\n{"))) > limit

    def _check(self, messages: Sequence[Any]) -> int:
        """Encode each message for nothing, to find a bad one before any is published.

        Returns:
            The length of all frames.
        """
        stamp = Stamp(bytes(PRODUCER_BYTES))
        length_bytes = 0
        for index, message in enumerate(messages):
            outbox = self.routed.of(index)
            if not outbox.record_fields:
                self._fixed.append(outbox)
            try:
                length_bytes += len(outbox.frame(message, stamp))
            except UserCodeError as error:
                error.index = index
                raise _located(error, self._begin) from error.error
            except (ValidationError, FramingError) as error:
                text = f"message {self._begin + index} of the batch: {error}"
                if isinstance(error, FramingError):
                    raise FramingError(text, journal=outbox.journal) from error
                raise ValidationError(text, kind=error.kind, journal=outbox.journal) from error
        return length_bytes

    def _frames_one_by_one(
        self, messages: Sequence[Any], stamp: Stamp, first: int
    ) -> list[tuple[Outbox, int, bytes, int]]:
        found: dict[str, tuple[Outbox, int, bytearray, list[int]]] = {}
        try:
            for index, message in enumerate(messages):
                outbox = self.routed.of(index)
                stamp.clock = first + index * TICK
                if outbox.journal not in found:
                    found[outbox.journal] = (outbox, index, bytearray(), [])
                _, _, content, indexes = found[outbox.journal]
                content += outbox.frame(message, stamp)
                indexes.append(index)
        finally:
            stamp.clock = first + (self.count - 1) * TICK
        return [
            (outbox, index, bytes(content), len(indexes))
            for outbox, index, content, indexes in found.values()
        ]


def _cut(lines: bytes) -> tuple[list[bytes], bytes]:
    """Return JSON objects without their opening braces, and the text between UUID and object."""
    pieces = lines.split(b"\n{")
    pieces[0] = pieces[0][1:]
    pieces[-1] = pieces[-1][:-1]
    if b"}" in pieces:
        return [piece if piece == b"}" else b"," + piece for piece in pieces], b'"'
    return pieces, b'",'


def _lines(rows: npt.NDArray[np.uint8], pieces: Sequence[bytes]) -> bytes:
    """Return JSON lines: each row, which begins with the line break before it, and its piece."""
    # No row ends in a zero, which numpy would strip from text.
    heads = rows.reshape(-1).view(f"S{rows.shape[1]}").tolist()
    heads[0] = heads[0][1:]
    parts: list[Any] = [b"\n"] * (2 * len(pieces) + 1)
    parts[:-1:2] = heads
    parts[1::2] = pieces
    return b"".join(parts)
