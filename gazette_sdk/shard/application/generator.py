"""Generator of an application's shards: creates those of new source journals.

It runs in every process of the application, and works in the one that leads; and in
``gazctl shards generate``. Two that work at a time are harmless: shards and logs are created only
where there are none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from gazette_sdk.errors import (
    ClosedError,
    ConfigurationError,
    EtcdTransactionFailedError,
    EtcdUnavailableError,
    GazetteError,
    ValidationError,
)
from gazette_sdk.journals.changes import apply_in_transactions, list_named
from gazette_sdk.outage import Outage
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.labels import format_selector, topic_hint
from gazette_sdk.shard.application.application import Application
from gazette_sdk.shard.application.sources import Existing, Generated, generated
from gazette_sdk.transport.backoff import pause
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.listing import WatchedList

__all__ = ["CreateShards", "ShardGenerator"]

_log = logging.getLogger(__name__)

CreateShards = Callable[[Sequence[cpb.ShardSpec]], Awaitable[None]]
"""Function that creates shards in one transaction, each only if there is none of its id."""

CREATED_AT_ONCE = 50
"""Shards that are created in one transaction of Etcd."""


class ShardGenerator:
    """Generator of the shards of one application.

    Args:
        application: the application.
        transport: transport to the journals.
        selector: selector of its source journals; None if it has none that are known.
        existing: returns the shards that exist, with the journals that they read.
        create: creates shards. It raises :class:`EtcdTransactionFailedError` if one exists.
        leads: returns True while this process is to create shards; by default always.
        until_changed: waits until `leads` or `existing` may return something else; by default
            that is seldom, and looked at when journals change.
    """

    def __init__(
        self,
        application: Application[Any, Any],
        transport: Transport,
        selector: pb.LabelSelector | None,
        *,
        existing: Callable[[], Awaitable[Existing]],
        create: CreateShards,
        leads: Callable[[], bool] = lambda: True,
        until_changed: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._application = application
        self._transport = transport
        self._selector = selector
        self._existing = existing
        self._create = create
        self._leads = leads
        self._until_changed = until_changed
        self._outage = Outage(_log, f"creation of shards of {application.full_name}")

    async def run(self) -> None:
        """Create shards until cancelled; return at once if there is no selector.

        Raises:
            GazetteError: a watch has ended for good.
        """
        if self._selector is None:
            return
        try:
            await self._follow(self._selector)
        except ExceptionGroup as group:
            raise group.exceptions[0] from group

    async def _follow(self, selector: pb.LabelSelector) -> None:
        """Create shards whenever journals or shards change."""
        wake = asyncio.Event()
        async with (
            WatchedList(self._transport, selector) as watched,
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(_repeat(watched.changed, wake))
            if self._until_changed is not None:
                tasks.create_task(_repeat(self._until_changed, wake))
            attempt = 0
            is_noted = False
            while True:
                await wake.wait()
                wake.clear()
                if watched.snapshot is None or not self._leads():
                    continue
                if not watched.snapshot.journals and not is_noted:
                    is_noted = True
                    _log.warning(
                        "no journal matches the sources of %s, %s; it waits for one: create it, or"
                        " check the sources and the address of the broker%s",
                        self._application.full_name,
                        format_selector(selector),
                        "".join(map(topic_hint, self._application.source_names)),
                    )
                try:
                    await self.generate([each.spec for each in watched.snapshot.journals])
                except GazetteError as error:
                    if not isinstance(error, EtcdTransactionFailedError):
                        self._outage.failed(error)
                    await pause(attempt)
                    attempt += 1
                    wake.set()
                else:
                    self._outage.ended()
                    attempt = 0

    async def generate(self, journals: Sequence[pb.JournalSpec]) -> None:
        """Create what journals want and what does not exist: first logs, then shards.

        Args:
            journals: specs of the journals.

        Raises:
            EtcdTransactionFailedError: another process has created some; list what exists again.
            ValidationError: the name of a journal is too long. All others have their shards.
            GazetteError: the creation failed.
        """
        existing = await self._existing()
        wanted, refused = Generated([], []), None
        for journal in sorted(journals, key=lambda spec: spec.name.encode()):
            try:
                found = generated(self._application, [journal], existing)
            except ValidationError as error:
                refused = refused or ValidationError(
                    f"the journal {journal.name} gets no shard, as its name or the application's is"
                    f" too long: {error}",
                    journal=journal.name,
                )
            else:
                wanted.shards.extend(found.shards)
                wanted.logs.extend(found.logs)
        logs = await list_named(self._transport, [log.name for log in wanted.logs])
        changes = [
            pb.ApplyRequest.Change(upsert=log, expect_mod_revision=0)
            for log in wanted.logs
            if log.name not in logs
        ]
        await apply_in_transactions(self._transport, changes)
        for begin in range(0, len(wanted.shards), CREATED_AT_ONCE):
            await self._create(wanted.shards[begin : begin + CREATED_AT_ONCE])
        if refused is not None:
            raise refused


async def _repeat(changed: Callable[[], Awaitable[None]], wake: asyncio.Event) -> None:
    """Wake the generator after each change, until the watch ends for good."""
    while True:
        try:
            await changed()
        except (ClosedError, ConfigurationError, EtcdUnavailableError):
            raise  # every further call would raise it at once
        except GazetteError as error:
            _log.debug("the watch of journals goes on by itself: %s", error)
        else:
            wake.set()
