"""Sees the batches of an outbox through, on the SDK's event loop."""

from __future__ import annotations

import asyncio
import threading
from typing import Protocol

from gazette_sdk.message.publishing.batch import Batch, closed_error
from gazette_sdk.message.publishing.handover import Input
from gazette_sdk.message.publishing.link import Link
from gazette_sdk.message.publishing.outbox import Outbox
from gazette_sdk.protocol import broker_pb2 as pb

__all__ = ["Settle", "see_through"]

LINGER_S = 0.002
"""What an append waits for more messages, where they are streaming in. A message that follows
none, or few, never waits."""


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
    """Append what waits in an outbox, one batch after the other, until nothing waits.

    What stands behind a batch that failed for good fails with it: it was published to follow
    that, and may be the acknowledgement of what is lost.

    Args:
        outbox: of the journal.
        link: the connection.
        lock: guards the outbox.
        settle: is told how batches ended.
    """
    request = pb.AppendRequest(journal=outbox.journal)
    with lock:
        handed, outbox.handed = outbox.handed, None
    while True:
        if handed is not None:
            batch = handed.batch
        else:
            with lock:
                taken = outbox.take()
                if taken is None:
                    outbox.step(Input.EMPTIED)
                    outbox.sender = None
                    return
            batch = taken
        try:
            response = None if handed is None else await handed.finish()
            if response is None:
                response = await _append(batch, request, link)
        except asyncio.CancelledError:
            batch.has_failed = True
            settle([batch], closed_error())
            raise
        except Exception as error:  # noqa: BLE001 - it is the receipts' and flush's to raise
            with lock:
                batch.has_failed = True
                behind = outbox.drop()
                outbox.habit.broken()
            settle([batch, *behind], error)
            await link.renew_appends(outbox.journal)
        else:
            batch.note(response)
            outbox.note_habit(batch)
            # Before anybody is told: who was waiting may publish at once.
            if settle([batch], response.commit.begin, outbox):
                return
        handed = None
        if outbox.is_streaming:
            await asyncio.sleep(LINGER_S)


async def _append(batch: Batch, request: pb.AppendRequest, link: Link) -> pb.AppendResponse:
    """Append a batch, again and again until that succeeds."""
    batch.append = await link.appends(request.journal).start(request)
    with batch.append as append:
        for part in batch.take_content():
            append.write(part)
    return await batch.append
