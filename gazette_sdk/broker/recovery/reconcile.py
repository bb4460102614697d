"""How much of a recovered spool is kept, where others went on with its journal meanwhile.

A primary commits an append to its own spool before the others have it. When it is killed right
then, the others go on from an earlier offset, and what they write and acknowledge there is what
the journal holds. The bytes of the recovered spool are good up to the first offset which others
have, and not behind it.
"""

from __future__ import annotations

from collections.abc import Iterable

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import digest_of

__all__ = ["kept_end"]


def kept_end(ours: pb.Fragment, known: Iterable[pb.Fragment]) -> int:
    """Up to which offset a recovered spool is kept.

    Args:
        ours: the spool's fragment, which is not empty.
        known: fragments of the journal that others have, or that are stored.

    Returns:
        its end where all of it is kept: nobody else has any of it, or it is stored just as it
        is. Its begin where nothing of it is.
    """
    others = []
    for fragment in known:
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
