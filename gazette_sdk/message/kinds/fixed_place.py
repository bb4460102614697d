"""UUIDs at the same place of every frame of a chunk, cut out in bulk.

Our publishers write a message's UUID as the first key of its JSON object, and so do many others.
Where a single frame has it elsewhere, frames are parsed one by one instead.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from gazette_sdk.framing import Frames
from gazette_sdk.framing.base import Buffer
from gazette_sdk.message.uuid import TEXT_BYTES

__all__ = ["Texts", "UuidPlace", "acknowledging", "raw_texts", "windows"]


Texts: TypeAlias = npt.NDArray[np.uint8]
"""Texts of UUIDs, shape [n, 36]."""

Offsets: TypeAlias = npt.NDArray[np.int64]


class UuidPlace:
    """Place of a UUID behind a prefix, between double quotes.

    Args:
        prefix: first bytes of every payload, the opening quote included.
        behind_bytes: number of bytes behind the closing quote that :meth:`heads` returns.

    Attributes:
        begin: index of the UUID in a payload.
        end: index of its closing quote.
    """

    def __init__(self, prefix: bytes, behind_bytes: int = 0) -> None:
        self.begin = len(prefix)
        self.end = self.begin + TEXT_BYTES
        self._width = self.end + 1 + behind_bytes
        self._prefix = np.frombuffer(prefix, dtype=np.uint8)

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
        if not (heads[:, : self.begin] == self._prefix).all():
            return None
        return heads if (heads[:, self.end] == ord('"')).all() else None


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
