"""Appends over the stream transport from plain code, on the caller's own thread.

A hop to the event loop's thread and back costs several times as much as the append itself. So there
are connections for plain code: one send and one read for an append. Any thread may make one. It has
a connection to itself meanwhile, and idle connections are kept.

An append that may have been sent is never repeated here.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Sequence

from gazette_sdk.errors import (
    ClosedError,
    ConfigurationError,
    StreamProtocolError,
    UnavailableError,
)
from gazette_sdk.transport.backoff import DialPolicy
from gazette_sdk.transport.target import Destination
from gazette_sdk.transport.wires.base import InlineSender
from gazette_sdk.transport.wires.stream.blocking_connection import (
    BlockingConnection,
    StreamBlockingCall,
)
from gazette_sdk.transport.wires.stream.call import Head, too_long
from gazette_sdk.transport.wires.stream.dialing import TlsContext, dial_blocking

__all__ = ["BlockingClient"]

DIAL_TIMEOUT_S = 1.0
"""Time limit of each step of a dial. The event loop's dials take longer, and serve who fails
here."""

REDIAL_AFTER_S = 0.5
"""Time for which a server that could not be dialled is left to the event loop. Doubles each
time."""

REDIAL_AFTER_MAX_S = 60.0

IDLE_MAX = 8
"""Idle connections to one server that are kept."""

IDLE_MAX_S = 30.0
"""A connection that was idle for so long is closed when the next one becomes idle."""


class BlockingClient(InlineSender):
    """Connections for plain code, to all servers. Safe to use from any thread.

    A forked child begins with none: its parent's are untouched.

    Args:
        tls: for endpoints of scheme ``https``.
        call_timeout_s: time limit of an append; 0 for none. The server has it, too.
    """

    def __init__(self, tls: TlsContext, *, call_timeout_s: float = 0.0) -> None:
        self.is_closed = False
        self._tls = tls
        self._call_timeout_s = call_timeout_s
        self._head = Head(timeout_s=call_timeout_s)
        self._plain_head = self._head.encoded(None)
        self._lock = threading.RLock()  # a signal handler may publish within
        self._idle: dict[str, list[BlockingConnection]] = {}
        self._busy: dict[BlockingConnection, str] = {}
        self._policies: dict[str, DialPolicy] = {}
        self._sweep_at = 0.0
        _clients.add(self)

    def append(self, to: Destination, opening: bytes, content: bytes) -> StreamBlockingCall | None:
        """See :meth:`InlineSender.append`."""
        connection = self._take(to)
        if connection is None:
            return None
        token = to.authorization
        try:
            head = self._plain_head if token is None else self._head.encoded(token)
            _, data = connection.calls.append(opening, content, head)
            call = StreamBlockingCall(self, connection, to, self._call_timeout_s)
            call.send(data)
        except StreamProtocolError as error:
            self.give_back(connection)
            raise too_long(to, error) from error
        except BaseException:
            self.discard(connection)
            raise
        return call

    def prepare(self, to: Destination) -> None:
        """See :meth:`InlineSender.prepare`."""
        endpoint = to.peer.endpoint
        with self._lock:
            if self.is_closed:
                raise _closed_error(to)
            policy = self._policies.get(endpoint)
            if policy is not None and not policy.may_dial(time.monotonic()):
                raise UnavailableError(f"{policy.failure}", journal=to.journal)
            count = len(self._idle.get(endpoint, ())) + list(self._busy.values()).count(endpoint)
        if count < IDLE_MAX:
            self.give_back(self._dial(to))

    def close(self) -> None:
        """Close all connections. Appends under way end as closed."""
        with self._lock:
            self.is_closed = True
            idle = [each for kept in self._idle.values() for each in kept]
            busy = list(self._busy)
            self._idle.clear()
        for connection in idle:
            connection.close()
        for connection in busy:
            connection.interrupt()

    # ------------------------------------------------------------ by its calls

    def give_back(self, connection: BlockingConnection) -> None:
        """Keep the connection of a call that has ended."""
        now = connection.idle_since = time.monotonic()
        closing: Sequence[BlockingConnection] = ()
        with self._lock:
            endpoint = self._busy.pop(connection, "")
            if endpoint and not self.is_closed and connection.calls.may_begin:
                kept = self._idle.setdefault(endpoint, [])
                kept.append(connection)
                if len(kept) > IDLE_MAX:
                    closing = (kept.pop(0),)
            else:
                closing = (connection,)
            if now >= self._sweep_at:
                self._sweep_at = now + IDLE_MAX_S
                closing = (*closing, *self._sweep(now))
        for each in closing:
            each.close()

    def discard(self, connection: BlockingConnection) -> None:
        """Close a connection which takes no further call."""
        with self._lock:
            self._busy.pop(connection, None)
        connection.close()

    # ------------------------------------------------------------------- parts

    def _take(self, to: Destination) -> BlockingConnection | None:
        endpoint = to.peer.endpoint
        while True:
            with self._lock:
                if self.is_closed:
                    raise _closed_error(to)
                try:
                    connection = self._idle[endpoint].pop()
                except LookupError:  # none is idle
                    return None
                self._busy[connection] = endpoint
            if connection.take():
                return connection
            self.discard(connection)

    def _dial(self, to: Destination) -> BlockingConnection:
        endpoint = to.peer.endpoint
        try:
            connection = dial_blocking(
                endpoint, to.where, self._tls, DIAL_TIMEOUT_S, BlockingConnection
            )
        except (UnavailableError, ConfigurationError) as error:
            with self._lock:
                policy = self._policies.setdefault(
                    endpoint, DialPolicy(REDIAL_AFTER_S, REDIAL_AFTER_MAX_S)
                )
                policy.failed(time.monotonic(), error)
            raise
        with self._lock:
            self._policies.pop(endpoint, None)
            if not self.is_closed:
                self._busy[connection] = endpoint
                return connection
        connection.close()
        raise _closed_error(to)

    def _sweep(self, now: float) -> list[BlockingConnection]:
        """Take out what is idle for long. Under the lock."""
        old = []
        for endpoint, kept in list(self._idle.items()):
            old += [each for each in kept if now - each.idle_since >= IDLE_MAX_S]
            kept[:] = [each for each in kept if now - each.idle_since < IDLE_MAX_S]
            if not kept:
                del self._idle[endpoint]
        for endpoint, policy in list(self._policies.items()):
            if policy.may_dial(now - REDIAL_AFTER_MAX_S):
                del self._policies[endpoint]
        return old

    def reset_after_fork(self) -> None:
        """Release the connections in a forked child: they are the parent's.

        Another thread of the parent may have held the lock.
        """
        self._lock = threading.RLock()
        for connection in [*self._busy, *(each for kept in self._idle.values() for each in kept)]:
            connection.close()  # this process' descriptor of it; nothing is sent
        self._idle.clear()
        self._busy.clear()


def _closed_error(to: Destination) -> ClosedError:
    return ClosedError("the transport was closed; connect again", journal=to.journal)


_clients: weakref.WeakSet[BlockingClient] = weakref.WeakSet()


def _reset_after_fork() -> None:
    for client in list(_clients):
        client.reset_after_fork()


os.register_at_fork(after_in_child=_reset_after_fork)
