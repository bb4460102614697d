"""Outbox of one journal: encodes messages into its appends."""

from __future__ import annotations

from typing import Any

from gazette_sdk.errors import ValidationError
from gazette_sdk.framing import Framing, JsonLines
from gazette_sdk.message.kinds import kind_of
from gazette_sdk.message.kinds.base import Kind
from gazette_sdk.message.publishing.receipt import Receipt
from gazette_sdk.message.uuid import Stamp
from gazette_sdk.transport.append.appender import JournalAppender
from gazette_sdk.transport.append.pending import PendingAppend

__all__ = ["Outbox"]

_NEWLINE = 0x0A


class Outbox:
    """Messages of one journal on their way into its appends.

    The thread that publishes encodes its message, under the publisher's lock: so a later clock
    never stands before an earlier one in a journal.

    Args:
        appender: of the journal.
        framing: its framing.

    Attributes:
        appender: of the journal.
        framing: its framing.
        journal: name of the journal.
    """

    __slots__ = ("_encoders", "_is_lines", "_tail", "appender", "framing", "journal")

    def __init__(self, appender: JournalAppender, framing: Framing) -> None:
        self.appender = appender
        self.framing = framing
        self.journal = appender.journal
        self._tail = appender.queue.tail
        self._is_lines = type(framing) is JsonLines
        self._encoders: dict[type, Kind[Any]] = {}

    def encode(self, message: Any, stamp: Stamp) -> Receipt:
        """Encode a message into the append that takes it. The lock is held.

        Whoever calls pushes the receipt's append to the appender then.

        Raises:
            ValidationError: it cannot be encoded; nothing was added.
            FramingError: likewise.
        """
        kind = self._encoders.get(type(message)) or self.kind(type(message))
        payload = kind.encode(message, stamp)
        append = self._tail()
        content = append.content
        begin = len(content)
        try:
            if self._is_lines and _NEWLINE not in payload:
                # What JsonLines does, without the call: this is done for every message.
                content += payload
                content += b"\n"
            else:
                self.framing.encode(payload, content)
        except BaseException:  # half a frame must not stay
            del content[begin:]
            raise
        first = append.length_bytes
        append.length_bytes = last = first + len(content) - begin
        return Receipt(append, first, last)

    def add_frames(self, frames: bytes) -> tuple[PendingAppend, int]:
        """Add whole frames to the append that takes them. The lock is held.

        Returns:
            The append, to be pushed to the appender, and the frames' position in it.
        """
        append = self._tail()
        begin = append.length_bytes
        append.add_part(frames)
        return append, begin

    def frame(self, message: Any, stamp: Stamp) -> bytes:
        """Return the frame of a message, without adding it.

        Raises:
            ValidationError: it cannot be encoded.
            FramingError: likewise.
        """
        kind = self._encoders.get(type(message)) or self.kind(type(message))
        out = bytearray()
        self.framing.encode(kind.encode(message, stamp), out)
        return bytes(out)

    def kind(self, message_type: type[Any]) -> Kind[Any]:
        """Return the adapter of a class of messages.

        Raises:
            ValidationError: its objects can carry no UUID, or have no such form.
        """
        try:
            kind = kind_of(message_type, self.framing.form)
        except ValidationError as error:
            reason = f"{self.journal}: {error.reason}"
            raise ValidationError(reason, kind=error.kind, journal=self.journal) from error
        self._encoders[message_type] = kind
        return kind
