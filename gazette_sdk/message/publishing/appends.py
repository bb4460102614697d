"""Sees the batches of an outbox through, on the SDK's event loop.

What is published while an append is under way gathers to a batch, which is begun when that append
has ended; so the quicker messages come, the more share an append. Where the way to the broker is
long, or a batch has grown large meanwhile, it is begun behind those under way, without waiting
for them. Appends of a journal take effect in their order nevertheless, or not at all; see
:class:`~gazette_sdk.transport.append_chain.Chain`.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from typing import NamedTuple, Protocol

from gazette_sdk.message.publishing.batch import Batch, closed_error
from gazette_sdk.message.publishing.link import Link
from gazette_sdk.message.publishing.outbox import Handed, Outbox
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.async_append import AsyncAppend

__all__ = ["Settle", "see_through"]

LINGER_S = 0.002
"""What an append waits for more messages, where they are streaming in. A message that follows
none, or few, never waits."""

AHEAD_S = 0.002
"""What an append may take before others are begun behind it."""

UNDER_WAY_MAX = 8
"""Batches of a journal under way at once."""


class Settle(Protocol):
    """Tells receipts how batches ended."""

    def __call__(
        self, batches: list[Batch], outcome: int | Exception, outbox: Outbox | None = None, /
    ) -> bool:
        """Tell them.

        Args:
            batches: of one journal, oldest first.
            outcome: where the first one's content begins, or why they failed.
            outbox: the journal's, to rest if nothing waits.

        Returns:
            Whether it rests.
        """


async def see_through(
    outbox: Outbox,
    link: Link,
    lock: threading.Lock,
    settle: Settle,
) -> None:
    """Append what waits in an outbox, until nothing waits.

    What stands behind a batch that failed for good fails with it: it was published to follow
    that, and may be the acknowledgement of what is lost.

    Args:
        outbox: of the journal.
        link: the connection.
        lock: guards the outbox.
        settle: is told how batches ended.
    """
    await _Sending(outbox, link, lock, settle).run()


class _UnderWay(NamedTuple):
    """A batch that was given to an append, whose content begins ``before`` bytes into it."""

    batch: Batch
    append: AsyncAppend
    before: int


class _Sending:
    """See :func:`see_through`."""

    def __init__(self, outbox: Outbox, link: Link, lock: threading.Lock, settle: Settle) -> None:
        self._outbox = outbox
        self._link = link
        self._lock = lock
        self._settle = settle
        self._request = pb.AppendRequest(journal=outbox.journal)
        self._under_way: deque[_UnderWay] = deque()  # oldest first

    async def run(self) -> None:
        """Until nothing waits."""
        outbox = self._outbox
        with self._lock:
            handed, outbox.handed = outbox.handed, None
        if handed is not None and await self._finish(handed):
            return
        while True:
            if not self._under_way:
                if outbox.is_streaming:
                    await asyncio.sleep(LINGER_S)
                batch = self._take()
                if batch is None:
                    return
                await self._begin(batch)
            elif await self._oldest_ends():
                return

    def _take(self) -> Batch | None:
        """The next batch; None if nothing waits, and the outbox rests."""
        outbox = self._outbox
        with self._lock:
            batch = outbox.take()
            if batch is None:
                outbox.rest()
            return batch

    async def _begin(self, batch: Batch) -> None:
        """Give a batch to an append, behind those under way."""
        try:
            batch.append = append = await self._link.appends(self._outbox.journal).start(
                self._request
            )
            before = append.buffer.kept_bytes  # of batches which it was given already
            self._under_way.append(_UnderWay(batch, append, before))
            with append:
                for part in batch.take_content():
                    append.write(part)
        except asyncio.CancelledError:
            self._cancelled([batch])
            raise
        except Exception as error:  # noqa: BLE001 - it is the receipts' and flush's to raise
            await self._failed([batch], error)

    async def _oldest_ends(self) -> bool:
        """Wait for the oldest append under way, or begin what should not; whether all is done."""
        batch, append, before = self._under_way[0]
        try:
            if not append.is_done and len(self._under_way) < UNDER_WAY_MAX:
                if not self._outbox.waits_largely:
                    await _wait(append, AHEAD_S)
                if not append.is_done:
                    await self._begin_ahead(append)
                    return False
            response = await append
        except asyncio.CancelledError:
            self._cancelled([])
            raise
        except Exception as error:  # noqa: BLE001 - it is the receipts' and flush's to raise
            await self._failed([], error)
            return False
        self._under_way.popleft()
        return self._ended(batch, response, response.commit.begin + before)

    async def _begin_ahead(self, append: AsyncAppend) -> None:
        """Begin what waits, though an append has not ended; or wait until something does."""
        with self._lock:
            batch = self._outbox.take()
        if batch is not None:
            await self._begin(batch)
        else:
            await _wait(append, AHEAD_S)

    def _ended(self, batch: Batch, response: pb.AppendResponse, begin: int) -> bool:
        """A batch was acknowledged; whether nothing waits, and the outbox rests."""
        batch.note(response)
        self._outbox.note_habit(batch)
        # Before anybody is told: who was waiting may publish at once.
        return self._settle([batch], begin, None if self._under_way else self._outbox)

    async def _finish(self, handed: Handed) -> bool:
        """Go on with what a caller left; whether nothing else waits, and the outbox rests."""
        batch = handed.batch
        try:
            response = await handed.finish()
        except asyncio.CancelledError:
            self._cancelled([batch])
            raise
        except Exception as error:  # noqa: BLE001 - it is the receipts' and flush's to raise
            await self._failed([batch], error)
            return False
        if response is not None:
            return self._ended(batch, response, response.commit.begin)
        await self._begin(batch)
        return False

    def _given_up(self, more: list[Batch]) -> list[Batch]:
        """All batches under way, and more; under way is nothing any more."""
        batches = list(dict.fromkeys([*(each.batch for each in self._under_way), *more]))
        self._under_way.clear()
        for batch in batches:
            batch.has_failed = True
        return batches

    def _cancelled(self, more: list[Batch]) -> None:
        self._settle(self._given_up(more), closed_error())

    async def _failed(self, more: list[Batch], error: Exception) -> None:
        with self._lock:
            batches = [*self._given_up(more), *self._outbox.drop()]
            self._outbox.habit.broken()
        self._settle(batches, error)
        await self._link.renew_appends(self._outbox.journal)


async def _wait(append: AsyncAppend, timeout_s: float) -> None:
    """Wait for the end of an append, but not for long."""
    try:
        async with asyncio.timeout(timeout_s):
            await append
    except TimeoutError:
        pass
