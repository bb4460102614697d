"""Connection of a publisher: its transport, event loop, appenders and watched listings."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from gazette_sdk.message.publishing.deferred import Deferred
from gazette_sdk.message.publishing.partitions import Watches
from gazette_sdk.transport.append.appender import AppendService
from gazette_sdk.transport.append.queue import PendingAppend
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.connect import connect
from gazette_sdk.transport.loop import OwnedLock, home_loop, is_running, on_loop, run, sdk_loop

__all__ = ["BATCH_BYTES_MAX", "PublisherConnection", "loop_of"]

BATCH_BYTES_MAX = 4 << 20
"""An append of this length takes no further messages: a failed attempt sends all of it again, and
its first message waits for the last."""


class PublisherConnection:
    """Connection of a publisher, from its first message until it is closed.

    It works on the event loop on which the publisher is first used; in plain code, on the SDK's.

    Args:
        transport: how to reach the cluster; None connects to ``GAZETTE_ADDRESS``, and closes
            that connection at the end.
        lock: the publisher's, which guards all queues.
        is_background: it works on the SDK's background loop.
        pending_bytes_max: bound of messages that are not acknowledged.
        delivery_timeout_s: bound of the time to the acknowledgement; None for none.
        mapping_timeout_s: bound of waits for listings; None for none.
        on_settled: called with appends that end, under the lock.
    """

    def __init__(
        self,
        transport: Transport | None,
        lock: OwnedLock,
        *,
        is_background: bool,
        pending_bytes_max: int,
        delivery_timeout_s: float | None,
        mapping_timeout_s: float | None,
        on_settled: Callable[[list[PendingAppend], Exception | None], None],
    ) -> None:
        self._is_owner = transport is None
        self.transport = connect() if transport is None else transport
        self.loop = loop_of(self.transport, is_background=is_background)
        self.appends = AppendService(
            self.transport,
            loop=self.loop,
            lock=lock,
            batch_bytes_max=BATCH_BYTES_MAX,
            pending_bytes_max=pending_bytes_max,
            delivery_timeout_s=delivery_timeout_s,
            is_sticky=False,
            on_settled=on_settled,
        )
        self.watches = Watches(self.transport, mapping_timeout_s)
        self._closing: asyncio.Task[None] | None = None

    def close(self, deferred: Deferred) -> None:
        """Close everything, from plain code; what is pending is given up.

        On the event loop itself nothing can be waited for: there it is closed soon.

        Args:
            deferred: calls to give up.
        """
        if not self.loop.is_running():
            self.appends.abandon()
        elif is_running(self.loop):
            self._close_soon(deferred)
        else:
            run(self._aclose(deferred), loop=self.loop)

    async def aclose(self, deferred: Deferred) -> None:
        """As :meth:`close`, in a coroutine."""
        if self.loop.is_running():
            await on_loop(self.loop, self._aclose(deferred))
        else:
            self.appends.abandon()

    def abandon(self) -> None:
        """Close it some time soon, from any thread; of a publisher that nobody closed."""
        # A loop that has ended took its tasks and connections with it.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._close_soon)

    def _close_soon(self, deferred: Deferred | None = None) -> None:
        self._closing = self.loop.create_task(self._aclose(deferred))

    async def _aclose(self, deferred: Deferred | None) -> None:
        if deferred is not None:
            await deferred.aclose()
        await self.watches.aclose()
        await self.appends.aclose()
        if self._is_owner:
            await self.transport.aclose()


def loop_of(transport: Transport | None, *, is_background: bool) -> asyncio.AbstractEventLoop:
    """Return the event loop of a publisher that is first used now."""
    fixed = None if transport is None else transport.loop
    return (fixed or sdk_loop()) if is_background else home_loop(fixed)
