"""``gazctl journals reset-head``."""

from __future__ import annotations

import asyncio
import logging

from gazette_sdk.cli.client import open_broker
from gazette_sdk.cli.command import Invocation
from gazette_sdk.cli.failure import CommandFailedError
from gazette_sdk.cli.journals.selection import CALLS_MAX, select
from gazette_sdk.cli.journals.settings import RESET_HEAD
from gazette_sdk.errors import CallError, GazetteError, WrongAppendOffsetError, for_status
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.append.append import append
from gazette_sdk.transport.base import Transport

__all__ = ["run"]

_log = logging.getLogger(__name__)

JOURNAL_TIMEOUT_S = 60.0
"""A journal whose brokers do not come together for so long is reported as failed."""


async def run(invocation: Invocation) -> None:
    """Reset the write heads of journals. All are tried, whatever comes of the others.

    Raises:
        CommandFailedError: some of them failed; each was logged.
    """
    selector = invocation.settings(RESET_HEAD).selector
    places = asyncio.Semaphore(CALLS_MAX)
    async with open_broker(invocation) as transport:

        async def reset(journal: str) -> str:
            async with places:
                return await _reset(transport, journal)

        names = [each.spec.name for each in await select(transport, selector)]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(reset(name)) for name in names]
    failed = [reason for task in tasks if (reason := task.result())]
    if failed:
        raise CommandFailedError(
            f"{len(failed)} of {len(names)} journals could not be reset: {failed[0]}"
        )


async def _reset(transport: Transport, journal: str) -> str:
    """Reset one journal; returns why it failed, or nothing."""
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
    """The end of a journal's content, as its brokers' indices know it."""
    request = pb.ReadRequest(journal=journal, offset=-1, metadata_only=True)
    async for response in transport.read(request):
        assert isinstance(response, pb.ReadResponse)  # no content is asked for
        if response.status not in (pb.OK, pb.OFFSET_NOT_YET_AVAILABLE):
            raise for_status(response.status, journal=journal)
        return response.offset
    raise CallError(f"{journal}: a read ended without a response", journal=journal)
