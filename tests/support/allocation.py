"""The values of the allocator's vectors: JSON with a number ``R`` and, of members, a flag ``E``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from gazette_sdk.cluster.allocator.state import Allocation
from gazette_sdk.cluster.etcd_messages import KeyValue, WatchBatch, WatchEvent
from gazette_sdk.cluster.items import AssignmentEntry, ItemEntry, ItemKeySpace
from gazette_sdk.protocol import broker_pb2 as pb


class VectorMember(NamedTuple):
    limit: int
    exiting: bool


class VectorAllocation(Allocation[int, VectorMember, bool]):
    """Consistency looks only at the one assignment."""

    def desired_replication(self, item: int) -> int:
        return item

    def item_limit(self, member: VectorMember) -> int:
        return member.limit

    def is_consistent(
        self,
        item: ItemEntry[Any],
        assignment: AssignmentEntry[Any],
        assignments: Sequence[AssignmentEntry[Any]],
    ) -> bool:
        return bool(assignment.value)


def vector_keyspace(root: str = "/root") -> ItemKeySpace[int, VectorMember, bool]:
    return ItemKeySpace(
        root,
        decode_item=lambda _id, raw: json.loads(raw)["R"],
        decode_member=lambda _zone, _suffix, raw: _member(json.loads(raw)),
        decode_assignment=lambda _item, _zone, _suffix, raw: _consistent(raw),
    )


def member_value(limit: int, *, exiting: bool = False) -> bytes:
    return json.dumps({"R": limit, "E": exiting}).encode()


def item_value(replication: int) -> bytes:
    return json.dumps({"R": replication}).encode()


def filled(
    entries: Iterable[tuple[str, str | bytes]], *, leases: dict[str, int] | None = None
) -> ItemKeySpace[int, VectorMember, bool]:
    """A mirror of keys that were created one after the other, at revisions from 1 on."""
    keyspace = vector_keyspace()
    fill(keyspace, entries, leases=leases)
    return keyspace


def fill(
    keyspace: ItemKeySpace[Any, Any, Any],
    entries: Iterable[tuple[str, str | bytes]],
    *,
    leases: dict[str, int] | None = None,
) -> None:
    events = []
    revision = keyspace.revision
    for key, value in entries:
        revision += 1
        raw = value.encode() if isinstance(value, str) else value
        lease = (leases or {}).get(key, 0)
        kv = KeyValue(key.encode(), raw, revision, revision, 1, lease)
        events.append(WatchEvent(is_delete=False, kv=kv))
    keyspace.apply([WatchBatch(pb.Header.Etcd(revision=revision), tuple(events))])


def _member(value: dict[str, Any]) -> VectorMember:
    return VectorMember(value["R"], value.get("E", False))


def _consistent(raw: bytes) -> bool:
    if raw not in (b"", b"consistent"):
        raise ValueError("neither empty nor consistent")
    return raw == b"consistent"
