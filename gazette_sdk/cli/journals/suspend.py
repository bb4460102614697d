"""``gazctl journals suspend``."""

from __future__ import annotations

import logging

from gazette_sdk.cli.client import open_broker
from gazette_sdk.cli.command import Invocation
from gazette_sdk.cli.concurrency import for_each
from gazette_sdk.cli.journals.selection import select, selection_of
from gazette_sdk.cli.journals.settings import SUSPEND
from gazette_sdk.errors import SuspendedError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.append.append import append

__all__ = ["run"]

_log = logging.getLogger(__name__)


async def run(invocation: Invocation) -> None:
    """Suspend journals. The first failure ends the command.

    Raises:
        GazetteError: that failure.
    """
    settings = invocation.settings(SUSPEND)
    selection = selection_of(invocation, settings)
    mode = pb.AppendRequest.SUSPEND_NOW if settings.force else pb.AppendRequest.SUSPEND_IF_FLUSHED
    async with open_broker(invocation) as transport:

        async def suspend(journal: str) -> None:
            try:
                await append(transport, pb.AppendRequest(journal=journal, suspend=mode), [])
                status = "OK"
            except SuspendedError:
                status = "SUSPENDED"
            _log.info("journal suspension status", extra={"journal": journal, "status": status})

        journals = await select(transport, selection)
        await for_each([each.spec.name for each in journals], suspend)
