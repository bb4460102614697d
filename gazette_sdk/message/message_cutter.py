"""Cutter of a journal's content into messages, without the classes that a program declares.

Tools count messages by it, find those of a time, and read a few of them at an offset.
"""

from __future__ import annotations

from typing import Any

from gazette_sdk.errors import FramingError, OffsetNotYetAvailableError, ValidationError
from gazette_sdk.framing import Cut, Cutter, Frames, JsonLines, framing_for
from gazette_sdk.message.kinds import Kind, kind_of
from gazette_sdk.message.uuid import parse_raw_uuid, time_of_clock
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.labels import CONTENT_TYPE, value_of
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.journal_reader import OffsetJumpError, RetryReader

READ_PATIENCE_S = 10.0
"""Longest time without an answer of brokers, for a read of a few messages."""

_TYPES: dict[str, type[Any]] = {"json": dict, "csv": list}
"""Classes that hold any message of a form, by the form."""


class MessageCutter:
    """Cutter of one journal's content into messages.

    Content without a known content type is cut into lines.

    Args:
        spec: the journal.
        offset: offset of the first content; -1 if it is not known yet.
        since_clock: messages whose UUID has an earlier clock are left out; 0 for none.

    Attributes:
        offset: offset after the last message that was returned or left out.
    """

    def __init__(self, spec: pb.JournalSpec, offset: int, since_clock: int = 0) -> None:
        try:
            self._framing = framing_for(value_of(spec.labels, CONTENT_TYPE))
        except FramingError:
            self._framing = JsonLines()
            since_clock = 0
        self._cutter = Cutter(self._framing, offset)
        self._journal = spec.name
        self._error: FramingError | None = None
        self._since_clock = since_clock
        self._kind = self._kind_of_form() if since_clock else None
        self.offset = offset

    def _kind_of_form(self) -> Kind[Any] | None:
        try:
            return kind_of(_TYPES[self._framing.form], self._framing.form)
        except (KeyError, ValidationError):
            return None

    def begin(self, offset: int) -> None:
        """Continue at another offset: the content between does not exist."""
        self._cutter.jump(offset)
        self.offset = offset

    def feed(self, content: bytes, count_max: int | None) -> tuple[bytes, int]:
        """Return the messages that content completes, and their number.

        Args:
            content: the next content.
            count_max: greatest number of messages to return; None for no limit. What follows them
                is dropped.

        Raises:
            FramingError: the content after the messages returned so far is no frame.
        """
        self._raise_error()
        cut = self._cutter.feed(content)
        begins, ends = cut.frames.begins, cut.frames.ends
        self._error = cut.frames.error
        if not ends:
            self._raise_error()
        wanted = range(len(ends)) if self._kind is None else self._wanted(self._kind, cut)
        self.offset = cut.offset + (ends[-1] if ends else 0)
        if count_max is not None and len(wanted) >= count_max:
            wanted = wanted[:count_max]
            self.offset = cut.offset + (ends[wanted[-1]] if wanted else 0)
        view = memoryview(cut.buffer)
        return b"".join(view[begins[at] : ends[at]] for at in wanted), len(wanted)

    def published_at(self, message: bytes) -> float | None:
        """Return the publication time of a message that was returned, in Unix seconds.

        Returns:
            None if it has no UUID, or one at a place that only its class knows, as protobuf does.
        """
        kind = self._kind_of_form()
        if kind is None:
            return None
        decoded = kind.decode(self._framing, message, Frames([0], [len(message)], 0))
        try:
            _, clock, _ = parse_raw_uuid(decoded.uuids[0])
        except (IndexError, ValueError):
            return None
        return time_of_clock(clock).timestamp() if clock else None

    def finish(self) -> bytes:
        """Return the rest: a message that is not complete, such as a line without its newline.

        Raises:
            FramingError: as :meth:`feed`.
        """
        self._raise_error()
        cut = self._cutter.finish()
        rest = bytes(cut.buffer)
        self.offset = cut.offset + len(rest)
        return rest

    def _raise_error(self) -> None:
        if self._error is not None:
            raise FramingError(
                f"{self._journal}: {self._error}; read without -n and --since, which copies all "
                "content",
                journal=self._journal,
                offset=self._error.offset,
            )

    def _wanted(self, kind: Kind[Any], cut: Cut) -> list[int]:
        """Return the indices of the frames that are not left out."""
        begins, ends = cut.frames.begins, cut.frames.ends
        wanted: list[int] = []
        at = 0
        while at < len(ends):
            frames = Frames(begins[at:], ends[at:], 0)
            decoded = kind.decode(self._framing, cut.buffer, frames)
            wanted += [
                at + index
                for index, raw in enumerate(decoded.uuids[: len(decoded.messages)])
                if self._is_wanted(raw)
            ]
            at += len(decoded.messages)
            if decoded.error is not None and at < len(ends):
                wanted.append(at)  # content that is no message has no time
                at += 1
        return wanted

    def _is_wanted(self, raw: Any) -> bool:
        try:
            _, clock, _ = parse_raw_uuid(raw)
        except ValueError:
            return True
        return not clock or clock >= self._since_clock


async def records_of(
    transport: Transport, spec: pb.JournalSpec, offset: int, count: int
) -> tuple[bytes, int, int]:
    """Return records of a journal from an offset on, the offset after them, and their number.

    These are fewer than ``count`` if the journal has no more. Content that is no record counts as
    one of a single byte: it is passed over from there.

    Raises:
        GazetteError: the journal cannot be read.
    """
    cutter = MessageCutter(spec, offset)
    request = pb.ReadRequest(journal=spec.name, offset=offset)
    reader = RetryReader(transport, request, patience_s=READ_PATIENCE_S)
    records, found = [], 0
    content = b""
    try:
        while found < count:
            try:
                content = await reader.read() or b""
            except OffsetJumpError:
                cutter.begin(reader.offset)
                continue
            taken, number = cutter.feed(content, count - found)
            records.append(taken)
            found += number
    except FramingError:
        if not found:
            return content[:1], offset + 1, 1
    except OffsetNotYetAvailableError:
        pass  # there are no more
    finally:
        await reader.aclose()
    return b"".join(records), cutter.offset, found
