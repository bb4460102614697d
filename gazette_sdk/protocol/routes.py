"""Process ids, routes and headers (protocol section 9)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gazette_sdk.errors import ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.names import at, validate_token
from gazette_sdk.protocol.urls import validate_endpoint

__all__ = [
    "JOURNAL_LIMIT_MOST",
    "NO_PRIMARY",
    "attach_endpoints",
    "equivalent",
    "route_of",
    "unrouted_header",
    "validate_broker_spec",
    "validate_etcd",
    "validate_header",
    "validate_process_id",
    "validate_process_spec",
    "validate_route",
]

NO_PRIMARY = -1
"""``Route.primary`` of a route without primary; an absent field means the first member."""
JOURNAL_LIMIT_MOST = 1 << 17
"""Greatest number of replicas that a broker may offer to host."""

_ZONE_LENGTH_BYTES = (1, 32)
_SUFFIX_LENGTH_BYTES = (4, 128)


# ---------------------------------------------------------------- making


def route_of(assignments: Iterable[tuple[str, str, int]]) -> pb.Route:
    """Return the route of a journal, without endpoints.

    Two assignments of one member, which writers that did not know of each other may have made, are
    one member of the route.

    Args:
        assignments: zone, suffix and slot of each of its assignments, in key order.
    """
    route = pb.Route(primary=NO_PRIMARY)
    last: tuple[str, str] | None = None
    for zone, suffix, slot in assignments:
        if (zone, suffix) != last:
            last = zone, suffix
            route.members.add(zone=zone, suffix=suffix)
        if slot == 0:
            route.primary = len(route.members) - 1
    return route


def attach_endpoints(route: pb.Route, endpoint_of: Callable[[str, str], str | None]) -> None:
    """Set the route's endpoints, one per member.

    Args:
        route: the route, changed in place.
        endpoint_of: returns the endpoint of a zone and suffix; ``None``, which becomes an empty
            text, if that member is gone.
    """
    route.endpoints[:] = [endpoint_of(member.zone, member.suffix) or "" for member in route.members]


def equivalent(a: pb.Route, b: pb.Route) -> bool:
    """Return True if two routes have equal members and primary; endpoints do not matter."""
    return a.primary == b.primary and a.members == b.members


def unrouted_header(process_id: pb.ProcessSpec.ID | None, etcd: pb.Header.Etcd) -> pb.Header:
    """Return the header of responses without a journal: List, Apply, FragmentStoreHealth.

    Args:
        process_id: the answering broker; ``None`` if its member key is gone.
        etcd: Etcd header of its key space.
    """
    header = pb.Header(process_id=process_id or pb.ProcessSpec.ID(), etcd=etcd)
    header.route.primary = NO_PRIMARY
    return header


# ---------------------------------------------------------------- validation


def validate_process_id(process_id: pb.ProcessSpec.ID, path: str = "") -> None:
    """Check zone and suffix.

    Raises:
        ValidationError: under ``Zone`` or ``Suffix``.
    """
    validate_token(process_id.zone, at(path, "Zone"), *_ZONE_LENGTH_BYTES)
    validate_token(process_id.suffix, at(path, "Suffix"), *_SUFFIX_LENGTH_BYTES)


def validate_process_spec(spec: pb.ProcessSpec, path: str = "") -> None:
    """Check a process's id, and then its endpoint.

    Raises:
        ValidationError: under ``Id`` or ``Endpoint``.
    """
    validate_process_id(spec.id, at(path, "Id"))
    validate_endpoint(spec.endpoint, at(path, "Endpoint"))


def validate_broker_spec(spec: pb.BrokerSpec, path: str = "") -> None:
    """Check a broker's process spec, and its limit of journals.

    Raises:
        ValidationError: of the process spec, or of kind ``invalid_journal_limit``.
    """
    validate_process_spec(spec.process_spec, path)
    if spec.journal_limit > JOURNAL_LIMIT_MOST:
        raise ValidationError(
            f"invalid journal_limit ({spec.journal_limit}; expected <= {JOURNAL_LIMIT_MOST})",
            kind="invalid_journal_limit",
            path=path,
        )


def validate_route(route: pb.Route, path: str = "") -> None:
    """Check members and their order, the primary, and endpoints.

    Raises:
        ValidationError: of a member or endpoint, or of kind ``not_sorted_unique``,
            ``invalid_primary`` or ``endpoints_length``.
    """
    last: tuple[str, str] | None = None
    for index, member in enumerate(route.members):
        validate_process_id(member, at(path, f"Members[{index}]"))
        this = (member.zone, member.suffix)
        if last is not None and last >= this:
            raise ValidationError(
                f"members must be sorted and unique ({this} follows {last})",
                kind="not_sorted_unique",
                path=path,
            )
        last = this
    if not NO_PRIMARY <= route.primary < len(route.members):
        raise ValidationError(
            f"invalid primary ({route.primary}; expected -1 <= primary < {len(route.members)})",
            kind="invalid_primary",
            path=path,
        )
    if not route.endpoints:
        return
    if len(route.endpoints) != len(route.members):
        raise ValidationError(
            f"endpoints and members must be equally many "
            f"({len(route.endpoints)} and {len(route.members)})",
            kind="endpoints_length",
            path=path,
        )
    for index, endpoint in enumerate(route.endpoints):
        if endpoint:
            validate_endpoint(endpoint, at(path, f"Endpoints[{index}]"))


def validate_etcd(etcd: pb.Header.Etcd, path: str = "") -> None:
    """Check that all fields of an Etcd header are set.

    Raises:
        ValidationError: kinds in checking order ``invalid_cluster_id``, ``invalid_member_id``,
            ``invalid_revision``, ``invalid_raft_term``.
    """
    for field, value in (
        ("cluster_id", etcd.cluster_id),
        ("member_id", etcd.member_id),
        ("revision", etcd.revision),
        ("raft_term", etcd.raft_term),
    ):
        if value <= 0:
            raise ValidationError(
                f"invalid {field} ({value}; expected > 0)", kind=f"invalid_{field}", path=path
            )


_VALID_HEADERS_MAX = 64
_VALID_HEADER_BYTES_MAX = 2048

_valid_headers: set[bytes] = set()
"""Encoded headers that passed lately: the responses of a broker have the same one for long."""


def validate_header(header: pb.Header, path: str = "") -> None:
    """Check a header's process id (unless wholly empty), its route, and its Etcd header.

    Raises:
        ValidationError: under ``ProcessId``, ``Route`` or ``Etcd``.
    """
    encoded = header.SerializeToString()
    if encoded in _valid_headers:
        return
    process_id = header.process_id
    if process_id.zone or process_id.suffix:
        validate_process_id(process_id, at(path, "ProcessId"))
    validate_route(header.route, at(path, "Route"))
    validate_etcd(header.etcd, at(path, "Etcd"))
    if len(encoded) <= _VALID_HEADER_BYTES_MAX:
        if len(_valid_headers) >= _VALID_HEADERS_MAX:
            _valid_headers.clear()
        _valid_headers.add(encoded)
