"""Asynchronous tests with the fixture ``etcd`` of the pytest plugin.

They run a coroutine with :func:`run`::

    def test_something(etcd):
        async def scenario():
            async with etcd.client() as client:
                ...

        run(scenario())
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from gazette_sdk.testing.etcd import EtcdFixture
from gazette_sdk.testing.plugin import etcd, etcd_server

__all__ = ["EtcdFixture", "etcd", "etcd_server", "run", "within"]

T = TypeVar("T")

TIMEOUT_S = 30.0


def run(scenario: Coroutine[Any, Any, T], *, timeout_s: float = TIMEOUT_S) -> T:
    """Run a coroutine on a loop of its own, for a bounded time."""
    return asyncio.run(within(scenario, timeout_s=timeout_s))


async def within(awaitable: Awaitable[T], *, timeout_s: float = TIMEOUT_S) -> T:
    """Await something for a bounded time."""
    async with asyncio.timeout(timeout_s):
        return await awaitable
