"""Calls of ``publish`` made on the publisher's event loop before their journals are listed.

That loop must not be blocked, and the first listing comes over it: until then the calls wait here,
in their order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from gazette_sdk.errors import BackPressureError
from gazette_sdk.message.publishing.sender import Sender
from gazette_sdk.transport.append.pending import PendingAppend

__all__ = ["DEFERRED_MAX", "Deferred"]

DEFERRED_MAX = 10_000
"""Bound of calls that wait."""


class _Pending(Protocol):
    """Receipt that becomes another once its message is mapped."""

    def follow(self, receipt: Any, /) -> None: ...

    def fail(self, error: BaseException, /) -> None: ...


@dataclass(slots=True)
class _Call:
    settle: Callable[[], Awaitable[Any]]
    receipt: _Pending
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
        self._settling: asyncio.Task[None] | None = None

    def check(self) -> None:
        """Refuse a further call if too many wait.

        Raises:
            BackPressureError: too many wait.
            ClosedError: the publisher is closed.
        """
        if self._sender.is_closed:
            raise self._sender.closed_error()
        if len(self.calls) >= DEFERRED_MAX:
            raise BackPressureError(
                f"{DEFERRED_MAX} messages wait for the first listing of their journals;"
                " `await publisher.ready()` before publishing"
            )

    def add(
        self,
        settle: Callable[[], Awaitable[Any]],
        receipt: _Pending,
        placeholder: PendingAppend,
        *,
        has_transaction: bool,
    ) -> None:
        """Make a call when those before it are made.

        Args:
            settle: makes it, and returns the receipt which ``receipt`` becomes then.
            receipt: the caller's.
            placeholder: future of the receipt until then.
            has_transaction: the transaction reports a failure; else ``flush`` does.
        """
        self.calls.append(_Call(settle, receipt, placeholder, has_transaction))
        if self._settling is None or self._settling.done():
            loop = self._sender.connection().loop
            self._settling = loop.create_task(self._settle())

    def pending(self) -> list[PendingAppend]:
        """Return the futures of the calls that wait; they end when the calls were made."""
        return [call.placeholder for call in list(self.calls)]

    async def aclose(self) -> None:
        """Give up the calls that wait."""
        if self._settling is not None:
            self._settling.cancel()
            await asyncio.wait([self._settling])
        for call in self.calls:
            call.receipt.fail(self._sender.closed_error())
        self.calls.clear()

    async def _settle(self) -> None:
        while self.calls:
            call = self.calls[0]
            try:
                call.receipt.follow(await call.settle())
            except BackPressureError:
                await self._sender.room()
                continue
            except asyncio.CancelledError:
                call.receipt.fail(self._sender.closed_error())
                self.calls.popleft()
                raise
            except Exception as error:  # noqa: BLE001 - receipt and flush raise it
                call.receipt.fail(error)
                if not call.has_transaction:
                    self._sender.note_failure(error)
            self.calls.popleft()
