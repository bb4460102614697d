"""Keeps a replica's index up to date with what its journal's stores hold (broker section 11)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Final

from gazette_sdk.broker.fragments.index import Index
from gazette_sdk.errors import GazetteError
from gazette_sdk.fragment.cover import CoverSet
from gazette_sdk.fragment.listing import list_fragments
from gazette_sdk.fragment.registry import StoreRegistry
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.durations import to_seconds

__all__ = ["FIRST_RETRY_S_MAX", "list_stores", "refresh_index", "retry_delay"]

FIRST_RETRY_S_MAX: Final = 2.0
"""Until the first listing succeeds appends wait for it, so a store is asked this often."""

_FIRST_DELAY_S: Final = 0.25

_log = logging.getLogger(__name__)


async def refresh_index(
    journal: str,
    index: Index,
    stores: StoreRegistry,
    spec_of: Callable[[str], pb.JournalSpec | None],
    *,
    executor: Executor | None = None,
) -> None:
    """List a journal's stores again and again, until it is deleted or this is cancelled.

    A listing is adopted as a whole or not at all: a part of it could release local files whose
    bytes are nowhere else.

    Args:
        journal: its name.
        index: adopts each listing.
        stores: of the process.
        spec_of: a journal's spec as it is now; ``None`` once it is deleted.
        executor: threads to list in; the loop's own if ``None``.
    """
    failures = 0
    while (spec := spec_of(journal)) is not None:
        interval_s = to_seconds(spec.fragment.refresh_interval)
        delay_s = interval_s
        try:
            remote = await list_stores(journal, spec.fragment.stores, stores, executor=executor)
        except (GazetteError, OSError) as error:
            delay_s = retry_delay(failures, interval_s, is_first=not index.first_refresh.is_set())
            failures += 1
            index.refresh_failure = str(error)
            _log.warning(
                "cannot list the fragments of %s (again in %.1f s): %s", journal, delay_s, error
            )
        else:
            failures = 0
            index.replace_remote(remote)
        await asyncio.sleep(delay_s)


async def list_stores(
    journal: str,
    urls: Sequence[str],
    stores: StoreRegistry,
    *,
    executor: Executor | None = None,
) -> CoverSet:
    """Everything that a journal's stores hold, added in the order of the stores.

    Raises:
        GazetteError: a store could not be listed.
    """
    loop = asyncio.get_running_loop()
    found = CoverSet()
    for url in list(urls):
        listed = await loop.run_in_executor(executor, _list, stores, url, journal)
        for fragment in listed:
            found.add(fragment)
    return found


def retry_delay(failures: int, interval_s: float, *, is_first: bool) -> float:
    """Seconds until a failed listing is tried again.

    Args:
        failures: how many failed before, one after the other.
        interval_s: the journal's refresh interval.
        is_first: whether none ever succeeded, so that appends wait for it.
    """
    if not is_first:
        return interval_s
    return min(interval_s, FIRST_RETRY_S_MAX, _FIRST_DELAY_S * 2.0 ** min(failures, 8))


def _list(stores: StoreRegistry, url: str, journal: str) -> list[pb.Fragment]:
    return list_fragments(stores.get(url), journal)
