"""The stream transport at a server, with a service whose every answer is known."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.stream_frames import Method, encode_call
from gazette_sdk.server.process import Server
from gazette_sdk.transport.loop import run
from support.open_files import open_files
from support.scripted_journals import ScriptedJournals, serving

__all__ = [
    "LIMIT_S",
    "Waiting",
    "apply_call",
    "left_until",
    "stream_server",
    "stream_tasks",
    "until",
]

LIMIT_S = 10.0


@contextlib.contextmanager
def stream_server(journals: Any, **options: Any) -> Iterator[Server]:
    """A server on the SDK's loop. At its end nothing of the connections is left."""
    host = serving(journals, host="127.0.0.1", **options)
    server = run(host.__aenter__(), LIMIT_S)
    before = len(open_files())
    try:
        yield server
        left_until(server, 0)
        until(lambda: len(open_files()) <= before)
    finally:
        run(host.__aexit__(None, None, None), LIMIT_S)
    assert not run(stream_tasks(), LIMIT_S)


async def stream_tasks() -> list[str]:
    return [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("stream")]


def until(holds: Any) -> None:
    """Return when something is true, which other threads make so."""
    deadline_s = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline_s, "it never came true"
        time.sleep(0.005)


def left_until(server: Server, count: int) -> None:
    until(lambda: len(server.stream) == count)
    if not count:
        until(lambda: not run(stream_tasks(), LIMIT_S))


def apply_call(head: bytes = b"") -> bytes:
    return encode_call(Method.APPLY, b"", head)


class Waiting:
    """An append that begins, and waits until it is let go or cancelled."""

    def __init__(self, journals: ScriptedJournals) -> None:
        self.begun = threading.Event()
        self.cancelled = threading.Event()
        self.go: asyncio.Event
        self._journals = journals
        journals.on_append = self

    async def __call__(self, requests: Any, call: Any) -> pb.AppendResponse:
        self.go = asyncio.Event()
        self.begun.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return await self._journals.collect(requests, call)

    def let_go(self) -> None:
        async def go() -> None:
            self.go.set()

        run(go(), LIMIT_S)
