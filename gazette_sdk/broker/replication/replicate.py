"""The replica's side of replication: a primary's stream, applied to our spool (section 6.3).

The stream owns the spool while it lasts. At its end, whatever the reason, uncommitted content is
rolled back, and the spool is free for the next stream. A stream whose route is not the journal's
any more ends even if its primary sends nothing (`PrimaryRequests`): a frozen primary must not keep
the spool from its successor.

A primary begins and ends its pipeline here, too (:func:`start_pipeline`): it owns the replica's
spool in between. :func:`while_routed` does work only for as long as the journal has the route with
which it was begun.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeAlias, TypeVar

from gazette_sdk.broker.replica import Replica
from gazette_sdk.broker.replication.peer_stream import OpenStream, PeerStreams
from gazette_sdk.broker.replication.pipeline import InvalidatedError, Pipeline, Signal
from gazette_sdk.broker.resolver import Resolution, Resolver
from gazette_sdk.broker.spool.spool import Spool
from gazette_sdk.errors import (
    STATUS_NAMES,
    CallError,
    GazetteError,
    UnavailableError,
    ValidationError,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Claims
from gazette_sdk.protocol.rules import validate
from gazette_sdk.tracing import is_sampled, served_span
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.wire import ReplicateItem, Target


async def start_pipeline(
    replica: Replica, resolution: Resolution, peers: Transport, streams: PeerStreams
) -> Pipeline:
    """Return a new pipeline over a route, not synchronized yet. The caller owns its slot.

    Args:
        replica: ours.
        resolution: of the journal, to us.
        peers: carries replication.
        streams: those of this broker.

    Raises:
        InvalidatedError: the resolution is old.
        UnavailableError: another stream did not release our spool in time.
    """
    header = resolution.header
    try:
        async with asyncio.timeout(streams.answer_timeout_s):
            spool = await replica.spool.take(resolution.invalidated)
    except TimeoutError:
        raise UnavailableError(
            "the journal's former primary still holds our replica; try again",
            journal=resolution.journal,
        ) from None
    open_stream = _opener(peers, header.route)
    peer_streams = [
        streams.open(member, open_stream)
        for member in header.route.members
        if member != header.process_id
    ]
    if peer_streams:
        replica.index.hold(is_reported=False)
    return Pipeline(
        header,
        spool,
        peer_streams,
        acknowledged_end=replica.index.readable_end,
        on_acknowledged=replica.acknowledge,
    )


async def tear_down_pipeline(replica: Replica, pipeline: Pipeline) -> None:
    """Release the spool, and let the streams end in the background.

    A pulse makes a new pipeline, if there is something that this one cannot do any more: report to
    the peers what all of them have, or show a commit whose append was given up.
    """
    replica.ready = None
    try:
        await pipeline.tear_down()
    finally:
        replica.spool.put(pipeline.spool)
    replica.in_background(pipeline.ended())
    is_shown = pipeline.spool.fragment.end <= replica.index.readable_end
    if pipeline.peers_may_be_ahead or not is_shown:
        replica.want_pulse()


def _opener(peers: Transport, route: pb.Route) -> OpenStream:
    def open_stream(
        peer: pb.ProcessSpec.ID, requests: AsyncIterator[ReplicateItem]
    ) -> AsyncIterator[pb.ReplicateResponse]:
        return peers.replicate(requests, Target(route=route, member=peer))

    return open_stream


T = TypeVar("T")


async def while_routed(
    work: Coroutine[Any, Any, T], resolver: Resolver, replica: Replica, header: pb.Header
) -> T:
    """Run ``work`` to its end, or until the journal has another route.

    Changes of the journal's keys that leave its route as it is, such as the write of the
    synchronized route or of the stores, do not end it.

    Args:
        work: is cancelled at its end.
        resolver: gives the journal's present route.
        replica: ours, of the journal.
        header: of the journal's resolution with which the work began.

    Raises:
        InvalidatedError: the journal has another route.
    """
    task = asyncio.ensure_future(work)
    signal, handle, is_outdated = replica.signal, 0, False

    def check() -> None:
        nonlocal signal, handle, is_outdated
        if not resolver.has_route(replica, header):
            is_outdated = True
            task.cancel()
            return
        signal = replica.signal
        if not signal.fired:  # else it is the last one: the replica shuts down
            handle = signal.on_fire(check)

    check()
    try:
        await asyncio.wait([task])
    finally:
        signal.forget(handle)
        task.cancel()  # does nothing to a task that is done
    if is_outdated and task.cancelled():
        raise InvalidatedError
    return task.result()


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
        hand_over_s: longest silence of a primary after a change of the route.
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


async def replicate(
    resolver: Resolver,
    requests: AsyncIterator[ReplicateItem],
    claims: Claims,
    *,
    hand_over_s: float = HAND_OVER_S,
    on_broken: OnBroken | None = None,
) -> AsyncGenerator[pb.ReplicateResponse]:
    """Serve one Replicate stream.

    Args:
        resolver: resolves the journal.
        requests: of the primary. The first is a proposal with the primary's header.
        claims: what the caller may do.
        hand_over_s: see :class:`PrimaryRequests`.
        on_broken: called with the primary if its stream breaks: it may be dead.

    Yields:
        one response per request that asks for acknowledgement.

    Raises:
        GazetteError: a request is invalid, out of order, or refused without having asked for
            acknowledgement; the header is not for us; or the journal has another route now.
    """
    first = await anext(requests, None)
    if first is None:
        return
    if not isinstance(first, bytes):
        validate(first)
    if isinstance(first, bytes) or not first.HasField("header"):
        raise ValidationError(
            "the first request must have a header", kind="expected_header", path="Header"
        )

    resolution, spool = await _take_spool(resolver, first, claims)
    if resolution.replica is None or spool is None:
        yield pb.ReplicateResponse(
            status=pb.WRONG_ROUTE if resolution.status == pb.OK else resolution.status,
            header=resolution.header,
        )
        return
    replica = resolution.replica
    following = PrimaryRequests(
        requests, resolver, replica, first.header, hand_over_s=hand_over_s, on_broken=on_broken
    )
    async with _owning(replica, spool, following):
        header: pb.Header | None = resolution.header
        request: pb.ReplicateRequest | None = first
        is_reported = first.HasField("acknowledged_through")
        revision = first.header.etcd.revision
        if is_reported:
            resolution.replica.index.hold(is_reported=True)
        while request is not None:
            response = await _apply(spool, request)
            _note(
                resolution.replica,
                request,
                response.status,
                is_reported=is_reported,
                revision=revision,
            )
            if request.acknowledge:
                if header is not None:
                    response.header.CopyFrom(header)
                    header = None
                yield response
            elif response.status != pb.OK:
                raise CallError(
                    f"{STATUS_NAMES[response.status]}, and the proposal asked for no "
                    f"acknowledgement: this replica holds {_span(response.fragment)}",
                    journal=resolution.journal,
                )
            request = await _next_request(spool, following)


def _apply(spool: Spool, request: pb.ReplicateRequest) -> Awaitable[pb.ReplicateResponse]:
    """Apply a request of the primary to our spool."""
    if request.traceparent and is_sampled(request.traceparent):
        return _apply_traced(spool, request)
    return spool.apply(request, primary=False)


async def _apply_traced(spool: Spool, request: pb.ReplicateRequest) -> pb.ReplicateResponse:
    """Apply a request within a span."""
    span = served_span("replicate", spool.journal, request.traceparent)
    if span is None:
        return await spool.apply(request, primary=False)
    begin = spool.fragment.end
    try:
        response = await spool.apply(request, primary=False)
    except BaseException as error:
        span.fail(error)
        raise
    if response.status == pb.OK:
        span.end(pb.Fragment(begin=begin, end=spool.fragment.end))
    else:
        span.refuse(STATUS_NAMES[response.status])
    return response


async def _next_request(spool: Spool, following: PrimaryRequests) -> pb.ReplicateRequest | None:
    """Return the next request, after content that is written; ``None`` at the half-close."""
    while isinstance(item := await following.next(), bytes):
        await spool.write(item, spool.uncommitted_bytes)
    return item


async def _take_spool(
    resolver: Resolver, first: pb.ReplicateRequest, claims: Claims
) -> tuple[Resolution, Spool | None]:
    """Resolve, and take our spool; ``None`` if we resolve another process or route."""
    while True:
        resolution = await resolver.resolve(
            first.proposal.journal,
            claims,
            may_proxy=False,
            require_primary=False,
            proxy_header=first.header,
        )
        if resolution.status != pb.OK:
            return resolution, None
        replica = resolution.replica
        assert replica is not None, "it resolves to us only where we have a replica"
        if not resolver.has_route(replica, first.header):
            return resolution, None
        try:
            return resolution, await replica.spool.take(resolution.invalidated)
        except InvalidatedError:
            continue


def _note(
    replica: Replica,
    request: pb.ReplicateRequest,
    status: pb.Status,
    *,
    is_reported: bool,
    revision: int,
) -> None:
    """Note what the primary reports: what all replicas have acknowledged, and what is stored.

    A primary of another implementation does not report that: our commits are shown then.

    Args:
        replica: ours.
        request: of the primary.
        status: of our response.
        is_reported: True if the primary reports what all replicas have acknowledged.
        revision: of Etcd as the primary saw it when the stream began.
    """
    if request.HasField("acknowledged_through"):
        replica.index.acknowledge(request.acknowledged_through)
    elif not is_reported and status == pb.OK:
        replica.show_commits(request.proposal.end)
    if request.stored_through:
        replica.index.expect_stored(request.stored_through)
    if request.acknowledge and request.proposal.end > 0 and status == pb.OK:
        replica.head_is_known = True
        if not replica.is_synchronized:
            replica.is_synchronized = True
            replica.joined_revision = revision
            replica.want_copies()


@asynccontextmanager
async def _owning(
    replica: Replica, spool: Spool, following: PrimaryRequests
) -> AsyncIterator[None]:
    try:
        replica.is_synchronized = False
        yield
    finally:
        following.close()
        try:
            await spool.roll_back()
        finally:
            replica.spool.put(spool)


def _span(fragment: pb.Fragment) -> str:
    return f"[{fragment.begin}, {fragment.end})"
