"""Lines of a block, and the UUIDs at the same place in all of them, cut out in bulk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gazette_sdk.message.kinds.fixed_place import UuidPlace, windows

__all__ = ["Lines", "PlacedUuids", "placed_uuids"]

_BLANK, _COMMA, _OPEN, _CLOSE, _QUOTE = (np.uint8(ord(character)) for character in ' ,{}"')


@dataclass(frozen=True, slots=True)
class Lines:
    """Block of whole lines, with their places.

    Attributes:
        block: the lines, the last one with its newline.
        begins: index of each line's first byte.
        ends: index behind each line's newline, where the next line begins.
    """

    block: bytes | bytearray | memoryview
    begins: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.begins)

    def part(self, start: int, stop: int) -> Lines:
        """Return the lines of ``[start, stop)``, as a block of their own."""
        if start == 0 and stop == len(self):
            return self
        if start == stop:
            return Lines(b"", self.begins[:0], self.ends[:0])
        base, end = int(self.begins[start]), int(self.ends[stop - 1])
        return Lines(
            memoryview(self.block)[base:end],
            self.begins[start:stop] - base,
            self.ends[start:stop] - base,
        )

    def line(self, index: int) -> bytes:
        """Return one line, without its newline."""
        return bytes(self.block[int(self.begins[index]) : int(self.ends[index]) - 1])


class PlacedUuids(NamedTuple):
    """UUIDs of lines that all begin with one.

    Attributes:
        lines: the lines.
        texts: the texts of the UUIDs, shape [n, 36].
        separators: byte behind each UUID's closing quote: a comma or a brace.
        width: length of a line up to its separator, included.
    """

    lines: Lines
    texts: npt.NDArray[np.uint8]
    separators: npt.NDArray[np.uint8]
    width: int

    def are_bare(self) -> npt.NDArray[np.bool_]:
        """Return for each line if it holds nothing beside its UUID."""
        lengths = self.lines.ends - self.lines.begins
        found: npt.NDArray[np.bool_] = (self.separators == _CLOSE) & (
            lengths == self.width + len(b"\n")
        )
        return found

    def blanked(self) -> Lines:
        """Return the lines with blanks in place of the UUID, which makes less to be parsed."""
        begins = self.lines.begins
        block = bytearray(self.lines.block)
        heads = np.full((len(begins), self.width), _BLANK, np.uint8)
        heads[:, 0] = _OPEN
        heads[:, -1] = np.where(self.separators == _COMMA, _BLANK, self.separators)
        windows(block, self.width)[begins] = heads.view(f"V{self.width}").reshape(-1)
        return Lines(block, begins, self.lines.ends)


def placed_uuids(lines: Lines, place: UuidPlace) -> PlacedUuids | None:
    """Return the UUIDs of lines; None if a line does not begin with one.

    Args:
        lines: the lines.
        place: place of UUIDs, with two bytes behind.
    """
    heads = place.heads(lines.block, lines.begins, lines.ends)
    if heads is None:
        return None
    separators, following = heads[:, place.end + 1], heads[:, place.end + 2]
    goes_on = (separators == _COMMA) & (following == _QUOTE)
    if not (goes_on | (separators == _CLOSE)).all():
        return None
    return PlacedUuids(lines, heads[:, place.begin : place.end], separators, place.end + 2)
