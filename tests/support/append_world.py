"""A replica of one journal with all that its appends need, without Etcd or a network.

Tests change what the journal is resolved to, its spec, its index, its store and its peers, and
append either by the common case's function where that accepts, or always by the append machine.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gazette_sdk.broker.append.append import Appends
from gazette_sdk.broker.append.common_case import append_now
from gazette_sdk.broker.replica import Replica, ReplicaParts
from gazette_sdk.broker.resolver import Resolution
from gazette_sdk.broker.spool.directory import Durability, SpoolDirectory
from gazette_sdk.cluster.items import AssignmentEntry, ItemEntry
from gazette_sdk.errors import CallError, GazetteError
from gazette_sdk.fragment.content import CoverSet
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Claims
from gazette_sdk.protocol.journal_spec import desired_replication
from gazette_sdk.protocol.rules import equivalent
from gazette_sdk.transport.wire import as_requests
from support.scripted_replicas import is_repeated

__all__ = ["JOURNAL", "World"]

JOURNAL = "a/journal"
LOCAL = pb.ProcessSpec.ID(zone="zone", suffix="broker")
CLAIMS = Claims(capability=0xFFFF, selector=pb.LabelSelector(), expires_at=math.inf)
COMMIT = pb.AppendRequest()


class _Peers:
    """Peers that keep what they get, and acknowledge it unless ``fails``."""

    def __init__(self) -> None:
        self.got: list[pb.ReplicateRequest] = []
        self.fails = False

    async def replicate(self, requests: Any, target: Any) -> AsyncIterator[pb.ReplicateResponse]:
        mine: list[pb.ReplicateRequest] = []
        async for request in as_requests(requests):
            kept = pb.ReplicateRequest()
            kept.CopyFrom(request)
            kept.ClearField("header")
            # When the peers are told what is acknowledged depends on time.
            kept.ClearField("acknowledged_through")
            if is_repeated(kept, mine):
                continue
            mine.append(kept)
            self.got.append(kept)
            if request.acknowledge:
                if self.fails:
                    raise CallError(f"{target.member.suffix} fails", code="UNAVAILABLE")
                yield pb.ReplicateResponse()

    async def append(self, requests: Any, _target: Any) -> pb.AppendResponse:
        items = [item async for item in requests]
        return pb.AppendResponse(status=pb.OK, total_chunks=100 + len(items))


class World:
    """A journal, this broker's replica of it, and its surroundings.

    Args:
        root: directory of spools.
        replication: number of members of the route.
        durability: of commits.
        tries_common_case: True to offer each append to the common case's function first.

    Attributes:
        taken: appends that the function accepted.
    """

    def __init__(
        self,
        root: Path,
        *,
        replication: int = 1,
        durability: Durability = Durability.REPLICATED,
        tries_common_case: bool = False,
    ) -> None:
        self.tries_common_case = tries_common_case
        self.taken = 0
        self.peers = _Peers()
        self.store_error: str | None = None
        self.clock_s = 1_700_000_000.0
        self.status: pb.Status = pb.OK
        self.is_local = True
        self.spec = pb.JournalSpec(name=JOURNAL, replication=replication)
        self.spec.fragment.length = 1 << 20
        self.spec.fragment.stores.append("file:///")
        self._replication = replication
        self._revision = 10
        self._directory = SpoolDirectory(root, durability=durability)
        parts = ReplicaParts(
            complete=lambda _: None,
            refresh=_nothing,
            pulse=_nothing,
            min_append_rate=0,
            max_append_rate=0,
        )
        storage = self._directory.journal(JOURNAL, create_revision=5, cluster_id=77)
        self.replica = Replica(JOURNAL, 5, storage, parts)
        self.replica.index.first_refresh.set()
        self.spool = self.replica.spool.peek()
        self.spool._now = lambda: self.clock_s
        self.shared: Any = Appends(
            resolver=self,  # type: ignore[arg-type]
            etcd=self,  # type: ignore[arg-type]
            stores=self,  # type: ignore[arg-type]
            peers=self.peers,  # type: ignore[arg-type]
            max_replication=9,
            now=lambda: self.clock_s,
        )
        self.resolve_anew()

    # ------------------------------------------------------------------- surroundings

    def resolve_anew(self) -> None:
        """Make what the journal is resolved to from now on."""
        self._revision += 1
        route = pb.Route(members=[LOCAL], primary=0)
        for number in range(1, desired_replication(self.spec, self._replication)):
            route.members.add(zone="zone", suffix=f"peer-{number}")
        route.endpoints.extend("http://there" for _ in route.members)
        value = pb.Route(members=route.members, primary=0)
        assignments = [
            AssignmentEntry(
                b"key-%d" % number,
                value,
                1,
                1,
                1,
                0,
                b"",
                JOURNAL,
                member.zone,
                member.suffix,
                number,
            )
            for number, member in enumerate(route.members)
        ]
        spec = pb.JournalSpec()
        spec.CopyFrom(self.spec)
        status = self.status
        if status == pb.OK and spec.suspend.level == pb.JournalSpec.Suspend.FULL:
            status = pb.SUSPENDED
        etcd = pb.Header.Etcd(cluster_id=77, member_id=1, revision=self._revision, raft_term=1)
        process_id = LOCAL if self.is_local else pb.ProcessSpec.ID(zone="zone", suffix="peer-1")
        self._resolution = Resolution(
            journal=JOURNAL,
            status=status,
            header=pb.Header(process_id=process_id, route=route, etcd=etcd),
            spec=spec,
            item=ItemEntry(b"item", spec, 1, 1, 1, 0, b"", JOURNAL),
            assignments=assignments,
            replica=self.replica,
            invalidated=self.replica.signal,
            is_local=self.is_local or status != pb.OK,
        )

    def change_route(self) -> None:
        """Make what was resolved old."""
        self.replica.invalidate()
        self.resolve_anew()

    def list_fragment(self, begin: int, end: int) -> None:
        """Have the stores hold a fragment."""
        remote = CoverSet()
        remote.add(pb.Fragment(journal=JOURNAL, begin=begin, end=end, mod_time=int(self.clock_s)))
        self.replica.index.replace_remote(remote)

    local_id = LOCAL

    def known(self, journal: str, _claims: Claims, **wanted: Any) -> Resolution | None:
        """As the resolver's, which has resolved the journal before."""
        assert journal == JOURNAL
        return None if wanted["min_revision"] > self._revision else self._resolution

    async def resolve(self, journal: str, _claims: Claims, **wanted: Any) -> Resolution:
        """As the resolver's."""
        assert journal == JOURNAL
        while wanted["min_revision"] > self._revision:
            self.resolve_anew()
        return self._resolution

    def is_current(self, resolution: object, replica: Replica) -> bool:
        """As the resolver's."""
        is_ours = resolution is self._resolution and self.is_local and self.status == pb.OK
        return is_ours and not replica.signal.fired

    def has_route(self, _replica: Replica, header: pb.Header) -> bool:
        """As the resolver's."""
        return equivalent(header.route, self._resolution.header.route)

    async def txn(self, _compares: Any, puts: Any) -> Any:
        """Take a spec that is written to Etcd."""
        self.spec = pb.JournalSpec.FromString(puts[0].value)
        self.resolve_anew()
        return SimpleNamespace(succeeded=True, revision=self._revision)

    def health(self, _store: str) -> Any:
        """Return the health of the journal's store."""
        loop = asyncio.get_running_loop()
        return SimpleNamespace(
            error=self.store_error,
            request_soon=lambda: None,
            consecutive_failures=99,
            failing_since=loop.time() - 99,
            checked_at=loop.time(),
        )

    # ------------------------------------------------------------------------ appends

    async def append(self, request: pb.AppendRequest, content: bytes) -> pb.AppendResponse | str:
        """Append. Returns the response, or the error."""
        try:
            if self.tries_common_case and content:
                before = self.state()
                started = append_now(self.shared, request, content, CLAIMS)
                if started is not None:
                    self.taken += 1
                    await started.acknowledged()
                    return pb.AppendResponse.FromString(started.response)
                assert self.state() == before, "it declined, and something has changed"
            items = _items(content)
            return await self.shared.append(request, items, CLAIMS)
        except GazetteError as error:
            return f"{type(error).__name__}: {error}"

    def state(self) -> Any:
        """Return all that an append may change."""
        spool, index = self.spool, self.replica.index
        content = spool.content_file
        fragment = spool.fragment
        length = fragment.end - fragment.begin
        return (
            fragment.SerializeToString(deterministic=True),
            spool.registers.SerializeToString(deterministic=True),
            spool.uncommitted_bytes,
            b"" if content is None else content.read_at(0, length),
            index.summary(),
            [each.SerializeToString(deterministic=True) for each, _ in index.local()],
            [request.SerializeToString(deterministic=True) for request in self.peers.got],
            self.replica.agreed,
            self.replica.pipeline.free,
        )

    async def close(self) -> None:
        """End the replica."""
        if not self.replica.pipeline.free:
            self.replica.pipeline.put(self.replica.pipeline.peek())
        await self.replica.shut_down()
        await asyncio.to_thread(self._directory.close)


async def _nothing(_: Any) -> None:
    pass


async def _items(content: bytes) -> AsyncIterator[Any]:
    if content:
        yield content
    yield COMMIT
