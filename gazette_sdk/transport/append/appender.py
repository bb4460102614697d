"""One append: its frames, its errors, and an append that is tried until it succeeds.

Over any transport (client section 3): the request that names the journal, chunks of content,
an empty request that commits. Nothing is sent before there is content or a commit to send,
because brokers hold a journal-wide lock while an append is open, and abort slow ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import BinaryIO, TypeAlias

from gazette_sdk.errors import (
    CallError,
    ClosedError,
    InsufficientJournalBrokersError,
    NoJournalPrimaryBrokerError,
    NotJournalPrimaryBrokerError,
    StatusError,
    UnavailableError,
    ValidationError,
    for_status,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import rpc
from gazette_sdk.protocol.labels import pairs_of
from gazette_sdk.protocol.selectors import format_selector
from gazette_sdk.transport import metrics
from gazette_sdk.transport.append.pieces import CHUNK_BYTES
from gazette_sdk.transport.backoff import Pause, pause
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.target import ANYWHERE, AppendItem, Target

__all__ = [
    "CHUNK_BYTES",
    "TRANSIENT",
    "Appender",
    "Source",
    "append",
    "append_once",
    "append_pieces",
    "check_opening",
    "status_error",
]

logger = logging.getLogger(__name__)

Source: TypeAlias = bytes | BinaryIO | Callable[[], AsyncIterator[bytes]]
"""Content that can be read again from its start: bytes, a seekable binary file, or a function
that begins an iteration."""

TRANSIENT = (
    UnavailableError,
    NotJournalPrimaryBrokerError,
    NoJournalPrimaryBrokerError,
    InsufficientJournalBrokersError,
)
"""Failures that end by themselves once the journal's route has converged."""


def status_error(request: pb.AppendRequest, response: pb.AppendResponse) -> StatusError:
    """The error of an append whose response is not OK."""
    detail = ""
    if response.status == pb.REGISTER_MISMATCH:
        registers = ",".join(f"{name}={value}" for name, value in pairs_of(response.registers))
        wanted = format_selector(request.check_registers)
        detail = f"registers are {{{registers}}}, the append requires {{{wanted}}}"
    elif response.status == pb.WRONG_APPEND_OFFSET:
        detail = f"the append names offset {request.offset}"
    elif response.status == pb.FRAGMENT_STORE_UNHEALTHY:
        detail = response.store_health_error
    return for_status(
        response.status, detail, journal=request.journal, offset=request.offset or None
    )


def check_opening(request: pb.AppendRequest) -> None:
    """Check the request that opens an append.

    Raises:
        ValidationError: it breaks a rule of protocol section 10, or names no journal.
    """
    rpc.validate(request)
    if not request.journal:
        raise ValidationError("an append needs a journal", kind="empty", path="journal")


async def append_once(
    transport: Transport,
    request: pb.AppendRequest,
    content: AsyncIterator[bytes],
    target: Target = ANYWHERE,
) -> pb.AppendResponse:
    """Append ``content`` as one RPC, and commit.

    Args:
        transport: how to reach the journal.
        request: names the journal, and its preconditions.
        content: chunks in order; empty ones are passed over, as they would mean commit.
        target: where to send it.

    Returns:
        The response, of status OK.

    Raises:
        StatusError: the broker answered another status.
        CallError: the call ended without an answer; it may or may not have committed.
        Exception: whatever ``content`` raised; the append was rolled back.
    """
    count = metrics.APPEND_BYTES.labels(request.journal).inc

    async def items() -> AsyncIterator[AppendItem]:
        yield request
        async for chunk in content:
            if chunk:
                count(len(chunk))
                yield chunk
        yield pb.AppendRequest()

    response = await transport.append(items(), target)
    if response.status != pb.OK:
        raise status_error(request, response)
    return response


async def append_pieces(
    transport: Transport, request: pb.AppendRequest, pieces: Sequence[bytes]
) -> pb.AppendResponse:
    """Append content that is all there: :func:`append_once`, where possible for less.

    Raises:
        StatusError: the broker answered another status.
        CallError: the call ended without an answer; it may or may not have committed.
    """
    metrics.count_appended(request.journal, sum(map(len, pieces)))
    response = await transport.append_whole(request, pieces)
    if response.status != pb.OK:
        raise status_error(request, response)
    return response


async def append(
    transport: Transport,
    request: pb.AppendRequest,
    sources: Sequence[Source],
    *,
    pause: Pause = pause,
) -> pb.AppendResponse:
    """Append several sources as one append, trying again until it succeeds.

    Routing failures and unavailable brokers are tried again from the start, until the caller
    cancels. An attempt whose answer was lost may have committed: **at least once**.

    Args:
        transport: how to reach the journal.
        request: names the journal, and its preconditions.
        sources: content, in order; each can be read again from its start.
        pause: waits between attempts.

    Raises:
        GazetteError: every failure that another attempt would not mend.
        Exception: whatever a source raised; the append was rolled back.
    """
    check_opening(request)
    pieces = [source for source in sources if isinstance(source, bytes)]
    attempt = 0
    while True:
        try:
            if len(pieces) == len(sources):
                return await append_pieces(transport, request, pieces)
            return await append_once(transport, request, _read_all(sources))
        except TRANSIENT as error:
            if attempt > 0 or isinstance(error, UnavailableError):
                logger.warning("append failed, and is tried again: %s", error)
        await pause(attempt)
        attempt += 1


async def _read_all(sources: Sequence[Source]) -> AsyncIterator[bytes]:
    for source in sources:
        if isinstance(source, bytes):
            for begin in range(0, len(source), CHUNK_BYTES):
                yield source[begin : begin + CHUNK_BYTES]
        elif callable(source):
            async for chunk in source():
                yield chunk
        else:
            await asyncio.to_thread(source.seek, 0)
            while chunk := await asyncio.to_thread(source.read, CHUNK_BYTES):
                yield chunk


class Appender:
    """One append that is written piece by piece.

    Lazy: the call is opened by the first write, or by :meth:`close`. After a failure,
    :meth:`reset` arms it for another attempt.

    Args:
        transport: how to reach the journal.
        request: names the journal, and its preconditions.
        target: where to send it.

    Raises:
        ValidationError: the request is malformed, or names no journal.
    """

    def __init__(
        self, transport: Transport, request: pb.AppendRequest, target: Target = ANYWHERE
    ) -> None:
        check_opening(request)
        self.request = request
        self.response: pb.AppendResponse | None = None
        self._transport = transport
        self._target = target
        self._feed = _Feed()
        self._call: asyncio.Task[pb.AppendResponse] | None = None

    async def write(self, content: bytes) -> None:
        """Send ``content``; waits while earlier content is not taken over by the transport.

        Raises:
            StatusError: the broker has already answered, and not with OK.
            CallError: the call has already failed.
            ClosedError: the append has already ended.
        """
        call = self._open()
        for begin in range(0, len(content), CHUNK_BYTES):
            if not await self._feed.put(content[begin : begin + CHUNK_BYTES]):
                await call
                raise ClosedError("the append has already ended", journal=self.request.journal)

    async def close(self) -> pb.AppendResponse:
        """Commit. Without a write before it, this is an append of zero bytes.

        Raises:
            StatusError: the broker answered another status than OK.
            CallError: the call ended without an answer.
        """
        call = self._open()
        self._feed.end()
        self.response = await call
        return self.response

    async def abort(self) -> None:
        """Roll back, if anything was sent."""
        if self._call is None:
            return
        self._feed.fail(_AbortedError("the append was aborted", journal=self.request.journal))
        with contextlib.suppress(_AbortedError, StatusError, CallError):
            await self._call

    async def reset(self) -> None:
        """Roll back what is under way, and begin anew."""
        await self.abort()
        self._feed = _Feed()
        self._call = None
        self.response = None

    def _open(self) -> asyncio.Task[pb.AppendResponse]:
        if self._call is None:
            self._call = asyncio.create_task(
                append_once(self._transport, self.request, self._feed.chunks(), self._target)
            )
            self._call.add_done_callback(self._feed.taker_ended)
        return self._call


class _AbortedError(CallError):
    """Thrown through an append under way, so that it is rolled back."""


class _Feed:
    """Hands chunks from a writer to the call that sends them, one at a time."""

    def __init__(self) -> None:
        self._chunk: bytes | None = None
        self._failure: Exception | None = None
        self._is_ended = False
        self._has_taker = True
        self._filled = asyncio.Event()
        self._emptied = asyncio.Event()
        self._emptied.set()

    async def put(self, chunk: bytes) -> bool:
        """Hand over a chunk, once the one before was taken; false if nobody takes any more."""
        await self._emptied.wait()
        if not self._has_taker or self._is_ended or self._failure is not None:
            return False
        self._chunk = chunk
        self._emptied.clear()
        self._filled.set()
        return True

    def end(self) -> None:
        """No further chunk follows."""
        self._is_ended = True
        self._filled.set()

    def fail(self, error: Exception) -> None:
        """The taker gets ``error`` instead of a further chunk."""
        self._failure = error
        self._filled.set()

    def taker_ended(self, _call: object) -> None:
        """Nobody takes chunks any more."""
        self._has_taker = False
        self._emptied.set()

    async def chunks(self) -> AsyncIterator[bytes]:
        """What was handed over, until the end."""
        while True:
            await self._filled.wait()
            if self._failure is not None:
                raise self._failure
            chunk, self._chunk = self._chunk, None
            if chunk is None:
                assert self._is_ended
                return
            if not self._is_ended:
                self._filled.clear()
            self._emptied.set()
            yield chunk
