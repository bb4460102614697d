"""Consumer: a process that runs shards of an application (shard section 13).

::

    consumer = Consumer(ConsumerConfig(suffix="one", endpoint="http://…"), totals, transport)
    await consumer.start()
    serve(consumer.service)          # on its port
    await consumer.ended             # until it drained, or cannot continue
    await consumer.stop()
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from gazette_sdk.cluster.allocator.state import leader_of
from gazette_sdk.cluster.consumer_keys import (
    CONSUMERS_PREFIX,
    ConsumerKeySpace,
    ShardAllocation,
    is_consistent,
)
from gazette_sdk.cluster.keyspace import WATCH_DELAY_S
from gazette_sdk.cluster.membership import EtcdConfig, MemberProcess
from gazette_sdk.cluster.verification import Neighbours, Verifier, dial, hold
from gazette_sdk.errors import ConfigurationError, EtcdTransactionFailedError, GazetteError
from gazette_sdk.journals.changes import list_named
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.authorization import Authority, authority_for
from gazette_sdk.protocol.labels import matches_journal
from gazette_sdk.protocol.rules import complete
from gazette_sdk.protocol.shard_spec import (
    DEFAULT_MAX_HOT_STANDBYS,
    recovery_log,
    validate_consumer_spec,
)
from gazette_sdk.server.authorization import Authorization
from gazette_sdk.server.grpc_server import Method
from gazette_sdk.shard.application.application import Application
from gazette_sdk.shard.application.generator import (
    Existing,
    KnownShard,
    ShardGenerator,
    generated,
    list_topics,
)
from gazette_sdk.shard.application.sources import JoinedTopics, group_journals, selectors_of
from gazette_sdk.shard.consumer.client import ShardClient
from gazette_sdk.shard.consumer.endpoints import EndpointCalls, HttpEndpoints, Queries
from gazette_sdk.shard.consumer.pages import ShardPages
from gazette_sdk.shard.consumer.resolver import ShardResolver
from gazette_sdk.shard.consumer.service import ShardService, application_methods, apply_shards
from gazette_sdk.shard.consumer.shard import LocalShard, ShardParts
from gazette_sdk.shard.consumer.state import STATE
from gazette_sdk.shard.recovery.hints import load_hints
from gazette_sdk.shard.recovery.log import LogPruning, ShardHints
from gazette_sdk.shard.transaction.consume import OnStep
from gazette_sdk.shard.transaction.transaction import Process
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.member_calls import MemberCalls
from gazette_sdk.transport.wire import Tls
from gazette_sdk.user_code import contained, on_worker

SHUTDOWN_TIMEOUT_S = 30.0
"""Bound of the wait for shards that end, such as for a call of a handler."""

LOOKUPS_MAX = 8
"""Concurrent look-ups of hints and recovery logs, when many shards are assigned at once."""

OPENINGS_MAX = 4
"""Stores that are opened at once: each costs much of the disk and of a processor."""

LISTING_TIMEOUT_S = 10.0
"""Bound of the listing of topics that are joined, at the start."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerConfig:
    """Configuration of a consumer process; its defaults are those of the command line.

    Attributes:
        suffix: id of the process within its zone.
        endpoint: URL at which others reach it.
        zone: zone of the process.
        etcd: how it reaches Etcd.
        etcd_prefix: prefix of the application's keys; empty for ``/gazette/consumers/NAME``.
        shard_limit: most shards that it takes.
        max_hot_standbys: cap of every shard's hot standbys.
        watch_delay_s: time for which changes of Etcd are collected.
        auth_keys: base64 keys that verify callers and sign calls to peers; empty for none.
        directory: directory below which shards have theirs while they run; ``None`` for a
            temporary one.
        workers: threads that run shards' code, at most.
        peer_tls: certificates toward peers.
        settings: settings of the application, by name.
        prune_period_s: time between reports of what no recovery needs of recovery logs; 0 for none.
        is_ready_with_failed: its port reports that it is ready also while a shard here has failed.
    """

    suffix: str
    endpoint: str
    zone: str = "local"
    etcd: EtcdConfig = field(default_factory=EtcdConfig)
    etcd_prefix: str = ""
    shard_limit: int = 1024
    max_hot_standbys: int = DEFAULT_MAX_HOT_STANDBYS
    watch_delay_s: float = WATCH_DELAY_S
    auth_keys: str = field(default="", repr=False)
    directory: Path | None = None
    workers: int = 32
    peer_tls: Tls | None = None
    settings: dict[str, str] = field(default_factory=dict)
    prune_period_s: float = 3600.0
    is_ready_with_failed: bool = True


class StuckShardsError(GazetteError):
    """Calls of an application's hooks have not returned in time.

    Bound the work of a hook: what it waits for needs a time-out.

    Args:
        calls: the calls, in words.
    """

    def __init__(self, calls: Sequence[str]) -> None:
        super().__init__(
            f"shards have not ended within {SHUTDOWN_TIMEOUT_S:.0f} s: {'; '.join(calls)}; what a"
            " handler did is not committed, and the next primary does it again: give a time-out to"
            " what it waits for"
        )


class Consumer:
    """Process that runs shards, on the running event loop.

    Args:
        config: its configuration.
        application: the application.
        transport: to the journals. The caller closes it, after :meth:`stop`.

    Attributes:
        service: the shard service of its port, from :meth:`start` on.
        pages: calls that show shards of all processes, from :meth:`start` on.
        endpoints: the application's HTTP endpoints, from :meth:`start` on.
        methods: gRPC methods of shards' state, the application's among them, from :meth:`start` on.
        resolver: resolver of shards, from :meth:`start` on.
        keyspace: its mirror of Etcd.
        authority: verifies the tokens of callers, and signs those of its own calls.
        ended: done when it has drained, or with a fatal error, such as
            :class:`~gazette_sdk.errors.LeaseLostError`. Stop it then.
        new_on_step: for tests; see :mod:`gazette_sdk.testing.shards`.

    Raises:
        ConfigurationError: the configuration or the application cannot be used.
    """

    new_on_step: ClassVar[Callable[[str], OnStep] | None] = None
    """Function of a shard's id that returns what its runner calls at each step of a commit."""

    service: ShardService
    pages: ShardPages
    endpoints: HttpEndpoints
    _calls: EndpointCalls
    methods: Sequence[Method]
    resolver: ShardResolver[LocalShard]

    def __init__(
        self,
        config: ConsumerConfig,
        application: Application[Any, Any],
        transport: Transport,
    ) -> None:
        self.config = config
        self.application = application
        self.keyspace = ConsumerKeySpace(
            config.etcd_prefix or f"{CONSUMERS_PREFIX}/{application.full_name}"
        )
        self.authority = authority_for(config.auth_keys)
        self._transport = transport
        self._member = MemberProcess(config.etcd, kind="consumer")
        self.ended = self._member.ended
        self._id = pb.ProcessSpec.ID(zone=config.zone, suffix=config.suffix)
        self._peers: ShardClient | None = None
        self._member_calls: MemberCalls | None = None
        self._workers: ThreadPoolExecutor | None = None
        self._queries = Queries()
        self._directory: Path | None = None
        self._is_application_started = False
        self._is_composed = False
        self._is_stopped = False

    @property
    def member(self) -> MemberProcess:
        """Connection to Etcd and lease of this process."""
        return self._member

    @property
    def etcd_version(self) -> tuple[int, ...]:
        """Version of the connected Etcd server, from :meth:`start` on."""
        assert self._member.etcd is not None
        return self._member.etcd.version

    @property
    def unready(self) -> str:
        """Why this process is not ready, if failed shards count; empty text if it is."""
        if self.config.is_ready_with_failed:
            return ""
        failed = sum(
            each.value.code == cpb.ReplicaStatus.FAILED
            for each in self.keyspace.local_assignments(self._id.zone, self._id.suffix)
        )
        return f"shards of this process that have failed: {failed}" if failed else ""

    # ---------------------------------------------------------------- start

    async def start(self) -> None:
        """Join the application's processes, and begin to run shards.

        It waits for Etcd, and while another process has this one's id. It can be cancelled. After
        an error, :meth:`stop` cleans up.

        Raises:
            ConfigurationError: Etcd's address or the directory cannot be used.
            EtcdError: Etcd refused.
        """
        config = self.config
        spec = cpb.ConsumerSpec(
            process_spec=pb.ProcessSpec(id=self._id, endpoint=config.endpoint),
            shard_limit=config.shard_limit,
        )
        validate_consumer_spec(spec)
        directory = self._directory = await asyncio.to_thread(_make_directory, config.directory)
        workers = self._workers = ThreadPoolExecutor(config.workers, thread_name_prefix="shard")
        etcd = await self._member.connect()
        membership = await self._member.join(self.keyspace.member_key(config.zone, config.suffix))
        process = Process(
            name=self.application.full_name,
            zone=config.zone,
            suffix=config.suffix,
            endpoint=config.endpoint,
            transport=self._transport,
            settings=dict(config.settings),
        )
        await on_worker(workers, self.application.start, process)
        self._is_application_started = True
        revision = await membership.announce(complete(spec))
        await self.keyspace.load(etcd, revision)

        parts = ShardParts(
            application=self.application,
            transport=self._transport,
            etcd=etcd,
            keyspace=self.keyspace,
            local_id=self._id,
            workers=workers,
            directory=directory,
            lookups=asyncio.Semaphore(LOOKUPS_MAX),
            openings=asyncio.Semaphore(OPENINGS_MAX),
            new_on_step=type(self).new_on_step,
            exits=self._member.fail,
        )
        self.resolver = ShardResolver(
            self.keyspace,
            self._id,
            make=lambda entry, _: LocalShard(entry, parts),
            shut_down=lambda _, shard: shard.shut_down(),
        )
        self._peers = ShardClient(
            config.endpoint,
            authorizer=self.authority if isinstance(self.authority, Authority) else None,
            tls=config.peer_tls,
        )
        members = self._member_calls = MemberCalls(
            self.keyspace, self._id, endpoint=config.endpoint, tls=config.peer_tls
        )
        authorization = Authorization(self.authority)
        generator = ShardGenerator(
            self.application,
            self._transport,
            selectors_of(self.application.all_sources),
            existing=self._existing,
            apply=self._apply,
            deletes=True,
            leads=self._leads,
            until_changed=self.keyspace.wait_for_update,
        )
        self.service = ShardService(
            resolver=self.resolver,
            keyspace=self.keyspace,
            etcd=etcd,
            local_id=self._id,
            peers=self._peers,
            authorization=authorization,
            templates=self._shard_templates,
            faults=lambda: generator.faults,
            application=self.application.full_name,
        )
        self.pages = ShardPages(
            resolver=self.resolver,
            keyspace=self.keyspace,
            transport=self._transport,
            members=members,
            authorization=authorization,
            application=self.application.full_name,
            max_hot_standbys=config.max_hot_standbys,
        )
        self._calls = EndpointCalls(
            self.resolver,
            transport=self._transport,
            queries=self._queries,
            authorization=authorization,
            exits=self._member.fail,
            windows=self.application.windows,
            tables=self.application.tables,
        )
        self.endpoints = HttpEndpoints(
            self.application.endpoints, self._calls, self._peers, tls=config.peer_tls
        )
        self._is_composed = True
        declared = contained(self.application.rpcs)
        self.methods = tuple(application_methods((STATE, *declared), self._calls, self._peers))
        await self._check_sources()
        self.resolver.local.refresh()
        run = self._member.run
        run("watch", self.keyspace.watch(etcd, delay_s=config.watch_delay_s))
        run(
            "allocator",
            self._member.allocate(
                self.keyspace,
                config.zone,
                config.suffix,
                ShardAllocation(config.max_hot_standbys),
            ),
        )
        run("generator", generator.run())
        if config.prune_period_s:
            pruning = LogPruning(
                self._transport, self._all_hints, self._leads, period_s=config.prune_period_s
            )
            run("pruning", pruning.run())
        verifier = Verifier(
            etcd, self.keyspace, self._id, membership.lease, dial=dial, kind="consumer"
        )
        neighbours = Neighbours(self.keyspace, self._id, verifier.suspect, hold=hold)
        self.keyspace.observers += [verifier.observe, neighbours.observe]
        run("verifier", verifier.run())
        run("neighbours", neighbours.run())

    async def _check_sources(self) -> None:
        """Refuse topics that cannot be joined, before the first shard is created.

        Later the shards are run as before, and the generator shows the error.

        Raises:
            ConfigurationError: they cannot be joined.
        """
        if not isinstance(self.application.all_sources, JoinedTopics) or self.keyspace.items():
            return
        try:
            async with asyncio.timeout(LISTING_TIMEOUT_S):
                selectors = selectors_of(self.application.all_sources)
                listings = await list_topics(self._transport, selectors)
        except (GazetteError, TimeoutError) as error:
            _log.info("the source journals cannot be listed yet: %s", error or "no answer")
            return
        if fault := group_journals(self.application.all_sources, listings).fault:
            raise fault

    def _leads(self) -> bool:
        """Return True if this process leads the allocator."""
        members = self.keyspace.members()
        if not members:
            return False
        leader = leader_of(members)
        return leader is not None and (leader.zone, leader.suffix) == (
            self._id.zone,
            self._id.suffix,
        )

    async def _all_hints(self) -> list[ShardHints]:
        """Return the hints of all shards that have a recovery log."""
        etcd = self._member.etcd
        assert etcd is not None

        found = []
        for spec in [item.value for item in self.keyspace.items()]:
            if log := recovery_log(spec):
                stored = await load_hints(etcd, spec)
                found.append(ShardHints(spec.id, log, [stored.primary, *stored.backups]))
        return found

    async def _existing(self) -> Existing:
        return {
            item.id: KnownShard(item.value, item.mod_revision) for item in self.keyspace.items()
        }

    async def _shard_templates(self, journals: Collection[str]) -> Sequence[cpb.ShardSpec]:
        """Return the shards that the application gives to journals of its sources."""
        sources = self.application.all_sources
        if isinstance(sources, JoinedTopics):  # the numbers of journals are those of whole topics
            listings = await list_topics(self._transport, selectors_of(sources))
        else:
            listed = await list_named(self._transport, sorted(journals))
            specs = [journal.spec for journal in listed.values()]
            listings = [
                [spec for spec in specs if matches_journal(selector, spec)]
                for selector in selectors_of(sources)
            ]
        return generated(self.application, listings).shards

    async def _apply(self, changes: Sequence[cpb.ApplyRequest.Change]) -> None:
        """Apply changes of shards.

        Raises:
            EtcdTransactionFailedError: another process changed one meanwhile.
            EtcdError: Etcd failed.
        """
        assert self._member.etcd is not None
        applied = await apply_shards(self._member.etcd, self.keyspace, changes)
        if not applied.succeeded:
            raise EtcdTransactionFailedError
        created = [each.upsert.id for each in changes if not each.expect_mod_revision]
        if created:
            _log.info("created shards", extra={"shards": created})

    # ------------------------------------------------------------------ end

    async def drain(self) -> None:
        """Announce that this process leaves. It continues to run its shards.

        The allocator moves them to others, once those can take over; :attr:`ended` is done when
        none is left. Where others are too few for all standbys, it is done once each shard has
        one, and at once if there is no other process.

        Raises:
            EtcdError: it could not be announced.
        """
        if self._member.membership is not None:
            await self._member.membership.set_exiting()
            self._member.run("leaving", self._end_when_left())

    async def _end_when_left(self) -> None:
        """End this process once no shard needs it, if the allocator cannot take all away."""
        while not self._may_leave():
            await self.keyspace.wait_for_update()
        if not self.ended.done():
            _log.info("other processes have what they can take; the shards here stop")
        self._member.end()

    def _may_leave(self) -> bool:
        """Return True if each shard has a replica elsewhere, or no process can take it.

        While there are as many other processes as the shards have replicas, the allocator moves
        them, and no standby is missed.
        """
        others = {
            (entry.zone, entry.suffix)
            for entry in self.keyspace.members()
            if entry.value.shard_limit > 0 and not entry.value.exiting
        } - {(self._id.zone, self._id.suffix)}
        if not others:
            return True
        replication = ShardAllocation(self.config.max_hot_standbys).desired_replication
        for local in self.keyspace.local_assignments(self._id.zone, self._id.suffix):
            item = self.keyspace.item(local.item)
            if item is None:
                continue
            if len(others) >= replication(item.value):
                return False
            assignments = self.keyspace.assignments(local.item)
            if not any(
                (each.zone, each.suffix) in others and is_consistent(each, assignments)
                for each in assignments
            ):
                return False
        return True

    async def stop(self) -> None:
        """End shards, membership and connections, in this order. Bounded; may be called twice.

        Raises:
            StuckShardsError: calls of handlers have not returned. Everything else has ended. The
                interpreter waits for their threads at its exit.
        """
        if self._is_stopped:
            return
        self._is_stopped = True
        await self._member.cancel("generator", "pruning", "allocator", "leaving", "neighbours")
        stuck = [*await self._stop_serving(), *await self._stop_application()]
        if self._member.membership is not None:
            await self._member.membership.revoke()
        await self._member.cancel("watch", "verifier")  # until now it has answered challenges
        if self._peers is not None:
            await self._peers.aclose()
        if self._member_calls is not None:
            await self._member_calls.aclose()
        if self._member.etcd is not None:
            await self._member.etcd.aclose()
        if self._workers is not None:
            self._workers.shutdown(wait=False, cancel_futures=True)
        if self._directory is not None:
            await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)
        if not self.ended.done():
            self.ended.cancel()
        if stuck:
            raise StuckShardsError(stuck)

    async def _stop_serving(self) -> list[str]:
        """End shards, then what serves calls about them; return calls that have not returned."""
        if not self._is_composed:
            return []
        local = self.resolver.local
        local.stop()
        stuck: list[str] = []
        try:
            async with asyncio.timeout(SHUTDOWN_TIMEOUT_S):
                await local.shutdowns()
        except TimeoutError:
            stuck = [shard.running_call() for shard in local.ending()]
        await self.endpoints.aclose()
        await self._calls.aclose()
        self._queries.shut_down()
        self.service.audit.close()
        return stuck

    async def _stop_application(self) -> list[str]:
        """Call the hook that closes what the application opened; return it if it is too slow."""
        if not self._is_application_started:
            return []
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(SHUTDOWN_TIMEOUT_S):
                # Not by on_worker: a hook that does not return is not waited for.
                stopping = partial(contained, self.application.stop)
                await loop.run_in_executor(self._workers, stopping)
        except TimeoutError:
            return [f"the hook stop of {self.application.full_name} has not returned"]
        except Exception:  # noqa: BLE001 - any of the application's; the rest has to be stopped
            _log.exception("`stop` of the application failed; the process ends all the same")
        return []


def _make_directory(parent: Path | None) -> Path:
    """Make a directory for the shards of this process."""
    try:
        if parent is not None:
            parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="gazette-shards-", dir=parent))
    except OSError as error:
        raise ConfigurationError(
            f"no directory for shards can be made below {parent or tempfile.gettempdir()}: "
            f"{error.strerror}; give another one"
        ) from error
