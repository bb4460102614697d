"""UUIDs which stand at the same place in every frame of a chunk, cut out all at once.

Our publishers write a message's UUID as the first key of its JSON object. So do many others; where
a single frame has it elsewhere, frames are looked through one by one instead.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from gazette_sdk.framing import Frames
from gazette_sdk.framing.base import Buffer
from gazette_sdk.message.uuid import TEXT_BYTES

__all__ = ["Texts", "UuidPlace", "acknowledging", "raw_texts"]


Texts: TypeAlias = npt.NDArray[np.uint8]
"""Texts of UUIDs, shape [n, 36]."""


class UuidPlace:
    """The place behind a prefix, between double quotes.

    Args:
        prefix: what every payload begins with, the opening quote included.
    """

    def __init__(self, prefix: bytes) -> None:
        self._head = len(prefix)
        self._width = len(prefix) + TEXT_BYTES + 1
        self._prefix = np.frombuffer(prefix, dtype=np.uint8)

    def texts(self, buffer: Buffer, frames: Frames, header_bytes: int) -> Texts | None:
        """What stands there in each frame.

        Args:
            buffer: content.
            frames: where its frames are.
            header_bytes: length of what stands before the payload in each frame.

        Returns:
            Shape [n, 36], which need not be UUIDs; None if a frame has no such place.
        """
        width = self._width
        begins, ends = frames.arrays()
        if not len(begins) or int((ends - begins).min()) <= width + header_bytes:
            return None
        if header_bytes:
            begins = begins + header_bytes
        # Overlapping items, one at each byte: taking some copies each in one go.
        places = np.ndarray(
            (len(buffer) - width + 1,), dtype=f"V{width}", buffer=buffer, strides=(1,)
        )
        heads: Texts = places[begins].view(np.uint8).reshape(-1, width)
        if not (heads[:, : self._head] == self._prefix).all():
            return None
        if not (heads[:, -1] == ord('"')).all():
            return None
        return heads[:, self._head : -1]


def raw_texts(texts: Texts) -> list[bytes]:
    """Each row as bytes. Rows must not end in zeros, which would be cut off."""
    listed: list[bytes] = np.ascontiguousarray(texts).view(f"S{TEXT_BYTES}").ravel().tolist()
    return listed


def acknowledging(texts: Texts) -> list[int]:
    """Indices of the rows which are UUIDs of acknowledgements, and perhaps of others."""
    # The last three digits of the fourth group hold the flags, below two bits of the clock.
    found = _FLAGS_HIGH_ZERO[texts[:, 20]] & (texts[:, 21] == ord("0")) & (texts[:, 22] == ord("2"))
    listed: list[int] = np.flatnonzero(found).tolist()
    return listed


_FLAGS_HIGH_ZERO = np.zeros(256, dtype=bool)
_FLAGS_HIGH_ZERO[np.frombuffer(b"048cC", dtype=np.uint8)] = True
"""Digits whose two lower bits, the upper ones of the flags, are zero."""
