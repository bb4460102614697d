"""Broker: its parts, the order of its start, and the order of its end (broker section 17).

::

    broker = Broker(BrokerConfig(suffix="broker-1", endpoint="http://…", …))
    await broker.start()
    serve(broker.service)            # after whatever fronts
    await broker.ended               # until it drained, or cannot continue
    await broker.stop()
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from gazette_sdk.broker.api.in_process import InProcessTransport
from gazette_sdk.broker.append.append import Appends
from gazette_sdk.broker.append.common_case import is_at_rest
from gazette_sdk.broker.append.pulse import Pulses
from gazette_sdk.broker.failover.failover import Failover
from gazette_sdk.broker.fragments.persister import Persister
from gazette_sdk.broker.fragments.refresh import Retention, UnstoredCopies, refresh_index
from gazette_sdk.broker.listing import Listing
from gazette_sdk.broker.metrics import CarriedBytes
from gazette_sdk.broker.mirror import SpecMirror
from gazette_sdk.broker.read import ReadServer
from gazette_sdk.broker.recovery.custody import TASKS as CUSTODY_TASKS
from gazette_sdk.broker.recovery.custody import Custody, Departure, is_alone, until_none_stays
from gazette_sdk.broker.recovery.peers import LISTING_TIMEOUT_S, PeerInventory
from gazette_sdk.broker.replica import Replica, ReplicaParts
from gazette_sdk.broker.resolver import Resolver
from gazette_sdk.broker.service import JournalService
from gazette_sdk.broker.spool.directory import (
    Durability,
    LeaseNote,
    NotedLease,
    SpoolDirectory,
    make_default_root,
    revoke_noted,
)
from gazette_sdk.broker.spool.files import CompletedSpool
from gazette_sdk.broker.views.events import ClusterEvents, EventRecorder, EventRing
from gazette_sdk.broker.views.heads import Heads, LocalHeads
from gazette_sdk.broker.views.page import ClusterViews, JournalPages
from gazette_sdk.cluster.broker_keys import (
    BrokerKeySpace,
    JournalAllocation,
    JournalEntry,
)
from gazette_sdk.cluster.consumer_keys import CONSUMERS_PREFIX
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.keyspace import WATCH_DELAY_S
from gazette_sdk.cluster.membership import EtcdConfig, MemberProcess, Membership
from gazette_sdk.errors import ConfigurationError
from gazette_sdk.fragment.registry import StoreRegistry
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Authority, authority_for
from gazette_sdk.protocol.journal_spec import DEFAULT_MAX_REPLICATION
from gazette_sdk.protocol.labels import skipped_to
from gazette_sdk.protocol.rules import validate_broker_spec
from gazette_sdk.retries import Waits
from gazette_sdk.server.authorization import Authorization
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.member_calls import MemberCalls
from gazette_sdk.transport.stream.wire import ChosenTransport
from gazette_sdk.transport.wire import Tls


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerConfig:
    """Configuration of a broker; its defaults are those of the command line.

    Attributes:
        suffix: id of the process within its zone.
        endpoint: URL at which others reach it.
        spool_dir: directory of its spools; they survive the process there. ``None`` for a private
            one below the temporary directory, of this broker and Etcd cluster.
        zone: zone of the process.
        etcd: how it reaches Etcd.
        etcd_prefix: prefix of the cluster's keys.
        answer_timeout_s: bound of a peer's answer to a replication; ``None`` for half of the lease.
        journal_limit: most replicas of journals that it takes.
        file_root: directory of ``file://`` stores.
        file_only: keep all stores below ``file_root``.
        durability: events that an acknowledged append survives.
        max_append_rate: bytes per second, for journals with a greater limit; 0 for none.
        min_append_rate: bytes per second that a client has to sustain; 0 for no minimum.
        max_replication: cap of every journal's replication.
        watch_delay_s: time for which changes of Etcd are collected.
        audited: calls that are recorded in the audit log.
        auth_keys: base64 keys that verify callers and sign calls to peers; empty for none.
        allow_stores: URLs of fragment stores that callers whose token has a selector may give to
            their journals; other callers may use any.
        auto_suspend: suspend idle journals.
        mirror_specs: write specs and hints into fragment stores; see `mirror`.
        prune: remove stored fragments that are older than their journal's retention; ``dry-run``
            only logs them.
        peer_tls: certificates toward peers.
        consumers_prefix: prefix in Etcd below which applications have their keys.
        applications: names of applications, each with the URL of one of its processes, where Etcd
            does not show them.
    """

    suffix: str
    endpoint: str
    spool_dir: Path | None
    zone: str = "local"
    etcd: EtcdConfig = field(default_factory=EtcdConfig)
    etcd_prefix: str = "/gazette/cluster"
    answer_timeout_s: float | None = None
    journal_limit: int = 1024
    file_root: Path | None = None
    file_only: bool = False
    durability: Durability = Durability.REPLICATED
    max_append_rate: int = 0
    min_append_rate: int = 65536
    max_replication: int = DEFAULT_MAX_REPLICATION
    watch_delay_s: float = WATCH_DELAY_S
    audited: Literal["off", "refusals", "all"] = "off"
    auth_keys: str = ""
    allow_stores: tuple[str, ...] = ()
    auto_suspend: bool = False
    mirror_specs: bool = False
    prune: Literal["true", "false", "dry-run"] = "true"
    peer_tls: Tls | None = None
    consumers_prefix: str = CONSUMERS_PREFIX
    applications: tuple[tuple[str, str], ...] = ()


SWEEP_PERIOD_S = 60 * 60.0
"""Stores that were not used for this long are closed."""

SHUTDOWN_TIMEOUT_S = 5.0
"""Bound of the wait for running appends, and again of the wait for cancelled ones, in a stop."""

PERSIST_TIMEOUT_S = 10.0
"""Default bound of the uploads of a stop. The next start recovers the rest from the spool
directory."""

PERSIST_AGAIN_S = 1.0
"""Bound of the uploads after the broker left the cluster, if the first bound was reached."""

RECONNECT_BACKOFF_MAX_S = 0.5
"""Longest pause before a lost peer is dialled again."""

_log = logging.getLogger(__name__)


class Broker:
    """Broker of a cluster, on the running event loop.

    Args:
        config: its configuration.
        peers: carries calls to other brokers; by default over the best wire of each peer.

    Attributes:
        service: the service of its fronts, from :meth:`start` on.
        views: the calls of its fronts that show the cluster.
        listing: lists its journals.
        member_calls: calls the other brokers with the tokens of callers.
        local_heads: heads of the journals that this broker holds.
        keyspace: its mirror of Etcd.
        authority: verifies the tokens of callers, and signs those of its own calls.
        carried: bytes of its clients' appends and reads.
        ended: done when it has drained, or with a fatal error, such as
            :class:`~gazette_sdk.errors.LeaseLostError`. Stop it then.

    Raises:
        ConfigurationError: the configuration cannot be used.
    """

    service: JournalService
    views: ClusterViews
    listing: Listing
    member_calls: MemberCalls
    local_heads: LocalHeads
    resolver: Resolver
    persister: Persister
    _custody: Custody
    _failover: Failover
    _departure: Departure

    def __init__(self, config: BrokerConfig, peers: Transport | None = None) -> None:
        if config.file_only and config.file_root is None:
            raise ConfigurationError(
                "file_only=True keeps all stores in files: give file_root, too"
            )
        if config.file_root is not None and not config.file_root.is_dir():
            raise ConfigurationError(f"the file root {config.file_root} is no directory; create it")
        self.config = config
        self.keyspace = BrokerKeySpace(config.etcd_prefix)
        self._member = MemberProcess(config.etcd, kind="broker")
        self.ended = self._member.ended
        self._id = pb.ProcessSpec.ID(zone=config.zone, suffix=config.suffix)
        self.authority = authority_for(config.auth_keys)
        self.carried = CarriedBytes()
        self._stores: StoreRegistry | None = None
        self._spools: SpoolDirectory | None = None
        self._reads: ReadServer | None = None
        self._peers = peers
        self._recorder: EventRecorder | None = None
        self._is_composed = False
        self._is_stopped = False
        self._left_in_order = False  # all that is uploaded then was ours when we left

    @property
    def _etcd(self) -> Etcd | None:
        return self._member.etcd

    @property
    def etcd(self) -> Etcd:
        """Connection to Etcd, from :meth:`start` on."""
        assert self._member.etcd is not None
        return self._member.etcd

    @property
    def member(self) -> MemberProcess:
        """Connection and lease of this process."""
        return self._member

    @property
    def stores(self) -> StoreRegistry:
        """Fragment stores, from :meth:`start` on."""
        assert self._stores is not None
        return self._stores

    @property
    def spool_root(self) -> Path:
        """Directory of spools, from :meth:`start` on."""
        assert self._spools is not None
        return self._spools.root

    @property
    def recorder(self) -> EventRecorder:
        """Recorder of the events of the cluster, from :meth:`start` on."""
        assert self._recorder is not None
        return self._recorder

    @property
    def _membership(self) -> Membership | None:
        return self._member.membership

    @property
    def etcd_version(self) -> tuple[int, ...]:
        """Version of the connected Etcd server, from :meth:`start` on."""
        assert self._etcd is not None
        return self._etcd.version

    # ---------------------------------------------------------------- start

    async def start(self) -> None:
        """Recover the spools of an earlier process, join the cluster, and begin to serve.

        It waits for Etcd, and while another process has this broker's id. It can be cancelled.
        The lease of the earlier process over its spools is revoked. Once the broker is announced,
        little is left to do: peers that dial it are refused until its fronts serve.
        After an error, :meth:`stop` cleans up.

        Raises:
            ConfigurationError: Etcd's address or the spool directory cannot be used.
            EtcdError: Etcd refused.
        """
        config = self.config
        spec = pb.BrokerSpec(
            process_spec=pb.ProcessSpec(id=self._id, endpoint=config.endpoint),
            journal_limit=config.journal_limit,
        )
        validate_broker_spec(spec)
        self._stores = StoreRegistry(config.file_root, config.file_only)
        if config.spool_dir is not None:  # its errors are reported before Etcd is waited for
            self._spools = await self._open_spools(config.spool_dir)
        etcd = await self._member.connect()
        spools = self._spools = self._spools or await self._open_spools(
            await self._make_default_root(etcd)
        )
        custody = Custody(
            etcd,
            self.keyspace,
            spools,
            self._id,
            max_replication=config.max_replication,
            member=self._member,
        )
        await custody.withhold_other_history()
        note = LeaseNote(spools.root)
        await revoke_noted(etcd, await asyncio.to_thread(note.read))
        await custody.recover(etcd.cluster_id)

        key = self.keyspace.member_key(config.zone, config.suffix)
        membership = await self._member.join(key)
        noted = NotedLease(etcd.cluster_id, key, membership.lease)
        await asyncio.to_thread(note.write, noted)
        revision = await membership.announce(spec)
        await self.keyspace.load(etcd, revision)

        await custody.load()
        self._custody = custody
        self._compose(etcd, self._stores, spools, membership)
        run = self._member.run
        run("watch", self.keyspace.watch(etcd, delay_s=config.watch_delay_s))
        run("allocator", self._allocate())
        run("persister", self.persister.run())
        custody.run()
        run("failover", self._failover.run())
        run("sweeper", self._sweep(self._stores))
        if config.mirror_specs:
            mirror = SpecMirror(
                etcd, self.keyspace, self._stores, self._id, config.consumers_prefix
            )
            run("mirror of specs", mirror.run())

    async def _offer(self, takes_journals: bool) -> None:  # noqa: FBT001 - the interface of fail-over
        """Announce whether this broker takes journals.

        Raises:
            EtcdError: it could not be announced.
        """
        assert self._membership is not None
        spec = pb.BrokerSpec.FromString(self._membership.spec.SerializeToString())
        spec.journal_limit = self.config.journal_limit if takes_journals else 0
        await self._membership.update(spec)

    async def _open_spools(self, root: Path) -> SpoolDirectory:
        return await asyncio.to_thread(SpoolDirectory, root, durability=self.config.durability)

    async def _make_default_root(self, etcd: Etcd) -> Path:
        """Make the default directory of spools, which is named by the Etcd cluster."""
        config = self.config
        return await asyncio.to_thread(
            make_default_root, etcd.cluster_id, config.etcd_prefix, config.zone, config.suffix
        )

    def _compose(
        self,
        etcd: Etcd,
        stores: StoreRegistry,
        spools: SpoolDirectory,
        membership: Membership,
    ) -> None:
        config, custody = self.config, self._custody
        self.persister = Persister(
            stores, self.keyspace.item, stored=self._report_stored, may_upload=self._may_upload
        )
        peers = self._peers = self._peers or ChosenTransport(
            config.endpoint,
            zone=config.zone,
            cache_size=0,
            tls=config.peer_tls,
            authorizer=self.authority if isinstance(self.authority, Authority) else None,
            # Members of a cluster that is being moved to TLS; their addresses come from Etcd.
            allow_plaintext_tokens=True,
            reconnect_backoff_max_s=RECONNECT_BACKOFF_MAX_S,
        )
        self._reads = ReadServer(stores, self.carried)

        def make_replica(item: JournalEntry, predecessor: Replica | None) -> Replica:
            taken, ready = custody.take(item)
            replica = Replica(
                item.id,
                item.create_revision,
                spools.journal(
                    item.id,
                    create_revision=item.create_revision,
                    cluster_id=self.keyspace.header.cluster_id,
                ),
                parts,
                recovered=[*self.persister.unstored(item.id, item.create_revision), *taken],
                predecessor=predecessor,
                ready=ready,
            )
            replica.index.skipped_to = skipped_to(item.value.labels)
            replica.index.unverified_end = partial(
                custody.unverified_end, item.id, item.create_revision
            )
            return replica

        self.resolver = Resolver(self.keyspace, self._id, make_replica, custody.continued_at)
        failover = self._failover = Failover(
            etcd,
            self.keyspace,
            local_id=self._id,
            lease=membership.lease,
            life=membership.life,
            ttl_s=config.etcd.lease_ttl_s,
            answer_timeout_s=config.answer_timeout_s or config.etcd.lease_ttl_s / 2,
            allocation=JournalAllocation(config.max_replication),
            offer=self._offer,
        )
        membership.lost.add_done_callback(lambda _: failover.known_lease.lost())
        appends = Appends(
            resolver=self.resolver,
            etcd=etcd,
            stores=stores,
            peers=peers,
            max_replication=config.max_replication,
            streams=failover.streams,
            waits_for=custody.waits_for,
            known_lease=failover.known_lease,
            is_all_stored=custody.is_all_stored,
            stored_end=custody.stored_end,
            record_route=custody.record,
            known_claims=custody.known_claims,
            refusal=custody.refusal,
            carried=self.carried,
        )
        retention, waits = Retention(stores, config.prune), Waits()
        parts = ReplicaParts(
            complete=self.persister.complete,
            refresh=lambda replica: refresh_index(
                replica.journal,
                replica.index,
                stores,
                self.keyspace.item,
                self.persister.check_listed,
                retention=lambda: retention if replica.is_primary else None,
                waits=waits,
            ),
            pulse=Pulses(
                appends.append,
                auto_suspend=config.auto_suspend,
                waits=waits,
                is_at_rest=partial(is_at_rest, appends),
            ).run,
            min_append_rate=config.min_append_rate,
            max_append_rate=config.max_append_rate,
            copy_unstored=UnstoredCopies(self.resolver, peers).run,
            unconfirmed=custody.add,
        )
        self.listing = Listing(
            self.keyspace,
            etcd,
            self._id,
            config.allow_stores,
            custody.absent_brokers,
        )
        self.service = JournalService(
            resolver=self.resolver,
            appends=appends,
            listing=self.listing,
            reads=self._reads,
            stores=stores,
            peers=peers,
            authorization=Authorization(self.authority),
            hand_over_s=failover.hand_over_s,
            on_broken=failover.suspect,
            outdated_uploads=self.persister.outdated_uploads,
        )
        self._add_views(stores, self.service)
        inventory = PeerInventory(
            self.resolver,
            peers=peers,
            local=InProcessTransport(self.service, self.authority),
            stores=stores,
            max_replication=config.max_replication,
            answer_timeout_s=min(LISTING_TIMEOUT_S, config.etcd.lease_ttl_s / 2),
        )
        custody.begin(self.resolver, self.persister, inventory, membership.lease)
        self._departure = Departure(
            etcd,
            self.keyspace,
            self._id,
            stores=stores,
            persister=self.persister,
            record_route=custody.record,
            is_undecided=custody.is_undecided,
        )
        self._is_composed = True
        self.resolver.refresh()

    def _add_views(self, stores: StoreRegistry, service: JournalService) -> None:
        """Make the calls that show the cluster."""
        config = self.config
        members = self.member_calls = MemberCalls(
            self.keyspace, self._id, endpoint=config.endpoint, tls=config.peer_tls
        )
        ring = EventRing(f"{config.zone}/{config.suffix}")
        recorder = self._recorder = EventRecorder(ring, self.keyspace)
        recorder.begin()
        stores.on_health = recorder.store_changed
        local = self.local_heads = LocalHeads(self.resolver, self.persister, self._id)
        heads = Heads(self.keyspace, self._id, local, members, service.read)
        pages = JournalPages(self.listing, heads, max_replication=config.max_replication)
        self.views = ClusterViews(
            Authorization(self.authority),
            self.listing,
            pages,
            heads,
            ClusterEvents(ring, members),
            service.stopping,
        )

    async def _may_upload(self, spool: CompletedSpool) -> bool:
        """Return False if others have continued a journal since our lease ended.

        Raises:
            EtcdError: Etcd did not answer.
        """
        item = self.keyspace.item(spool.fragment.journal)
        if item is None or self._left_in_order or await self._failover.has_lease():
            return True
        return not await self._custody.is_continued_in_etcd(item)

    def _report_stored(self, spool: CompletedSpool) -> None:
        """Tell the other replicas that we have stored a fragment of a journal which we lead."""
        replica = self.resolver.replica(spool.fragment.journal, spool.create_revision)
        if replica is None:
            return
        replica.index.note_uploaded(spool.fragment)
        if replica.ready is not None:
            replica.ready.pipeline.tell_stored(spool.fragment.end)

    # ------------------------------------------------------------------ end

    async def drain(self) -> None:
        """Announce that this broker leaves the cluster. It continues to serve.

        The allocator moves this broker's journals to others; :attr:`ended` is done when none is
        left. While too few members would remain for a journal's replication, this broker keeps
        its journals. It is done at once where no other broker is left that could take them, or all
        others drain, too: :meth:`stop` then stores all of their content.

        Raises:
            EtcdError: it could not be announced.
        """
        if self._membership is not None:
            self.persister.set_exiting()
            await self._membership.set_exiting()
            self._member.run("leaving alone", self._end_when_none_stays())

    async def stop(self, *, persist_timeout_s: float = PERSIST_TIMEOUT_S) -> None:
        """End streams, replicas, uploads, membership and connections, in this order. Bounded.

        The next start recovers from the spool directory what could not be uploaded. Stop the
        fronts first, or at the same time. Calling it again does nothing.

        Args:
            persist_timeout_s: bound of the uploads.
        """
        if self._is_stopped:
            return
        self._is_stopped = True
        await self._member.cancel(
            "allocator",
            "leaving alone",
            *CUSTODY_TASKS,
            "sweeper",
            "mirror of specs",
        )
        if self._is_composed:
            await self._failover.end_changes()
            self.service.end_streams()
            self._custody.look()
            replicas = self.resolver.replicas
            self.resolver.stop_local()
            self._custody.let_replicas_end()
            is_closed = await self._shut_down_replicas(primaries=True)
            await self._member.cancel("persister")
            self.persister.set_exiting()
            if not await self._persist(persist_timeout_s):
                persist_timeout_s = min(persist_timeout_s, PERSIST_AGAIN_S)
            elif is_closed and is_alone(self.keyspace, self._id):
                await self._departure.withdraw_routes(replicas)
            self._custody.flush()
        # The journals that we led are complete and stored, so others may continue them. Of the
        # other journals the primary releases our spool when the membership ends.
        if self._membership is not None:
            self._left_in_order = self._is_composed and self._failover.known_lease.is_alive
            await self._membership.revoke()
        await self._member.cancel("failover")  # until now it has answered challenges
        if self._is_composed:
            await self._shut_down_replicas(primaries=False)
            await self._persist(persist_timeout_s)
            await self.persister.aclose()
        await self._member.cancel("watch")
        await self._close()
        if not self.ended.done():
            self.ended.cancel()

    async def _close(self) -> None:
        """Close connections and files."""
        if self._recorder is not None:
            self._recorder.end()
            await self.member_calls.aclose()
        if self._reads is not None:
            self._reads.close()
        if self._peers is not None:
            await self._peers.aclose()
        if self._stores is not None:
            await self._stores.aclose()
        if self._etcd is not None:
            await self._etcd.aclose()
        if self._spools is not None:
            await asyncio.to_thread(self._spools.close)

    async def _end_when_none_stays(self) -> None:
        await until_none_stays(self.keyspace, self._id)
        if not self.ended.done():
            _log.info("no other broker can take the journals over: all content is stored instead")
            self._member.end()

    async def _shut_down_replicas(self, *, primaries: bool) -> bool:
        """Wait for replicas that end. Return False if one did not in time."""
        for cancel in (False, True):
            if cancel:
                self.service.cancel_writes()
            try:
                async with asyncio.timeout(SHUTDOWN_TIMEOUT_S):
                    await self.resolver.shutdowns(primaries=primaries)
            except TimeoutError:
                _log.warning(
                    "replicas have not shut down within %.0f s: appends to them are still running",
                    SHUTDOWN_TIMEOUT_S,
                )
            else:
                return True
        return False

    async def _persist(self, timeout_s: float) -> bool:
        """Upload what is left. Return True if all was uploaded in time."""
        if is_alone(self.keyspace, self._id):
            self._custody.upload_all()
        try:
            async with asyncio.timeout(timeout_s):
                await self.persister.finish()
        except TimeoutError:
            _log.warning(
                "%d fragments could not be uploaded; they stay in %s until the next start",
                self.persister.pending,
                self._spools.root if self._spools is not None else "",
            )
            return False
        return True

    # --------------------------------------------------------------- inside

    async def _allocate(self) -> None:
        config = self.config
        await self._member.allocate(
            self.keyspace, config.zone, config.suffix, JournalAllocation(config.max_replication)
        )

    async def _sweep(self, stores: StoreRegistry) -> None:
        while True:
            await asyncio.sleep(SWEEP_PERIOD_S)
            await stores.sweep()

    def absent_brokers(self, journal: str) -> Sequence[pb.ProcessSpec.ID]:
        """Return the brokers that a journal waits for, since only they have its last bytes.

        None if it waits for none.
        """
        return self._custody.absent_brokers(journal)
