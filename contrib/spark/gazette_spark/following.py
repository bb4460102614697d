"""Follower of the journals that a stream reads: which there are, and how far they go."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

from gazette_sdk.errors import JournalNotFoundError, SuspendedError
from gazette_sdk.fragment.content import CoverSet
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.backoff import pause
from gazette_sdk.transport.journal_reader import read_metadata
from gazette_sdk.transport.listing import WatchedList
from gazette_spark.connection import STOPPING, open_transport, patiently
from gazette_spark.content import CONCURRENT_LISTINGS_MAX, JournalContent, fragments_of, selector_of
from gazette_spark.options import Options

__all__ = ["JournalFollower"]

_log = logging.getLogger(__name__)

HEAD_LAG_MAX_S = 5.0
"""Time for which a write head before the offset that was read is looked up again. A broker that
just took a journal over may not have listed all its fragments."""


class JournalFollower:
    """Follower of journals. Its coroutines belong to the SDK's loop.

    Args:
        options: options of the stream.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._transport = open_transport(options.url)
        self._watched = WatchedList(self._transport, selector_of(options))
        self._slots = asyncio.Semaphore(CONCURRENT_LISTINGS_MAX)
        # By journal: begin of the first fragment that was needed last.
        self._listed_from: dict[str, int] = {}

    async def journals(self) -> dict[str, pb.ListResponse.Journal]:
        """Return the journals that match the options now, by name.

        Raises:
            GazetteError: they could not be listed once.
        """
        self._watched.start()
        is_first = self._watched.snapshot is None
        snapshot = await patiently(self._watched.first_snapshot, STOPPING)
        if is_first and not snapshot.journals:
            _log.warning(
                "no journal matches %r at %s; the stream reads journals once they are created",
                self._options.journals,
                self._options.url,
            )
        return {journal.spec.name: journal for journal in snapshot.journals}

    async def contents(self, needed: Mapping[str, tuple[int, int]]) -> dict[str, JournalContent]:
        """Return the content of journals that exist, by name.

        Args:
            needed: by journal, the offset from which its fragments are needed, and the one up to
                which it is known to have been written.

        Raises:
            GazetteError: they could not be listed.
        """
        listed = await self.journals()
        names = [name for name in needed if name in listed]
        covers = await asyncio.gather(*(self._cover(name, *needed[name]) for name in names))
        return {
            name: JournalContent(listed[name].spec, listed[name].create_revision, cover)
            for name, cover in zip(names, covers, strict=True)
            if cover is not None
        }

    async def heads(self) -> dict[str, int]:
        """Return the write heads of all journals."""
        names = list(await self.journals())
        heads = await asyncio.gather(*map(self._head, names))
        return dict(zip(names, heads, strict=True))

    async def aclose(self) -> None:
        """Stop following."""
        await self._watched.aclose()
        await self._transport.aclose()

    async def _head(self, name: str) -> int:
        async with self._slots:
            try:
                found = await patiently(lambda: read_metadata(self._transport, name, -1))
            except (JournalNotFoundError, SuspendedError):
                return 0  # deleted since it was listed, or without any content to read
        return max(found.write_head, found.offset)

    async def _cover(self, name: str, begin: int, end: int) -> CoverSet | None:
        """Return fragments of a journal from an offset on; None if it was deleted meanwhile.

        It waits for fragments up to ``end``. An idle journal whose content was removed has none,
        and is not waited for if none is needed.
        """
        ends_at = time.monotonic() + HEAD_LAG_MAX_S
        async with self._slots:
            try:
                while True:
                    cover = await self._listed(name, begin)
                    is_idle = not cover and begin >= end
                    if cover.end >= end or is_idle or time.monotonic() >= ends_at:
                        return cover
                    await pause(1)
            except JournalNotFoundError:
                return None

    async def _listed(self, name: str, needed: int) -> CoverSet:
        begin = self._listed_from.get(name, 0)
        cover = await fragments_of(self._transport, name, begin=begin)
        if begin and not (cover.begin <= needed <= cover.end and cover):
            # Fragments were replaced by larger ones, or removed.
            cover = await fragments_of(self._transport, name)
        index, _ = cover.longest_overlap(max(needed - 1, 0))
        if index < len(cover):
            self._listed_from[name] = cover[index].begin
        return cover
