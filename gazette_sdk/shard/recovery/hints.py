"""Hints: where the operations of a store's live files are (recovery log 3 and 7).

Etcd holds them as JSON in the form of Go's encoder. Either JSON or protobuf is accepted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.message import DecodeError as ProtobufDecodeError

from gazette_sdk.errors import ValidationError
from gazette_sdk.protocol import recoverylog_pb2 as pb
from gazette_sdk.protocol.names import validate_journal
from gazette_sdk.shard.recovery.segments import Segment, SegmentSet

__all__ = ["choose", "flatten", "from_bytes", "rotate", "to_json", "validate"]

_SEGMENT_FIELDS = (
    "author",
    "first_seq_no",
    "first_offset",
    "first_checksum",
    "last_seq_no",
    "last_offset",
    "log",
)
_ESCAPED = str.maketrans(
    {
        "<": "\\u003c",
        ">": "\\u003e",
        "&": "\\u0026",
        "\u2028": "\\u2028",
        "\u2029": "\\u2029",
    }
)


def flatten(hints: pb.FSMHints) -> tuple[list[int], SegmentSet]:
    """Return the fnodes of hints, ascending, and the union of their segments.

    Raises:
        ValidationError: the hints name no log, or contradict themselves.
    """
    if not hints.log:
        raise ValidationError("hinted log not provided", kind="empty", path="log")
    fnodes: list[int] = []
    segments = SegmentSet()
    for node in hints.live_nodes:
        if fnodes and node.fnode <= fnodes[-1]:
            raise ValidationError(
                f"expected monotonic Fnode ordering: {node.fnode} after {fnodes[-1]}",
                kind="contradiction",
            )
        if not node.segments or node.segments[0].first_seq_no != node.fnode:
            raise ValidationError(
                f"expected Fnode to match Segment FirstSeqNo: fnode {node.fnode}",
                kind="contradiction",
            )
        fnodes.append(node.fnode)
        for message in node.segments:
            segment = Segment.of(message, hints.log)
            segment.validate()
            segments.add(segment)
    if len(segments) and segments[-1].log != hints.log:
        raise ValidationError(
            f"expected hints.Log {hints.log} to equal the last Segment Log {segments[-1].log}",
            kind="contradiction",
        )
    return fnodes, segments


def validate(hints: pb.FSMHints, log: str | None = None) -> None:
    """Check hints that were loaded.

    Args:
        hints: of one slot.
        log: which they must be of; None for any.

    Raises:
        ValidationError: they break a rule.
    """
    validate_journal(hints.log, "hints.log")
    for node in hints.live_nodes:
        for segment in node.segments:
            if segment.log == hints.log:
                raise ValidationError(
                    f"the segment of fnode {node.fnode} repeats the log of the hints",
                    kind="redundant",
                    path="hints.live_nodes",
                )
    flatten(hints)
    if log is not None and hints.log != log:
        raise ValidationError(
            f"hints are of {hints.log}, and the shard's log is {log}: delete their key, or restore"
            " the hints of this log",
            kind="other_log",
            path="hints.log",
        )


# ------------------------------------------------------------------ encoding


def to_json(hints: pb.FSMHints) -> bytes:
    """Return hints as Etcd holds them."""
    value: dict[str, Any] = {}
    if hints.log:
        value["log"] = hints.log
    value["live_nodes"] = [_node_value(node) for node in hints.live_nodes] or None
    value["properties"] = [
        _without_zeros({"path": each.path, "content": each.content}) for each in hints.properties
    ] or None
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.translate(_ESCAPED).encode()


def _node_value(node: pb.FnodeSegments) -> dict[str, Any]:
    segments = [
        _without_zeros({name: getattr(segment, name) for name in _SEGMENT_FIELDS})
        for segment in node.segments
    ]
    return {**_without_zeros({"fnode": node.fnode}), "segments": segments or None}


def _without_zeros(value: dict[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in value.items() if each}


def from_bytes(content: bytes) -> pb.FSMHints:
    """Return the hints of a value of Etcd, as JSON or protobuf.

    Raises:
        ValidationError: it is neither.
    """
    try:
        if content.startswith(b"{"):
            return _from_value(json.loads(content))
        return pb.FSMHints.FromString(content)
    except (ValueError, TypeError, AttributeError, ProtobufDecodeError) as error:
        raise ValidationError(
            f"hints cannot be decoded: {error}; delete their key to fall back to older hints",
            kind="malformed",
            path="hints",
        ) from error


def _from_value(value: Mapping[str, Any]) -> pb.FSMHints:
    hints = pb.FSMHints(log=value.get("log") or "")
    for node in value.get("live_nodes") or ():
        hints.live_nodes.add(
            fnode=node.get("fnode", 0),
            segments=[
                pb.Segment(**{name: each[name] for name in _SEGMENT_FIELDS if name in each})
                for each in node.get("segments") or ()
            ],
        )
    for each in value.get("properties") or ():
        hints.properties.add(path=each.get("path", ""), content=each.get("content", ""))
    return hints


# --------------------------------------------------------------------- slots


def choose(
    primary: pb.FSMHints | None, backups: Sequence[pb.FSMHints | None], log: str
) -> pb.FSMHints:
    """Return the hints to play: the primary ones, else the newest backup, else none of the log.

    Args:
        primary: hints that a primary recorded; None if there are none.
        backups: hints that recoveries stored, newest first; None for an empty slot.
        log: the shard's log.
    """
    for hints in (primary, *backups):
        if hints is not None:
            return hints
    return pb.FSMHints(log=log)


def rotate(recovered: bytes, backups: Sequence[bytes | None]) -> list[bytes]:
    """Return the values of the first backup slots after a recovery.

    The new hints go to the first slot, and older ones move on by one, up to the first slot that is
    empty or to the last one.

    Args:
        recovered: hints of the player.
        backups: values of all slots; None for an empty one.

    Returns:
        New values, from slot 0 on. Slots behind them are unchanged.
    """
    values: list[bytes] = []
    moved: bytes | None = recovered
    for backup in backups:
        if moved is None:
            break
        values.append(moved)
        moved = backup
    return values
