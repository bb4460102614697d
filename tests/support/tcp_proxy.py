"""A TCP proxy whose connections a test can break, refuse and stall."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Self

CHUNK_BYTES = 65536


class TcpProxy:
    """Forwards connections to another port of this machine.

    Attributes:
        port: port to connect to.
        accepting: whether new connections are served; others are closed at once.
        flowing: cleared, nothing is forwarded any more, and connections stay open.
        connections_made: how many were made by now.
        answering: cleared, nothing is forwarded to those who connected any more.
    """

    def __init__(self, target_port: int) -> None:
        self.port = 0
        self.connections_made = 0
        self.accepting = True
        self.flowing = asyncio.Event()
        self.flowing.set()
        self.answering = asyncio.Event()
        self.answering.set()
        self._target_port = target_port
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        await self.break_connections()

    async def break_connections(self) -> None:
        """Reset all connections of now."""
        for writer in self._writers:
            writer.transport.abort()
        connections = list(self._connections)
        for connection in connections:
            connection.cancel()
        if connections:
            await asyncio.wait(connections)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections_made += 1
        task = asyncio.current_task()
        assert task is not None
        if not self.accepting:
            await _abort(writer)
            return
        self._connections.add(task)
        self._writers.add(writer)
        try:
            there_reader, there_writer = await asyncio.open_connection(
                "127.0.0.1", self._target_port
            )
            self._writers.add(there_writer)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._pump(reader, there_writer, self.flowing))
                    group.create_task(
                        self._pump(there_reader, writer, self.flowing, self.answering)
                    )
            finally:
                self._writers.discard(there_writer)
                await _abort(there_writer)
        except* (OSError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            await _abort(writer)
            self._connections.discard(task)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *gates: asyncio.Event
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(CHUNK_BYTES):
                for gate in gates:
                    await gate.wait()
                writer.write(data)
                await writer.drain()
        if not writer.transport.is_closing():
            writer.transport.abort()


async def _abort(writer: asyncio.StreamWriter) -> None:
    """Reset a connection, and wait until its socket is closed."""
    writer.transport.abort()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
