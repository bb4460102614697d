"""Rules of requests and responses of the shard service (shard section 4).

A server validates List, Apply and Unassign requests before it acts; Stat and GetHints find no
shard of an impossible id. A client validates each response. The rule that fails first is part of
the contract; texts are not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.message import Message

from gazette_sdk.errors import ValidationError
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol import recoverylog_pb2 as rpb
from gazette_sdk.protocol.names import at, validate_journal
from gazette_sdk.protocol.routes import validate_header, validate_route
from gazette_sdk.protocol.rpc import validate_change
from gazette_sdk.protocol.selectors import validate_selector
from gazette_sdk.protocol.shard_spec import (
    recovery_log,
    validate_replica_status,
    validate_shard_id,
    validate_shard_spec,
)

__all__ = ["validate_shard_rpc"]

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


def _broken(kind: str, reason: str, path: str) -> ValidationError:
    return ValidationError(reason, kind=kind, path=path)


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
