"""Cutter of a journal's content, received in chunks of any size, into frames."""

from __future__ import annotations

from dataclasses import dataclass

from gazette_sdk.errors import FramingError, TornFrameError
from gazette_sdk.framing.base import Buffer, Frames, Framing

__all__ = ["Cut", "Cutter"]


@dataclass(slots=True)
class Cut:
    """Frames that one chunk completed.

    Attributes:
        buffer: content; valid until the next call of :meth:`Cutter.feed`.
        frames: positions of its frames.
        offset: the journal's offset of the buffer's first byte.
    """

    buffer: Buffer
    frames: Frames
    offset: int


class Cutter:
    """Cutter of one journal's content into frames.

    Args:
        framing: the journal's framing.
        offset: begin of the content, at the boundary of a frame.
        frame_bytes_max: longer frames are an error; by default the framing's bound.

    Attributes:
        offset: the journal's offset behind the last frame, to resume reading from.
    """

    def __init__(
        self, framing: Framing, offset: int = 0, *, frame_bytes_max: int | None = None
    ) -> None:
        self.offset = offset
        self._framing = framing
        self._stream = framing.stream()
        self._pending: Buffer = b""
        self._searched = 0
        self._frame_bytes_max = frame_bytes_max or framing.frame_bytes_max

    @property
    def pending_bytes(self) -> int:
        """Length of the incomplete frame at :attr:`offset`."""
        return len(self._pending)

    def feed(self, *pieces: bytes) -> Cut:
        """Cut the next content, in pieces, and keep an incomplete frame for the next call."""
        buffer: Buffer
        if isinstance(self._pending, bytearray):
            for piece in pieces:
                self._pending += piece
            buffer = self._pending
        elif not self._pending and len(pieces) == 1:
            buffer = pieces[0]
        else:
            buffer = b"".join((self._pending, *pieces))
        return self._cut(buffer, final=False)

    def finish(self) -> Cut:
        """Cut the rest when the content has ended: an incomplete frame is an error."""
        return self._cut(self._pending, final=True)

    def jump(self, offset: int) -> TornFrameError | None:
        """Continue at a later offset, because the content between was deleted.

        Returns:
            An error, if the deleted content begins inside a frame.
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
                    f"a frame of more than {self._frame_bytes_max} bytes; if such messages are "
                    f"legal, set {type(self._framing).__name__}.frame_bytes_max before reading",
                    offset=self.offset,
                )
        else:
            self._pending = bytes(buffer[consumed:])
            self._searched = len(self._pending) if frames.error is None else 0
        self.offset += consumed
        return cut
