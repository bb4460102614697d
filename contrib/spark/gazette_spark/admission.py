"""Admission: how much of each journal the next micro-batch reads. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping

from gazette_spark.content import Piece

__all__ = ["admitted"]


def admitted(pieces: Mapping[str, Iterable[Piece]], limit_bytes: int | None) -> dict[str, int]:
    """Return the offset up to which each journal is read next.

    Pieces are taken over all journals in the order in which they were stored, so that journals
    advance together in event time, until the limit is used up. At least one piece is taken, and
    pieces are not divided.

    Args:
        pieces: content that is not read yet by journal, in the order of each journal.
        limit_bytes: limit in bytes; None for no limit.

    Returns:
        Offsets by journal. Journals of which nothing is read are not in it.
    """
    ends: dict[str, int] = {}
    iterators = {name: iter(found) for name, found in pieces.items()}
    waiting: list[tuple[float, str, int, int]] = []

    def add_next(name: str) -> None:
        piece = next(iterators[name], None)
        if piece is not None:
            stored = piece.fragment.mod_time or math.inf
            heapq.heappush(waiting, (stored, name, piece.begin, piece.end))

    for name in iterators:
        add_next(name)
    left = math.inf if limit_bytes is None else limit_bytes
    while waiting and left > 0:
        _, name, begin, end = heapq.heappop(waiting)
        ends[name] = end
        left -= end - begin
        add_next(name)
    return ends
