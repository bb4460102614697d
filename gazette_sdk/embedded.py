"""A whole cluster inside this process: a real Etcd child, real brokers, fragments in files.

It is what ``gazette dev`` runs, what ``connect("embedded:///dir")`` opens, and what tests use::

    with EmbeddedCluster("gazette-data") as cluster:
        cluster.apply(open("journals.yaml").read())
        with Publisher(mapping=..., transport=cluster.transport) as publisher:
            ...

Everything lives in one directory: ``etcd/``, ``fragments/`` (the root of ``file://`` stores) and
``spools/``. A second start over the same directory goes on where the first one ended, also after
``kill -9``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote, urlsplit

from gazette_sdk.broker.api.in_process import InProcessTransport
from gazette_sdk.broker.api.served import ServedBroker
from gazette_sdk.broker.process import BrokerConfig
from gazette_sdk.broker.spool.directory import Durability
from gazette_sdk.cluster.broker_keys import is_consistent
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_server import EtcdServer
from gazette_sdk.errors import (
    ClosedError,
    ConfigurationError,
    EtcdUnavailableError,
    LeaseLostError,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import journalspace
from gazette_sdk.protocol.journal_spec import desired_replication
from gazette_sdk.server.process import Server
from gazette_sdk.transport import loop as sdk_loop
from gazette_sdk.transport.base import ANYWHERE, AppendItem, ReadItem, Target, Transport
from gazette_sdk.transport.listing import apply_in_batches

__all__ = ["EmbeddedCluster", "connect"]

_log = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
"""Etcd and a broker start in about a second; a machine that needs this long is unusable."""

RESUME_TIMEOUT_S = 10.0
"""Journals of an earlier run are served again after some tenths of a second, or not at all."""

STOP_TIMEOUT_S = 60.0
"""Every part of a stop has a bound of its own; together they stay below this one."""

STOP_GRACE_S = 2.0
"""Calls under way have this long to end when the cluster stops: there is nobody to hand over to."""

ETCD_TXN_CHANGES = 100
"""Changes of one Etcd transaction; its limit is 128 operations by default."""


class EmbeddedCluster:
    """Etcd and brokers, in this process and its child.

    Use it as a context manager, plain or asynchronous, or call :meth:`start` and :meth:`stop`
    (:meth:`astart` and :meth:`astop` on the SDK's event loop).

    Args:
        data: directory of everything it keeps; made when missing.
        port: public port of the first broker; 0 takes a free one. Further brokers take free
            ones.
        host: address to bind and to advertise; loopback unless told otherwise.
        brokers: how many brokers.
        durability: what an acknowledged append has survived.
        sync_etcd: whether Etcd's writes reach the disk before they count. Only tests, whose data
            dies with them, may say no.
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
        **config: Any,
    ) -> None:
        if brokers < 1:
            raise ConfigurationError(f"a cluster needs at least one broker, not {brokers}")
        self.data = Path(data).absolute()
        self._port = port
        self._host = host
        self._broker_count = brokers
        self._config = {"durability": durability, **config}
        self._etcd_server = EtcdServer(self.data / "etcd", sync_writes=sync_etcd)
        self._brokers: list[ServedBroker] = []
        self._transport: Transport | None = None

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
        """A transport to the first broker, without any port between."""
        self._require_running()
        assert self._transport is not None
        return self._transport

    @property
    def fragments(self) -> Path:
        """Directory of stored fragments: the root of ``file://`` stores."""
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
        """Start, from plain code.

        Raises:
            ConfigurationError: the port or the directory is in use, or no etcd was found.
            GazetteError: a part of it failed.
        """
        sdk_loop.run(self.astart(), START_TIMEOUT_S)
        return self

    def stop(self) -> None:
        """Stop, from plain code. What is not stored yet is stored first."""
        sdk_loop.run(self.astop(), STOP_TIMEOUT_S)

    def apply(self, specs: str) -> None:
        """Create or change journals as a YAML document says, whatever their revisions.

        Returns once brokers serve them.

        Args:
            specs: as for ``gazctl journals apply``.

        Raises:
            ValidationError: the document or a journal in it is malformed.
            TimeoutError: a journal requires more brokers than there are.
        """
        sdk_loop.run(self.aapply(specs), START_TIMEOUT_S)

    async def aapply(self, specs: str) -> None:
        """As :meth:`apply`, on the SDK's event loop."""
        root = journalspace.parse(specs)
        journalspace.push_down(root)
        request = journalspace.to_apply_request(root)
        for change in request.changes:
            if not change.expect_mod_revision:
                change.expect_mod_revision = -1
        await apply_in_batches(self.transport, request, ETCD_TXN_CHANGES)
        async with asyncio.timeout(START_TIMEOUT_S / 2):
            for change in request.changes:
                await self._served(change.upsert.name)

    async def astart(self) -> None:
        """Start, on the SDK's event loop. After an error everything is stopped again."""
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
            await _revoke_leases_of_the_dead(self._etcd_server.endpoint)
            for index in range(self._broker_count):
                broker = self._make_broker(index)
                self._brokers.append(broker)
                await broker.start()
            self._transport = InProcessTransport(self._brokers[0].broker.service)
            await self._resumed()
        except BaseException:
            await self.astop()
            raise

    async def astop(self) -> None:
        """Stop, on the SDK's event loop."""
        brokers, self._brokers = self._brokers, []
        transport, self._transport = self._transport, None
        try:
            if transport is not None:
                await transport.aclose()
            await asyncio.gather(*(broker.stop(grace_s=STOP_GRACE_S) for broker in brokers))
        finally:
            await self._etcd_server.stop()

    async def ended(self) -> None:
        """Wait for as long as the cluster can go on; on the SDK's event loop.

        Raises:
            GazetteError: why it cannot.
        """
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._etcd_ended())]
        waits += [asyncio.ensure_future(asyncio.shield(b.broker.ended)) for b in self._brokers]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                future.result()
        finally:
            for future in waits:
                future.cancel()

    async def _resumed(self) -> None:
        """Wait until the journals of an earlier run are served again, where they can be."""
        keyspace = self._brokers[0].broker.keyspace
        try:
            async with asyncio.timeout(RESUME_TIMEOUT_S):
                for item in list(keyspace.items()):
                    await self._served(item.id)
        except TimeoutError:
            _log.warning("some journals are not served yet: they may require more brokers")

    async def _etcd_ended(self) -> None:
        """Wait for the end of Etcd, which is an error as long as brokers need it."""
        status = await self._etcd_server.wait()
        if self._brokers:
            raise EtcdUnavailableError(
                f"the embedded etcd ended by itself, with status {status}; see "
                f"{self.data / 'etcd' / 'etcd.log'}, and start the cluster again: it goes on where "
                "it ended"
            )

    async def _served(self, journal: str) -> None:
        """Wait until as many brokers as it requires are in step on a journal."""
        keyspace = self._brokers[0].broker.keyspace
        while (item := keyspace.item(journal)) is not None:
            assignments = keyspace.assignments(journal)
            if len(assignments) == desired_replication(item.value) and is_consistent(assignments):
                return
            await keyspace.wait_for_update()

    def _make_broker(self, index: int) -> ServedBroker:
        suffix = f"broker-{index:03d}"
        server = Server(host=self._host, port=str(self._port if index == 0 else 0))

        def configure(endpoint: str) -> BrokerConfig:
            return BrokerConfig(
                suffix=suffix,
                endpoint=endpoint,
                spool_dir=self.data / "spools" / suffix,
                etcd_endpoint=self._etcd_server.endpoint,
                file_root=self.fragments,
                **self._config,
            )

        return ServedBroker(server, configure, waits_for_routes=True)

    def _require_running(self) -> None:
        if not self._brokers:
            raise ClosedError("the embedded cluster is not running; start() it first")

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        await sdk_loop.on_sdk_loop(self.astart())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await sdk_loop.on_sdk_loop(self.astop())


async def _revoke_leases_of_the_dead(endpoint: str) -> None:
    """End the leases that brokers of an earlier process left when it was killed.

    This Etcd was started just now, by us, over a directory which we hold the lock of: whoever
    holds a lease in it is dead. Waiting for the leases to run out would only take time.
    """
    async with aclosing(await Etcd.connect(endpoint)) as etcd:
        for lease in await etcd.leases():
            with suppress(LeaseLostError):  # it has just run out by itself
                await etcd.revoke(lease)


class EmbeddedTransport(Transport):
    """Reaches journals of an :class:`EmbeddedCluster` of its own.

    The cluster starts with the first call, and stops with :meth:`aclose`.

    Args:
        cluster: the cluster, not started yet.
    """

    def __init__(self, cluster: EmbeddedCluster) -> None:
        self.cluster = cluster
        self._starting: asyncio.Task[None] | None = None
        self._closed = False

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
        self, requests: AsyncIterator[pb.ReplicateRequest], target: Target
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
        self, request: pb.FragmentStoreHealthRequest
    ) -> pb.FragmentStoreHealthResponse:
        """See :meth:`Transport.fragment_store_health`."""
        return await (await self._started()).fragment_store_health(request)

    async def aclose(self) -> None:
        """Stop the cluster, once it has started."""
        self._closed = True
        if self._starting is not None:
            await asyncio.wait([self._starting])
            await self.cluster.astop()


def connect(url: str, **options: Any) -> Transport:
    """A transport to ``embedded:///directory``; the cluster starts with its first call.

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
