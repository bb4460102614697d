"""The connections to each broker, and which of them a call gets.

A connection carries calls one after the other, and answers in their order. So a call that may
last (a read, a watch, an append whose content is still to come) gets a connection of its own;
short ones go to one that is idle, else to a further one, and once there are several they queue
behind each other (:data:`SHARED_MAX`), though not behind one that isn't answered
(:data:`SLOW_S`). What is idle for a while is closed.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from gazette_sdk.errors import ClosedError, UnavailableError
from gazette_sdk.protocol import urls
from gazette_sdk.transport.routing.dispatcher import Action, Health, action_for, where
from gazette_sdk.transport.target import SERVICE, Peer
from gazette_sdk.transport.wires.stream.connection import Connection
from gazette_sdk.transport.wires.stream.dialing import Dialer, NotStreamError

__all__ = ["IDLE_MAX", "SHARED_MAX", "SLOW_S", "SWEEP_INTERVAL_S", "Pool"]

SHARED_MAX = 8
"""Connections to one broker for short calls; more calls than that at once queue behind others."""

SLOW_S = 0.05
"""A connection which has open calls and said nothing for so long has no more put upon it, where
others can be had: perhaps its oldest call waits for something."""

SLOW_MAX = 64
"""Connections to one broker for short calls, where those there are are slow."""

IDLE_MAX = 16
"""Idle connections to one broker that are kept."""

SWEEP_INTERVAL_S = 30.0
"""A connection that is idle for so long is closed, at the next sweep."""

FIRST_REDIAL_S = 0.1
"""Least wait before a broker that could not be reached is dialled again; doubles up to the
transport's bound."""

CLOSE_TIMEOUT_S = 1.0
"""What an idle connection may take to end in good order (TLS waits for its peer)."""


@dataclass(slots=True, eq=False)
class _Endpoint:
    """The connections to one broker. It owns them: see :class:`Connection`."""

    pool: Pool
    peer: Peer
    address: str
    idle: list[Connection] = field(default_factory=list)
    busy: set[Connection] = field(default_factory=set)
    dials: int = 0
    shared_dials: int = 0
    failures: int = 0
    dial_after: float = 0.0
    failure: UnavailableError | None = None
    waiters: list[asyncio.Future[None]] = field(default_factory=list)

    # ------------------------------------------------------ by its connections

    def freed(self, connection: Connection) -> None:
        """See :class:`Owner`."""
        if connection not in self.busy:
            return  # it is being dialled
        self.busy.discard(connection)
        connection.exclusive = False
        if len(self.idle) < IDLE_MAX and not self.pool.closed:
            self.idle.append(connection)
        else:
            connection.close()
        self.wake()

    def lost(self, connection: Connection) -> None:
        """See :class:`Owner`."""
        self.busy.discard(connection)
        if connection in self.idle:
            self.idle.remove(connection)
        self.wake()

    def wake(self) -> None:
        """Let those look again who wait for room."""
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)
        self.waiters.clear()

    # ------------------------------------------------------------------- state

    @property
    def health(self) -> Health:
        """Its state, as a dispatcher should see it."""
        if self.idle or self.busy:
            return Health.READY
        if self.failures and time.monotonic() < self.dial_after:
            return Health.FAILED
        if self.dials:
            return Health.FAILED if self.failures else Health.CONNECTING
        return Health.IDLE

    def take_idle(self) -> Connection | None:
        """One that is idle; the one used last, so that others grow old."""
        while self.idle:
            connection = self.idle.pop()
            if connection.usable:
                self.busy.add(connection)
                return connection
            connection.close()
        return None

    def least_loaded(self) -> tuple[Connection | None, int, bool]:
        """Which busy connection a short call could queue on.

        Returns:
            The connection, how many are for short calls, and whether all of these are slow.
        """
        now = time.monotonic()
        best: Connection | None = None
        least = (True, 0)
        count = 0
        for connection in self.busy:
            if connection.exclusive:
                continue
            count += 1
            load = (connection.silent_s(now) > SLOW_S, connection.open_count)
            if connection.usable and (best is None or load < least):
                best, least = connection, load
        return best, count, best is not None and least[0]


class Pool:
    """All connections of one transport, on one event loop.

    A forked child begins with none, and dials anew; its parent's are untouched.

    Args:
        address: endpoint URL of the service address.
        dialer: opens connections.
        connect_timeout_s: what a call waits for its connection.
        redial_max_s: longest wait between two dials of a broker that cannot be reached.
    """

    def __init__(
        self, address: str, dialer: Dialer, *, connect_timeout_s: float, redial_max_s: float
    ) -> None:
        if not address.startswith("unix:///"):
            urls.validate_endpoint(address)  # a bad address is reported where it was given
        self.address = address
        self.closed = False
        self._dialer = dialer
        self._connect_timeout_s = connect_timeout_s
        self._redial_max_s = redial_max_s
        self._endpoints: dict[Peer, _Endpoint] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process_id = 0
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._waits: set[asyncio.Timeout] = set()
        self._inherited: list[Connection] = []

    def __contains__(self, peer: Peer) -> bool:
        return peer in self._endpoints

    def __len__(self) -> int:
        return sum(1 for _ in self._connections())

    def health(self, peer: Peer) -> Health:
        """The state of the connections to a peer; one that was never dialled is idle."""
        endpoint = self._endpoints.get(peer)
        return Health.IDLE if endpoint is None else endpoint.health

    def try_take(self, peer: Peer, *, exclusive: bool) -> Connection | None:
        """An idle connection for a call that begins at once, if there is one.

        Args:
            peer: the broker.
            exclusive: whether no other call may follow it on the connection.

        Raises:
            ClosedError: the transport is closed, or belongs to another event loop.
        """
        if self._loop is not asyncio.get_running_loop() or self.closed:
            self._enter()
        endpoint = self._endpoints.get(peer)
        if endpoint is None:
            return None
        connection = endpoint.take_idle()
        if connection is not None:
            connection.exclusive = exclusive
        return connection

    async def take(self, peer: Peer, *, exclusive: bool) -> Connection:
        """A connection for a call that begins at once.

        Args:
            peer: the broker.
            exclusive: whether no other call may follow it on the connection.

        Raises:
            NotStreamError: the broker speaks another wire.
            UnavailableError: it cannot be reached.
            ClosedError: the transport is closed, or belongs to another event loop.
            ConfigurationError: a certificate cannot be used.
        """
        patience_ends = time.monotonic() + self._connect_timeout_s
        while True:
            connection = self.try_take(peer, exclusive=exclusive)
            if connection is not None:
                return connection
            endpoint = self._endpoint(peer)
            if exclusive:
                return await self._dial(endpoint, exclusive=True)
            best, count, are_slow = endpoint.least_loaded()
            if endpoint.failure is not None and time.monotonic() > patience_ends:
                raise UnavailableError(str(endpoint.failure))
            if count + endpoint.shared_dials < (SLOW_MAX if are_slow else SHARED_MAX):
                return await self._dial(endpoint, exclusive=False)
            if best is not None:
                return best
            waiter = asyncio.get_running_loop().create_future()
            endpoint.waiters.append(waiter)
            await waiter

    async def reach(self, peer: Peer) -> None:
        """See to it that there is a connection to a peer. Raises what :meth:`take` does."""
        self._enter()
        endpoint = self._endpoint(peer)
        if endpoint.health is not Health.READY:
            connection = await self._dial(endpoint, exclusive=False)
            connection.unused()

    async def aclose(self) -> None:
        """Close every connection. Calls under way are cancelled."""
        self.closed = True
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        if self._loop is not None and self._process_id == os.getpid():
            for wait in tuple(self._waits):
                wait.reschedule(self._loop.time())
            connections = list(self._connections())
            for connection in connections:
                connection.close()
            for endpoint in self._endpoints.values():
                endpoint.wake()
            closings = [asyncio.ensure_future(connection.closed()) for connection in connections]
            if closings:
                _, slow = await asyncio.wait(closings, timeout=CLOSE_TIMEOUT_S)
                for connection in connections:
                    connection.drop("the transport was closed")
                if slow:
                    await asyncio.wait(slow)

    def sweep(self, now: float | None = None) -> None:
        """Close what is idle for long.

        Args:
            now: monotonic seconds.
        """
        now = time.monotonic() if now is None else now
        for peer, endpoint in list(self._endpoints.items()):
            for connection in endpoint.idle[:]:
                if now - connection.freed_at >= SWEEP_INTERVAL_S:
                    endpoint.idle.remove(connection)
                    connection.close()
                else:
                    connection.trim()
            unused = not (endpoint.idle or endpoint.busy or endpoint.dials or endpoint.waiters)
            if unused and now >= endpoint.dial_after:
                del self._endpoints[peer]
        assert self._loop is not None
        self._sweep_timer = self._loop.call_later(SWEEP_INTERVAL_S, self.sweep)

    # ------------------------------------------------------------- their parts

    def _connections(self) -> Iterator[Connection]:
        for endpoint in self._endpoints.values():
            yield from endpoint.idle
            yield from endpoint.busy

    def _enter(self) -> None:
        """Check that calls can be made here; the first one binds the loop."""
        if self.closed:
            raise ClosedError("the transport was closed; connect again")
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        process_id = os.getpid()
        if self._loop is not None and self._process_id == process_id:
            raise ClosedError(
                "the transport is used on another event loop than the one it was first used on; "
                "connect again there"
            )
        self._inherited += self._connections()
        for connection in self._inherited:
            connection.abandon()
        self._endpoints.clear()
        self._waits.clear()
        self._loop, self._process_id = loop, process_id
        self._sweep_timer = loop.call_later(SWEEP_INTERVAL_S, self.sweep)

    def _endpoint(self, peer: Peer) -> _Endpoint:
        endpoint = self._endpoints.get(peer)
        if endpoint is None:
            address = self.address if peer == SERVICE else peer.endpoint
            endpoint = self._endpoints[peer] = _Endpoint(self, peer, address)
        return endpoint

    async def _dial(self, endpoint: _Endpoint, *, exclusive: bool) -> Connection:
        """Open a connection and take it; the service address is waited for."""
        told = where(endpoint.peer, self.address)
        endpoint.dials += 1
        endpoint.shared_dials += not exclusive
        try:
            async with asyncio.timeout(self._connect_timeout_s) as wait:
                self._waits.add(wait)
                try:
                    connection = await self._dial_until(endpoint, told)
                finally:
                    self._waits.discard(wait)
        except TimeoutError:
            if self.closed:
                raise ClosedError("the transport was closed while it connected") from None
            cause = f": {endpoint.failure}" if endpoint.failure is not None else ""
            raise UnavailableError(
                f"{told} did not answer within {self._connect_timeout_s:g} s{cause}"
            ) from None
        finally:
            endpoint.dials -= 1
            endpoint.shared_dials -= not exclusive
            endpoint.wake()
        if self.closed:
            connection.close()
            await connection.closed()
            raise ClosedError("the transport was closed while it connected")
        connection.exclusive = exclusive
        endpoint.busy.add(connection)
        return connection

    async def _dial_until(self, endpoint: _Endpoint, told: str) -> Connection:
        """Dial, with pauses, for as long as there is hope."""
        while True:
            wait_s = endpoint.dial_after - time.monotonic()
            if endpoint.failures and wait_s > 0:
                if action_for(endpoint.peer, Health.FAILED) is Action.FAIL:
                    raise UnavailableError(f"{endpoint.failure}")
                await asyncio.sleep(wait_s)
            try:
                connection = await self._dialer.dial(endpoint.address, told, endpoint)
            except NotStreamError:
                raise
            except UnavailableError as error:
                self._note_failure(endpoint, error)
                if action_for(endpoint.peer, Health.FAILED) is Action.FAIL:
                    raise
                continue
            endpoint.failures = 0
            endpoint.failure = None
            return connection

    def _note_failure(self, endpoint: _Endpoint, error: UnavailableError) -> None:
        wait_s = min(FIRST_REDIAL_S * 2.0**endpoint.failures, self._redial_max_s)
        endpoint.failures = min(endpoint.failures + 1, 30)
        endpoint.failure = error
        endpoint.dial_after = time.monotonic() + wait_s
