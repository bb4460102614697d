"""Cluster inside this process: an Etcd child process, brokers, and fragments in files.

``gazette dev``, ``connect("embedded:///dir")`` and the pytest plugin use it::

    with EmbeddedCluster("gazette-data") as cluster:
        cluster.apply(open("journals.yaml").read())
        with Publisher(mapping=..., transport=cluster.transport) as publisher:
            ...

All data is in one directory: ``etcd/``, ``fragments/`` (the root of ``file://`` stores) and
``spools/``. A second start with the same directory continues with its data, also after ``kill -9``.

A broker loses its lease when this process is paused for longer than the lease (SIGSTOP, a debugger,
a suspended laptop). The cluster then replaces it by a new broker at the same port, over the same
spools. Clients see an outage of some seconds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote, urlsplit

from gazette_sdk.broker.api.in_process import InProcessTransport
from gazette_sdk.broker.api.served import ServedBroker
from gazette_sdk.broker.process import BrokerConfig
from gazette_sdk.broker.spool.directory import Durability
from gazette_sdk.cluster.broker_keys import is_consistent
from gazette_sdk.cluster.etcd_server import EtcdServer
from gazette_sdk.cluster.membership import LEASE_TTL_S, EtcdConfig
from gazette_sdk.console.content import ConsoleContent
from gazette_sdk.errors import (
    ClosedError,
    ConfigurationError,
    EtcdUnavailableError,
    GazetteError,
    LeaseLostError,
)
from gazette_sdk.local_cluster.cluster import (
    ETCD_TXN_CHANGES,
    broker_name,
    request_of,
    revoke_leases,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.journal_spec import desired_replication
from gazette_sdk.server.process import Server
from gazette_sdk.transport import loop as sdk_loop
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.listing import apply_in_batches
from gazette_sdk.transport.wire import ANYWHERE, AppendItem, ReadItem, ReplicateItem, Target

_log = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
"""Limit of a start, which takes about a second."""

RESUME_TIMEOUT_S = 10.0
"""Limit of waiting for the journals of an earlier run, which takes some tenths of a second."""

STOP_TIMEOUT_S = 60.0
"""Limit of a stop, above the sum of the limits of its parts."""

STOP_GRACE_S = 2.0
"""Limit of open calls when the cluster stops. No other broker can take them over."""


class EmbeddedCluster(sdk_loop.LoopStartable):
    """Etcd in a child process, and brokers in this process.

    Use it as a context manager, plain or asynchronous, or call :meth:`start` and :meth:`stop`
    (:meth:`astart` and :meth:`astop` on the SDK's event loop).

    Args:
        data: directory of all data; created if it is missing.
        port: public port of the first broker; 0 takes a free one. Further brokers take free
            ones.
        host: address to bind and to advertise; by default loopback.
        brokers: number of brokers.
        durability: durability of acknowledged appends.
        sync_etcd: False if Etcd need not force its writes to disk, for tests with temporary data.
        lease_ttl_s: lifetime of the brokers' leases in Etcd, in seconds: after a pause that is
            longer, new brokers take the places of these.
        console: masks and message types of the web console.
        config: further fields of :class:`~gazette_sdk.broker.process.BrokerConfig`.
    """

    def __init__(
        self,
        data: Path | str,
        *,
        port: int = 0,
        host: str = "localhost",
        brokers: int = 1,
        durability: Durability = Durability.REPLICATED,
        sync_etcd: bool = True,
        lease_ttl_s: int = LEASE_TTL_S,
        console: ConsoleContent | None = None,
        **config: Any,
    ) -> None:
        if brokers < 1:
            raise ConfigurationError(f"a cluster needs at least one broker, not {brokers}")
        self.data = Path(data).absolute()
        self._port = port
        self._host = host
        self._broker_count = brokers
        self._lease_ttl_s = lease_ttl_s
        self._console = console
        self._config = {"durability": durability, **config}
        self._etcd_server = EtcdServer(self.data / "etcd", sync_writes=sync_etcd)
        self._brokers: list[ServedBroker] = []
        self._keepers: list[asyncio.Task[None]] = []
        self._transport: InProcessTransport | None = None

    @property
    def address(self) -> str:
        """URL of the first broker.

        Raises:
            ClosedError: the cluster is not running.
        """
        return self.addresses[0]

    @property
    def addresses(self) -> list[str]:
        """URLs of all brokers."""
        self._require_running()
        return [broker.endpoint for broker in self._brokers]

    @property
    def transport(self) -> Transport:
        """Transport to the first broker, without a port."""
        self._require_running()
        assert self._transport is not None
        return self._transport

    @property
    def fragments(self) -> Path:
        """Directory of stored fragments, the root of ``file://`` stores."""
        return self.data / "fragments"

    @property
    def etcd_endpoint(self) -> str:
        """URL of the cluster's Etcd."""
        return self._etcd_server.endpoint

    @property
    def brokers(self) -> list[ServedBroker]:
        """The running brokers."""
        return list(self._brokers)

    def start(self) -> Self:
        """Start the cluster, from plain code.

        Raises:
            ConfigurationError: the port or the directory is in use, or no etcd was found.
            GazetteError: the start failed.
        """
        sdk_loop.run(self.astart(), START_TIMEOUT_S)
        return self

    def stop(self) -> None:
        """Stop the cluster, from plain code, and store its spools."""
        sdk_loop.run(self.astop(), STOP_TIMEOUT_S)

    def apply(self, specs: str) -> None:
        """Create or change journals by a YAML document, and wait until brokers serve them.

        Without ``revision``, a change matches any revision.

        Args:
            specs: YAML as for ``gazctl journals apply``.

        Raises:
            ValidationError: the document or a journal in it is malformed.
            TimeoutError: a journal requires more brokers than there are.
        """
        sdk_loop.run(self.aapply(specs), START_TIMEOUT_S)

    async def aapply(self, specs: str) -> None:
        """Apply specs as :meth:`apply` does, on the SDK's event loop."""
        request = request_of(specs)
        await apply_in_batches(self.transport, request, ETCD_TXN_CHANGES)
        async with asyncio.timeout(START_TIMEOUT_S / 2):
            for change in request.changes:
                await self._served(change.upsert.name)

    async def astart(self) -> None:
        """Start the cluster, on the SDK's event loop. After an error it is stopped again."""
        if self._brokers:
            return
        try:
            self.fragments.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"the data directory {self.data} cannot be used: {error.strerror}"
            ) from error
        await self._etcd_server.start()
        try:
            # This process has just started Etcd and holds the lock of its directory, so all holders
            # of leases are dead. Otherwise the cluster would wait until the leases expire.
            await revoke_leases(self._etcd_server.endpoint)
            for index in range(self._broker_count):
                broker = self._make_broker(index, self._port if index == 0 else 0)
                self._brokers.append(broker)
                await broker.start()
            self._transport = InProcessTransport(self._brokers[0].broker.service)
            await self._resumed()
            self._keepers = [
                asyncio.create_task(self._keep(index), name=f"keep broker {index}")
                for index in range(self._broker_count)
            ]
        except BaseException:
            await self.astop()
            raise

    async def astop(self) -> None:
        """Stop the cluster, on the SDK's event loop."""
        keepers, self._keepers = self._keepers, []
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
        brokers, self._brokers = self._brokers, []
        transport, self._transport = self._transport, None
        try:
            if transport is not None:
                await transport.aclose()
            await asyncio.gather(*(broker.stop(grace_s=STOP_GRACE_S) for broker in brokers))
        finally:
            await self._etcd_server.stop()

    async def ended(self) -> None:
        """Wait until the cluster fails, on the SDK's event loop.

        Raises:
            GazetteError: the failure.
        """
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._etcd_ended())]
        waits += [asyncio.ensure_future(asyncio.shield(keeper)) for keeper in self._keepers]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                future.result()
        finally:
            for future in waits:
                future.cancel()

    async def _resumed(self) -> None:
        """Wait until the journals of an earlier run are served again, with a limit."""
        replication = {
            item.id: desired_replication(item.value)
            for item in self._brokers[0].broker.keyspace.items()
        }
        count = self._broker_count
        if short := [name for name, wanted in replication.items() if wanted > count]:
            most = max(replication.values())
            _log.warning(
                "%d journals, such as %s, want more replicas than the cluster has brokers, and"
                " take no appends: start it with %d brokers (`gazette dev --brokers %d`), or lower"
                " their replication with `gazctl journals edit`",
                len(short),
                short[0],
                most,
                most,
            )
        try:
            async with asyncio.timeout(RESUME_TIMEOUT_S):
                for name in replication.keys() - set(short):
                    await self._served(name)
        except TimeoutError:
            _log.warning("some journals are not served after %.0f s", RESUME_TIMEOUT_S)

    async def _keep(self, index: int) -> None:
        """Replace a broker each time when it lost its lease.

        Raises:
            GazetteError: the broker has failed for another reason, or cannot be replaced.
        """
        while True:
            try:
                await asyncio.shield(self._brokers[index].broker.ended)
            except LeaseLostError as error:
                _log.warning(
                    "broker %d of the embedded cluster joins the cluster again: %s. A pause of "
                    "this process or of etcd for longer than the lease causes this",
                    index,
                    error,
                )
            else:
                return
            lost_at = time.monotonic()
            try:
                await self._rejoin(index)
            except GazetteError:
                _log.exception(
                    "broker %d of the embedded cluster cannot join the cluster again; stop the "
                    "cluster and start it again: it continues with its data",
                    index,
                )
                raise
            _log.warning(
                "broker %d of the embedded cluster serves again after %.1f s",
                index,
                time.monotonic() - lost_at,
            )

    async def _rejoin(self, index: int) -> None:
        """Replace a broker by a new one with the same id, port and spools."""
        old = self._brokers[index]
        if index == 0 and self._transport is not None:
            self._transport.suspend()
        stopping = asyncio.create_task(old.stop(grace_s=0))
        try:
            await asyncio.shield(stopping)
        except asyncio.CancelledError:
            await stopping
            raise
        config = old.broker.config
        entry = old.broker.keyspace.member(config.zone, config.suffix)
        if entry is not None:
            # Etcd was paused, too, and has not noticed yet that the lease ran out.
            with suppress(EtcdUnavailableError):  # then the new broker waits for Etcd
                await revoke_leases(config.etcd.endpoint, [entry.lease])
        assert old.server.listener.port is not None, "embedded brokers serve on TCP ports"
        self._brokers[index] = self._make_broker(index, old.server.listener.port)
        await self._brokers[index].start()
        if index == 0 and self._transport is not None:
            self._transport.resume(self._brokers[0].broker.service)

    async def _etcd_ended(self) -> None:
        """Wait for the end of Etcd, and raise an error if brokers are running."""
        status = await self._etcd_server.wait()
        if self._brokers:
            raise EtcdUnavailableError(
                f"the embedded etcd ended by itself, with status {status}; see "
                f"{self.data / 'etcd' / 'etcd.log'}, and start the cluster again: it continues "
                "with its data"
            )

    async def _served(self, journal: str) -> None:
        """Wait until a journal has all its replicas, and they are consistent.

        Not for one that waits for a broker of an earlier run, which the cluster does not have now.
        """
        broker = self._brokers[0].broker
        keyspace, ours = broker.keyspace, {each.broker.config.suffix for each in self._brokers}
        while (item := keyspace.item(journal)) is not None:
            if any(absent.suffix not in ours for absent in broker.absent_brokers(journal)):
                return
            assignments = keyspace.assignments(journal)
            if len(assignments) == desired_replication(item.value) and is_consistent(assignments):
                return
            await keyspace.wait_for_update()

    def _make_broker(self, index: int, port: int) -> ServedBroker:
        suffix = broker_name(self.data / "spools", index)
        server = Server(host=self._host, port=str(port))

        def configure(endpoint: str) -> BrokerConfig:
            return BrokerConfig(
                suffix=suffix,
                endpoint=endpoint,
                spool_dir=self.data / "spools" / suffix,
                etcd=EtcdConfig(endpoint=self._etcd_server.endpoint, lease_ttl_s=self._lease_ttl_s),
                file_root=self.fragments,
                **self._config,
            )

        return ServedBroker(
            server, configure, waits_for_routes=True, tells_etcd=True, content=self._console
        )

    def _require_running(self) -> None:
        if not self._brokers:
            raise ClosedError("the embedded cluster is not running; start() it first")


class EmbeddedTransport(Transport):
    """Transport to an :class:`EmbeddedCluster`.

    The cluster starts with the first call, and stops with :meth:`aclose`.

    Args:
        cluster: the cluster, which is not started yet.
    """

    def __init__(self, cluster: EmbeddedCluster) -> None:
        self.cluster = cluster
        self._starting: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The SDK's event loop, on which the cluster runs."""
        return sdk_loop.sdk_loop()

    async def _started(self) -> Transport:
        if self._closed:
            raise ClosedError("this embedded cluster was closed; connect() again")
        if self._starting is None:
            self._starting = asyncio.get_running_loop().create_task(self.cluster.astart())
        await asyncio.shield(self._starting)
        return self.cluster.transport

    async def list(self, request: pb.ListRequest) -> AsyncGenerator[pb.ListResponse]:
        """See :meth:`Transport.list`."""
        responses = (await self._started()).list(request)
        async with aclosing(responses):
            async for response in responses:
                yield response

    async def apply(self, request: pb.ApplyRequest) -> pb.ApplyResponse:
        """See :meth:`Transport.apply`."""
        return await (await self._started()).apply(request)

    async def read(
        self, request: pb.ReadRequest, target: Target = ANYWHERE
    ) -> AsyncGenerator[ReadItem]:
        """See :meth:`Transport.read`."""
        items = (await self._started()).read(request, target)
        async with aclosing(items):
            async for item in items:
                yield item

    async def append(
        self, requests: AsyncIterator[AppendItem], target: Target = ANYWHERE
    ) -> pb.AppendResponse:
        """See :meth:`Transport.append`."""
        return await (await self._started()).append(requests, target)

    async def replicate(
        self, requests: AsyncIterator[ReplicateItem], target: Target
    ) -> AsyncGenerator[pb.ReplicateResponse]:
        """See :meth:`Transport.replicate`."""
        responses = (await self._started()).replicate(requests, target)
        async with aclosing(responses):
            async for response in responses:
                yield response

    async def list_fragments(
        self, request: pb.FragmentsRequest, target: Target = ANYWHERE
    ) -> pb.FragmentsResponse:
        """See :meth:`Transport.list_fragments`."""
        return await (await self._started()).list_fragments(request, target)

    async def fragment_store_health(
        self, request: pb.FragmentStoreHealthRequest, target: Target = ANYWHERE
    ) -> pb.FragmentStoreHealthResponse:
        """See :meth:`Transport.fragment_store_health`."""
        return await (await self._started()).fragment_store_health(request, target)

    async def aclose(self) -> None:
        """Stop the cluster. Waits for its start."""
        self._closed = True
        if self._starting is not None:
            await asyncio.wait([self._starting])
            await self.cluster.astop()


def connect(url: str, **options: Any) -> Transport:
    """Return a transport to ``embedded:///directory``. The cluster starts with its first call.

    Args:
        url: ``embedded:///`` and the absolute path of the directory.
        options: arguments of :class:`EmbeddedCluster`.

    Raises:
        ConfigurationError: the URL names no directory.
    """
    parts = urlsplit(url)
    path = unquote(parts.path)
    if parts.netloc or path.strip("/") == "" or parts.query:
        raise ConfigurationError(
            f"{url!r} names no directory of a cluster; write embedded:///path/to/directory"
        )
    return EmbeddedTransport(EmbeddedCluster(path, **options))
