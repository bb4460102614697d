"""A server of the stream transport on a loopback port which does as a test says, right or wrong.

It is built of the pure machines only. A script is run for each connection:

    async def script(peer):
        await peer.greet()
        began = await peer.call()
        peer.answer(began.call, pb.ApplyResponse(header=header()))

    async with ScriptedStream(script) as server:
        transport = StreamTransport(server.address)

A connection is closed where its script ends. An error of a script fails the test.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Self

from google.protobuf.message import Message

from gazette_sdk.protocol.served_calls import ServerCalls
from gazette_sdk.protocol.stream_calls import CallBegan, HalfClosed, Item, Ping
from gazette_sdk.protocol.stream_frames import PREFACE
from support.frame_feed import FrameFeed

__all__ = ["HangUpError", "ScriptedPeer", "ScriptedStream"]


class HangUpError(Exception):
    """The client has closed the connection."""


class ScriptedPeer:
    """One connection, for its script.

    Attributes:
        calls: the state of its calls.
        events: what the client did, by now.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.calls = ServerCalls()
        self.reader = reader
        self.writer = writer
        self.events: list[Any] = []
        self._decoder = FrameFeed(PREFACE)
        self._waiting: deque[Any] = deque()

    async def greet(self) -> None:
        """Say HELLO."""
        self.raw(self.calls.hello("zone-a", "broker-1"))

    async def event(self) -> Any:
        """What the client does next.

        Raises:
            HangUpError: it hangs up.
        """
        while not self._waiting:
            data = await self.reader.read(1 << 20)
            if not data:
                raise HangUpError
            for frame in self._decoder.feed(data):
                event = self.calls.receive(frame)
                if event is not None:
                    self._waiting.append(event)
            assert self._decoder.error is None, self._decoder.error
        event = self._waiting.popleft()
        self.events.append(event)
        return event

    async def call(self) -> CallBegan:
        """The client's next call; its further frames before that are passed over."""
        while not isinstance(event := await self.event(), CallBegan):
            if isinstance(event, Ping):
                self.raw(self.calls.pong(event.payload))
        return event

    async def whole_append(self) -> tuple[CallBegan, bytes]:
        """The client's next append, up to its END, and its content."""
        began = await self.call()
        content = b""
        while not isinstance(event := await self.event(), HalfClosed):
            assert isinstance(event, Item)
            content += event.payload
        return began, content

    async def hang_up(self) -> None:
        """Wait until the client hangs up."""
        try:
            while True:
                await self.event()
        except (HangUpError, ConnectionError):
            pass

    def raw(self, data: bytes) -> None:
        """Send bytes."""
        self.writer.write(data)

    def answer(self, call: int, response: Message) -> None:
        """Send the only response of a call, and its STATUS."""
        self.raw(self.calls.answer(call, response.SerializeToString()))

    def message(self, call: int, response: Message) -> None:
        """Send a response."""
        self.raw(self.calls.message(call, response.SerializeToString()))


Script = Callable[[ScriptedPeer], Awaitable[None]]


class ScriptedStream:
    """The server.

    Args:
        script: what to do with each connection.
        port: to listen on; 0 for any free one.
        tls: TLS to terminate.

    Attributes:
        peers: its connections by now, in order.
    """

    def __init__(self, script: Script, *, port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        self.script = script
        self.port = port
        self.peers: list[ScriptedPeer] = []
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._errors: list[BaseException] = []

    @property
    def address(self) -> str:
        return f"{'https' if self._tls else 'http'}://localhost:{self.port}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", self.port, ssl=self._tls, limit=1 << 22
        )
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        # asyncio leaks connections that it accepted just before it closes the port.
        for _ in range(5):
            await asyncio.sleep(0)
        self._server.close()
        for peer in self.peers:
            # Early releases of 3.11 fail to abort TLS that has ended.
            with contextlib.suppress(AttributeError):
                peer.writer.transport.abort()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._errors:
            raise self._errors[0]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        peer = ScriptedPeer(reader, writer)
        self.peers.append(peer)
        try:
            await self.script(peer)
        except (asyncio.CancelledError, HangUpError, ConnectionError):
            pass
        except BaseException as error:  # noqa: BLE001 - told at the end
            self._errors.append(error)
        finally:
            self._tasks.discard(task)
            if writer.transport.get_write_buffer_size():
                writer.close()
            else:
                writer.transport.close()
