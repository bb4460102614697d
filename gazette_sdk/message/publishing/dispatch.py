"""Way of a message from ``publish`` to its outbox: validated, mapped, encoded, or deferred."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from gazette_sdk.errors import MappingError, ValidationError
from gazette_sdk.message.kinds import validator_of
from gazette_sdk.message.mapping import Mapping as MessageMapping
from gazette_sdk.message.mapping import SelectorMapping
from gazette_sdk.message.publishing.bulk import SLICE_COUNT, Slice
from gazette_sdk.message.publishing.deferred import Deferred
from gazette_sdk.message.publishing.outbox import Outbox
from gazette_sdk.message.publishing.producer import Sequences
from gazette_sdk.message.publishing.receipt import BatchReceipt, Receipt
from gazette_sdk.message.publishing.routes import Routes
from gazette_sdk.message.publishing.rows import is_arrow, rows_of, table_of
from gazette_sdk.message.publishing.sender import Sender
from gazette_sdk.transport.append.pending import PendingAppend

__all__ = ["AnyMapping", "Dispatch", "OpenTransaction"]

AnyMapping: TypeAlias = MessageMapping | SelectorMapping
"""A callable from messages to journals, or a mapping over a selector."""

KEPT_BYTES_MAX = 64 << 20
"""Encoded messages of a batch which are kept until it is their turn. What is encoded beyond that,
to see that it can be, is encoded once more when it is sent."""


class OpenTransaction:
    """Transaction that takes messages.

    Attributes:
        sequences: its messages in each journal.
        waits: futures of calls that wait for a first listing.
    """

    def __init__(self, sequences: Sequences) -> None:
        self.sequences = sequences
        self.waits: list[PendingAppend] = []


class Dispatch:
    """Dispatcher of a publisher's messages to the outboxes of their journals.

    Args:
        sender: the publisher's.
        mapping: where none is given with the messages.

    Attributes:
        sender: the publisher's.
        deferred: calls that wait for a first listing.
    """

    def __init__(self, sender: Sender, mapping: AnyMapping | None) -> None:
        self.sender = sender
        self.deferred = Deferred(sender)
        self._mapping = mapping
        self._routes = Routes(sender)
        self._validators: dict[type, Callable[[Any], object] | None] = {}

    def publish(
        self, message: Any, mapping: AnyMapping | None, txn: OpenTransaction | None
    ) -> Receipt:
        """Publish a message. See :meth:`Publisher.publish`."""
        message_type: type = type(message)
        try:
            validate = self._validators[message_type]
        except KeyError:
            validate = self._validators[message_type] = validator_of(message_type)
        if validate is not None:
            validate(message)
        chosen = self._mapping if mapping is None else mapping
        if chosen is None:
            raise _no_mapping()
        outbox = self._routes.of(message, chosen)
        if outbox is not None and not self._must_defer():
            if txn is None:
                return self.sender.add(outbox, message)
            return self._add(outbox, message, txn)
        self.deferred.check()

        async def settle() -> Receipt:
            await self._routes.know([message], chosen)
            known = self._routes.of(message, chosen)
            assert known is not None
            return self._add(known, message, txn)

        placeholder = self._placeholder()
        receipt = Receipt(placeholder, 0, 0)
        self._defer(settle, receipt, placeholder, txn)
        return receipt

    def publish_batch(
        self, messages: Any, mapping: AnyMapping | None, txn: OpenTransaction | None
    ) -> BatchReceipt:
        """Publish a batch. See :meth:`Publisher.publish_batch`."""
        chosen = self._chosen(mapping)
        source = _Source(messages)
        slices = (
            None
            if self.deferred.calls and self.sender.is_on_loop
            else self._slices(source, chosen, txn)
        )
        if slices is not None:
            return self._add_slices(slices, txn)
        self.deferred.check()

        async def settle() -> BatchReceipt:
            for begin in source.begins():
                await self._routes.know(source.load(begin), chosen)
            known = self._slices(source, chosen, txn)
            assert known is not None
            return self._add_slices(known, txn)

        receipt = BatchReceipt()
        self._defer(settle, receipt, receipt.hold(self._placeholder(), source.count), txn)
        return receipt

    def acknowledge(self, frames: Mapping[str, bytes]) -> BatchReceipt:
        """Write stored acknowledgements. See :meth:`Publisher.acknowledge`."""
        if not self._must_defer():
            try:
                outboxes = [self._routes.of_journal(journal) for journal in frames]
            except MappingError as error:
                raise _intents_error(error) from error
            if None not in outboxes:
                return self._add_frames(frames)
        self.deferred.check()

        async def settle() -> BatchReceipt:
            try:
                await self._routes.know(frames, None)
            except MappingError as error:
                raise _intents_error(error) from error
            return self._add_frames(frames)

        receipt = BatchReceipt()
        self._defer(settle, receipt, receipt.hold(self._placeholder(), len(frames)), None)
        return receipt

    # ---------------------------------------------------------------- pieces

    def _must_defer(self) -> bool:
        """Return True on the loop while calls wait: later ones wait behind them."""
        return bool(self.deferred.calls) and self.sender.is_on_loop

    def _chosen(self, mapping: AnyMapping | None) -> AnyMapping:
        chosen = self._mapping if mapping is None else mapping
        if chosen is None:
            raise _no_mapping()
        return chosen

    def _defer(
        self,
        settle: Callable[[], Any],
        receipt: Receipt | BatchReceipt,
        placeholder: PendingAppend,
        txn: OpenTransaction | None,
    ) -> None:
        self.deferred.add(settle, receipt, placeholder, has_transaction=txn is not None)
        if txn is not None:
            txn.waits.append(placeholder)

    def _placeholder(self) -> PendingAppend:
        return PendingAppend(loop=self.sender.connection().loop)

    def _add(self, outbox: Outbox, message: Any, txn: OpenTransaction | None) -> Receipt:
        if txn is None:
            return self.sender.add(outbox, message)
        txn.sequences.expect(outbox, message)
        return self.sender.add(outbox, message, txn.sequences)

    def _slices(
        self, source: _Source, mapping: AnyMapping, txn: OpenTransaction | None
    ) -> list[Slice] | None:
        """All of a batch, found to be good; None if its journals are not known yet."""
        slices = []
        kept_bytes = 0
        for begin in source.begins():
            messages = source.load(begin)
            self._validate(messages)
            try:
                routed = self._routes.of_many(messages, mapping)
            except MappingError as error:
                raise self._located(error, begin, messages, mapping) from error
            if routed is None:
                return None
            if txn is not None:
                for index in routed.firsts():
                    txn.sequences.expect(routed.of(index), messages[index])
            part = Slice(begin, messages, routed, source.load)
            kept_bytes += part.length_bytes
            if kept_bytes > KEPT_BYTES_MAX:
                part.forget()
            slices.append(part)
        return slices

    def _located(
        self, error: MappingError, begin: int, messages: Sequence[Any], mapping: AnyMapping
    ) -> MappingError:
        """The same error, saying which message it is about."""
        for index, message in enumerate(messages):
            try:
                self._routes.of(message, mapping)
            except MappingError as found:
                text = f"message {begin + index} of the batch: {found}"
                return MappingError(text, journal=found.journal)
        return error

    def _validate(self, messages: Sequence[Any]) -> None:
        types: set[type[Any]] = set(map(type, messages))
        validators = {each: validator_of(each) for each in types}
        if any(validators.values()):
            for message in messages:
                validate = validators[type(message)]
                if validate is not None:
                    validate(message)

    def _add_slices(self, slices: list[Slice], txn: OpenTransaction | None) -> BatchReceipt:
        receipt = BatchReceipt()
        sequences = None if txn is None else txn.sequences
        self.sender.check_room(sum(part.length_bytes for part in slices))
        for part in slices:
            self.sender.add_slice(part, receipt, sequences)
        return receipt

    def _add_frames(self, frames: Mapping[str, bytes]) -> BatchReceipt:
        receipt = BatchReceipt()
        known = [(self.sender.outboxes[journal], frame) for journal, frame in frames.items()]
        for append, begin, frame in self.sender.add_frames(known):
            receipt.add(append, begin, begin + len(frame), 1)
        return receipt


class _Source:
    """The messages of a batch, in slices."""

    def __init__(self, messages: Any) -> None:
        self._table = None
        self._messages: Sequence[Any] = ()
        if is_arrow(messages):
            self._table = table_of(messages)
            self.count: int = self._table.num_rows
            return
        if isinstance(messages, Mapping | str | bytes):
            raise ValidationError(
                f"a batch is a list of messages, or columns, and not one {type(messages).__name__}",
                kind="batch",
            )
        self._messages = messages if isinstance(messages, list | tuple) else list(messages)
        self.count = len(self._messages)

    def begins(self) -> range:
        """Return the positions at which slices begin."""
        return range(0, self.count, SLICE_COUNT)

    def load(self, begin: int) -> Sequence[Any]:
        """Return the slice that begins at a position."""
        if self._table is not None:
            return rows_of(self._table, begin, SLICE_COUNT)
        return self._messages[begin : begin + SLICE_COUNT]


def _no_mapping() -> MappingError:
    return MappingError("there is no mapping: give one to the Publisher or to publish()")


def _intents_error(error: MappingError) -> MappingError:
    return MappingError(
        f"acknowledgement intents name a journal that cannot be written to: {error}",
        journal=error.journal,
    )
