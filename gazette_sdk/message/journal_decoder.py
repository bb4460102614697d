"""Content of one journal to envelopes, a chunk at a time (message section 12)."""

from __future__ import annotations

import logging
from itertools import repeat
from typing import Generic, TypeVar

from gazette_sdk.errors import DecodeError, DesyncError, FramingError, TornFrameError
from gazette_sdk.framing import Cut, Cutter, Framing
from gazette_sdk.message.envelope import Envelope
from gazette_sdk.message.kinds import Kind

__all__ = ["JournalDecoder"]

M = TypeVar("M")

_log = logging.getLogger(__name__)


class JournalDecoder(Generic[M]):
    """Cuts and decodes one journal's content as it arrives. Pure.

    Args:
        journal: the journal's name, as it was asked for.
        framing: its framing.
        kind: adapter of the messages' class.
        offset: where content begins, at the boundary of a frame.
    """

    def __init__(self, journal: str, framing: Framing, kind: Kind[M], offset: int) -> None:
        self.journal = journal
        self._framing = framing
        self._kind = kind
        self._cutter = Cutter(framing, offset)

    @property
    def offset(self) -> int:
        """Offset behind the last whole frame."""
        return self._cutter.offset

    def feed(self, chunk: bytes) -> tuple[list[Envelope[M]], FramingError | None]:
        """Decode the next chunk.

        Returns:
            The envelopes of all messages which became whole, and the error that stands behind
            them, if any.
        """
        return self._decode(self._cutter.feed(chunk))

    def jump(self, offset: int) -> FramingError | None:
        """Go on at a later offset: the content between was deleted.

        Returns:
            An error, if the deleted content begins within a message.
        """
        if offset == self._cutter.offset + self._cutter.pending_bytes:
            return None
        before = self._cutter.offset
        torn = self._cutter.jump(offset)
        if torn is not None:
            return self._explained(torn)
        if before >= 0:
            _log.warning(
                "%s: content of offsets %d to %d is gone; reading on at %d",
                self.journal,
                before,
                offset,
                offset,
            )
        return None

    def finish(self) -> FramingError | None:
        """The journal has no more content now.

        Returns:
            An error, if it ends within a message.
        """
        error = self._cutter.finish().frames.error
        return None if error is None else self._explained(error)

    def _decode(self, cut: Cut) -> tuple[list[Envelope[M]], FramingError | None]:
        frames = cut.frames
        if not frames.ends:
            return [], None if frames.error is None else self._explained(frames.error)
        decoded = self._kind.decode(self._framing, cut.buffer, frames)
        base = cut.offset
        # The shortest argument ends it: messages stop before one that cannot be decoded.
        envelopes = list(
            map(
                Envelope,
                repeat(self.journal),
                [base + begin for begin in frames.begins],
                [base + end for end in frames.ends],
                decoded.messages,
                decoded.uuids,
            )
        )
        if decoded.error is not None:
            begin = base + frames.begins[len(envelopes)]
            return envelopes, self._undecodable(begin, decoded.error)
        return envelopes, None if frames.error is None else self._explained(frames.error)

    def _undecodable(self, begin: int, cause: Exception) -> DecodeError:
        name = self._kind.message_type.__qualname__
        error = DecodeError(
            f"{self.journal}: the message at offset {begin} cannot be decoded as {name}: {cause};"
            " read from an offset behind it, or mend its writer",
            journal=self.journal,
            offset=begin,
        )
        error.__cause__ = cause
        return error

    def _explained(self, error: FramingError) -> FramingError:
        """The error of a framing, which knows no journal, with the journal's name."""
        offset = self._cutter.offset if error.offset is None else error.offset
        text = f"{self.journal}: offset {offset}: {error}"
        if isinstance(error, DesyncError):
            return DesyncError(
                f"{text}; the content is no {self._framing.content_type}, or its writer is broken",
                skipped=error.skipped,
                journal=self.journal,
                offset=offset,
            )
        kind = TornFrameError if isinstance(error, TornFrameError) else FramingError
        return kind(
            f"{text}; read from an offset behind it, or mend its writer",
            journal=self.journal,
            offset=offset,
        )
