"""Publishes messages to the journals their mappings choose (message section 11)."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Literal, Self

from gazette_sdk.errors import BackPressureError, ConfigurationError, GazetteError, MappingError
from gazette_sdk.message.clock import Clock
from gazette_sdk.message.kinds import validator_of
from gazette_sdk.message.mapping import Mapping, SelectorMapping
from gazette_sdk.message.outbox import Outbox
from gazette_sdk.message.receipt import Batch, Receipt, ReceiptTimeoutError
from gazette_sdk.message.sender import Sender, closed_error, on_loop
from gazette_sdk.protocol.names import validate_journal
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.loop import on_sdk_loop, run, sdk_loop

__all__ = ["PENDING_BYTES_MAX", "Publisher"]

PENDING_BYTES_MAX = 64 << 20
"""Encoded messages which are not acknowledged take no more memory than this, unless told so."""

DEFERRED_MAX = 10_000
"""Messages which wait for a first listing, where waiting for it would block the event loop."""

MAPPING_TIMEOUT_S = 30.0
"""Bound of a wait for the first listing of journals."""


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

    A forked child may go on with its copy: it is another producer there, and what the parent
    had not sent is not sent by the child. With ``transport=`` the child needs its own publisher.

    Args:
        mapping: which journal a message goes to: a callable from a message to a journal's name,
            or one of those made by :mod:`gazette_sdk.message.mapping`.
        transport: how to reach the cluster; without one, ``connect()`` of ``GAZETTE_ADDRESS``.
        clock: a clock shared with other publishers, which then is the caller's to update;
            without one, the publisher follows the wall clock.
        pending_bytes_max: bound of encoded messages which are not acknowledged.
        when_full: ``"block"`` until there is room, or ``"raise"`` a
            :class:`~gazette_sdk.errors.BackPressureError`. The event loop of the SDK itself is
            never blocked: there it is always raised, and ``await publisher.room()`` waits.
        mapping_timeout_s: bound of a wait for the first listing of journals, in seconds.
    """

    def __init__(
        self,
        mapping: Mapping | SelectorMapping | None = None,
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
        self._validators: dict[type, Callable[[Any], object] | None] = {}
        self._deferred: deque[tuple[Any, Mapping | SelectorMapping, Receipt]] = deque()
        self._settling: asyncio.Task[None] | None = None
        self._sender = Sender(
            transport,
            clock,
            pending_bytes_max=pending_bytes_max,
            blocks=when_full == "block",
            mapping_timeout_s=mapping_timeout_s,
        )
        _publishers.add(self)

    @property
    def producer(self) -> bytes:
        """This publisher's producer id, six bytes."""
        return self._sender.producer

    # ------------------------------------------------------------ publishing

    def publish(self, message: Any, *, mapping: Mapping | SelectorMapping | None = None) -> Receipt:
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
        message_type: type = type(message)
        if message_type not in self._validators:
            self._validators[message_type] = validator_of(message_type)
        validate = self._validators[message_type]
        if validate is not None:
            validate(message)
        mapping = self._mapping if mapping is None else mapping
        if mapping is None:
            raise MappingError("there is no mapping: give one to the Publisher or to publish()")
        outbox = self._route(message, mapping)
        if outbox is None:
            return self._defer(message, mapping)
        return self._sender.add(outbox, message)

    async def ready(self) -> None:
        """Wait until the mapping's journals are listed. ``async with`` does so.

        Raises:
            MappingError: no listing came in time.
        """
        if isinstance(self._mapping, SelectorMapping):
            await on_sdk_loop(self._sender.link().watches.partitions(self._mapping))

    async def room(self) -> None:
        """Wait until no more is pending than may be."""
        await self._sender.room()

    # --------------------------------------------------------------- routing

    def _route(self, message: Any, mapping: Mapping | SelectorMapping) -> Outbox | None:
        """The outbox of the message's journal; None if that must be found out on the loop."""
        if isinstance(mapping, SelectorMapping):
            watches = self._sender.link().watches
            partitions = watches.current.get(mapping.selector)
            if partitions is None:
                if on_loop():
                    return None
                partitions = run(watches.partitions(mapping))
            journal = mapping.pick(message, partitions)
            outbox = self._sender.outboxes.get(journal)
            if outbox is None:
                outbox = self._sender.open(journal, partitions.content_types[journal])
        else:
            journal = _named(mapping(message), mapping)
            outbox = self._sender.outboxes.get(journal)
            if outbox is None:
                if on_loop():
                    return None
                content_type = run(self._sender.link().watches.content_type(journal))
                outbox = self._sender.open(journal, content_type)
        if self._deferred and on_loop():
            return None  # messages keep the order of the calls
        return outbox

    def _defer(self, message: Any, mapping: Mapping | SelectorMapping) -> Receipt:
        """Publish when the journals are known. Only on the SDK's loop, which must not wait."""
        if self._sender.is_closed:
            raise closed_error()
        if len(self._deferred) >= DEFERRED_MAX:
            raise BackPressureError(
                f"{DEFERRED_MAX} messages wait for the first listing of their journals;"
                " `await publisher.ready()` before publishing"
            )
        receipt = Receipt(Batch(""), 0, 0)
        self._deferred.append((message, mapping, receipt))
        if self._settling is None or self._settling.done():
            self._settling = sdk_loop().create_task(self._settle_deferred())
        return receipt

    async def _settle_deferred(self) -> None:
        while self._deferred:
            message, mapping, receipt = self._deferred[0]
            try:
                receipt.follow(
                    self._sender.add(await self._route_on_loop(message, mapping), message)
                )
            except BackPressureError:
                await self.room()
                continue
            except asyncio.CancelledError:
                receipt.fail(closed_error())
                self._deferred.popleft()
                raise
            except Exception as error:  # noqa: BLE001 - the receipt's and flush's to raise
                receipt.fail(error)
                self._sender.note_failure(error)
            self._deferred.popleft()

    async def _route_on_loop(self, message: Any, mapping: Mapping | SelectorMapping) -> Outbox:
        watches = self._sender.link().watches
        if isinstance(mapping, SelectorMapping):
            partitions = await watches.partitions(mapping)
            journal = mapping.pick(message, partitions)
            content_type = partitions.content_types[journal]
        else:
            journal = _named(mapping(message), mapping)
            content_type = ""
            if journal not in self._sender.outboxes:
                content_type = await watches.content_type(journal)
        return self._sender.outboxes.get(journal) or self._sender.open(journal, content_type)

    # ------------------------------------------------------- flush and close

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything published before is acknowledged.

        Args:
            timeout: seconds to wait; None waits until every append has ended.

        Raises:
            ReceiptTimeoutError: not everything was acknowledged in time.
            GazetteError: the first failure since the last flush.
        """
        if on_loop():
            raise GazetteError("waiting here would block the SDK's event loop: `await aflush()`")
        deadline = None if timeout is None else time.monotonic() + timeout
        for futures in self._pending():
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if concurrent.futures.wait(futures, left).not_done:
                raise _late(timeout)
        self._sender.raise_failure()

    async def aflush(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - as flush()
        """As :meth:`flush`, in a coroutine."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for futures in self._pending():
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not await _ended(futures, left):
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
        if self._sender.is_closed:
            return
        try:
            self.flush(timeout)
        finally:
            self._sender.refuse_more()
            if self._sender.is_connected:
                run(self._shut())

    async def aclose(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - as close()
        """As :meth:`close`, in a coroutine. ``async with`` does so."""
        if self._sender.is_closed:
            return
        try:
            await self.aflush(timeout)
        finally:
            self._sender.refuse_more()
            if self._sender.is_connected:
                await on_sdk_loop(self._shut())

    def _pending(self) -> Iterator[list[concurrent.futures.Future[int]]]:
        """First what waits to be mapped, then, looked up when it is asked for, all batches."""
        yield [receipt.batch.done for _, _, receipt in list(self._deferred)]
        yield self._sender.pending()

    async def _shut(self) -> None:
        if self._settling is not None:
            self._settling.cancel()
            await asyncio.wait([self._settling])
        for _, _, receipt in self._deferred:
            receipt.fail(closed_error())
        self._deferred.clear()
        await self._sender.aclose()

    def __enter__(self) -> Self:
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

    def _become_another_producer(self) -> None:
        """In a forked child: begin anew. The parent sends what the parent was given."""
        for _, _, receipt in self._deferred:
            receipt.batch.disown()
        self._deferred.clear()
        self._settling = None
        self._sender = self._sender.renewed()


_publishers: weakref.WeakSet[Publisher] = weakref.WeakSet()


def _begin_anew() -> None:
    for publisher in list(_publishers):
        publisher._become_another_producer()  # noqa: SLF001 - the same module


os.register_at_fork(after_in_child=_begin_anew)


def _named(journal: object, mapping: object) -> str:
    if not isinstance(journal, str):
        raise MappingError(
            f"the mapping {mapping!r} returned {journal!r}: a mapping returns a journal's name"
        )
    validate_journal(journal)
    return journal


async def _ended(futures: list[concurrent.futures.Future[int]], timeout_s: float | None) -> bool:
    """Wait until all have ended, well or badly; whether they have."""
    if not futures:
        return True
    waits = [asyncio.wrap_future(future) for future in futures]
    for wait in waits:
        wait.add_done_callback(_mark_as_seen)
    _, late = await asyncio.wait(waits, timeout=timeout_s)
    return not late


def _mark_as_seen(future: asyncio.Future[int]) -> None:
    if not future.cancelled():
        future.exception()


def _late(timeout: float | None) -> ReceiptTimeoutError:
    return ReceiptTimeoutError(
        f"not everything was acknowledged within {timeout:g} s; it is still being tried: wait"
        " longer, or look at the brokers"
    )
