"""The stream transport, at a server.

The public port hands connections over that begin with the transport's preface. Each of them is a
:class:`~gazette_sdk.server.stream.StreamConnection`. The server has what they share:
the methods, the bound of their number, the timer that finds silent clients, and the stop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from gazette_sdk.protocol.authorization import AllowAll, Authority
from gazette_sdk.protocol.served_calls import ServerCalls
from gazette_sdk.protocol.stream_frames import METHODS, PREFACE, MethodTraits
from gazette_sdk.server.grpc_server import ActiveCall
from gazette_sdk.server.listener import PortProtocol, UnknownShare
from gazette_sdk.server.stream import StreamConnection, StreamMethod

ALPN = "gzt/1"
"""Name of the transport in TLS."""

CONNECTIONS_MAX = 10_000
"""Default bound of a process's connections: each long read holds one of its own."""

TICK_S = 1.0
"""Period of the check for silent connections."""

CANCEL_TIMEOUT_S = 5.0
"""Time that cancelled calls may take to end."""


class StreamServer:
    """Factory of the protocol objects of connections.

    Args:
        active: calls in progress, for the diagnostics.
        connections_max: greatest number of connections served at once.
        unknown: processor time of unknown clients.

    Attributes:
        methods: methods served, by number.
        traits: shapes of these methods.
        unknown: as given.
        authority: verifies the token of a connection's first calls.
        zone: zone of the server's member key; empty if it is no member.
        suffix: suffix of the same.
    """

    def __init__(
        self,
        *,
        active: set[ActiveCall] | None = None,
        connections_max: int = CONNECTIONS_MAX,
        unknown: UnknownShare | None = None,
    ) -> None:
        self.unknown = unknown or UnknownShare()
        self.methods: dict[int, StreamMethod] = {}
        self.traits: dict[int, MethodTraits] = {}
        self.zone = ""
        self.authority: Authority | AllowAll = AllowAll()
        self.suffix = ""
        self.active: set[ActiveCall] = set() if active is None else active
        self._connections_max = connections_max
        self._connections: set[StreamConnection] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ticker: asyncio.TimerHandle | None = None
        self._all_lost: asyncio.Future[None] | None = None
        self._stopping = False

    def add(self, methods: Iterable[StreamMethod]) -> None:
        """Serve further methods."""
        for method in methods:
            number = method.rpc.number
            self.methods[number] = method
            self.traits[number] = METHODS[number]

    def introduce(self, zone: str, suffix: str) -> None:
        """Set the member key that clients get in HELLO."""
        self.zone, self.suffix = zone, suffix

    def wire(self) -> PortProtocol:
        """Return the protocol to add to a listener."""
        return PortProtocol("stream", (PREFACE,), self, alpn=ALPN, refusal=self._refusal)

    def _refusal(self, reason: str) -> bytes:
        return ServerCalls(self.traits).goaway(reason)

    def __call__(self) -> asyncio.BufferedProtocol:
        """Return a protocol object for one connection."""
        return StreamConnection(self)

    def __len__(self) -> int:
        """Return the number of connections."""
        return len(self._connections)

    # -------------------------------------------------------------- connections

    def admits(self, connection: StreamConnection) -> str:
        """Admit a connection. Return the reason if it is refused, else the empty string."""
        self._connections.add(connection)
        if self._stopping:
            return "the server stops"
        if len(self._connections) > self._connections_max:
            return f"there are {self._connections_max} connections already; try another server"
        if self._ticker is None:
            self._ticker = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        return ""

    def lost(self, connection: StreamConnection) -> None:
        """Forget a connection. Tasks of its calls may still be ending."""
        self._connections.discard(connection)
        for task in connection.serving.tasks:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if not self._connections and self._all_lost is not None and not self._all_lost.done():
            self._all_lost.set_result(None)

    def _tick(self) -> None:
        self._ticker = None
        for connection in tuple(self._connections):
            connection.tick()
        if self._connections:
            self._ticker = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    # ---------------------------------------------------------------------- end

    async def stop(self, grace_s: float) -> None:
        """Take no further calls. Give those in progress ``grace_s`` to end, then break them."""
        self._stopping = True
        if grace_s > 0:
            for connection in tuple(self._connections):
                connection.leave("the server stops")
            if self._connections:
                self._all_lost = asyncio.get_running_loop().create_future()
                await asyncio.wait([self._all_lost], timeout=grace_s)
                self._all_lost.cancel()
        tasks = self._tasks.union(*(connection.serving.tasks for connection in self._connections))
        for connection in tuple(self._connections):
            connection.abort()
        if tasks:
            await asyncio.wait(tasks, timeout=CANCEL_TIMEOUT_S)
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None
