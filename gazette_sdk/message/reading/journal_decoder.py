"""Content of one journal to runs of messages, a chunk at a time (message section 12)."""

from __future__ import annotations

import abc
import logging
from itertools import repeat
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from gazette_sdk.errors import DecodeError, DesyncError, FramingError, TornFrameError
from gazette_sdk.framing import Cut, Cutter, Frames, Framing
from gazette_sdk.framing.base import Buffer
from gazette_sdk.message.envelope import Envelope
from gazette_sdk.message.kinds.base import Decoded, Kind
from gazette_sdk.message.sequencing.run import (
    NO_STAMPS,
    InvalidUuidError,
    Message,
    Run,
    ShortRun,
    Stamps,
    parse_text_uuids,
    parse_uuid_number,
    stamps_of,
)

__all__ = ["ContentDecoder", "JournalDecoder", "Part"]

T = TypeVar("T")
M = TypeVar("M")

_log = logging.getLogger(__name__)

_NO_OFFSETS = np.empty(0, np.int64)

_SHORT_MAX = 8
"""Up to so many messages are handled one by one: as arrays they would take several times as long.
A reader at the write head mostly finds one."""


class Part(NamedTuple):
    """Whole frames of a journal.

    Attributes:
        buffer: content; valid until the next is fed.
        frames: where its frames are; at least one.
        offset: the journal's offset of the buffer's first byte.
    """

    buffer: Buffer
    frames: Frames
    offset: int


class ContentDecoder(abc.ABC, Generic[T]):
    """Cuts one journal's content into frames as it arrives, and knows what is wrong with it. Pure.

    A :class:`~gazette_sdk.message.reading.pump.Decoder` of what subclasses make of frames.

    Attributes:
        described: what messages are decoded as, for errors.

    Args:
        journal: the journal's name, as it was asked for.
        framing: its framing.
        offset: where content begins, at the boundary of a frame.
    """

    described: str = "a message"

    def __init__(self, journal: str, framing: Framing, offset: int) -> None:
        self.journal = journal
        self.framing = framing
        self._cutter = Cutter(framing, offset)
        self._offset = offset
        self._rest: Part | None = None
        self._behind: FramingError | None = None

    @abc.abstractmethod
    def decode(self, part: Part) -> tuple[Run[T], Exception | None]:
        """The messages of frames, up to the first that cannot be decoded, and why it cannot."""

    @abc.abstractmethod
    def empty(self) -> Run[T]:
        """A run without messages."""

    @property
    def offset(self) -> int:
        """Offset behind the last frame that was dealt with."""
        return self._offset

    def feed(self, content: bytes) -> tuple[Run[T], FramingError | None]:
        """Decode the next content.

        Returns:
            All messages which became whole, and the error that stands behind them, if any:
            ``feed(b"")`` then goes on behind what the error is about.
        """
        if self._rest is not None or self._behind is not None:
            assert not content, "what stands behind an error comes first"
            return self._go_on()
        return self._take(self._cutter.feed(content))

    def finish(self) -> tuple[Run[T], FramingError | None]:
        """The journal has no more content now.

        Returns:
            A message which only the end of content made whole, and an error, if there is content
            left which is no message.
        """
        return self._take(self._cutter.finish())

    def jump(self, offset: int) -> FramingError | None:
        """Go on at a later offset: the content between was deleted.

        Returns:
            An error, if the deleted content begins within a message.
        """
        before = self._cutter.offset
        if offset == before + self._cutter.pending_bytes:
            return None
        torn = self._cutter.jump(offset)
        self._offset = offset
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

    def _take(self, cut: Cut) -> tuple[Run[T], FramingError | None]:
        if cut.frames.error is not None:
            self._behind = self._explained(cut.frames.error)
        if len(cut.frames):
            self._rest = Part(cut.buffer, cut.frames, cut.offset)
        return self._go_on()

    def _go_on(self) -> tuple[Run[T], FramingError | None]:
        """Decode the frames at hand, up to the first that is bad; then to what is behind them."""
        part, self._rest = self._rest, None
        run = self.empty()
        if part is not None:
            run, cause = self.decode(part)
            if cause is not None:
                frames, bad = part.frames, len(run)
                self._offset = part.offset + frames.ends[bad]
                if bad + 1 < len(frames):
                    frames = Frames(frames.begins[bad + 1 :], frames.ends[bad + 1 :], 0)
                    self._rest = Part(part.buffer, frames, part.offset)
                return run, self._undecodable(part.offset + part.frames.begins[bad], cause)
        self._offset = self._cutter.offset
        behind, self._behind = self._behind, None
        return run, behind

    def _undecodable(self, begin: int, cause: Exception) -> DecodeError:
        what = (
            "has no valid UUID"
            if isinstance(cause, InvalidUuidError)
            else f"cannot be decoded as {self.described}"
        )
        error = DecodeError(
            f"{self.journal}: the message at offset {begin} {what}: {_reason(cause)}; {_REMEDY}",
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
                f"{text}; the content is no {self.framing.content_type}, or its writer is broken",
                skipped=error.skipped,
                journal=self.journal,
                offset=offset,
            )
        for kind in (TornFrameError, DecodeError):
            if isinstance(error, kind):
                return kind(f"{text}; {_REMEDY}", journal=self.journal, offset=offset)
        return FramingError(f"{text}; {_REMEDY}", journal=self.journal, offset=offset)


def _reason(cause: Exception) -> str:
    """In one line, whatever an application's own class raised."""
    lines = [line.strip() for line in str(cause).splitlines()]
    return "; ".join(filter(None, lines)) or type(cause).__name__


_REMEDY = "mend its writer, and read with on_error='skip' or from an offset behind it"


class JournalDecoder(ContentDecoder[Envelope[M]]):
    """Decodes one journal's messages to envelopes.

    Args:
        journal: the journal's name, as it was asked for.
        framing: its framing.
        kind: adapter of the messages' class.
        offset: where content begins, at the boundary of a frame.
        sequenced: parse UUIDs, too: runs are to be sequenced. Without it, the arrays of what they
            say are empty, and a UUID that is none is an error when it is asked for.
    """

    def __init__(
        self,
        journal: str,
        framing: Framing,
        kind: Kind[M],
        offset: int,
        *,
        sequenced: bool = False,
    ) -> None:
        super().__init__(journal, framing, offset)
        self.described = kind.message_type.__qualname__
        self._kind = kind
        self._sequenced = sequenced
        self._empty: Run[Envelope[M]] = Run(journal, _NO_OFFSETS, _NO_OFFSETS, *NO_STAMPS, [])

    def empty(self) -> Run[Envelope[M]]:
        """A run without messages."""
        return self._empty

    def decode(self, part: Part) -> tuple[Run[Envelope[M]], Exception | None]:
        """Decode frames in bulk."""
        frames = part.frames
        decoded = self._kind.decode(self.framing, part.buffer, frames)
        if self._sequenced and len(frames) <= _SHORT_MAX:
            return self._few(part, decoded)
        cause = decoded.error
        stamps = NO_STAMPS
        if self._sequenced:
            stamps, invalid = _stamps(decoded)
            cause = invalid or cause
        begins, ends = (each + part.offset for each in frames.arrays())
        if cause is not None:
            count = len(stamps.clocks) if self._sequenced else len(decoded.messages)
            begins, ends = begins[:count], ends[:count]
        # The shortest argument ends it: messages stop before one that cannot be decoded.
        envelopes = list(
            map(
                Envelope,
                repeat(self.journal),
                begins.tolist(),
                ends.tolist(),
                decoded.messages,
                decoded.uuids,
            )
        )
        return Run(self.journal, begins, ends, *stamps, envelopes), cause

    def _few(self, part: Part, decoded: Decoded[M]) -> tuple[Run[Envelope[M]], Exception | None]:
        """As :meth:`decode`, message by message."""
        journal, offset, frames = self.journal, part.offset, part.frames
        found: list[Message[Envelope[M]]] = []
        # The shortest argument ends it: messages stop before one that cannot be decoded.
        rows = zip(frames.begins, frames.ends, decoded.messages, decoded.uuids, strict=False)
        for begin, end, message, raw in rows:
            try:
                producer, clock, flags = parse_uuid_number(raw)
            except ValueError as error:
                return self._short(found), InvalidUuidError(len(found), str(error))
            begin, end = begin + offset, end + offset  # noqa: PLW2901
            envelope = Envelope(journal, begin, end, message, raw)
            found.append(Message(journal, begin, end, producer, clock, flags, envelope))
        return self._short(found), decoded.error

    def _short(self, messages: list[Message[Envelope[M]]]) -> Run[Envelope[M]]:
        return ShortRun(self.journal, messages) if messages else self._empty


def _stamps(decoded: Decoded[M]) -> tuple[Stamps, Exception | None]:
    """What the UUIDs of messages say, up to the first that is none, and why it is none."""
    if decoded.texts is not None:
        stamps = parse_text_uuids(decoded.texts)
        if stamps is not None:
            return stamps, None
    try:
        return stamps_of(decoded.uuids), None
    except InvalidUuidError as error:
        return stamps_of(decoded.uuids[: error.index]), error
