"""UUIDs at the same place of every frame of a chunk, cut out in bulk.

Our publishers write a message's UUID as the first key of its JSON object, and so do many others.
Where a single frame has it elsewhere, or a text of another length or with an escape, or the same
key once more, of which the last counts, frames are parsed one by one instead.
"""

from __future__ import annotations

import re
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from gazette_sdk.framing import Frames
from gazette_sdk.framing.base import Buffer
from gazette_sdk.message.uuid import TEXT_BYTES

__all__ = ["Texts", "UuidPlace", "acknowledging", "raw_texts", "windows"]

_QUOTE, _BACKSLASH = ord('"'), ord("\\")
_USUAL_KEY = b'"UUID"'
_USUAL_LETTER = b"U"
"""Letter of the usual key, which other text rarely has, and hardly ever twice in a row. It is
counted in a tenth of the time of the key."""

Texts: TypeAlias = npt.NDArray[np.uint8]
"""Texts of UUIDs, shape [n, 36]."""

Offsets: TypeAlias = npt.NDArray[np.int64]


class UuidPlace:
    """Place of a UUID after its key, between double quotes.

    Args:
        key: key of the UUID, which is the first of every payload.
        behind_bytes: number of bytes behind the closing quote that :meth:`heads` returns.

    Attributes:
        prefix: first bytes of every payload, the opening quote included.
        begin: index of the UUID in a payload.
        end: index of its closing quote.
    """

    def __init__(self, key: str, behind_bytes: int = 0) -> None:
        self._key = b'"%b"' % key.encode()
        self.prefix = b'{%b:"' % self._key
        text = rb"([0-9A-Fa-f-]{%d})" % TEXT_BYTES
        self._match = re.compile(re.escape(self.prefix) + text + b'"').match
        self._letters = 2 if self._key == _USUAL_KEY else -1
        self.begin = len(self.prefix)
        self.end = self.begin + TEXT_BYTES
        self._width = self.end + 1 + behind_bytes

    def texts(self, buffer: Buffer, frames: Frames, header_bytes: int) -> Texts | None:
        """Return the text at that place of each frame.

        Args:
            buffer: content.
            frames: its frames.
            header_bytes: length of what precedes the payload in each frame.

        Returns:
            Shape [n, 36], of texts that need not be UUIDs; None if a frame has no such place.
        """
        begins, ends = frames.arrays()
        heads = self.heads(buffer, begins + header_bytes if header_bytes else begins, ends)
        return None if heads is None else heads[:, self.begin : self.end]

    def text(self, payload: bytes) -> bytes | None:
        """Return the text at that place of one payload; None if the key may be there twice."""
        found = self._match(payload)
        if found is None:
            return None
        # A letter is counted in a fraction of the time of looking for the key.
        if payload.count(_USUAL_LETTER) == self._letters or payload.find(self._key, self.end) < 0:
            return found[1]
        return None

    def may_repeat(
        self, buffer: Buffer | memoryview, count: int, begin: int = 0, end: int | None = None
    ) -> bool:
        """Return True if the key may be in payloads more often than once each.

        Args:
            buffer: content.
            count: number of the payloads in it, each of which begins with the key.
            begin: index of the first one.
            end: index after the last one; by default all content.
        """
        content = np.frombuffer(buffer, np.uint8)[begin:end]
        if self._letters > 0:
            letters = content == _USUAL_LETTER[0]
            if np.count_nonzero(letters) == self._letters * count:
                return False
            if np.count_nonzero(np.diff(np.flatnonzero(letters)) == 1) == count:
                return False
        return content.tobytes().count(self._key) != count

    def heads(
        self, buffer: Buffer | memoryview, begins: Offsets, ends: Offsets
    ) -> npt.NDArray[np.uint8] | None:
        """Return the first bytes of each payload, shape [n, width]; None if one has no place.

        Args:
            buffer: content.
            begins: index of each payload's first byte.
            ends: index behind each frame's last byte.
        """
        if not len(begins) or int((ends - begins).min()) < self._width:
            return None
        heads: npt.NDArray[np.uint8] = (
            windows(buffer, self._width)[begins].view(np.uint8).reshape(-1, self._width)
        )
        if heads[:, : self.begin].tobytes() != self.prefix * len(heads):
            return None
        if not (heads[:, self.end] == _QUOTE).all() or (heads == _BACKSLASH).any():
            return None
        # No text has a quote: it would end there.
        quotes = np.count_nonzero(heads == _QUOTE) - np.count_nonzero(
            heads[:, self.end + 1 :] == _QUOTE
        )
        return heads if quotes == len(heads) * (self.prefix.count(b'"') + 1) else None


def windows(buffer: Buffer | memoryview, width: int) -> npt.NDArray[np.void]:
    """Return overlapping items of ``width`` bytes, one at each byte, to copy some at once."""
    return np.ndarray((len(buffer) - width + 1,), f"V{width}", buffer, strides=(1,))


def raw_texts(texts: Texts) -> list[bytes]:
    """Return each row as bytes. Rows must not end in zeros, which would be cut off."""
    listed: list[bytes] = np.ascontiguousarray(texts).view(f"S{TEXT_BYTES}").ravel().tolist()
    return listed


def acknowledging(texts: Texts) -> list[int]:
    """Return the indices of the UUIDs of acknowledgements; others may be among them."""
    # The last three digits of the fourth group hold the flags, below two bits of the clock.
    found = _FLAGS_HIGH_ZERO[texts[:, 20]] & (texts[:, 21] == ord("0")) & (texts[:, 22] == ord("2"))
    listed: list[int] = np.flatnonzero(found).tolist()
    return listed


_FLAGS_HIGH_ZERO = np.zeros(256, dtype=bool)
_FLAGS_HIGH_ZERO[np.frombuffer(b"048cC", dtype=np.uint8)] = True
"""Digits whose two lower bits, the upper ones of the flags, are zero."""
