"""What is published, on its way to the outboxes: validated, mapped, encoded, or deferred."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from gazette_sdk.errors import MappingError, ValidationError
from gazette_sdk.message.kinds import validator_of
from gazette_sdk.message.mapping import Mapping as MessageMapping
from gazette_sdk.message.mapping import SelectorMapping
from gazette_sdk.message.publishing.batch import Batch
from gazette_sdk.message.publishing.bulk import SLICE_COUNT, Slice
from gazette_sdk.message.publishing.deferred import Deferred
from gazette_sdk.message.publishing.outbox import Outbox
from gazette_sdk.message.publishing.producer import Sequences
from gazette_sdk.message.publishing.receipt import BatchReceipt, Receipt
from gazette_sdk.message.publishing.routes import Routes
from gazette_sdk.message.publishing.rows import is_arrow, rows_of, table_of
from gazette_sdk.message.publishing.sender import Sender, on_loop

__all__ = ["AnyMapping", "Dispatch", "Within"]

AnyMapping: TypeAlias = MessageMapping | SelectorMapping
"""A callable from messages to journals, or a mapping over a selector."""

KEPT_BYTES_MAX = 64 << 20
"""Encoded messages of a batch which are kept until it is their turn. What is encoded beyond that,
to see that it can be, is encoded once more when it is sent."""


class Within:
    """The transaction that something is published within.

    Attributes:
        sequences: what it has open.
        waits: ends of calls that wait for a first listing.
    """

    def __init__(self, sequences: Sequences) -> None:
        self.sequences = sequences
        self.waits: list[concurrent.futures.Future[int]] = []


class Dispatch:
    """Where all that a publisher publishes comes through.

    Args:
        sender: sees messages through.
        mapping: where none is given with the messages.

    Attributes:
        sender: sees messages through.
        deferred: what waits for a first listing.
        is_parents: the process was forked, and this is what the parent had.
    """

    def __init__(self, sender: Sender, mapping: AnyMapping | None) -> None:
        self.sender = sender
        self.deferred = Deferred(sender)
        self.is_parents = False
        self._mapping = mapping
        self._routes = Routes(sender)
        self._validators: dict[type, Callable[[Any], object] | None] = {}

    def publish(self, message: Any, mapping: AnyMapping | None, within: Within | None) -> Receipt:
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
        if outbox is not None and not (self.deferred.calls and on_loop()):
            if within is None:
                return self.sender.add(outbox, message)
            return self._add(outbox, message, within)
        self.deferred.check()

        async def settle() -> Receipt:
            await self._routes.know([message], chosen)
            known = self._routes.of(message, chosen)
            assert known is not None
            return self._add(known, message, within)

        placeholder = Batch("")
        receipt = Receipt(placeholder, 0, 0)
        self._defer(settle, receipt, placeholder, within)
        return receipt

    def publish_batch(
        self, messages: Any, mapping: AnyMapping | None, within: Within | None
    ) -> BatchReceipt:
        """Publish a batch. See :meth:`Publisher.publish_batch`."""
        chosen = self._chosen(mapping)
        source = _Source(messages)
        slices = None if self.deferred.calls and on_loop() else self._slices(source, chosen, within)
        if slices is not None:
            return self._add_slices(slices, within)
        self.deferred.check()

        async def settle() -> BatchReceipt:
            for begin in source.begins():
                await self._routes.know(source.load(begin), chosen)
            known = self._slices(source, chosen, within)
            assert known is not None
            return self._add_slices(known, within)

        receipt = BatchReceipt()
        self._defer(settle, receipt, receipt.hold(source.count), within)
        return receipt

    def acknowledge(self, frames: Mapping[str, bytes]) -> BatchReceipt:
        """Write stored acknowledgements. See :meth:`Publisher.acknowledge`."""
        if not (self.deferred.calls and on_loop()):
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
        self._defer(settle, receipt, receipt.hold(len(frames)), None)
        return receipt

    # ---------------------------------------------------------------- pieces

    def _chosen(self, mapping: AnyMapping | None) -> AnyMapping:
        chosen = self._mapping if mapping is None else mapping
        if chosen is None:
            raise _no_mapping()
        return chosen

    def _defer(
        self,
        settle: Callable[[], Any],
        receipt: Receipt | BatchReceipt,
        placeholder: Batch,
        within: Within | None,
    ) -> None:
        self.deferred.add(settle, receipt, placeholder, is_told=within is not None)
        if within is not None:
            within.waits.append(placeholder.done)

    def _add(self, outbox: Outbox, message: Any, within: Within | None) -> Receipt:
        if within is None:
            return self.sender.add(outbox, message)
        within.sequences.expect(outbox, message)
        return self.sender.add(outbox, message, within.sequences)

    def _slices(
        self, source: _Source, mapping: AnyMapping, within: Within | None
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
            if within is not None:
                for index in routed.firsts():
                    within.sequences.expect(routed.of(index), messages[index])
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

    def _add_slices(self, slices: list[Slice], within: Within | None) -> BatchReceipt:
        receipt = BatchReceipt()
        sequences = None if within is None else within.sequences
        self.sender.check_room(sum(part.length_bytes for part in slices))
        for part in slices:
            self.sender.add_slice(part, receipt, sequences)
        return receipt

    def _add_frames(self, frames: Mapping[str, bytes]) -> BatchReceipt:
        receipt = BatchReceipt()
        known = [(self.sender.outboxes[journal], frame) for journal, frame in frames.items()]
        for batch, begin, frame in self.sender.add_frames(known, is_told=False):
            receipt.add(batch, begin, begin + len(frame), 1)
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
        """Where slices begin."""
        return range(0, self.count, SLICE_COUNT)

    def load(self, begin: int) -> Sequence[Any]:
        """The slice that begins there."""
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
