"""Simulation of the allocator: what would move if a cluster changed.

It runs the solver, the convergence and the balance of primaries of a leader on a mirror in memory,
round after round, until nothing is left to do. Replicas are taken to synchronize between two
rounds, and an exiting member leaves as soon as it holds nothing. It reads no Etcd, and writes
nothing.

:class:`ClusterDescription` has a cluster's members, items and assignments. It comes from the mirror
of a live cluster, or from YAML::

    members:                  # in the order in which they joined
    - {zone: a, id: broker-1, limit: 1024}
    - {zone: b, id: broker-2, limit: 1024, exiting: true}
    journals:
    - name: orders/part-000
      replication: 2
      assignments: [a/broker-1, b/broker-2]     # the primary first
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, Field
from pydantic import ValidationError as PydanticValidationError

from gazette_sdk.cluster.allocator.moves import balance_primaries, converge, fair_share
from gazette_sdk.cluster.allocator.solver import solve
from gazette_sdk.cluster.allocator.state import Allocation, State
from gazette_sdk.cluster.etcd_messages import (
    Delete,
    KeyValue,
    Operation,
    Put,
    WatchBatch,
    WatchEvent,
)
from gazette_sdk.cluster.items import (
    AssignmentEntry,
    ItemEntry,
    ItemKeySpace,
    assignment_key,
    item_key,
    member_key,
)
from gazette_sdk.errors import ConfigurationError, GazetteError, ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.names import validate_journal
from gazette_sdk.protocol.rules import JOURNAL_LIMIT_MOST, validate_process_id
from gazette_sdk.protocol.strict_yaml import problem_of


class MemberId(NamedTuple):
    """Zone of a member, and its id within the zone. Its text is ``zone/id``."""

    zone: str
    id: str

    def __str__(self) -> str:
        """Return the text by which options and descriptions name the member."""
        return f"{self.zone}/{self.id}"

    @classmethod
    def parse(cls, text: str) -> MemberId:
        """Return the id of a text ``zone/id``, or ``zone#id`` for a zone with slashes.

        Raises:
            ValidationError: the text is no such name.
        """
        zone, _, name = text.partition("#" if "#" in text else "/")
        if not zone or not name:
            raise ValidationError(f"{text!r} names no member: write ZONE/ID, such as a/broker-1")
        found = cls(zone, name)
        validate_process_id(pb.ProcessSpec.ID(zone=zone, suffix=name), text)
        return found


@dataclass(frozen=True, slots=True)
class DescribedMember:
    """Member of a described cluster.

    Attributes:
        id: its zone and its id.
        limit: number of items that it offers to hold.
        exiting: True if it is leaving.
    """

    id: MemberId
    limit: int
    exiting: bool = False


@dataclass(frozen=True, slots=True)
class DescribedItem:
    """Item of a described cluster.

    Attributes:
        name: its name.
        replication: number of members that it should have.
        holders: its members, the primary first.
    """

    name: str
    replication: int
    holders: tuple[MemberId, ...] = ()


@dataclass(frozen=True, slots=True)
class ClusterDescription:
    """Members of a cluster in the order in which they joined, and its items by name.

    Raises:
        ValidationError: a name is used twice, or an item is assigned to an unknown member, or
            twice to the same one.
    """

    members: tuple[DescribedMember, ...]
    items: tuple[DescribedItem, ...]

    def __post_init__(self) -> None:
        members = [member.id for member in self.members]
        _check_unique("member", map(str, members))
        _check_unique("journal", (item.name for item in self.items))
        known = set(members)
        for item in self.items:
            _check_unique(f"{item.name}: assignment to", map(str, item.holders))
            for holder in item.holders:
                if holder not in known:
                    raise ValidationError(
                        f"{item.name} is assigned to {holder}, which is no member"
                    )


def describe(
    keyspace: ItemKeySpace[Any, Any, Any], allocation: Allocation[Any, Any, Any]
) -> ClusterDescription:
    """Return the description of a live cluster.

    Args:
        keyspace: its mirror. Assignments without their item or member are left out: they are
            about to be removed.
        allocation: rules for its values.
    """
    entries = sorted(keyspace.members(), key=lambda m: (m.create_revision, m.key))
    members = tuple(
        DescribedMember(
            MemberId(m.zone, m.suffix),
            allocation.item_limit(m.value),
            allocation.is_exiting(m.value),
        )
        for m in entries
    )
    known = {member.id for member in members}
    items = []
    for item in keyspace.items():
        slots = sorted(keyspace.assignments(item.id), key=lambda a: a.slot)
        holders = dict.fromkeys(MemberId(a.zone, a.suffix) for a in slots)
        items.append(
            DescribedItem(
                item.id,
                allocation.desired_replication(item.value),
                tuple(holder for holder in holders if holder in known),
            )
        )
    return ClusterDescription(members, tuple(items))


# ------------------------------------------------------------------- YAML


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)


class _Member(_Strict):
    zone: str
    id: str
    limit: Annotated[int, Field(ge=0, le=JOURNAL_LIMIT_MOST)]
    exiting: bool = False


class _Journal(_Strict):
    name: str
    replication: Annotated[int, Field(ge=0)]
    assignments: list[str] = []


class _Cluster(_Strict):
    members: list[_Member]
    journals: list[_Journal] = []


def parse_description(text: str | bytes) -> ClusterDescription:
    """Return the cluster that a YAML document describes.

    Raises:
        ValidationError: the document is malformed; the text names the place.
    """
    try:
        cluster = _Cluster.model_validate(yaml.load(text, Loader=_Loader))  # noqa: S506 - is safe
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValidationError(f"the description is not YAML: {problem_of(error)}") from None
    except PydanticValidationError as error:
        problem = error.errors()[0]
        place = ".".join(str(part) for part in problem["loc"]) or "it"
        raise ValidationError(f"the description is malformed: {place}: {problem['msg']}") from None
    try:
        return ClusterDescription(
            tuple(
                DescribedMember(_member_id(each), each.limit, each.exiting)
                for each in cluster.members
            ),
            tuple(_item(each) for each in cluster.journals),
        )
    except GazetteError as error:
        raise ValidationError(f"the description is malformed: {error}") from None


def dump_description(description: ClusterDescription) -> str:
    """Return a description as YAML, which :func:`parse_description` reads."""
    members = [
        {"zone": each.id.zone, "id": each.id.id, "limit": each.limit}
        | ({"exiting": True} if each.exiting else {})
        for each in description.members
    ]
    journals = [
        {
            "name": each.name,
            "replication": each.replication,
            "assignments": [_text(holder) for holder in each.holders],
        }
        for each in description.items
    ]
    text: str = yaml.dump(
        {"members": members, "journals": journals},
        Dumper=_Dumper,
        sort_keys=False,
        default_flow_style=None,
        allow_unicode=True,
        width=1 << 20,
    )
    return text


_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def _member_id(member: _Member) -> MemberId:
    return MemberId.parse(f"{member.zone}#{member.id}")


def _item(journal: _Journal) -> DescribedItem:
    validate_journal(journal.name, journal.name)
    holders = tuple(MemberId.parse(text) for text in journal.assignments)
    return DescribedItem(journal.name, journal.replication, holders)


def _text(member: MemberId) -> str:
    """Return the name of a member in YAML, with the zone apart from the id."""
    return str(member) if "/" not in member.zone else f"{member.zone}#{member.id}"


def _check_unique(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValidationError(f"{what} {name} is there twice")
        seen.add(name)


# ------------------------------------------------------------------- simulation

ROUNDS_MAX = 10_000
"""Bound of rounds: a cluster needs about one for each time that a replica waits for another."""

_ROOT = "/simulated"


@dataclass(frozen=True, slots=True)
class ClusterChange:
    """Change of a cluster.

    Attributes:
        removed: members that are lost, with their assignments.
        removed_zones: zones all of whose members are lost.
        drained: members that are to stop, and leave when they hold nothing.
        added: members that join, in this order.
        replication: new number of members by name of an item. A name that ends with ``/`` stands
            for all items below it.
        upserted: number of members by name of items that are created, or that exist.
        deleted: names of items that are deleted.
    """

    removed: tuple[MemberId, ...] = ()
    removed_zones: tuple[str, ...] = ()
    drained: tuple[MemberId, ...] = ()
    added: tuple[DescribedMember, ...] = ()
    replication: Mapping[str, int] = field(default_factory=dict)
    upserted: Mapping[str, int] = field(default_factory=dict)
    deleted: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Return True if it changes nothing."""
        return self == ClusterChange()


class Load(NamedTuple):
    """Load of a member: primaries, and replicas with the primaries; per limit as ``ratio``."""

    primaries: int
    replicas: int
    ratio: float


class MemberLoads(NamedTuple):
    """Member before and after a change; ``None`` where it is not in the cluster."""

    id: MemberId
    limit: int
    before: Load | None
    after: Load | None


class ChangedItem(NamedTuple):
    """Item whose assignments change; its members before and after, the primary first."""

    name: str
    before: tuple[MemberId, ...]
    after: tuple[MemberId, ...]

    @property
    def added(self) -> int:
        """Number of members that it gets."""
        return len(set(self.after) - set(self.before))

    @property
    def changes_primary(self) -> bool:
        """Return True if another member becomes its primary."""
        return bool(self.before and self.after) and self.before[0] != self.after[0]


class Unplaced(NamedTuple):
    """Replicas of an item for which no member is left, and the reason."""

    name: str
    missing: int
    reason: str


@dataclass(frozen=True, slots=True)
class Simulation:
    """Outcome of a simulation.

    Attributes:
        before: the cluster before the change, after what was pending.
        after: the cluster when nothing is left to do.
        members: loads of all members of both, by zone and id.
        changed: items whose assignments change, by name.
        moves_min: number of added assignments that no allocation can do without.
        pending: items that change without the change already.
        unplaced: replicas without a member, by name of their item.
        single_zone: names of items of several replicas, all of them in one zone.
        staying: exiting members that cannot leave, because they still hold items.
        rounds: number of rounds that wrote something.
        is_settled: False if the bound of rounds was reached.
    """

    before: ClusterDescription
    after: ClusterDescription
    members: tuple[MemberLoads, ...]
    changed: tuple[ChangedItem, ...]
    moves_min: int
    pending: tuple[ChangedItem, ...]
    unplaced: tuple[Unplaced, ...]
    single_zone: tuple[str, ...]
    staying: tuple[MemberId, ...]
    rounds: int
    is_settled: bool

    @property
    def moves(self) -> int:
        """Number of added assignments."""
        return sum(item.added for item in self.changed)

    @property
    def primaries_changed(self) -> int:
        """Number of items whose primary changes."""
        return sum(item.changes_primary for item in self.changed)


def simulate(description: ClusterDescription, change: ClusterChange) -> Simulation:
    """Return what the allocator would do if a cluster changed. Pure.

    Without a change it is what the allocator would do now. Otherwise what is pending is done first,
    and is listed apart.

    Args:
        description: the cluster.
        change: the change.

    Raises:
        ConfigurationError: the change names an unknown member, zone or item, or one that exists.
    """
    changed = change_cluster(description, change)  # names are checked first
    pending: tuple[ChangedItem, ...] = ()
    before = description
    if not change.is_empty:
        before = _Run(description).settle()
        pending = _changed(description, before)
        changed = change_cluster(before, change)
    run = _Run(changed)
    after = run.settle()
    return Simulation(
        before=before,
        after=after,
        members=_loads(before, after),
        changed=_changed(before, after),
        moves_min=_moves_min(before, after, run.state),
        pending=pending,
        unplaced=tuple(_unplaced(after)),
        single_zone=tuple(_single_zone(after)),
        staying=tuple(m.id for m in after.members if m.exiting),
        rounds=run.rounds,
        is_settled=run.is_settled,
    )


# ------------------------------------------------------------------ changes


def change_cluster(description: ClusterDescription, change: ClusterChange) -> ClusterDescription:
    """Return a cluster as it is at once after a change, before the allocator acts.

    Raises:
        ConfigurationError: the change names an unknown member, zone or item, or one that exists.
    """
    known = {member.id for member in description.members}
    for member in (*change.removed, *change.drained):
        if member not in known:
            raise _unknown(f"member {member}", map(str, sorted(known)))
    zones = {member.zone for member in known}
    for zone in change.removed_zones:
        if zone not in zones:
            raise _unknown(f"zone {zone}", sorted(zones))
    lost = {m for m in known if m in change.removed or m.zone in change.removed_zones}
    for added in change.added:
        if added.id in known - lost:
            raise ConfigurationError(f"member {added.id} is in the cluster already")
    members = [
        replace(member, exiting=member.exiting or member.id in change.drained)
        for member in description.members
        if member.id not in lost
    ]
    items = {
        item.name: replace(item, holders=tuple(h for h in item.holders if h not in lost))
        for item in description.items
    }
    _change_items(items, change)
    ordered = sorted(items.values(), key=lambda item: item.name.encode())
    return ClusterDescription((*members, *change.added), tuple(ordered))


def _change_items(items: dict[str, DescribedItem], change: ClusterChange) -> None:
    for name in change.deleted:
        if items.pop(name, None) is None:
            raise _unknown(f"journal {name}", items)
    for name, replication in change.upserted.items():
        items[name] = replace(items.get(name, DescribedItem(name, 0)), replication=replication)
    for name, replication in change.replication.items():
        below = [n for n in items if n == name or (name.endswith("/") and n.startswith(name))]
        if not below:
            raise _unknown(f"journal {name}", items)
        for each in below:
            items[each] = replace(items[each], replication=replication)


def _unknown(what: str, known: Iterable[str]) -> ConfigurationError:
    names = list(known)
    listed = ", ".join(names[:10]) + (", …" if len(names) > 10 else "")
    return ConfigurationError(f"there is no {what}; there are {listed or 'none'}")


# ------------------------------------------------------------------- rounds


class _DescribedAllocation(Allocation[int, DescribedMember, None]):
    """Rules for described values: those of journals. All replicas are in sync."""

    balances_primaries = True

    def desired_replication(self, item: int) -> int:
        return item

    def item_limit(self, member: DescribedMember) -> int:
        return member.limit

    def is_consistent(
        self,
        item: ItemEntry[Any],  # noqa: ARG002 - all are in sync
        assignment: AssignmentEntry[Any],  # noqa: ARG002
        assignments: Sequence[AssignmentEntry[Any]],  # noqa: ARG002
    ) -> bool:
        return True


class _Run:
    """Rounds of a leader over a described cluster.

    Attributes:
        state: the allocator's view after the last round.
        rounds: number of rounds that wrote something.
        is_settled: False if the bound of rounds was reached.
    """

    def __init__(self, description: ClusterDescription) -> None:
        self._members = {member.id: member for member in description.members}
        self._replication = {item.name: item.replication for item in description.items}
        self._keyspace: ItemKeySpace[int, DescribedMember, None] = ItemKeySpace(
            _ROOT,
            decode_item=lambda name, _raw: self._replication[name],
            decode_member=lambda zone, suffix, _raw: self._members[MemberId(zone, suffix)],
            decode_assignment=lambda _item, _zone, _suffix, _raw: None,
        )
        # The order of creation is that of the description: the oldest exiting member drains first.
        puts = [member_key(_ROOT, *member) for member in self._members]
        puts += [item_key(_ROOT, name) for name in self._replication]
        puts += [
            assignment_key(_ROOT, item.name, *holder, slot)
            for item in description.items
            for slot, holder in enumerate(item.holders)
        ]
        self._apply([Put(key, b"") for key in puts])
        self.state = State(self._keyspace, _ALLOCATION)
        self.rounds = 0
        self.is_settled = False

    def settle(self) -> ClusterDescription:
        """Run rounds until nothing is left to do, and return the cluster."""
        solved: object = None
        desired: list[list[int]] = []
        while self.rounds < ROUNDS_MAX:
            if self.state.network != solved:
                desired, solved = solve(self.state), self.state.network
            operations = [
                operation
                for checkpoint in converge(self.state, desired)
                for operation in checkpoint.operations
            ]
            if not operations and self.state.allocation.balances_primaries:
                operations = [
                    operation
                    for checkpoint in balance_primaries(self.state)
                    for operation in checkpoint.operations
                ]
            if not operations:
                operations = self._departures()
            if not operations:
                self.is_settled = True
                break
            self._apply(operations)
            self.rounds += 1
            self.state = State(self._keyspace, _ALLOCATION)
        return self._description()

    def _departures(self) -> list[Operation]:
        """Return the deletions of exiting members that hold nothing."""
        return [
            Delete(entry.key)
            for entry, held in zip(self.state.members, self.state.total_count, strict=True)
            if entry.value.exiting and held == 0
        ]

    def _apply(self, operations: Iterable[Operation]) -> None:
        """Apply operations to the mirror, each at a revision of its own."""
        revision = self._keyspace.revision
        events = []
        for operation in operations:
            assert isinstance(operation, Put | Delete)
            revision += 1
            value = operation.value if isinstance(operation, Put) else b""
            kv = KeyValue(operation.key, value, revision, revision, 1, 0)
            events.append(WatchEvent(is_delete=isinstance(operation, Delete), kv=kv))
        if events:
            header = pb.Header.Etcd(revision=revision)
            self._keyspace.apply([WatchBatch(header, tuple(events))])

    def _description(self) -> ClusterDescription:
        there = {MemberId(m.zone, m.suffix) for m in self.state.members}
        items = []
        for item, assignments in zip(self.state.items, self.state.item_assignments, strict=True):
            slots = sorted(assignments, key=lambda a: a.slot)
            holders = tuple(MemberId(a.zone, a.suffix) for a in slots)
            items.append(DescribedItem(item.id, item.value, holders))
        members = tuple(member for member in self._members.values() if member.id in there)
        return ClusterDescription(members, tuple(items))


_ALLOCATION = _DescribedAllocation()


# ------------------------------------------------------------------ outcome


def _loads(before: ClusterDescription, after: ClusterDescription) -> tuple[MemberLoads, ...]:
    limits = {member.id: member.limit for member in (*before.members, *after.members)}
    loads_before, loads_after = _loads_of(before), _loads_of(after)
    return tuple(
        MemberLoads(member, limits[member], loads_before.get(member), loads_after.get(member))
        for member in sorted(limits)
    )


def _loads_of(description: ClusterDescription) -> dict[MemberId, Load]:
    primaries = {member.id: 0 for member in description.members}
    replicas = dict(primaries)
    for item in description.items:
        for slot, holder in enumerate(item.holders):
            primaries[holder] += slot == 0
            replicas[holder] += 1
    return {
        member.id: Load(
            primaries[member.id],
            replicas[member.id],
            replicas[member.id] / member.limit if member.limit else float(replicas[member.id] > 0),
        )
        for member in description.members
    }


def _changed(before: ClusterDescription, after: ClusterDescription) -> tuple[ChangedItem, ...]:
    held_before = {item.name: item.holders for item in before.items}
    held_after = {item.name: item.holders for item in after.items}
    return tuple(
        ChangedItem(name, old, new)
        for name in sorted(held_before.keys() | held_after.keys())
        if (old := held_before.get(name, ())) != (new := held_after.get(name, ()))
    )


def _moves_min(before: ClusterDescription, after: ClusterDescription, state: State) -> int:
    """Return a bound of the added assignments from below.

    An item keeps no more members than it should have, and a member no more items than its fair
    share, or what it really holds.
    """
    kept = dict.fromkeys((member.id for member in after.members), 0)
    held = {item.name: item.holders for item in before.items}
    placed = kept_by_items = 0
    for item in after.items:
        survivors = [holder for holder in held.get(item.name, ()) if holder in kept]
        placed += len(item.holders)
        kept_by_items += min(len(survivors), len(item.holders))
        for holder in survivors:
            kept[holder] += 1
    kept_by_members = sum(
        min(kept[MemberId(m.zone, m.suffix)], max(fair_share(state, index), held_now))
        for index, (m, held_now) in enumerate(zip(state.members, state.total_count, strict=True))
    )
    return placed - min(kept_by_items, kept_by_members)


def _unplaced(after: ClusterDescription) -> Iterable[Unplaced]:
    usable = sum(member.limit > 0 and not member.exiting for member in after.members)
    full = sum(load.ratio >= 1 for load in _loads_of(after).values())
    for item in after.items:
        missing = item.replication - len(item.holders)
        if missing <= 0:
            continue
        if item.replication > usable:
            reason = f"R = {item.replication} needs as many members, and {usable} can hold any"
        else:
            reason = f"no other member has room; {full} of {usable} are full"
        yield Unplaced(item.name, missing, reason)


def _single_zone(after: ClusterDescription) -> Iterable[str]:
    for item in after.items:
        if len(item.holders) > 1 and len({holder.zone for holder in item.holders}) == 1:
            yield item.name
