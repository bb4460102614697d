"""Sees the batches of an outbox through, on the SDK's event loop.

What is published while an append is under way gathers to a batch, which is begun when that append
has ended; so the quicker messages come, the more share an append. Where the way to the broker is
long, or a batch has grown large meanwhile, it is begun behind those under way, without waiting
for them. Appends of a journal take effect in their order nevertheless, or not at all; see
:class:`~gazette_sdk.transport.append.append_chain.Chain`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from typing import NamedTuple, Protocol

from gazette_sdk.message.publishing.batch import Batch, closed_error
from gazette_sdk.message.publishing.link import Link
from gazette_sdk.message.publishing.outbox import Handed, Outbox
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.append.async_append import AsyncAppend

__all__ = ["Settle", "see_through"]

LINGER_S = 0.002
"""What an append waits for more messages, where they are streaming in. A message that follows
none, or few, never waits."""

AHEAD_S = 0.002
"""What an append may take before others are begun behind it."""

PATIENCE_MAX_S = 0.1
"""While nothing comes that could be begun, it is looked for ever more seldom, but not more so."""

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
        self._patience_s = AHEAD_S

    async def run(self) -> None:
        """Until nothing waits."""
        is_resting = False
        while not is_resting:
            try:
                is_resting = await self._go_on()
            except asyncio.CancelledError:
                self._settle(self._given_up(), closed_error())
                raise
            except Exception as error:  # noqa: BLE001 - it is the receipts' and flush's to raise
                await self._failed(error)

    async def _go_on(self) -> bool:
        """Do what is to be done next; whether nothing is, and the outbox rests."""
        outbox = self._outbox
        if outbox.handed is not None:
            return await self._finish(outbox.handed)
        if self._under_way:
            return await self._oldest_ends()
        if outbox.is_streaming:
            await asyncio.sleep(LINGER_S)
        return not await self._begin_next() and self._rest()

    async def _begin_next(self) -> bool:
        """Give the next batch to an append, behind those under way; whether there is one."""
        with self._lock:
            batch = self._outbox.take()
        if batch is not None:
            await self._begin(batch)
        return batch is not None

    async def _begin(self, batch: Batch) -> None:
        append = await self._link.appends(self._outbox.journal).start(self._request)
        batch.append = append
        before = append.buffer.kept_bytes  # of batches which it was given already
        with append:
            for part in batch.take_content():
                append.write(part)
        self._under_way.append(_UnderWay(batch, append, before))
        self._patience_s = AHEAD_S

    async def _oldest_ends(self) -> bool:
        """Wait for the oldest append under way, or begin what should not; as :meth:`_go_on`."""
        batch, append, before = self._under_way[0]
        if not append.is_done and len(self._under_way) < UNDER_WAY_MAX:
            if not self._outbox.waits_largely:
                await _wait(append, self._patience_s)
            if not append.is_done:
                if not await self._begin_next():
                    self._patience_s = min(2 * self._patience_s, PATIENCE_MAX_S)
                return False
        response = await append
        self._under_way.popleft()
        return self._ended(batch, response, response.commit.begin + before)

    async def _finish(self, handed: Handed) -> bool:
        """Go on with what a caller left; as :meth:`_go_on`."""
        with self._lock:
            self._outbox.handed = None
        response = await handed.finish()
        if response is None:
            if handed.call is not None:
                with self._lock:
                    self._outbox.lose_way()
            await self._begin(handed.batch)
            return False
        return self._ended(handed.batch, response, response.commit.begin)

    def _ended(self, batch: Batch, response: pb.AppendResponse, begin: int) -> bool:
        """A batch was acknowledged; as :meth:`_go_on`."""
        batch.note(response)
        self._outbox.note_habit(batch)
        # Before anybody is told: who was waiting may publish at once.
        return self._settle([batch], begin, None if self._under_way else self._outbox)

    def _rest(self) -> bool:
        with self._lock:
            return self._outbox.rest()

    def _given_up(self) -> list[Batch]:
        """What was taken and has not ended. Nothing is under way any more."""
        self._under_way.clear()
        with self._lock:
            batches = self._outbox.sent()
            for batch in batches:
                batch.has_failed = True
        return batches

    async def _failed(self, error: Exception) -> None:
        batches = self._given_up()
        with self._lock:
            batches += self._outbox.drop()
            self._outbox.habit.broken()
        self._settle(batches, error)
        await self._link.renew_appends(self._outbox.journal)


async def _wait(append: AsyncAppend, timeout_s: float) -> None:
    """Wait for the end of an append, but not for long. How it ended is asked for afterwards."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await append
