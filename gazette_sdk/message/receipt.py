"""Receipts: where a published message landed, once it has."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Generator
from typing import Any

from gazette_sdk.errors import ClosedError, DeadlineExceededError, GazetteError
from gazette_sdk.transport.append_service import AsyncAppend
from gazette_sdk.transport.loop import sdk_loop

__all__ = ["Batch", "Receipt", "ReceiptTimeoutError"]


class ReceiptTimeoutError(DeadlineExceededError, TimeoutError):
    """No acknowledgement came in time. The message is still being appended."""


class Batch:
    """Messages of one journal which are appended together.

    Attributes:
        journal: name of the journal; empty while a message's journal is not known yet.
        content: their frames.
        count: how many they are.
        done: resolves with the journal's offset of the content's first byte.
        append: the append that carries them, once it was started.
    """

    __slots__ = ("append", "content", "count", "done", "journal")

    def __init__(self, journal: str) -> None:
        self.journal = journal
        self.content = bytearray()
        self.count = 1
        self.append: AsyncAppend | None = None
        self.done: concurrent.futures.Future[int] = concurrent.futures.Future()
        self.done.set_running_or_notify_cancel()  # from here on nobody can cancel it

    def disown(self) -> None:
        """In a forked child: fail. Another thread may have held the future's lock at the fork."""
        self.done = concurrent.futures.Future()
        self.done.set_exception(
            ClosedError(
                "the message was published before the process was forked: the parent sends it",
                journal=self.journal or None,
            )
        )


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
    def batch(self) -> Batch:
        """The batch that carries the message."""
        return self._batch

    @property
    def length_bytes(self) -> int:
        """Length of the message's frame."""
        return self._end - self._begin

    @property
    def journal(self) -> str:
        """Name of the journal.

        Raises:
            GazetteError: the message's journal is not known yet.
        """
        if not self._batch.journal:
            raise GazetteError("the message is not mapped yet; wait for its receipt: `await` it")
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
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.done():
            _refuse_on_sdk_loop()
            left = None if deadline is None else deadline - time.monotonic()
            concurrent.futures.wait([self._batch.done], left)
            if not self.done() and left is not None and left <= 0:
                raise self._too_late(timeout)
        self._batch.done.result()
        return self

    def __await__(self) -> Generator[Any, None, Receipt]:
        while not self.done():
            # Shielded: a coroutine that gives up waiting takes nothing from others.
            yield from asyncio.shield(asyncio.wrap_future(self._batch.done)).__await__()
        self._batch.done.result()
        return self

    def follow(self, receipt: Receipt) -> None:
        """Become the receipt of the same message, which is now mapped."""
        placeholder = self._batch
        self._begin, self._end = receipt._begin, receipt._end
        self._batch = receipt._batch
        placeholder.done.set_result(0)

    def fail(self, error: BaseException) -> None:
        """The message could not be mapped or encoded."""
        self._batch.done.set_exception(error)

    def _too_late(self, timeout: float | None) -> ReceiptTimeoutError:
        batch = self._batch
        reason = "look at the brokers, or wait longer"
        if batch.append is not None and batch.append.last_error is not None:
            reason = f"the last attempt failed: {batch.append.last_error}"
        name = batch.journal or "a message"
        return ReceiptTimeoutError(
            f"{name}: no acknowledgement within {timeout:g} s, and still trying; {reason}",
            journal=batch.journal or None,
        )

    def _base(self) -> int:
        future = self._batch.done
        if not future.done():
            raise GazetteError(
                f"{self._batch.journal}: the message is not acknowledged yet; wait for it by"
                " receipt.result(timeout=...) or `await receipt`",
                journal=self._batch.journal or None,
            )
        return future.result()

    def __repr__(self) -> str:
        future = self._batch.done
        if not future.done():
            return f"<Receipt {self._batch.journal or '(not mapped)'}: pending>"
        if future.exception() is not None:
            return f"<Receipt {self._batch.journal or '(not mapped)'}: failed>"
        return f"<Receipt {self.journal}: [{self.begin}, {self.end})>"


def _refuse_on_sdk_loop() -> None:
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        return
    if running is sdk_loop():
        raise GazetteError("waiting here would block the SDK's own event loop: `await receipt`")
