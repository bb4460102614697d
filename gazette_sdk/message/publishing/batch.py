"""Batches: messages of one journal that are appended together, and waiting for them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time

from gazette_sdk.errors import ClosedError, DeadlineExceededError, GazetteError
from gazette_sdk.transport.append_service import AsyncAppend
from gazette_sdk.transport.loop import sdk_loop

__all__ = [
    "Batch",
    "ReceiptTimeoutError",
    "any_ended",
    "closed_error",
    "ended",
    "on_loop",
    "wait_for",
]


class ReceiptTimeoutError(DeadlineExceededError, TimeoutError):
    """No acknowledgement came in time. The message is still being appended."""


class Batch:
    """Messages of one journal which are appended together.

    Attributes:
        journal: name of the journal; empty while a message's journal is not known yet.
        parts: what was added in bulk, and everything before it.
        content: the frames behind the parts.
        parts_bytes: length of all parts.
        count: how many messages there are.
        is_told: whether somebody else than ``flush`` tells of its failure: whoever ends the
            transaction that all its messages belong to.
        has_failed: whether it was given up; known before ``done`` says so.
        done: resolves with the journal's offset of the first byte.
        append: the append that carries them, once it was started.
        total_chunks: how many chunks of content the broker got with it.
        delayed_chunks: how many of those it held back, to keep to the journal's rate.
    """

    __slots__ = (
        "append",
        "content",
        "count",
        "delayed_chunks",
        "done",
        "has_failed",
        "is_told",
        "journal",
        "parts",
        "parts_bytes",
        "total_chunks",
    )

    def __init__(self, journal: str) -> None:
        self.journal = journal
        self.parts: list[bytes] = []
        self.content = bytearray()
        self.parts_bytes = 0
        self.count = 0
        self.is_told = True
        self.has_failed = False
        self.append: AsyncAppend | None = None
        self.total_chunks = 0
        self.delayed_chunks = 0
        self.done: concurrent.futures.Future[int] = concurrent.futures.Future()
        self.done.set_running_or_notify_cancel()  # from here on nobody can cancel it

    @property
    def length_bytes(self) -> int:
        """Length of its frames; 0 once it has ended."""
        return self.parts_bytes + len(self.content)

    @property
    def was_retried(self) -> bool:
        """Whether an attempt to append it failed, which may have written it nevertheless."""
        return self.append is not None and self.append.last_error is not None

    def add_part(self, frames: bytes) -> None:
        """Add frames in bulk."""
        if self.content:
            self.parts.append(bytes(self.content))
            self.parts_bytes += len(self.content)
            self.content = bytearray()
        self.parts.append(frames)
        self.parts_bytes += len(frames)

    def take_content(self) -> list[bytes]:
        """All frames, in parts. It takes no further ones."""
        return [*self.parts, bytes(self.content)]

    def drop_content(self) -> None:
        """Give back the memory."""
        self.parts = []
        self.parts_bytes = 0
        self.content = bytearray()

    def disown(self) -> None:
        """In a forked child: fail. Another thread may have held the future's lock at the fork."""
        self.done = concurrent.futures.Future()
        self.done.set_exception(
            ClosedError(
                "the message was published before the process was forked: the parent sends it",
                journal=self.journal or None,
            )
        )


def wait_for(batch: Batch, deadline: float | None, timeout: float | None) -> None:
    """Wait for a batch's end.

    Raises:
        ReceiptTimeoutError: it did not end before the deadline.
    """
    _refuse_on_sdk_loop()
    left = None if deadline is None else deadline - time.monotonic()
    concurrent.futures.wait([batch.done], left)
    if timeout is None or batch.done.done() or (left is not None and left > 0):
        return
    reason = "look at the brokers, or wait longer"
    if batch.append is not None and batch.append.last_error is not None:
        reason = f"the last attempt failed: {batch.append.last_error}"
    raise ReceiptTimeoutError(
        f"{batch.journal or 'a message'}: no acknowledgement within {timeout:g} s, and still"
        f" trying; {reason}",
        journal=batch.journal or None,
    )


async def ended(*futures: concurrent.futures.Future[int], timeout_s: float | None = None) -> bool:
    """Wait until all have ended, well or badly; whether they have. Takes nothing from others."""
    if not futures:
        return True
    waits = [asyncio.wrap_future(future) for future in futures]
    for wait in waits:
        wait.add_done_callback(_mark_as_seen)
    _, late = await asyncio.wait(waits, timeout=timeout_s)
    return not late


async def any_ended(*futures: concurrent.futures.Future[int]) -> None:
    """Wait until one of several has ended, well or badly."""
    waits = [asyncio.wrap_future(future) for future in futures]
    for wait in waits:
        wait.add_done_callback(_mark_as_seen)
    if waits:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)


def _mark_as_seen(future: asyncio.Future[int]) -> None:
    if not future.cancelled():
        future.exception()


def on_loop() -> bool:
    """Whether this is a coroutine of the SDK's own event loop, which must not be blocked."""
    try:
        return asyncio.get_running_loop() is sdk_loop()
    except RuntimeError:
        return False


def closed_error() -> ClosedError:
    """What a closed publisher says."""
    return ClosedError("the publisher is closed; messages which it had not sent are given up")


def _refuse_on_sdk_loop() -> None:
    if on_loop():
        raise GazetteError("waiting here would block the SDK's own event loop: `await receipt`")
