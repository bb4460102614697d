"""Consumer with its public port, in a process of its own or inside a program.

A :class:`ServedConsumer` has the shard service on gRPC and as JSON. An :class:`EmbeddedConsumer`
runs shards beside what else its program does.

::

    with EmbeddedConsumer(totals) as consumer:
        ...                                      # publish, serve, or wait
        consumer.wait_caught_up(timeout_s=30)
        urlopen(f"{consumer.address}/api/customers/ada")

It is a member of the application as a ``gazette run-consumer`` process is: several programs and
processes share the shards.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, Self, TypeVar

from gazette_sdk.cluster.allocator.state import leader_of
from gazette_sdk.cluster.membership import EtcdConfig, etcd_of_dev
from gazette_sdk.console.mount import PREFIX, console
from gazette_sdk.errors import ClosedError, ConfigurationError, GazetteError
from gazette_sdk.meters import Reading, ReadMetric
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import cluster_pb2 as clpb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.authorization import Authority, Capability
from gazette_sdk.protocol.rules import MEMBERS_RPC, unrouted_header
from gazette_sdk.protocol.shard_spec import recovery_log
from gazette_sdk.server.authorization import Call
from gazette_sdk.server.grpc_server import Method
from gazette_sdk.server.health import Check, MemberHealth
from gazette_sdk.server.json_gateway import JsonGateway, JsonUnary
from gazette_sdk.server.members import ProcessView, verify_view
from gazette_sdk.server.process import STOP_GRACE_S, Server, raise_open_files_limit
from gazette_sdk.server.settings import pet_name
from gazette_sdk.shard.application.application import Application
from gazette_sdk.shard.consumer.client import ShardClient
from gazette_sdk.shard.consumer.lifecycle import status_text, until_caught_up
from gazette_sdk.shard.consumer.pages import json_page_methods, page_methods
from gazette_sdk.shard.consumer.process import Consumer, ConsumerConfig
from gazette_sdk.shard.consumer.service import json_methods, shard_methods, state_methods
from gazette_sdk.transport import loop as sdk_loop
from gazette_sdk.transport.base import Transport, check_transport
from gazette_sdk.transport.connect import connect

READ_LAG_SECONDS = ReadMetric(
    "gazette_shard_read_lag_seconds",
    "Age of the first message that a shard has not read; 0 if there is none.",
    ("shard",),
    combine=max,
)
RECOVERY_BYTES = ReadMetric(
    "gazette_shard_recovery_bytes",
    "Bytes of the recovery log that are read, and an estimate of all; 0 unless the shard recovers.",
    ("shard", "kind"),
    combine=max,
)
WITHOUT_PRIMARY = ReadMetric(
    "gazette_shards_without_primary",
    "Shards of an application, without disabled ones, that no process leads; shown by the process "
    "that leads the allocator.",
    ("application",),
    combine=max,
)


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


T = TypeVar("T")

_log = logging.getLogger(__name__)

ETCD_REMEDY = "give its address as etcd="

BROKER_REMEDY = "give another one as transport=connect(URL) (or set GAZETTE_ADDRESS)"

START_TIMEOUT_S = 60.0
"""Limit of a start, which takes less than a second."""

DRAIN_TIMEOUT_S = 30.0
"""Limit of the wait for others to take the shards over. Then the shards stop here all the same."""

STOP_TIMEOUT_S = 120.0
"""Limit of a stop, above the sum of the limits of its parts."""

STOP_GRACE_S = 2.0
"""Limit of open calls when the consumer stops."""

CALL_TIMEOUT_S = 30.0
"""Limit of a listing of shards."""


class ConsumerHealth:
    """Metrics and checks of a consumer process, which has started.

    The lag in time needs calls of brokers, so it is measured when someone scrapes. Numbers of all
    shards of the application are shown by the process that leads its allocator.

    Args:
        consumer: the process.
    """

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._application = consumer.application.full_name
        self._lags: dict[tuple[str, ...], float] = {}
        self._refreshing = asyncio.Lock()
        self._shown = ExitStack()

    def begin(self) -> None:
        """Show the metrics, until :meth:`end`."""
        readings: Sequence[tuple[ReadMetric, Callable[[], Reading]]] = (
            (READ_LAG_SECONDS, lambda: self._lags),
            (RECOVERY_BYTES, self._recovery),
            (WITHOUT_PRIMARY, self._without_primary),
        )
        for metric, read in readings:
            self._shown.callback(metric.add(read))

    def end(self) -> None:
        """Show the metrics no more."""
        self._shown.close()

    async def refresh(self) -> None:
        """Measure the lags. A scrape awaits it."""
        keyspace = self._consumer.keyspace
        async with self._refreshing:
            lags = await self._consumer.pages.lags()
        self._lags = {
            (keyspace.item_key(shard).decode(),): lag.seconds
            for shard, lag in lags.items()
            if lag.seconds is not None
        }

    def _recovery(self) -> Reading:
        found: dict[tuple[str, ...], float] = {}
        for shard in self._consumer.resolver.local.all():
            if recovery_log(shard.spec):
                name = self._consumer.keyspace.item_key(shard.id).decode()
                read, total = shard.recovery
                found[name, "read"], found[name, "total"] = float(read), float(total)
        return found

    def _without_primary(self) -> Reading:
        config, keyspace = self._consumer.config, self._consumer.keyspace
        leader = leader_of(keyspace.members())
        if leader is None or (leader.zone, leader.suffix) != (config.zone, config.suffix):
            return {}
        led = {each.item for each in keyspace.all_assignments() if each.slot == 0}
        lacking = (item for item in keyspace.items() if not item.value.disable)
        return {(self._application,): float(sum(item.id not in led for item in lacking))}

    async def checks(self, _authorization: str | None) -> Iterable[Check]:
        """Return the outcome of the check of this process' shards."""
        config = self._consumer.config
        held = self._consumer.keyspace.local_assignments(config.zone, config.suffix)
        failed = [each.item for each in held if each.value.code == cpb.ReplicaStatus.FAILED]
        detail = f"{len(held)} shards of this process"
        if failed:
            detail += f", {len(failed)} have failed, such as {failed[0]}"
        return [Check("shards", not failed, detail)]


class EmbeddedConsumer(sdk_loop.LoopStartable):
    """Consumer of an application inside this process, with a port of its own.

    Use it as a context manager, plain or asynchronous, or call :meth:`start` and :meth:`stop`
    (:meth:`astart` and :meth:`astop` on the SDK's event loop). ``async def`` hooks run on the SDK's
    event loop, ``def`` hooks on worker threads.

    Args:
        application: the application.
        transport: transport to the journals, which the caller closes; by default ``connect()`` of
            ``GAZETTE_ADDRESS``.
        etcd: address of Etcd, or several separated by commas; by default the broker is asked,
            which answers if it is of ``gazette dev`` or an embedded cluster.
        host: address to bind and to advertise; by default loopback.
        port: port to serve on; 0 takes a free one.
        lease_ttl_s: lifetime of its lease in Etcd, in seconds: after a pause that is longer,
            others have its shards.
        config: further fields of :class:`~gazette_sdk.shard.consumer.process.ConsumerConfig`.

    Raises:
        ConfigurationError: ``application`` or ``transport`` is none.
    """

    def __init__(
        self,
        application: Application[Any, Any],
        *,
        transport: Transport | None = None,
        etcd: str = "",
        host: str = "localhost",
        port: int = 0,
        lease_ttl_s: int = 20,
        **config: Any,
    ) -> None:
        check_transport(transport)
        _check_application(application)
        self._application = application
        self._given_transport = transport
        self._transport = transport
        self._etcd = etcd
        self._host, self._port = host, port
        self._lease_ttl_s = lease_ttl_s
        self._config = {"suffix": pet_name(), **config}
        self._served: ServedConsumer | None = None
        self._client: ShardClient | None = None

    @property
    def address(self) -> str:
        """URL at which it serves, as any process of the application does.

        Raises:
            ClosedError: it is not running.
        """
        return self._require_running().endpoint

    def start(self) -> Self:
        """Join the application's processes, from plain code.

        Raises:
            ConfigurationError: the port, Etcd's address or the application cannot be used.
            GazetteError: the start failed.
        """
        sdk_loop.run(self.astart(), START_TIMEOUT_S)
        return self

    def stop(self) -> None:
        """Hand its shards to other processes, and stop, from plain code."""
        sdk_loop.run(self.astop(), STOP_TIMEOUT_S)

    def wait_caught_up(self, timeout_s: float) -> None:
        """Wait until the shards have consumed all that their sources hold by now, from plain code.

        Args:
            timeout_s: limit of the wait, in seconds.

        Raises:
            TimeoutError: they have not in time; the text has their statuses.
            GazetteError: the journals cannot be listed, or this consumer has failed.
        """
        sdk_loop.run(self.await_caught_up(timeout_s), timeout_s + CALL_TIMEOUT_S)

    def list_shards(self) -> Sequence[cpb.ListResponse.Shard]:
        """Return the shards of the application, wherever they run, from plain code.

        Raises:
            GazetteError: they cannot be listed.
        """
        listing = sdk_loop.run(self._ask(lambda client: client.list()), CALL_TIMEOUT_S)
        return listing.shards

    # --------------------------------------------------- on the SDK's event loop

    async def astart(self) -> None:
        """Join the application's processes. After an error it is stopped again."""
        if self._served is not None:
            return
        try:
            if self._transport is None:
                self._transport = connect()
            etcd = self._etcd or await asyncio.to_thread(
                etcd_of_dev,
                getattr(self._transport, "address", ""),
                remedy=ETCD_REMEDY,
                broker_remedy=BROKER_REMEDY,
            )
            served = self._served = self._make(self._transport, etcd)
            authority = served.consumer.authority
            self._client = ShardClient(
                served.endpoint,
                authorizer=authority if isinstance(authority, Authority) else None,
            )
            await served.start()
        except BaseException:
            await self._stop()
            raise
        served.ended.add_done_callback(self._report)

    async def astop(self) -> None:
        """Hand the shards to other processes, and stop."""
        served = self._served
        if served is not None and not served.ended.done():
            try:
                async with asyncio.timeout(DRAIN_TIMEOUT_S):
                    await served.drain()
                    await asyncio.wait([served.ended])
            except (TimeoutError, GazetteError) as error:
                _log.warning("the shards stop here before others have taken them over: %r", error)
        await self._stop()

    async def await_caught_up(self, timeout_s: float) -> None:
        """Wait as :meth:`wait_caught_up` does."""
        ended = self._require_running().ended
        assert self._transport is not None, "it runs"
        waiting = asyncio.ensure_future(
            until_caught_up(self._application, self._transport, self._ask)
        )
        try:
            await asyncio.wait(
                [waiting, ended], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if waiting.done():
                await waiting
                return
        finally:
            waiting.cancel()
            await asyncio.wait([waiting])
        if ended.done():
            await ended
            raise ClosedError("the consumer has stopped; start it again")
        found = await self._ask(lambda client: client.list())
        status = "; ".join([*found.faults, status_text(found.shards)])
        raise TimeoutError(f"the shards have not caught up within {timeout_s:g} s: {status}")

    async def ended(self) -> None:
        """Wait until it ends.

        Raises:
            GazetteError: it has failed, for instance by losing its lease.
        """
        await asyncio.shield(self._require_running().ended)

    # ------------------------------------------------------------------ parts

    def _make(self, transport: Transport, etcd: str) -> ServedConsumer:
        server = Server(host=self._host, port=str(self._port))

        def configure(endpoint: str) -> ConsumerConfig:
            return ConsumerConfig(
                endpoint=endpoint,
                etcd=EtcdConfig(endpoint=etcd, lease_ttl_s=self._lease_ttl_s),
                **self._config,
            )

        return ServedConsumer(server, configure, self._application, transport)

    async def _stop(self) -> None:
        """End everything, without a successor."""
        served, self._served = self._served, None
        client, self._client = self._client, None
        transport = None if self._given_transport is not None else self._transport
        self._transport = self._given_transport
        try:
            if served is not None:
                await served.stop(grace_s=STOP_GRACE_S)
        finally:
            if client is not None:
                await client.aclose()
            if transport is not None:
                await transport.aclose()

    async def _ask(self, call: Callable[[ShardClient], Awaitable[T]]) -> T:
        self._require_running()
        assert self._client is not None, "it runs"
        return await call(self._client)

    def _require_running(self) -> ServedConsumer:
        if self._served is None:
            raise ClosedError("the consumer is not running; start() it first")
        return self._served

    def _report(self, ended: asyncio.Future[None]) -> None:
        """Log a failure, which the program may not wait for."""
        if not ended.cancelled() and (error := ended.exception()) is not None:
            _log.error(
                "the consumer of %s in this process has failed, and others take its shards: %s; "
                "stop it and start another one",
                self._application.full_name,
                error,
            )


def _check_application(application: object) -> None:
    """Refuse what is no application, such as its class.

    Raises:
        ConfigurationError: it is none.
    """
    if not isinstance(application, Application):
        raise ConfigurationError(
            f"{application!r} is no application; give a function decorated with shard.handler, or"
            " an object of a subclass of shard.Application"
        )
