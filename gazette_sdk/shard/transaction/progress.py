"""Progress of a shard: what its committed transactions have read and acknowledged."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from gazette_sdk.errors import ClosedError

__all__ = ["Progress"]


class Progress:
    """Offsets up to which a shard's transactions are complete, and those who wait for them.

    Belongs to one event loop.

    Attributes:
        read_through: by source journal, the offset up to which messages were consumed by
            transactions that are committed and acknowledged.
        publish_at: by journal, the end of the last acknowledgement of this run.
    """

    def __init__(self) -> None:
        self.read_through: dict[str, int] = {}
        self.publish_at: dict[str, int] = {}
        self._waiters: list[tuple[Mapping[str, int], asyncio.Future[None]]] = []
        self._is_ended = False

    def start(self, sources: Mapping[str, int]) -> None:
        """Begin with the offsets of a checkpoint."""
        self.read_through = dict(sources)
        self._wake()

    def publish(
        self, read_through: Mapping[str, int], publish_at: Mapping[str, int] | None = None
    ) -> None:
        """Publish offsets of completed transactions; none falls behind an earlier one."""
        _raise_offsets(self.read_through, read_through)
        _raise_offsets(self.publish_at, publish_at or {})
        self._wake()

    def has_reached(self, offsets: Mapping[str, int]) -> bool:
        """Return True if the offsets of all source journals are reached. Others do not count."""
        known = self.read_through
        return all(known[name] >= offsets[name] for name in known.keys() & offsets.keys())

    async def wait(self, offsets: Mapping[str, int]) -> None:
        """Wait until the offsets of all source journals are reached. The caller bounds the wait.

        Raises:
            ClosedError: the shard has ended before.
        """
        if self.has_reached(offsets):
            return
        if self._is_ended:
            raise _ended()
        waiter = asyncio.get_running_loop().create_future()
        entry = (offsets, waiter)
        self._waiters.append(entry)
        try:
            await waiter
        finally:
            if entry in self._waiters:
                self._waiters.remove(entry)

    def end(self) -> None:
        """Note that the shard has ended: whoever waits gets an error."""
        self._is_ended = True
        for _, waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(_ended())
        self._waiters.clear()

    def _wake(self) -> None:
        for offsets, waiter in self._waiters:
            if not waiter.done() and self.has_reached(offsets):
                waiter.set_result(None)


def _raise_offsets(known: dict[str, int], offsets: Mapping[str, int]) -> None:
    for journal, offset in offsets.items():
        if offset > known.get(journal, -1):
            known[journal] = offset


def _ended() -> ClosedError:
    return ClosedError("the shard has ended; look at its status with `gazctl shards list`")
