"""Waiting until shards have consumed what their sources hold, as any client sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from gazette_sdk.errors import UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.names import strip_meta
from gazette_sdk.shard.application.application import Application
from gazette_sdk.shard.application.sources import source_selector
from gazette_sdk.shard.consumer.client import ShardClient
from gazette_sdk.transport.append.append import append
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.listing import list_journals

__all__ = ["Ask", "shard_of", "status_text", "until_caught_up"]

T = TypeVar("T")

POLL_S = 0.05
"""Pause between two looks at shards that are not there yet."""

SHOWN_MAX = 5
"""Number of shards in a text."""


class Ask(Protocol):
    """Function that asks a process of the application, until one answers."""

    def __call__(self, call: Callable[[ShardClient], Awaitable[T]], /) -> Awaitable[T]:
        """Return what the call returns."""


async def until_caught_up(
    application: Application[Any, Any], transport: Transport, ask: Ask
) -> None:
    """Wait until the shards have read through what their sources hold by now. The caller bounds it.

    Args:
        application: the application.
        transport: to the journals.
        ask: asks a process.

    Raises:
        GazetteError: the journals cannot be listed, or not be appended to.
    """
    for journal, head in (await _heads(application, transport, ask)).items():
        shard = (await shard_of(journal, ask)).id
        request = cpb.StatRequest(shard=shard, read_through={journal: head})
        await _until_read(request, ask)


async def _until_read(request: cpb.StatRequest, ask: Ask) -> None:
    """Wait until a shard has read through offsets, also while its primary changes."""
    while True:
        try:
            response = await ask(lambda client: client.stat(request))
        except UnavailableError:
            pass  # the primary has died, and Etcd does not know yet
        else:
            if response.status == cpb.OK:
                return
        await asyncio.sleep(POLL_S)


async def shard_of(journal: str, ask: Ask) -> cpb.ShardSpec:
    """Return the shard that reads a journal, once there is one. The caller bounds the wait."""
    while True:
        listed = await ask(lambda client: client.list())
        for shard in listed.shards:
            if any(strip_meta(each.journal) == journal for each in shard.spec.sources):
                return shard.spec
        await asyncio.sleep(POLL_S)


async def _heads(
    application: Application[Any, Any], transport: Transport, ask: Ask
) -> Mapping[str, int]:
    """Return the write heads of the sources."""
    selector = source_selector(application)
    if selector is None:
        listed = await ask(lambda client: client.list())
        names = [
            strip_meta(source.journal) for shard in listed.shards for source in shard.spec.sources
        ]
    else:
        listing = await list_journals(transport, selector)
        names = [journal.spec.name for journal in listing.journals]
    heads = {}
    for name in names:
        response = await append(transport, pb.AppendRequest(journal=name), [])
        heads[name] = response.commit.end
    return heads


def status_text(shards: Sequence[cpb.ListResponse.Shard]) -> str:
    """Return the members and statuses of a few shards, for an error; failed ones first."""
    failed = cpb.ReplicaStatus.FAILED
    shards = sorted(shards, key=lambda shard: all(s.code != failed for s in shard.status))
    return "; ".join(
        f"{shard.spec.id}: "
        + ", ".join(
            f"{member.suffix}{'*' if place == shard.route.primary else ''} "
            f"{cpb.ReplicaStatus.Code.Name(status.code)} {' '.join(status.errors)}".strip()
            for place, (member, status) in enumerate(
                zip(shard.route.members, shard.status, strict=True)
            )
        )
        for shard in shards[:SHOWN_MAX]
    )
