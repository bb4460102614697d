"""Comparison of a recovered spool with what others have of its journal; pure.

A primary commits an append to its own spool before its peers have it. If it is killed right then,
its peers continue the journal at an earlier offset, and the bytes which they acknowledge there are
the journal's. So a recovered spool is valid up to the first offset which others have.

But its peers may also have learned its offset, and continue the journal behind bytes that they do
not have. Then the spool closes a *gap*: bytes that nobody else has, in front of bytes that others
have. It is valid up to the end of its last gap, if what others have before that is the same. Peers
that have learned its end, and wrote nothing there yet, show it by the ends of their spools alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from gazette_sdk.broker.recovery.states import SpoolInput
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import digest_of

__all__ = ["Closing", "closing_of", "compare", "is_ahead", "valid_end"]

Span: TypeAlias = tuple[int, int]
"""Begin and end offset."""


class Closing(NamedTuple):
    """Gaps of a journal that a spool closes.

    Attributes:
        gaps: spans of the spool that nobody else has, in front of bytes that others have.
        shared: spans that others have, too, before the end of the last gap.
    """

    gaps: Sequence[Span]
    shared: Sequence[Span]

    def judge(self, ours: pb.Fragment, differs_at: int | None) -> tuple[SpoolInput, int]:
        """Return the input of the state machine, and the offset up to which the spool is valid.

        Args:
            ours: the spool's fragment.
            differs_at: begin of the first shared span of which others have other bytes.
        """
        ends = [end for _, end in self.gaps if differs_at is None or end <= differs_at]
        if not ends:
            return SpoolInput.OTHER_BYTES, ours.begin
        end = ends[-1]
        return (SpoolInput.NOT_HELD if end == ours.end else SpoolInput.HELD_FROM_WITHIN), end


def closing_of(ours: pb.Fragment, inventory: Iterable[pb.Fragment], head: int = 0) -> Closing:
    """Return the gaps that a recovered spool closes, none if there are none.

    Args:
        ours: the spool's fragment.
        inventory: fragments of the journal that others have, or that are stored.
        head: offset at which others go on with the journal; 0 if it is not known.
    """
    others = sorted(
        (fragment.begin, fragment.end)
        for fragment in inventory
        if not _is_same(ours, fragment) and fragment.begin < fragment.end
    )
    gaps: list[Span] = []
    shared: list[Span] = []
    at = ours.begin
    for begin, end in others:
        if end <= at:
            continue
        if at >= ours.end:
            break
        if begin > at:
            gaps.append((at, min(begin, ours.end)))
        at = max(at, begin)
        if at < ours.end:
            shared.append((at, min(end, ours.end)))
            at = end
    if at < ours.end <= head:
        gaps.append((at, ours.end))
    last = gaps[-1][1] if gaps else ours.begin
    return Closing(gaps, [span for span in shared if span[1] <= last])


def is_ahead(ours: pb.Fragment, inventory: Iterable[pb.Fragment]) -> bool:
    """Return True if a recovered spool ends behind everything that others have."""
    return all(fragment.end < ours.end for fragment in inventory)


def compare(
    ours: pb.Fragment, inventory: Sequence[pb.Fragment], head: int = 0
) -> tuple[SpoolInput, int]:
    """Return the input of the state machine, and the offset up to which a spool is valid.

    Its arguments are those of :func:`closing_of`.
    """
    end = valid_end(ours, inventory)
    if end == ours.end:
        return SpoolInput.NOT_HELD, end
    # Without shared spans the gap is the spool's beginning, which is valid in any case.
    if closing_of(ours, inventory, head).shared:
        return SpoolInput.CLOSES_GAP, end
    return (SpoolInput.HELD_FROM_BEGIN if end == ours.begin else SpoolInput.HELD_FROM_WITHIN), end


def valid_end(ours: pb.Fragment, inventory: Iterable[pb.Fragment]) -> int:
    """Return the offset up to which a recovered spool is valid.

    Args:
        ours: the spool's fragment, which is not empty.
        inventory: fragments of the journal that others have, or that are stored.

    Returns:
        its end if nobody else has any of it, or if it is stored as it is; its begin if others
        have its first byte.
    """
    others = []
    for fragment in inventory:
        if not _is_same(ours, fragment):
            others.append(fragment)
        elif fragment.backing_store:
            return ours.end
    return min(
        (
            max(ours.begin, fragment.begin)
            for fragment in others
            if fragment.begin < ours.end and ours.begin < fragment.end
        ),
        default=ours.end,
    )


def _is_same(a: pb.Fragment, b: pb.Fragment) -> bool:
    return (a.begin, a.end) == (b.begin, b.end) and digest_of(a.sum) == digest_of(b.sum)
