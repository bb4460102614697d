"""A transport in memory, and a way to touch it on the loop it lives on."""

from __future__ import annotations

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
