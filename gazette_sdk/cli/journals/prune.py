"""``gazctl journals prune``."""

from __future__ import annotations

import logging
import sys
import time
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Literal

import orjson

from gazette_sdk.cli.client import open_broker
from gazette_sdk.cli.command import Invocation
from gazette_sdk.cli.formats import iec_bytes, write_table
from gazette_sdk.cli.fragment_removal import remove_fragments
from gazette_sdk.cli.journals.fragments import fragments_of
from gazette_sdk.cli.journals.selection import (
    file_root_of,
    is_fully_suspended,
    list_some,
    missing_file_root,
    selection_of,
)
from gazette_sdk.cli.journals.settings import PRUNE
from gazette_sdk.errors import ConfigurationError
from gazette_sdk.fragment.registry import StoreRegistry
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.durations import to_seconds
from gazette_sdk.protocol.fragments import length_of

__all__ = ["aged_fragments", "run"]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Pruned:
    """Number and size of a journal's fragments, and of those that were, or would be, removed."""

    journal: str
    fragments: int = 0
    bytes: int = 0
    pruned_fragments: int = 0
    pruned_bytes: int = 0

    def removed(self, fragment: pb.Fragment) -> None:
        """Count a fragment that was, or would be, removed."""
        self.pruned_fragments += 1
        self.pruned_bytes += length_of(fragment)


async def run(invocation: Invocation) -> None:
    """Show fragments that are older than their journal's retention, and remove them if asked to.

    Raises:
        ConfigurationError: it is told both to remove fragments and not to.
        GazetteError: a fragment could not be removed, or the broker could not be asked.
    """
    settings = invocation.settings(PRUNE)
    if settings.yes and settings.dry_run:
        raise ConfigurationError(
            "--yes removes fragments, and --dry-run does not: give one of them"
        )
    selection = selection_of(invocation, settings)
    root = file_root_of(settings.file_root)
    found: list[_Pruned] = []
    try:
        async with open_broker(invocation) as transport, aclosing(StoreRegistry(root)) as stores:
            listing = await list_some(transport, selection)
            for journal in listing.journals:
                if is_fully_suspended(journal.spec):
                    continue
                (response,) = await fragments_of(transport, [journal], pb.FragmentsRequest())
                aged = aged_fragments(journal.spec, response, time.time())
                found.append(
                    _Pruned(
                        journal.spec.name,
                        len(response.fragments),
                        sum(length_of(each.spec) for each in response.fragments),
                    )
                )
                if settings.yes and root is None:
                    for fragment in aged:
                        if fragment.backing_store.startswith("file:"):
                            raise missing_file_root(fragment.journal)
                await remove_fragments(stores, aged, found[-1].removed, dry_run=not settings.yes)
    finally:  # also what was removed before an error
        _show(found, settings.format, dry_run=not settings.yes)
    if not settings.yes and not settings.dry_run and any(each.pruned_fragments for each in found):
        _log.warning("nothing was removed; add --yes to remove these fragments")


def _show(found: list[_Pruned], form: Literal["table", "json"], *, dry_run: bool) -> None:
    """Write what was, or would be, removed of each journal to standard output."""
    if form == "json":
        for each in found:
            sys.stdout.write(orjson.dumps({**asdict(each), "dry_run": dry_run}).decode() + "\n")
    elif found:
        total = _Pruned("TOTAL")
        for each in found:
            for name in ("fragments", "bytes", "pruned_fragments", "pruned_bytes"):
                setattr(total, name, getattr(total, name) + getattr(each, name))
        verb = "To Remove" if dry_run else "Removed"
        rows = (
            [
                each.journal,
                str(each.fragments),
                iec_bytes(each.bytes),
                str(each.pruned_fragments),
                iec_bytes(each.pruned_bytes),
            ]
            for each in (*found, total)
        )
        write_table(["Journal", "Fragments", "Size", verb, f"{verb} Size"], rows)
    sys.stdout.flush()


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
