"""Broker with its public port: gRPC, the stream transport and both gateways on one service."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from aiohttp import web

from gazette_sdk.broker.api.fronts import (
    AuditedCalls,
    GuardedJournals,
    Journals,
    guarded_methods,
    journal_methods,
    stream_methods,
    with_call_limit,
)
from gazette_sdk.broker.api.http_gateway import HttpGateway, json_methods
from gazette_sdk.broker.api.in_process import InProcessTransport
from gazette_sdk.broker.process import PERSIST_TIMEOUT_S, Broker, BrokerConfig
from gazette_sdk.broker.views.health import BrokerHealth
from gazette_sdk.broker.views.members import ClusterMembers
from gazette_sdk.broker.views.page import cluster_json_methods
from gazette_sdk.broker.views.problems import BROKER
from gazette_sdk.broker.views.report import ClusterReport
from gazette_sdk.console.content import ConsoleContent, Masking
from gazette_sdk.console.mount import PREFIX, console
from gazette_sdk.errors import UnauthenticatedError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Capability
from gazette_sdk.protocol.labels import matches_journal, rewrite_prefix
from gazette_sdk.protocol.rules import DRAIN_RPC, MEMBERS_RPC, REPORT_RPC
from gazette_sdk.retries import run_together
from gazette_sdk.server.authorization import AuditEvent, AuditLog
from gazette_sdk.server.grpc_server import Method
from gazette_sdk.server.health import Check, MemberHealth
from gazette_sdk.server.http import Target
from gazette_sdk.server.json_gateway import JsonGateway
from gazette_sdk.server.members import AT_PREFIX, MemberGateway
from gazette_sdk.server.process import STOP_GRACE_S, Server, raise_open_files_limit
from gazette_sdk.transport.base import Transport

DEV_PATH = "/v1/dev"
"""Path at which brokers of ``gazette dev`` tell the address of their Etcd."""


class AuditOutput(Protocol):
    """Second output of the audit logs of a broker."""

    def begin(self, transport: Transport) -> None:
        """Begin to write records.

        Args:
            transport: reaches journals through the broker, past its audit log. It is closed by
                :meth:`aclose`.
        """

    def put(self, event: AuditEvent | None, count: int) -> None:
        """Take a record; see :data:`~gazette_sdk.server.authorization.PutRecord`."""

    async def checks(self, authorization: str | None) -> Iterable[Check]:
        """Return the outcome of a check of the output."""

    async def aclose(self) -> None:
        """Write what is left, and end. Bounded."""


class ServedBroker:
    """A :class:`~gazette_sdk.broker.process.Broker` and the port it is reached at.

    The port is bound before the broker is announced in Etcd, because its number is announced. It
    refuses connections until the broker serves, so that no one waits for it.

    Args:
        server: its port, not started yet.
        configure: makes the broker's configuration, given the endpoint to advertise.
        allow_origins: web origins which may use the JSON gateway.
        waits_for_routes: the HTTP gateway waits a moment for the brokers of a new journal.
        tells_etcd: answer ``GET /v1/dev`` with the address of Etcd, by which consumers of a
            cluster for development find it.
        has_console: serve the web console at ``/console/``.
        content: masks and message types of the console.
        audit_output: gets the records of the audit logs, too.
        drain: has the process drain and end, as SIGTERM does, when a caller asks for it; None if
            the broker is part of a program.
    """

    def __init__(
        self,
        server: Server,
        configure: Callable[[str], BrokerConfig],
        *,
        allow_origins: Iterable[str] = (),
        waits_for_routes: bool = False,
        tells_etcd: bool = False,
        has_console: bool = True,
        content: ConsoleContent | None = None,
        audit_output: AuditOutput | None = None,
        drain: Callable[[], None] | None = None,
    ) -> None:
        self.server = server
        self.endpoint = server.bind()
        self.broker = Broker(configure(self.endpoint))
        server.require_tokens(self.broker.authority)
        self._allow_origins = tuple(allow_origins)
        self._waits_for_routes = waits_for_routes
        self._tells_etcd = tells_etcd
        self._has_console = has_console
        self._content = content
        self._audit_output = audit_output
        self._audit_logs: list[AuditLog] = [server.debug_pages.audit]
        self._drain = drain
        self._guard: GuardedJournals | None = None
        self._members: ClusterMembers | None = None
        self._health: BrokerHealth | None = None

    @property
    def ended(self) -> asyncio.Future[None]:
        """Done when the broker has drained, or with a fatal error. Stop it then."""
        return self.broker.ended

    @property
    def etcd_version(self) -> tuple[int, ...]:
        """Version of the connected Etcd server, from :meth:`start` on."""
        return self.broker.etcd_version

    @property
    def held(self) -> int:
        """Number of replicas assigned to the broker, once it has started."""
        config = self.broker.config
        return len(self.broker.keyspace.local_assignments(config.zone, config.suffix))

    async def drain(self) -> None:
        """Announce that the broker leaves, as :meth:`Broker.drain`."""
        await self.broker.drain()

    async def start(self) -> None:
        """Start the broker, then answer on its port. After an error, or to give up: stop.

        Raises:
            GazetteError: as :meth:`Broker.start` does.
        """
        raise_open_files_limit()
        await self.broker.start()
        service: Journals = self.broker.service
        limits, audited = self.server.limits, AuditedCalls(self.broker.config.audited)
        if limits.calls_max or audited is not AuditedCalls.OFF:
            self._guard = GuardedJournals(
                service, self.broker.authority, limits=limits, audited=audited
            )
            service = self._guard
            self._audit_logs.append(self._guard.audit)
        note_refusal = self._guard.note_refusal if self._guard is not None else None
        carried = self.broker.carried
        self.server.lag.counters = lambda: (carried.appended, carried.read)
        members = self._members = ClusterMembers(self.broker, self.server.lag, self._drain)
        report = ClusterReport(self.broker, members)
        own = self._health = BrokerHealth(self.broker, members)
        own.begin()
        health = MemberHealth(
            BROKER, self.broker.member, self.broker.keyspace, self.server.certificates
        )
        health.further.append(own.checks)
        if self._audit_output is not None:
            # The calls of this transport pass no guard, so that they are no records themselves.
            self._audit_output.begin(InProcessTransport(self.broker.service, self.broker.authority))
            health.further.append(self._audit_output.checks)
            for log in self._audit_logs:
                log.put = self._put_record
        self.server.debug_pages.show(health, own.refresh)
        views = guarded_methods(
            [
                *self.broker.views.methods(),
                Method(MEMBERS_RPC, members.answer),
                Method(REPORT_RPC, report.answer),
                Method(DRAIN_RPC, members.drain),
            ],
            self._guard,
        )
        self.server.grpc.add([*journal_methods(service), *views])
        self.server.stream.add(stream_methods(service))
        self.server.stream.introduce(self.broker.config.zone, self.broker.config.suffix)
        if self._tells_etcd:
            self.server.http.mount(DEV_PATH, self._tell_etcd)
        self.server.http.mount(
            AT_PREFIX,
            MemberGateway(
                members.find,
                endpoint=self.endpoint,
                authority=self.broker.authority,
                tls=members.tls_context,
                limits=limits,
                allow_origins=self._allow_origins,
                note_refusal=note_refusal,
            ),
        )
        self.server.http.mount(
            "/v1/",
            JsonGateway(
                {**json_methods(service), **cluster_json_methods(views)},
                authority=self.broker.authority,
                allow_origins=self._allow_origins,
                note_refusal=note_refusal,
            ),
        )
        gateway = HttpGateway(service, waits_for_routes=self._waits_for_routes)
        if self._has_console:
            journals = _ConsoleJournals(self.broker, gateway)
            page = console("broker", content=self._content, journals=journals)
            self.server.http.mount(PREFIX, with_call_limit(page))
        self.server.http.mount("/", with_call_limit(gateway))
        await self.server.start()

    def _put_record(self, event: AuditEvent | None, count: int) -> None:
        """Put a record of an audit log into the second output, and among the cluster's events."""
        assert self._audit_output is not None
        self._audit_output.put(event, count)
        self.broker.recorder.audited(event, count)

    async def _tell_etcd(self, _request: web.BaseRequest, target: Target) -> web.Response | None:
        if target.path != DEV_PATH:
            return None
        return web.json_response({"etcd": self.broker.config.etcd.endpoint})

    async def stop(
        self, *, grace_s: float = STOP_GRACE_S, persist_timeout_s: float = PERSIST_TIMEOUT_S
    ) -> None:
        """End both. Bounded.

        Args:
            grace_s: time that calls in progress may take to end by themselves.
            persist_timeout_s: how long uploads may take.
        """
        if self._health is not None:
            self._health.end()
        if self._audit_output is not None:
            for log in self._audit_logs:
                log.close()
            await self._audit_output.aclose()
        await run_together(
            self.broker.stop(persist_timeout_s=persist_timeout_s), self.server.stop(grace_s)
        )
        if self._members is not None:
            await self._members.aclose()
        if self._guard is not None:
            self._guard.audit.close()


class _ConsoleJournals:
    """Journals as the console of a broker reads them.

    Args:
        broker: the broker.
        gateway: reads journals, with the tokens of callers.
    """

    def __init__(self, broker: Broker, gateway: HttpGateway) -> None:
        self._keyspace = broker.keyspace
        self._authority = broker.authority
        self._gateway = gateway

    async def find(self, journal: str, request: web.BaseRequest) -> pb.JournalSpec | None:
        """Return the spec of a journal; None if the caller may not read it: a read refuses that."""
        authorization = request.headers.get("Authorization")
        try:
            claims = self._authority.verify(authorization, Capability.READ, time.time())
        except UnauthenticatedError:
            return None
        entry = self._keyspace.item(journal)
        if entry is None or not matches_journal(rewrite_prefix(claims.selector), entry.value):
            return None
        return entry.value

    async def read(
        self, request: web.BaseRequest, target: Target, masking: Masking | None
    ) -> web.StreamResponse:
        """Answer a read of a journal."""
        return await self._gateway(request, target, masking)
