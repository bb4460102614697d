"""Publishes messages to the journals their mappings choose (message section 11)."""

from __future__ import annotations

import atexit
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from gazette_sdk.errors import (
    BackPressureError,
    ConfigurationError,
    GazetteError,
    MappingError,
    ValidationError,
    check_number,
)
from gazette_sdk.message.bulk import publish_batch
from gazette_sdk.message.mapping import Mapping as JournalMapping
from gazette_sdk.message.mapping import SelectorMapping, check_mapping
from gazette_sdk.message.receipt import BatchReceipt, Receipt, ReceiptTimeoutError
from gazette_sdk.message.sender import AckIntents, Sender, open_senders
from gazette_sdk.message.transaction import (
    PreparedTransaction,
    Transaction,
    arun_steps,
    run_steps,
    settle,
)
from gazette_sdk.message.uuid import Clock
from gazette_sdk.transport.append.queue import PendingAppend, all_ended, any_ended
from gazette_sdk.transport.base import Transport, check_transport
from gazette_sdk.transport.loop import guarded, on_loop

if TYPE_CHECKING:
    import pyarrow as pa


logger = logging.getLogger(__name__)

PENDING_BYTES_MAX = 64 << 20
"""Encoded messages which are not acknowledged take no more memory than this, by default."""

MAPPING_TIMEOUT_S = 30.0
"""Bound of a wait for the first listing of journals."""

DELIVERY_TIMEOUT_S = 120.0
"""A message that is not acknowledged by then fails, by default."""

FAILED_TIMEOUT_S = 5.0
"""Bound of the wait for acknowledgements when an exception leaves the publisher's block."""

EXIT_TIMEOUT_S = 10.0
"""Bound of the wait at the end of the program for messages of publishers that are not closed."""


class Publisher:
    """Publishes messages. Safe to use from several threads, in plain code and in coroutines.

    ::

        with Publisher(mapping=mapping.modulo("topic=orders", key=attrgetter("customer"))) as p:
            receipt = p.publish(Order("ada", 250))
            receipt.result(timeout=10)

    A message is stamped and encoded at once, and appended in the background, in batches, in the
    order of the calls for each journal. Appends are tried until they succeed, or the delivery
    time-out ends: a message may be written twice, under the same UUID, by which committed readers
    drop the second. Each message is committed by itself.

    ``with Publisher`` waits at its end until everything is acknowledged. If an exception leaves the
    block, Ctrl-C too, it waits 5 seconds at most; a note of the exception says what is in doubt.

    A publisher that is opened by ``async with``, or first used in a coroutine, works on the
    coroutine's event loop, and must be closed there. One that is opened by ``with``, or first used
    in plain code, works on the SDK's background loop. A forked child needs a publisher of its own:
    the parent sends what it was given.

    Args:
        mapping: which journal a message goes to: a callable from a message to a journal's name,
            or one of those made by :mod:`gazette_sdk.message.mapping`.
        transport: how to reach the cluster; without one, ``connect()`` of ``GAZETTE_ADDRESS``.
        clock: a clock shared with other publishers, which then is the caller's to update;
            without one, the publisher follows the wall clock.
        pending_bytes_max: bound of encoded messages which are not acknowledged.
        when_full: ``"block"`` until there is room, or ``"raise"`` a
            :class:`~gazette_sdk.errors.BackPressureError`. No event loop is ever blocked: in a
            coroutine it is always raised, and ``await publisher.apublish(message)`` waits.
        delivery_timeout_s: a message that is not acknowledged so many seconds after it was
            published fails with :class:`~gazette_sdk.errors.DeliveryTimeoutError`, wherever it is
            waited for. It may be written nevertheless. None tries without end.
        mapping_timeout_s: bound of a wait for the first listing of journals, in seconds; the
            delivery time-out if that is shorter.
        validate: read what is written of a message, by its class, before it is published: False
            of none, True of each; None of the first message of a class. A class may refuse what
            was written of its own messages: NaN is written as null, nothing checks the values of
            dataclasses when they are made, and pydantic may write names that it does not read.
    """

    def __init__(
        self,
        mapping: JournalMapping | None = None,
        *,
        transport: Transport | None = None,
        clock: Clock | None = None,
        pending_bytes_max: int = PENDING_BYTES_MAX,
        when_full: Literal["block", "raise"] = "block",
        delivery_timeout_s: float | None = DELIVERY_TIMEOUT_S,
        mapping_timeout_s: float = MAPPING_TIMEOUT_S,
        validate: bool | None = None,
    ) -> None:
        if mapping is not None:
            check_mapping(mapping)
        check_transport(transport)
        if clock is not None and not isinstance(clock, Clock):
            raise ConfigurationError(f"clock={clock!r} is no clock; use a message.Clock")
        if when_full not in {"block", "raise"}:
            raise ConfigurationError(f"when_full={when_full!r}: use 'block' or 'raise'")
        check_number("pending_bytes_max", pending_bytes_max, 1, is_whole=True)
        check_number("mapping_timeout_s", mapping_timeout_s)
        if delivery_timeout_s is not None:
            check_number("delivery_timeout_s", delivery_timeout_s)
        if delivery_timeout_s == 0:
            raise ConfigurationError(
                "delivery_timeout_s=0: use seconds above 0, or None to try without end"
            )
        self._mapping = mapping
        self._sender = Sender(
            transport,
            clock,
            mapping,
            pending_bytes_max=pending_bytes_max,
            blocks=when_full == "block",
            delivery_timeout_s=delivery_timeout_s,
            mapping_timeout_s=min(mapping_timeout_s, delivery_timeout_s or mapping_timeout_s),
            validates=validate,
        )

    @property
    def producer(self) -> bytes:
        """Producer id of the publisher, six bytes."""
        return self._sender.stamp.producer

    # ------------------------------------------------------------ publishing

    def publish(self, message: Any, *, mapping: JournalMapping | None = None) -> Receipt:
        """Publish a message; returns at once, unless it must wait for a first listing or room.

        Args:
            message: the message. Classes with a field for their UUID have it set.
            mapping: instead of the publisher's own.

        Raises:
            ValidationError: the message's class can carry no UUID, or it cannot be encoded, or its
                class could not read it.
            ConfigurationError: ``mapping`` is no mapping.
            MappingError: it maps to no journal.
            FramingError: the journal's content type has no framing.
            BackPressureError: too much is pending, and waiting is not wanted or not possible.
            ClosedError: the publisher is closed.
            Exception: whatever the message's own ``validate`` raises.
        """
        return self._sender.publish(message, mapping)

    def publish_batch(
        self,
        messages: Sequence[Any] | pa.RecordBatch | pa.Table,
        *,
        mapping: JournalMapping | None = None,
    ) -> BatchReceipt:
        """Publish many messages: validated, mapped, encoded and stamped in bulk.

        If one of them is refused, none is published. They stand in their journals in the order
        of the batch; each is committed by itself.

        Args:
            messages: a list of messages, or columns: a pyarrow RecordBatch or Table, or anything
                that hands out an Arrow stream. Each row is written as a JSON object, with null
                for what is missing; a mapping sees it as an object whose columns are both its
                attributes and its items.
            mapping: instead of the publisher's own.

        Raises:
            Exception: as :meth:`publish`. Where waiting is not wanted or not possible, a batch
                which by itself is larger than what may be pending is refused.
        """
        return publish_batch(self._sender, messages, mapping)

    def transaction(
        self,
        *,
        mapping: JournalMapping | None = None,
        save: Callable[[AckIntents], object] | None = None,
        timeout: float | None = None,
    ) -> Transaction:
        """Begin a transaction: ``with publisher.transaction() as txn``, or ``async with``.

        Committed readers see all its messages or none: in each journal at once, and in all of
        them, unless this process dies between the journals. To be safe from that, too, ``save``
        the intents, and after a crash :meth:`acknowledge` what was saved last.

        Args:
            mapping: instead of the publisher's own.
            save: stores the acknowledgements, when all messages are durable, and before the
                first is written: ``save(intents)``, which within ``async with`` may return an
                awaitable. If it raises, no one knows whether it has stored them: the transaction
                is neither acknowledged nor rolled back.
            timeout: seconds which the end of the block may wait for brokers; None waits until
                every append has ended.

        Raises:
            ConfigurationError: an argument cannot be used.

        Raises (the end of the block):
            TransactionInDoubtError: decided, but not acknowledged everywhere. Has the intents.
            ReceiptTimeoutError: not in time; rolled back.
            GazetteError: an append failed; rolled back.
        """
        return Transaction(self._sender, mapping, save, timeout)

    def acknowledge(self, intents: Mapping[str, bytes] | bytes) -> BatchReceipt:
        """Write acknowledgements which were saved. Writing them again does no harm.

        Args:
            intents: what ``save`` got, or its ``to_bytes()``.

        Raises:
            ValidationError: these are no stored intents.
            MappingError: a journal does not exist any more.
            ClosedError: the publisher is closed.
        """
        if isinstance(intents, bytes | bytearray | memoryview):
            intents = AckIntents.from_bytes(bytes(intents))
        if not isinstance(intents, Mapping):
            raise ValidationError(
                f"{type(intents).__name__} is no acknowledgement intents: give what `save` got, or"
                " its to_bytes()",
                kind="ack_intents",
            )
        frames = dict(intents)
        sender = self._sender
        if not (sender.deferred.calls and sender.is_on_loop):
            with _no_such_journal():
                outboxes = [sender.outbox_of(journal) for journal in frames]
            if None not in outboxes:
                return _add_frames(sender, frames)

        async def publish() -> BatchReceipt:
            with _no_such_journal():
                await sender.list_journals(frames, None)
            return _add_frames(sender, frames)

        return sender.deferred.add(publish, lambda append: BatchReceipt(append, len(frames)))

    def settle(self, prepared: PreparedTransaction, *, acknowledged: bool) -> bool:
        """Return the producer of a prepared transaction, so that later transactions use it.

        A producer that is not returned is lost to this publisher, and to no harm: later
        transactions have others. **Readers lose messages** if a producer is returned while
        anybody may yet write the intents, or write them again.

        Args:
            prepared: a transaction of this publisher.
            acknowledged: its intents are written in all journals, each once. Else they are not
                written, nor ever will be: then the transaction is rolled back, and its producer
                is returned if that is done within 10 seconds, at the first attempt.

        Returns:
            True if its producer was returned.

        Raises:
            ConfigurationError: another publisher prepared it.
            ClosedError: it is settled already, or the publisher is closed.
        """
        if self._sender.is_on_loop and not acknowledged:
            raise GazetteError(
                "a roll-back here would block the publisher's event loop: `await"
                " publisher.asettle(prepared, acknowledged=False)`"
            )
        return run_steps(settle(self._sender, prepared, acknowledged=acknowledged))

    async def asettle(self, prepared: PreparedTransaction, *, acknowledged: bool) -> bool:
        """As :meth:`settle`, in a coroutine."""
        return await arun_steps(settle(self._sender, prepared, acknowledged=acknowledged))

    async def ready(self) -> None:
        """Wait until the mapping's journals are listed. ``async with`` does so.

        Raises:
            MappingError: no listing came in time.
        """
        if isinstance(self._mapping, SelectorMapping):
            connection = self._sender.connection()
            await on_loop(connection.loop, connection.watches.partitions(self._mapping))

    async def apublish(self, message: Any, *, mapping: JournalMapping | None = None) -> Receipt:
        """Publish a message as :meth:`publish`; waits in a coroutine for a first listing or room.

        It returns when the message is queued: await the receipt for its acknowledgement.

        Raises:
            Exception: as :meth:`publish`, but for ``BackPressureError``.
        """
        await self._sender.listed([message], mapping)
        while True:
            try:
                return self.publish(message, mapping=mapping)
            except BackPressureError:
                await any_ended(self._sender.deferred.pending()[:1])
                await self.room()

    async def room(self) -> None:
        """Wait until less is pending than the bound."""
        await self._sender.room()

    # ------------------------------------------------------- flush and close

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything published before is acknowledged.

        Args:
            timeout: seconds to wait; None waits until every append has ended.

        Raises:
            ReceiptTimeoutError: not everything was acknowledged in time.
            ReentrantCallError: called in a signal handler, a finalizer or a log handler, within
                another call of the publisher.
            GazetteError: the first failure since the last flush.
        """
        if self._sender.is_on_loop:
            raise GazetteError(
                "waiting here would block the publisher's event loop: `await aflush()`, or"
                " `await aclose()`"
            )
        self._sender.check_reentry()
        deadline = None if timeout is None else time.monotonic() + timeout
        for appends in (self._sender.deferred.pending, self._sender.pending):
            for append in appends():
                if not append.wait(_left(deadline)):
                    raise self._late(timeout)
        self._sender.raise_failure()

    async def aflush(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - as flush()
        """As :meth:`flush`, in a coroutine."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for appends in (self._sender.deferred.pending, self._sender.pending):
            if not await all_ended(appends(), _left(deadline)):
                raise self._late(timeout)
        self._sender.raise_failure()

    def _late(self, timeout: float | None) -> ReceiptTimeoutError:
        return ReceiptTimeoutError(
            f"not everything was acknowledged within {timeout:g} s; in doubt are"
            f" {self._sender.doubt}; wait longer, or check the brokers with `gazctl journals list`"
        )

    def close(self, timeout: float | None = None) -> None:
        """Flush, then close. ``with`` does so. Closing twice is closing once.

        A coroutine on the publisher's event loop awaits :meth:`aclose` instead: there this raises,
        and the loop closes the publisher soon, without waiting for acknowledgements.

        Args:
            timeout: seconds to wait for acknowledgements; what is not acknowledged then is
                given up.

        Raises:
            ReentrantCallError: called in a signal handler, a finalizer or a log handler, within
                another call of the publisher. It is not closed.
            GazetteError: as :meth:`flush`. The publisher is closed nevertheless.
        """
        self._sender.check_reentry()
        try:
            if not self._sender.is_closed:  # it was not interrupted, either
                self.flush(timeout)
        finally:
            connection = self._sender.detach()
            if connection is not None:
                connection.close(self._sender.deferred)

    async def aclose(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - as close()
        """As :meth:`close`, in a coroutine. ``async with`` does so."""
        try:
            if not self._sender.is_closed:
                await self.aflush(timeout)
        finally:
            connection = self._sender.detach()
            if connection is not None:
                await connection.aclose(self._sender.deferred)

    def __enter__(self) -> Self:
        self._sender.is_background = True
        if self._sender.is_on_loop:
            raise GazetteError(
                "the publisher works on the event loop that runs here, which its end would block:"
                " `async with publisher`"
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with _note_failure(error):
            self.close(None if error is None else FAILED_TIMEOUT_S)

    async def __aenter__(self) -> Self:
        await self.ready()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with _note_failure(error):
            await self.aclose(None if error is None else FAILED_TIMEOUT_S)


@contextlib.contextmanager
def _note_failure(error: BaseException | None) -> Iterator[None]:
    """Let a failure of closing become a note of the block's error, if there is one."""
    try:
        yield
    except GazetteError as failure:
        if error is None:
            raise
        error.add_note(f"Closing the publisher failed, too: {failure}")


def _send_what_is_left() -> None:
    """At the program's end: give messages that no one waited for some time to be sent."""
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    senders = open_senders()
    _wait_all([append for sender in senders for append in sender.deferred.pending()], deadline)
    lost = sum(len(sender.deferred.calls) for sender in senders)
    for sender in senders:
        if sender.can_send:
            _wait_all(sender.pending(), deadline)
        lost += sum(append.count for append in sender.pending())
        try:
            sender.raise_failure()
        except Exception as error:  # noqa: BLE001 - there is no caller any more
            logger.warning("a publisher was not closed, and had failed: %s", error)
    if lost:
        logger.warning(
            "%d messages could not be delivered before the end of the program; close publishers,"
            " or flush them, to wait for their messages",
            lost,
        )


def _wait_all(appends: list[PendingAppend], deadline: float) -> None:
    for append in appends:
        append.wait(_left(deadline))


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


atexit.register(_send_what_is_left)


@contextlib.contextmanager
def _no_such_journal() -> Iterator[None]:
    try:
        yield
    except MappingError as error:
        raise MappingError(
            f"acknowledgement intents name a journal that cannot be written to: {error}",
            journal=error.journal,
        ) from error


def _add_frames(sender: Sender, frames: Mapping[str, bytes]) -> BatchReceipt:
    for journal, frame in frames.items():
        sender.outboxes[journal].check_frames(frame)
    receipt = BatchReceipt()
    with guarded(sender.lock):
        added, must_send = sender.add_frames(
            (sender.outboxes[journal], frame) for journal, frame in frames.items()
        )
        for append, begin, frame in added:
            append.context = sender
            receipt.add(append, begin, begin + len(frame), 1)
    for appender in must_send:
        appender.send()
    return receipt
