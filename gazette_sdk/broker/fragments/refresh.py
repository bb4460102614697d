"""Refresh of a replica's index from its journal's stores (broker section 11)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from gazette_sdk.broker.fragments.index import Index
from gazette_sdk.cluster.broker_keys import JournalEntry
from gazette_sdk.errors import GazetteError
from gazette_sdk.fragment.content import CoverSet
from gazette_sdk.fragment.listing import StoredFragment, list_stored
from gazette_sdk.fragment.registry import StoreRegistry
from gazette_sdk.outage import Outage
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.durations import to_seconds

__all__ = ["FIRST_RETRY_S_MAX", "list_stores", "refresh_index", "retry_delay", "whole_of"]

FIRST_RETRY_S_MAX: Final = 2.0
"""Longest pause before the first successful listing, which appends wait for."""

_FIRST_DELAY_S: Final = 0.25

WANTED_PAUSE_S: Final = 1.0
"""Least pause before a listing that the primary's uploads, or missing bytes, ask for. It is doubled
when a listing does not show yet what is wanted."""

_WANTED_PAUSES_OF_A_LISTING: Final = 10
"""The pause is at least so many times as long as the last listing took: a large one is rare."""

_log = logging.getLogger(__name__)


async def refresh_index(
    journal: str,
    index: Index,
    stores: StoreRegistry,
    journal_of: Callable[[str], JournalEntry | None],
    listed: Callable[[str, Sequence[StoredFragment]], None] = lambda _journal, _found: None,
) -> None:
    """List a journal's stores periodically, until it is deleted or this is cancelled.

    The next listing comes sooner where the index wants one; see :attr:`Index.listing_wanted`.

    A listing is adopted as a whole or not at all: a part of it could release local files that are
    the only copy.

    Args:
        journal: its name.
        index: adopts each listing.
        stores: of the process.
        journal_of: returns a journal's current key; ``None`` once it is deleted.
        listed: called with the journal and what a listing found, before the index adopts it.
    """
    loop = asyncio.get_running_loop()
    failures, wanted_pause_s = 0, WANTED_PAUSE_S
    outage = Outage(_log, f"listing of the fragments of {journal}")
    while (entry := journal_of(journal)) is not None:
        fragments = entry.value.fragment
        interval_s = to_seconds(fragments.refresh_interval)
        delay_s, began_at = interval_s, loop.time()
        index.begin_listing()
        try:
            stored = await list_stores(journal, fragments.stores, stores)
        except (GazetteError, OSError) as error:
            delay_s = retry_delay(failures, interval_s, is_first=not index.first_refresh.is_set())
            failures += 1
            index.note_refresh_failure(str(error))
            outage.failed(error)
        else:
            outage.ended()
            failures = 0
            listed(journal, stored)
            index.replace_remote(
                CoverSet(whole_of(stored)),
                CoverSet(each.fragment for each in stored if each.is_torn),
            )
        wanted_pause_s = wanted_pause_s * 2 if index.listing_wanted.is_set() else WANTED_PAUSE_S
        listing_s = loop.time() - began_at
        await _pause(index, delay_s, max(wanted_pause_s, _WANTED_PAUSES_OF_A_LISTING * listing_s))


async def _pause(index: Index, delay_s: float, wanted_pause_s: float) -> None:
    """Pause until the next listing; for less where the index wants one, or asks for it."""
    wanted_pause_s = min(wanted_pause_s, delay_s)
    try:
        async with asyncio.timeout(wanted_pause_s):
            await index.listing_asked.wait()
    except TimeoutError:
        pass
    try:
        async with asyncio.timeout(delay_s - wanted_pause_s):
            await index.listing_wanted.wait()
    except TimeoutError:
        pass


async def list_stores(
    journal: str, urls: Sequence[str], stores: StoreRegistry
) -> list[StoredFragment]:
    """Return what a journal's stores have, also torn objects, in the order of the stores.

    Raises:
        GazetteError: a store could not be listed.
    """
    found: list[StoredFragment] = []
    for url in list(urls):
        found += await asyncio.to_thread(_list, stores, url, journal)
    return found


def whole_of(stored: Iterable[StoredFragment]) -> list[pb.Fragment]:
    """Return the fragments of a listing which are not torn."""
    return [each.fragment for each in stored if not each.is_torn]


def retry_delay(failures: int, interval_s: float, *, is_first: bool) -> float:
    """Return the seconds until a failed listing is tried again.

    Args:
        failures: consecutive failures before.
        interval_s: the journal's refresh interval.
        is_first: True if none ever succeeded, so that appends wait for it.
    """
    if not is_first:
        return interval_s
    return min(interval_s, FIRST_RETRY_S_MAX, _FIRST_DELAY_S * 2.0 ** min(failures, 8))


def _list(stores: StoreRegistry, url: str, journal: str) -> list[StoredFragment]:
    return list_stored(stores.get(url), journal)
