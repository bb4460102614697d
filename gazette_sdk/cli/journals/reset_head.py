"""``gazctl journals reset-head``."""

from __future__ import annotations

import asyncio
import functools
import logging

from gazette_sdk.cli.client import open_broker
from gazette_sdk.cli.command import Invocation
from gazette_sdk.cli.concurrency import for_each
from gazette_sdk.cli.failure import CommandFailedError
from gazette_sdk.cli.journals.selection import select, selection_of
from gazette_sdk.cli.journals.settings import RESET_HEAD
from gazette_sdk.errors import GazetteError, UnavailableError, WrongAppendOffsetError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.append.append import append
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.journal_reader import read_metadata

__all__ = ["run"]

_log = logging.getLogger(__name__)

JOURNAL_TIMEOUT_S = 60.0
"""A journal fails if its brokers are not ready for this long."""


async def run(invocation: Invocation) -> None:
    """Reset the write heads of journals. A failure does not stop the others.

    Raises:
        CommandFailedError: some journals failed; each failure was logged.
    """
    selection = selection_of(invocation, invocation.settings(RESET_HEAD))
    async with open_broker(invocation) as transport:
        journals = await select(transport, selection)
        reasons = await for_each(journals, functools.partial(_reset, transport))
    failed = [reason for reason in reasons if reason]
    if failed:
        raise CommandFailedError(
            f"{len(failed)} of {len(journals)} journals could not be reset: {failed[0]}"
        )


async def _reset(transport: Transport, listed: pb.ListResponse.Journal) -> str:
    """Reset one journal; return the reason of a failure, or an empty text."""
    journal = listed.spec.name
    fields = {"journal": journal}
    absent = ", ".join(f"{broker.zone}/{broker.suffix}" for broker in listed.waiting.brokers)
    try:
        async with asyncio.timeout(JOURNAL_TIMEOUT_S):
            head = (await read_metadata(transport, journal, -1)).offset
            if absent and head == 0:
                raise UnavailableError(
                    f"it waits for {absent}, and nothing of it is stored; start one of them over "
                    "its spool directory, or delete the journal and create it again",
                    journal=journal,
                )
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
        if absent:
            _log.warning(
                "gave up what brokers that are away did not store behind the new write head",
                extra={**fields, "offset": head, "brokers": absent},
            )
    return ""
