"""Appends over the stream transport from plain code, on the caller's own thread.

What a hop to the event loop's thread and back costs is a multiple of the append itself. So there
are connections for plain code: one send and one read for an append. Any thread may make one; each
has a connection to itself meanwhile, and idle ones are kept. To open one is another's work, who
has time for it.

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
from gazette_sdk.protocol.stream_frames import CallHead
from gazette_sdk.transport.target import Destination
from gazette_sdk.transport.wires.stream.blocking_call import StreamBlockingCall
from gazette_sdk.transport.wires.stream.blocking_connection import (
    BlockingConnection,
    BlockingDialer,
)
from gazette_sdk.transport.wires.stream.outcome import too_long

__all__ = ["BlockingClient"]

DIAL_TIMEOUT_S = 1.0
"""What a dial may take: the event loop's are patient, and are there for whoever fails here."""

REDIAL_AFTER_S = 0.5
"""A server that could not be dialled is left to the event loop for so long. Doubles each time."""

REDIAL_AFTER_MAX_S = 60.0

IDLE_MAX = 8
"""Idle connections to one server that are kept."""

IDLE_MAX_S = 30.0
"""What was idle for so long is closed by whoever is next done with another one."""


class BlockingClient:
    """Connections for plain code, to all servers. Safe to use from any thread.

    A forked child begins with none: its parent's are untouched.

    Args:
        dialer: opens connections.
        call_timeout_s: what an append may take; 0 for any time. The server is told.
    """

    def __init__(self, dialer: BlockingDialer, *, call_timeout_s: float = 0.0) -> None:
        self.is_closed = False
        self._dialer = dialer
        self._call_timeout_s = call_timeout_s
        self._timeout_ms = max(1, round(call_timeout_s * 1000)) if call_timeout_s else 0
        self._head = CallHead(timeout_ms=self._timeout_ms).SerializeToString()
        self._lock = threading.Lock()
        self._idle: dict[str, list[BlockingConnection]] = {}
        self._busy: dict[BlockingConnection, str] = {}
        self._failed_dials: dict[str, tuple[float, int]] = {}  # not before when, how many
        self._sweep_at = 0.0
        _clients.add(self)

    def is_connected(self, endpoint: str) -> bool:
        """Whether there is a connection to a server, which so speaks this wire."""
        return bool(self._idle.get(endpoint)) or endpoint in self._busy.values()

    def takes(self, endpoint: str) -> bool:
        """Whether an append to a server is worth a try."""
        failed = self._failed_dials.get(endpoint)
        return not self.is_closed and (failed is None or time.monotonic() >= failed[0])

    def append(self, to: Destination, opening: bytes, content: bytes) -> StreamBlockingCall | None:
        """Send a whole append. If this raises, nothing of it was sent.

        Args:
            to: the broker; not the service address.
            opening: the encoded request that names the journal.
            content: of one frame.

        Returns:
            The append; ``None`` where no connection is idle: :meth:`prepare` opens one.

        Raises:
            CallError: the append is too long for the broker.
            ClosedError: the client is closed.
        """
        connection = self._take(to)
        if connection is None:
            return None
        try:
            head = self._head if to.authorization is None else self._head_with(to.authorization)
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
        """Open an idle connection, unless there are enough.

        Raises:
            UnavailableError: the broker cannot be reached, or speaks another wire.
            ConfigurationError: a certificate cannot be used.
            ClosedError: the client is closed.
        """
        endpoint = to.peer.endpoint
        with self._lock:
            if self.is_closed:
                raise _closed_error(to)
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
        """A call has ended; another may follow on its connection."""
        now = connection.freed_at = time.monotonic()
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
                closing = (*closing, *self._swept(now))
        for each in closing:
            each.close()

    def discard(self, connection: BlockingConnection) -> None:
        """A connection is of no use any more."""
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
                idle = self._idle.get(endpoint)
                if not idle:
                    return None
                connection = idle.pop()
                self._busy[connection] = endpoint
            if connection.take():
                return connection
            self.discard(connection)

    def _dial(self, to: Destination) -> BlockingConnection:
        endpoint = to.peer.endpoint
        try:
            connection = self._dialer.dial(endpoint, to.where, DIAL_TIMEOUT_S)
        except (UnavailableError, ConfigurationError):
            with self._lock:
                _, count = self._failed_dials.get(endpoint, (0.0, 0))
                wait_s = min(REDIAL_AFTER_S * 2.0**count, REDIAL_AFTER_MAX_S)
                self._failed_dials[endpoint] = time.monotonic() + wait_s, min(count + 1, 30)
            raise
        with self._lock:
            self._failed_dials.pop(endpoint, None)
            if not self.is_closed:
                self._busy[connection] = endpoint
                return connection
        connection.close()
        raise _closed_error(to)

    def _head_with(self, authorization: str) -> bytes:
        head = CallHead(timeout_ms=self._timeout_ms)
        head.metadata["authorization"] = authorization
        return head.SerializeToString()

    def _swept(self, now: float) -> list[BlockingConnection]:
        """Take out what is idle for long. Under the lock."""
        old = []
        for endpoint, kept in list(self._idle.items()):
            old += [each for each in kept if now - each.freed_at >= IDLE_MAX_S]
            kept[:] = [each for each in kept if now - each.freed_at < IDLE_MAX_S]
            if not kept:
                del self._idle[endpoint]
        for endpoint, (after, _) in list(self._failed_dials.items()):
            if now >= after + REDIAL_AFTER_MAX_S:
                del self._failed_dials[endpoint]
        return old

    def begin_anew(self) -> None:
        """In a forked child: the connections are the parent's.

        Another of its threads may have held the lock.
        """
        self._lock = threading.Lock()
        for connection in [*self._busy, *(each for kept in self._idle.values() for each in kept)]:
            connection.close()  # this process' number of it, and nothing is said
        self._idle.clear()
        self._busy.clear()


def _closed_error(to: Destination) -> ClosedError:
    return ClosedError("the transport was closed; connect again", journal=to.journal)


_clients: weakref.WeakSet[BlockingClient] = weakref.WeakSet()


def _begin_anew() -> None:
    for client in list(_clients):
        client.begin_anew()


os.register_at_fork(after_in_child=_begin_anew)
