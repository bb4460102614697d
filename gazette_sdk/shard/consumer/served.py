"""Consumer with its public port: the shard service on gRPC and as JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from gazette_sdk.console.mount import PREFIX, console
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import cluster_pb2 as clpb
from gazette_sdk.protocol.authorization import Capability
from gazette_sdk.protocol.rules import MEMBERS_RPC, unrouted_header
from gazette_sdk.server.authorization import Call
from gazette_sdk.server.grpc_server import Method
from gazette_sdk.server.health import MemberHealth
from gazette_sdk.server.json_gateway import JsonGateway, JsonUnary
from gazette_sdk.server.members import ProcessView, verify_view
from gazette_sdk.server.process import STOP_GRACE_S, Server, raise_open_files_limit
from gazette_sdk.shard.application.application import Application
from gazette_sdk.shard.consumer.health import ConsumerHealth
from gazette_sdk.shard.consumer.pages import json_page_methods, page_methods
from gazette_sdk.shard.consumer.process import Consumer, ConsumerConfig
from gazette_sdk.shard.consumer.service import json_methods, shard_methods, state_methods
from gazette_sdk.transport.base import Transport


class ServedConsumer:
    """A :class:`~gazette_sdk.shard.consumer.process.Consumer` and the port it is reached at.

    Args:
        server: its port, not started yet.
        configure: makes the consumer's configuration, given the endpoint to advertise.
        application: the application.
        transport: to the journals.
        allow_origins: web origins which may use the JSON gateway.
        has_console: serve the web console at ``/console/``.
    """

    def __init__(
        self,
        server: Server,
        configure: Callable[[str], ConsumerConfig],
        application: Application[Any, Any],
        transport: Transport,
        *,
        allow_origins: Iterable[str] = (),
        has_console: bool = True,
    ) -> None:
        self.server = server
        self.endpoint = server.bind()
        self.consumer = Consumer(configure(self.endpoint), application, transport)
        server.require_tokens(self.consumer.authority)
        server.debug_pages.unready = lambda: self.consumer.unready
        self._allow_origins = tuple(allow_origins)
        self._has_console = has_console
        self._health: ConsumerHealth | None = None

    @property
    def ended(self) -> asyncio.Future[None]:
        """Done when the consumer has drained, or with a fatal error. Stop it then."""
        return self.consumer.ended

    @property
    def etcd_version(self) -> tuple[int, ...]:
        """Version of the connected Etcd server, from :meth:`start` on."""
        return self.consumer.etcd_version

    @property
    def held(self) -> int:
        """Number of shards assigned to the process, once it has started."""
        config = self.consumer.config
        return len(self.consumer.keyspace.local_assignments(config.zone, config.suffix))

    async def drain(self) -> None:
        """Announce that the consumer leaves, as :meth:`Consumer.drain`."""
        await self.consumer.drain()

    async def start(self) -> None:
        """Start the consumer, then answer on its port. After an error, or to give up: stop.

        Raises:
            GazetteError: as :meth:`Consumer.start` does.
        """
        raise_open_files_limit()
        await self.consumer.start()
        consumer = self.consumer
        own = self._health = ConsumerHealth(consumer)
        own.begin()
        member = MemberHealth(
            consumer.application.full_name,
            consumer.member,
            consumer.keyspace,
            self.server.certificates,
        )
        member.further.append(own.checks)
        self.server.debug_pages.show(member, own.refresh)
        service, pages = self.consumer.service, self.consumer.pages
        methods = (*self.consumer.methods, Method(MEMBERS_RPC, self._members))
        self.server.grpc.add((*shard_methods(service), *page_methods(pages), *methods))
        self.server.http.mount(
            "/v1/",
            JsonGateway(
                {
                    **json_methods(service),
                    **json_page_methods(pages),
                    **state_methods(self.consumer.methods),
                    "/v1/cluster/members": JsonUnary(
                        Capability.LIST, clpb.MembersRequest, self._members, allows_get=True
                    ),
                },
                authority=self.consumer.authority,
                allow_origins=self._allow_origins,
                note_refusal=service.note_refusal,
            ),
        )
        if self._has_console:
            self.server.http.mount(PREFIX, console("consumer"))
        self.server.http.mount("/", self.consumer.endpoints)
        await self.server.start()

    async def _members(self, _request: clpb.MembersRequest, call: Call) -> clpb.MembersResponse:
        """Return this process alone: brokers know the other members.

        Raises:
            UnauthenticatedError: the token lacks LIST, or has a selector.
        """
        consumer = self.consumer
        verify_view(consumer.authority, call.authorization)
        config, keyspace = consumer.config, consumer.keyspace
        process_id = pb.ProcessSpec.ID(zone=config.zone, suffix=config.suffix)
        process = ProcessView(
            consumer.application.full_name, consumer.member, consumer.authority, self.server.lag
        )
        member = process.describe(pb.ProcessSpec(id=process_id, endpoint=config.endpoint))
        entry = keyspace.member(config.zone, config.suffix)
        if entry is not None:
            member.limit, member.exiting = entry.value.shard_limit, entry.value.exiting
        held = keyspace.local_assignments(config.zone, config.suffix)
        member.replicas = len(held)
        member.primaries = sum(each.slot == 0 for each in held)
        header = unrouted_header(None if entry is None else process_id, keyspace.header)
        return clpb.MembersResponse(header=header, members=[member])

    async def stop(self, *, grace_s: float = STOP_GRACE_S) -> None:
        """End both. Bounded.

        Args:
            grace_s: time that calls in progress may take to end by themselves.

        Raises:
            StuckShardsError: as :meth:`Consumer.stop` does.
        """
        if self._health is not None:
            self._health.end()
        stopping = asyncio.create_task(self.server.stop(grace_s))
        try:
            await self.consumer.stop()
        finally:
            await stopping
