"""Model of an Etcd server: keys with revisions, transactions, leases, watches, compaction.

It has Etcd's API version 3 as far as the client uses it, on Etcd's own messages, and no clock: the
caller says when a lease ends. A contract test compares it with a real Etcd. The real one cannot run
on a virtual clock: it is another process, with clocks of its own.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import grpc

from gazette_sdk.cluster.etcd_messages import rpc

__all__ = ["CLUSTER_ID", "EtcdModel", "EtcdRefusalError", "Lease", "Watcher"]

CLUSTER_ID = 0x5EED
MEMBER_ID = 0x1
LEASE_TTL_S_MIN = 2
OPERATIONS_MAX = 128

_KeyValue = rpc.RangeResponse.DESCRIPTOR.fields_by_name["kvs"].message_type._concrete_class
_Event = rpc.WatchResponse.DESCRIPTOR.fields_by_name["events"].message_type._concrete_class


class EtcdRefusalError(Exception):
    """Refusal of a request, with Etcd's code and text."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = f"etcdserver: {text}"


@dataclass(slots=True)
class Lease:
    """A lease.

    Attributes:
        id: its id.
        ttl_s: time to live from the last renewal on.
        keys: keys that are attached to it.
    """

    id: int
    ttl_s: int
    keys: dict[bytes, None] = field(default_factory=dict)


class Watcher:
    """Watch of a range of keys.

    Args:
        create: its creation request.
        send: called with each response.
    """

    def __init__(self, create: Any, send: Callable[[Any], None]) -> None:
        self.key: bytes = create.key
        self.range_end: bytes = create.range_end
        self.start_revision: int = create.start_revision
        self.send = send

    def events(self, events: list[Any]) -> list[Any]:
        """Return those of the events that it watches."""
        return [
            event
            for event in events
            if _contains(self.key, self.range_end, event.kv.key)
            and event.kv.mod_revision >= self.start_revision
        ]


class EtcdModel:
    """State of an Etcd cluster.

    Attributes:
        revision: of the store.
        leases: by id.
        on_grant: called with each new or renewed lease, and when a lease has been revoked.
    """

    def __init__(self) -> None:
        self.revision = 1
        self.raft_term = 2
        self.compacted = 0
        self.leases: dict[int, Lease] = {}
        self.on_grant: Callable[[Lease], None] = lambda _: None
        self._keys: dict[bytes, Any] = {}
        self._sorted: list[bytes] = []
        self._versions: dict[bytes, list[Any]] = {}  # (mod revision, value or None) of each key
        self._history: list[tuple[int, list[Any]]] = []
        self._watchers: dict[Watcher, None] = {}
        self._next_lease = 0x7000

    def header(self) -> Any:
        """Return the header of a response."""
        return rpc.ResponseHeader(
            cluster_id=CLUSTER_ID,
            member_id=MEMBER_ID,
            revision=self.revision,
            raft_term=self.raft_term,
        )

    def snapshot(self) -> dict[str, Any]:
        """Return a copy of the state, as a backup has it."""
        return {
            "revision": self.revision,
            "compacted": self.compacted,
            "leases": {
                each.id: replace(each, keys=dict(each.keys)) for each in self.leases.values()
            },
            "_keys": dict(self._keys),
            "_sorted": list(self._sorted),
            "_versions": {key: list(versions) for key, versions in self._versions.items()},
            "_history": list(self._history),
        }

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Go back to a snapshot, which is not used any more. There must be no connection."""
        for name, value in snapshot.items():
            setattr(self, name, value)

    # ----------------------------------------------------------------- keys

    def range(self, request: Any) -> Any:
        """Answer a range request."""
        revision = request.revision or self.revision
        self._check_revision(revision)
        found = list(self._read(request.key, request.range_end, revision))
        limit = request.limit or len(found)
        return rpc.RangeResponse(
            header=self.header(),
            kvs=[] if request.count_only else found[:limit],
            more=len(found) > limit,
            count=len(found),
        )

    def txn(self, request: Any) -> Any:
        """Run a transaction."""
        for operations in (request.compare, request.success, request.failure):
            if len(operations) > OPERATIONS_MAX:
                raise _invalid("too many operations in txn request")
        for operations in (request.success, request.failure):
            self._check_duplicates(operations)
        succeeded = all(map(self._holds, request.compare))
        operations = request.success if succeeded else request.failure
        self._check_operations(operations)
        response = rpc.TxnResponse(succeeded=succeeded)
        events: list[Any] = []
        for operation in operations:
            answer = response.responses.add()
            if operation.HasField("request_put"):
                self._put(operation.request_put, events)
                answer.response_put.SetInParent()
            elif operation.HasField("request_delete_range"):
                delete = operation.request_delete_range
                answer.response_delete_range.deleted = self._delete(
                    delete.key, delete.range_end, events
                )
            else:
                get = operation.request_range
                found = list(self._read(get.key, get.range_end, 0))
                limit = get.limit or len(found)
                answer.response_range.kvs.extend(found[:limit])
                answer.response_range.count = len(found)
        self._commit(events)
        response.header.CopyFrom(self.header())
        return response

    def compact(self, revision: int) -> None:
        """Forget what was before a revision."""
        if revision <= self.compacted:
            raise _out_of_range("mvcc: required revision has been compacted")
        if revision > self.revision:
            raise _out_of_range("mvcc: required revision is a future revision")
        self.compacted = revision
        first = bisect_left(self._history, revision + 1, key=lambda entry: entry[0])
        # Etcd keeps the changes of the compacted revision itself.
        first = bisect_left(self._history, revision, key=lambda entry: entry[0])
        del self._history[:first]

    # --------------------------------------------------------------- leases

    def grant(self, request: Any) -> Any:
        """Create a lease."""
        self._next_lease += 1
        lease_id = request.ID or self._next_lease
        if lease_id in self.leases:
            raise EtcdRefusalError(grpc.StatusCode.FAILED_PRECONDITION, "lease already exists")
        lease = Lease(lease_id, max(request.TTL, LEASE_TTL_S_MIN))
        self.leases[lease_id] = lease
        self.on_grant(lease)
        return rpc.LeaseGrantResponse(header=self.header(), ID=lease_id, TTL=lease.ttl_s)

    def keep_alive(self, request: Any) -> Any:
        """Renew a lease."""
        lease = self.leases.get(request.ID)
        if lease is not None:
            self.on_grant(lease)
        return rpc.LeaseKeepAliveResponse(
            header=self.header(), ID=request.ID, TTL=lease.ttl_s if lease is not None else 0
        )

    def revoke(self, request: Any) -> Any:
        """Revoke a lease."""
        self.end_lease(self._lease(request.ID))
        return rpc.LeaseRevokeResponse(header=self.header())

    def list_leases(self) -> Any:
        """List the leases."""
        response = rpc.LeaseLeasesResponse(header=self.header())
        for lease_id in self.leases:
            response.leases.add(ID=lease_id)
        return response

    def end_lease(self, lease: Lease) -> None:
        """End a lease, and delete its keys in one revision."""
        del self.leases[lease.id]
        events: list[Any] = []
        for key in sorted(lease.keys):
            self._delete(key, b"", events)
        self._commit(events)

    # -------------------------------------------------------------- watches

    def watch(self, watcher: Watcher) -> None:
        """Begin a watch: send what has happened since its start, and what happens from now on."""
        watcher.send(rpc.WatchResponse(header=self.header(), created=True))
        start = watcher.start_revision
        if start and start <= self.revision:
            if start < self.compacted:
                watcher.send(
                    rpc.WatchResponse(
                        header=self.header(), compact_revision=self.compacted, canceled=True
                    )
                )
                return
            first = bisect_left(self._history, start, key=lambda entry: entry[0])
            past = [event for _, events in self._history[first:] for event in events]
            if found := watcher.events(past):
                watcher.send(rpc.WatchResponse(header=self.header(), events=found))
        self._watchers[watcher] = None

    def unwatch(self, watcher: Watcher) -> None:
        """End a watch."""
        self._watchers.pop(watcher, None)

    # --------------------------------------------------------------- inside

    def _lease(self, lease_id: int) -> Lease:
        lease = self.leases.get(lease_id)
        if lease is None:
            raise EtcdRefusalError(grpc.StatusCode.NOT_FOUND, "requested lease not found")
        return lease

    def _check_revision(self, revision: int) -> None:
        if revision > self.revision:
            raise _out_of_range("mvcc: required revision is a future revision")
        if revision < self.compacted:
            raise _out_of_range("mvcc: required revision has been compacted")

    def _read(self, key: bytes, range_end: bytes, revision: int) -> Iterator[Any]:
        """Yield keys of a range as of a revision; 0: as they are, within a transaction, too."""
        if not range_end:
            keys = [key]
        elif revision in (0, self.revision):
            begin = bisect_left(self._sorted, key)
            end = len(self._sorted) if range_end == b"\0" else bisect_left(self._sorted, range_end)
            keys = self._sorted[begin:end]
        else:
            keys = sorted(each for each in self._versions if _contains(key, range_end, each))
        for each in keys:
            if revision in (0, self.revision):
                kv = self._keys.get(each)
            else:
                versions = self._versions.get(each, [])
                at = bisect_right(versions, revision, key=lambda version: version[0])
                kv = versions[at - 1][1] if at else None
            if kv is not None:
                yield kv

    def _holds(self, compare: Any) -> bool:
        kv = self._keys.get(compare.key)
        target = compare.WhichOneof("target_union")
        if target == "value":
            return kv is not None and _compares(kv.value, compare.result, compare.value)
        actual = getattr(kv, target) if kv is not None else 0
        return _compares(actual, compare.result, getattr(compare, target))

    def _check_duplicates(self, operations: Any) -> None:
        written: set[bytes] = set()
        for operation in operations:
            if operation.HasField("request_put"):
                key = operation.request_put.key
                if key in written:
                    raise _invalid("duplicate key given in txn request")
                written.add(key)
        for operation in operations:
            if operation.HasField("request_delete_range"):
                delete = operation.request_delete_range
                if any(_contains(delete.key, delete.range_end, key) for key in written):
                    raise _invalid("duplicate key given in txn request")

    def _check_operations(self, operations: Any) -> None:
        for operation in operations:
            if not operation.HasField("request_put"):
                continue
            put = operation.request_put
            if put.ignore_lease and put.key not in self._keys:
                raise _invalid("key not found")
            if put.lease:
                self._lease(put.lease)

    def _put(self, put: Any, events: list[Any]) -> None:
        before = self._keys.get(put.key)
        revision = self.revision + 1
        lease = before.lease if put.ignore_lease and before is not None else put.lease
        kv = _KeyValue(
            key=put.key,
            value=put.value,
            create_revision=before.create_revision if before is not None else revision,
            mod_revision=revision,
            version=before.version + 1 if before is not None else 1,
            lease=lease,
        )
        if before is None:
            self._sorted.insert(bisect_left(self._sorted, put.key), put.key)
        elif before.lease and before.lease in self.leases:
            self.leases[before.lease].keys.pop(put.key, None)
        if lease:
            self.leases[lease].keys[put.key] = None
        self._keys[put.key] = kv
        self._versions.setdefault(put.key, []).append((revision, kv))
        events.append(_Event(type=0, kv=kv))

    def _delete(self, key: bytes, range_end: bytes, events: list[Any]) -> int:
        found = list(self._read(key, range_end, 0))
        revision = self.revision + 1
        for kv in found:
            del self._keys[kv.key]
            del self._sorted[bisect_left(self._sorted, kv.key)]
            if kv.lease in self.leases:
                self.leases[kv.lease].keys.pop(kv.key, None)
            self._versions[kv.key].append((revision, None))
            events.append(_Event(type=1, kv=_KeyValue(key=kv.key, mod_revision=revision)))
        return len(found)

    def _commit(self, events: list[Any]) -> None:
        """End a change: it has a revision of its own, if it changed anything."""
        if not events:
            return
        self.revision += 1
        self._history.append((self.revision, events))
        for watcher in list(self._watchers):
            if found := watcher.events(events):
                watcher.send(rpc.WatchResponse(header=self.header(), events=found))


def _contains(begin: bytes, end: bytes, key: bytes) -> bool:
    if not end:
        return key == begin
    return key >= begin and (end == b"\0" or key < end)


def _compares(actual: Any, result: int, expected: Any) -> bool:
    if result == rpc.Compare.EQUAL:
        return bool(actual == expected)
    if result == rpc.Compare.GREATER:
        return bool(actual > expected)
    if result == rpc.Compare.LESS:
        return bool(actual < expected)
    return bool(actual != expected)


def _invalid(text: str) -> EtcdRefusalError:
    return EtcdRefusalError(grpc.StatusCode.INVALID_ARGUMENT, text)


def _out_of_range(text: str) -> EtcdRefusalError:
    return EtcdRefusalError(grpc.StatusCode.OUT_OF_RANGE, text)
