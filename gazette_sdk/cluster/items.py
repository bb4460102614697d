"""Items of a cluster: their key space, their changes, and those of this process.

Items are the journals of brokers and the shards of consumers. Both share one layout of keys and
differ in the values::

    ROOT/items/ID
    ROOT/members/ZONE#SUFFIX
    ROOT/assign/ID#ZONE#SUFFIX#SLOT

No part holds a byte up to ``#``, so the order of keys is that of the tuples of their parts.

:class:`ItemKeySpace` is the mirror of items, members and assignments (allocator section 1).
Look-ups are dictionaries that each batch of changes updates, so that their cost does not depend on
the number of keys. :func:`apply_items` changes items, all in one transaction (broker section 14,
shard section 11).

A :class:`ProcessMember` names itself in the headers of its answers. It serves a proxied request
only if that was meant for it, and was resolved with the same Etcd cluster (shard section 10).

:class:`LocalItems` is what this process runs for the items that are assigned to it (shard section
5). After each batch of changes of the mirror, it makes, continues, replaces and stops the local
objects of items: the replicas of a broker, the shards of a consumer.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

from google.protobuf.message import DecodeError, Message

from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_messages import Compare, Delete, KeyValue, Operation, Put
from gazette_sdk.cluster.keyspace import Change, Entry, KeySpace
from gazette_sdk.errors import EtcdError, GazetteError, ValidationError
from gazette_sdk.protocol import broker_pb2 as pb

_SLOT = re.compile(r"[+-]?[0-9]+")


# ------------------------------------------------------------------ names of keys


def items_prefix(root: str) -> bytes:
    """Return the prefix of the keys of all items."""
    return f"{root}/items/".encode()


def members_prefix(root: str) -> bytes:
    """Return the prefix of the keys of all members."""
    return f"{root}/members/".encode()


def assignments_prefix(root: str) -> bytes:
    """Return the prefix of the keys of all assignments."""
    return f"{root}/assign/".encode()


def item_key(root: str, item: str) -> bytes:
    """Return the key of an item."""
    return items_prefix(root) + _part(item)


def member_key(root: str, zone: str, suffix: str) -> bytes:
    """Return the key of a member."""
    return members_prefix(root) + _part(zone) + b"#" + _part(suffix)


def item_assignments_prefix(root: str, item: str) -> bytes:
    """Return the prefix of the keys of all assignments of one item, with its separator."""
    return assignments_prefix(root) + _part(item) + b"#"


def assignment_key(root: str, item: str, zone: str, suffix: str, slot: int) -> bytes:
    """Return the key of an assignment."""
    prefix = item_assignments_prefix(root, item)
    return prefix + b"%s#%s#%d" % (_part(zone), _part(suffix), slot)


def parse_item(section: str) -> str:
    """Return the id of an item, from its key after ``ROOT/items/``, or raise ValueError."""
    (item,) = _split(section, 1)
    return item


def parse_member(section: str) -> tuple[str, str]:
    """Return zone and suffix of a member, from its key after ``ROOT/members/``, or raise."""
    zone, suffix = _split(section, 2)
    return zone, suffix


def parse_assignment(section: str) -> tuple[str, str, str, int]:
    """Return item, zone, suffix and slot, from a key after ``ROOT/assign/``, or raise."""
    item, zone, suffix, slot = _split(section, 4)
    if not _SLOT.fullmatch(slot):
        raise ValueError(f"the slot {slot!r} is no number")
    return item, zone, suffix, int(slot)


def _split(section: str, count: int) -> list[str]:
    parts = section.split("#")
    if len(parts) != count:
        raise ValueError(f"expected {count} parts between '#', found {len(parts)}")
    return parts


def _part(text: str) -> bytes:
    """Return a part of a key as bytes. A byte that would break the order is a programming error."""
    part = text.encode()
    if part and min(part) <= 0x23:
        raise ValueError(f"{text!r} can not be a part of a key: it holds a byte up to '#'")
    return part


# ------------------------------------------------------------------ this process


class LocalIdentity:
    """Identity of this process in a cluster.

    Args:
        keyspace: the mirror of Etcd.
        process_id: this process.
        missing_id: stands for it while its member key is removed.
        kind: what its members are called: ``broker`` or ``consumer``.
    """

    def __init__(
        self,
        keyspace: ItemKeySpace[object, object, object],
        process_id: pb.ProcessSpec.ID,
        *,
        missing_id: pb.ProcessSpec.ID,
        kind: str,
    ) -> None:
        self._keyspace = keyspace
        self._process_id = process_id
        self._missing_id = missing_id
        self._kind = kind

    @property
    def local_id(self) -> pb.ProcessSpec.ID:
        """This process' id, or the placeholder when its member key is removed."""
        zone, suffix = self._process_id.zone, self._process_id.suffix
        return self._missing_id if self._keyspace.member(zone, suffix) is None else self._process_id

    def check_header(self, header: pb.Header) -> None:
        """Check the header of a request that another member proxied to this one.

        Raises:
            GazetteError: it is of another cluster, or for another process.
        """
        ours = self._keyspace.header.cluster_id
        if header.etcd.cluster_id != ours:
            raise GazetteError(
                f"the request comes from another Etcd cluster ({header.etcd.cluster_id}, "
                f"ours is {ours}): check the {self._kind}s' --etcd.address"
            )
        process, local = header.process_id, self.local_id
        if (process.zone or process.suffix) and process != local:
            raise GazetteError(
                f"the request is for {self._kind} {process.zone}/{process.suffix}, "
                f"and this is {local.zone}/{local.suffix}"
            )


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
        self._items_prefix = items_prefix(root)
        self._members_prefix = members_prefix(root)
        self._assignments_prefix = assignments_prefix(root)
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
        return item_key(self.root, item)

    def member_key(self, zone: str, suffix: str) -> bytes:
        """Return the key of a member."""
        return member_key(self.root, zone, suffix)

    def assignment_key(self, item: str, zone: str, suffix: str, slot: int) -> bytes:
        """Return the key of an assignment."""
        return assignment_key(self.root, item, zone, suffix, slot)

    # -------------------------------------------------------------- updates

    def _decode_entry(self, kv: KeyValue) -> Entry[Any]:
        common = (kv.create_revision, kv.mod_revision, kv.version, kv.lease, kv.value)
        if kv.key.startswith(self._items_prefix):
            item = parse_item(kv.key[len(self._items_prefix) :].decode())
            return ItemEntry(kv.key, self._decode_item(item, kv.value), *common, item)
        if kv.key.startswith(self._members_prefix):
            zone, suffix = parse_member(kv.key[len(self._members_prefix) :].decode())
            member = self._decode_member(zone, suffix, kv.value)
            return MemberEntry(kv.key, member, *common, zone, suffix)
        if kv.key.startswith(self._assignments_prefix):
            section = kv.key[len(self._assignments_prefix) :].decode()
            item, zone, suffix, slot = parse_assignment(section)
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


_log = logging.getLogger(__name__)

I_contra = TypeVar("I_contra", contravariant=True)
A_contra = TypeVar("A_contra", contravariant=True)
I = TypeVar("I")  # noqa: E741 - the value of an item
A = TypeVar("A")


class LocalItem(Protocol[I_contra, A_contra]):
    """Object that this process runs for an assigned item."""

    @property
    def create_revision(self) -> int:
        """Revision of Etcd at which the item was created."""

    @property
    def is_primary(self) -> bool:
        """True if this process is the item's primary."""

    def continues(
        self,
        item: ItemEntry[I_contra],
        assignment: AssignmentEntry[A_contra],
        *,
        is_primary: bool,
    ) -> bool:
        """Return True if it continues as the object of ``item``, else it is replaced."""

    def update(
        self,
        item: ItemEntry[I_contra],
        assignments: Sequence[AssignmentEntry[A_contra]],
        *,
        is_primary: bool,
    ) -> None:
        """Note the current keys of the item. It is called before :meth:`start`, too."""

    def start(self) -> None:
        """Begin to run."""

    def stopping(self) -> None:
        """Make all waiters of it resolve again, before its shutdown begins."""


T = TypeVar("T", bound=LocalItem[Any, Any])


class LocalItems(Generic[I, A, T]):
    """Objects of the items that are assigned to this process.

    Args:
        keyspace: mirror of Etcd. The owner calls :meth:`refresh` after each batch of its changes.
        local_id: this process.
        make: makes the object of an item that was assigned to us, from the item and our object of
            the very same item that is still shutting down, if there is one.
        shut_down: shuts an object down, given the item's id and the object.
        removed: called with the id of an item that is not assigned to us any more.
        kind: what the objects are called in the log.
    """

    def __init__(
        self,
        keyspace: ItemKeySpace[I, Any, A],
        local_id: pb.ProcessSpec.ID,
        *,
        make: Callable[[ItemEntry[I], T | None], T],
        shut_down: Callable[[str, T], Coroutine[Any, Any, None]],
        removed: Callable[[str], None],
        kind: str,
    ) -> None:
        self._keyspace = keyspace
        self._local_id = local_id
        self._make = make
        self._shut_down_item = shut_down
        self._removed = removed
        self._kind = kind
        self._items: dict[str, T] = {}
        self._ending: dict[asyncio.Task[None], tuple[str, T]] = {}
        self._stopped = False

    @property
    def is_stopped(self) -> bool:
        """True once :meth:`stop` was called: nothing is local any more."""
        return self._stopped

    def get(self, item: str) -> T | None:
        """Return our object of an item."""
        return self._items.get(item)

    def all(self) -> Sequence[T]:
        """Return all objects, in order of their items' ids."""
        return [local for _, local in sorted(self._items.items())]

    def refresh(self) -> None:
        """Update the objects after a batch of changes of the mirror."""
        if self._stopped:
            return
        started: list[T] = []
        gone: list[tuple[str, T]] = []
        for item in self._touched():
            before = self._items.get(item)
            after = self._reconcile(item, before)
            if after is before:
                continue
            if before is not None:
                gone.append((item, before))
                del self._items[item]
            if after is not None:
                started.append(after)
                self._items[item] = after
            else:
                self._removed(item)
        self._shut_down(gone)
        for local in started:
            local.start()

    def _touched(self) -> Iterable[str]:
        """Return the items of the last changes of the mirror."""
        touched: dict[str, None] = {}
        for change in self._keyspace.changes:
            match change.new or change.old:
                case AssignmentEntry(item=item) | ItemEntry(id=item):
                    touched[item] = None
        return touched

    def _reconcile(self, name: str, local: T | None) -> T | None:
        """Return the object that an item's keys require: the current one, a new one, none."""
        item = self._keyspace.item(name)
        assignments = self._keyspace.assignments(name)
        # The first one of several assignments to us is used.
        assignment = next(
            (
                entry
                for entry in assignments
                if entry.zone == self._local_id.zone and entry.suffix == self._local_id.suffix
            ),
            None,
        )
        if item is None or assignment is None:
            return None
        is_primary = assignment.slot == 0
        if local is None or not local.continues(item, assignment, is_primary=is_primary):
            local = self._make(item, self._predecessor(item, local))
        local.update(item, assignments, is_primary=is_primary)
        return local

    def _predecessor(self, item: ItemEntry[I], local: T | None) -> T | None:
        """Return our object of the very same item that a new one has to wait for."""
        if local is not None and local.create_revision == item.create_revision:
            return local
        for name, candidate in reversed(self._ending.values()):
            if name == item.id and candidate.create_revision == item.create_revision:
                return candidate
        return None

    # ---------------------------------------------------------------- end

    def stop(self) -> None:
        """Stop all objects in the background. Nothing is local any more."""
        self._stopped = True
        gone, self._items = list(self._items.items()), {}
        self._shut_down(gone)

    def ending(self) -> list[T]:
        """Return the objects that were stopped, and have not shut down yet."""
        return [local for _, local in self._ending.values()]

    async def shutdowns(self, *, primaries: bool = False) -> None:
        """Wait until the objects that were stopped have shut down.

        Args:
            primaries: only those of items whose primary we were.
        """
        while ending := [
            task for task, (_, local) in self._ending.items() if local.is_primary or not primaries
        ]:
            await asyncio.wait(ending)

    def _shut_down(self, gone: Sequence[tuple[str, T]]) -> None:
        """Shut objects down in the background."""
        # First make all waiters resolve again, so that they do not race with the shutdown.
        for _, local in gone:
            local.stopping()
        for item, local in gone:
            _log.info("stopping the %s of %s", self._kind, item)
            task = asyncio.get_running_loop().create_task(
                self._shut_down_item(item, local), name=f"shut down {item}"
            )
            self._ending[task] = item, local
            task.add_done_callback(self._shut_down_ended)

    def _shut_down_ended(self, task: asyncio.Task[None]) -> None:
        del self._ending[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s failed", task.get_name(), exc_info=error)


ANY_REVISION = -1
"""Expected revision of a change that does not depend on the item's current revision."""


@dataclass(frozen=True, slots=True)
class ItemChange:
    """Change of one item.

    Attributes:
        item: the item's id.
        expect_mod_revision: its current revision; 0 if it must not exist, or
            :data:`ANY_REVISION`.
        value: its new value; ``None`` deletes it.
    """

    item: str
    expect_mod_revision: int
    value: bytes | None


@dataclass(frozen=True, slots=True)
class AppliedItems:
    """Result of a transaction.

    Attributes:
        succeeded: False if an item, or a further condition, was not as expected.
        revision: of Etcd, of the transaction.
    """

    succeeded: bool
    revision: int


async def apply_items(
    etcd: Etcd,
    keyspace: ItemKeySpace[object, object, object],
    changes: Sequence[ItemChange],
    *,
    compares: Iterable[Compare] = (),
    others: Iterable[Operation] = (),
) -> AppliedItems:
    """Apply changes of items, all or none, and wait until the mirror has them.

    Args:
        etcd: the client.
        keyspace: the mirror.
        changes: the changes.
        compares: further conditions.
        others: further keys to write or to delete.

    Raises:
        EtcdError: Etcd failed, or refused.
    """
    conditions = [
        Compare.mod_revision(keyspace.item_key(change.item), change.expect_mod_revision)
        for change in changes
        if change.expect_mod_revision != ANY_REVISION
    ]
    conditions += compares
    operations: list[Operation] = [
        Delete(keyspace.item_key(change.item))
        if change.value is None
        else Put(keyspace.item_key(change.item), change.value)
        for change in changes
    ]
    operations += others
    try:
        result = await etcd.txn(dict.fromkeys(conditions), operations)
    except EtcdError as error:
        if "too many operations" not in str(error):
            raise
        raise EtcdError(
            f"{error}: the request has {len(changes)} changes, and Etcd takes 128 in one "
            "transaction unless configured otherwise; apply them in several requests"
        ) from error
    is_write = result.deleted or any(isinstance(operation, Put) for operation in operations)
    if result.succeeded and is_write:
        # The caller must be able to read its writes. A transaction that deleted only missing
        # keys changed nothing: our mirror may never reach its revision.
        await keyspace.wait_for_revision(result.revision)
    return AppliedItems(result.succeeded, result.revision)
