"""Content of journals as it is at one moment: their fragments, in order, and the gaps between."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from gazette_sdk.errors import (
    CallCancelledError,
    DeadlineExceededError,
    GazetteError,
    JournalNotFoundError,
    SuspendedError,
)
from gazette_sdk.fragment.content import CoverSet
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.labels import CONTENT_TYPE, parse_selector, value_of
from gazette_sdk.retries import retrying
from gazette_sdk.transport import Transport
from gazette_sdk.transport.append.append import TRANSIENT
from gazette_sdk.transport.fragment_store import GAP_AGE_S
from gazette_sdk.transport.listing import list_all_fragments, list_journals
from gazette_sdk.transport.loop import for_each
from gazette_spark.options import Options, open_transport

T = TypeVar("T")

FAILING_MAX_S = 30.0
"""Time for which a call of the driver that fails is made again."""

STOPPING: tuple[type[GazetteError], ...] = (CallCancelledError, DeadlineExceededError)
"""Errors of a broker that was reached, and stops or is late."""

TRANSIENT_OR_STOPPING = (*TRANSIENT, *STOPPING)
"""Errors of brokers that cannot be reached, are too few, or stop."""


async def list_patiently(transport: Transport, selector: pb.LabelSelector | str) -> pb.ListResponse:
    """Return the journals that match a selector, also where a broker stops meanwhile.

    Raises:
        GazetteError: they could not be listed. Without any broker this is an error at once.
    """
    return await patiently(lambda: list_journals(transport, selector), STOPPING)


async def patiently(
    call: Callable[[], Awaitable[T]],
    repeated: tuple[type[GazetteError], ...] = TRANSIENT_OR_STOPPING,
) -> T:
    """Return the result of a call, which is made again for half a minute while it fails.

    Args:
        call: makes the call.
        repeated: errors after which it is made again.

    Raises:
        GazetteError: it failed for so long, or by another error.
    """
    return await retrying(call, repeated, patience_s=FAILING_MAX_S)


CONCURRENT_LISTINGS_MAX = 16
"""Limit of journals whose fragments are listed at once."""

_JSON = "application/x-ndjson"


@dataclass(frozen=True, slots=True)
class Piece:
    """Content ``[begin, end)`` of a journal that one fragment holds."""

    begin: int
    end: int
    fragment: pb.Fragment


@dataclass(frozen=True, slots=True)
class JournalContent:
    """Content of a journal.

    Attributes:
        spec: the journal, as it was listed.
        created: Etcd revision at which it was created; 0 if it is not known.
        cover: its fragments. One without a modification time is not stored yet.
    """

    spec: pb.JournalSpec
    created: int
    cover: CoverSet

    @property
    def name(self) -> str:
        """Name of the journal."""
        return self.spec.name

    @property
    def labels(self) -> tuple[tuple[str, str], ...]:
        """Labels of the journal. Several values of one label are joined by commas."""
        values: dict[str, list[str]] = {}
        for label in self.spec.labels.labels:
            values.setdefault(label.name, []).append(label.value)
        return tuple((name, ",".join(found)) for name, found in values.items())

    def content_type(self, options: Options) -> str:
        """Return the content type of the journal's framing."""
        return options.content_type or value_of(self.spec.labels, CONTENT_TYPE) or _JSON

    def pieces(self, begin: int, end: int | None = None) -> Iterator[Piece]:
        """Yield content between two offsets, each byte once, in order."""
        cover = self.cover
        at, _ = cover.longest_overlap(begin)
        for index in range(at, len(cover)):
            fragment = cover[index]
            begin = max(begin, fragment.begin)
            stop = fragment.end if end is None else min(end, fragment.end)
            if begin < stop:
                yield Piece(begin, stop, fragment)
                begin = stop
            elif fragment.begin >= stop:
                return

    def gaps(self, begin: int, end: int) -> tuple[tuple[int, int], ...]:
        """Return the parts between two offsets that no fragment holds."""
        found = []
        for piece in self.pieces(begin, end):
            if piece.begin > begin:
                found.append((begin, piece.begin))
            begin = piece.end
        return tuple(found)

    def readable_end(self, begin: int) -> int:
        """Return the end of the content that can be read in order from an offset.

        Content that is missing before a fragment of less than six hours may still be stored by
        another broker, so that readers wait for it; older gaps are passed over.
        """
        end = begin
        is_first = self.cover.begin >= begin
        for piece in self.pieces(begin):
            stored = piece.fragment.mod_time
            is_gap = piece.begin > end and not is_first
            if is_gap and (not stored or stored > time.time() - GAP_AGE_S):
                return end
            end, is_first = piece.end, False
        return end


async def list_content(options: Options) -> list[JournalContent]:
    """Return the content of all journals that the options select; see :func:`content_of`."""
    async with open_transport(options.url) as transport:
        return await content_of(transport, options)


async def content_of(transport: Transport, options: Options) -> list[JournalContent]:
    """Return the content of all journals that the options select.

    Raises:
        JournalNotFoundError: there is none.
        GazetteError: the broker, or the store, failed.
    """
    listing = await list_patiently(transport, parse_selector(selector_of(options)))
    if not listing.journals:
        raise JournalNotFoundError(
            f"no journal matches {options.journals!r} at {options.url}; check the option"
            " 'journals', and the address or the store"
        )

    async def fetch(journal: pb.ListResponse.Journal) -> JournalContent:
        cover = await fragments_of(transport, journal.spec.name)
        return JournalContent(journal.spec, journal.create_revision, cover)

    return await for_each(listing.journals, fetch, CONCURRENT_LISTINGS_MAX)


async def fragments_of(transport: Transport, journal: str, *, begin: int = 0) -> CoverSet:
    """Return the fragments of a journal that begin at an offset or after it."""
    request = pb.FragmentsRequest(journal=journal, next_page_token=begin)
    try:
        response = await patiently(lambda: list_all_fragments(transport, request))
    except SuspendedError:
        return CoverSet()  # it holds nothing to read
    return CoverSet(fragment.spec for fragment in response.fragments)


def selector_of(options: Options) -> str:
    """Return the label selector of a read's journals."""
    if not options.is_store:
        return options.journals
    is_prefix = options.journals.endswith("/")
    return f"prefix={options.journals}" if is_prefix else f"name={options.journals}"
