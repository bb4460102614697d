"""Keys and values of consumers in Etcd: shards, processes, and assignments of shards to processes.

Values are ``ShardSpec``, ``ConsumerSpec`` and ``ReplicaStatus`` (shard section 3). A value that
breaks a rule of its message, or has another name than its key, cannot be decoded.
"""

from __future__ import annotations

from collections.abc import Sequence

from gazette_sdk.cluster.allocator.state import Allocation
from gazette_sdk.cluster.items import (
    AssignmentEntry,
    ItemEntry,
    MemberEntry,
    ProcessKeySpace,
    check_process,
    parse_value,
)
from gazette_sdk.errors import ValidationError
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
