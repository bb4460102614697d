"""Connections to each broker, on one event loop, and the choice among them for a call.

A connection carries calls one after the other, and answers in their order. A call that may last (a
read, a watch, an append whose content is still to come) gets a connection of its own. A short one
goes to an idle connection, else to a further one. Once there are :data:`SHARED_MAX`, short calls
queue after each other, though not after one that is not answered (:data:`SLOW_S`). What is idle for
a while is closed.

A transport has :class:`Pools`: one for each event loop that uses it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from functools import partial

from gazette_sdk.errors import ClosedError, UnavailableError
from gazette_sdk.retries import DialPolicy
from gazette_sdk.transport.stream.blocking import (
    HandshakeClosedError,
    NotStreamError,
    TlsContext,
    dial,
)
from gazette_sdk.transport.stream.connection import Connection
from gazette_sdk.transport.wire import SERVICE, Action, Health, Peer, WireOptions, action_for, where

SHARED_MAX = 8
"""Connections to one broker for short calls; more calls than that at once queue after others."""

SLOW_S = 0.05
"""A connection which has open calls and received nothing for so long gets no further call, where
another one can be had: perhaps its oldest call waits for something."""

SLOW_MAX = 64
"""Connections to one broker for short calls, if all there are are slow."""

IDLE_MAX = 16
"""Idle connections to one broker that are kept."""

SWEEP_INTERVAL_S = 30.0
"""A connection that is idle for so long is closed, at the next sweep."""

FIRST_REDIAL_S = 0.1
"""Least wait before a broker that could not be reached is dialled again; doubles up to the
transport's bound."""

REFUSALS = (ConnectionRefusedError, FileNotFoundError)
"""Errors of an address at which nothing listens: calls fail at once."""

WRONG = (socket.gaierror, ssl.SSLError)
"""Errors that a wrong address or a wrong TLS setting cause: calls fail at once, unless a broker has
answered there before."""

CLOSE_TIMEOUT_S = 1.0
"""Time for idle connections to end in good order (TLS waits for its peer)."""


class _Endpoint:
    """Connections to one broker."""

    def __init__(self, address: str, where: str, redial_max_s: float) -> None:
        self.address = address
        self.where = where
        self.policy = DialPolicy(FIRST_REDIAL_S, redial_max_s)
        self.has_spoken = False
        self.idle: list[Connection] = []
        self.busy: set[Connection] = set()
        self.dials = 0
        self.shared_dials = 0
        self.waiters: list[asyncio.Future[None]] = []
        self.is_closed = False

    def put_back(self, connection: Connection) -> None:
        """Keep a connection that became idle."""
        if connection not in self.busy:
            return  # it is being dialled
        self.busy.discard(connection)
        connection.exclusive = False
        if len(self.idle) < IDLE_MAX and not self.is_closed:
            self.idle.append(connection)
        else:
            connection.close()
        self.wake()

    def remove(self, connection: Connection) -> None:
        """Forget a connection that is closed."""
        self.busy.discard(connection)
        if connection in self.idle:
            self.idle.remove(connection)
        self.wake()

    def wake(self) -> None:
        """Wake the calls that wait for a connection."""
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)
        self.waiters.clear()

    @property
    def health(self) -> Health:
        """State of the connections, as a dispatcher should see it."""
        if self.idle or self.busy:
            return Health.READY
        if not self.policy.may_dial(time.monotonic()):
            return Health.FAILED
        if self.dials:
            return Health.CONNECTING if self.policy.failure is None else Health.FAILED
        return Health.IDLE

    def take_idle(self) -> Connection | None:
        """Take the idle connection that was used last, so that others grow old."""
        while self.idle:
            connection = self.idle.pop()
            assert not connection.open_count, "an idle connection has no calls"
            if connection.usable:
                self.busy.add(connection)
                return connection
            connection.close()
        return None

    def least_loaded(self) -> tuple[Connection | None, int, bool]:
        """Find the busy connection on which a short call could queue.

        Returns:
            The connection, how many are for short calls, and True if all of these are slow.
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
    """Connections of one transport on the running event loop.

    Args:
        options: of the transport.
        tls: for endpoints of scheme ``https``.
        hello_timeout_s: time within which a connected server must say HELLO.

    Attributes:
        loop: the event loop.
        hello_timeout_s: the same.
        pipelines: how many append pipelines have a connection of their own.
    """

    def __init__(self, options: WireOptions, tls: TlsContext, hello_timeout_s: float) -> None:
        self.loop = asyncio.get_running_loop()
        self.hello_timeout_s = hello_timeout_s
        self.pipelines = 0
        self._address = options.address
        self._tls = tls
        self._connect_timeout_s = options.connect_timeout_s
        self._redial_max_s = options.reconnect_backoff_max_s
        self._endpoints: dict[Peer, _Endpoint] = {}
        self._dial_timeouts: set[asyncio.Timeout] = set()
        self._is_closed = False
        self._sweep_timer = self.loop.call_later(SWEEP_INTERVAL_S, self.sweep)

    def __len__(self) -> int:
        return sum(1 for _ in self.connections())

    @property
    def exclusive_count(self) -> int:
        """The number of calls, under way or being dialled for, with a connection of their own."""
        return sum(
            endpoint.dials - endpoint.shared_dials + sum(each.exclusive for each in endpoint.busy)
            for endpoint in self._endpoints.values()
        )

    def health(self, peer: Peer) -> Health:
        """Return the state of the connections to a peer; one that was never dialled is idle."""
        endpoint = self._endpoints.get(peer)
        return Health.IDLE if endpoint is None else endpoint.health

    def try_take(self, peer: Peer, *, exclusive: bool) -> Connection | None:
        """Take an idle connection for a call that begins at once, if there is one.

        Args:
            peer: the broker.
            exclusive: True if no other call may follow it on the connection.
        """
        endpoint = self._endpoints.get(peer)
        if endpoint is None:
            return None
        connection = endpoint.take_idle()
        if connection is not None:
            connection.exclusive = exclusive
        return connection

    async def take(self, peer: Peer, *, exclusive: bool) -> Connection:
        """Take a connection for a call that begins at once.

        Args:
            peer: the broker.
            exclusive: True if no other call may follow it on the connection.

        Raises:
            NotStreamError: the broker speaks another wire.
            UnavailableError: it cannot be reached.
            ClosedError: the transport was closed.
            ConfigurationError: a certificate cannot be used.
        """
        gives_up_at = time.monotonic() + self._connect_timeout_s
        while True:
            self._check_open()
            connection = self.try_take(peer, exclusive=exclusive)
            if connection is not None:
                return connection
            endpoint = self._endpoint(peer)
            if exclusive:
                return await self._dial(peer, endpoint, exclusive=True)
            best, count, are_slow = endpoint.least_loaded()
            failure = endpoint.policy.failure
            if failure is not None and time.monotonic() > gives_up_at:
                raise UnavailableError(str(failure))
            if count + endpoint.shared_dials < (SLOW_MAX if are_slow else SHARED_MAX):
                return await self._dial(peer, endpoint, exclusive=False)
            if best is not None:
                return best
            waiter = self.loop.create_future()
            endpoint.waiters.append(waiter)
            await waiter

    async def reach(self, peer: Peer) -> None:
        """Open a connection to a peer, unless there is one. Raises what :meth:`take` does."""
        endpoint = self._endpoint(peer)
        if endpoint.health is not Health.READY:
            connection = await self._dial(peer, endpoint, exclusive=False)
            connection.unused()

    def stop(self) -> None:
        """Take no further calls."""
        self._is_closed = True
        self._sweep_timer.cancel()

    async def aclose(self) -> None:
        """Close every connection. Calls under way are cancelled."""
        if self._is_closed:
            return
        self.stop()
        for timeout in tuple(self._dial_timeouts):
            timeout.reschedule(self.loop.time())
        connections = list(self.connections())
        for endpoint in self._endpoints.values():
            endpoint.is_closed = True
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
                if now - connection.idle_since >= SWEEP_INTERVAL_S:
                    endpoint.idle.remove(connection)
                    connection.close()
                else:
                    connection.trim()
            unused = not (endpoint.idle or endpoint.busy or endpoint.dials or endpoint.waiters)
            if unused and endpoint.policy.may_dial(now):
                del self._endpoints[peer]
        self._sweep_timer = self.loop.call_later(SWEEP_INTERVAL_S, self.sweep)

    def connections(self) -> Iterator[Connection]:
        """Iterate over all connections."""
        for endpoint in self._endpoints.values():
            yield from endpoint.idle
            yield from endpoint.busy

    # ------------------------------------------------------------------- parts

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the transport was closed; connect again")

    def _endpoint(self, peer: Peer) -> _Endpoint:
        endpoint = self._endpoints.get(peer)
        if endpoint is None:
            address = self._address if peer == SERVICE else peer.endpoint
            endpoint = _Endpoint(address, where(peer, self._address), self._redial_max_s)
            self._endpoints[peer] = endpoint
        return endpoint

    async def _dial(self, peer: Peer, endpoint: _Endpoint, *, exclusive: bool) -> Connection:
        """Open a connection and take it; the service address is waited for."""
        endpoint.dials += 1
        endpoint.shared_dials += not exclusive
        try:
            async with asyncio.timeout(self._connect_timeout_s) as timeout:
                self._dial_timeouts.add(timeout)
                try:
                    connection = await self._dial_until(peer, endpoint)
                finally:
                    self._dial_timeouts.discard(timeout)
        except TimeoutError:
            if self._is_closed:
                raise ClosedError(
                    "the transport was closed while it connected; connect again"
                ) from None
            failure = endpoint.policy.failure
            cause = f": {failure}" if failure is not None else ""
            raise UnavailableError(
                f"{endpoint.where} did not answer within {self._connect_timeout_s:g} s{cause}"
            ) from None
        finally:
            endpoint.dials -= 1
            endpoint.shared_dials -= not exclusive
            endpoint.wake()
        if self._is_closed:
            connection.close()
            await connection.closed()
            raise ClosedError("the transport was closed while it connected; connect again")
        connection.exclusive = exclusive
        endpoint.busy.add(connection)
        return connection

    async def _dial_until(self, peer: Peer, endpoint: _Endpoint) -> Connection:
        """Dial; the service address again, with pauses, unless nothing listens there."""
        policy = endpoint.policy
        make = partial(Connection, endpoint.put_back, endpoint.remove)
        fails_fast = action_for(peer, Health.FAILED) is Action.FAIL
        while True:
            wait_s = policy.wait_s(time.monotonic())
            if wait_s > 0:
                if fails_fast:
                    raise UnavailableError(f"{policy.failure}")
                await asyncio.sleep(wait_s)
            try:
                connection = await dial(
                    endpoint.address,
                    endpoint.where,
                    self._tls,
                    self.hello_timeout_s,
                    make,
                    has_spoken=endpoint.has_spoken,
                )
            except NotStreamError:
                raise
            except UnavailableError as error:
                policy.failed(time.monotonic(), error)
                cause = error.__cause__
                is_wrong = isinstance(cause, WRONG) or isinstance(error, HandshakeClosedError)
                if fails_fast or isinstance(cause, REFUSALS):
                    raise
                if is_wrong and not endpoint.has_spoken:
                    raise
                continue
            policy.succeeded()
            endpoint.has_spoken = True
            return connection


class Pools:
    """Pool of each event loop.

    A coroutine uses connections of the loop on which it runs. ``asyncio.run`` closes the pool of
    its loop in the end. The pool of a loop that was closed otherwise is dropped when the next loop
    comes. A forked child begins without pools; its parent's connections are untouched.

    Args:
        make: makes a pool on the running event loop.
    """

    def __init__(self, make: Callable[[], Pool]) -> None:
        self._make = make
        self._pools: dict[asyncio.AbstractEventLoop, Pool] = {}
        self._closers: dict[Pool, AsyncGenerator[None, None]] = {}
        self._process_id = os.getpid()
        self._inherited: list[Pool] = []  # never collected: that would warn of open sockets
        self._is_closed = False

    def __len__(self) -> int:
        return sum(len(pool) for pool in self._pools.values())

    def here(self) -> Pool:
        """Return the pool of the running event loop.

        Raises:
            ClosedError: the transport is closed.
        """
        pool = self._pools.get(asyncio.get_running_loop())
        return self._add() if pool is None or self._is_closed else pool

    async def aclose(self) -> None:
        """Close all connections of all loops. Calls under way are cancelled."""
        self._is_closed = True
        pools, self._pools = self._pools, {}
        if self._process_id != os.getpid():
            return
        here = asyncio.get_running_loop()
        own = pools.pop(here, None)
        closings = []
        for loop, pool in pools.items():
            if loop.is_running():
                closing = asyncio.run_coroutine_threadsafe(self._close(pool), loop)
                closings.append(asyncio.wrap_future(closing))
            else:
                _shut_down(pool)
        if own is not None:
            await self._close(own)
        if closings:
            # Another loop may be busy, or about to end.
            await asyncio.wait(closings, timeout=2 * CLOSE_TIMEOUT_S)

    def _add(self) -> Pool:
        """Make the pool of the running event loop, and drop those of loops that ended."""
        if self._process_id != os.getpid():
            self._process_id = os.getpid()
            self._abandon_inherited()
        for loop in [loop for loop in tuple(self._pools) if loop.is_closed()]:
            pool = self._pools.pop(loop)
            del self._closers[pool]
            _shut_down(pool)
        pool = self._make()
        self._pools[pool.loop] = pool
        if self._is_closed:  # before, or by another thread meanwhile
            self._pools.pop(pool.loop, None)
            pool.stop()
            raise ClosedError("the transport was closed; connect again")
        closer = self._closers[pool] = _close_with_loop(pool)
        pool.loop.create_task(_begin(closer), name="closer of connections")
        return pool

    async def _close(self, pool: Pool) -> None:
        await pool.aclose()
        await self._closers.pop(pool).aclose()

    def _abandon_inherited(self) -> None:
        """In a forked child, release the sockets of the parent's loops."""
        for pool in self._pools.values():
            for connection in pool.connections():
                connection.abandon()
        self._inherited += self._pools.values()
        self._pools.clear()


async def _begin(closer: AsyncGenerator[None, None]) -> None:
    """Begin a generator, unless its pool was closed before this task ran."""
    await anext(closer, None)


async def _close_with_loop(pool: Pool) -> AsyncGenerator[None, None]:
    """Close a pool when its loop closes its asynchronous generators, as ``asyncio.run`` does."""
    try:
        yield
    finally:
        await pool.aclose()


def _shut_down(pool: Pool) -> None:
    """End the connections of a pool whose loop does not run any more."""
    for connection in pool.connections():
        connection.shut_down()
