"""Metadata of journals: where their content begins and ends, without reading it."""

from __future__ import annotations

from contextlib import aclosing
from datetime import datetime

from gazette_sdk.errors import CallError, for_status
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.base import Transport

__all__ = ["CLOCK_SKEW_S", "begin_mod_time_of", "read_metadata"]

CLOCK_SKEW_S = 60
"""Fragments are searched that were stored up to this long before a time: clocks of publishers may
be ahead of those of brokers and stores."""


async def read_metadata(
    transport: Transport, journal: str, offset: int, *, begin_mod_time: int = 0
) -> pb.ReadResponse:
    """Return the first metadata of a read that does not wait for content.

    Its ``offset`` is that of the first content at the offset or behind it; its ``write_head`` is
    the end of the journal. Its status is ``OK``, or ``OFFSET_NOT_YET_AVAILABLE`` if there is no
    content from the offset on.

    Args:
        transport: how to reach the journal.
        journal: its name.
        offset: where to look; -1 for the write head.
        begin_mod_time: pass over fragments stored before this Unix second.

    Raises:
        StatusError: the broker answered another status.
        CallError: the call failed.
    """
    request = pb.ReadRequest(
        journal=journal, offset=offset, metadata_only=True, begin_mod_time=begin_mod_time
    )
    async with aclosing(transport.read(request)) as responses:
        async for response in responses:
            assert isinstance(response, pb.ReadResponse)  # the request asks for no content
            if response.status not in (pb.OK, pb.OFFSET_NOT_YET_AVAILABLE):
                raise for_status(response.status, journal=journal)
            return response
    raise CallError(f"{journal}: a read ended without a response", journal=journal)


def begin_mod_time_of(since: datetime) -> int:
    """Return the least time at which fragments with messages since a time are stored."""
    return max(0, int(since.timestamp()) - CLOCK_SKEW_S)
