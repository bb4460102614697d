"""Sees the messages of one producer through: stamps, batches, appends, settles receipts."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import weakref
from typing import Any

from gazette_sdk.errors import BackPressureError, ClosedError, FramingError
from gazette_sdk.framing import framing_for
from gazette_sdk.message.clock import Clock
from gazette_sdk.message.flags import OUTSIDE_TXN
from gazette_sdk.message.link import Link
from gazette_sdk.message.outbox import Outbox
from gazette_sdk.message.receipt import Batch, Receipt
from gazette_sdk.message.uuid import Stamp, new_producer_id
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.loop import sdk_loop

__all__ = ["Sender", "closed_error", "on_loop"]

LINGER_S = 0.002
"""What an append waits for more messages, where they are streaming in. A message that follows
none, or few, never waits."""


class Sender:
    """A producer: its id, its clock, and what it has not had acknowledged yet.

    Any thread may add messages; one task for each journal appends them on the SDK's event loop.

    Args:
        transport: how to reach the cluster; None connects to ``GAZETTE_ADDRESS``.
        clock: a shared clock; None follows the wall clock.
        pending_bytes_max: bound of encoded messages which are not acknowledged.
        blocks: whether a thread waits for room, or is told that there is none.
        mapping_timeout_s: bound of waits for listings.

    Attributes:
        outboxes: by journal.
        is_closed: whether messages are refused.
    """

    def __init__(
        self,
        transport: Transport | None,
        clock: Clock | None,
        *,
        pending_bytes_max: int,
        blocks: bool,
        mapping_timeout_s: float,
    ) -> None:
        self.outboxes: dict[str, Outbox] = {}
        self.is_closed = False
        self._transport = transport
        self._clock = clock
        self._pending_bytes_max = pending_bytes_max
        self._blocks = blocks
        self._mapping_timeout_s = mapping_timeout_s
        self._stamp = Stamp(new_producer_id())
        self._stamp.flags = OUTSIDE_TXN
        self._lock = threading.Lock()
        self._has_room = threading.Condition(self._lock)
        self._pending_bytes = 0
        self._failure: Exception | None = None
        self._link: Link | None = None
        self._abandoned: weakref.finalize[..., Sender] | None = None

    @property
    def producer(self) -> bytes:
        """The producer id, six bytes."""
        return self._stamp.producer

    def renewed(self) -> Sender:
        """In a forked child: another producer, with the same settings and nothing pending.

        The parent sends what it was given. Another of its threads may have held any lock.
        """
        for batch in [batch for box in self.outboxes.values() for batch in box.pending()]:
            batch.disown()
        if self._abandoned is not None:
            self._abandoned.detach()
        if self._clock is not None:
            self._clock.unlock()
        fresh = Sender(
            self._transport,
            self._clock,
            pending_bytes_max=self._pending_bytes_max,
            blocks=self._blocks,
            mapping_timeout_s=self._mapping_timeout_s,
        )
        fresh.is_closed = self.is_closed
        return fresh

    def add(self, outbox: Outbox, message: Any) -> Receipt:
        """Stamp and encode a message behind what waits for its journal.

        Raises:
            ValidationError: the message cannot be encoded.
            BackPressureError: too much is pending, and waiting is not wanted or not possible.
            ClosedError: the publisher is closed.
        """
        with self._lock:
            if self._pending_bytes >= self._pending_bytes_max:
                self._wait_for_room()
            if self.is_closed:
                raise closed_error()
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
        self.link().loop.call_soon_threadsafe(self._start_sender, outbox)
        return receipt

    def _wait_for_room(self) -> None:
        if not self._blocks or on_loop():
            raise BackPressureError(
                f"{self._pending_bytes} bytes of messages are not acknowledged yet, of at most"
                f" {self._pending_bytes_max}; wait for receipts, `await publisher.room()`, or"
                " raise pending_bytes_max"
            )
        while self._pending_bytes >= self._pending_bytes_max and not self.is_closed:
            self._has_room.wait()

    async def room(self) -> None:
        """Wait until no more is pending than may be."""
        while True:
            with self._lock:
                if self._pending_bytes < self._pending_bytes_max:
                    return
                oldest = [box.pending()[:1] for box in self.outboxes.values()]
            waits = [asyncio.wrap_future(batch.done) for first in oldest for batch in first]
            for wait in waits:
                wait.add_done_callback(_mark_as_seen)
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)

    def open(self, journal: str, content_type: str) -> Outbox:
        """The outbox of a journal, by the content type of its label.

        Raises:
            FramingError: the content type has no framing.
        """
        try:
            framing = framing_for(content_type)
        except FramingError as error:
            raise FramingError(
                f"{journal}: {error}; give the journal a content-type label which has a framing,"
                " or register one",
                journal=journal,
            ) from error
        with self._lock:
            return self.outboxes.setdefault(journal, Outbox(journal, framing))

    def link(self) -> Link:
        """The connection, opened by the first message.

        Raises:
            ClosedError: the publisher is closed.
        """
        link = self._link
        if link is None:
            with self._lock:
                if self.is_closed:
                    raise closed_error()
                link = self._link
                if link is None:
                    link = self._link = Link(self._transport, self._mapping_timeout_s)
                    self._abandoned = weakref.finalize(self, link.abandon)
                    self._abandoned.atexit = False
        return link

    def pending(self) -> list[concurrent.futures.Future[int]]:
        """What ends when all that waits now is acknowledged, or has failed."""
        with self._lock:
            return [batch.done for box in self.outboxes.values() for batch in box.pending()]

    def raise_failure(self) -> None:
        """Raise the first failure since this was last called."""
        with self._lock:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def note_failure(self, error: Exception) -> None:
        """Remember a failure, unless there is an earlier one."""
        with self._lock:
            self._failure = self._failure or error

    def refuse_more(self) -> None:
        """Refuse messages from now on; who waits for room is told so."""
        with self._lock:
            self.is_closed = True
            self._has_room.notify_all()

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection to be closed."""
        return self._link is not None

    async def aclose(self) -> None:
        """Give up what is pending, and close the connection."""
        with self._lock:
            tasks = [box.sender for box in self.outboxes.values() if box.sender is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for box in self.outboxes.values():
            for batch in box.drop():
                batch.done.set_exception(closed_error())
        if self._abandoned is not None:
            self._abandoned.detach()
        if self._link is not None:
            await self._link.aclose()

    # ------------------------------------------------------------- the loop

    def _start_sender(self, outbox: Outbox) -> None:
        outbox.sender = asyncio.get_running_loop().create_task(
            self._send(outbox), name=f"publisher of {outbox.journal}"
        )

    async def _send(self, outbox: Outbox) -> None:
        link = self.link()
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
                self._settle([batch], closed_error())
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


def on_loop() -> bool:
    """Whether this is a coroutine of the SDK's own event loop, which must not be blocked."""
    try:
        return asyncio.get_running_loop() is sdk_loop()
    except RuntimeError:
        return False


def closed_error() -> ClosedError:
    """What a closed publisher says."""
    return ClosedError("the publisher is closed; messages which it had not sent are given up")


def _mark_as_seen(future: asyncio.Future[int]) -> None:
    if not future.cancelled():
        future.exception()
