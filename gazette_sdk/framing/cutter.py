"""Cuts a journal into frames as its content arrives, in chunks of any size."""

from __future__ import annotations

from dataclasses import dataclass

from gazette_sdk.errors import FramingError, TornFrameError
from gazette_sdk.framing.base import Buffer, Frames, Framing

__all__ = ["FRAME_BYTES_MAX", "Cut", "Cutter"]

FRAME_BYTES_MAX = 1 << 30
"""A frame which is longer than 1 GiB is taken for a corrupt one: waiting for its end would only
fill memory. Brokers bound one append to less by default."""


@dataclass(slots=True)
class Cut:
    """Frames which became whole with one chunk.

    Attributes:
        buffer: content; valid until the next call of :meth:`Cutter.feed`.
        frames: where its frames are.
        offset: the journal's offset of the buffer's first byte.
    """

    buffer: Buffer
    frames: Frames
    offset: int


class Cutter:
    """Cuts one journal's content into frames.

    Args:
        framing: the journal's framing.
        offset: where the content begins, at the boundary of a frame.
        frame_bytes_max: longer frames are an error.

    Attributes:
        offset: the journal's offset behind the last frame: where to read on from.
    """

    def __init__(
        self, framing: Framing, offset: int = 0, *, frame_bytes_max: int = FRAME_BYTES_MAX
    ) -> None:
        self.offset = offset
        self._framing = framing
        self._stream = framing.stream()
        self._pending: Buffer = b""
        self._searched = 0
        self._frame_bytes_max = frame_bytes_max

    @property
    def pending_bytes(self) -> int:
        """Length of the incomplete frame at :attr:`offset`."""
        return len(self._pending)

    def feed(self, chunk: bytes) -> Cut:
        """Cut the next chunk; what remains of it is kept for the next call."""
        buffer: Buffer
        if not self._pending:
            buffer = chunk
        elif isinstance(self._pending, bytearray):
            self._pending += chunk
            buffer = self._pending
        else:
            buffer = self._pending + chunk
        return self._cut(buffer, final=False)

    def finish(self) -> Cut:
        """The content has ended: what remains is an error, unless it is nothing."""
        return self._cut(self._pending, final=True)

    def jump(self, offset: int) -> TornFrameError | None:
        """Go on at a later offset, because the content between was deleted.

        Returns:
            An error, if the deleted content begins within a frame.
        """
        torn = None
        if self._pending:
            torn = TornFrameError(
                f"content from offset {self.offset + len(self._pending)} to {offset} was deleted,"
                " within a frame",
                offset=self.offset,
            )
        self._pending = b""
        self._searched = 0
        self._stream = self._framing.stream()
        self.offset = offset
        return torn

    def _cut(self, buffer: Buffer, *, final: bool) -> Cut:
        frames = self._stream.cut(buffer, searched=self._searched, final=final)
        cut = Cut(buffer, frames, self.offset)
        if frames.error is not None and frames.error.offset is not None:
            frames.error.offset += self.offset
        consumed = frames.consumed
        if consumed == 0 and len(buffer) > 0:
            # A long frame grows in place, so that its cost stays linear in its length.
            self._pending = buffer if isinstance(buffer, bytearray) else bytearray(buffer)
            self._searched = len(buffer)
            if len(buffer) > self._frame_bytes_max and frames.error is None:
                frames.error = FramingError(
                    f"a frame of more than {self._frame_bytes_max} bytes", offset=self.offset
                )
        else:
            self._pending = bytes(buffer[consumed:])
            self._searched = len(self._pending) if frames.error is None else 0
        self.offset += consumed
        return cut
