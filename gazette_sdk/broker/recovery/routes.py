"""Routes that Etcd holds for recovery: recorded ones, the last ones, and their recorder.

**Records** (:class:`RecordedRoutes`) are the last route of every journal, in keys of Etcd without a
lease. Assignments end with the leases of their members, and Etcd compacts its history. If all
brokers of a journal were away meanwhile, only a record says who has its last bytes. So a primary
that writes a route records it in the same transaction, outside the cluster's own prefix::

    /gazette_sdk/routes{root}/{journal}#{create revision of the journal}

The value is a ``Header``: the route, the broker that recorded it, and the revision of the route if
it was written earlier than the record.

A broker that withholds bytes of a journal, as Etcd lost their history (`etcd_history`), adds itself
to the record of create revision 0, unless others have more: it *claims* the journal. If Etcd does
not have the journal any more, that is the record of the one which is created again. If it has the
journal, as an older backup does, claims replace the record of a route that was written before Etcd
went back. They end with the next route. When Etcd went back follows from the record of the journal
without a name (:meth:`RecordedRoutes.begin_history`): the first broker that finds that Etcd lost
what its directory has seen writes it. So one that comes later claims no journal that others have
continued since.

The recorder (:class:`RouteRecorder`) records routes that no one recorded in the transaction which
wrote them: those are routes of primaries of other implementations, and routes of a broker that was
alone when it wrote them. A broker that is the only member records nothing, unless there are
records: its cluster has no keys but those of the protocol. Records of journals that are deleted or
suspended are deleted.

**Last routes** (:class:`LastRoutes`) are those over which each journal was last appended to. The
members of that route, and no one else, are known to have every acknowledged byte. Assignments hold
the route, and end with the leases of their members. So a mirror alone forgets it when the last
member goes. Here it is kept: from the records of routes (:class:`RecordedRoutes`), from the history
of Etcd at the start, as far as Etcd has not compacted it, and from the mirror since.

A journal *waits* if none of its present brokers was a member of its last route. Acknowledged bytes
may then lie only on brokers that are away, whatever its stores have: a new primary must neither
begin anew nor write a route. It continues by itself when one of them is back (`peers`), or when the
operator gives up these bytes (`gazctl journals reset-head`).

These routes do not count:

- routes of fewer members than the journal requires: nothing is appended over them,
- routes of suspended journals: nothing is appended until the suspension ends, and the spec has the
  offset.

The last member of a route may withdraw it when all content is stored (``withdrawn_route``). Then
the journal continues after its stored content, at whichever broker. The route has the offset where
that ends: a listing that does not reach it is late.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, Self

from google.protobuf.message import DecodeError

from gazette_sdk.cluster.broker_keys import BrokerKeySpace, JournalEntry, is_withdrawn
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_messages import (
    Compare,
    Delete,
    KeyValue,
    Operation,
    Put,
    WatchEvent,
    prefix_end,
)
from gazette_sdk.cluster.items import (
    AssignmentEntry,
    ItemEntry,
    assignments_prefix,
    items_prefix,
    parse_assignment,
    parse_item,
    parse_value,
)
from gazette_sdk.cluster.keyspace import Entry, KeySpace
from gazette_sdk.errors import EtcdCompactedError, EtcdError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.journal_spec import (
    DEFAULT_MAX_REPLICATION,
    desired_replication,
    is_suspended,
)
from gazette_sdk.protocol.rules import NO_PRIMARY

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
        history_id: of the history of Etcd, for the journal without a name.
    """

    journal: str
    create_revision: int
    route: pb.Route
    revision: int
    recorded_by: pb.ProcessSpec.ID
    history_id: int


class HistoryBegin(NamedTuple):
    """Begin of a history of Etcd: when brokers found that it had lost what they had seen.

    Attributes:
        id: of the history; 0 if Etcd never lost anything.
        revision: routes up to it may be older than ones that Etcd lost.
    """

    id: int = 0
    revision: int = 0

    @classmethod
    def of(cls, entry: Entry[RecordedRoute]) -> Self:
        """Return the begin that a record states."""
        return cls(entry.value.history_id, entry.mod_revision)


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
        self.mirror: KeySpace = KeySpace(
            f"/gazette_sdk/routes{keyspace.root.rstrip('/')}", self._decode
        )

    @property
    def is_used(self) -> bool:
        """True if routes are recorded: records are loaded, and there are some, or other members."""
        has_others = len(self._keyspace.members()) >= MEMBERS_MIN
        return self.mirror.revision > 0 and (has_others or bool(self.mirror.entries))

    def entry(self, item: JournalEntry) -> Entry[RecordedRoute] | None:
        """Return the record of a journal, or newer claims to it; ``None`` if there is neither."""
        own, claims = self.own_entry(item), self.claims(item.id)
        if claims is None or (own is not None and own.value.revision > claims.mod_revision):
            return own
        return claims

    def own_entry(self, item: JournalEntry) -> Entry[RecordedRoute] | None:
        """Return the record of a journal; ``None`` if there is none."""
        return self.mirror.find(self.key(item))

    def claims(self, journal: str) -> Entry[RecordedRoute] | None:
        """Return the record of brokers with bytes of a journal that Etcd lost, if there is one."""
        return self.mirror.find(self._claims_key(journal))

    @property
    def history(self) -> HistoryBegin:
        """Begin of Etcd's present history, as far as the mirror has it."""
        entry = self.mirror.find(self._claims_key(""))
        return HistoryBegin.of(entry) if entry is not None else HistoryBegin()

    async def begin_history(self, etcd: Etcd, known_id: int) -> None:
        """Note that Etcd went back, unless another broker has noted that.

        Args:
            etcd: the client.
            known_id: id of the history that this broker has seen before.

        Raises:
            EtcdError: Etcd failed, or its roles forbid it.
        """
        key = self._claims_key("")
        found = (await etcd.range(key)).entries
        if found and HistoryBegin.of(self._decode(found[0])).id != known_id:
            return
        value = pb.Header(process_id=self._local_id)
        value.etcd.member_id = uuid.uuid4().int >> 65
        condition = Compare.mod_revision(key, found[0].mod_revision if found else 0)
        await etcd.txn([condition], [Put(key, value.SerializeToString())])  # else another was first

    async def claim(
        self, etcd: Etcd, ends: Mapping[str, int], known: Mapping[str, Sequence[Compare]]
    ) -> None:
        """Record that this broker has the last bytes of journals whose last routes Etcd lost.

        Only brokers with the greatest end stay recorded: one that was away while others continued
        has an older one.

        Args:
            etcd: the client.
            ends: offset at which this broker would continue each journal, by name.
            known: conditions under which each journal is claimed, by name.

        Raises:
            EtcdError: Etcd failed, or its roles forbid it.
        """
        for journal, end in ends.items():
            key = self._claims_key(journal)
            while True:
                found = (await etcd.range(key)).entries
                claimed = self._decode(found[0]).value.route if found else pb.Route()
                if found and (
                    claimed.stored_end > end
                    or (claimed.stored_end == end and self._local_id in claimed.members)
                ):
                    break
                equal = claimed.members if claimed.stored_end == end else ()
                members = sorted(
                    [*equal, self._local_id], key=lambda each: (each.zone, each.suffix)
                )
                value = pb.Header(
                    process_id=self._local_id,
                    route=pb.Route(members=members, primary=NO_PRIMARY, stored_end=end),
                )
                condition = Compare.mod_revision(key, found[0].mod_revision if found else 0)
                result = await etcd.txn(
                    [condition, *known.get(journal, ())], [Put(key, value.SerializeToString())]
                )
                # Otherwise another broker has just added itself, or has continued the journal.
                if result.succeeded or (await etcd.range(key)).entries == found:
                    break

    def unchanged(self, item: JournalEntry) -> Sequence[Compare]:
        """Return the condition that a journal and its record are as we know."""
        own = self.own_entry(item)
        return (
            Compare.mod_revision(item.key, item.mod_revision),
            Compare.mod_revision(self.key(item), own.mod_revision if own is not None else 0),
        )

    def known_claims(self, item: JournalEntry) -> Sequence[Compare]:
        """Return the condition that the claims to a journal are as we know."""
        if not self.is_used:
            return ()
        claims = self.claims(item.id)
        revision = claims.mod_revision if claims is not None else 0
        return (Compare.mod_revision(self._claims_key(item.id), revision),)

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
            header.etcd.member_id,
        )
        return Entry.of(kv, record)


HISTORY_TIMEOUT_S = 10.0
"""Bound of reading the history. When it is over, no earlier route is known."""

COMPACTIONS_MAX = 3
"""Attempts to begin at the oldest revision, which Etcd may compact at any time."""

_PAGE_KEYS = 1000

_log = logging.getLogger(__name__)


class _Written(NamedTuple):
    """Value of an assignment."""

    route: pb.Route
    mod_revision: int
    raw: bytes


class LastRoute(NamedTuple):
    """Last route of a journal.

    Attributes:
        create_revision: of the journal.
        route: the route; without members if it is withdrawn.
        revision: at which it was written.
        is_claimed: True if no broker wrote it: its members have bytes of a journal whose last route
            Etcd lost, and no one has continued it since.
        is_recorded: True if only its record has it. Brokers of other implementations record
            nothing: they may have continued while none of ours was there.
    """

    create_revision: int
    route: pb.Route
    revision: int
    is_recorded: bool = False
    is_claimed: bool = False


class LastRoutes:
    """Last route of every journal. It belongs to the event loop.

    Args:
        keyspace: mirror of Etcd. The caller adds :meth:`observe` to its observers.
        records: recorded routes. The caller adds :meth:`observe_records` to their observers.
        max_replication: cap of every journal's replication.

    Attributes:
        records: the same.
        waiting: names of the journals that wait.
    """

    def __init__(
        self,
        keyspace: BrokerKeySpace,
        records: RecordedRoutes,
        max_replication: int = DEFAULT_MAX_REPLICATION,
    ) -> None:
        self._keyspace = keyspace
        self.records = records
        self._max_replication = max_replication
        self.waiting: set[str] = set()
        self._known: dict[str, LastRoute] = {}

    async def load(self, etcd: Etcd) -> None:
        """Read the routes of the mirrors, and those that only the history has.

        The history is read if there is a journal without any written route. It is read from the
        creation of the oldest one of these journals on: a route may be newer than its record.

        Args:
            etcd: the client. The mirror is just loaded at a revision that changed its prefix.
        """
        unknown: list[JournalEntry] = []
        for item in self._keyspace.items():
            self._note(item)
            known = self._known.get(item.id)
            if (known is None or known.is_recorded) and not is_suspended(item.value):
                unknown.append(item)
        if not unknown:
            return
        first = min(item.create_revision for item in unknown)
        history = _History(self._keyspace.root, self._max_replication)
        try:
            async with asyncio.timeout(HISTORY_TIMEOUT_S):
                await history.read(etcd, self._keyspace, first)
        except (EtcdError, TimeoutError) as error:
            _log.warning(
                "the history of Etcd since revision %d cannot be read (%s): it is not known "
                "whether brokers that are away have content of journals without a route",
                first,
                error or "it took too long",
            )
            return
        for item in unknown:
            last = history.last_route(item.id, item.create_revision)
            known = self._known.get(item.id)
            if last is not None and (known is None or last.revision >= known.revision):
                self._known[item.id] = last
            self._note_waiting(item.id)

    def observe(self) -> None:
        """Note the routes of the last batch of changes of the cluster's mirror."""
        self.note(self.changed_journals())

    def changed_journals(self) -> Iterable[str]:
        """Return the journals of the last batch of changes of the cluster's mirror."""
        changed: dict[str, None] = {}
        for change in self._keyspace.changes:
            match change.new or change.old:
                case AssignmentEntry(item=journal) | ItemEntry(id=journal):
                    changed[journal] = None
        return changed

    def observe_records(self) -> None:
        """Note the routes of the last batch of changes of the records.

        The cluster's mirror may never show a route that soon ended with its last member.
        """
        self.note(self.records.changed_journals())

    def note(self, journals: Iterable[str]) -> None:
        """Note the routes of some journals again: their records have changed."""
        for journal in journals:
            item = self._keyspace.item(journal)
            if item is None:
                self._known.pop(journal, None)
            else:
                self._note(item)
            self._note_waiting(journal)

    def route(self, journal: str) -> pb.Route | None:
        """Return a journal's last route; ``None`` if none is known.

        It has no members if it was withdrawn.
        """
        last = self.last(journal)
        return last.route if last is not None else None

    def last(self, journal: str) -> LastRoute | None:
        """Return a journal's last route, with what is known about it; ``None`` if none is known."""
        known, item = self._known.get(journal), self._keyspace.item(journal)
        if known is None or item is None or known.create_revision != item.create_revision:
            return None
        return known

    def is_withdrawn(self, journal: str) -> bool:
        """Return True if a journal's last route was withdrawn: all of its content is stored."""
        route = self.route(journal)
        return route is not None and not route.members

    def stored_end(self, journal: str) -> int:
        """Return the end of a journal's content as its last broker had stored it; 0 if unknown.

        It is known if the route was withdrawn, and only until another broker writes one.
        """
        route = self.route(journal)
        return route.stored_end if route is not None and not route.members else 0

    def goes_on(self, journal: str) -> bool:
        """Return True if a present broker was a member of a journal's last route.

        Then it may continue there. If no route is known, no one knows the head. With replication 1
        the bytes of the broker that was away may have been acknowledged: they are not held back.
        """
        route = self.route(journal)
        return route is not None and len(route.members) > 1 and journal not in self.waiting

    def absent_brokers(self, journal: str) -> Sequence[pb.ProcessSpec.ID]:
        """Return the brokers of the last route which a journal waits for; none if it does not.

        It does not wait if one of its present brokers is a member of the last route, or holds a
        route at all: then this broker has every byte.
        """
        route, item = self.route(journal), self._keyspace.item(journal)
        if route is None or item is None or is_suspended(item.value):
            return ()
        claimed_at = self._known[journal].revision if self._known[journal].is_claimed else 0
        for entry in self._keyspace.assignments(journal):
            if entry.value.members and entry.mod_revision > claimed_at:
                return ()
            member = pb.ProcessSpec.ID(zone=entry.zone, suffix=entry.suffix)
            if member in route.members:
                return ()
        return route.members

    def _note_waiting(self, journal: str) -> None:
        if self.absent_brokers(journal):
            self.waiting.add(journal)
        else:
            self.waiting.discard(journal)

    def _note(self, item: JournalEntry) -> None:
        known = self._known.get(item.id)
        if known is not None and known.create_revision != item.create_revision:
            known = None
        record = self.records.entry(item)
        # Claims are older than the journal, and may be seen later: the present ones count.
        is_claim = record is not None and record.value.create_revision == 0
        if record is not None and (
            known is None
            or record.value.revision > known.revision
            or (is_claim and known.is_claimed)
        ):
            known = LastRoute(
                item.create_revision,
                record.value.route,
                max(record.value.revision, item.create_revision),  # claims are older
                is_recorded=True,
                is_claimed=is_claim,
            )
        last = _last_route(
            item.value,
            item,
            (
                _Written(entry.value, entry.mod_revision, entry.raw)
                for entry in self._keyspace.assignments(item.id)
            ),
            known,
            self._max_replication,
        )
        if last is None:
            self._known.pop(item.id, None)
        else:
            self._known[item.id] = last


def waiting_text(absent: Sequence[pb.ProcessSpec.ID]) -> str:
    """Return the text that names the brokers which a journal waits for, and the remedy."""
    names = ", ".join(f"{broker.zone}/{broker.suffix}" for broker in absent)
    return (
        f"only brokers that are away have its last bytes: {names}; start one of them over its "
        "spool directory and the journal goes on by itself, or give up what they have not stored "
        "with `gazctl journals reset-head` (a journal without stored content: delete it, and "
        "create it again)"
    )


def unlisted_text(listed_end: int, stored_end: int) -> str:
    """Return the text that names what a journal's stores do not list, and the remedy."""
    return (
        f"its stores list its content up to {listed_end}, and its last broker had stored it up to "
        f"{stored_end} when it left: the journal continues by itself when they list the rest; if "
        "that is lost, give it up with `gazctl journals reset-head`"
    )


def members_required(
    spec: pb.JournalSpec, spec_revision: int, route_revision: int, max_replication: int
) -> int:
    """Return the number of members that a route needs to count.

    It is the journal's replication if the spec has not changed since the route was written. Else
    the replication at that time is not known, and every route counts.

    Args:
        spec: the journal's.
        spec_revision: at which the spec was written.
        route_revision: at which the route was written.
        max_replication: cap of every journal's replication.
    """
    if spec_revision > route_revision:
        return 1
    return max(1, desired_replication(spec, max_replication))


async def changes_since(
    etcd: Etcd, keyspace: BrokerKeySpace, first_revision: int
) -> AsyncGenerator[WatchEvent]:
    """Yield changes of a mirror's prefix, in order, from a revision up to that of the mirror.

    Raises:
        EtcdError: Etcd failed, or has compacted the first revision.
    """
    last = keyspace.revision
    if first_revision > last:
        return
    # All of the mirror's prefix is watched: its last revision, that of our own member key, is
    # where the history ends.
    async with aclosing(etcd.watch(keyspace.root.encode(), first_revision)) as batches:
        async for batch in batches:
            for event in batch.events:
                if event.kv.mod_revision > last:
                    return
                yield event
            if batch.events and batch.events[-1].kv.mod_revision >= last:
                return


# ------------------------------------------------------------------- pure parts


class _Revisions(Protocol):
    """Revisions of a journal's key."""

    @property
    def create_revision(self) -> int: ...

    @property
    def mod_revision(self) -> int: ...


def _last_route(
    spec: pb.JournalSpec,
    key: _Revisions,
    written: Iterable[_Written],
    known: LastRoute | None,
    max_replication: int,
) -> LastRoute | None:
    """Return a journal's last route, given its present keys and the last route before."""
    if is_suspended(spec):
        return None
    first = key.create_revision + 1 if known is None else known.revision
    # The newest first: an old value may be left of a transaction over other assignments.
    for route, revision, raw in sorted(written, key=lambda each: -each.mod_revision):
        if revision < first:
            break
        if is_withdrawn(route, raw) or (
            raw
            and len(route.members)
            >= members_required(spec, key.mod_revision, revision, max_replication)
        ):
            return LastRoute(key.create_revision, route, revision)
    return known


@dataclass(slots=True)
class _PastJournal:
    """Keys of a journal at a revision of the history, and its last route up to then."""

    spec: pb.JournalSpec | None = None
    create_revision: int = 0
    mod_revision: int = 0
    written: dict[bytes, _Written] = field(default_factory=dict)
    last_route: LastRoute | None = None


class _History:
    """Replay of the keys of journals and assignments from Etcd's history."""

    def __init__(self, root: str, max_replication: int) -> None:
        self._items = items_prefix(root)
        self._assignments = assignments_prefix(root)
        self._max_replication = max_replication
        self._journals: dict[str, _PastJournal] = {}

    def last_route(self, journal: str, create_revision: int) -> LastRoute | None:
        """Return the last route of the journal that was created at a revision."""
        past = self._journals.get(journal)
        return past.last_route if past and past.create_revision == create_revision else None

    async def read(self, etcd: Etcd, keyspace: BrokerKeySpace, first_revision: int) -> None:
        """Replay the history up to the mirror's revision.

        Raises:
            EtcdError: Etcd failed.
        """
        for _ in range(COMPACTIONS_MAX):
            try:
                async with aclosing(changes_since(etcd, keyspace, first_revision)) as events:
                    async for event in events:
                        self._apply(event.kv, is_delete=event.is_delete)
            except EtcdCompactedError as error:
                self._journals.clear()
                base = error.compact_revision
                if not 0 < base <= keyspace.revision:
                    return  # nothing older than the mirror is kept
                await self._load(etcd, base)
                first_revision = base + 1
            else:
                return
        raise EtcdCompactedError(
            f"Etcd compacts the history of {keyspace.root} faster than it can be read; try again"
        )

    async def _load(self, etcd: Etcd, revision: int) -> None:
        """Load the keys at a revision."""
        for prefix in (self._items, self._assignments):
            key, end = prefix, prefix_end(prefix)
            has_more = True
            while has_more:
                page = await etcd.range(key, end, revision=revision, limit=_PAGE_KEYS)
                for kv in page.entries:
                    self._apply(kv, is_delete=False)
                has_more = page.has_more
                key = page.entries[-1].key + b"\0" if page.entries else key

    def _apply(self, kv: KeyValue, *, is_delete: bool) -> None:
        try:
            if kv.key.startswith(self._items):
                journal = parse_item(kv.key[len(self._items) :].decode())
                past = self._journals.setdefault(journal, _PastJournal())
                spec = None if is_delete else pb.JournalSpec.FromString(kv.value)
                if spec is None or past.create_revision != kv.create_revision:
                    past.last_route = None
                past.spec = spec
                past.create_revision, past.mod_revision = kv.create_revision, kv.mod_revision
            elif kv.key.startswith(self._assignments):
                journal = parse_assignment(kv.key[len(self._assignments) :].decode())[0]
                past = self._journals.setdefault(journal, _PastJournal())
                if is_delete:
                    past.written.pop(kv.key, None)
                    return  # what it stated was noted before
                route = pb.Route.FromString(kv.value)
                past.written[kv.key] = _Written(route, kv.mod_revision, kv.value)
            else:
                return
        except (ValueError, DecodeError) as error:
            _log.warning("%r in Etcd's history is ignored: %s", kv.key, error)
            return
        if past.spec is not None:
            past.last_route = _last_route(
                past.spec,
                past,
                past.written.values(),
                past.last_route,
                self._max_replication,
            )


SETTLING_S = 0.2
"""Pause from a change of the mirrors to the comparison: they follow one transaction apart."""

TXN_CHANGES_MAX = 100
"""Records changed by one transaction. Etcd takes 128 operations unless configured otherwise."""


class RouteRecorder:
    """Recorder of one broker. It belongs to the event loop.

    Args:
        etcd: the client.
        keyspace: mirror of the cluster. The caller adds :meth:`wake` to its observers, after that
            of ``last_routes``.
        records: recorded routes.
        last_routes: last routes of journals.
    """

    def __init__(
        self,
        etcd: Etcd,
        keyspace: BrokerKeySpace,
        records: RecordedRoutes,
        last_routes: LastRoutes,
    ) -> None:
        self._etcd = etcd
        self._keyspace = keyspace
        self._records = records
        self._last_routes = last_routes
        self._woken = asyncio.Event()
        self._woken.set()
        records.mirror.observers.append(self.wake)

    def wake(self) -> None:
        """Compare all journals with their records again: keys have changed."""
        self._woken.set()

    async def run(self) -> None:
        """Follow the records, and complete them, until cancelled.

        Etcd's roles may forbid that: then it is tried again now and then.
        """
        await self._records.mirror.keep(self._etcd, "watch of recorded routes", self._complete)

    async def _complete(self) -> None:
        while True:
            await self._woken.wait()
            await asyncio.sleep(SETTLING_S)
            self._woken.clear()
            changes = self._changes()
            for begin in range(0, len(changes), TXN_CHANGES_MAX):
                some = changes[begin : begin + TXN_CHANGES_MAX]
                # If another broker was faster, its changes wake us.
                await self._etcd.txn([each[0] for each in some], [each[1] for each in some])

    def _changes(self) -> Sequence[tuple[Compare, Operation]]:
        """Return the changes that complete the records, each with its condition."""
        if not self._records.is_used:
            return ()
        changes: list[tuple[Compare, Operation]] = []
        for item in self._keyspace.items():
            last = self._last_routes.last(item.id)
            known = self._records.own_entry(item)
            if (
                last is None
                or last.is_claimed
                or (known is not None and _is_as_new(known.value, last))
            ):
                continue
            (put,) = self._records.change(item, last.route, revision=last.revision)
            revision = known.mod_revision if known is not None else 0
            changes.append((Compare.mod_revision(put.key, revision), put))
        for entry in self._records.mirror.entries:
            if self._is_over(entry.value):
                condition = Compare.mod_revision(entry.key, entry.mod_revision)
                changes.append((condition, Delete(entry.key)))
        return changes

    def _is_over(self, record: RecordedRoute) -> bool:
        """Return True if a record's journal has no last route: it is deleted, or suspended."""
        item = self._keyspace.item(record.journal)
        if record.create_revision == 0:  # claims, until the journal has a newer record
            own = self._records.own_entry(item) if item is not None else None
            return own is not None and own.value.revision > record.revision
        if item is None or item.create_revision != record.create_revision:
            # The journal may be newer than our mirror of the cluster.
            return record.create_revision <= self._keyspace.revision
        return is_suspended(item.value)


def _is_as_new(record: RecordedRoute, last: LastRoute) -> bool:
    """Return True if a record need not be replaced. A slot that moved has its route anew."""
    if record.revision >= last.revision:
        return True
    known, route = record.route, last.route
    return (known.members, known.primary) == (route.members, route.primary)
