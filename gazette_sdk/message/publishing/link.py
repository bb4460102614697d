"""What a publisher holds on the SDK's event loop: its transport, appends and watches."""

from __future__ import annotations

import asyncio
import contextlib

from gazette_sdk.message.publishing.partitions import Watches
from gazette_sdk.transport.append.append_service import AppendService
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.connect import connect
from gazette_sdk.transport.loop import sdk_loop

__all__ = ["Link"]


class Link:
    """A publisher's connection, from its first message until it is closed.

    Args:
        transport: how to reach the cluster; None connects to ``GAZETTE_ADDRESS``, and closes
            that connection at the end.
        mapping_timeout_s: bound of waits for listings.
    """

    def __init__(self, transport: Transport | None, mapping_timeout_s: float) -> None:
        self.loop = sdk_loop()
        self._owned = transport is None
        self.transport = connect() if transport is None else transport
        self._appends: dict[str, AppendService] = {}
        self._closing: asyncio.Task[None] | None = None
        self.watches = Watches(self.transport, mapping_timeout_s)

    def appends(self, journal: str) -> AppendService:
        """Appends of one journal. Each has its own service, whose failure is its own."""
        found = self._appends.get(journal)
        if found is None:
            found = self._appends[journal] = AppendService(self.transport)
        return found

    async def renew_appends(self, journal: str) -> None:
        """After a terminal failure, which sticks to a service: the next append tries anew."""
        failed = self._appends.pop(journal, None)
        if failed is not None:
            await failed.aclose()

    async def aclose(self) -> None:
        """Close everything; what is pending is given up."""
        await self.watches.aclose()
        for service in self._appends.values():
            await service.aclose()
        if self._owned:
            await self.transport.aclose()

    def abandon(self) -> None:
        """Close it some time soon, from any thread; of a publisher that nobody closed."""
        # A loop that has ended took its tasks and connections with it.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._close_soon)

    def _close_soon(self) -> None:
        self._closing = self.loop.create_task(self.aclose())
