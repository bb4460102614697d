"""Rules of shard specs, consumer specs and replica statuses, and functions over them.

They are those of shard sections 1, 3 and 4, set operations over specs those of section 12.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from gazette_sdk.errors import ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol import labels
from gazette_sdk.protocol.durations import from_ns, to_ns
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
from gazette_sdk.protocol.routes import validate_process_spec
from gazette_sdk.protocol.selectors import Matcher

__all__ = [
    "DEFAULT_MAX_HOT_STANDBYS",
    "ID",
    "SHARD_ID_LENGTH_BYTES",
    "backup_hint_keys",
    "desired_replication",
    "intersect_specs",
    "matches_shard",
    "primary_hint_key",
    "recovery_log",
    "reduce_status",
    "selector_labels",
    "source_journals",
    "subtract_specs",
    "union_specs",
    "validate_consumer_spec",
    "validate_replica_status",
    "validate_shard_id",
    "validate_shard_spec",
]

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
