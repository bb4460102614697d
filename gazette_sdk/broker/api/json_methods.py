"""RPCs of the journal service that the JSON gateway offers (protocol section 15)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from gazette_sdk.broker.api.fronts import Chunk, Journals, chunks
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Capability
from gazette_sdk.server.call import FOREIGN_CHUNK_BYTES, Call
from gazette_sdk.server.json_gateway import JsonStream

__all__ = ["json_methods"]


def json_methods(service: Journals) -> Mapping[str, JsonStream]:
    """Return ``/v1/journals/list`` and ``/v1/journals/read``.

    Args:
        service: the journal service to ask.
    """

    async def read(request: pb.ReadRequest, call: Call) -> AsyncGenerator[pb.ReadResponse]:
        items = chunks(service.read(request, call), FOREIGN_CHUNK_BYTES)
        async with aclosing(items):
            async for item in items:
                if isinstance(item, Chunk):
                    yield pb.ReadResponse(offset=item.offset, content=item.content)
                else:
                    yield item

    return {
        "/v1/journals/list": JsonStream(Capability.LIST, pb.ListRequest, service.list),
        "/v1/journals/read": JsonStream(Capability.READ, pb.ReadRequest, read),
    }
