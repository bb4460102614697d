"""One append as one call: its requests, its errors, and attempts until it succeeds.

Over any transport (client section 3): the request that names the journal, chunks of content,
an empty request that commits. Nothing is sent before there is content or a commit to send,
because brokers hold a journal-wide lock while an append is open, and abort slow ones.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Sequence
from typing import BinaryIO, TypeAlias

from gazette_sdk.errors import (
    ClosedError,
    ConfigurationError,
    FragmentStoreUnhealthyError,
    IndexHasGreaterOffsetError,
    InsufficientJournalBrokersError,
    JournalNotFoundError,
    NoJournalPrimaryBrokerError,
    NotAllowedError,
    NotJournalPrimaryBrokerError,
    RegisterMismatchError,
    StatusError,
    UnavailableError,
    ValidationError,
    WrongAppendOffsetError,
    for_status,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import rules as rpc
from gazette_sdk.protocol.labels import format_selector, pairs_of
from gazette_sdk.retries import Outage, Pause, pause_append
from gazette_sdk.transport.append.queue import count_appended
from gazette_sdk.transport.base import CHUNK_BYTES, Transport
from gazette_sdk.transport.wire import ANYWHERE, AppendItem, Target

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

_TERMINAL = (
    ClosedError,
    ConfigurationError,
    FragmentStoreUnhealthyError,
    IndexHasGreaterOffsetError,
    JournalNotFoundError,
    NotAllowedError,
    RegisterMismatchError,
    WrongAppendOffsetError,
)
"""Failures that another attempt would meet again (client section 4)."""


def is_transient(error: BaseException | None) -> bool:
    """Return True for a failure that ends by itself once the journal's route has converged."""
    return isinstance(error, TRANSIENT)


def is_terminal(error: BaseException) -> bool:
    """Return True for a failure that another attempt would meet again."""
    return isinstance(error, _TERMINAL)


def status_error(request: pb.AppendRequest, response: pb.AppendResponse) -> StatusError:
    """Return the error of an append whose response is not OK."""
    detail = ""
    if response.status == pb.REGISTER_MISMATCH:
        registers = ",".join(f"{name}={value}" for name, value in pairs_of(response.registers))
        wanted = format_selector(request.check_registers)
        detail = f"registers are {{{registers}}}, the append requires {{{wanted}}}"
    elif response.status == pb.WRONG_APPEND_OFFSET:
        detail = f"the append names offset {request.offset}"
    elif response.status in {pb.FRAGMENT_STORE_UNHEALTHY, pb.INSUFFICIENT_JOURNAL_BROKERS}:
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

    async def items() -> AsyncIterator[AppendItem]:
        yield request
        async for chunk in content:
            if chunk:
                count_appended(request.journal, len(chunk))
                yield chunk
        yield pb.AppendRequest()

    response = await transport.append(items(), target)
    if response.status != pb.OK:
        raise status_error(request, response)
    return response


async def append(
    transport: Transport,
    request: pb.AppendRequest,
    sources: Sequence[Source],
    *,
    patience_s: float | None = None,
    pause: Pause = pause_append,
) -> pb.AppendResponse:
    """Append several sources as one append, trying again until it succeeds.

    For content that is streamed, of any length. Routing failures and unavailable brokers are
    tried again from the start. An attempt whose answer was lost may have committed: **at least
    once**.

    Args:
        transport: how to reach the journal.
        request: names the journal, and its preconditions.
        sources: content, in order; each can be read again from its start.
        patience_s: longest time between the ends of the first and the last attempt that fails, in
            seconds; without it there are attempts until the caller cancels.
        pause: waits between attempts.

    Raises:
        GazetteError: every failure that another attempt would not mend, and the last one of others.
        Exception: whatever a source raised; the append was rolled back.
    """
    check_opening(request)
    attempt = 0
    loop = asyncio.get_running_loop()
    failing_since = math.inf
    outage = Outage(logger, f"append to {request.journal}")
    while True:
        try:
            response = await append_once(transport, request, _read_all(sources))
        except TRANSIENT as error:
            if attempt > 0 or isinstance(error, UnavailableError):
                outage.failed(error)
            failing_since = min(failing_since, loop.time())
            if patience_s is not None and loop.time() - failing_since >= patience_s:
                raise
        else:
            outage.ended()
            return response
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
