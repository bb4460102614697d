"""Keys and values of consumers in Etcd: shards, processes, and assignments of shards to processes.

Values are ``ShardSpec``, ``ConsumerSpec`` and ``ReplicaStatus`` (shard section 3). A value that
breaks a rule of its message, or has another name than its key, cannot be decoded.

Brokers have no mirror of consumers. A :class:`ConsumerDirectory` reads their member keys from Etcd,
when somebody asks.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence

from gazette_sdk.cluster.allocator.state import Allocation
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_messages import prefix_end
from gazette_sdk.cluster.items import (
    AssignmentEntry,
    ItemEntry,
    MemberEntry,
    ProcessKeySpace,
    check_process,
    members_prefix,
    parse_member,
    parse_value,
)
from gazette_sdk.errors import EtcdError, ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.rules import attach_endpoints, route_of
from gazette_sdk.protocol.shard_spec import (
    DEFAULT_MAX_HOT_STANDBYS,
    desired_replication,
    validate_consumer_spec,
    validate_replica_status,
    validate_shard_spec,
)

ShardEntry = ItemEntry[cpb.ShardSpec]
ConsumerEntry = MemberEntry[cpb.ConsumerSpec]
ShardAssignment = AssignmentEntry[cpb.ReplicaStatus]

CONSUMERS_PREFIX = "/gazette/consumers"
"""Prefix in Etcd below which each application has its keys, by default."""

_READY = frozenset({cpb.ReplicaStatus.STANDBY, cpb.ReplicaStatus.PRIMARY})


class ConsumerKeySpace(ProcessKeySpace[cpb.ShardSpec, cpb.ConsumerSpec, cpb.ReplicaStatus]):
    """Mirror of the consumer processes of one application.

    Args:
        root: the application's prefix, ``/gazette/consumers/NAME``.
    """

    def __init__(self, root: str) -> None:
        super().__init__(
            root,
            decode_item=_decode_shard,
            decode_member=_decode_consumer,
            decode_assignment=_decode_assignment,
        )

    def shard_route(self, shard: str) -> pb.Route:
        """Return the route that the assignments of a shard imply, with endpoints."""
        route = route_of((a.zone, a.suffix, a.slot) for a in self.assignments(shard))
        attach_endpoints(route, self.endpoint)
        return route


class ShardAllocation(Allocation[cpb.ShardSpec, cpb.ConsumerSpec, cpb.ReplicaStatus]):
    """The allocator's rules for shards and consumer processes.

    Args:
        max_hot_standbys: upper bound of the hot standbys of all shards.
    """

    balances_primaries = True
    needs_all_replicas = False

    def __init__(self, max_hot_standbys: int = DEFAULT_MAX_HOT_STANDBYS) -> None:
        self._max_hot_standbys = max_hot_standbys

    def desired_replication(self, item: cpb.ShardSpec) -> int:
        """Return the number of processes that should hold a shard."""
        return desired_replication(item, self._max_hot_standbys)

    def item_limit(self, member: cpb.ConsumerSpec) -> int:
        """Return the number of shards that a process offers to hold."""
        return member.shard_limit

    def is_consistent(
        self,
        item: ItemEntry[cpb.ShardSpec],  # noqa: ARG002 -- only the statuses matter
        assignment: ShardAssignment,
        assignments: Sequence[ShardAssignment],
    ) -> bool:
        """Return True if a replica of a shard is as far as it can be."""
        return is_consistent(assignment, assignments)


def is_consistent(assignment: ShardAssignment, assignments: Sequence[ShardAssignment]) -> bool:
    """Return True if one assignment of a shard is ready: STANDBY or PRIMARY.

    A FAILED replica counts as ready where the primary failed too: others would hardly do better,
    and the shard must not keep its processes from leaving. The allocator removes no ready replica
    below the desired number, so that a shard moves only once its new process can take over.

    Args:
        assignment: the assignment.
        assignments: all assignments of the shard.
    """
    if assignment.value.code == cpb.ReplicaStatus.FAILED:
        return any(
            other.slot == 0 and other.value.code == cpb.ReplicaStatus.FAILED
            for other in assignments
        )
    return assignment.value.code in _READY


def _decode_shard(shard: str, raw: bytes) -> cpb.ShardSpec:
    spec = parse_value(cpb.ShardSpec(), raw)
    validate_shard_spec(spec, stored=True)
    if spec.id != shard:
        raise ValidationError(f"it holds the spec of {spec.id!r}", path="Id")
    return spec


def _decode_consumer(zone: str, suffix: str, raw: bytes) -> cpb.ConsumerSpec:
    spec = parse_value(cpb.ConsumerSpec(), raw)
    validate_consumer_spec(spec)
    check_process(spec, zone, suffix)
    return spec


def _decode_assignment(_item: str, _zone: str, _suffix: str, raw: bytes) -> cpb.ReplicaStatus:
    status = parse_value(cpb.ReplicaStatus(), raw)
    validate_replica_status(status)
    return status


# ---------------------------------------------------------------- directory

DIRECTORY_PERIOD_S = 10.0
"""Time for which what was read of Etcd is used."""

APPLICATIONS_MAX = 256
"""Applications that are found. Each one costs four reads of Etcd."""

PROCESSES_MAX = 1000
"""Processes of one application that are found."""

DIRECTORY_TIMEOUT_S = 2.0
"""Longest time of the reads."""

_SECTION = re.compile(rb"((.+)/members/)[^/#]+#[^/#]+|((.+?)/(?:items|assign)/).*", re.DOTALL)
"""Key below the prefix: of a member, or of an item or an assignment, whose ids may have slashes."""


class ConsumerDirectory:
    """Processes of all applications below a prefix, as their member keys in Etcd say.

    Only member keys are read, and one key of each application: shards may be many. Etcd is read at
    most every :data:`DIRECTORY_PERIOD_S`, and only when somebody asks.

    Args:
        etcd: the client.
        prefix: prefix of the applications' prefixes.
        now: the time in seconds, for tests.

    Attributes:
        error: why the last read failed, as where Etcd's roles forbid it; None if it did not.
    """

    def __init__(
        self,
        etcd: Etcd,
        prefix: str = CONSUMERS_PREFIX,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.error: EtcdError | None = None
        self._etcd = etcd
        self._prefix = prefix
        self._now = now
        self._found: Mapping[str, Sequence[cpb.ConsumerSpec]] = {}
        self._read_at = -DIRECTORY_PERIOD_S
        self._lock = asyncio.Lock()

    async def applications(self) -> Mapping[str, Sequence[cpb.ConsumerSpec]]:
        """Return processes by the names of applications; after an error those of the last read."""
        async with self._lock:
            if self._now() - self._read_at >= DIRECTORY_PERIOD_S:
                try:
                    async with asyncio.timeout(DIRECTORY_TIMEOUT_S):
                        self._found = await read_consumers(self._etcd, self._prefix)
                    self.error = None
                except EtcdError as error:
                    self.error = error
                except TimeoutError:
                    self.error = EtcdError(
                        f"Etcd did not answer within {DIRECTORY_TIMEOUT_S:g} s; check its load"
                    )
                self._read_at = self._now()
            return self._found


async def read_consumers(etcd: Etcd, prefix: str) -> dict[str, list[cpb.ConsumerSpec]]:
    """Return the processes of the applications below a prefix of Etcd, by the applications' names.

    An application that has shards, and no process that runs, has an empty list.

    Args:
        etcd: the client.
        prefix: prefix of the applications' prefixes, without a slash at its end.

    Raises:
        EtcdError: Etcd refused, or did not answer.
    """
    root = f"{prefix}/".encode()
    found: dict[str, list[cpb.ConsumerSpec]] = {}
    begin, end = root, prefix_end(root)
    for _ in range(3 * APPLICATIONS_MAX):  # an application has keys of three kinds
        first = (await etcd.range(begin, end, limit=1)).entries
        if not first:
            break
        key = _SECTION.fullmatch(first[0].key[len(root) :])
        if key is None:
            begin = first[0].key + b"\0"
            continue
        begin = prefix_end(root + (key[1] or key[3]))
        name = (key[2] or key[4]).decode(errors="replace")
        if name in found:
            continue
        specs = found[name] = []
        members = members_prefix(f"{prefix}/{name}")
        listed = await etcd.range(members, prefix_end(members), limit=PROCESSES_MAX)
        for entry in listed.entries:
            try:
                zone, suffix = parse_member(entry.key[len(members) :].decode())
                spec = _decode_consumer(zone, suffix, entry.value)
            except (ValidationError, ValueError):
                continue  # the application's own processes log it
            specs.append(spec)
    return found
