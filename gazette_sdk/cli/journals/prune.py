"""``gazctl journals prune``."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing
from dataclasses import dataclass

from gazette_sdk.cli.client import open_broker
from gazette_sdk.cli.command import Invocation
from gazette_sdk.cli.concurrency import for_each
from gazette_sdk.cli.journals.fragments import fragments_of
from gazette_sdk.cli.journals.selection import (
    file_root_of,
    is_fully_suspended,
    list_some,
    missing_file_root,
    selection_of,
)
from gazette_sdk.cli.journals.settings import PRUNE
from gazette_sdk.errors import FragmentNotFoundError
from gazette_sdk.fragment.registry import StoreRegistry
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.durations import to_seconds
from gazette_sdk.protocol.fragments import content_path, length_of

__all__ = ["aged_fragments", "run"]

_log = logging.getLogger(__name__)

REMOVALS_MAX = 32
"""Concurrent removals of one journal's fragments."""


@dataclass(slots=True)
class _Totals:
    """Counts of listed and of removed fragments."""

    journals: int = 0
    fragments: int = 0
    bytes: int = 0
    pruned_fragments: int = 0
    pruned_bytes: int = 0

    def fields(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in self.__slots__}


async def run(invocation: Invocation) -> None:
    """Remove fragments older than their journal's retention from their stores."""
    settings = invocation.settings(PRUNE)
    selection = selection_of(invocation, settings)
    root = file_root_of(settings.file_root)
    totals = _Totals()
    async with open_broker(invocation) as transport, aclosing(StoreRegistry(root)) as stores:
        listing = await list_some(transport, selection)
        for journal in listing.journals:
            if is_fully_suspended(journal.spec):
                continue
            (response,) = await fragments_of(transport, [journal], pb.FragmentsRequest())
            aged = aged_fragments(journal.spec, response, time.time())
            _log.info(
                "fetched aged fragments",
                extra={
                    "journal": journal.spec.name,
                    "aged": len(aged),
                    "total": len(response.fragments),
                },
            )
            totals.journals += 1
            totals.fragments += len(response.fragments)
            totals.bytes += sum(length_of(each.spec) for each in response.fragments)
            if not settings.dry_run and root is None:
                for fragment in aged:
                    if fragment.backing_store.startswith("file:"):
                        raise missing_file_root(fragment.journal)
            await _remove(stores, aged, totals, dry_run=settings.dry_run)
    _log.info("finished pruning", extra={"dry_run": settings.dry_run, **totals.fields()})


def aged_fragments(
    spec: pb.JournalSpec, response: pb.FragmentsResponse, now_s: float
) -> list[pb.Fragment]:
    """Return the stored fragments that are older than the journal's retention.

    A retention of zero or less keeps all fragments.
    """
    retention_s = to_seconds(spec.fragment.retention)
    if retention_s <= 0:
        return []
    return [
        each.spec
        for each in response.fragments
        if each.spec.backing_store and now_s - each.spec.mod_time >= retention_s
    ]


async def _remove(
    stores: StoreRegistry,
    aged: list[pb.Fragment],
    totals: _Totals,
    *,
    dry_run: bool,
) -> None:
    async def remove(fragment: pb.Fragment) -> None:
        path = content_path(fragment)
        fields = {"journal": fragment.journal, "path": path, "mod": fragment.mod_time}
        _log.info("pruning fragment", extra={**fields, "size": length_of(fragment)})
        if not dry_run:
            store = await stores.aget(fragment.backing_store)
            try:
                await asyncio.to_thread(store.remove, path)
            except FragmentNotFoundError:
                _log.info("the fragment has already been removed", extra=fields)
        totals.pruned_fragments += 1
        totals.pruned_bytes += length_of(fragment)

    await for_each(aged, remove, REMOVALS_MAX)
    if aged:
        _log.info("pruned so far", extra={"dry_run": dry_run, **totals.fields()})
