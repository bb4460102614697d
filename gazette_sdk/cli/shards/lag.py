"""Lag of shards: bytes of their sources that they have not read yet."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from gazette_sdk.cli.concurrency import for_each
from gazette_sdk.errors import GazetteError, ShardStatusError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.shard.consumer.client import ShardClient
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.journal_reader import read_metadata

__all__ = ["Lag", "lag_of"]

_log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 8.0
"""The lag is unknown if a primary or a broker does not answer for this long: a primary that is
still recovering answers when it is done."""

Lag = Mapping[str, int | None]
"""Bytes between what a shard has read and the write head, by source; None where that is unknown."""


async def lag_of(
    client: ShardClient, transport: Transport, shards: Sequence[cpb.ListResponse.Shard]
) -> dict[str, Lag | None]:
    """Return the lag of shards by id; None of one whose primary does not answer.

    Args:
        client: asks the primaries.
        transport: asks the brokers.
        shards: the shards.
    """

    async def read_through(shard: cpb.ListResponse.Shard) -> dict[str, int] | None:
        return await _read_through(client, shard.spec.id)

    async def head(journal: str) -> int | None:
        return await _head(transport, journal)

    read = dict(
        zip(
            (shard.spec.id for shard in shards),
            await for_each(shards, read_through),
            strict=True,
        )
    )
    journals = sorted({journal for offsets in read.values() for journal in offsets or ()})
    heads = dict(zip(journals, await for_each(journals, head), strict=True))
    return {
        shard: None if offsets is None else {j: _behind(heads[j], o) for j, o in offsets.items()}
        for shard, offsets in read.items()
    }


def _behind(head: int | None, offset: int) -> int | None:
    return None if head is None else max(head - offset, 0)


async def _read_through(client: ShardClient, shard: str) -> dict[str, int] | None:
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            response = await client.stat(cpb.StatRequest(shard=shard))
        if response.status != cpb.OK:
            raise ShardStatusError(response.status, shard=shard)
    except (GazetteError, TimeoutError) as error:
        reason = str(error) or f"no answer within {ANSWER_TIMEOUT_S:g} s"
        _log.warning("lag is unknown", extra={"shard": shard, "err": reason})
        return None
    return dict(response.read_through)


async def _head(transport: Transport, journal: str) -> int | None:
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            first: pb.ReadResponse = await read_metadata(transport, journal, -1)
    except (GazetteError, TimeoutError) as error:
        reason = str(error) or f"no answer within {ANSWER_TIMEOUT_S:g} s"
        _log.warning("write head is unknown", extra={"journal": journal, "err": reason})
        return None
    return first.write_head
