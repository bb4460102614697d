"""Receipts: where a published message landed, once it has."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Generator
from typing import Any

from gazette_sdk.errors import DeadlineExceededError, GazetteError
from gazette_sdk.transport.loop import sdk_loop

__all__ = ["Batch", "Receipt", "ReceiptTimeoutError"]


class ReceiptTimeoutError(DeadlineExceededError, TimeoutError):
    """No acknowledgement came in time. The message is still being appended."""


class Batch:
    """Messages of one journal which are appended together.

    Attributes:
        journal: name of the journal.
        content: their frames.
        done: resolves with the journal's offset of the content's first byte.
    """

    __slots__ = ("content", "done", "journal", "length_bytes")

    def __init__(self, journal: str) -> None:
        self.journal = journal
        self.content = bytearray()
        self.length_bytes = 0
        self.done: concurrent.futures.Future[int] = concurrent.futures.Future()
        self.done.set_running_or_notify_cancel()  # from here on nobody can cancel it


class Receipt:
    """What :meth:`Publisher.publish` returns at once; tells later where the message landed.

    Plain code waits with ``receipt.result(timeout=10)``, a coroutine with ``await receipt``.
    """

    __slots__ = ("_batch", "_begin", "_end")

    def __init__(self, batch: Batch, begin: int, end: int) -> None:
        self._batch = batch
        self._begin = begin
        self._end = end

    @property
    def journal(self) -> str:
        """Name of the journal."""
        return self._batch.journal

    @property
    def begin(self) -> int:
        """Offset of the message's first byte.

        Raises:
            GazetteError: it is not acknowledged yet, or the append failed.
        """
        return self._base() + self._begin

    @property
    def end(self) -> int:
        """Offset behind the message's last byte. Raises as :attr:`begin` does."""
        return self._base() + self._end

    def done(self) -> bool:
        """Whether the append has ended, well or badly."""
        return self._batch.done.done()

    def result(self, timeout: float | None = None) -> Receipt:
        """Wait until the message is acknowledged; returns the receipt itself.

        Args:
            timeout: seconds to wait; ``None`` waits until the append ends.

        Raises:
            ReceiptTimeoutError: no acknowledgement came in time (also a ``TimeoutError``).
            GazetteError: the append failed, and why.
        """
        future = self._batch.done
        if not future.done():
            _refuse_on_sdk_loop()
        try:
            future.result(timeout)
        except concurrent.futures.TimeoutError:
            if future.done():
                raise
            raise ReceiptTimeoutError(
                f"{self.journal}: no acknowledgement within {timeout:g} s; the append is still"
                " being tried: wait longer, or look at the brokers",
                journal=self.journal,
            ) from None
        return self

    def __await__(self) -> Generator[Any, None, Receipt]:
        future = self._batch.done
        if not future.done():
            # Shielded: a coroutine that gives up waiting does not cancel other's receipts.
            yield from asyncio.shield(asyncio.wrap_future(future)).__await__()
        future.result()
        return self

    def _base(self) -> int:
        future = self._batch.done
        if not future.done():
            raise GazetteError(
                f"{self.journal}: the message is not acknowledged yet; wait for it by"
                " receipt.result(timeout=...) or `await receipt`",
                journal=self.journal,
            )
        return future.result()

    def __repr__(self) -> str:
        future = self._batch.done
        if not future.done():
            return f"<Receipt {self.journal}: pending>"
        if future.exception() is not None:
            return f"<Receipt {self.journal}: failed>"
        return f"<Receipt {self.journal}: [{self.begin}, {self.end})>"


def _refuse_on_sdk_loop() -> None:
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        return
    if running is sdk_loop():
        raise GazetteError("waiting here would block the SDK's own event loop: `await receipt`")
