"""Base classes of context managers."""

import asyncio
import threading
from typing import Self

import pytest

from gazette_sdk.contexts import AsyncClosable, Closable, Startable
from gazette_sdk.transport.loop import LoopStartable, is_on_sdk_loop


class Both(Closable, AsyncClosable):
    """Closed by either form, and counts how often."""

    closed = 0

    def close(self) -> None:
        self.closed += 1

    async def aclose(self) -> None:
        self.closed += 10


class Threaded(Startable):
    """Notes the threads that start and stop it."""

    started: threading.Thread | None = None
    stopped: threading.Thread | None = None

    def start(self) -> Self:
        self.started = threading.current_thread()
        return self

    def stop(self) -> None:
        self.stopped = threading.current_thread()


class Looped(LoopStartable):
    """Notes whether the SDK's event loop starts and stops it."""

    started_on_loop = stopped_on_loop = False

    def start(self) -> Self:
        raise AssertionError

    def stop(self) -> None:
        raise AssertionError

    async def astart(self) -> None:
        self.started_on_loop = is_on_sdk_loop()

    async def astop(self) -> None:
        self.stopped_on_loop = is_on_sdk_loop()


def test_a_block_closes_and_lets_its_error_pass() -> None:
    thing = Both()
    with pytest.raises(KeyError), thing:
        {}["missing"]
    assert thing.closed == 1


def test_an_asynchronous_block_closes_and_lets_its_error_pass() -> None:
    async def enter() -> None:
        thing = Both()
        with pytest.raises(KeyError):
            async with thing:
                {}["missing"]
        assert thing.closed == 10

    asyncio.run(enter())


def test_a_plain_block_starts_and_stops_on_its_own_thread() -> None:
    with Threaded() as thing:
        assert thing.stopped is None
    assert thing.started is thing.stopped is threading.current_thread()


def test_an_asynchronous_block_starts_and_stops_on_other_threads() -> None:
    async def enter() -> None:
        async with Threaded() as thing:
            assert thing.stopped is None
        assert thing.started not in {None, threading.current_thread()}
        assert thing.stopped not in {None, threading.current_thread()}

    asyncio.run(enter())


def test_an_asynchronous_block_starts_and_stops_on_the_loop_of_the_sdk() -> None:
    async def enter() -> None:
        async with Looped() as thing:
            assert thing.started_on_loop
            assert not thing.stopped_on_loop
        assert thing.stopped_on_loop

    asyncio.run(enter())
