"""Rules of shard specs, consumer specs and replica statuses, and functions over them.

They are those of shard sections 1, 3 and 4, set operations over specs those of section 12.

The rules of requests and responses of the shard service are those of shard section 4. A server
validates List, Apply and Unassign requests before it acts; Stat and GetHints find no shard of an
impossible id. A client validates each response. The rule that fails first is part of the contract;
texts are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from google.protobuf.message import Message

from gazette_sdk.errors import ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol import labels
from gazette_sdk.protocol import recoverylog_pb2 as rpb
from gazette_sdk.protocol.durations import from_ns, to_ns
from gazette_sdk.protocol.labels import Matcher, validate_selector
from gazette_sdk.protocol.names import (
    JOURNAL_LENGTH_BYTES,
    at,
    clean_path,
    refuse_climbing,
    strip_meta,
    validate_journal,
    validate_path_component,
    validate_token,
)
from gazette_sdk.protocol.rules import (
    validate_change,
    validate_header,
    validate_process_spec,
    validate_route,
)

DEFAULT_MAX_HOT_STANDBYS = 3
"""Greatest number of hot standbys of a shard, unless the process is configured otherwise."""
SHARD_ID_LENGTH_BYTES = (4, 512)
"""Bounds of a shard's id."""
ID = "id"
"""Not a label of specs: selectors match it against the shard's id."""

_CODES = frozenset(cpb.ReplicaStatus.Code.values())


# ---------------------------------------------------------------- validation


def validate_shard_id(shard: str, path: str = "") -> None:
    """Check a shard's id.

    Raises:
        ValidationError: kinds ``invalid_length``, ``invalid_token``.
    """
    validate_token(shard, path, *SHARD_ID_LENGTH_BYTES)


def validate_shard_spec(spec: cpb.ShardSpec, path: str = "", *, stored: bool = False) -> None:
    """Check a complete spec, in the order of shard section 4.

    Args:
        spec: the spec.
        path: dotted path of the field, for the error.
        stored: True if the spec is stored already, perhaps by another implementation, and is not
            being applied. Then the rules that only this SDK has are left out: others accept ``..``
            in the names of recovery logs.

    Raises:
        ValidationError: of the first rule that is broken.
    """
    validate_shard_id(spec.id, at(path, "Id"))
    _validate_recovery(spec, path, stored=stored)
    if to_ns(spec.min_txn_duration) < 0:
        raise _broken(
            "invalid_min_txn_duration", "invalid min_txn_duration (expected 0s or more)", path
        )
    if to_ns(spec.max_txn_duration) <= 0:
        raise _broken(
            "invalid_max_txn_duration", "invalid max_txn_duration (expected more than 0s)", path
        )
    where = at(path, "Labels")
    labels.validate_label_set(spec.labels, where)
    labels.validate_single_values(spec.labels, where)
    if any(label.name == ID for label in spec.labels.labels):
        raise _broken(
            "reserved_label_id",
            f"label {ID!r} is reserved: it stands for the shard's id in selectors",
            path,
        )
    _validate_sources(spec.sources, path)


def _validate_recovery(spec: cpb.ShardSpec, path: str, *, stored: bool) -> None:
    if spec.recovery_log_prefix:
        where, log = at(path, "RecoveryLogPrefix"), recovery_log(spec)
        validate_path_component(log, where, *JOURNAL_LENGTH_BYTES)
        if not stored:
            refuse_climbing(log, where)
        prefix = spec.hint_prefix
        if not prefix.startswith("/") or clean_path(prefix) != prefix or prefix == "/":
            raise _broken(
                "invalid_hint_prefix",
                f"hint_prefix must be an absolute and clean path without a trailing slash "
                f"({prefix!r}): write `/gazette/hints`",
                path,
            )
    elif spec.hint_prefix:
        raise _broken(
            "unexpected_hint_prefix",
            f"there are no hints without a recovery log: leave out hint_prefix "
            f"({spec.hint_prefix!r}) or set recovery_log_prefix",
            path,
        )
    if spec.hint_backups < 0:
        raise _broken(
            "invalid_hint_backups",
            f"invalid hint_backups ({spec.hint_backups}; expected >= 0)",
            path,
        )


def _validate_sources(sources: Iterable[cpb.ShardSpec.Source], path: str) -> None:
    last = ""
    for index, source in enumerate(sources):
        where = at(path, f"Sources[{index}]")
        validate_journal(source.journal, at(where, "Journal"))
        if source.min_offset < 0:
            raise _broken(
                "invalid_min_offset",
                f"invalid min_offset ({source.min_offset}; expected >= 0)",
                where,
            )
        if source.journal <= last:
            raise _broken(
                "not_sorted_unique",
                f"sources must be sorted and unique ({source.journal!r} follows {last!r})",
                at(path, "Sources"),
            )
        last = source.journal


def validate_consumer_spec(spec: cpb.ConsumerSpec, path: str = "") -> None:
    """Check the value of a consumer process.

    Raises:
        ValidationError: under ``Id`` or ``Endpoint``.
    """
    validate_process_spec(spec.process_spec, path)


def validate_replica_status(status: cpb.ReplicaStatus, path: str = "") -> None:
    """Check a status: a known code, and errors exactly with FAILED.

    Raises:
        ValidationError: kinds ``invalid_code``, ``expected_errors``, ``unexpected_errors``.
    """
    if status.code not in _CODES:
        raise _broken("invalid_code", f"unknown code ({status.code})", at(path, "Code"))
    failed = status.code == cpb.ReplicaStatus.FAILED
    if failed and not status.errors:
        raise _broken("expected_errors", "expected errors with code FAILED", path)
    if status.errors and not failed:
        raise _broken("unexpected_errors", "expected no errors with this code", path)


# ---------------------------------------------------------------- meaning


def recovery_log(spec: cpb.ShardSpec) -> str:
    """Return the journal of a shard's recovery log; empty if it has none."""
    return f"{spec.recovery_log_prefix}/{spec.id}" if spec.recovery_log_prefix else ""


def primary_hint_key(spec: cpb.ShardSpec) -> str:
    """Return the Etcd key of the hints that the shard's primary stores while it runs."""
    return f"{spec.hint_prefix}/{spec.id}.primary"


def backup_hint_keys(spec: cpb.ShardSpec) -> list[str]:
    """Return the Etcd keys of the hints of past recoveries, the latest first."""
    return [f"{spec.hint_prefix}/{spec.id}.backup.{slot}" for slot in range(spec.hint_backups)]


def hint_keys(spec: cpb.ShardSpec) -> list[str]:
    """Return the Etcd keys of all hints of a shard: none of a shard without a recovery log."""
    return [primary_hint_key(spec), *backup_hint_keys(spec)] if spec.recovery_log_prefix else []


def desired_replication(
    spec: cpb.ShardSpec, max_hot_standbys: int = DEFAULT_MAX_HOT_STANDBYS
) -> int:
    """Return the number of processes that should hold a shard: its primary and its standbys.

    Args:
        spec: the spec.
        max_hot_standbys: process-wide cap of the standbys.
    """
    return 0 if spec.disable else 1 + min(spec.hot_standbys, max_hot_standbys)


def selector_labels(spec: cpb.ShardSpec) -> pb.LabelSet:
    """Return what selectors match: a copy of the shard's labels, and the label ``id``."""
    made = pb.LabelSet()
    made.CopyFrom(spec.labels)
    labels.set_value(made, ID, spec.id)
    return made


def matches_shard(matcher: Matcher, spec: cpb.ShardSpec) -> bool:
    """Return True if a selector matches a shard: its labels, and its ``id``."""
    return matcher.labels(selector_labels(spec))


def reduce_status(statuses: Iterable[cpb.ReplicaStatus]) -> cpb.ReplicaStatus:
    """Return the greatest code of several statuses, with the errors of all of them."""
    reduced = cpb.ReplicaStatus()
    for status in statuses:
        reduced.code = max(reduced.code, status.code)
        reduced.errors.extend(status.errors)
    return reduced


def status_name(status: cpb.ReplicaStatus) -> str:
    """Return the name of a status; of one that is not known, its number."""
    known = cpb.ReplicaStatus.Code.values()
    return cpb.ReplicaStatus.Code.Name(status.code) if status.code in known else str(status.code)


def error_text(statuses: Iterable[cpb.ReplicaStatus]) -> str:
    """Return the errors of a shard's processes in one line."""
    texts = (text for status in statuses for text in status.errors)
    return " | ".join(" ".join(text.split()) for text in texts)


# ---------------------------------------------------------------- set operations

_SCALARS = (
    "recovery_log_prefix",
    "hint_prefix",
    "hint_backups",
    "disable",
    "hot_standbys",
    "disable_wait_for_ack",
    "ring_buffer_size",
    "read_channel_size",
)
_DURATIONS = ("max_txn_duration", "min_txn_duration")


def union_specs(a: cpb.ShardSpec, b: cpb.ShardSpec) -> cpb.ShardSpec:
    """Return ``a``, with the values of ``b`` where those of ``a`` are zero.

    A boolean that is true in ``b`` is true in the result. Labels merge by name.
    """
    made = _combine(a, b, lambda left, right: left or right)
    made.id = a.id or b.id
    made.sources.extend(a.sources or b.sources)
    made.labels.CopyFrom(labels.union(a.labels, b.labels))
    return made


def intersect_specs(a: cpb.ShardSpec, b: cpb.ShardSpec) -> cpb.ShardSpec:
    """Return the values that are equal in ``a`` and ``b``; zero elsewhere."""
    made = _combine(a, b, lambda left, right: left if left == right else type(left)())
    made.id = a.id if a.id == b.id else ""
    if list(a.sources) == list(b.sources):
        made.sources.extend(a.sources)
    made.labels.CopyFrom(labels.intersect(a.labels, b.labels))
    return made


def subtract_specs(a: cpb.ShardSpec, b: cpb.ShardSpec) -> cpb.ShardSpec:
    """Return ``a``, with zero for values that are equal in ``b``."""
    made = _combine(a, b, lambda left, right: type(left)() if left == right else left)
    made.id = a.id if a.id != b.id else ""
    if list(a.sources) != list(b.sources):
        made.sources.extend(a.sources)
    made.labels.CopyFrom(labels.subtract(a.labels, b.labels))
    return made


def _combine(
    a: cpb.ShardSpec, b: cpb.ShardSpec, choose: Callable[[Any, Any], Any]
) -> cpb.ShardSpec:
    made = cpb.ShardSpec()
    for name in _SCALARS:
        setattr(made, name, choose(getattr(a, name), getattr(b, name)))
    for name in _DURATIONS:
        if ns := choose(to_ns(getattr(a, name)), to_ns(getattr(b, name))):
            getattr(made, name).CopyFrom(from_ns(ns))
    return made


def source_journals(spec: cpb.ShardSpec) -> list[str]:
    """Return the names of a shard's sources, without metadata, in order."""
    return [strip_meta(source.journal) for source in spec.sources]


def _broken(kind: str, reason: str, path: str) -> ValidationError:
    return ValidationError(reason, kind=kind, path=path)


_STATUSES = frozenset(cpb.Status.values())


def validate_shard_rpc(message: Message) -> None:
    """Check a request or response of the shard service.

    Args:
        message: any request or response of shard section 1.

    Raises:
        ValidationError: of the first rule that is broken.
        TypeError: the message is neither.
    """
    validator = _VALIDATORS.get(type(message))
    if validator is None:
        raise TypeError(f"{type(message).__name__} is no message of the shard service")
    validator(message)


# ---------------------------------------------------------------- Stat


def _validate_stat_request(request: cpb.StatRequest) -> None:
    if request.HasField("header"):
        validate_header(request.header, "Header")
    validate_shard_id(request.shard, "Shard")
    _validate_offsets(request.read_through, "ReadThrough")


def _validate_stat_response(response: cpb.StatResponse) -> None:
    _validate_status_and_header(response)
    _validate_offsets(response.read_through, "ReadThrough")
    _validate_offsets(response.publish_at, "PublishAt")


def _validate_offsets(offsets: Mapping[str, int], path: str) -> None:
    for journal, offset in sorted(offsets.items()):
        where = f"{path}.Offsets[{journal}]"
        validate_journal(journal, where)
        if offset < 0:
            raise _broken("invalid_offset", f"invalid offset ({offset}; expected >= 0)", where)


# ---------------------------------------------------------------- List, Apply


def _validate_list_request(request: cpb.ListRequest) -> None:
    validate_selector(request.selector, "Selector")


def _validate_list_response(response: cpb.ListResponse) -> None:
    _validate_status_and_header(response)
    for index, shard in enumerate(response.shards):
        path = f"Shards[{index}]"
        validate_shard_spec(shard.spec, f"{path}.Spec", stored=True)
        if shard.mod_revision <= 0:
            raise _broken(
                "invalid_mod_revision",
                f"invalid mod_revision ({shard.mod_revision}; expected > 0)",
                path,
            )
        validate_route(shard.route, f"{path}.Route")
        members, statuses = len(shard.route.members), len(shard.status)
        if members != statuses:
            raise _broken(
                "status_length",
                f"members of the route and statuses must be equally many ({members} and "
                f"{statuses})",
                path,
            )
        for place, status in enumerate(shard.status):
            validate_replica_status(status, f"{path}.Status[{place}]")


def _validate_apply_request(request: cpb.ApplyRequest) -> None:
    for index, change in enumerate(request.changes):
        _validate_change(change, f"Changes[{index}]")


def _validate_change(change: cpb.ApplyRequest.Change, path: str) -> None:
    validate_change(change, path, upsert=validate_shard_spec, delete=validate_shard_id)
    if change.HasField("primary_hints"):
        if not change.HasField("upsert"):
            raise _broken("unexpected_hints", "hints are set with an upsert, not a delete", path)
        _validate_hints(change.primary_hints, change.upsert, at(path, "PrimaryHints"))


def _validate_hints(hints: rpb.FSMHints, spec: cpb.ShardSpec, path: str) -> None:
    """Check hints to store: of the shard's recovery log, and made of complete segments.

    Other implementations accept hints without a log, and then cannot recover the shard.
    """
    for node in hints.live_nodes:
        for segment in node.segments:
            _validate_segment(segment, at(path, "Segment"))
            if segment.log and segment.log == hints.log:
                raise _broken("redundant_log", "a segment repeats the log of its hints", path)
    log = recovery_log(spec)
    if not hints.log or hints.log != log:
        raise _broken(
            "hints_of_another_log",
            f"expected hints of the shard's recovery log ({hints.log!r}, expected {log!r})",
            at(path, "Log"),
        )


def _validate_segment(segment: rpb.Segment, path: str) -> None:
    """Check one segment (recoverylog section 3)."""
    if segment.author == 0:
        raise _broken("invalid_author", "author is zero", path)
    if segment.first_seq_no <= 0:
        raise _broken("invalid_first_seq_no", "first_seq_no is not positive", path)
    if segment.first_offset < 0:
        raise _broken("invalid_first_offset", "first_offset is negative", path)
    if segment.last_seq_no < segment.first_seq_no:
        raise _broken("invalid_last_seq_no", "last_seq_no is before first_seq_no", path)
    if segment.last_offset and segment.last_offset <= segment.first_offset:
        raise _broken("invalid_last_offset", "last_offset is not after first_offset", path)
    if segment.log:
        validate_journal(segment.log, at(path, "Log"))


# ---------------------------------------------------------------- GetHints, Unassign


def _validate_get_hints_request(request: cpb.GetHintsRequest) -> None:
    validate_shard_id(request.shard, "Shard")


def _validate_unassign_request(request: cpb.UnassignRequest) -> None:
    for index, shard in enumerate(request.shards):
        validate_shard_id(shard, f"Shards[{index}]")


def _validate_unassign_response(response: cpb.UnassignResponse) -> None:
    _validate_status(response.status)
    if response.status != cpb.OK:  # it has no other field that would say so
        name = cpb.Status.Name(response.status)
        raise _broken("bad_status", f"bad status ({name})", "Status")
    for index, shard in enumerate(response.shards):
        validate_shard_id(shard, f"Shards[{index}]")


# ---------------------------------------------------------------- parts


def _validate_status(status: int) -> None:
    if status not in _STATUSES:
        raise _broken("invalid_status", f"unknown status ({status})", "Status")


def _validate_status_and_header(
    response: cpb.StatResponse | cpb.ListResponse | cpb.ApplyResponse | cpb.GetHintsResponse,
) -> None:
    _validate_status(response.status)
    validate_header(response.header, "Header")


_VALIDATORS: dict[type[Message], Callable[[Any], None]] = {
    cpb.StatRequest: _validate_stat_request,
    cpb.StatResponse: _validate_stat_response,
    cpb.ListRequest: _validate_list_request,
    cpb.ListResponse: _validate_list_response,
    cpb.ApplyRequest: _validate_apply_request,
    cpb.ApplyResponse: _validate_status_and_header,
    cpb.GetHintsRequest: _validate_get_hints_request,
    cpb.GetHintsResponse: _validate_status_and_header,
    cpb.UnassignRequest: _validate_unassign_request,
    cpb.UnassignResponse: _validate_unassign_response,
}
