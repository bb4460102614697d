"""Proxy of appends whose journal has another primary (broker section 4)."""

from __future__ import annotations

from collections.abc import AsyncIterator

from gazette_sdk.broker.resolver import Resolution
from gazette_sdk.errors import UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.wire import AppendItem, Target

__all__ = ["proxy_append"]


async def proxy_append(
    peers: Transport,
    resolution: Resolution,
    request: pb.AppendRequest,
    items: AsyncIterator[AppendItem],
) -> pb.AppendResponse:
    """Relay an append to the journal's primary, and return its response.

    Args:
        peers: carries the append.
        resolution: of the journal, to another broker.
        request: the opening request.
        items: what follows it.

    Raises:
        UnavailableError: the primary's address is unknown: its member key is gone.
    """
    header = resolution.header
    if not header.route.endpoints[header.route.primary]:
        raise UnavailableError(
            "the journal's primary is gone from Etcd; try again", journal=resolution.journal
        )
    opening = pb.AppendRequest()
    opening.CopyFrom(request)
    opening.journal = resolution.journal
    opening.header.CopyFrom(header)
    return await peers.append(
        _after(opening, items), Target(route=header.route, member=header.process_id)
    )


async def _after(
    opening: pb.AppendRequest, items: AsyncIterator[AppendItem]
) -> AsyncIterator[AppendItem]:
    yield opening
    async for item in items:
        yield item
