"""Appends of one journal of which several are in flight, in their order.

A round trip is mostly waiting. A lane lets an append be sent while those before it are not yet
answered, without giving up their order: an append that is begun behind another is written only
if that one was, and otherwise not at all. That makes trying again safe, too. Whoever finds the
first failure waits until all that is in flight has ended, and begins again with the append that
failed: each of the two series is in order by itself, from its first append on, so the content
that appears first is in order, even where something of the earlier series is written late
(its connection was lost, and its broker didn't know yet). Content may appear twice, as with every
append whose answer was lost.
"""

from __future__ import annotations

import abc
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeAlias

from gazette_sdk.protocol import broker_pb2 as pb

__all__ = ["Answered", "AppendLane", "Content"]

Content: TypeAlias = Sequence[bytes] | AsyncIterator[bytes]
"""Of one append: all of it, or as it comes. No piece is empty."""

Answered: TypeAlias = Callable[[pb.AppendResponse | Exception], None]
"""Is told the response, of any status, or why there is none. From a callback of the event loop."""


class AppendLane(abc.ABC):
    """Appends of one journal. One coroutine at a time may begin them."""

    @abc.abstractmethod
    async def begin(self, content: Content, answered: Answered) -> bool:
        """Send an append, behind those in flight. It runs only if the one before it is written.

        Args:
            content: of the append.
            answered: is called once for each append that was begun, in the order of the appends.

        Returns:
            Whether it was begun. If not, nothing of it was sent: wait until those in flight have
            ended; when none is in flight, use :meth:`Transport.append` instead.

        Raises:
            CallError: the journal's broker cannot be reached; nothing was sent.
            Exception: whatever ``content`` raised; the append was rolled back.
        """

    @abc.abstractmethod
    def give_up(self) -> None:
        """Nobody wants the answers of those in flight. They may be written nevertheless."""
