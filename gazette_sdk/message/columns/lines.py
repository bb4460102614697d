"""Lines of a block, and the UUIDs which stand at the same place in all of them, cut out at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gazette_sdk.message.sequencing.run import Stamps, parse_text_uuids
from gazette_sdk.message.uuid import TEXT_BYTES

__all__ = ["Lines", "Place", "Placed"]

_BLANK, _COMMA, _OPEN, _CLOSE, _QUOTE = (np.uint8(ord(character)) for character in ' ,{}"')


@dataclass(frozen=True, slots=True)
class Lines:
    """A block, and where its lines are.

    Attributes:
        block: whole lines, the last one with its newline.
        begins: index of each line's first byte.
        ends: index behind each line's newline: where the next one begins.
    """

    block: bytes | bytearray | memoryview
    begins: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.begins)

    def part(self, start: int, stop: int) -> Lines:
        """The lines of ``[start, stop)``, as a block of its own."""
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
        """One line, without its newline."""
        return bytes(self.block[int(self.begins[index]) : int(self.ends[index]) - 1])


class Place:
    """The place of UUIDs behind a prefix, in lines.

    Args:
        prefix: what every line begins with, the opening quote included.
    """

    def __init__(self, prefix: bytes) -> None:
        self._begin = len(prefix)
        self._end = self._begin + TEXT_BYTES
        # Behind the UUID: its closing quote, a comma or a brace, and what follows.
        self._width = self._end + 3
        self._prefix = np.frombuffer(prefix, np.uint8)
        # Words are compared faster than bytes.
        mask = np.zeros(-(-self._width // 8) * 8, np.uint8)
        mask[: self._width] = 0xFF
        mask[self._begin : self._begin + _LOW_TIME_BYTES] = 0
        self._mask = mask.view(np.uint64)

    def cut(self, lines: Lines) -> Placed | None:
        """The UUIDs of lines; None if a line does not have one there."""
        shortest = int((lines.ends - lines.begins).min())
        if shortest < self._width:
            return None
        width = 8 * len(self._mask)
        if shortest >= width:
            heads = _windows(lines.block, width)[lines.begins].view(np.uint8).reshape(-1, width)
            words = heads.view(np.uint64)
            are_alike = not ((words ^ words[0]) & self._mask).any()
        else:
            width = self._width
            heads = _windows(lines.block, width)[lines.begins].view(np.uint8).reshape(-1, width)
            are_alike = False
        if not self._are_placed(heads[:1] if are_alike else heads):
            return None
        return Placed(lines, heads, heads[:, self._begin : self._end], self._end + 1, are_alike)

    def _are_placed(self, heads: npt.NDArray[np.uint8]) -> bool:
        quote, separator, following = (heads[:, self._end + at] for at in range(3))
        goes_on = (separator == _COMMA) & (following == _QUOTE)
        return bool(
            (heads[:, : self._begin] == self._prefix).all()
            and ((quote == _QUOTE) & (goes_on | (separator == _CLOSE))).all()
        )


class Placed(NamedTuple):
    """Lines which begin with a UUID.

    Attributes:
        lines: the lines.
        heads: their first bytes, shape [n, width].
        texts: the UUIDs, shape [n, 36].
        tail: width of what stands before the UUID, of itself, and of its closing quote.
        are_alike: but for the lower part of their time, all UUIDs are the same.
    """

    lines: Lines
    heads: npt.NDArray[np.uint8]
    texts: npt.NDArray[np.uint8]
    tail: int
    are_alike: bool

    def stamps(self) -> Stamps | None:
        """What the UUIDs say; None if one of them is none."""
        alike = _alike_stamps(self.texts) if self.are_alike else None
        return parse_text_uuids(self.texts) if alike is None else alike

    def are_bare(self) -> npt.NDArray[np.bool_]:
        """Which lines hold nothing beside their UUID."""
        lengths = self.lines.ends - self.lines.begins
        is_closed = self.heads[:, self.tail] == _CLOSE
        found: npt.NDArray[np.bool_] = is_closed & (lengths == self.tail + len(b"}\n"))
        return found

    def blanked(self) -> Lines:
        """The same lines with blanks in place of the UUID: there is less to be read."""
        begins = self.lines.begins
        block = bytearray(self.lines.block)
        width = self.tail + 1
        # One for all, if all go on in the same way.
        heads = np.full((1 if self.are_alike else len(begins), width), _BLANK, np.uint8)
        heads[:, 0] = _OPEN
        following = self.heads[: len(heads), self.tail]
        heads[:, -1] = np.where(following == _COMMA, _BLANK, following)
        _windows(block, width)[begins] = heads.view(f"V{width}").reshape(-1)
        return Lines(block, begins, self.lines.ends)


_LOW_TIME_BYTES = 8
"""Length of the part of a UUID's text that changes with every message of one producer."""


def _alike_stamps(texts: npt.NDArray[np.uint8]) -> Stamps | None:
    """What UUIDs say which differ in the lower part of their time only."""
    first = parse_text_uuids(texts[:1])
    low = _hex_values(np.ascontiguousarray(texts[:, :_LOW_TIME_BYTES]).view(np.uint64).ravel())
    if first is None or low is None:
        return None
    high = first.clocks[0] & ~np.uint64(0xFFFF_FFFF << 4)
    count = len(texts)
    return Stamps(
        np.full(count, first.producers[0]),
        high | (low << np.uint64(4)),
        np.full(count, first.flags[0]),
    )


def _hex_values(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64] | None:
    """The values of eight hexadecimal digits each, of which the first is the lowest byte.

    None if one of them is no lower-case digit.
    """
    # Digits are 0x30 to 0x39, letters 0x61 to 0x66: bit 6 tells them apart.
    letters = (words >> np.uint64(6)) & np.uint64(0x0101_0101_0101_0101)
    nibbles = (words & np.uint64(0x0F0F_0F0F_0F0F_0F0F)) + letters * np.uint64(9)
    # What these nibbles are written as must be what was there.
    high = np.uint64(0x1010_1010_1010_1010)
    above_nine = ((nibbles + np.uint64(0x0606_0606_0606_0606)) & high) >> np.uint64(4)
    written = nibbles + np.uint64(0x3030_3030_3030_3030) + above_nine * np.uint64(0x27)
    if not np.array_equal(written, words) or (nibbles & np.uint64(0xF0F0_F0F0_F0F0_F0F0)).any():
        return None
    pairs = (nibbles << np.uint64(4)) | (nibbles >> np.uint64(8))
    octets = pairs & np.uint64(0x00FF_00FF_00FF_00FF)
    quads = ((octets << np.uint64(8)) | (octets >> np.uint64(16))) & np.uint64(
        0x0000_FFFF_0000_FFFF
    )
    return ((quads << np.uint64(16)) | (quads >> np.uint64(32))) & np.uint64(0xFFFF_FFFF)


def _windows(block: bytes | bytearray | memoryview, width: int) -> npt.NDArray[np.void]:
    """Overlapping items, one at each byte: taking or setting some copies each in one go."""
    return np.ndarray((len(block) - width + 1,), dtype=f"V{width}", buffer=block, strides=(1,))
