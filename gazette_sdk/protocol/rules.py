"""Rules of requests, responses, routes and headers; the table of calls; their status codes.

Rules of requests and responses (protocol section 10), of process ids, routes and headers (section
9). A server validates each request before it acts, a client each response. The rule that fails
first is part of the contract; texts are not.

Sub-messages that are encoded even when they are empty: other implementations always encode those
marked "NN" in protocol section 1. They decode messages without them alike: completing a message
matters only where bytes are compared, but costs little.

The table of calls has the journal service and the shard service: gRPC paths of protocol section 3
and shard section 2, numbers of the stream transport. On every wire calls end with gRPC's status
codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from gazette_sdk.errors import ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import cluster_pb2 as clpb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.durations import to_ns
from gazette_sdk.protocol.fragments import validate_fragment
from gazette_sdk.protocol.journal_spec import validate_journal_spec
from gazette_sdk.protocol.labels import PREFIX, validate_label_set, validate_selector
from gazette_sdk.protocol.names import (
    at,
    validate_endpoint,
    validate_journal,
    validate_path_component,
    validate_store_url,
    validate_token,
    validate_url,
)

WRITE_HEAD = -1
"""Offset of a read which begins at the journal's current write head."""
ANY_REVISION = -1
"""``expect_mod_revision`` of a change without condition."""
PAGE_LIMIT_MOST = 10_000
"""Greatest number of fragments in a page."""

_CHECK_DELETE_PREFIX_LENGTH_BYTES = (1, 512)
_STATUSES = frozenset(pb.Status.values())
_SUSPENDS = frozenset(pb.AppendRequest.Suspend.values())


def validate(message: Message) -> None:
    """Check a request or response of the journal service.

    Do not validate every message that is received: replicas attach their header to the first
    acknowledged response of any status, and continuations of a List snapshot have none.

    Args:
        message: any request or response of protocol section 3.

    Raises:
        ValidationError: of the first rule that is broken.
        TypeError: the message is neither.
    """
    validator = _VALIDATORS.get(type(message))
    if validator is None:
        raise TypeError(f"{type(message).__name__} is no message of the journal service")
    validator(message)


# ---------------------------------------------------------------- Read


def _validate_read_request(request: pb.ReadRequest) -> None:
    if request.HasField("header"):
        validate_header(request.header, "Header")
    validate_journal(request.journal, "Journal")
    offset, end_offset = request.offset, request.end_offset
    if offset < WRITE_HEAD:
        raise _broken("invalid_offset", f"invalid offset ({offset}; expected -1 or more)")
    if end_offset != 0 and end_offset < max(offset, 0):
        raise _broken(
            "invalid_end_offset", f"invalid end_offset ({end_offset}; expected 0 or >= {offset})"
        )


def _validate_read_response(response: pb.ReadResponse) -> None:
    if response.content:
        _refuse_set(
            ("status", response.status),
            ("header", response.HasField("header")),
            ("write_head", response.write_head),
            ("fragment", response.HasField("fragment")),
            ("fragment_url", response.fragment_url),
            beside="content",
        )
        return
    _validate_status(response.status)
    if response.HasField("header"):
        validate_header(response.header, "Header")
    offset, write_head = response.offset, response.write_head
    if write_head < 0:
        raise _broken("invalid_write_head", f"invalid write_head ({write_head}; expected >= 0)")
    if response.HasField("fragment"):
        fragment = response.fragment
        validate_fragment(fragment, "Fragment")
        if not fragment.begin <= offset < fragment.end:
            raise _broken(
                "invalid_offset",
                f"invalid offset ({offset}; expected {fragment.begin} <= offset < {fragment.end})",
            )
        if write_head < fragment.end:
            raise _broken(
                "invalid_write_head",
                f"invalid write_head ({write_head}; expected >= {fragment.end})",
            )
        if response.fragment_url:
            validate_url(response.fragment_url, "FragmentUrl")
    elif response.status == pb.Status.OK:
        _refuse_set(
            ("offset", offset), ("fragment_url", response.fragment_url), beside="no fragment"
        )


# ---------------------------------------------------------------- Append


def _validate_append_request(request: pb.AppendRequest) -> None:
    if not request.journal:
        _refuse_set(
            ("header", request.HasField("header")),
            ("do_not_proxy", request.do_not_proxy),
            ("offset", request.offset),
            ("check_registers", request.HasField("check_registers")),
            ("union_registers", request.HasField("union_registers")),
            ("subtract_registers", request.HasField("subtract_registers")),
            ("suspend", request.suspend),
            beside="a chunk",
        )
        return
    if request.HasField("header"):
        validate_header(request.header, "Header")
    validate_journal(request.journal, "Journal")
    if request.offset < 0:
        raise _broken("invalid_offset", f"invalid offset ({request.offset}; expected >= 0)")
    _refuse_set(("content", request.content), beside="a journal")
    if request.HasField("check_registers"):
        validate_selector(request.check_registers, "CheckRegisters")
    if request.HasField("union_registers"):
        validate_label_set(request.union_registers, "UnionRegisters")
    if request.HasField("subtract_registers"):
        validate_label_set(request.subtract_registers, "SubtractRegisters")
    if request.suspend not in _SUSPENDS:
        raise _broken("invalid_suspend", f"unknown suspend ({request.suspend})", "Suspend")


def _validate_append_response(response: pb.AppendResponse) -> None:
    _validate_status(response.status)
    validate_header(response.header, "Header")
    has_commit, has_registers = response.HasField("commit"), response.HasField("registers")
    if response.status == pb.OK and not has_commit:
        raise _broken("expected_commit", "expected commit with status OK")
    if response.status in {pb.OK, pb.REGISTER_MISMATCH} and not has_registers:
        raise _broken(
            "expected_registers", "expected registers with status OK or REGISTER_MISMATCH"
        )
    if has_commit:
        validate_fragment(response.commit, "Commit")
    if has_registers:
        validate_label_set(response.registers, "Registers")


# ---------------------------------------------------------------- Replicate


def _validate_replicate_request(request: pb.ReplicateRequest) -> None:
    if not request.HasField("proposal"):
        _validate_replicate_content(request)
        return
    if request.HasField("header"):
        validate_header(request.header, "Header")
        if not request.acknowledge:
            raise _broken("expected_acknowledge", "expected acknowledge with a header")
    validate_fragment(request.proposal, "Proposal")
    validate_label_set(request.registers, "Registers")
    _refuse_set(
        ("content", request.content),
        ("content_delta", request.content_delta),
        beside="a proposal",
    )
    if request.deprecated_journal not in {"", request.proposal.journal}:
        raise _broken(
            "journal_mismatch",
            f"expected the proposal's journal ({request.deprecated_journal!r}, proposal "
            f"{request.proposal.journal!r})",
        )


def _validate_replicate_content(request: pb.ReplicateRequest) -> None:
    if not request.content:
        raise _broken("expected_content_or_proposal", "expected content or a proposal")
    if request.content_delta < 0:
        raise _broken(
            "invalid_content_delta",
            f"invalid content_delta ({request.content_delta}; expected >= 0)",
        )
    _refuse_set(
        ("header", request.HasField("header")),
        ("registers", request.HasField("registers")),
        ("acknowledge", request.acknowledge),
        ("deprecated_journal", request.deprecated_journal),
        beside="content",
    )


def _validate_replicate_response(response: pb.ReplicateResponse) -> None:
    """Check a response that is being sent; received ones may differ, see :func:`validate`."""
    _validate_status(response.status)
    if response.status == pb.Status.WRONG_ROUTE:
        if not response.HasField("header"):
            raise _broken("expected_header", "expected header with status WRONG_ROUTE")
        validate_header(response.header, "Header")
    else:
        _refuse_set(("header", response.HasField("header")), beside="this status")
    if response.status == pb.Status.PROPOSAL_MISMATCH:
        if not response.HasField("fragment"):
            raise _broken("expected_fragment", "expected fragment with status PROPOSAL_MISMATCH")
        validate_fragment(response.fragment, "Fragment")
        if not response.HasField("registers"):
            raise _broken("expected_registers", "expected registers with status PROPOSAL_MISMATCH")
        validate_label_set(response.registers, "Registers")
    else:
        _refuse_set(
            ("fragment", response.HasField("fragment")),
            ("registers", response.HasField("registers")),
            beside="this status",
        )


# ---------------------------------------------------------------- List, Apply


def _validate_list_request(request: pb.ListRequest) -> None:
    validate_selector(request.selector, "Selector")
    for half, labels in (
        ("Include", request.selector.include),
        ("Exclude", request.selector.exclude),
    ):
        for label in labels.labels:
            if label.name == PREFIX and not label.value.endswith("/"):
                raise _broken(
                    "prefix_missing_slash",
                    f"value of label 'prefix' must end in '/' ({label.value!r})",
                    f"Selector.{half}",
                )


def _validate_list_response(response: pb.ListResponse) -> None:
    _validate_status(response.status)
    validate_header(response.header, "Header")
    for index, journal in enumerate(response.journals):
        path = f"Journals[{index}]"
        validate_journal_spec(journal.spec, f"{path}.Spec", stored=True)
        if journal.mod_revision <= 0:
            raise _broken(
                "invalid_mod_revision",
                f"invalid mod_revision ({journal.mod_revision}; expected > 0)",
                path,
            )
        validate_route(journal.route, f"{path}.Route")


def _validate_apply_request(request: pb.ApplyRequest) -> None:
    for index, change in enumerate(request.changes):
        _validate_change(change, f"Changes[{index}]")


def _validate_change(change: pb.ApplyRequest.Change, path: str) -> None:
    validate_change(change, path, upsert=validate_journal_spec, delete=validate_journal)


def validate_change(
    change: Any,
    path: str,
    *,
    upsert: Callable[[Any, str], None],
    delete: Callable[[str, str], None],
) -> None:
    """Check a change of a journal or shard: one of upsert and delete, and the expected revision.

    Args:
        change: of an Apply request.
        path: where it stands, for errors.
        upsert: checks the spec.
        delete: checks the name.

    Raises:
        ValidationError: it breaks a rule.
    """
    if change.HasField("upsert"):
        if change.delete:
            raise _broken("both_set", "expected one of upsert or delete, have both", path)
        upsert(change.upsert, f"{path}.Upsert")
        least = 0
    elif change.delete:
        delete(change.delete, f"{path}.Delete")
        least = 1
    else:
        raise _broken("neither_set", "expected one of upsert or delete, have neither", path)
    expected = change.expect_mod_revision
    if expected < least and expected != ANY_REVISION:
        raise _broken(
            "invalid_expect_mod_revision",
            f"invalid expect_mod_revision ({expected}; expected -1, or {least} or more)",
            path,
        )


def _validate_status_and_header(
    response: pb.ApplyResponse | pb.FragmentStoreHealthResponse | pb.FragmentsResponse,
) -> None:
    _validate_status(response.status)
    validate_header(response.header, "Header")


# ---------------------------------------------------------------- fragments


def _validate_fragments_request(request: pb.FragmentsRequest) -> None:
    if request.HasField("header"):
        validate_header(request.header, "Header")
    validate_journal(request.journal, "Journal")
    if request.end_mod_time != 0 and request.end_mod_time < request.begin_mod_time:
        raise _broken(
            "invalid_end_mod_time",
            f"invalid end_mod_time ({request.end_mod_time}; expected 0 or >= "
            f"{request.begin_mod_time})",
        )
    if request.next_page_token < 0:
        raise _broken(
            "invalid_next_page_token",
            f"invalid next_page_token ({request.next_page_token}; expected >= 0)",
        )
    if not 0 <= request.page_limit <= PAGE_LIMIT_MOST:
        raise _broken(
            "invalid_page_limit",
            f"invalid page_limit ({request.page_limit}; expected 0 to {PAGE_LIMIT_MOST})",
        )
    if request.HasField("signatureTTL") and to_ns(request.signatureTTL) <= 0:
        raise _broken("invalid_signature_ttl", "invalid signatureTTL (expected > 0s)")


def _validate_fragments_response(response: pb.FragmentsResponse) -> None:
    _validate_status_and_header(response)
    for index, fragment in enumerate(response.fragments):
        validate_fragment(fragment.spec, f"Fragments[{index}].Spec")
        if fragment.signed_url:
            validate_url(fragment.signed_url, f"Fragments[{index}].SignedUrl")


def _validate_store_health_request(request: pb.FragmentStoreHealthRequest) -> None:
    validate_store_url(request.fragment_store, "FragmentStore")
    prefix, path = request.check_delete_prefix, "CheckDeletePrefix"
    if not prefix:
        return
    if not request.check_delete:
        raise _broken("requires_check_delete", "requires check_delete", path)
    if not prefix.endswith("/"):
        raise _broken("no_trailing_slash", f"must end in '/' ({prefix!r})", path)
    if prefix.startswith("../"):
        raise _broken("traverses_outside", f"must not leave the store ({prefix!r})", path)
    validate_path_component(prefix[:-1], path, *_CHECK_DELETE_PREFIX_LENGTH_BYTES)


# ---------------------------------------------------------------- parts


def _validate_status(status: int) -> None:
    if status not in _STATUSES:
        raise _broken("invalid_status", f"unknown status ({status})", "Status")


def _refuse_set(*fields: tuple[str, object], beside: str) -> None:
    """Refuse the first field that is set, in the order given."""
    for name, value in fields:
        if value:
            raise _broken(f"unexpected_{name}", f"unexpected {name} with {beside}")


def _broken(kind: str, reason: str, path: str = "") -> ValidationError:
    return ValidationError(reason, kind=kind, path=path)


_VALIDATORS: dict[type[Message], Callable[[Any], None]] = {
    pb.ReadRequest: _validate_read_request,
    pb.ReadResponse: _validate_read_response,
    pb.AppendRequest: _validate_append_request,
    pb.AppendResponse: _validate_append_response,
    pb.ReplicateRequest: _validate_replicate_request,
    pb.ReplicateResponse: _validate_replicate_response,
    pb.ListRequest: _validate_list_request,
    pb.ListResponse: _validate_list_response,
    pb.ApplyRequest: _validate_apply_request,
    pb.ApplyResponse: _validate_status_and_header,
    pb.FragmentsRequest: _validate_fragments_request,
    pb.FragmentsResponse: _validate_fragments_response,
    pb.FragmentStoreHealthRequest: _validate_store_health_request,
    pb.FragmentStoreHealthResponse: _validate_status_and_header,
}


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
    validate_zone(process_id.zone, at(path, "Zone"))
    validate_suffix(process_id.suffix, at(path, "Suffix"))


def validate_zone(zone: str, path: str = "") -> None:
    """Check the name of an availability zone.

    Raises:
        ValidationError: it is none.
    """
    validate_token(zone, path, *_ZONE_LENGTH_BYTES)


def validate_suffix(suffix: str, path: str = "") -> None:
    """Check the id of a process within its zone.

    Raises:
        ValidationError: it is none.
    """
    validate_token(suffix, path, *_SUFFIX_LENGTH_BYTES)


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


OWN_FIELDS_FROM = 101
"""Least number of fields that only this implementation has. Others ignore them."""

_NON_NULL: dict[str, tuple[str, ...]] = {
    "protocol.LabelSelector": ("include", "exclude"),
    "protocol.JournalSpec": ("labels", "fragment"),
    "protocol.JournalSpec.Fragment": ("refresh_interval", "retention", "flush_interval"),
    "protocol.ProcessSpec": ("id",),
    "protocol.BrokerSpec": ("process_spec",),
    "protocol.Fragment": ("sum",),
    "protocol.Header": ("process_id", "route", "etcd"),
    "protocol.AppendResponse": ("header",),
    "protocol.ListRequest": ("selector",),
    "protocol.ListResponse": ("header",),
    "protocol.ListResponse.Journal": ("spec", "route"),
    "protocol.ApplyResponse": ("header",),
    "protocol.FragmentsResponse": ("header",),
    "protocol.FragmentsResponse._Fragment": ("spec",),
    "protocol.FragmentStoreHealthResponse": ("header",),
    "consumer.ShardSpec": ("max_txn_duration", "min_txn_duration", "labels"),
    "consumer.ConsumerSpec": ("process_spec",),
    "consumer.ListRequest": ("selector",),
    "consumer.ListResponse": ("header",),
    "consumer.ListResponse.Shard": ("spec", "route"),
    "consumer.ApplyResponse": ("header",),
    "consumer.StatResponse": ("header",),
    "consumer.GetHintsResponse": ("header", "primary_hints"),
}

M = TypeVar("M", bound=Message)


def complete(message: M) -> M:
    """Make the sub-messages present that are always encoded, at every depth.

    Args:
        message: any message; changed in place.

    Returns:
        The same message.
    """
    always, present, repeated = _plan(message.DESCRIPTOR)
    for name, nested in always:
        inner = getattr(message, name)
        inner.SetInParent()
        if nested:
            complete(inner)
    for name in present:
        if message.HasField(name):
            complete(getattr(message, name))
    for name in repeated:
        for inner in getattr(message, name):
            complete(inner)
    return message


def is_non_null(field: FieldDescriptor) -> bool:
    """Return True for a field with a sub-message that is encoded even when it is empty."""
    of = field.containing_type
    return of is not None and field.name in _NON_NULL.get(of.full_name, ())


def json_fields(message: Message) -> list[FieldDescriptor]:
    """Return the fields of a message in JSON: all, but of ours only those that are set."""
    ours = {field.number for field, _ in message.ListFields() if field.number >= OWN_FIELDS_FROM}
    every = cast("Sequence[FieldDescriptor]", message.DESCRIPTOR.fields)
    return [field for field in every if field.number < OWN_FIELDS_FROM or field.number in ours]


_Plan = tuple[tuple[tuple[str, bool], ...], tuple[str, ...], tuple[str, ...]]
"""Fields that are always present, with True where they have such fields; other single fields that
have such fields; repeated fields that have them."""


@cache
def _plan(descriptor: Descriptor) -> _Plan:
    non_null = _NON_NULL.get(descriptor.full_name, ())
    inner = [field for field in descriptor.fields if field.type == FieldDescriptor.TYPE_MESSAGE]
    deep = [field for field in inner if any(_plan(field.message_type))]
    return (
        tuple((name, descriptor.fields_by_name[name] in deep) for name in non_null),
        tuple(f.name for f in deep if not f.is_repeated and f.name not in non_null),
        tuple(field.name for field in deep if field.is_repeated),
    )


SERVICE = "protocol.Journal"
"""Full name of the journal service."""

SHARD_SERVICE = "consumer.Shard"
"""Full name of the shard service, which consumer processes serve."""

ERROR_METADATA = "gazette-error"
"""Trailing metadata of a failed call: the class name of a store's error. Brokers of this SDK send
it with the code UNKNOWN: a client can distinguish a damaged fragment from a temporary failure."""


@dataclass(frozen=True, slots=True)
class Rpc:
    """A call of a service.

    Attributes:
        name: its name, such as ``Append``.
        number: its method number on the stream transport; 0 if it is not served there.
        request_type: class of requests.
        response_type: class of responses.
        client_streams: True if the client sends several requests.
        server_streams: True if the server sends several responses.
        service: full name of its service, by default of the journal service.
    """

    name: str
    number: int
    request_type: type[Message]
    response_type: type[Message]
    client_streams: bool = False
    server_streams: bool = False
    service: str = SERVICE

    @property
    def path(self) -> str:
        """Its gRPC path."""
        return f"/{self.service}/{self.name}"


RPCS = (
    Rpc("List", 1, pb.ListRequest, pb.ListResponse, server_streams=True),
    Rpc("Apply", 2, pb.ApplyRequest, pb.ApplyResponse),
    Rpc("Read", 3, pb.ReadRequest, pb.ReadResponse, server_streams=True),
    Rpc("Append", 4, pb.AppendRequest, pb.AppendResponse, client_streams=True),
    Rpc(
        "Replicate",
        5,
        pb.ReplicateRequest,
        pb.ReplicateResponse,
        client_streams=True,
        server_streams=True,
    ),
    Rpc("ListFragments", 6, pb.FragmentsRequest, pb.FragmentsResponse),
    Rpc("FragmentStoreHealth", 7, pb.FragmentStoreHealthRequest, pb.FragmentStoreHealthResponse),
)
"""Every call of the journal service."""

RPCS_BY_NAME = {rpc.name: rpc for rpc in RPCS}

SHARD_RPCS = tuple(
    Rpc(name, 0, request_type, response_type, service=SHARD_SERVICE)
    for name, request_type, response_type in (
        ("Stat", cpb.StatRequest, cpb.StatResponse),
        ("List", cpb.ListRequest, cpb.ListResponse),
        ("Apply", cpb.ApplyRequest, cpb.ApplyResponse),
        ("GetHints", cpb.GetHintsRequest, cpb.GetHintsResponse),
        ("Unassign", cpb.UnassignRequest, cpb.UnassignResponse),
    )
)
"""Every call of the shard service."""

STATE_RPC = Rpc("Read", 0, cpb.StateRequest, cpb.StateResponse, service="consumer.ShardState")
"""Call that shows the state of a shard."""

(
    JOURNALS_PAGE_RPC,
    HEADS_RPC,
    MEMBERS_RPC,
    REPORT_RPC,
    EVENTS_RPC,
    DRAIN_RPC,
    SHARDS_PAGE_RPC,
    SCALE_RPC,
) = (
    Rpc(
        name,
        0,
        getattr(clpb, request_type),
        getattr(clpb, response_type),
        server_streams=name == "Events",
        service=f"gazette.cluster.{service}",
    )
    for service, name, request_type, response_type in (
        ("Journals", "Page", "JournalsPageRequest", "JournalsPageResponse"),
        ("Journals", "Heads", "HeadsRequest", "HeadsResponse"),
        ("Cluster", "Members", "MembersRequest", "MembersResponse"),
        ("Cluster", "Report", "ReportRequest", "ReportResponse"),
        ("Cluster", "Events", "EventsRequest", "Event"),
        ("Cluster", "Drain", "DrainRequest", "DrainResponse"),
        ("Shards", "Page", "ShardsPageRequest", "ShardsPageResponse"),
        ("Shards", "Scale", "ScaleRequest", "ScaleResponse"),
    )
)
"""Calls that show a cluster as a whole, and one that drains a broker. Brokers and consumers of this
SDK alone have them."""

SHARD_RPCS_BY_NAME = {rpc.name: rpc for rpc in SHARD_RPCS}

RPCS_BY_REQUEST = {
    rpc.request_type: rpc
    for rpc in (
        *(*RPCS, *SHARD_RPCS, STATE_RPC, JOURNALS_PAGE_RPC, HEADS_RPC, MEMBERS_RPC, REPORT_RPC),
        *(EVENTS_RPC, DRAIN_RPC, SHARDS_PAGE_RPC, SCALE_RPC),
    )
}
"""Every call, by the class of its requests."""


CODE_NAMES = (
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
)
"""Names of the codes, by number."""
