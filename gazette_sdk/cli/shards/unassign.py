"""``gazctl shards unassign``."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterable, Iterator

from gazette_sdk.cli.client import open_consumer
from gazette_sdk.cli.command import Invocation
from gazette_sdk.cli.failure import CommandFailedError
from gazette_sdk.cli.formats import write_table
from gazette_sdk.cli.shards.selection import required_selector
from gazette_sdk.cli.shards.settings import UNASSIGN, UnassignSettings
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.shard.consumer.client import ShardClient

__all__ = ["run"]

_log = logging.getLogger(__name__)

TIMEOUT_S = 10.0
"""Longest time of the command."""

ASSIGNMENTS_MAX = 100
"""Assignments of the shards in one request. It is one transaction of Etcd, with 128 operations."""


async def run(invocation: Invocation) -> None:
    """Unassign shards, and show them with their former processes.

    Raises:
        CommandFailedError: there was no answer in time.
        ShardStatusError: assignments changed meanwhile, and stayed. Earlier ones are removed.
    """
    settings = invocation.settings(UNASSIGN)
    selector = required_selector(settings.selector)
    try:
        async with asyncio.timeout(TIMEOUT_S), open_consumer(invocation) as client:
            listing = await client.list(selector)
            await _unassign(client, listing, settings)
    except TimeoutError as error:
        raise CommandFailedError(
            f"no answer within {TIMEOUT_S:g} s; some shards may have been unassigned, `gazctl "
            "shards list` shows them"
        ) from error


async def _unassign(
    client: ShardClient, listing: cpb.ListResponse, settings: UnassignSettings
) -> None:
    known = {
        shard.spec.id: shard
        for shard in listing.shards
        if not settings.failed
        or any(status.code == cpb.ReplicaStatus.FAILED for status in shard.status)
    }
    rows: list[list[str]] = []
    try:
        for batch in _batches(known.values()):
            request = cpb.UnassignRequest(
                shards=batch,
                only_failed=settings.failed,
                dry_run=settings.dry_run,
            )
            for shard in (await client.unassign(request)).shards:
                rows.append([shard, "to unassign" if settings.dry_run else "unassigned"])
                rows[-1].append(_former(known[shard]))
    finally:  # also what was unassigned before an error
        if rows:
            write_table(["Shard", "Outcome", "Was At"], rows)
            sys.stdout.flush()
    if not rows:
        _log.warning("no shard is to be unassigned", extra={"selector": settings.selector})


def _batches(shards: Iterable[cpb.ListResponse.Shard]) -> Iterator[list[str]]:
    """Yield the ids of shards that have a bounded number of assignments together."""
    batch: list[str] = []
    count = 0
    for shard in shards:
        held = max(1, len(shard.status))
        if batch and count + held > ASSIGNMENTS_MAX:
            yield batch
            batch, count = [], 0
        batch.append(shard.spec.id)
        count += held
    if batch:
        yield batch


def _former(shard: cpb.ListResponse.Shard) -> str:
    """Return the processes of a shard with their statuses."""
    return ",".join(
        f"{member.suffix}:{cpb.ReplicaStatus.Code.Name(status.code)}"
        for member, status in zip(shard.route.members, shard.status, strict=True)
    )
