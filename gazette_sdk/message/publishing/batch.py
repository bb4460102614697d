"""Batches: messages of one journal that are appended together, and waiting for them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
import time
from typing import Protocol

from gazette_sdk.errors import ClosedError, DeadlineExceededError, GazetteError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.append.append_service import AsyncAppend
from gazette_sdk.transport.loop import sdk_loop

__all__ = [
    "Batch",
    "Claim",
    "ReceiptTimeoutError",
    "any_ended",
    "closed_error",
    "ended",
    "on_loop",
    "resolve",
    "running_loop",
    "wait_for",
]


class ReceiptTimeoutError(DeadlineExceededError, TimeoutError):
    """No acknowledgement came in time. The message is still being appended."""


class Claim(Protocol):
    """What can be done for a batch that a caller has sent."""

    def wait(self, batch: Batch, timeout_s: float | None) -> None:
        """Wait for its answer on this very thread, if nobody does. It may be over then."""

    def call_in(self) -> None:
        """Let the event loop look for its answer, if nobody does."""


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
        outcome: the journal's offset of the first byte, or why there is none; None before.
        append: the append on the event loop that carries them, once it was started.
        claim: set once a caller has sent it.
        attempt_error: why a caller's own attempt to append it failed.
        total_chunks: how many chunks of content the broker got with it.
        delayed_chunks: how many of those it held back, to keep to the journal's rate.
    """

    __slots__ = (
        "_future",
        "_gates",
        "append",
        "attempt_error",
        "claim",
        "content",
        "count",
        "delayed_chunks",
        "has_failed",
        "is_told",
        "journal",
        "outcome",
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
        self.outcome: int | BaseException | None = None
        self.append: AsyncAppend | None = None
        self.claim: Claim | None = None
        self.attempt_error: Exception | None = None
        self.total_chunks = 0
        self.delayed_chunks = 0
        self._future: concurrent.futures.Future[int] | None = None
        # Of threads that wait: locks by themselves, since a thread that is interrupted at work on
        # a future or a condition may leave it locked for ever.
        self._gates: list[threading.Lock] = []

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or badly."""
        return self.outcome is not None

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for its end, or asked for :attr:`done` and so may."""
        return self._future is not None or bool(self._gates)

    def wait(self, timeout_s: float | None) -> bool:
        """Block until it has ended; whether it has.

        Args:
            timeout_s: seconds; None for any time.
        """
        if self.outcome is None:
            gate = threading.Lock()
            gate.acquire()
            self._gates.append(gate)
            if self.outcome is None:  # else it ended before the gate was seen
                if gate.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s)):
                    return True
                with contextlib.suppress(ValueError):  # it ends just now
                    self._gates.remove(gate)
        return self.outcome is not None

    @property
    def error(self) -> BaseException | None:
        """Why it ended badly, if it did."""
        outcome = self.outcome
        return outcome if isinstance(outcome, BaseException) else None

    @property
    def done(self) -> concurrent.futures.Future[int]:
        """Resolves with the outcome. Made for the first one who asks: not all do."""
        future = self._future
        if future is None:
            made: concurrent.futures.Future[int] = concurrent.futures.Future()
            made.set_running_or_notify_cancel()  # from here on nobody can cancel it
            with _futures_lock:
                future = self._future
                if future is None:
                    future = self._future = made
                    outcome = self.outcome
                else:
                    outcome = None  # whoever made it, or settles the batch, resolves it
            if outcome is not None:
                resolve(future, outcome)
        return future

    def settle(self, outcome: int | BaseException) -> None:
        """Say how it ended. Only once. Its content is not kept."""
        future = self.end(outcome)
        if future is not None:
            resolve(future, outcome)

    def tell(self) -> None:
        """Wake those who wait for a batch that has ended, if an interruption left that out."""
        future, outcome = self._future, self.outcome
        assert outcome is not None
        self._open_gates()
        if future is not None and not future.done():
            resolve(future, outcome)

    def end(self, outcome: int | BaseException) -> concurrent.futures.Future[int] | None:
        """As :meth:`settle`, but the future, if there is one, is left to be resolved."""
        assert self.outcome is None
        self.claim = None
        self.parts = []
        self.parts_bytes = 0
        self.content = bytearray()
        with _futures_lock:
            self.outcome = outcome
            future = self._future
        self._open_gates()
        return future

    def _open_gates(self) -> None:
        while self._gates:
            self._gates.pop().release()

    def result(self) -> int:
        """The journal's offset of the first byte, of a batch that has ended.

        Raises:
            Exception: it was given up, and why.
        """
        outcome = self.outcome
        assert outcome is not None
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    @property
    def length_bytes(self) -> int:
        """Length of its frames; 0 once it has ended."""
        return self.parts_bytes + len(self.content)

    @property
    def was_retried(self) -> bool:
        """Whether an attempt to append it failed, which may have written it nevertheless."""
        return self.last_error is not None

    @property
    def last_error(self) -> Exception | None:
        """Why the last attempt failed that did."""
        if self.append is not None and self.append.last_error is not None:
            return self.append.last_error
        return self.attempt_error

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

    def whole_content(self) -> bytes:
        """All frames. It takes no further ones."""
        return b"".join([*self.parts, self.content]) if self.parts else bytes(self.content)

    def note(self, response: pb.AppendResponse) -> None:
        """Keep what the response says of it, beside where it begins."""
        self.total_chunks = response.total_chunks
        self.delayed_chunks = response.delayed_chunks

    def disown(self) -> None:
        """In a forked child: fail. Another thread may have held the future's lock at the fork."""
        self.outcome = ClosedError(
            "the message was published before the process was forked: the parent sends it",
            journal=self.journal or None,
        )
        self._future = None
        self.claim = None


def wait_for(batch: Batch, deadline: float | None, timeout: float | None) -> None:
    """Wait for a batch's end.

    Raises:
        ReceiptTimeoutError: it did not end before the deadline.
    """
    _refuse_on_sdk_loop()
    left = None if deadline is None else deadline - time.monotonic()
    if batch.wait(left) or timeout is None:
        return
    reason = "look at the brokers, or wait longer"
    if batch.last_error is not None:
        reason = f"the last attempt failed: {batch.last_error}"
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


_futures_lock = threading.Lock()
"""Guards who resolves a batch's future; held for a moment only."""


def _unlock() -> None:
    """In a forked child: another thread of the parent may have held it."""
    global _futures_lock  # noqa: PLW0603 - one per process, and this is a new process
    _futures_lock = threading.Lock()


os.register_at_fork(after_in_child=_unlock)


def resolve(future: concurrent.futures.Future[int], outcome: int | BaseException) -> None:
    """Tell those who wait how a batch ended."""
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def _mark_as_seen(future: asyncio.Future[int]) -> None:
    if not future.cancelled():
        future.exception()


def on_loop() -> bool:
    """Whether this is a coroutine of the SDK's own event loop, which must not be blocked."""
    loop = running_loop()
    return loop is not None and loop is sdk_loop()


running_loop = asyncio._get_running_loop  # noqa: SLF001 - public, as its module's `__all__` says
"""The event loop that runs in this thread, or None. Its sister raises and catches for that."""


def closed_error() -> ClosedError:
    """What a closed publisher says."""
    return ClosedError("the publisher is closed; messages which it had not sent are given up")


def _refuse_on_sdk_loop() -> None:
    if on_loop():
        raise GazetteError("waiting here would block the SDK's own event loop: `await receipt`")
