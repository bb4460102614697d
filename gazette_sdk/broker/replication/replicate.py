"""The replica's side of replication: a primary's stream, applied to our spool (section 6.3).

The stream owns the spool while it lasts. At its end, whatever the reason, uncommitted content is
rolled back, and the spool is free for the next stream. A stream whose route is not the journal's
any more ends even if its primary sends nothing (`primary_requests`): a frozen primary must not
keep the spool from its successor.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

from gazette_sdk.broker.replica import Replica
from gazette_sdk.broker.replication.primary_requests import HAND_OVER_S, OnBroken, PrimaryRequests
from gazette_sdk.broker.resolver import Resolution, Resolver
from gazette_sdk.broker.slot import InvalidatedError
from gazette_sdk.broker.spool.spool import Spool
from gazette_sdk.errors import STATUS_NAMES, CallError, ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Claims
from gazette_sdk.protocol.rules import validate
from gazette_sdk.transport.wire import ReplicateItem

__all__ = ["replicate"]


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
        is_told = first.HasField("acknowledged_through")
        if is_told:
            resolution.replica.index.hold(is_told=True)
        while request is not None:
            response = await spool.apply(request, primary=False)
            _note(resolution.replica, request, response.status, is_told=is_told)
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


async def _next_request(spool: Spool, following: PrimaryRequests) -> pb.ReplicateRequest | None:
    """Return the next request, behind content that is written; ``None`` at the half-close."""
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
    replica: Replica, request: pb.ReplicateRequest, status: pb.Status, *, is_told: bool
) -> None:
    """Note what the primary tells: what all replicas have acknowledged, and what is stored.

    A primary of another implementation does not tell that: our commits are shown then.
    """
    if request.HasField("acknowledged_through"):
        replica.index.acknowledge(request.acknowledged_through)
    elif not is_told and status == pb.OK:
        replica.show_commits(request.proposal.end)
    if request.stored_through:
        replica.index.expect_stored(request.stored_through)
    if request.acknowledge and request.proposal.end > 0 and status == pb.OK:
        replica.head_is_known = True
        if not replica.is_synchronized:
            replica.is_synchronized = True
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
