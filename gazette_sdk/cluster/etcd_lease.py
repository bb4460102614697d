"""Renewal of a lease over the connections of an Etcd client.

It drives the state machine of :mod:`~gazette_sdk.cluster.lease_renewal`. Each renewal is a task of
its own, so that a second one can go over another connection while the first has no answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from gazette_sdk.cluster.etcd_connections import Connection, Connections
from gazette_sdk.cluster.lease_renewal import (
    Answered,
    Effect,
    Ended,
    Failed,
    Input,
    Tick,
    begin,
    step,
)
from gazette_sdk.errors import ConfigurationError, EtcdError, LeaseLostError
from gazette_sdk.outage import Outage

__all__ = ["keep_alive"]

Renew = Callable[[Connection, int, float], Awaitable[float]]
"""Renews a lease over a connection within a time, and returns its new time to live."""

_log = logging.getLogger(__name__)


async def keep_alive(
    connections: Connections,
    renew: Renew,
    lease: int,
    ttl_s: float,
    granted_at: float | None = None,
) -> None:
    """Renew a lease until cancelled.

    Args:
        connections: of the client.
        renew: renews it once.
        lease: its id.
        ttl_s: its time to live.
        granted_at: loop time at which its grant was requested; by default now.

    Raises:
        LeaseLostError: it ran out, or was revoked.
    """
    renewals = _Renewals(connections, renew, lease, ttl_s)
    try:
        await renewals.run(granted_at)
    finally:
        await renewals.aclose()


class _Renewals:
    """Renewals of one lease that are on their way, and their answers."""

    def __init__(self, connections: Connections, renew: Renew, lease: int, ttl_s: float) -> None:
        self._connections = connections
        self._renew = renew
        self._lease = lease
        self._ttl_s = ttl_s
        self._loop = asyncio.get_running_loop()
        self._inputs: asyncio.Queue[Input] = asyncio.Queue()
        self._sent: set[asyncio.Task[None]] = set()
        self._unanswered: Connection | None = None
        self._ending: Exception | None = None
        self._outage = Outage(_log, "renewal of the lease")

    async def run(self, granted_at: float | None) -> None:
        now = self._loop.time()
        state = begin(self._ttl_s, now if granted_at is None else granted_at)
        happened: Input = Tick()
        while True:
            state, effect = step(state, happened, now)
            if effect is Effect.LOST:
                raise self._ending or LeaseLostError(
                    f"unable to keep the lease alive: no renewal within {self._ttl_s:g} s"
                )
            if effect is not Effect.WAIT:
                self._send(state.sent_at, elsewhere=effect is Effect.SEND_ELSEWHERE)
            try:
                async with asyncio.timeout_at(state.wake_at):
                    happened = await self._inputs.get()
            except TimeoutError:
                happened = Tick()
            now = self._loop.time()

    async def aclose(self) -> None:
        """Cancel the renewals that are on their way, and wait for their ends."""
        for task in self._sent:
            task.cancel()
        await asyncio.gather(*self._sent, return_exceptions=True)

    def _send(self, sent_at: float, *, elsewhere: bool) -> None:
        task = self._loop.create_task(self._renew_once(sent_at, elsewhere=elsewhere))
        self._sent.add(task)
        task.add_done_callback(self._sent.discard)

    async def _renew_once(self, sent_at: float, *, elsewhere: bool) -> None:
        """Send one renewal, and queue its outcome."""
        suspect = self._unanswered if elsewhere else None
        connection: Connection | None = None
        try:
            if suspect is not None:
                connection = await self._connections.dial_other(suspect)
            else:
                connection = await self._connections.current(sent_at + self._ttl_s)
                self._unanswered = connection
            # Connecting took time, and Etcd counts from the receipt.
            ttl_s = await self._renew(connection, self._lease, self._ttl_s)
        except (EtcdError, ConfigurationError) as error:
            if isinstance(error, LeaseLostError):
                self._ending = error
                self._inputs.put_nowait(Ended())
            else:
                self._outage.failed(error)
                self._inputs.put_nowait(Failed(sent_at))
        except Exception as error:  # noqa: BLE001 -- raised by `run`: a closed client, or a defect
            self._ending = error
            self._inputs.put_nowait(Ended())
        else:
            self._outage.ended()
            if self._unanswered is connection:
                self._unanswered = None
            elif suspect is not None and self._unanswered is suspect:
                # Etcd answers here, and still not there.
                self._connections.adopt(connection, suspect)
                self._unanswered = None
            self._inputs.put_nowait(Answered(sent_at, ttl_s))
        finally:
            if suspect is not None and connection is not None:
                self._connections.discard(connection)
