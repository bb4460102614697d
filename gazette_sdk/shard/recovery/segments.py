"""Segments: stretches of a log's operations of one author, and sets of them (recovery log 3)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from gazette_sdk.errors import ValidationError
from gazette_sdk.protocol import recoverylog_pb2 as pb
from gazette_sdk.protocol.names import validate_journal

__all__ = ["Segment", "SegmentSet", "merge"]


@dataclass(slots=True)
class Segment:
    """Operations of one author, without gaps, in one log. Mutable while its author records.

    Attributes:
        author: of all operations.
        first_seq_no: sequence number of the first operation.
        first_offset: lower bound of its offset.
        first_checksum: checksum of all operations before it.
        last_seq_no: sequence number of the last operation, inclusive.
        last_offset: offset behind it; 0 if it is not known.
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
