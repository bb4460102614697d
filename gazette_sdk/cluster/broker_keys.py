"""Keys and values of brokers in Etcd: journals, brokers, and assignments of journals to brokers.

Values are ``JournalSpec``, ``BrokerSpec`` and ``Route`` (protocol section 13, allocator section
1). A value that breaks a rule of its message, or has another name than its key, cannot be decoded.
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
from gazette_sdk.protocol.journal_spec import (
    DEFAULT_MAX_REPLICATION,
    desired_replication,
    validate_journal_spec,
)
from gazette_sdk.protocol.rules import (
    NO_PRIMARY,
    equivalent,
    route_of,
    validate_broker_spec,
    validate_route,
)

WITHDRAWN_ROUTE = pb.Route(primary=NO_PRIMARY).SerializeToString()
"""Value of the assignment of a journal whose last broker left with all content stored, without an
offset. It decodes like that of an assignment which has not synchronized, which has no bytes."""


def withdrawn_route(stored_end: int) -> pb.Route:
    """Return the route of a journal whose last broker left with all content stored.

    Args:
        stored_end: offset of its end. A journal does not continue before it.
    """
    return pb.Route(primary=NO_PRIMARY, stored_end=stored_end)


def is_withdrawn(route: pb.Route, raw: bytes) -> bool:
    """Return True if the value of an assignment is a withdrawn route."""
    return bool(raw) and not route.members and route.primary == NO_PRIMARY


JournalEntry = ItemEntry[pb.JournalSpec]
BrokerEntry = MemberEntry[pb.BrokerSpec]
BrokerAssignment = AssignmentEntry[pb.Route]


class BrokerKeySpace(ProcessKeySpace[pb.JournalSpec, pb.BrokerSpec, pb.Route]):
    """Mirror of a cluster of brokers.

    Args:
        root: the cluster's prefix, by default ``/gazette/cluster``.
    """

    def __init__(self, root: str = "/gazette/cluster") -> None:
        super().__init__(
            root,
            decode_item=_decode_journal,
            decode_member=_decode_broker,
            decode_assignment=_decode_assignment,
        )

    def journal_route(self, journal: str) -> pb.Route:
        """Return the route that the assignments of a journal imply, without endpoints."""
        return implied_route(self.assignments(journal))


class JournalAllocation(Allocation[pb.JournalSpec, pb.BrokerSpec, pb.Route]):
    """The allocator's rules for journals and brokers.

    Args:
        max_replication: upper bound of the replication of all journals.
    """

    balances_primaries = True

    def __init__(self, max_replication: int = DEFAULT_MAX_REPLICATION) -> None:
        self._max_replication = max_replication

    def desired_replication(self, item: pb.JournalSpec) -> int:
        """Return the number of brokers that a journal should have."""
        return desired_replication(item, self._max_replication)

    def item_limit(self, member: pb.BrokerSpec) -> int:
        """Return the number of journals that a broker offers to hold."""
        return member.journal_limit

    def demoted_value(self, assignment: BrokerAssignment) -> bytes:
        """Return the same value: the replica stays, and its route says what it has."""
        return assignment.raw

    def is_consistent(
        self,
        item: ItemEntry[pb.JournalSpec],  # noqa: ARG002 -- only the routes matter
        assignment: BrokerAssignment,  # noqa: ARG002
        assignments: Sequence[BrokerAssignment],
    ) -> bool:
        """Return True if all replicas of the journal agree on the current route."""
        return is_consistent(assignments)


def implied_route(assignments: Sequence[BrokerAssignment]) -> pb.Route:
    """Return the route of a journal's assignments, given in order of their keys."""
    return route_of((a.zone, a.suffix, a.slot) for a in assignments)


def is_consistent(assignments: Sequence[BrokerAssignment]) -> bool:
    """Return True if each assignment of a journal holds the route that all of them imply.

    The journal's primary writes it there once the replicas have synchronised, so a journal is
    inconsistent from each change of its members or its primary until then (allocator section 10).
    """
    route = implied_route(assignments)
    return all(equivalent(a.value, route) for a in assignments)


def route_value(route: pb.Route) -> bytes:
    """Return the value of an assignment that has synchronised on ``route``: without endpoints."""
    return pb.Route(members=route.members, primary=route.primary).SerializeToString()


def _decode_journal(name: str, raw: bytes) -> pb.JournalSpec:
    spec = parse_value(pb.JournalSpec(), raw)
    validate_journal_spec(spec, stored=True)
    if spec.name != name:
        raise ValidationError(f"it holds the spec of {spec.name!r}", path="Name")
    return spec


def _decode_broker(zone: str, suffix: str, raw: bytes) -> pb.BrokerSpec:
    spec = parse_value(pb.BrokerSpec(), raw)
    validate_broker_spec(spec)
    check_process(spec, zone, suffix)
    return spec


def _decode_assignment(_item: str, _zone: str, _suffix: str, raw: bytes) -> pb.Route:
    if not raw:
        # The empty message would have the first member as primary.
        return pb.Route(primary=NO_PRIMARY)
    route = parse_value(pb.Route(), raw)
    validate_route(route)
    return route
