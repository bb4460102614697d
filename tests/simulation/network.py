"""Virtual network: ordered connections with latency, cuts, and the ends of processes.

Hosts are known by name; a process listens on its host under a node. Messages of one direction of a
connection arrive in their order. A cut delays messages until it heals, as TCP sends them again; a
connection that gets nothing through for too long is broken at both ends. A link that closes breaks
its connections at once, and accepts and closes new ones, as proxies do; a host behind a proxy does
so while nothing listens there. When a process is killed its kernel says so to every peer that it
can reach.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from simulation.loop import Node, current_node, running_loop

__all__ = ["SILENCE_S", "Connection", "End", "Network"]

SILENCE_S = 20.0
"""Time after which a peer that is cut off counts as dead: that of the stream wire."""


class End:
    """One end of a connection.

    Attributes:
        node: the process that has it; None for one that is no process of the simulation.
        error: why it is broken; None while it is not.
        on_message: called with each message that arrives.
        on_broken: called once when the connection is broken.
    """

    def __init__(self, node: Node | None, host: str) -> None:
        self.node = node
        self.host = host
        self.error: Exception | None = None
        self.arrives_at = 0.0  # the last message
        # Messages that come, in order: those that a cut delays and those that a stopped process
        # has not taken yet would overtake each other.
        self.coming: deque[tuple[Callable[[End, Any], None], Any]] = deque()
        self.on_message: Callable[[Any], None] = lambda _: None
        self.on_broken: Callable[[Exception], None] = lambda _: None

    def arrived(self, message: Any) -> None:
        """Take a message."""
        self.on_message(message)


class Connection:
    """Connection between two processes, for one call.

    Attributes:
        client: the end that dialled.
        server: the other one.
    """

    def __init__(self, network: Network, client: End, server: End) -> None:
        self.client, self.server = client, server
        self._network = network
        self.is_over = False
        network.connections[self] = None

    def other(self, end: End) -> End:
        """Return the other end."""
        return self.server if end is self.client else self.client

    def send(self, end: End, message: Any) -> None:
        """Send a message from an end to the other one."""
        if self.is_over or end.error is not None:
            return
        self._transmit(end, End.arrived, message)

    def close(self, end: End, error: Exception) -> None:
        """End the connection: the other end is told once it can be reached."""
        if not self.is_over and end.error is None:
            end.error = error
            self._transmit(end, self._broken, error)

    def broken(self, end: End, error: Exception) -> None:
        """Note at one end that the connection is broken."""
        if end.error is None:
            end.error = error
            context = self._network.context_of(end.node)
            asyncio.get_running_loop().call_soon(end.on_broken, error, context=context)
        if self.other(end).error is not None:
            self.over()

    def over(self) -> None:
        """Forget the connection."""
        self.is_over = True
        self._network.connections.pop(self, None)

    def _transmit(self, end: End, arrive: Callable[[End, Any], None], what: Any) -> None:
        other = self.other(end)
        loop = running_loop()
        at = other.arrives_at = max(
            loop.world_s + self._network.latency_s(), other.arrives_at + 1e-9
        )
        context = self._network.context_of(other.node)
        other.coming.append((arrive, what))
        loop.call_at_world(at, self._try, end.host, other, context=context)

    def _try(self, source: str, to: End) -> None:
        """Let the next message arrive at an end, unless its link is cut."""
        if to.error is not None:
            return
        if self._network.is_cut(source, to.host):
            self._network.park(source, to.host, lambda: self._try(source, to), to.node)
            return
        arrive, what = to.coming.popleft()
        arrive(to, what)

    def _broken(self, end: End, error: Exception) -> None:
        self.broken(end, error)


_Accept = Callable[[Connection, End], None]


class Network:
    """All hosts and what lies between them.

    Args:
        rng: decides on latencies.
        latency_s: mean latency of a message.

    Attributes:
        connections: those that are open, in the order of their beginning.
        listeners: what accepts connections, by host.
        proxied: hosts behind proxies, which accept connections while nothing listens there.
    """

    def __init__(self, rng: random.Random, latency_s: float) -> None:
        self.context = contextvars.copy_context()
        self.connections: dict[Connection, None] = {}
        self.listeners: dict[str, tuple[Node, _Accept]] = {}
        self._rng = rng
        self._mean_s = latency_s
        self.proxied: set[str] = set()
        self._cuts: dict[tuple[str, str], int] = {}
        self._closing: dict[tuple[str, str], int] = {}
        self._parked: dict[
            tuple[str, str], list[tuple[Callable[[], None], contextvars.Context]]
        ] = {}

    def latency_s(self) -> float:
        """Return the latency of the next message: mostly small, sometimes long."""
        share = self._rng.random()
        return self._mean_s * (0.2 + share + (20 * (share - 0.97) / 0.03 if share > 0.97 else 0))

    # ---------------------------------------------------------------- hosts

    def listen(self, host: str, node: Node, accept: _Accept) -> None:
        """Accept connections to a host in a process."""
        self.listeners[host] = (node, accept)

    def close(self, host: str, node: Node) -> None:
        """Refuse connections to a host from now on. Those that are open stay."""
        if host in self.listeners and self.listeners[host][0] is node:
            del self.listeners[host]

    def killed(self, node: Node) -> None:
        """Break the connections of a process that has ended."""
        for host in list(self.listeners):
            self.close(host, node)
        for connection in list(self.connections):
            for end in (connection.client, connection.server):
                if end.node is node:
                    connection.close(end, ConnectionResetError("the process ended"))

    async def dial(self, source: str, host: str) -> Connection:
        """Open a connection from this node to a host.

        Raises:
            ConnectionRefusedError: nothing listens there. A host that is cut off says nothing.
            ConnectionAbortedError: the connection was accepted, and closed before the first byte.
        """
        loop = asyncio.get_running_loop()
        node = current_node()
        done: asyncio.Future[Connection] = loop.create_future()

        def arrive() -> None:
            if self.is_cut(source, host):
                self.park(source, host, arrive)
                return
            loop.call_later(self.latency_s(), answer, context=self.context)

        def answer() -> None:
            if self.is_cut(host, source):
                self.park(host, source, answer)
                return
            if node is None:
                connect()
            else:
                loop.call_soon(connect, context=node.context)

        def connect() -> None:
            if done.done():
                return
            listener = self.listeners.get(host)
            if self.closes(source, host):
                done.set_exception(ConnectionAbortedError(f"the way to {host} closes"))
                return
            if listener is None or listener[0].is_dead:
                kind = ConnectionAbortedError if host in self.proxied else ConnectionRefusedError
                done.set_exception(kind(f"nothing listens at {host}"))
                return
            server_node, accept = listener
            done.set_result(self._connected(node, source, host, server_node, accept))

        loop.call_later(self.latency_s(), arrive, context=self.context)
        return await done

    def open(self, source: str, host: str, server: Node) -> Connection | None:
        """Open a connection at once, as on a warm one; ``None`` if the process is another now."""
        listener = self.listeners.get(host)
        if listener is None or listener[0] is not server or self.closes(source, host):
            return None
        return self._connected(current_node(), source, host, server, listener[1])

    def _connected(
        self,
        node: Node | None,
        source: str,
        host: str,
        server_node: Node,
        accept: _Accept,
    ) -> Connection:
        client, server = End(node, source), End(server_node, host)
        connection = Connection(self, client, server)
        asyncio.get_running_loop().call_soon(
            accept, connection, server, context=server_node.context
        )
        return connection

    # ----------------------------------------------------------------- cuts

    def is_cut(self, source: str, to: str) -> bool:
        """Return True if nothing gets from one host to another."""
        return source != to and self._cuts.get((source, to), 0) > 0

    def cut(self, source: str, to: str) -> None:
        """Cut one direction."""
        link = (source, to)
        self._cuts[link] = self._cuts.get(link, 0) + 1
        if self._cuts[link] == 1:
            asyncio.get_running_loop().call_later(
                SILENCE_S, self._silent, link, context=self.context
            )

    def closes(self, source: str, to: str) -> bool:
        """Return True if connections from one host to another are accepted and closed."""
        return self._closing.get((source, to), 0) > 0

    def close_link(self, source: str, to: str) -> None:
        """Break the connections from one host to another, and close new ones at once."""
        self._closing[source, to] = self._closing.get((source, to), 0) + 1
        for connection in list(self.connections):
            if (connection.client.host, connection.server.host) == (source, to):
                for end in (connection.client, connection.server):
                    connection.broken(end, ConnectionResetError("the link closes"))

    def open_link(self, source: str, to: str) -> None:
        """End :meth:`close_link`."""
        self._closing[source, to] -= 1

    def heal(self, source: str, to: str) -> None:
        """End a cut of one direction."""
        link = (source, to)
        self._cuts[link] -= 1
        if not self._cuts[link]:
            for arrive, context in self._parked.pop(link, ()):
                # At once: before all that is sent from now on.
                asyncio.get_running_loop().call_soon(arrive, context=context)

    def park(
        self, source: str, to: str, arrive: Callable[[], None], node: Node | None = None
    ) -> None:
        """Keep a message until its link heals; it arrives as a callback of the node then."""
        self._parked.setdefault((source, to), []).append((arrive, self.context_of(node)))

    def context_of(self, node: Node | None) -> contextvars.Context:
        """Return the context of the callbacks of a node, or of the simulation itself."""
        return self.context if node is None else node.context

    def _silent(self, link: tuple[str, str]) -> None:
        """Break the connections over a link that was cut for long."""
        if not self._cuts.get(link):
            return
        for connection in list(self.connections):
            hosts = (connection.client.host, connection.server.host)
            if set(hosts) == set(link):
                for end in (connection.client, connection.server):
                    connection.broken(end, ConnectionAbortedError("no sign of life of the peer"))
        asyncio.get_running_loop().call_later(SILENCE_S, self._silent, link, context=self.context)
