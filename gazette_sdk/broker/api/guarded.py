"""Guard before the journal service of a public port: limits of calls by peer, and the audit log."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from enum import StrEnum

from aiohttp import web

from gazette_sdk.broker.api.fronts import Journals, ReadYield
from gazette_sdk.broker.append.common_case import StartedAppend
from gazette_sdk.errors import STATUS_NAMES, CallError, GazetteError, UnauthenticatedError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import AllowAll, Authority
from gazette_sdk.server.authorization import AuditEvent, AuditLog
from gazette_sdk.server.call import Call
from gazette_sdk.server.http import HttpHandler, Target, text_error
from gazette_sdk.server.listener import PeerLimits
from gazette_sdk.transport.wire import AppendItem, ReplicateItem

__all__ = ["AuditedCalls", "GuardedJournals", "with_call_limit"]

NAMES_MAX = 3
"""Greatest number of journals of one Apply that a record names."""


_TOO_MANY = "RESOURCE_EXHAUSTED"


class AuditedCalls(StrEnum):
    """Calls that are recorded in the audit log."""

    OFF = "off"
    REFUSALS = "refusals"
    ALL = "all"


class GuardedJournals:
    """Journal service whose calls are counted by peer, and recorded.

    Args:
        service: the service.
        authority: knows the identity of a token.
        limits: limits of each peer.
        audited: calls to record: refused ones, or writes, too.

    Attributes:
        append_now: the service's, which is not counted: it does not wait. It declines all appends
            if writes are recorded.
        append_acknowledged: the service's.
        audit: the log.
    """

    def __init__(
        self,
        service: Journals,
        authority: Authority | AllowAll,
        *,
        limits: PeerLimits,
        audited: AuditedCalls,
    ) -> None:
        self._service = service
        self._authority = authority
        self._limits = limits
        self._audited = audited
        self.audit = AuditLog()
        self.append_acknowledged = service.append_acknowledged
        self.append_now = _decline if audited is AuditedCalls.ALL else service.append_now

    async def list(self, request: pb.ListRequest, call: Call) -> AsyncGenerator[pb.ListResponse]:
        """See :class:`Journals`."""
        with self._guarded("List", call):
            async with aclosing(self._service.list(request, call)) as items:
                async for item in items:
                    yield item

    async def apply(self, request: pb.ApplyRequest, call: Call) -> pb.ApplyResponse:
        """See :class:`Journals`."""
        with self._guarded("Apply", call, _names_of(request)) as record:
            response = await self._service.apply(request, call)
            record.status = response.status
        return response

    async def read(self, request: pb.ReadRequest, call: Call) -> AsyncGenerator[ReadYield]:
        """See :class:`Journals`."""
        with self._guarded("Read", call, request.journal):
            async with aclosing(self._service.read(request, call)) as items:
                async for item in items:
                    yield item

    async def append(self, requests: AsyncIterator[AppendItem], call: Call) -> pb.AppendResponse:
        """See :class:`Journals`."""
        with self._guarded("Append", call) as record:
            if self._audited is AuditedCalls.ALL:
                requests = _Noted(requests, record)
            response = await self._service.append(requests, call)
            record.status = response.status
        return response

    async def replicate(
        self, requests: AsyncIterator[ReplicateItem], call: Call
    ) -> AsyncGenerator[pb.ReplicateResponse]:
        """See :class:`Journals`."""
        with self._guarded("Replicate", call):
            async with aclosing(self._service.replicate(requests, call)) as items:
                async for item in items:
                    yield item

    async def list_fragments(
        self, request: pb.FragmentsRequest, call: Call
    ) -> pb.FragmentsResponse:
        """See :class:`Journals`."""
        with self._guarded("ListFragments", call, request.journal):
            return await self._service.list_fragments(request, call)

    async def fragment_store_health(
        self, request: pb.FragmentStoreHealthRequest, call: Call
    ) -> pb.FragmentStoreHealthResponse:
        """See :class:`Journals`."""
        with self._guarded("FragmentStoreHealth", call):
            return await self._service.fragment_store_health(request, call)

    @contextmanager
    def _guarded(self, method: str, call: Call, journal: str = "") -> Iterator[_Record]:
        """Count a call of a peer, and record its outcome."""
        record = _Record(journal)
        try:
            with self._limits.calling(call.peer):
                yield record
        except UnauthenticatedError as error:
            self._record(method, call, record.journal, str(error), is_refusal=True)
            raise
        except GazetteError as error:
            is_refusal = isinstance(error, CallError) and error.code == _TOO_MANY
            if is_refusal or method in _WRITES:
                self._record(method, call, record.journal, str(error), is_refusal=is_refusal)
            raise
        if method in _WRITES:
            self._record(method, call, record.journal, record.outcome, is_refusal=False)

    def _record(
        self, method: str, call: Call, journal: str, outcome: str, *, is_refusal: bool
    ) -> None:
        if self._audited is AuditedCalls.OFF:
            return
        if not is_refusal and self._audited is not AuditedCalls.ALL:
            return
        subject, token_id = self._authority.identity(call.authorization)
        self.audit.record(
            AuditEvent(method, outcome, call.peer, journal, subject, token_id, is_refusal)
        )


_WRITES = frozenset({"Append", "Apply"})


class _Record:
    """Record of one call, as far as it is known."""

    __slots__ = ("journal", "status")

    def __init__(self, journal: str) -> None:
        self.journal = journal
        self.status: pb.Status = pb.OK

    @property
    def outcome(self) -> str:
        return "OK" if self.status == pb.OK else STATUS_NAMES[self.status]


def _decline(
    opening: bytes,  # noqa: ARG001 - see Journals.append_now
    content: bytes,  # noqa: ARG001
    call: Call,  # noqa: ARG001
    behind: object | None,  # noqa: ARG001
) -> StartedAppend | None:
    """Leave an append to :meth:`GuardedJournals.append`, which records it."""
    return None


class _Noted:
    """Messages of an append; the name of its journal is noted.

    Args:
        requests: the messages.
        record: gets the name.
    """

    def __init__(self, requests: AsyncIterator[AppendItem], record: _Record) -> None:
        self._requests = requests
        self._record = record

    def __aiter__(self) -> AsyncIterator[AppendItem]:
        return self

    async def __anext__(self) -> AppendItem:
        item = await anext(self._requests)
        if isinstance(item, pb.AppendRequest) and not self._record.journal:
            self._record.journal = item.journal
        return item


def _names_of(request: pb.ApplyRequest) -> str:
    names = [change.delete or change.upsert.name for change in request.changes[:NAMES_MAX]]
    more = len(request.changes) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


def with_call_limit(handler: HttpHandler) -> HttpHandler:
    """Return an HTTP handler that answers calls beyond a peer's limit with status 429."""

    async def handle(request: web.Request, target: Target) -> web.StreamResponse | None:
        try:
            return await handler(request, target)
        except CallError as error:
            if error.code != _TOO_MANY:
                raise
            return text_error(429, str(error))

    return handle
