"""Recorded routes: the last route of every journal, in keys of Etcd without a lease.

Assignments end with the leases of their members, and Etcd compacts its history. If all brokers of
a journal were away meanwhile, only a record says who has its last bytes. So a primary that writes
a route records it in the same transaction, outside the cluster's own prefix::

    /gazette_sdk/routes{root}/{journal}#{create revision of the journal}

The value is a ``Header``: the route, the broker that recorded it, and the revision of the route if
it was written earlier than the record.

A broker that has the last bytes of a journal which Etcd does not have any more (`withheld`) adds
itself to the record of create revision 0. That is the record of the journal which is created again,
until it has one of its own.

A broker that is the only member records nothing, unless there are records: its cluster has no keys
but those of the protocol. `route_recorder` records what it wrote when another broker joins.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gazette_sdk.cluster.broker_keys import BrokerKeySpace, JournalEntry
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_messages import Compare, Delete, KeyValue, Operation, Put
from gazette_sdk.cluster.items import parse_value
from gazette_sdk.cluster.keyspace import Entry, KeySpace
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.journal_spec import is_suspended
from gazette_sdk.protocol.rules import NO_PRIMARY

__all__ = ["RecordedRoute", "RecordedRoutes"]

MEMBERS_MIN = 2
"""Members of a cluster in which routes are recorded."""


class RecordedRoute(NamedTuple):
    """Record of a journal's last route.

    Attributes:
        journal: the journal's name.
        create_revision: of the journal.
        route: the route; without members if it was withdrawn.
        revision: at which the route was written.
        recorded_by: the broker that recorded it.
    """

    journal: str
    create_revision: int
    route: pb.Route
    revision: int
    recorded_by: pb.ProcessSpec.ID


class RecordedRoutes:
    """Mirror of the recorded routes of a cluster. It belongs to the event loop.

    Args:
        keyspace: mirror of the cluster.
        local_id: this broker.

    Attributes:
        mirror: of the records; :class:`RecordedRoute` are its values.
    """

    def __init__(self, keyspace: BrokerKeySpace, local_id: pb.ProcessSpec.ID) -> None:
        self._keyspace = keyspace
        self._local_id = local_id
        self._is_loaded = False
        self.mirror: KeySpace = KeySpace(
            f"/gazette_sdk/routes{keyspace.root.rstrip('/')}", self._decode
        )

    async def load(self, etcd: Etcd) -> None:
        """Load all records. Until then no route is recorded.

        Raises:
            EtcdError: Etcd failed, or its roles forbid it.
        """
        await self.mirror.load(etcd)
        self._is_loaded = True

    @property
    def is_used(self) -> bool:
        """True if routes are recorded: other members are there, or records are."""
        has_others = len(self._keyspace.members()) >= MEMBERS_MIN
        return self._is_loaded and (has_others or bool(self.mirror.entries))

    def entry(self, item: JournalEntry) -> Entry[RecordedRoute] | None:
        """Return the record of a journal, or the claims to it; ``None`` if there is neither."""
        return self.own_entry(item) or self.claims(item.id)

    def own_entry(self, item: JournalEntry) -> Entry[RecordedRoute] | None:
        """Return the record of a journal; ``None`` if there is none."""
        return self.mirror.find(self.key(item))

    def claims(self, journal: str) -> Entry[RecordedRoute] | None:
        """Return the record of brokers with bytes of a journal that Etcd lost, if there is one."""
        return self.mirror.find(self._claims_key(journal))

    async def claim(self, etcd: Etcd, journals: Iterable[str]) -> None:
        """Record that this broker has the last bytes of journals that Etcd does not have.

        Raises:
            EtcdError: Etcd failed, or its roles forbid it.
        """
        for journal in journals:
            key = self._claims_key(journal)
            is_written = False
            while not is_written:
                found = (await etcd.range(key)).entries
                members = list(self._decode(found[0]).value.route.members) if found else []
                if self._local_id in members:
                    break
                members = sorted(
                    [*members, self._local_id], key=lambda each: (each.zone, each.suffix)
                )
                value = pb.Header(
                    process_id=self._local_id, route=pb.Route(members=members, primary=NO_PRIMARY)
                )
                condition = Compare.mod_revision(key, found[0].mod_revision if found else 0)
                result = await etcd.txn([condition], [Put(key, value.SerializeToString())])
                is_written = result.succeeded  # otherwise another broker has just added itself

    def changed_journals(self) -> Iterable[str]:
        """Return the journals of the last batch of changes of the records."""
        entries = (new or old for _, old, new in self.mirror.changes)
        return {entry.value.journal: None for entry in entries if entry is not None}

    def change(
        self, item: JournalEntry, route: pb.Route | None, *, revision: int = 0
    ) -> Sequence[Operation]:
        """Return the operations that record a route; none where routes are not recorded.

        Args:
            item: the journal.
            route: its last route; ``None`` to delete the record. A suspended journal has none.
            revision: at which the route was written; 0 for that of the transaction.
        """
        if not self.is_used:
            return ()
        if route is None or is_suspended(item.value):
            return (Delete(self.key(item)),) if self.own_entry(item) is not None else ()
        value = pb.Header(
            process_id=self._local_id,
            route=pb.Route(
                members=route.members, primary=route.primary, stored_end=route.stored_end
            ),
            etcd=pb.Header.Etcd(revision=revision),
        )
        return (Put(self.key(item), value.SerializeToString()),)

    def key(self, item: JournalEntry) -> bytes:
        """Return the key of a journal's record."""
        return f"{self.mirror.root}/{item.id}#{item.create_revision}".encode()

    def _claims_key(self, journal: str) -> bytes:
        return f"{self.mirror.root}/{journal}#0".encode()

    def _decode(self, kv: KeyValue) -> Entry[RecordedRoute]:
        name, _, create_revision = kv.key.decode().rpartition("#")
        header = parse_value(pb.Header(), kv.value)
        record = RecordedRoute(
            name.removeprefix(f"{self.mirror.root}/"),
            int(create_revision),
            header.route,
            header.etcd.revision or kv.mod_revision,
            header.process_id,
        )
        return Entry.of(kv, record)
