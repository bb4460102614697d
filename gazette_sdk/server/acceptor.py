"""Acceptor of the connections of a listening socket.

It takes the place of asyncio's server, which accepts all connections that wait in one turn of the
event loop. When the process has no free descriptor, that server also logs a traceback and starts a
timer for each of them.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable

from gazette_sdk.server.peer_limits import UnknownCost, UnknownShare

__all__ = ["ACCEPTS_PER_TURN", "Acceptor"]

_log = logging.getLogger(__name__)

ACCEPTS_PER_TURN = 4
"""Connections accepted in one turn of the event loop. Thousands of new connections must not keep
the loop from those that are served."""

PACE_S = 0.004
"""Pause after so many, if more may wait: at most 1,000 connections are made per second. Clients of
the stream transport wait one second for the answer to their preface, before they choose gRPC."""

SLOW_PACE_S = 0.03
"""The longest such pause, while unknown clients have used more than their share of a core."""

RETRY_S = 0.5
"""Pause after the process was out of descriptors or memory. Connections wait in the kernel."""

WARN_PERIOD_S = 60.0
"""Period of the warnings while this goes on."""

_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Acceptor:
    """Accepts the connections of one socket, from its construction to :meth:`close`.

    Args:
        listening: the socket; closed by :meth:`close`.
        factory: makes the protocol object of a connection.
        tls: TLS to terminate on its connections.
        handshake_timeout_s: bound of the handshake of TLS.
        unknown: processor time of unknown clients.
    """

    def __init__(
        self,
        listening: socket.socket,
        factory: Callable[[], asyncio.BaseProtocol],
        *,
        tls: ssl.SSLContext | None,
        handshake_timeout_s: float,
        unknown: UnknownShare,
    ) -> None:
        self._unknown = unknown
        self._listening = listening
        self._factory = factory
        self._tls = tls
        self._handshake_timeout_s = handshake_timeout_s if tls is not None else None
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._quiet_until_s = 0.0
        self._loop.add_reader(listening, self._accept)

    def close(self) -> None:
        """Accept no further connections. Those that were accepted are still made."""
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._listening)
        self._listening.close()

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                connection, _address = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                self._warn(error)
                self._pause(RETRY_S)
                return
            connection.setblocking(False)
            self._unknown.spend(UnknownCost.CONNECTION)
            task = self._loop.create_task(self._make(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self._pause(max(PACE_S, min(self._unknown.delay_s, SLOW_PACE_S)))

    def _pause(self, pause_s: float) -> None:
        """Accept again after a pause. The kernel reports the socket as ready all the time."""
        self._loop.remove_reader(self._listening)
        self._retry = self._loop.call_later(
            pause_s, self._loop.add_reader, self._listening, self._accept
        )

    def _warn(self, error: OSError) -> None:
        now_s = self._loop.time()
        if now_s >= self._quiet_until_s:
            self._quiet_until_s = now_s + WARN_PERIOD_S
            _log.warning(
                "no connection can be accepted (%s); raise the limit of open files (ulimit -n), or "
                "stop the clients that hold too many connections",
                error.strerror,
            )

    async def _make(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._factory,
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=self._handshake_timeout_s,
            )
        except (OSError, TimeoutError) as error:  # errors of TLS are among the former
            _log.debug("a connection was not made: %s", error)
            connection.close()
