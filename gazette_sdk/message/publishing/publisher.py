"""Publishes messages to the journals their mappings choose (message section 11)."""

from __future__ import annotations

import atexit
import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from gazette_sdk.errors import ConfigurationError, GazetteError
from gazette_sdk.message.clock import Clock
from gazette_sdk.message.mapping import SelectorMapping
from gazette_sdk.message.publishing.dispatch import AnyMapping, Dispatch
from gazette_sdk.message.publishing.intents import AckIntents
from gazette_sdk.message.publishing.receipt import BatchReceipt, Receipt, ReceiptTimeoutError
from gazette_sdk.message.publishing.sender import Sender, left_behind
from gazette_sdk.message.publishing.transaction import Transaction
from gazette_sdk.transport.append.pending import PendingAppend, all_ended
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.loop import on_loop

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["PENDING_BYTES_MAX", "Publisher"]

logger = logging.getLogger(__name__)

PENDING_BYTES_MAX = 64 << 20
"""Encoded messages which are not acknowledged take no more memory than this, unless told so."""

MAPPING_TIMEOUT_S = 30.0
"""Bound of a wait for the first listing of journals."""

EXIT_TIMEOUT_S = 10.0
"""Bound of the wait at the end of the program for messages of publishers that are not closed."""


class Publisher:
    """Publishes messages. Safe to use from several threads, in plain code and in coroutines.

    ::

        with Publisher(mapping=mapping.modulo("topic=orders", key=attrgetter("customer"))) as p:
            receipt = p.publish(Order("ada", 250))
            receipt.result(timeout=10)

    A message is stamped and encoded at once, and appended in the background, in batches, in the
    order of the calls for each journal. Appends are tried until they succeed: a message may be
    written twice, under the same UUID, by which committed readers drop the second. Each message
    is committed by itself.

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
            :class:`~gazette_sdk.errors.BackPressureError`. The publisher's event loop is never
            blocked: there it is always raised, and ``await publisher.room()`` waits.
        mapping_timeout_s: bound of a wait for the first listing of journals, in seconds.
    """

    def __init__(
        self,
        mapping: AnyMapping | None = None,
        *,
        transport: Transport | None = None,
        clock: Clock | None = None,
        pending_bytes_max: int = PENDING_BYTES_MAX,
        when_full: Literal["block", "raise"] = "block",
        mapping_timeout_s: float = MAPPING_TIMEOUT_S,
    ) -> None:
        if when_full not in {"block", "raise"}:
            raise ConfigurationError(f"when_full={when_full!r}: use 'block' or 'raise'")
        self._mapping = mapping
        self._sender = Sender(
            transport,
            clock,
            pending_bytes_max=pending_bytes_max,
            blocks=when_full == "block",
            mapping_timeout_s=mapping_timeout_s,
        )
        self._dispatch = Dispatch(self._sender, mapping)
        _publishers.add(self)

    @property
    def producer(self) -> bytes:
        """Producer id of the publisher, six bytes."""
        return self._sender.producer

    # ------------------------------------------------------------ publishing

    def publish(self, message: Any, *, mapping: AnyMapping | None = None) -> Receipt:
        """Publish a message; returns at once, unless it must wait for a first listing or room.

        Args:
            message: the message. Classes with a field for their UUID have it set.
            mapping: instead of the publisher's own.

        Raises:
            ValidationError: the message's class can carry no UUID, or it cannot be encoded.
            MappingError: it maps to no journal.
            FramingError: the journal's content type has no framing.
            BackPressureError: too much is pending, and waiting is not wanted or not possible.
            ClosedError: the publisher is closed.
            Exception: whatever the message's own ``validate`` raises.
        """
        return self._dispatch.publish(message, mapping, None)

    def publish_batch(
        self,
        messages: Sequence[Any] | pa.RecordBatch | pa.Table,
        *,
        mapping: AnyMapping | None = None,
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
        return self._dispatch.publish_batch(messages, mapping, None)

    def transaction(
        self,
        *,
        mapping: AnyMapping | None = None,
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
                awaitable. If it raises, nobody knows whether it has stored them: the transaction
                is neither acknowledged nor rolled back.
            timeout: seconds which the end of the block may wait for brokers; None waits until
                every append has ended.

        Raises (the end of the block):
            TransactionInDoubtError: decided, but not acknowledged everywhere. Has the intents.
            ReceiptTimeoutError: not in time; rolled back.
            GazetteError: an append failed; rolled back.
        """
        return Transaction(self._dispatch, mapping, save, timeout)

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
        return self._dispatch.acknowledge(dict(intents))

    async def ready(self) -> None:
        """Wait until the mapping's journals are listed. ``async with`` does so.

        Raises:
            MappingError: no listing came in time.
        """
        if isinstance(self._mapping, SelectorMapping):
            connection = self._sender.connection()
            await on_loop(connection.loop, connection.watches.partitions(self._mapping))

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
            GazetteError: the first failure since the last flush.
        """
        if self._sender.is_on_loop:
            raise GazetteError(
                "waiting here would block the publisher's event loop: `await aflush()`"
            )
        deadline = None if timeout is None else time.monotonic() + timeout
        for appends in (self._dispatch.deferred.pending, self._sender.pending):
            for append in appends():
                if not append.wait(_left(deadline)):
                    raise _late(timeout)
        self._sender.raise_failure()

    async def aflush(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - as flush()
        """As :meth:`flush`, in a coroutine."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for appends in (self._dispatch.deferred.pending, self._sender.pending):
            if not await all_ended(appends(), _left(deadline)):
                raise _late(timeout)
        self._sender.raise_failure()

    def close(self, timeout: float | None = None) -> None:
        """Flush, then close. ``with`` does so. Closing twice is closing once.

        Args:
            timeout: seconds to wait for acknowledgements; what is not acknowledged then is
                given up.

        Raises:
            GazetteError: as :meth:`flush`. The publisher is closed nevertheless.
        """
        try:
            if not self._sender.is_closed:  # it was not interrupted, either
                self.flush(timeout)
        finally:
            self._sender.refuse_more()
            self._sender.close(self._dispatch.deferred.aclose)

    async def aclose(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - as close()
        """As :meth:`close`, in a coroutine. ``async with`` does so."""
        try:
            if not self._sender.is_closed:
                await self.aflush(timeout)
        finally:
            self._sender.refuse_more()
            await self._sender.aclose(self._dispatch.deferred.aclose)

    def __enter__(self) -> Self:
        self._sender.open_in_background()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except GazetteError as failure:
            if error is None:
                raise
            error.add_note(f"Closing the publisher failed, too: {failure}")

    async def __aenter__(self) -> Self:
        await self.ready()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self.aclose()
        except GazetteError as failure:
            if error is None:
                raise
            error.add_note(f"Closing the publisher failed, too: {failure}")


_publishers: weakref.WeakSet[Publisher] = weakref.WeakSet()


def _send_what_is_left() -> None:
    """At the program's end: give messages that nobody waited for some time to be sent."""
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    deferred = [publisher._dispatch.deferred for publisher in list(_publishers)]  # noqa: SLF001
    _wait_all([append for calls in deferred for append in calls.pending()], deadline)
    lost = sum(len(calls.calls) for calls in deferred)
    for sender in left_behind():
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


def _late(timeout: float | None) -> ReceiptTimeoutError:
    return ReceiptTimeoutError(
        f"not everything was acknowledged within {timeout:g} s; it is still being tried: wait"
        " longer, or look at the brokers"
    )
