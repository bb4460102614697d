"""Calls of ``publish`` made on the publisher's event loop before their journals are listed.

That loop must not be blocked, and the first listing comes over it: until then the calls wait here,
in their order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from gazette_sdk.errors import BackPressureError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.append.queue import PendingAppend

if TYPE_CHECKING:
    from gazette_sdk.message.publishing.producer import Sequences
    from gazette_sdk.message.publishing.sender import Sender

__all__ = ["DEFERRED_MAX", "Deferred"]

DEFERRED_MAX = 10_000
"""Bound of calls that wait."""

_NO_RESPONSE = pb.AppendResponse()
"""Outcome of a placeholder that was replaced."""


class _Following(Protocol):
    """Receipt that becomes another once its message is mapped."""

    def follow(self, receipt: Any, /) -> None: ...


R = TypeVar("R", bound=_Following)


@dataclass(slots=True)
class _Call:
    publish: Callable[[], Awaitable[Any]]
    receipt: _Following
    placeholder: PendingAppend
    has_transaction: bool


class Deferred:
    """Queue of calls, in order. Belongs to the publisher's event loop.

    Args:
        sender: the publisher's.

    Attributes:
        calls: oldest first.
    """

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self.calls: deque[_Call] = deque()
        self._publishing: asyncio.Task[None] | None = None

    def add(
        self,
        publish: Callable[[], Awaitable[R]],
        new_receipt: Callable[[PendingAppend], R],
        sequences: Sequences | None = None,
    ) -> R:
        """Make a call when those before it are made.

        Args:
            publish: makes it, and returns the receipt which the caller's becomes then.
            new_receipt: returns the caller's receipt, which waits for a placeholder until then.
            sequences: of its transaction, which reports a failure; else ``flush`` does.

        Raises:
            BackPressureError: too many wait.
            ClosedError: the publisher is closed.
        """
        loop = self._sender.connection().loop
        if self._sender.is_closed:
            raise self._sender.closed_error()
        if len(self.calls) >= DEFERRED_MAX:
            raise BackPressureError(
                f"{DEFERRED_MAX} messages wait for the first listing of their journals;"
                " `await publisher.ready()` before publishing"
            )
        placeholder = PendingAppend(loop=loop)
        receipt = new_receipt(placeholder)
        self.calls.append(_Call(publish, receipt, placeholder, sequences is not None))
        if sequences is not None:
            sequences.deferred.append(placeholder)
        if self._publishing is None or self._publishing.done():
            self._publishing = loop.create_task(self._publish())
        return receipt

    def pending(self) -> list[PendingAppend]:
        """Return the futures of the calls that wait; they end when the calls were made."""
        return [call.placeholder for call in list(self.calls)]

    async def aclose(self) -> None:
        """Give up the calls that wait."""
        if self._publishing is not None:
            self._publishing.cancel()
            await asyncio.wait([self._publishing])
        for call in self.calls:
            call.placeholder.settle(self._sender.closed_error())
        self.calls.clear()

    async def _publish(self) -> None:
        while self.calls:
            call = self.calls[0]
            try:
                call.receipt.follow(await call.publish())
                call.placeholder.settle(_NO_RESPONSE)
            except BackPressureError:
                await self._sender.room()
                continue
            except asyncio.CancelledError:
                call.placeholder.settle(self._sender.closed_error())
                self.calls.popleft()
                raise
            except BaseException as error:  # noqa: BLE001 - receipt and flush raise it
                call.placeholder.settle(error)
                if not call.has_transaction:
                    self._sender.note_failure(error)
            self.calls.popleft()
