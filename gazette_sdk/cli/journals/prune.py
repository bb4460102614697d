"""``gazctl journals prune``."""

from __future__ import annotations

import time

from gazette_sdk.cli.client import open_broker
from gazette_sdk.cli.command import Invocation
from gazette_sdk.cli.fragment_removal import FragmentRemoval
from gazette_sdk.cli.journals.fragments import stored_of
from gazette_sdk.cli.journals.selection import is_fully_suspended, list_some, selection_of
from gazette_sdk.cli.journals.settings import PRUNE
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.durations import to_seconds

__all__ = ["aged_fragments", "run"]


async def run(invocation: Invocation) -> None:
    """Show fragments that are older than their journal's retention, and remove them if asked to.

    Raises:
        ConfigurationError: it is told both to remove fragments and not to.
        GazetteError: a fragment could not be removed, or the broker could not be asked.
    """
    settings = invocation.settings(PRUNE)
    removal = FragmentRemoval(settings, "Journal")
    selection = selection_of(invocation, settings)
    async with removal, open_broker(invocation) as transport:
        listing = await list_some(transport, selection)
        for journal in listing.journals:
            if is_fully_suspended(journal.spec):
                continue
            response = await stored_of(transport, journal)
            name = journal.spec.name
            removal.count(name, [each.spec for each in response.fragments])
            await removal.remove(name, aged_fragments(journal.spec, response, time.time()))


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
