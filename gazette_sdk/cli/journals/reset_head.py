"""``gazctl journals reset-head``."""

from __future__ import annotations

import asyncio
import functools
import logging

from gazette_sdk.cli.client import open_broker
from gazette_sdk.cli.command import Invocation
from gazette_sdk.cli.concurrency import for_each
from gazette_sdk.cli.failure import CommandFailedError
from gazette_sdk.cli.journals.selection import select
from gazette_sdk.cli.journals.settings import RESET_HEAD
from gazette_sdk.errors import CallError, GazetteError, WrongAppendOffsetError, for_status
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.append.append import append
from gazette_sdk.transport.base import Transport

__all__ = ["run"]

_log = logging.getLogger(__name__)

JOURNAL_TIMEOUT_S = 60.0
"""A journal fails if its brokers are not ready for this long."""


async def run(invocation: Invocation) -> None:
    """Reset the write heads of journals. A failure does not stop the others.

    Raises:
        CommandFailedError: some journals failed; each failure was logged.
    """
    async with open_broker(invocation) as transport:
        journals = await select(transport, invocation.settings(RESET_HEAD).selector)
        names = [each.spec.name for each in journals]
        reasons = await for_each(names, functools.partial(_reset, transport))
    failed = [reason for reason in reasons if reason]
    if failed:
        raise CommandFailedError(
            f"{len(failed)} of {len(names)} journals could not be reset: {failed[0]}"
        )


async def _reset(transport: Transport, journal: str) -> str:
    """Reset one journal; return the reason of a failure, or an empty text."""
    fields = {"journal": journal}
    try:
        async with asyncio.timeout(JOURNAL_TIMEOUT_S):
            head = await _index_head(transport, journal)
            request = pb.AppendRequest(
                journal=journal, offset=head, suspend=pb.AppendRequest.SUSPEND_KEEP
            )
            await append(transport, request, [])
    except WrongAppendOffsetError:
        _log.info("did not reset write head: others write to the journal", extra=fields)
    except TimeoutError:
        reason = f"{journal}: its brokers were not ready within {JOURNAL_TIMEOUT_S:g} s"
        _log.error("failed to reset write head", extra={**fields, "err": reason})
        return reason
    except GazetteError as error:
        _log.error("failed to reset write head", extra={**fields, "err": str(error)})
        return str(error)
    else:
        _log.info("reset write head", extra={**fields, "offset": head})
    return ""


async def _index_head(transport: Transport, journal: str) -> int:
    """Return the end of a journal's content by its brokers' fragment indices."""
    request = pb.ReadRequest(journal=journal, offset=-1, metadata_only=True)
    async for response in transport.read(request):
        assert isinstance(response, pb.ReadResponse)  # the request asks for no content
        if response.status not in (pb.OK, pb.OFFSET_NOT_YET_AVAILABLE):
            raise for_status(response.status, journal=journal)
        return response.offset
    raise CallError(f"{journal}: a read ended without a response", journal=journal)
