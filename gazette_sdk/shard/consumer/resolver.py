"""Resolver: which process answers for a shard, and this process' shards (shard section 10).

The resolver observes the KeySpace. After each batch of changes it creates, promotes and stops
this process' shards according to the assignments. A call is resolved against the same mirror.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from gazette_sdk.cluster.consumer_keys import ConsumerKeySpace, ShardEntry
from gazette_sdk.cluster.items import ItemEntry, LocalIdentity, LocalItem, LocalItems
from gazette_sdk.errors import GazetteError, UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.authorization import Claims
from gazette_sdk.protocol.labels import Matcher
from gazette_sdk.protocol.names import strip_meta
from gazette_sdk.protocol.rules import NO_PRIMARY
from gazette_sdk.protocol.shard_spec import matches_shard, source_journals
from gazette_sdk.transport.wire import Peer

MISSING_ID = pb.ProcessSpec.ID(zone="local-ConsumerSpec", suffix="missing-from-Etcd")
"""Our id once our member key is removed: a draining process can still proxy."""


class ResolverStoppedError(GazetteError):
    """Error of a process that stops while Etcd still routes the shard to it."""


class ServedShard(LocalItem[cpb.ShardSpec, cpb.ReplicaStatus], Protocol):
    """Shard of this process, as calls see it. Belongs to the event loop of the process."""

    @property
    def read_through(self) -> Mapping[str, int]:
        """By source journal, the offset through which committed transactions have read."""

    @property
    def write_heads(self) -> Mapping[str, int] | None:
        """By source, the last write head that a broker reported; None while none is read."""

    @property
    def publish_at(self) -> Mapping[str, int]:
        """By journal, the end of the last acknowledgement of this run."""

    @property
    def watermark_us(self) -> int:
        """Watermark of event time, in microseconds since 1970; 0 if there is none."""

    @property
    def recovery(self) -> tuple[int, int]:
        """Bytes of the log that are read and estimated; zeros while it does not recover."""

    async def wait_for_store(self) -> bool:
        """Wait until the primary's store is ready; return False if its run ended before that."""

    async def wait_for_offsets(self, read_through: Mapping[str, int]) -> bool:
        """Wait until the shard has read through offsets of its sources; others do not count.

        Returns:
            False if the primary's run ended before that.
        """

    def in_use(self) -> AbstractContextManager[None]:
        """Delay the destruction of the store while the context is open."""


S = TypeVar("S", bound=ServedShard)


@dataclass(frozen=True, slots=True, eq=False)
class ShardResolution(Generic[S]):
    """Process and shard that answer a call.

    Attributes:
        status: OK, or the status to answer.
        header: of the answer, or of the request to the primary.
        spec: the shard's spec; None if there is none, or the caller may not see it.
        shard: our shard, whose store is ready if the caller waits; None if another process is the
            primary, or the status is not OK.
    """

    status: cpb.Status
    header: pb.Header
    spec: cpb.ShardSpec | None
    shard: S | None


class ShardResolver(Generic[S]):
    """Resolver of shards, and owner of the shards of this process.

    Args:
        keyspace: mirror of Etcd, observed from the construction on.
        local_id: this process.
        make: makes a shard that was assigned to us, from its key and our earlier shard of the very
            same key that is still shutting down, if there is one.
        shut_down: shuts a shard down, given its id and the shard.
        removed: called with the id of a shard that is not assigned to us any more.
    """

    def __init__(
        self,
        keyspace: ConsumerKeySpace,
        local_id: pb.ProcessSpec.ID,
        *,
        make: Callable[[ShardEntry, S | None], S],
        shut_down: Callable[[str, S], Coroutine[Any, Any, None]],
        removed: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._keyspace = keyspace
        self._identity = LocalIdentity(
            keyspace, local_id, missing_id=MISSING_ID, kind="consumer process"
        )
        self._by_journal: dict[str, list[cpb.ShardSpec]] | None = None
        self.local: LocalItems[cpb.ShardSpec, cpb.ReplicaStatus, S] = LocalItems(
            keyspace, local_id, make=make, shut_down=shut_down, removed=removed, kind="shard"
        )
        keyspace.observers.append(self._refresh)

    def _refresh(self) -> None:
        if any(isinstance(c.new or c.old, ItemEntry) for c in self._keyspace.changes):
            self._by_journal = None
        self.local.refresh()

    @property
    def local_id(self) -> pb.ProcessSpec.ID:
        """This process' id, or a placeholder when its member key is removed."""
        return self._identity.local_id

    def shards_of(self, journal: str) -> Sequence[cpb.ShardSpec]:
        """Return the shards that read a journal, in order of their ids."""
        if self._by_journal is None:
            self._by_journal = {}
            for item in self._keyspace.items():
                for name in source_journals(item.value):
                    self._by_journal.setdefault(name, []).append(item.value)
        return self._by_journal.get(strip_meta(journal), [])

    @asynccontextmanager
    async def resolve(
        self,
        shard: str,
        claims: Claims,
        *,
        may_proxy: bool,
        proxy_header: pb.Header | None = None,
        read_through: Mapping[str, int] | None = None,
        waits: bool = True,
    ) -> AsyncGenerator[ShardResolution[S]]:
        """Resolve a call for a shard. Its store stays open while the context is.

        If this process is the primary, it waits until the store is ready and has read through the
        given offsets. The caller bounds that wait.

        Args:
            shard: the shard's id.
            claims: the caller's.
            may_proxy: another process may serve the call.
            proxy_header: header of the process that forwarded the call to us.
            read_through: offsets of source journals to wait for; other journals do not count.
            waits: False to return also a shard whose store is not ready, without any wait.

        Raises:
            ResolverStoppedError: our shards have been stopped.
            GazetteError: the header is of another cluster or for another process.
        """
        if proxy_header is not None:
            self._identity.check_header(proxy_header)
            await self._keyspace.wait_for_revision(proxy_header.etcd.revision)
        resolution = self._resolve(shard, claims, may_proxy=may_proxy)
        if resolution.shard is None:
            yield resolution
            return
        with resolution.shard.in_use():
            if not waits or await _is_ready(resolution.shard, read_through or {}):
                yield resolution
            else:
                yield ShardResolution(cpb.SHARD_STOPPED, resolution.header, resolution.spec, None)

    def _resolve(self, shard: str, claims: Claims, *, may_proxy: bool) -> ShardResolution[S]:
        keyspace, local_id = self._keyspace, self.local_id
        item = keyspace.item(shard)
        route = pb.Route(primary=NO_PRIMARY)
        status: cpb.Status = cpb.OK
        if item is None or not matches_shard(Matcher(claims.selector), item.value):
            item, status = None, cpb.SHARD_NOT_FOUND
        else:
            route = keyspace.shard_route(shard)
            if route.primary == NO_PRIMARY:
                status = cpb.NO_SHARD_PRIMARY
            elif not may_proxy and route.members[route.primary] != local_id:
                status = cpb.NOT_SHARD_PRIMARY
        process_id = route.members[route.primary] if status == cpb.OK else local_id
        header = pb.Header(process_id=process_id, route=route, etcd=keyspace.header)
        local: S | None = None
        if status == cpb.OK and process_id == local_id:
            local = self.local.get(shard)
            if local is None:
                raise ResolverStoppedError(
                    f"this process stops, and does not serve shard {shard} any more; try again,"
                    " another one takes its shards"
                )
        return ShardResolution(status, header, item.value if item is not None else None, local)


def primary_of(shard: str, header: pb.Header) -> Peer:
    """Return the process to which a resolved call is forwarded.

    Args:
        shard: the shard's id.
        header: of its resolution, whose route has a primary.

    Raises:
        UnavailableError: the process has gone.
    """
    route = header.route
    member, endpoint = route.members[route.primary], route.endpoints[route.primary]
    if not endpoint:
        raise UnavailableError(f"the primary of shard {shard} is gone from Etcd; try again")
    return Peer(member.zone, member.suffix, endpoint)


async def _is_ready(shard: ServedShard, read_through: Mapping[str, int]) -> bool:
    """Wait for the store and for offsets; return False if the run of the primary ended before."""
    if not await shard.wait_for_store():
        return False
    return not read_through or await shard.wait_for_offsets(read_through)
