"""One append of a journal's chain, as those who write to it and wait for it see it."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from types import TracebackType
from typing import Any, Protocol, Self, TypeAlias

from gazette_sdk.errors import GazetteError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.append.append_buffer import AppendBuffer, MemoryBudget

__all__ = ["AsyncAppend", "Dependency", "DependencyFailedError", "Holder"]

Dependency: TypeAlias = "asyncio.Future[Any]"
"""What must have succeeded before an append begins; compared by identity."""


class Holder(Protocol):
    """The chain of an append."""

    journal: str
    loop: asyncio.AbstractEventLoop
    budget: MemoryBudget

    def release(self) -> None:
        """The exclusive hold of its newest append ends."""


class DependencyFailedError(GazetteError):
    """An append was not made, because something it depends on failed."""


class AsyncAppend:
    """One append of a chain, exclusively held from ``start`` to ``release``.

    Await it for the response, which is that of the whole batch.

    Attributes:
        request: what the append asks for.
        future: resolves with the response, or the terminal error. Never cancel it.
        last_error: why the last attempt failed, while it is tried again.
        dependencies: what must have succeeded before it is sent.
        buffer: the content of the batch.
        is_handed_out: whether anybody started to write to it.
        next: the append behind it in its journal's chain.
    """

    def __init__(self, chain: Holder) -> None:
        self.request = pb.AppendRequest(journal=chain.journal)
        self.dependencies: frozenset[Dependency] = frozenset()
        self.future: asyncio.Future[pb.AppendResponse] = chain.loop.create_future()
        self.last_error: Exception | None = None
        self.buffer = AppendBuffer(chain.budget)
        self.is_handed_out = False
        self.next: AsyncAppend | None = None
        self._chain = chain
        self._required: Exception | None = None
        self._waiters: set[asyncio.Future[None]] = set()

    def __await__(self) -> Generator[Any, None, pb.AppendResponse]:
        if not self.future.done():
            # One for each who waits: who is cancelled doesn't cancel the append.
            waiter = self._chain.loop.create_future()
            self._waiters.add(waiter)
            try:
                yield from waiter
            finally:
                self._waiters.discard(waiter)
        return self.future.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Release; an error of the block rolls its writes back."""
        if error is None:
            self.release()
            return
        self._roll_back()

    @property
    def is_done(self) -> bool:
        """Whether it has committed, or failed for good."""
        return self.future.done()

    def write(self, content: bytes | bytearray | memoryview) -> None:
        """Add content. Only between ``start`` and ``release``.

        Raises:
            TypeError: it is not bytes-like; the release will roll back.
        """
        try:
            kept = content if isinstance(content, bytes) else memoryview(content).tobytes()
        except TypeError as error:
            self.require(error)
            raise
        if not self.future.done():
            self.buffer.write(kept)

    def require(self, error: Exception | None) -> Self:
        """Remember the first error: the release raises it, and rolls back."""
        if self._required is None:
            self._required = error
        return self

    def release(self) -> None:
        """End the exclusive hold, and let the writes be appended.

        Raises:
            Exception: the error that was required or that a write raised; what was written
                since ``start`` is rolled back, and others' writes in the batch stay.
        """
        error = self._required
        if error is not None:
            self._roll_back()
            raise error
        self.buffer.checkpoint()
        self._chain.release()

    def settle(self, outcome: pb.AppendResponse | Exception) -> None:
        """Its chain is done with it."""
        self.buffer.release()
        if isinstance(outcome, Exception):
            self.future.set_exception(outcome)
            self.future.exception()  # not every append is awaited; that it failed is no news then
        else:
            self.future.set_result(outcome)
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _roll_back(self) -> None:
        self._required = None
        self.buffer.roll_back()
        self._chain.release()
