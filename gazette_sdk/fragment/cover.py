"""Cover sets: look-up of an offset among a journal's fragments (broker section 10).

A journal's bytes are often stored more than once: two brokers uploaded overlapping fragments, or
a fragment grew. A cover set keeps only fragments that add bytes. It is ordered, and no fragment
lies wholly inside another, so that begins and ends both strictly increase and every look-up is a
binary search.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

from gazette_sdk.protocol import broker_pb2 as pb

__all__ = ["CoverSet"]


class CoverSet(Sequence[pb.Fragment]):
    """Ordered set of fragments of one journal, none wholly inside another.

    Args:
        fragments: fragments to add, in this order.
    """

    __slots__ = ("_begins", "_ends", "_fragments")

    def __init__(self, fragments: Iterable[pb.Fragment] = ()) -> None:
        self._fragments: list[pb.Fragment] = []
        self._begins: list[int] = []  # both increase strictly: the invariant of the set
        self._ends: list[int] = []
        for fragment in fragments:
            self.add(fragment)

    # ------------------------------------------------------------- changes

    def add(self, fragment: pb.Fragment) -> bool:
        """Add a fragment, and remove those that it covers.

        Args:
            fragment: stored without a copy.

        Returns:
            True if the set changed: not when the fragment is empty, or lies wholly inside a
            larger one. A fragment replaces another one of the same span.
        """
        begin, end = fragment.begin, fragment.end
        if begin >= end:
            return False
        if self._begins and self._begins[-1] == begin and self._ends[-1] < end:
            self._fragments[-1], self._ends[-1] = fragment, end  # the last one has grown
            return True
        # Of the fragments that begin at or before this one, the last reaches furthest.
        at = bisect_right(self._begins, begin) - 1
        if at >= 0 and self._ends[at] >= end and (self._begins[at], self._ends[at]) != (begin, end):
            return False
        first = bisect_left(self._begins, begin)
        stop = bisect_right(self._ends, end)
        assert first <= stop, "a fragment that covers this one was found too late"
        self._fragments[first:stop] = [fragment]
        self._begins[first:stop] = [begin]
        self._ends[first:stop] = [end]
        return True

    # ------------------------------------------------------------- look-up

    @property
    def begin(self) -> int:
        """Offset of the first byte held, 0 when empty."""
        return self._begins[0] if self._begins else 0

    @property
    def end(self) -> int:
        """Offset after the last byte held, 0 when empty."""
        return self._ends[-1] if self._ends else 0

    def longest_overlap(self, offset: int) -> tuple[int, bool]:
        """Find the fragment that holds ``offset`` and reaches furthest.

        Returns:
            Its index and True; or, when no fragment holds the offset, the index of the next later
            one (the length of the set when there is none) and False.
        """
        at = bisect_right(self._ends, offset)
        if at == len(self._ends) or self._begins[at] > offset:
            return at, False
        return bisect_right(self._begins, offset) - 1, True

    def first_from(self, offset: int) -> int:
        """Return the index of the first fragment whose begin is at or after ``offset``."""
        return bisect_left(self._begins, offset)

    def covers(self, begin: int, end: int) -> bool:
        """Return True if all bytes of ``[begin, end)`` are held, by one fragment or several."""
        while begin < end:
            at, found = self.longest_overlap(begin)
            if not found:
                return False
            begin = self._ends[at]
        return True

    @staticmethod
    def difference(a: CoverSet, b: CoverSet) -> CoverSet:
        """Return the fragments of ``a`` that ``b`` does not hold completely."""
        return CoverSet(f for f in a if not b.covers(f.begin, f.end))

    def copy(self) -> CoverSet:
        """Return an independent set of the same fragments."""
        other = CoverSet()
        other._fragments = self._fragments.copy()
        other._begins = self._begins.copy()
        other._ends = self._ends.copy()
        return other

    # ------------------------------------------------------------ sequence

    def __len__(self) -> int:
        return len(self._fragments)

    def __iter__(self) -> Iterator[pb.Fragment]:
        return iter(self._fragments)

    @overload
    def __getitem__(self, index: int) -> pb.Fragment: ...
    @overload
    def __getitem__(self, index: slice) -> list[pb.Fragment]: ...
    def __getitem__(self, index: int | slice) -> pb.Fragment | list[pb.Fragment]:
        return self._fragments[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CoverSet) and self._fragments == other._fragments

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        spans = ", ".join(f"[{b}, {e})" for b, e in zip(self._begins, self._ends, strict=True))
        return f"CoverSet({spans})"
