"""Transports in memory, bare and with journals, and a way to touch them on their loop."""

from __future__ import annotations

import asyncio

import pytest

from gazette_sdk.transport.loop import run
from support.memory_transport import MemoryTransport

WAIT_S = 10.0


@pytest.fixture
def transport():
    return MemoryTransport()


@pytest.fixture
def on_loop():
    """Calls a function on the SDK's loop: ``on_loop(transport.create, "a/journal")``."""

    def call(function, *args, **kwargs):
        async def there():
            return function(*args, **kwargs)

        return run(there(), WAIT_S)

    return call


@pytest.fixture
def gated(transport, on_loop):
    """A transport with one journal, whose appends wait until ``opened()`` is called."""
    transport.create("a/journal")
    transport.append_gate = on_loop(asyncio.Event)
    transport.opened = lambda: on_loop(transport.append_gate.set)
    return transport


@pytest.fixture
def two(transport):
    """A transport with two journals."""
    transport.create("one/journal")
    transport.create("two/journal")
    return transport


@pytest.fixture
def orders(transport):
    """A transport with four journals which the selector ``topic=orders`` finds."""
    for index in range(4):
        transport.create(f"orders/part-{index}", topic="orders")
    return transport
