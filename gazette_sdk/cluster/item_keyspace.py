"""ItemKeySpace: the mirror of a cluster's items, members and assignments (allocator section 1).

Brokers and consumers share this layout and differ in the values. Look-ups are dictionaries that
each batch of changes updates, so that their cost does not depend on the number of keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

from google.protobuf.message import DecodeError, Message

from gazette_sdk.cluster import keys
from gazette_sdk.cluster.etcd_messages import KeyValue
from gazette_sdk.cluster.keyspace import Change, Entry, KeySpace
from gazette_sdk.errors import ValidationError
from gazette_sdk.protocol import broker_pb2 as pb

__all__ = [
    "AssignmentEntry",
    "ItemEntry",
    "ItemKeySpace",
    "MemberEntry",
    "ProcessKeySpace",
    "check_process",
    "parse_value",
]

I_co = TypeVar("I_co", covariant=True)
M_co = TypeVar("M_co", covariant=True)
A_co = TypeVar("A_co", covariant=True)
T_co = TypeVar("T_co", covariant=True)
MessageT = TypeVar("MessageT", bound=Message)


class ProcessMember(Protocol):
    """Value of a member that is a process."""

    @property
    def process_spec(self) -> pb.ProcessSpec:
        """Id and endpoint of the process."""


P_co = TypeVar("P_co", bound=ProcessMember, covariant=True)


@dataclass(frozen=True, slots=True)
class ItemEntry(Entry[T_co]):
    """An item, which is assigned to members."""

    id: str


@dataclass(frozen=True, slots=True)
class MemberEntry(Entry[T_co]):
    """A member: a process that can hold items."""

    zone: str
    suffix: str


@dataclass(frozen=True, slots=True)
class AssignmentEntry(Entry[T_co]):
    """An assignment of ``item`` to a member. Slot 0 is the primary."""

    item: str
    zone: str
    suffix: str
    slot: int


class ItemKeySpace(KeySpace, Generic[I_co, M_co, A_co]):
    """Mirror of a cluster.

    Args:
        root: the cluster's prefix.
        decode_item: decodes the value of an item from its id and bytes.
        decode_member: decodes the value of a member from its zone, suffix and bytes.
        decode_assignment: decodes the value of an assignment from its item, zone, suffix and
            bytes. All three raise GazetteError or ValueError for a malformed value.
    """

    def __init__(
        self,
        root: str,
        *,
        decode_item: Callable[[str, bytes], I_co],
        decode_member: Callable[[str, str, bytes], M_co],
        decode_assignment: Callable[[str, str, str, bytes], A_co],
    ) -> None:
        super().__init__(root, self._decode_entry)
        self._decode_item = decode_item
        self._decode_member = decode_member
        self._decode_assignment = decode_assignment
        self._items_prefix = keys.items_prefix(root)
        self._members_prefix = keys.members_prefix(root)
        self._assignments_prefix = keys.assignments_prefix(root)
        self._items: dict[str, ItemEntry[I_co]] = {}
        self._members: dict[tuple[str, str], MemberEntry[M_co]] = {}
        self._by_item: dict[str, dict[bytes, AssignmentEntry[A_co]]] = {}
        self._by_member: dict[tuple[str, str], dict[bytes, AssignmentEntry[A_co]]] = {}

    # -------------------------------------------------------------- look-ups

    def item(self, item: str) -> ItemEntry[I_co] | None:
        """Return the item of that id."""
        return self._items.get(item)

    def items(self) -> Sequence[ItemEntry[I_co]]:
        """Return all items, in order of their ids."""
        return cast("Sequence[ItemEntry[I_co]]", self.prefixed(self._items_prefix))

    def member(self, zone: str, suffix: str) -> MemberEntry[M_co] | None:
        """Return the member of that zone and suffix."""
        return self._members.get((zone, suffix))

    def members(self) -> Sequence[MemberEntry[M_co]]:
        """Return all members, in order of zone and suffix."""
        return cast("Sequence[MemberEntry[M_co]]", self.prefixed(self._members_prefix))

    def assignments(self, item: str) -> list[AssignmentEntry[A_co]]:
        """Return the assignments of an item, in order of zone and suffix, even if it is missing."""
        return list(self._by_item.get(item, {}).values())

    def all_assignments(self) -> Sequence[AssignmentEntry[A_co]]:
        """Return all assignments, in order of item, zone and suffix."""
        return cast("Sequence[AssignmentEntry[A_co]]", self.prefixed(self._assignments_prefix))

    def local_assignments(self, zone: str, suffix: str) -> list[AssignmentEntry[A_co]]:
        """Return the assignments to a member, in order of items, even of missing ones."""
        held = self._by_member.get((zone, suffix), {})
        return [held[key] for key in sorted(held)]

    # -------------------------------------------------------------- names of keys

    def item_key(self, item: str) -> bytes:
        """Return the key of an item."""
        return keys.item_key(self.root, item)

    def member_key(self, zone: str, suffix: str) -> bytes:
        """Return the key of a member."""
        return keys.member_key(self.root, zone, suffix)

    def assignment_key(self, item: str, zone: str, suffix: str, slot: int) -> bytes:
        """Return the key of an assignment."""
        return keys.assignment_key(self.root, item, zone, suffix, slot)

    # -------------------------------------------------------------- updates

    def _decode_entry(self, kv: KeyValue) -> Entry[Any]:
        common = (kv.create_revision, kv.mod_revision, kv.version, kv.lease, kv.value)
        if kv.key.startswith(self._items_prefix):
            item = keys.parse_item(kv.key[len(self._items_prefix) :].decode())
            return ItemEntry(kv.key, self._decode_item(item, kv.value), *common, item)
        if kv.key.startswith(self._members_prefix):
            zone, suffix = keys.parse_member(kv.key[len(self._members_prefix) :].decode())
            member = self._decode_member(zone, suffix, kv.value)
            return MemberEntry(kv.key, member, *common, zone, suffix)
        if kv.key.startswith(self._assignments_prefix):
            section = kv.key[len(self._assignments_prefix) :].decode()
            item, zone, suffix, slot = keys.parse_assignment(section)
            value = self._decode_assignment(item, zone, suffix, kv.value)
            return AssignmentEntry(kv.key, value, *common, item, zone, suffix, slot)
        raise ValueError("it is none of items, members and assignments")

    def _reindex(self, changes: Sequence[Change]) -> None:
        reordered: set[str] = set()
        for key, old, new in changes:
            match new if new is not None else old:
                case ItemEntry(id=item):
                    _update_index(self._items, item, new)
                case MemberEntry(zone=zone, suffix=suffix):
                    _update_index(self._members, (zone, suffix), new)
                case AssignmentEntry(item=item, zone=zone, suffix=suffix):
                    _update_nested_index(self._by_item, item, key, new)
                    _update_nested_index(self._by_member, (zone, suffix), key, new)
                    if old is None:
                        reordered.add(item)
        for item in reordered:
            # A new key is the last one of its dictionary: restore the order of keys.
            if len(held := self._by_item.get(item, {})) > 1:
                self._by_item[item] = dict(sorted(held.items()))


class ProcessKeySpace(ItemKeySpace[I_co, P_co, A_co]):
    """Mirror of a cluster whose members are processes with endpoints."""

    def endpoint(self, zone: str, suffix: str) -> str | None:
        """Return the endpoint that a process announced; None if there is no such process."""
        entry = self.member(zone, suffix)
        return entry.value.process_spec.endpoint if entry is not None else None


def check_process(spec: ProcessMember, zone: str, suffix: str) -> None:
    """Check that the value of a member is of the process that its key names.

    Raises:
        ValidationError: it is of another one.
    """
    process = spec.process_spec.id
    if (process.zone, process.suffix) != (zone, suffix):
        raise ValidationError(f"it holds the spec of {process.zone}#{process.suffix}", path="Id")


def parse_value(message: MessageT, raw: bytes) -> MessageT:
    """Parse the value of a key into a new message, and return that.

    Raises:
        ValidationError: the bytes are no such message.
    """
    try:
        message.ParseFromString(raw)
    except DecodeError as error:
        raise ValidationError(f"it is no {type(message).__name__}: {error}") from error
    return message


def _update_index(index: dict[Any, Any], name: Any, entry: Entry[Any] | None) -> None:
    if entry is None:
        index.pop(name, None)
    else:
        index[name] = entry


def _update_nested_index(
    index: dict[Any, dict[bytes, Any]], name: Any, key: bytes, entry: Entry[Any] | None
) -> None:
    if entry is not None:
        index.setdefault(name, {})[key] = entry
    elif (held := index.get(name)) is not None:
        held.pop(key, None)
        if not held:
            del index[name]
