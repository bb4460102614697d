"""Write heads and sizes of journals."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from functools import partial

from gazette_sdk.cli.concurrency import for_each
from gazette_sdk.cli.journals.selection import is_fully_suspended
from gazette_sdk.errors import GazetteError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.journal_reader import read_metadata

__all__ = ["Extent", "extents_of"]

_log = logging.getLogger(__name__)

JOURNAL_TIMEOUT_S = 8.0
"""The write head of a journal is unknown if its brokers do not answer for this long."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Span of a journal's content.

    Attributes:
        head: its write head; None if it is unknown.
        size_bytes: length from the first byte that can be read to the write head; None if it is
            unknown.
    """

    head: int | None = None
    size_bytes: int | None = None


async def extents_of(transport: Transport, listing: pb.ListResponse) -> dict[str, Extent]:
    """Return the extents of listed journals, by name.

    One broker is asked for each journal, without reading content. A journal that does not answer
    has no extent, and is logged.
    """
    extents = await for_each(listing.journals, partial(_extent, transport))
    names = [journal.spec.name for journal in listing.journals]
    return dict(zip(names, extents, strict=True))


async def _extent(transport: Transport, journal: pb.ListResponse.Journal) -> Extent:
    spec = journal.spec
    if is_fully_suspended(spec):
        return Extent(spec.suspend.offset)
    try:
        async with asyncio.timeout(JOURNAL_TIMEOUT_S):
            first = await read_metadata(transport, spec.name, 0)
    except (GazetteError, TimeoutError) as error:
        reason = str(error) or f"no answer within {JOURNAL_TIMEOUT_S:g} s"
        _log.warning("write head is unknown", extra={"journal": spec.name, "err": reason})
        return Extent()
    if first.status == pb.OK:
        return Extent(first.write_head, first.write_head - first.offset)
    return Extent(first.write_head, None if first.write_head > first.offset else 0)
