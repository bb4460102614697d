"""Appends of content at hand over a wire which only has streamed appends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.target import AppendItem, Peer
from gazette_sdk.transport.wires.base import Answered, AppendPipeline, PreparedAppend

__all__ = ["CHUNK_BYTES", "StreamedPipeline"]

CHUNK_BYTES = 128 << 10
"""Content per message: far below the 4 MiB that brokers accept, and large enough that more
makes no difference (measured over loopback)."""


class StreamedPipeline(AppendPipeline):
    """Pipeline of one append, which a task makes.

    Args:
        peer: the broker.
        append: makes a streamed append; see :meth:`Wire.append`.
    """

    __slots__ = ("_append", "_ready", "_task", "peer")

    def __init__(
        self,
        peer: Peer,
        append: Callable[[PreparedAppend, AsyncIterator[AppendItem]], Awaitable[pb.AppendResponse]],
    ) -> None:
        self.peer = peer
        self._append = append
        self._task: asyncio.Task[None] | None = None
        self._ready: Callable[[], None] | None = None

    @property
    def in_flight(self) -> int:
        """See :class:`AppendPipeline`."""
        return int(self._task is not None)

    @property
    def can_begin(self) -> bool:
        """See :class:`AppendPipeline`."""
        return self._task is None

    def begin(self, append: PreparedAppend, content: Sequence[bytes], answered: Answered) -> None:
        """See :meth:`AppendPipeline.begin`."""
        assert self._task is None
        self._task = asyncio.create_task(self._run(append, content, answered))

    def when_ready(self, callback: Callable[[], None]) -> None:
        """See :meth:`AppendPipeline.when_ready`; it is called when the append has ended."""
        self._ready = callback

    def give_up(self) -> None:
        """See :meth:`AppendPipeline.give_up`."""
        if self._task is not None:
            self._task.cancel()

    def close(self) -> None:
        """See :meth:`AppendPipeline.close`."""

    async def _run(
        self, append: PreparedAppend, content: Sequence[bytes], answered: Answered
    ) -> None:
        result: pb.AppendResponse | Exception
        try:
            result = await self._append(append, _requests(content))
        except Exception as error:  # noqa: BLE001 - handed to the caller
            result = error
        finally:
            self._task = None
        answered(result)
        callback, self._ready = self._ready, None
        if callback is not None:
            callback()


async def _requests(content: Sequence[bytes]) -> AsyncIterator[AppendItem]:
    """Yield what follows the opening request: chunks, and the commit."""
    for piece in content:
        for begin in range(0, len(piece), CHUNK_BYTES):
            yield piece[begin : begin + CHUNK_BYTES]
    yield pb.AppendRequest()
