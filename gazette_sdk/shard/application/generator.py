"""Generator of an application's shards: creates those of new source journals.

It runs in every process of the application, and works in the one that leads. Two that believe to
lead are harmless: shards and logs are created only where there are none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

from gazette_sdk.errors import ClosedError, EtcdTransactionFailedError, GazetteError
from gazette_sdk.journals.changes import apply_in_transactions, list_named
from gazette_sdk.outage import Outage
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.shard.application.application import Application
from gazette_sdk.shard.application.sources import generated, source_selector
from gazette_sdk.transport.backoff import pause
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.listing import WatchedList

__all__ = ["CreateShards", "ShardGenerator"]

_log = logging.getLogger(__name__)

CreateShards = Callable[[Sequence[cpb.ShardSpec]], Awaitable[None]]
"""Function that creates shards, each only if there is none of its id."""


class ShardGenerator:
    """Generator of the shards of one application.

    Args:
        application: the application.
        transport: transport to the journals.
        leads: returns True while this process is to create shards.
        existing: returns the ids of the shards that exist.
        create: creates shards. It raises :class:`EtcdTransactionFailedError` if one exists.
        until_changed: waits until `leads` or `existing` may return something else.
    """

    def __init__(
        self,
        application: Application[Any, Any],
        transport: Transport,
        *,
        leads: Callable[[], bool],
        existing: Callable[[], Collection[str]],
        create: CreateShards,
        until_changed: Callable[[], Awaitable[None]],
    ) -> None:
        self._application = application
        self._transport = transport
        self._leads = leads
        self._existing = existing
        self._create = create
        self._until_changed = until_changed
        self._outage = Outage(_log, f"creation of shards of {application.full_name}")

    async def run(self) -> None:
        """Create shards until cancelled; return at once if the application declares no sources."""
        selector = source_selector(self._application)
        if selector is None:
            return
        wake = asyncio.Event()
        async with WatchedList(self._transport, selector) as watched, asyncio.TaskGroup() as tasks:
            tasks.create_task(_repeat(watched.changed, wake))
            tasks.create_task(_repeat(self._until_changed, wake))
            attempt = 0
            while True:
                await wake.wait()
                wake.clear()
                if watched.snapshot is None or not self._leads():
                    continue
                try:
                    await self.generate([each.spec for each in watched.snapshot.journals])
                except GazetteError as error:
                    self._outage.failed(error)
                    await pause(attempt)
                    attempt += 1
                    wake.set()
                else:
                    self._outage.ended()
                    attempt = 0

    async def generate(self, journals: Sequence[pb.JournalSpec]) -> list[str]:
        """Create what journals want and what does not exist: first logs, then shards.

        Args:
            journals: specs of the journals.

        Returns:
            Ids of the shards that were created.

        Raises:
            GazetteError: the creation failed.
        """
        wanted = generated(self._application, journals, self._existing())
        logs = await list_named(self._transport, [log.name for log in wanted.logs])
        changes = [
            pb.ApplyRequest.Change(upsert=log, expect_mod_revision=0)
            for log in wanted.logs
            if log.name not in logs
        ]
        try:
            await apply_in_transactions(self._transport, changes)
            await self._create(wanted.shards)
        except EtcdTransactionFailedError:
            return []  # another process created some; the listing that follows has them
        return [spec.id for spec in wanted.shards]


async def _repeat(changed: Callable[[], Awaitable[None]], wake: asyncio.Event) -> None:
    """Wake the generator after each change."""
    while True:
        try:
            await changed()
        except ClosedError:
            raise
        except GazetteError as error:
            _log.debug("the watch of journals goes on by itself: %s", error)
        else:
            wake.set()
