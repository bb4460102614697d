"""Fail-over of one broker: its parts, and how they are told of evidence."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from gazette_sdk.broker.failover.pause_guard import PauseGuard
from gazette_sdk.broker.failover.rebuilder import Rebuilder
from gazette_sdk.broker.replication.peer_streams import PeerStreams
from gazette_sdk.cluster.broker_keys import BrokerKeySpace, JournalAllocation
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.items import AssignmentEntry
from gazette_sdk.cluster.lease import LeaseLife
from gazette_sdk.cluster.verification import Verifier, dial
from gazette_sdk.errors import GazetteError
from gazette_sdk.protocol import broker_pb2 as pb

__all__ = ["Failover"]


class Failover:
    """Verifier of suspected brokers, rebuilder of journals, and guard of this broker's lease.

    Args:
        etcd: the client.
        keyspace: mirror of the cluster, observed from the construction on.
        local_id: this broker.
        lease: id of its lease.
        ttl_s: the lease's time to live.
        answer_timeout_s: bound of a peer's answer.
        allocation: the allocator's rules.
        offer: announces whether this broker takes journals.

    Attributes:
        streams: Replicate streams of this broker to others.
        known_lease: knowledge about this broker's lease.
        hand_over_s: longest silence of a journal's former primary before streams and calls end.
    """

    def __init__(
        self,
        etcd: Etcd,
        keyspace: BrokerKeySpace,
        *,
        local_id: pb.ProcessSpec.ID,
        lease: int,
        life: LeaseLife,
        ttl_s: float,
        answer_timeout_s: float,
        allocation: JournalAllocation,
        offer: Callable[[bool], Awaitable[None]],
    ) -> None:
        self.streams = streams = PeerStreams(answer_timeout_s, self._stream_broke)
        self.hand_over_s = answer_timeout_s / 5
        self._guard = PauseGuard(etcd, lease, life, ttl_s)
        self.known_lease = self._guard.known
        self._verifier = Verifier(
            etcd, keyspace, local_id, lease, dial=dial, kind="broker", on_left=self._left
        )
        self._rebuilder = Rebuilder(
            etcd,
            keyspace,
            allocation,
            local_id,
            streams,
            ttl_s=ttl_s,
            dial=dial,
            is_silent=self._verifier.is_silent,
            offer=offer,
        )
        self._keyspace = keyspace
        keyspace.observers += [self._verifier.observe, self._observe]

    async def run(self) -> None:
        """Answer challenges and guard the lease, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._verifier.run(), name="fail-over verifier")
            group.create_task(self._guard.run(), name="fail-over guard")

    async def has_lease(self) -> bool:
        """Return True if this broker's lease is alive; see :meth:`PauseGuard.has_lease`."""
        return await self._guard.has_lease()

    async def end_changes(self) -> None:
        """Change no journals any more: the broker stops. Challenges are answered on."""
        await self._rebuilder.aclose()

    def suspect(self, peer: pb.ProcessSpec.ID, reason: object) -> None:
        """Verify that a broker lives, because of a stream or a call that broke."""
        self._verifier.suspect(peer, reason)

    def _observe(self) -> None:
        """End calls to primaries that lead no more, if these do not answer; look at our losses."""
        for _, old, new in self._keyspace.changes:
            if new is None and isinstance(old, AssignmentEntry):
                self._rebuilder.lost(old)
                if old.slot == 0:
                    self.streams.lead_no_more(old.zone, old.suffix, old.item, self.hand_over_s)

    def _left(self, zone: str, suffix: str, error: GazetteError) -> None:
        """Break the streams and calls to a broker that is no member, so that none waits for it."""
        self.streams.fail(zone, suffix, error)
        self._rebuilder.left(zone, suffix)

    def _stream_broke(self, peer: pb.ProcessSpec.ID, error: GazetteError, waited_s: float) -> None:
        self._verifier.suspect(peer, error)
        self._rebuilder.failed(peer, error, waited_s=waited_s)
