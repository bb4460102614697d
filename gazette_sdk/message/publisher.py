"""Publishes messages to the journals their mappings choose (message section 11)."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Literal, Self

from gazette_sdk.errors import (
    BackPressureError,
    ClosedError,
    ConfigurationError,
    FramingError,
    GazetteError,
    MappingError,
)
from gazette_sdk.framing import framing_for
from gazette_sdk.message.clock import Clock
from gazette_sdk.message.flags import OUTSIDE_TXN
from gazette_sdk.message.kinds import validator_of
from gazette_sdk.message.link import Link
from gazette_sdk.message.mapping import Mapping, SelectorMapping
from gazette_sdk.message.outbox import Outbox
from gazette_sdk.message.receipt import Batch, Receipt, ReceiptTimeoutError
from gazette_sdk.message.uuid import Stamp, new_producer_id
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.names import validate_journal
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.loop import on_sdk_loop, run, sdk_loop

__all__ = ["PENDING_BYTES_MAX", "Publisher"]

PENDING_BYTES_MAX = 64 << 20
"""Encoded messages which are not acknowledged take no more memory than this, unless told so."""

DEFERRED_MAX = 10_000
"""Messages which wait for a first listing, where waiting for it would block the event loop."""

LINGER_S = 0.005
"""What an append waits for more messages, where they are streaming in. A message that follows
none, or few, never waits."""

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
        self._transport = transport
        self._clock = clock
        self._validators: dict[type, Callable[[Any], object] | None] = {}
        self._pending_bytes_max = pending_bytes_max
        self._when_full = when_full
        self._mapping_timeout_s = mapping_timeout_s
        self._closed = False
        self._begin()
        _publishers.add(self)

    def _begin(self) -> None:
        """The state of a new producer, in a new process."""
        self._stamp = Stamp(new_producer_id())
        self._stamp.flags = OUTSIDE_TXN
        self._lock = threading.Lock()
        self._has_room = threading.Condition(self._lock)
        self._pending_bytes = 0
        self._outboxes: dict[str, Outbox] = {}
        self._deferred: deque[tuple[Any, Mapping | SelectorMapping, Receipt]] = deque()
        self._settling: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._link: Link | None = None
        self._abandoned: weakref.finalize[Any, Any] | None = None

    @property
    def producer(self) -> bytes:
        """This publisher's producer id, six bytes."""
        return self._stamp.producer

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
        mapping = mapping or self._mapping
        if mapping is None:
            raise MappingError("there is no mapping: give one to the Publisher or to publish()")
        outbox = self._route(message, mapping)
        if outbox is None:
            return self._defer(message, mapping)
        return self._add(outbox, message)

    async def ready(self) -> None:
        """Wait until the mapping's journals are listed. ``async with`` does so.

        Raises:
            MappingError: no listing came in time.
        """
        if isinstance(self._mapping, SelectorMapping):
            await on_sdk_loop(self._connected().watches.partitions(self._mapping))

    async def room(self) -> None:
        """Wait until no more is pending than may be."""
        while True:
            with self._lock:
                if self._pending_bytes < self._pending_bytes_max:
                    return
                oldest = [box.pending()[:1] for box in self._outboxes.values()]
            waits = [asyncio.wrap_future(batch.done) for first in oldest for batch in first]
            for wait in waits:
                wait.add_done_callback(_mark_as_seen)
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)

    def _add(self, outbox: Outbox, message: Any) -> Receipt:
        with self._lock:
            if self._pending_bytes >= self._pending_bytes_max:
                self._wait_for_room()
            if self._closed:
                raise _closed()
            stamp = self._stamp
            if self._clock is None:
                stamp.tick_now()
            else:
                stamp.clock = self._clock.tick()
            receipt = outbox.add(message, stamp)
            self._pending_bytes += receipt.length_bytes
            if outbox.is_sending:
                return receipt
            outbox.is_sending = True
        self._connected().loop.call_soon_threadsafe(self._start_sender, outbox)
        return receipt

    def _wait_for_room(self) -> None:
        if self._when_full == "raise" or _on_sdk_loop():
            raise BackPressureError(
                f"{self._pending_bytes} bytes of messages are not acknowledged yet, of at most"
                f" {self._pending_bytes_max}; wait for receipts, `await publisher.room()`, or"
                " raise pending_bytes_max"
            )
        while self._pending_bytes >= self._pending_bytes_max and not self._closed:
            self._has_room.wait()

    # --------------------------------------------------------------- routing

    def _route(self, message: Any, mapping: Mapping | SelectorMapping) -> Outbox | None:
        """The outbox of the message's journal; None if that must be found out on the loop."""
        if isinstance(mapping, SelectorMapping):
            link = self._link or self._connected()
            partitions = link.watches.current.get(mapping.selector)
            if partitions is None:
                if _on_sdk_loop():
                    return None
                partitions = run(link.watches.partitions(mapping))
            journal = mapping.pick(message, partitions)
            outbox = self._outboxes.get(journal)
            if outbox is None:
                outbox = self._open(journal, partitions.content_types[journal])
        else:
            journal = _named(mapping(message), mapping)
            outbox = self._outboxes.get(journal)
            if outbox is None:
                if _on_sdk_loop():
                    return None
                outbox = self._open(journal, run(self._connected().watches.content_type(journal)))
        if self._deferred and _on_sdk_loop():
            return None  # messages keep the order of the calls
        return outbox

    def _open(self, journal: str, content_type: str) -> Outbox:
        try:
            framing = framing_for(content_type)
        except FramingError as error:
            raise FramingError(
                f"{journal}: {error}; give the journal a content-type label which has a framing,"
                " or register one",
                journal=journal,
            ) from error
        with self._lock:
            return self._outboxes.setdefault(journal, Outbox(journal, framing))

    def _defer(self, message: Any, mapping: Mapping | SelectorMapping) -> Receipt:
        """Publish when the journals are known. Only on the SDK's loop, which must not wait."""
        if self._closed:
            raise _closed()
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
                receipt.follow(self._add(await self._route_on_loop(message, mapping), message))
            except BackPressureError:
                await self.room()
                continue
            except asyncio.CancelledError:
                receipt.fail(_closed())
                self._deferred.popleft()
                raise
            except Exception as error:  # noqa: BLE001 - whatever a mapping raises is the receipt's
                receipt.fail(error)
                self._failure = self._failure or error
            self._deferred.popleft()

    async def _route_on_loop(self, message: Any, mapping: Mapping | SelectorMapping) -> Outbox:
        watches = self._connected().watches
        if isinstance(mapping, SelectorMapping):
            partitions = await watches.partitions(mapping)
            journal = mapping.pick(message, partitions)
            content_type = partitions.content_types[journal]
        else:
            journal = _named(mapping(message), mapping)
            content_type = ""
            if journal not in self._outboxes:
                content_type = await watches.content_type(journal)
        return self._outboxes.get(journal) or self._open(journal, content_type)

    # --------------------------------------------------------------- sending

    def _connected(self) -> Link:
        link = self._link
        if link is None:
            with self._lock:
                if self._closed:
                    raise _closed()
                link = self._link
                if link is None:
                    link = self._link = Link(self._transport, self._mapping_timeout_s)
                    self._abandoned = weakref.finalize(self, link.abandon)
                    self._abandoned.atexit = False
        return link

    def _start_sender(self, outbox: Outbox) -> None:
        outbox.sender = asyncio.get_running_loop().create_task(
            self._send(outbox), name=f"publisher of {outbox.journal}"
        )

    async def _send(self, outbox: Outbox) -> None:
        link = self._connected()
        request = pb.AppendRequest(journal=outbox.journal)
        while True:
            with self._lock:
                batch = outbox.take()
                if batch is None:
                    outbox.is_sending = False
                    outbox.sender = None
                    return
            content = bytes(batch.content)
            try:
                batch.append = await link.appends(outbox.journal).append(request, content)
                response = await batch.append
            except asyncio.CancelledError:
                self._settle([batch], _closed())
                raise
            except Exception as error:  # noqa: BLE001 - it is the receipts' and flush's to raise
                with self._lock:
                    behind = outbox.drop()
                self._settle([batch, *behind], error)
                await link.renew_appends(outbox.journal)
            else:
                self._settle([batch], response.commit.begin)
            if outbox.is_streaming:
                await asyncio.sleep(LINGER_S)

    def _settle(self, batches: list[Batch], outcome: int | Exception) -> None:
        """Tell receipts how an append ended. What stood behind a failed one fails with it."""
        with self._lock:
            self._pending_bytes -= sum(len(batch.content) for batch in batches)
            if isinstance(outcome, Exception):
                self._failure = self._failure or outcome
            self._has_room.notify_all()
        for batch in batches:
            batch.content = bytearray()
            if isinstance(outcome, Exception):
                batch.done.set_exception(outcome)
            else:
                batch.done.set_result(outcome)

    # ------------------------------------------------------- flush and close

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything published before is acknowledged.

        Args:
            timeout: seconds to wait; None waits until every append has ended.

        Raises:
            ReceiptTimeoutError: not everything was acknowledged in time.
            GazetteError: the first failure since the last flush.
        """
        if _on_sdk_loop():
            raise GazetteError("waiting here would block the SDK's event loop: `await aflush()`")
        deadline = None if timeout is None else time.monotonic() + timeout
        for futures in self._pending():
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if concurrent.futures.wait(futures, left).not_done:
                raise _late(timeout)
        self._raise_failure()

    async def aflush(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - as flush()
        """As :meth:`flush`, in a coroutine."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for futures in self._pending():
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not await _ended(futures, left):
                raise _late(timeout)
        self._raise_failure()

    def close(self, timeout: float | None = None) -> None:
        """Flush, then close. ``with`` does so. Closing twice is closing once.

        Args:
            timeout: seconds to wait for acknowledgements; what is not acknowledged then is
                given up.

        Raises:
            GazetteError: as :meth:`flush`. The publisher is closed nevertheless.
        """
        if self._closed:
            return
        try:
            self.flush(timeout)
        finally:
            self._refuse_more()
            if self._link is not None:
                run(self._shut(self._link))

    async def aclose(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - as close()
        """As :meth:`close`, in a coroutine. ``async with`` does so."""
        if self._closed:
            return
        try:
            await self.aflush(timeout)
        finally:
            self._refuse_more()
            if self._link is not None:
                await on_sdk_loop(self._shut(self._link))

    def _pending(self) -> Iterator[list[concurrent.futures.Future[int]]]:
        """First what waits to be mapped, then, looked up when it is asked for, all batches."""
        yield [receipt.settled for _, _, receipt in list(self._deferred)]
        with self._lock:
            batches = [batch for box in self._outboxes.values() for batch in box.pending()]
        yield [batch.done for batch in batches]

    def _raise_failure(self) -> None:
        with self._lock:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _refuse_more(self) -> None:
        with self._lock:
            self._closed = True
            self._has_room.notify_all()

    async def _shut(self, link: Link) -> None:
        with self._lock:
            senders = [box.sender for box in self._outboxes.values() if box.sender is not None]
        tasks = [*senders, *([self._settling] if self._settling is not None else ())]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for box in self._outboxes.values():
            for batch in box.drop():
                batch.done.set_exception(_closed())
        for _, _, receipt in self._deferred:
            receipt.fail(_closed())
        self._deferred.clear()
        if self._abandoned is not None:
            self._abandoned.detach()
        await link.aclose()

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

    # ------------------------------------------------------------------ fork

    def _become_another_producer(self) -> None:
        """In a forked child: begin anew. The parent sends what the parent was given."""
        lost = [batch for box in self._outboxes.values() for batch in box.pending()]
        lost += [receipt.batch for _, _, receipt in self._deferred]
        for batch in lost:
            batch.disown(
                ClosedError(
                    "the message was published before the process was forked: the parent sends it",
                    journal=batch.journal or None,
                )
            )
        if self._abandoned is not None:
            self._abandoned.detach()
        if self._clock is not None:
            self._clock.unlock()
        self._begin()


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


def _on_sdk_loop() -> bool:
    try:
        return asyncio.get_running_loop() is sdk_loop()
    except RuntimeError:
        return False


def _closed() -> ClosedError:
    return ClosedError("the publisher is closed; messages which it had not sent are given up")


def _late(timeout: float | None) -> ReceiptTimeoutError:
    return ReceiptTimeoutError(
        f"not everything was acknowledged within {timeout:g} s; it is still being tried: wait"
        " longer, or look at the brokers"
    )


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
