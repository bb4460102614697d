"""Journals whose listings show all of their content: others may go on behind that.

A store may list an object some time after it has stored it. Whoever takes over a journal that
nobody is left of learns its head from a listing: one without the last fragments would make it give
their offsets again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final

from gazette_sdk.broker.fragments.refresh import list_stores, whole_of
from gazette_sdk.cluster.broker_keys import JournalEntry
from gazette_sdk.errors import GazetteError
from gazette_sdk.fragment.registry import StoreRegistry

__all__ = ["listed_journals"]

PAUSE_S: Final = 0.5
"""Pause before the stores of a journal are listed again."""

CONCURRENT_MAX: Final = 16
"""Listings at once."""

_log = logging.getLogger(__name__)


async def listed_journals(
    ends: Mapping[str, int],
    stores: StoreRegistry,
    journal_of: Callable[[str], JournalEntry | None],
    timeout_s: float,
) -> set[str]:
    """Return the journals whose stores list content up to an offset, or soon do.

    Args:
        ends: offsets by journal.
        stores: of the process.
        journal_of: returns a journal's current key; ``None`` once it is deleted.
        timeout_s: bound of the wait.
    """
    listed: set[str] = set()
    room = asyncio.Semaphore(CONCURRENT_MAX)

    async def look(journal: str) -> None:
        while (entry := journal_of(journal)) is not None:
            try:
                async with room:
                    found = await list_stores(journal, entry.value.fragment.stores, stores)
            except (GazetteError, OSError) as error:
                _log.warning("cannot list the fragments of %s: %s", journal, error)
            else:
                if max((fragment.end for fragment in whole_of(found)), default=0) >= ends[journal]:
                    listed.add(journal)
                    return
            await asyncio.sleep(PAUSE_S)

    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*map(look, ends))
    except TimeoutError:
        pass  # the rest is not listed
    return listed
