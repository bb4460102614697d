"""Requests of a journal's primary, for as long as the journal has the route of their stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TypeAlias

from gazette_sdk.broker.replica import Replica
from gazette_sdk.broker.resolver import Resolver
from gazette_sdk.broker.slot import Signal
from gazette_sdk.errors import GazetteError, UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.rules import validate
from gazette_sdk.transport.wire import ReplicateItem

__all__ = ["HAND_OVER_S", "OnBroken", "PrimaryRequests"]

OnBroken: TypeAlias = Callable[[pb.ProcessSpec.ID, object], None]
"""Called with a broker whose stream broke, and the reason."""

HAND_OVER_S = 1.0
"""Default time for which a primary that is a member may be silent after its route has changed."""


class PrimaryRequests:
    """Requests that follow the first one of a Replicate stream.

    The stream ends when the journal's route has become another one than that of its header. The
    primary of the old route may not see the change as soon as we do, and finishes its append in
    progress: while it is a member of the cluster, the stream ends only if it sends nothing for
    ``hand_over_s``. If its member key is gone, the stream ends at once.

    Args:
        requests: of the primary.
        resolver: gives the journal's present route.
        replica: ours, whose spool the stream owns.
        header: of the first request.
        hand_over_s: longest silence of a primary behind a change of the route.
        on_broken: called if the stream ends without a half-close, other than by us.
    """

    def __init__(
        self,
        requests: AsyncIterator[ReplicateItem],
        resolver: Resolver,
        replica: Replica,
        header: pb.Header,
        *,
        hand_over_s: float,
        on_broken: OnBroken | None = None,
    ) -> None:
        self._requests = requests
        self._resolver = resolver
        self._replica = replica
        self._header = header
        self._route = header.route
        self._hand_over_s = hand_over_s
        self._on_broken = on_broken
        self._primary_key = self._key_of_primary()
        self._is_outdated = False
        self._over = asyncio.Event()
        self._waiting: asyncio.Task[object] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._signal: Signal = replica.signal
        self._handle = 0
        self._check()

    async def next(self) -> ReplicateItem | None:
        """Return the next item, validated; ``None`` at the primary's half-close.

        Only the wait for a request is cut short, never the code that applies one.

        Raises:
            UnavailableError: the journal has another route now.
            ValidationError: the request is invalid.
        """
        if self._over.is_set():
            raise self._error()
        task = asyncio.current_task()
        assert task is not None, "coroutines of the broker run in tasks"
        cancelling = task.cancelling()
        self._waiting = task
        if self._is_outdated:
            self._start_timer()
        try:
            item = await anext(self._requests, None)
        except asyncio.CancelledError:
            if self._over.is_set() and task.uncancel() <= cancelling:
                raise self._error() from None
            self._report("the connection was lost")
            raise
        except GazetteError as error:
            self._report(error)
            raise
        finally:
            self._waiting = None
            self._stop_timer()
        if isinstance(item, pb.ReplicateRequest):
            validate(item)
        return item

    def close(self) -> None:
        """Forget the signal of the replica. The stream has ended."""
        self._signal.forget(self._handle)
        self._stop_timer()

    def _report(self, reason: object) -> None:
        if self._on_broken is not None and self._route.primary >= 0:
            self._on_broken(self._route.members[self._route.primary], reason)

    def _check(self) -> None:
        """Compare the routes, now and at each change of the journal's keys."""
        self._stop_timer()
        self._is_outdated = not self._resolver.has_route(self._replica, self._header)
        if self._is_outdated:
            if not self._primary_key or self._key_of_primary() != self._primary_key:
                self._end()
                return
            if self._waiting is not None:
                self._start_timer()
        self._signal = self._replica.signal
        if not self._signal.fired:  # else it is the last one: the replica shuts down
            self._handle = self._signal.on_fire(self._check)

    def _key_of_primary(self) -> int:
        """Return the create revision of the member key of the stream's primary; 0 for none."""
        if self._route.primary < 0:
            return 0
        return self._resolver.member_revision(self._route.members[self._route.primary])

    def _start_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._hand_over_s, self._end)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        self._over.set()
        if self._waiting is not None:
            self._waiting.cancel()

    def _error(self) -> UnavailableError:
        return UnavailableError(
            "the journal has another route than this stream; resolve again",
            journal=self._replica.journal,
        )
