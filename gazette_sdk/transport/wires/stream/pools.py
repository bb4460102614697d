"""Pools of connections of one transport: one for each event loop that uses it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable

from gazette_sdk.errors import ClosedError
from gazette_sdk.transport.wires.stream.pool import CLOSE_TIMEOUT_S, Pool

__all__ = ["Pools"]


class Pools:
    """Pool of each event loop.

    A coroutine uses connections of the loop on which it runs. ``asyncio.run`` closes the pool of
    its loop in the end. The pool of a loop that was closed otherwise is dropped when the next loop
    comes. A forked child begins without pools; its parent's connections are untouched.

    Args:
        make: makes a pool on the running event loop.
    """

    def __init__(self, make: Callable[[], Pool]) -> None:
        self._make = make
        self._pools: dict[asyncio.AbstractEventLoop, Pool] = {}
        self._closers: dict[Pool, AsyncGenerator[None, None]] = {}
        self._process_id = os.getpid()
        self._inherited: list[Pool] = []  # never collected: that would warn of open sockets
        self._is_closed = False

    def __len__(self) -> int:
        return sum(len(pool) for pool in self._pools.values())

    def here(self) -> Pool:
        """Return the pool of the running event loop.

        Raises:
            ClosedError: the transport is closed.
        """
        pool = self._pools.get(asyncio.get_running_loop())
        return self._add() if pool is None or self._is_closed else pool

    async def aclose(self) -> None:
        """Close all connections of all loops. Calls under way are cancelled."""
        self._is_closed = True
        pools, self._pools = self._pools, {}
        if self._process_id != os.getpid():
            return
        here = asyncio.get_running_loop()
        own = pools.pop(here, None)
        closings = []
        for loop, pool in pools.items():
            if loop.is_running():
                closing = asyncio.run_coroutine_threadsafe(self._close(pool), loop)
                closings.append(asyncio.wrap_future(closing))
            else:
                _shut_down(pool)
        if own is not None:
            await self._close(own)
        if closings:
            # Another loop may be busy, or about to end.
            await asyncio.wait(closings, timeout=2 * CLOSE_TIMEOUT_S)

    def _add(self) -> Pool:
        """Make the pool of the running event loop, and drop those of loops that ended."""
        if self._process_id != os.getpid():
            self._process_id = os.getpid()
            self._abandon_inherited()
        for loop in [loop for loop in tuple(self._pools) if loop.is_closed()]:
            pool = self._pools.pop(loop)
            del self._closers[pool]
            _shut_down(pool)
        pool = self._make()
        self._pools[pool.loop] = pool
        if self._is_closed:  # before, or by another thread meanwhile
            self._pools.pop(pool.loop, None)
            pool.stop()
            raise ClosedError("the transport was closed; connect again")
        closer = self._closers[pool] = _close_with_loop(pool)
        pool.loop.create_task(anext(closer), name="closer of connections")
        return pool

    async def _close(self, pool: Pool) -> None:
        await pool.aclose()
        await self._closers.pop(pool).aclose()

    def _abandon_inherited(self) -> None:
        """In a forked child, release the sockets of the parent's loops."""
        for pool in self._pools.values():
            for connection in pool.connections():
                connection.abandon()
        self._inherited += self._pools.values()
        self._pools.clear()


async def _close_with_loop(pool: Pool) -> AsyncGenerator[None, None]:
    """Close a pool when its loop closes its asynchronous generators, as ``asyncio.run`` does."""
    try:
        yield
    finally:
        await pool.aclose()


def _shut_down(pool: Pool) -> None:
    """End the connections of a pool whose loop does not run any more."""
    for connection in pool.connections():
        connection.shut_down()
