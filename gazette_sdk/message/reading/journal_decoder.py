"""Decoders of a journal: content to runs of messages, in chunks (message section 12). Pure."""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable
from itertools import repeat
from typing import Generic, TypeVar

from gazette_sdk.errors import (
    DecodeError,
    DesyncError,
    FramingError,
    OversizedFrameError,
    TornFrameError,
    ValidationError,
)
from gazette_sdk.framing import Cut, Cutter, Frames, Framing, framing_for
from gazette_sdk.framing.registry import NO_FRAMING_REMEDY
from gazette_sdk.message.envelope import Envelope
from gazette_sdk.message.kinds import Decoded, Kind, kind_of
from gazette_sdk.message.reading.content_queue import Opened
from gazette_sdk.message.sequencing.run import (
    NO_OFFSETS,
    NO_STAMPS,
    InvalidUuidError,
    Message,
    Run,
    ShortRun,
    parse_text_uuids,
    valid_stamps,
)
from gazette_sdk.message.uuid import parse_raw_uuid
from gazette_sdk.user_code import check_raised, text_of

__all__ = ["ContentDecoder", "JournalDecoder", "framing_and_kind", "journal_decoder"]

T = TypeVar("T")
M = TypeVar("M")

_log = logging.getLogger(__name__)

_SHORT_MAX = 8
"""Up to so many messages are decoded one by one: arrays of them would take several times as long.
A reader at the write head mostly finds one."""


class ContentDecoder(abc.ABC, Generic[T]):
    """Decoder of one journal's content, which arrives in chunks of any size.

    Args:
        journal: name of the journal, as the user gave it.
        framing: its framing.
        offset: offset at which content begins, at the boundary of a frame.
        empty: a run without messages.
        described: name of what messages are decoded to, for errors.

    Attributes:
        offset: offset behind the last frame that was decoded or skipped.
        select_run: returns the messages of a run that are wanted; None if all are.
    """

    def __init__(
        self, journal: str, framing: Framing, offset: int, empty: Run[T], described: str
    ) -> None:
        self.journal = journal
        self.framing = framing
        self.offset = offset
        self.described = described
        self.select_run: Callable[[Run[T]], Run[T]] | None = None
        self._empty = empty
        self._cutter = Cutter(framing, offset)
        # Frames behind a bad one, and the error behind all frames.
        self._rest: Cut | None = None
        self._behind: FramingError | None = None

    @abc.abstractmethod
    def decode(self, cut: Cut) -> tuple[Run[T], Exception | None]:
        """Return the messages of frames, up to the first bad one, and why that is bad.

        Args:
            cut: at least one frame.
        """

    def feed(self, *pieces: bytes) -> tuple[Run[T], FramingError | None]:
        """Decode the next content, in pieces.

        Returns:
            All messages that became whole, and the error behind them, if any: then :attr:`offset`
            is behind the content that the error is about, and ``feed()`` goes on there.
        """
        if self._rest is not None or self._behind is not None:
            assert not any(pieces), "what stands behind an error comes first"
            return self._selected(*self._decode_rest())
        return self._selected(*self._decode_cut(self._cutter.feed(*pieces)))

    def finish(self) -> tuple[Run[T], FramingError | None]:
        """Decode the last content, behind which the journal has no more for now.

        Returns:
            A message that only the end of content made whole, and an error, if there is content
            left that is no message.
        """
        return self._selected(*self._decode_cut(self._cutter.finish()))

    def jump(self, offset: int) -> FramingError | None:
        """Go on at a later offset: the content between was deleted.

        Returns:
            An error, if the deleted content begins within a message.
        """
        before = self._cutter.offset
        if offset == before + self._cutter.pending_bytes:
            return None
        torn = self._cutter.jump(offset)
        self.offset = offset
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

    def _selected(
        self, run: Run[T], error: FramingError | None
    ) -> tuple[Run[T], FramingError | None]:
        return (run if self.select_run is None else self.select_run(run)), error

    def _decode_cut(self, cut: Cut) -> tuple[Run[T], FramingError | None]:
        frames = cut.frames
        if frames.error is not None:
            self._behind = self._explained(frames.error)
        if len(frames.ends):
            self._rest = cut
        return self._decode_rest()

    def _decode_rest(self) -> tuple[Run[T], FramingError | None]:
        """Decode the frames that are left up to the first bad one, or the error behind them."""
        cut, self._rest = self._rest, None
        run = self._empty
        if cut is not None:
            try:
                run, cause = self.decode(cut)
            except BaseException as error:  # of code of the framing, or of the class
                check_raised(error, self.decode)
                raise
            if cause is not None:
                frames, bad = cut.frames, len(run)
                self.offset = cut.offset + int(frames.ends[bad])
                if bad + 1 < len(frames):
                    rest = Frames(frames.begins[bad + 1 :], frames.ends[bad + 1 :], 0)
                    self._rest = Cut(cut.buffer, rest, cut.offset)
                return run, self._undecodable(cut, bad, cause)
        self.offset = self._cutter.offset
        behind, self._behind = self._behind, None
        return run, behind

    def _undecodable(self, cut: Cut, bad: int, cause: Exception) -> DecodeError:
        begin, end = int(cut.frames.begins[bad]), int(cut.frames.ends[bad])
        offset = cut.offset + begin
        what = (
            "has no valid UUID"
            if isinstance(cause, InvalidUuidError)
            else f"cannot be decoded as {self.described}"
        )
        error = DecodeError(
            f"{self.journal}: the message at offset {offset} {what}: {_in_one_line(cause)};"
            f" {_REMEDY}",
            frame=bytes(cut.buffer[begin:end]),
            journal=self.journal,
            offset=offset,
        )
        error.__cause__ = cause
        return error

    def _explained(self, error: FramingError) -> FramingError:
        """Return the error of a framing with the journal's name, which framings do not know."""
        offset = self._cutter.offset if error.offset is None else error.offset
        text = f"{self.journal}: offset {offset}: {error}"
        if isinstance(error, DesyncError):
            return DesyncError(
                f"{text}; the content is no {self.framing.content_type}, or its writer is broken",
                skipped=error.skipped,
                journal=self.journal,
                offset=offset,
            )
        for kind in (TornFrameError, DecodeError, OversizedFrameError):
            if isinstance(error, kind):
                return kind(f"{text}; {_REMEDY}", journal=self.journal, offset=offset)
        return FramingError(f"{text}; {_REMEDY}", journal=self.journal, offset=offset)


def _in_one_line(cause: Exception) -> str:
    lines = [line.strip() for line in text_of(cause).splitlines()]
    return "; ".join(filter(None, lines)) or type(cause).__name__


_REMEDY = "mend its writer, and read with on_error='skip' or from an offset behind it"


class JournalDecoder(ContentDecoder[Envelope[M]]):
    """Decoder of one journal's messages to envelopes.

    Args:
        journal: name of the journal, as the user gave it.
        framing: its framing.
        kind: adapter of the messages' class.
        offset: offset at which content begins, at the boundary of a frame.
        sequenced: parse UUIDs, too: runs are to be sequenced. Without it, the arrays of their
            parts are empty, and an invalid UUID is an error when it is asked for.
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
        empty: Run[Envelope[M]] = Run(journal, NO_OFFSETS, NO_OFFSETS, *NO_STAMPS, [])
        super().__init__(journal, framing, offset, empty, kind.message_type.__qualname__)
        self._kind = kind
        self._sequenced = sequenced

    def decode(self, cut: Cut) -> tuple[Run[Envelope[M]], Exception | None]:
        """Decode frames in bulk; a few one by one."""
        frames = cut.frames
        decoded = self._kind.decode(self.framing, cut.buffer, frames)
        if self._sequenced and len(frames.ends) <= _SHORT_MAX:
            return self._decode_few(cut, decoded)
        cause = decoded.error
        stamps = NO_STAMPS
        if self._sequenced:
            found = None if decoded.texts is None else parse_text_uuids(decoded.texts)
            stamps, invalid = valid_stamps(decoded.uuids) if found is None else (found, None)
            cause = invalid or cause
        begins, ends = (each + cut.offset for each in frames.arrays())
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

    def _decode_few(
        self, cut: Cut, decoded: Decoded[M]
    ) -> tuple[Run[Envelope[M]], Exception | None]:
        """Return the same as :meth:`decode`, without arrays."""
        journal, offset, frames = self.journal, cut.offset, cut.frames
        found: list[Message[Envelope[M]]] = []
        cause = decoded.error
        # The shortest argument ends it: messages stop before one that cannot be decoded.
        rows = zip(frames.begins, frames.ends, decoded.messages, decoded.uuids, strict=False)
        for at, until, message, raw in rows:
            try:
                producer, clock, flags = parse_raw_uuid(raw)
            except ValueError as error:
                cause = InvalidUuidError(len(found), str(error))
                break
            begin, end = at + offset, until + offset
            envelope = Envelope(journal, begin, end, message, raw)
            found.append(Message(journal, begin, end, producer, clock, flags, envelope))
        return ShortRun(journal, found) if found else self._empty, cause


def framing_and_kind(
    opened: Opened, message_type: type[M], *, sequenced: bool
) -> tuple[Framing, Kind[M]]:
    """Return the framing of a journal, and the adapter of the messages' class.

    Args:
        opened: the journal.
        message_type: class of the messages.
        sequenced: they are to be sequenced, for which the class must hold UUIDs.

    Raises:
        FramingError: its content type has no framing.
        ValidationError: its framing holds no messages of the class.
    """
    journal = opened.journal
    try:
        framing = framing_for(opened.content_type)
        return framing, kind_of(message_type, framing.form, needs_uuid=sequenced)
    except FramingError as error:
        raise FramingError(
            f"{journal}: determining framing: {error}; {NO_FRAMING_REMEDY}", journal=journal
        ) from error
    except ValidationError as error:
        reason = f"{journal}: {error.reason}"
        raise ValidationError(reason, kind=error.kind, journal=journal) from error


def journal_decoder(message_type: type[M], opened: Opened, *, sequenced: bool) -> JournalDecoder[M]:
    """Return the decoder of a journal to envelopes; raises as :func:`framing_and_kind`."""
    framing, kind = framing_and_kind(opened, message_type, sequenced=sequenced)
    return JournalDecoder(opened.journal, framing, kind, opened.offset, sequenced=sequenced)
