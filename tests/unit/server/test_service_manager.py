"""Notifications to a service manager, over a real socket."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from pathlib import Path

import pytest

from gazette_sdk.server.process import ServiceManager

TIMEOUT_S = 20.0


@pytest.fixture
def manager(tmp_path: Path):
    """The socket of a manager."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        receiver.settimeout(TIMEOUT_S)
        yield receiver


def received(receiver: socket.socket) -> list[str]:
    return receiver.recv(4096).decode().split("\n")


async def receive(receiver: socket.socket) -> list[str]:
    return await asyncio.to_thread(received, receiver)


def test_steps_and_signs_of_life_are_sent_with_the_state(manager):
    async def scenario():
        environ = {"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "200000"}
        with ServiceManager(environ) as sent:
            assert await receive(manager) == ["WATCHDOG=1", "STATUS=starting"]
            sent.announce("READY=1", lambda: "serving 3 journals")
            assert await receive(manager) == ["READY=1", "STATUS=serving 3 journals"]
            begin = time.monotonic()
            for _ in range(3):
                assert await receive(manager) == ["WATCHDOG=1", "STATUS=serving 3 journals"]
            assert time.monotonic() - begin > 0.1  # a quarter of the watchdog's time each

    asyncio.run(scenario())
    manager.setblocking(False)
    with pytest.raises(BlockingIOError):
        received(manager)


def test_a_loop_that_is_held_sends_no_sign_of_life(manager):
    async def scenario():
        environ = {"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "200000"}
        with ServiceManager(environ):
            assert received(manager) == ["WATCHDOG=1", "STATUS=starting"]
            manager.settimeout(0.3)  # it holds the loop
            with pytest.raises(TimeoutError):
                received(manager)
            manager.settimeout(TIMEOUT_S)
            assert await receive(manager) == ["WATCHDOG=1", "STATUS=starting"]

    asyncio.run(scenario())


def test_a_watchdog_of_another_process_gets_no_sign_of_life_from_this_one(manager):
    async def scenario():
        environ = {
            "NOTIFY_SOCKET": manager.getsockname(),
            "WATCHDOG_USEC": "200000",
            "WATCHDOG_PID": str(os.getppid()),
        }
        with ServiceManager(environ):
            assert await receive(manager) == ["STATUS=starting"]

    asyncio.run(scenario())


def test_abstract_sockets_are_reached():
    async def scenario():
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
            receiver.bind("")  # the system chooses an abstract name
            receiver.settimeout(TIMEOUT_S)
            name = receiver.getsockname().decode().replace("\0", "@")
            with ServiceManager({"NOTIFY_SOCKET": name}) as sent:
                sent.announce("READY=1", lambda: "serving")
                assert await receive(receiver) == ["STATUS=starting"]
                assert await receive(receiver) == ["READY=1", "STATUS=serving"]

    asyncio.run(scenario())


@pytest.mark.parametrize("environ", [{}, {"NOTIFY_SOCKET": "/no/such/socket"}])
def test_without_a_manager_nothing_is_sent_and_nothing_fails(environ):
    async def scenario():
        with ServiceManager(environ) as sent:
            sent.announce("READY=1", lambda: "serving")

    asyncio.run(scenario())


def test_a_manager_that_does_not_read_holds_nothing_up(manager):
    async def scenario():
        with ServiceManager({"NOTIFY_SOCKET": manager.getsockname()}) as sent:
            for _ in range(10_000):  # more than the socket takes
                sent.announce("READY=1", lambda: "serving")

    begin = time.monotonic()
    asyncio.run(scenario())
    assert time.monotonic() - begin < TIMEOUT_S
