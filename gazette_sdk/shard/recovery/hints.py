"""Hints: where the operations of a store's live files are (recovery log 3 and 7, shard 3 and 5).

They consist of segments: stretches of a log's operations of one author (:class:`SegmentSet`). Etcd
holds them as JSON in the form of Go's encoder. Either JSON or protobuf is accepted.

While a primary runs, it stores what it recorded under one *primary* key. After each recovery it
stores the recovered hints as the first *backup*, and older backups move on by one key.

Changes of a store's local files are recorded in the order in which the store returns them with each
commit. Paths are relative to the store's directory and begin with
``/``. The recorder numbers them; see `recovery log` 1.
"""

from __future__ import annotations

import asyncio
import json
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from google.protobuf.message import DecodeError as ProtobufDecodeError

from gazette_sdk.cluster.consumer_keys import ShardAssignment, ShardEntry
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_messages import Compare, Get, KeyValue, Put
from gazette_sdk.errors import EtcdError, ValidationError
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol import recoverylog_pb2 as pb
from gazette_sdk.protocol.names import validate_journal
from gazette_sdk.protocol.shard_spec import (
    backup_hint_keys,
    hint_keys,
    primary_hint_key,
    recovery_log,
)
from gazette_sdk.retries import delay_s

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Segment:
    """Operations of one author, without gaps, in one log. Mutable while its author records.

    Attributes:
        author: of all operations.
        first_seq_no: sequence number of the first operation.
        first_offset: lower bound of its offset.
        first_checksum: checksum of all operations before it.
        last_seq_no: sequence number of the last operation, inclusive.
        last_offset: offset after it; 0 if it is not known.
        log: journal.
    """

    author: int
    first_seq_no: int
    first_offset: int
    first_checksum: int
    last_seq_no: int
    last_offset: int
    log: str

    @classmethod
    def of(cls, message: pb.Segment, log: str) -> Segment:
        """Return the segment of a message.

        Args:
            message: of hints.
            log: of the hints, which a message without a log means.
        """
        return cls(
            author=message.author,
            first_seq_no=message.first_seq_no,
            first_offset=message.first_offset,
            first_checksum=message.first_checksum,
            last_seq_no=message.last_seq_no,
            last_offset=message.last_offset,
            log=message.log or log,
        )

    def to_message(self, log: str) -> pb.Segment:
        """Return the message of hints of ``log``, which it does not repeat."""
        return pb.Segment(
            author=self.author,
            first_seq_no=self.first_seq_no,
            first_offset=self.first_offset,
            first_checksum=self.first_checksum,
            last_seq_no=self.last_seq_no,
            last_offset=self.last_offset,
            log="" if self.log == log else self.log,
        )

    def copy(self) -> Segment:
        """Return a copy."""
        return replace(self)

    def validate(self) -> None:
        """Check the segment by itself.

        Raises:
            ValidationError: it breaks a rule.
        """
        if self.author == 0:
            raise ValidationError("Author is zero", path="segment", kind="invalid_author")
        if self.first_seq_no <= 0:
            raise ValidationError("FirstSeqNo <= 0", path="segment", kind="invalid_seq_no")
        if self.first_offset < 0:
            raise ValidationError("FirstOffset < 0", path="segment", kind="invalid_offset")
        if self.last_seq_no < self.first_seq_no:
            raise ValidationError(
                "LastSeqNo < segment.FirstSeqNo", path="segment", kind="invalid_seq_no"
            )
        if self.last_offset and self.last_offset <= self.first_offset:
            raise ValidationError(
                "LastOffset <= segment.FirstOffset", path="segment", kind="invalid_offset"
            )
        validate_journal(self.log, "segment.log")


def merge(left: Segment, right: Segment) -> Segment | None:
    """Merge two segments, in any order.

    Returns:
        The merged segment; None if a gap, or a change of author or log, keeps them apart.

    Raises:
        ValidationError: they contradict each other.
    """
    a, b = left, right
    if (b.first_seq_no, -b.last_seq_no) < (a.first_seq_no, -a.last_seq_no):
        a, b = b, a
    _check_offsets(a, b)
    if a.first_seq_no == b.first_seq_no and a.first_checksum != b.first_checksum:
        raise _contradiction("expected Segment FirstChecksum equality", a, b)
    is_same_writer = a.author == b.author and a.log == b.log
    if b.first_seq_no > a.last_seq_no + (1 if is_same_writer else 0):
        return None
    if a.author != b.author:
        raise _contradiction("expected Segment Author equality", a, b)
    if a.log != b.log:
        raise _contradiction("expected Segment Log equality", a, b)
    merged = a.copy()
    if a.first_seq_no == b.first_seq_no:
        merged.first_offset = max(a.first_offset, b.first_offset)
    if a.last_seq_no == b.last_seq_no:
        merged.last_offset = a.last_offset or b.last_offset
    elif b.last_seq_no > a.last_seq_no:
        merged.last_seq_no, merged.last_offset = b.last_seq_no, b.last_offset
    return merged


def _check_offsets(a: Segment, b: Segment) -> None:
    """Check the offsets of two segments, of which ``a`` begins first."""
    if a.first_seq_no < b.first_seq_no:
        if a.log == b.log and a.first_offset > b.first_offset:
            raise _contradiction("expected monotonic FirstOffset", a, b)
        if a.last_offset == 0 and b.last_offset != 0:
            raise _contradiction("expected preceding Segment to also include LastOffset", a, b)
    if a.last_offset == 0 and a.log != b.log:
        raise _contradiction(
            "Segment cannot use a different log where preceding Segment.LastOffset is zero", a, b
        )
    if a.log == b.log and a.last_offset and b.last_offset:
        order = (a.last_seq_no > b.last_seq_no) - (a.last_seq_no < b.last_seq_no)
        offsets = (a.last_offset > b.last_offset) - (a.last_offset < b.last_offset)
        if offsets not in (0, order):
            raise _contradiction("expected monotonic LastOffset", a, b)


def _contradiction(rule: str, a: Segment, b: Segment) -> ValidationError:
    return ValidationError(f"{rule}: {a} vs {b}", kind="contradiction")


class SegmentSet:
    """Segments in the order of their sequence numbers, which do not overlap.

    Args:
        segments: in any order.

    Raises:
        ValidationError: they contradict each other.
    """

    def __init__(self, segments: Iterable[Segment] = ()) -> None:
        self._segments: list[Segment] = []
        for segment in segments:
            self.add(segment)

    def add(self, added: Segment) -> None:
        """Add a segment, and merge it with those that it overlaps or continues.

        Raises:
            ValidationError: it contradicts one of the set, which is unchanged.
        """
        at = bisect_left(self._segments, added.first_seq_no, key=lambda one: one.first_seq_no)
        begin = max(0, at - 1)
        found = self._segments[:begin]
        merged = added.copy()
        rest = iter(self._segments[begin:])
        for segment in rest:
            one = merge(segment, merged)
            if one is not None:
                merged = one
            elif segment.first_seq_no < merged.first_seq_no:
                found.append(segment)
            else:
                found += [merged, segment, *rest]
                break
        else:
            found.append(merged)
        self._segments = found

    def intersect(self, begin: int, end: int) -> list[Segment]:
        """Return the segments with operations at offsets in [begin, end). All are of one log."""
        return [
            segment
            for segment in self._segments
            if segment.first_offset < end
            and (segment.last_offset == 0 or segment.last_offset > begin)
        ]

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._segments)

    def __len__(self) -> int:
        return len(self._segments)

    def __getitem__(self, index: int) -> Segment:
        return self._segments[index]


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
        New values, from slot 0 on. Slots after them are unchanged.
    """
    values: list[bytes] = []
    moved: bytes | None = recovered
    for backup in backups:
        if moved is None:
            break
        values.append(moved)
        moved = backup
    return values


@dataclass(frozen=True, slots=True)
class CreateFile:
    """A new file, in place of one of the same path.

    Attributes:
        path: of the file.
        content: its first bytes; may be empty.
    """

    path: str
    content: bytes = b""


@dataclass(frozen=True, slots=True)
class WriteFile:
    """Bytes written to a file that exists.

    Attributes:
        path: of the file.
        offset: of the first byte.
        content: the bytes.
    """

    path: str
    offset: int
    content: bytes


@dataclass(frozen=True, slots=True)
class RenameFile:
    """A file's new path; a file of that path is replaced.

    Attributes:
        source: the path until now.
        target: the path from now on.
    """

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class RemoveFile:
    """A file that was removed.

    Attributes:
        path: of the file.
    """

    path: str


@dataclass(frozen=True, slots=True)
class SetProperty:
    """A small file whose whole content stands in hints.

    Attributes:
        path: of the file.
        content: all of it.
    """

    path: str
    content: str


FileChange: TypeAlias = CreateFile | WriteFile | RenameFile | RemoveFile | SetProperty
"""Change of one file."""


@dataclass(frozen=True, slots=True)
class StoredHints:
    """All hints of a shard.

    Attributes:
        primary: recorded by a primary while it ran; None if there are none.
        backups: of past recoveries, the latest first; None where a key is missing.
    """

    primary: pb.FSMHints | None
    backups: Sequence[pb.FSMHints | None]


async def load_hints(etcd: Etcd, spec: cpb.ShardSpec) -> StoredHints:
    """Read and check all hints of a shard.

    Raises:
        ValidationError: a value cannot be decoded, breaks a rule, or is of another log.
        EtcdError: Etcd failed.
    """
    keys = hint_keys(spec)
    if not keys:
        return StoredHints(None, [None] * spec.hint_backups)
    values = await _read(etcd, keys)
    log = recovery_log(spec)
    primary, *backups = (
        None if kv is None else _checked(kv, key, log) for key, kv in zip(keys, values, strict=True)
    )
    return StoredHints(primary, backups)


async def store_recorded_hints(
    etcd: Etcd, item: ShardEntry, hints: pb.FSMHints, assignment: ShardAssignment
) -> bool:
    """Store hints of a running primary.

    Args:
        etcd: the client.
        item: the shard's key.
        hints: what was recorded, and is committed.
        assignment: of the primary.

    Returns:
        False if the shard is deleted, or the assignment is not the same any more. That is no
        error: hints are advice.

    Raises:
        EtcdError: Etcd failed.
    """
    result = await etcd.txn(
        _unchanged(item, assignment),
        (Put(primary_hint_key(item.value).encode(), to_json(hints)),),
    )
    return result.succeeded


async def store_recovered_hints(
    etcd: Etcd,
    item: ShardEntry,
    hints: pb.FSMHints,
    assignment: Callable[[], ShardAssignment | None],
) -> None:
    """Store hints of a recovery as the first backup; older ones move on up to an empty key.

    Call it once the store was restored: hints that do not lead to a store must not push out good
    ones. It tries again until it is cancelled, or the shard is not assigned to us any more.

    Args:
        etcd: the client.
        item: the shard's key.
        hints: of the player.
        assignment: returns the current assignment of the primary; None if there is none.
    """
    keys = backup_hint_keys(item.value)
    recovered = to_json(hints)
    attempt = 0
    is_in_doubt = False
    while keys and (entry := assignment()) is not None:
        try:
            conditions = _unchanged(item, entry)
            if await _rotate(etcd, keys, recovered, conditions, is_in_doubt=is_in_doubt):
                return
        except EtcdError as error:
            is_in_doubt = True
            _log.warning(
                "recovered hints are not stored yet",
                extra={"shard": item.id, "err": str(error), "attempt": attempt},
            )
        await asyncio.sleep(delay_s(attempt))
        attempt += 1


def _unchanged(item: ShardEntry, assignment: ShardAssignment) -> Sequence[Compare]:
    """Return the conditions that a shard exists, and an assignment: both are the same ones."""
    return [Compare.create_revision(each.key, each.create_revision) for each in (item, assignment)]


async def _rotate(
    etcd: Etcd,
    keys: Sequence[str],
    recovered: bytes,
    conditions: Sequence[Compare],
    *,
    is_in_doubt: bool,
) -> bool:
    known = await _read(etcd, keys)
    if is_in_doubt and (newest := known[0]) is not None and newest.value == recovered:
        return True  # an attempt whose answer was lost: twice, it would push out an older backup
    values = rotate(recovered, [None if kv is None else kv.value for kv in known])
    touched = list(zip(keys, known, values, strict=False))
    result = await etcd.txn(
        (
            *conditions,
            *(
                Compare.mod_revision(key.encode(), 0 if kv is None else kv.mod_revision)
                for key, kv, _ in touched
            ),
        ),
        [Put(key.encode(), value) for key, _, value in touched],
    )
    return result.succeeded


async def _read(etcd: Etcd, keys: Sequence[str]) -> list[KeyValue | None]:
    """Read keys in one transaction; None where a key is missing."""
    result = await etcd.txn((), [Get(key.encode()) for key in keys])
    found: list[KeyValue | None] = []
    for response in result.responses:
        assert response is not None, "the response of a get"
        found.append(response.entries[0] if response.entries else None)
    return found


def _checked(kv: KeyValue, key: str, log: str) -> pb.FSMHints:
    try:
        hints = from_bytes(kv.value)
        validate(hints, log)
    except ValidationError as error:
        raise error.within(key) from None
    return hints
