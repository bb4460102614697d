"""Departure of the last broker: what it led is stored, and continues without it.

A journal waits for the members of its last route (`recovery.routes`). If the last broker
leaves, and all content of a journal that it led is stored and listed, it withdraws the route: the
next broker that comes continues after the stored content. The withdrawn route has the offset where
that ends, because a store may show the next broker an older listing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet

from gazette_sdk.broker.append.preconditions import RecordRoute, withdraw_routes
from gazette_sdk.broker.fragments.persister import Persister
from gazette_sdk.broker.fragments.refresh import listed_journals
from gazette_sdk.broker.replica import Replica
from gazette_sdk.cluster.broker_keys import BrokerKeySpace
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.errors import EtcdError
from gazette_sdk.fragment.registry import StoreRegistry
from gazette_sdk.protocol import broker_pb2 as pb

LISTED_TIMEOUT_S = 10.0
"""Bound of the wait for listings that show what was stored."""

WITHDRAWAL_TIMEOUT_S = 2.0
"""Bound of withdrawing the routes of journals."""

_log = logging.getLogger(__name__)


def is_alone(keyspace: BrokerKeySpace, local_id: pb.ProcessSpec.ID) -> bool:
    """Return True if no other broker is a member that could take journals."""
    return not any(
        (entry.zone, entry.suffix) != (local_id.zone, local_id.suffix)
        and entry.value.journal_limit > 0
        for entry in keyspace.members()
    )


async def until_none_stays(keyspace: BrokerKeySpace, local_id: pb.ProcessSpec.ID) -> None:
    """Wait until no other broker is a member that could take journals, and does not drain.

    Brokers that all drain would wait for each other for ever, such as those of one machine.
    """
    while any(
        (entry.zone, entry.suffix) != (local_id.zone, local_id.suffix)
        and entry.value.journal_limit > 0
        and not entry.value.exiting
        for entry in keyspace.members()
    ):
        await keyspace.wait_for_update()


class Departure:
    """Withdrawal of the routes of journals, when the last broker leaves.

    Args:
        etcd: takes the transaction.
        keyspace: mirror of Etcd.
        local_id: this broker.
        stores: of the process.
        persister: knows the journals whose content no store has.
        record_route: returns the changes that record a route.
        is_undecided: returns True if spools of the journal of this name and create revision are
            in quarantine, or may not be on all replicas.
    """

    def __init__(
        self,
        etcd: Etcd,
        keyspace: BrokerKeySpace,
        local_id: pb.ProcessSpec.ID,
        *,
        stores: StoreRegistry,
        persister: Persister,
        record_route: RecordRoute,
        is_undecided: Callable[[str, int], bool],
    ) -> None:
        self._etcd = etcd
        self._keyspace = keyspace
        self._local_id = local_id
        self._stores = stores
        self._persister = persister
        self._record_route = record_route
        self._is_undecided = is_undecided

    async def withdraw_routes(self, replicas: Iterable[Replica]) -> None:
        """Withdraw the routes of journals that we led alone, and whose content is all stored.

        Args:
            replicas: those that we had. Their uploads have ended.
        """
        replicas = list(replicas)
        unlisted = await self._unlisted(replicas)
        ends = {replica.journal: _stored_end(replica) for replica in replicas}
        storeless = self._persister.storeless
        local = self._local_id
        routes = [
            (item, entry, ends.get(entry.item, 0))
            for entry in self._keyspace.local_assignments(local.zone, local.suffix)
            if entry.slot == 0
            and entry.value.members
            and entry.item not in storeless
            and entry.item not in unlisted
            and len(self._keyspace.assignments(entry.item)) == 1
            and (item := self._keyspace.item(entry.item)) is not None
            and not self._is_undecided(entry.item, item.create_revision)
        ]
        try:
            async with asyncio.timeout(WITHDRAWAL_TIMEOUT_S):
                await withdraw_routes(self._etcd, routes, self._record_route)
        except (EtcdError, TimeoutError) as error:
            _log.warning("journals wait for this broker to come back: %s", error or "no answer")

    async def _unlisted(self, replicas: Iterable[Replica]) -> AbstractSet[str]:
        """Return the journals that we led whose stores do not list all of their content soon.

        Others would continue before the end of their content.
        """
        storeless = self._persister.storeless
        ends = {
            replica.journal: end
            for replica in replicas
            if replica.is_primary
            and replica.journal not in storeless
            and (end := _local_end(replica)) > replica.index.listed_end
        }
        unlisted = ends.keys() - await listed_journals(
            ends, self._stores, self._keyspace.item, LISTED_TIMEOUT_S
        )
        for journal in sorted(unlisted):
            _log.warning(
                "%s waits for this broker to come back: its stores do not list its content up to "
                "its end, %d", journal, ends[journal],
            )  # fmt: skip
        return unlisted


def _stored_end(replica: Replica) -> int:
    """Return the end of a journal whose content is all stored."""
    return max(replica.index.listed_end, _local_end(replica))


def _local_end(replica: Replica) -> int:
    """Return the end of a replica's content. It is stored what the replica kept, too."""
    head = replica.storage.head
    return max(replica.kept_end, head.end if head is not None else 0)
