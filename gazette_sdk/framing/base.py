"""Interface of a framing: payloads of messages to frames and back."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from gazette_sdk.errors import FramingError

__all__ = ["FRAME_BYTES_MAX", "Buffer", "Frames", "Framing"]

FRAME_BYTES_MAX = 64 << 20
"""Limit of the length of a message with its framing: publishers refuse a longer one, and readers
pass over it. Default of :attr:`Framing.frame_bytes_max`."""

Offsets: TypeAlias = npt.NDArray[np.int64]

Buffer: TypeAlias = bytes | bytearray
"""Content of a journal in memory."""


@dataclass(slots=True)
class Frames:
    """Positions of the frames in a buffer.

    Attributes:
        begins: index of each frame's first byte, ascending.
        ends: index behind each frame's last byte; as many as ``begins``.
        consumed: number of leading bytes of the buffer that are cut. The bytes behind them are
            the begin of a frame that is not complete.
        error: the error behind the frames, if any. Its ``offset`` is an index of the buffer. The
            bad bytes are consumed, so that another cut goes on behind them: the skipped bytes of a
            :class:`~gazette_sdk.errors.DesyncError`, or the one frame of a
            :class:`~gazette_sdk.errors.DecodeError`. Only a
            :class:`~gazette_sdk.errors.TornFrameError`, at the end, leaves its bytes.
    """

    begins: list[int]
    ends: list[int]
    consumed: int
    error: FramingError | None = None
    _arrays: tuple[Offsets, Offsets] | None = field(default=None, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.ends)

    def arrays(self) -> tuple[Offsets, Offsets]:
        """Return ``begins`` and ``ends`` as arrays. Do not change them."""
        if self._arrays is None:
            self._arrays = np.array(self.begins, np.int64), np.array(self.ends, np.int64)
        return self._arrays


class Framing(abc.ABC):
    """Base class of framings, which delimit the messages in a journal.

    A user's own framing derives from this class, sets ``content_type`` and ``form``, implements
    ``encode`` and ``cut``, and is registered with :func:`gazette_sdk.framing.register`. One call
    cuts all frames of a buffer.

    Attributes:
        content_type: value of the journal's ``content-type`` label.
        form: form of payloads, ``"json"``, ``"protobuf"`` or ``"csv"``: selects the adapter
            between a message's class and payloads.
        header_bytes: length of a frame's header before the payload.
        trailer_bytes: length of a frame's trailer behind the payload.
        frame_bytes_max: greatest length of a frame that is published and read. A longer one is
            not kept in memory. Set it on a class, or on a framing that you register, in all
            publishers and readers, to have longer messages.
        newline_delimited: True if a frame is its payload and a newline, and payloads hold no
            newline.
    """

    content_type: ClassVar[str]
    form: ClassVar[str]
    header_bytes: ClassVar[int] = 0
    trailer_bytes: ClassVar[int] = 0
    newline_delimited: ClassVar[bool] = False
    frame_bytes_max: int = FRAME_BYTES_MAX

    @abc.abstractmethod
    def encode(self, payload: bytes, out: bytearray) -> None:
        """Append the frame of ``payload`` to ``out``.

        Raises:
            FramingError: no frame can hold this payload; ``out`` is as it was.
        """

    def stream(self) -> Framing:
        """Return the framing that cuts one stream, from the begin of a frame on.

        A framing whose frames depend on earlier ones of the stream returns a new object with that
        state, whose cuts follow each other. A framing without such a state returns ``self``.
        """
        return self

    @abc.abstractmethod
    def cut(self, buffer: Buffer, *, searched: int = 0, final: bool = False) -> Frames:
        """Find all whole frames of ``buffer``, which begins at the boundary of a frame.

        Frames, offsets and skipped bytes must not depend on how content is cut into buffers.

        Args:
            buffer: content.
            searched: number of leading bytes that an earlier cut found to be an incomplete frame.
                It only saves time.
            final: True if no more content follows. Remaining bytes are then reported as an error.
        """

    def find_end(self, head: bytes, passed: int, buffer: Buffer) -> int | None:
        """Return the index in ``buffer`` after a frame that is too long to be kept.

        The calls for a frame follow each other, with all of its content. A framing that does not
        implement this, and is not newline-delimited, has readers that stop at such a frame.

        Args:
            head: the frame's first ``header_bytes``.
            passed: number of its bytes before ``buffer``.
            buffer: the content after these.

        Returns:
            -1 if the end is not in ``buffer``; None if the end of such a frame cannot be found.
        """
        del head, passed
        if not self.newline_delimited:
            return None
        return buffer.find(b"\n") + 1 or -1

    def encode_many(self, payloads: Iterable[bytes], out: bytearray) -> list[int]:
        """Append the frames of ``payloads``, and return the length of ``out`` after each.

        Raises:
            FramingError: as :meth:`encode`; ``out`` is as it was.
        """
        length_before = len(out)
        ends = []
        try:
            for payload in payloads:
                self.encode(payload, out)
                ends.append(len(out))
        except BaseException:
            del out[length_before:]
            raise
        return ends

    def payloads(self, buffer: Buffer, frames: Frames) -> list[bytes]:
        """Return the payload of each frame, copied out of ``buffer``."""
        head, tail = self.header_bytes, self.trailer_bytes
        whole = bytes(buffer)
        return [
            whole[begin + head : end - tail]
            for begin, end in zip(frames.begins, frames.ends, strict=True)
        ]
