"""Items of a replication as requests, for wires that only carry those."""

from __future__ import annotations

from collections.abc import AsyncIterator

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.target import ReplicateItem

__all__ = ["as_requests"]


async def as_requests(items: AsyncIterator[ReplicateItem]) -> AsyncIterator[pb.ReplicateRequest]:
    """Yield items with content as requests: with its distance to the last proposal."""
    delta = 0
    async for item in items:
        if isinstance(item, bytes):
            yield pb.ReplicateRequest(content=item, content_delta=delta)
            delta += len(item)
        else:
            yield item
            delta = 0 if item.HasField("proposal") else delta + len(item.content)
