"""Comparison of a recovered spool with what others have of its journal; pure.

A primary commits an append to its own spool before its peers have it. If it is killed right then,
its peers continue the journal at an earlier offset, and the bytes which they acknowledge there are
the journal's. So a recovered spool is valid up to the first offset which others have.
"""

from __future__ import annotations

from collections.abc import Iterable

from gazette_sdk.broker.recovery.states import SpoolInput
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import digest_of

__all__ = ["compare", "valid_end"]


def compare(ours: pb.Fragment, inventory: Iterable[pb.Fragment]) -> tuple[SpoolInput, int]:
    """Return the input of the state machine, and the offset up to which a spool is valid."""
    end = valid_end(ours, inventory)
    if end == ours.end:
        return SpoolInput.NOT_HELD, end
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
