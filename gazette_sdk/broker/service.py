"""The journal service: the calls of a broker, the same for all fronts.

Each call takes the same steps: authorize, validate, resolve, then serve or proxy. Requests and
responses are the protocol's messages; a call which fails raises a
:class:`~gazette_sdk.errors.GazetteError`. Cancelling a call is safe at any moment.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from gazette_sdk.broker.append.append import Appends
from gazette_sdk.broker.append.common_case import InlineAppends, StartedAppend
from gazette_sdk.broker.listing import Listing, check_store, list_page
from gazette_sdk.broker.metrics import APPEND_SECONDS, SERVER_COMPLETED, SERVER_STARTED
from gazette_sdk.broker.read import FileSpan, ReadServer
from gazette_sdk.broker.replication.pipeline import Signal
from gazette_sdk.broker.replication.replicate import HAND_OVER_S, OnBroken, replicate
from gazette_sdk.broker.resolver import Resolution, Resolver
from gazette_sdk.errors import (
    STATUS_NAMES,
    CallError,
    UnavailableError,
)
from gazette_sdk.fragment.registry import StoreRegistry
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Capability, Claims
from gazette_sdk.protocol.journal_spec import may_read
from gazette_sdk.protocol.names import strip_meta
from gazette_sdk.protocol.rules import complete, validate
from gazette_sdk.server.authorization import Authorization, Call
from gazette_sdk.tracing import served_span
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.wire import AppendItem, ReplicateItem, Target

ReadItem = pb.ReadResponse | FileSpan | bytes
"""Item of a read: metadata, or content which continues where the item before it ended."""

T = TypeVar("T")

_REPLICATE_SECONDS = APPEND_SECONDS.buckets("replicate")


@dataclass(slots=True)
class _CallOutcome:
    """Outcome of a call, for its metric."""

    status: pb.Status = pb.OK


class JournalService:
    """The calls of a broker.

    Args:
        resolver: resolves journals.
        appends: serves appends.
        listing: serves List and Apply.
        reads: serves reads.
        stores: fragment stores.
        peers: carries calls to other brokers.
        authorization: verifies callers.
        hand_over_s: longest silence of a journal's former primary before its stream is ended.
        on_broken: called with a broker whose replication broke.
        outdated_uploads: :meth:`Persister.outdated_uploads` of this broker.

    Attributes:
        append_now: :meth:`InlineAppends.append_now` of this broker.
    """

    def __init__(
        self,
        *,
        resolver: Resolver,
        appends: Appends,
        listing: Listing,
        reads: ReadServer,
        stores: StoreRegistry,
        peers: Transport,
        authorization: Authorization,
        hand_over_s: float = HAND_OVER_S,
        on_broken: OnBroken | None = None,
        outdated_uploads: Callable[[str], int] = lambda _: 0,
    ) -> None:
        self._resolver = resolver
        self._appends = appends
        self._listing = listing
        self._reads = reads
        self._stores = stores
        self._peers = peers
        self._authorization = authorization
        self._hand_over_s = hand_over_s
        self._on_broken = on_broken
        self._outdated_uploads = outdated_uploads
        self.append_now = InlineAppends(appends, authorization.authority).append_now
        self._stopping = Signal()
        self._writing: set[asyncio.Task[object]] = set()

    def end_streams(self) -> None:
        """End reads and watches, cleanly: their clients go to another broker."""
        self._stopping.fire()

    @property
    def stopping(self) -> Signal:
        """Signal that fires with :meth:`end_streams`."""
        return self._stopping

    def cancel_writes(self) -> None:
        """Cancel appends and replication in progress; they are rolled back."""
        for task in self._writing:
            task.cancel()

    # --------------------------------------------------------- List, Apply

    async def list(self, request: pb.ListRequest, call: Call) -> AsyncGenerator[pb.ListResponse]:
        """Snapshots of the journals that match; with ``watch`` one after each change."""
        with _counted("List"):
            claims = self._authorization.verify(call, Capability.LIST)
            validate(request)
            timeout_s = self._authorization.remaining_s(claims)
            responses = self._listing.snapshots(request, claims)
            async for response in until_end(responses, timeout_s, self._stopping):
                yield response

    async def apply(self, request: pb.ApplyRequest, call: Call) -> pb.ApplyResponse:
        """Create, change and delete journals, in one transaction."""
        with _counted("Apply") as outcome:
            claims = self._authorization.verify(call, Capability.APPLY)
            validate(request)
            async with self._authorization.bound(claims, call):
                response = await self._listing.apply(request, claims)
            outcome.status = response.status
            return response

    # ---------------------------------------------------------------- Read

    async def read(self, request: pb.ReadRequest, call: Call) -> AsyncGenerator[ReadItem]:
        """Metadata and content of a journal, from an offset on."""
        with _counted("Read") as outcome:
            claims = self._authorization.verify(call, Capability.READ)
            validate(request)
            async with self._authorization.bound(claims, call):
                resolution = await self._resolver.resolve(
                    request.journal,
                    claims,
                    may_proxy=not request.do_not_proxy,
                    require_primary=False,
                    min_revision=request.min_etcd_revision,
                    proxy_header=request.header if request.HasField("header") else None,
                )
            outcome.status = _status_to_read(resolution)
            if outcome.status != pb.OK:
                yield pb.ReadResponse(
                    status=outcome.status,
                    header=self._authored(resolution),
                )
                return
            items: AsyncIterator[ReadItem]
            if resolution.is_local:
                assert resolution.replica is not None, "it resolves to us where we have a replica"
                items = self._reads.serve(
                    request,
                    resolution.replica.index,
                    resolution.header,
                    chunk_bytes=call.chunk_bytes,
                )
            else:
                proxied = pb.ReadRequest()
                proxied.CopyFrom(request)
                proxied.header.CopyFrom(resolution.header)
                items = self._peers.read(proxied, _target(resolution))
            timeout_s = self._authorization.remaining_s(claims)
            async for item in until_end(items, timeout_s, self._stopping):
                if isinstance(item, pb.ReadResponse):
                    outcome.status = item.status
                yield item

    # -------------------------------------------------------------- Append

    async def append(self, requests: AsyncIterator[AppendItem], call: Call) -> pb.AppendResponse:
        """Append the content of a stream to a journal, atomically."""
        with _counted("Append") as outcome, self._tracked():
            claims = self._authorization.verify(call, Capability.APPEND)
            opening = await _first_request(requests)
            validate(opening)
            async with self._authorization.bound(claims, call):
                if call.traceparent:
                    response = await self._append_traced(opening, requests, claims, call)
                else:
                    response = await self._appends.append(opening, requests, claims)
            outcome.status = response.status
            return response

    async def _append_traced(
        self,
        opening: pb.AppendRequest,
        requests: AsyncIterator[AppendItem],
        claims: Claims,
        call: Call,
    ) -> pb.AppendResponse:
        """Append within a span. A broker that does not trace hands the caller's context on."""
        span = served_span("append", strip_meta(opening.journal), call.traceparent)
        if span is None:
            return await self._appends.append(opening, requests, claims, call.traceparent)
        try:
            response = await self._appends.append(opening, requests, claims, span.traceparent)
        except BaseException as error:
            span.fail(error)
            raise
        if response.status == pb.OK:
            span.end(response.commit)
        else:
            span.refuse(STATUS_NAMES[response.status])
        return response

    async def append_acknowledged(self, started: StartedAppend) -> bytes:
        """Wait until an append is acknowledged. Return its encoded response."""
        result, begun_s = "<error>", time.monotonic()
        with self._tracked():
            try:
                await started.acknowledged()
                result = "ok"
            except BaseException as error:
                if started.span is not None:
                    started.span.fail(error)
                raise
            finally:
                SERVER_COMPLETED.inc("Append", result)
                _REPLICATE_SECONDS.observe(time.monotonic() - begun_s)
        if started.span is not None:
            started.span.end(started.commit)
        return started.response

    async def replicate(
        self, requests: AsyncIterator[ReplicateItem], call: Call
    ) -> AsyncGenerator[pb.ReplicateResponse]:
        """Apply the stream of a journal's primary to our replica."""
        with _counted("Replicate") as outcome, self._tracked():
            claims = self._authorization.verify(call, Capability.REPLICATE)
            served = replicate(
                self._resolver,
                requests,
                claims,
                hand_over_s=self._hand_over_s,
                on_broken=self._on_broken,
            )
            async with aclosing(served) as responses:
                async for response in responses:
                    outcome.status = response.status
                    yield response

    # ----------------------------------------------------------- fragments

    async def list_fragments(
        self, request: pb.FragmentsRequest, call: Call
    ) -> pb.FragmentsResponse:
        """One page of a journal's fragments."""
        with _counted("ListFragments") as outcome:
            claims = self._authorization.verify(call, Capability.READ)
            validate(request)
            async with self._authorization.bound(claims, call):
                resolution = await self._resolver.resolve(
                    request.journal,
                    claims,
                    may_proxy=not request.do_not_proxy,
                    require_primary=False,
                    proxy_header=request.header if request.HasField("header") else None,
                )
                outcome.status = _status_to_read(resolution)
                if outcome.status != pb.OK:
                    response = pb.FragmentsResponse(
                        status=outcome.status,
                        header=self._authored(resolution),
                    )
                elif resolution.replica is None:
                    proxied = pb.FragmentsRequest()
                    proxied.CopyFrom(request)
                    proxied.header.CopyFrom(resolution.header)
                    return await self._peers.list_fragments(proxied, _target(resolution))
                else:
                    response = await list_page(request, resolution.replica.index, self._stores)
                    response.header.CopyFrom(resolution.header)
            return complete(response)

    async def fragment_store_health(
        self, request: pb.FragmentStoreHealthRequest, call: Call
    ) -> pb.FragmentStoreHealthResponse:
        """The health of a fragment store, as this broker sees it."""
        with _counted("FragmentStoreHealth") as outcome:
            claims = self._authorization.verify(call, Capability.READ)
            validate(request)
            async with self._authorization.bound(claims, call):
                specs = (item.value for item in self._listing.keyspace.items())
                response = await check_store(request, self._stores, claims, specs)
            response.header.CopyFrom(self._listing.header())
            if request.count_uploads:  # as of that header
                response.outdated_uploads = self._outdated_uploads(request.fragment_store)
            outcome.status = response.status
            return complete(response)

    # -------------------------------------------------------------- inside

    def _authored(self, resolution: Resolution) -> pb.Header:
        """Return the header of a response other than OK: it names this broker."""
        header = pb.Header()
        header.CopyFrom(resolution.header)
        header.process_id.CopyFrom(self._resolver.local_id)
        return header

    @contextmanager
    def _tracked(self) -> Iterator[None]:
        task = asyncio.current_task()
        assert task is not None
        self._writing.add(task)
        try:
            yield
        finally:
            self._writing.discard(task)


async def _first_request(requests: AsyncIterator[AppendItem]) -> pb.AppendRequest:
    """Return the request which opens an append.

    Raises:
        CallError: there is nothing.
    """
    opening = await anext(requests, None)
    if opening is None:
        raise CallError("append stream: it ended before its first request")
    # Content where the journal should be named is a request without a journal.
    return opening if isinstance(opening, pb.AppendRequest) else pb.AppendRequest()


def _status_to_read(resolution: Resolution) -> pb.Status:
    if resolution.status == pb.OK:
        assert resolution.spec is not None
        if not may_read(resolution.spec):
            return pb.NOT_ALLOWED
    return resolution.status


def _target(resolution: Resolution) -> Target:
    """Return the member to proxy to, or any of the route.

    Raises:
        UnavailableError: its address is unknown: its member key is gone.
    """
    header = resolution.header
    if not any(header.route.endpoints):
        raise UnavailableError(
            "the brokers of this journal are gone from Etcd; try again", journal=resolution.journal
        )
    return Target(route=header.route)


@contextmanager
def _counted(operation: str) -> Iterator[_CallOutcome]:
    """Count a call and its outcome."""
    SERVER_STARTED.inc(operation)
    outcome = _CallOutcome()
    try:
        yield outcome
    except GeneratorExit:
        SERVER_COMPLETED.inc(operation, "ok")  # the client ended the stream
        raise
    except BaseException:
        SERVER_COMPLETED.inc(operation, "<error>")
        raise
    name = "ok" if outcome.status == pb.OK else STATUS_NAMES[outcome.status]
    SERVER_COMPLETED.inc(operation, name)


async def until_end(
    items: AsyncIterator[T], timeout_s: float | None, stopping: Signal
) -> AsyncGenerator[T]:
    """Yield items until the time is over or the broker stops, and end cleanly then.

    Only the wait for the next item is cut short, never the code that consumes the items. One
    timer serves the whole stream: a scope per item would cost more than most items.
    """
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    waiting: asyncio.Task[Any] | None = None

    def end() -> None:
        if not over.is_set():
            over.set()
            if waiting is not None:
                waiting.cancel()

    timer = None if timeout_s is None else loop.call_later(timeout_s, end)
    handle = stopping.on_fire(end)
    try:
        while not over.is_set():
            waiting = asyncio.current_task()
            assert waiting is not None, "coroutines of the broker run in tasks"
            cancelling = waiting.cancelling()
            try:
                item = await anext(items)
            except StopAsyncIteration:
                return
            except asyncio.CancelledError:
                if over.is_set() and waiting.uncancel() <= cancelling:
                    return
                raise
            finally:
                waiting = None
            yield item
    finally:
        if timer is not None:
            timer.cancel()
        stopping.forget(handle)
        if isinstance(items, AsyncGenerator):
            await items.aclose()
