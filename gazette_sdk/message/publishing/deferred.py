"""What is published on the SDK's own event loop before its journals are known.

That loop must not be blocked, and a first listing comes over it: until then what is published
there waits here, in the order of the calls.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from gazette_sdk.errors import BackPressureError
from gazette_sdk.message.publishing.batch import Batch
from gazette_sdk.message.publishing.sender import Sender, closed_error
from gazette_sdk.transport.loop import sdk_loop

__all__ = ["DEFERRED_MAX", "Deferred"]

DEFERRED_MAX = 10_000
"""Messages which wait for a first listing, where waiting for it would block the event loop."""


class _Pending(Protocol):
    """A receipt which becomes another."""

    def follow(self, receipt: Any, /) -> None: ...

    def fail(self, error: BaseException, /) -> None: ...


@dataclass(slots=True)
class _Call:
    settle: Callable[[], Awaitable[Any]]
    receipt: _Pending
    placeholder: Batch
    is_told: bool


class Deferred:
    """Calls of ``publish`` and the like, in order. Belongs to the SDK's event loop.

    Args:
        sender: tells when there is room, and remembers failures.

    Attributes:
        calls: what waits, oldest first.
    """

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self.calls: deque[_Call] = deque()
        self._settling: asyncio.Task[None] | None = None

    def check(self) -> None:
        """Refuse a further call, if too many wait.

        Raises:
            BackPressureError: too many wait.
            ClosedError: the publisher is closed.
        """
        if self._sender.is_closed:
            raise closed_error()
        if len(self.calls) >= DEFERRED_MAX:
            raise BackPressureError(
                f"{DEFERRED_MAX} messages wait for the first listing of their journals;"
                " `await publisher.ready()` before publishing"
            )

    def add(
        self,
        settle: Callable[[], Awaitable[Any]],
        receipt: _Pending,
        placeholder: Batch,
        *,
        is_told: bool,
    ) -> None:
        """Make a call when those before it are made.

        Args:
            settle: makes it, and returns the receipt which ``receipt`` becomes then.
            receipt: what the caller has got.
            placeholder: the batch that the receipt has till then.
            is_told: somebody else than ``flush`` tells if it fails.
        """
        self.calls.append(_Call(settle, receipt, placeholder, is_told))
        if self._settling is None or self._settling.done():
            self._settling = sdk_loop().create_task(self._settle())

    def pending(self) -> list[concurrent.futures.Future[int]]:
        """What ends when all that waits now was made, or has failed."""
        return [call.placeholder.done for call in list(self.calls)]

    def disown(self) -> None:
        """In a forked child: the parent makes these calls."""
        for call in self.calls:
            call.placeholder.disown()
        self.calls.clear()

    async def aclose(self) -> None:
        """Give up what waits."""
        if self._settling is not None:
            self._settling.cancel()
            await asyncio.wait([self._settling])
        for call in self.calls:
            call.receipt.fail(closed_error())
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
                call.receipt.fail(closed_error())
                self.calls.popleft()
                raise
            except Exception as error:  # noqa: BLE001 - the receipt's and flush's to raise
                call.receipt.fail(error)
                if not call.is_told:
                    self._sender.note_failure(error)
            self.calls.popleft()
