"""Sees the batches of an outbox through, on the SDK's event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from gazette_sdk.message.publishing.batch import Batch, closed_error
from gazette_sdk.message.publishing.link import Link
from gazette_sdk.message.publishing.outbox import Outbox
from gazette_sdk.protocol import broker_pb2 as pb

__all__ = ["see_through"]

LINGER_S = 0.002
"""What an append waits for more messages, where they are streaming in. A message that follows
none, or few, never waits."""


async def see_through(
    outbox: Outbox,
    link: Link,
    lock: threading.Lock,
    settle: Callable[[list[Batch], int | Exception], None],
) -> None:
    """Append what waits in an outbox, one batch after the other, until nothing waits.

    What stands behind a batch that failed for good fails with it: it was published to follow
    that, and may be the acknowledgement of what is lost.

    Args:
        outbox: of the journal.
        link: the connection.
        lock: guards the outbox.
        settle: is told how batches ended: where the first one's content begins, or why they
            failed.
    """
    request = pb.AppendRequest(journal=outbox.journal)
    while True:
        with lock:
            batch = outbox.take()
            if batch is None:
                outbox.is_sending = False
                outbox.sender = None
                return
        try:
            batch.append = await link.appends(outbox.journal).start(request)
            with batch.append as append:
                for part in batch.take_content():
                    append.write(part)
            response = await batch.append
        except asyncio.CancelledError:
            batch.has_failed = True
            settle([batch], closed_error())
            raise
        except Exception as error:  # noqa: BLE001 - it is the receipts' and flush's to raise
            with lock:
                batch.has_failed = True
                behind = outbox.drop()
            settle([batch, *behind], error)
            await link.renew_appends(outbox.journal)
        else:
            batch.total_chunks = response.total_chunks
            batch.delayed_chunks = response.delayed_chunks
            settle([batch], response.commit.begin)
        if outbox.is_streaming:
            await asyncio.sleep(LINGER_S)
