"""Cutter of a journal's content, received in chunks of any size, into frames."""

from __future__ import annotations

from dataclasses import dataclass

from gazette_sdk.errors import FramingError, OversizedFrameError, TornFrameError
from gazette_sdk.framing.base import Buffer, Frames, Framing
from gazette_sdk.user_code import check_raised

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

    A frame that is too long is an error as soon as that is known. Its bytes are dropped up to its
    end, if the framing finds that, and cutting continues after it.

    Args:
        framing: the journal's framing.
        offset: begin of the content, at the boundary of a frame.
        frame_bytes_max: longer frames are an error; by default the framing's bound.

    Attributes:
        offset: the journal's offset after the last frame that is cut or passed, to resume
            reading from.
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
        # Of a frame that is too long: its header, and the number of bytes that were dropped.
        self._head = b""
        self._passed = 0

    @property
    def pending_bytes(self) -> int:
        """Length of the incomplete frame at :attr:`offset`."""
        return self._passed + len(self._pending)

    def feed(self, *pieces: bytes) -> Cut:
        """Cut the next content, in pieces, and keep an incomplete frame for the next call."""
        if self._passed:
            return self._pass_over(b"".join(pieces))
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
        if self._passed:
            error = TornFrameError(
                f"unexpected EOF: {self._passed} bytes of a frame that is too long",
                offset=self.offset,
            )
            return Cut(b"", Frames([], [], 0, error), self.offset)
        return self._cut(self._pending, final=True)

    def jump(self, offset: int) -> TornFrameError | None:
        """Continue at a later offset, because the content between was deleted.

        Returns:
            An error, if the deleted content begins inside a frame.
        """
        torn = None
        if self.pending_bytes:
            torn = TornFrameError(
                f"content from offset {self.offset + self.pending_bytes} to {offset} was deleted,"
                " within a frame",
                offset=self.offset,
            )
        self._pending = b""
        self._searched = self._passed = 0
        self._stream = self._framing.stream()
        self.offset = offset
        return torn

    def _cut(self, buffer: Buffer, *, final: bool) -> Cut:
        try:
            frames = self._stream.cut(buffer, searched=self._searched, final=final)
        except BaseException as error:
            check_raised(error, self._stream.cut)
            raise
        if len(buffer) > self._frame_bytes_max:
            frames = self._up_to_oversized(frames)
        cut = Cut(buffer, frames, self.offset)
        if frames.error is not None and frames.error.offset is not None:
            frames.error.offset += self.offset
        consumed = frames.consumed
        if consumed == 0 and len(buffer) > 0:
            # A long frame grows in place, so that its cost stays linear in its length.
            self._pending = buffer if isinstance(buffer, bytearray) else bytearray(buffer)
            self._searched = len(buffer)
            if len(buffer) > self._frame_bytes_max and frames.error is None:
                frames.error = self._begin_oversized(buffer)
        else:
            self._pending = bytes(buffer[consumed:])
            self._searched = len(self._pending) if frames.error is None else 0
        self.offset += consumed
        return cut

    # ---------------------------------------------------------- oversized frames

    def _up_to_oversized(self, frames: Frames) -> Frames:
        """Return the frames before the first that is too long, and the error of that."""
        begins, ends = frames.begins, frames.ends
        for index, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            if end - begin > self._frame_bytes_max:
                return Frames(begins[:index], ends[:index], end, self._oversized(begin))
        return frames

    def _begin_oversized(self, buffer: Buffer) -> FramingError:
        """Return the error of an incomplete frame that is too long, and drop its bytes."""
        head = bytes(buffer[: self._framing.header_bytes])
        if self._stream.find_end(head, 0, buffer) is None:
            return FramingError(str(self._oversized(0)), offset=self.offset)
        self._head = head
        self._passed = len(buffer)
        self._pending = b""
        self._searched = 0
        return self._oversized(self.offset)

    def _oversized(self, offset: int) -> OversizedFrameError:
        return OversizedFrameError(
            f"a frame of more than {self._frame_bytes_max} bytes; if such messages are legal, set"
            f" {type(self._framing).__name__}.frame_bytes_max before reading",
            offset=offset,
        )

    def _pass_over(self, buffer: bytes) -> Cut:
        """Drop the content of a frame that is too long, and cut what follows."""
        end = self._stream.find_end(self._head, self._passed, buffer)
        assert end is not None, "the framing found no end before"
        if end < 0:
            self._passed += len(buffer)
            return Cut(b"", Frames([], [], 0), self.offset)
        self.offset += self._passed + end
        self._passed = 0
        return self._cut(buffer[end:], final=False)
