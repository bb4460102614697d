"""Acknowledgement intents: what is left to be written of a transaction that is decided.

A transaction over several journals is acknowledged in each of them by one message. These are
built when everything else is durable, can be stored together with whatever the transaction
stands for, and can be written again after a crash: readers take an acknowledgement which they
have seen before for the duplicate that it is (message section 11).

Outbox of one journal: encodes messages into its appends.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping as AbstractMapping
from typing import Any

from google.protobuf.message import DecodeError

from gazette_sdk.errors import DecodeError as DamagedError
from gazette_sdk.errors import FramingError, ValidationError
from gazette_sdk.framing import JsonLines, framing_for
from gazette_sdk.framing.registry import NO_FRAMING_REMEDY
from gazette_sdk.message.checkpoint import sealed, unsealed
from gazette_sdk.message.kinds import kind_of
from gazette_sdk.message.kinds.base import Kind
from gazette_sdk.message.uuid import Stamp
from gazette_sdk.protocol import consumer_pb2
from gazette_sdk.transport.append.appender import JournalAppender
from gazette_sdk.transport.append.queue import AnyFuture, PendingAppend
from gazette_sdk.user_code import call


class AckIntents(AbstractMapping[str, bytes]):
    """The framed acknowledgement of each journal of a transaction, in the order of first use.

    Args:
        frames: by journal.
    """

    __slots__ = ("_frames",)

    def __init__(self, frames: AbstractMapping[str, bytes] | None = None) -> None:
        self._frames = dict(frames or {})

    def __getitem__(self, journal: str) -> bytes:
        return self._frames[journal]

    def __iter__(self) -> Iterator[str]:
        return iter(self._frames)

    def __len__(self) -> int:
        return len(self._frames)

    def __hash__(self) -> int:
        return hash(frozenset(self._frames.items()))

    def to_bytes(self) -> bytes:
        """Return a stored ``Checkpoint`` that holds nothing else, with a checksum."""
        message = consumer_pb2.Checkpoint(ack_intents=self._frames)
        return sealed(message.SerializeToString(deterministic=True))

    @classmethod
    def from_bytes(cls, stored: bytes) -> AckIntents:
        """Intents which :meth:`to_bytes` wrote, or those of a stored checkpoint.

        Raises:
            ValidationError: ``stored`` is no checkpoint, or is damaged.
        """
        try:
            checkpoint = consumer_pb2.Checkpoint.FromString(unsealed(bytes(stored)))
        except (DamagedError, DecodeError, TypeError, ValueError) as error:
            raise ValidationError(
                f"these {len(stored)} bytes are no stored acknowledgement intents: {error}",
                kind="ack_intents",
            ) from error
        return cls(checkpoint.ack_intents)

    def __repr__(self) -> str:
        return f"<AckIntents of {', '.join(self._frames) or 'no journal'}>"


NEWLINE = 0x0A


class Outbox:
    """Messages of one journal on their way into its appends.

    The thread that publishes encodes its message, under the publisher's lock: so a later clock
    never stands before an earlier one in a journal.

    Args:
        appender: of the journal.
        content_type: of the journal's label.

    Attributes:
        appender: of the journal.
        framing: its framing.
        frame_bytes_max: greatest length of a frame, which readers take.
        is_lines: the framing is that of JSON lines.
        journal: name of the journal.
        kinds: adapters of the classes of messages that were published to it.
        tail: returns the append that takes the next frame.

    Raises:
        FramingError: the content type has no framing.
    """

    __slots__ = ("appender", "frame_bytes_max", "framing", "is_lines", "journal", "kinds", "tail")

    def __init__(self, appender: JournalAppender, content_type: str) -> None:
        self.appender = appender
        self.journal = appender.journal
        try:
            self.framing = framing_for(content_type)
        except FramingError as error:
            raise FramingError(
                f"{self.journal}: {error}; {NO_FRAMING_REMEDY}", journal=self.journal
            ) from error
        self.tail = appender.queue.tail
        self.frame_bytes_max = self.framing.frame_bytes_max
        self.is_lines = type(self.framing) is JsonLines
        self.kinds: dict[type, Kind[Any]] = {}

    def encode(self, payload: bytes, content: bytearray) -> int:
        """Append the frame of a payload, and return its length.

        Raises:
            FramingError: it cannot be framed; nothing was added.
            ValidationError: the frame is too long; nothing was added.
        """
        begin = len(content)
        try:
            call(self.framing.encode, payload, content)
        except BaseException:  # half a frame must not stay
            del content[begin:]
            raise
        length_bytes = len(content) - begin
        if length_bytes > self.frame_bytes_max:
            del content[begin:]
            raise self.oversized(length_bytes)
        return length_bytes

    def oversized(self, length_bytes: int) -> ValidationError:
        """Return the error of a frame that readers do not take."""
        return ValidationError(
            f"{self.journal}: a message of {length_bytes} bytes is longer than"
            f" {self.frame_bytes_max} bytes, which readers take at most: publish it in parts, or"
            " store it elsewhere and publish where; a longer"
            f" {type(self.framing).__name__}.frame_bytes_max must be set in all readers, too",
            kind="message",
            journal=self.journal,
        )

    def add_frames(
        self, frames: bytes, after: frozenset[AnyFuture] = frozenset()
    ) -> tuple[PendingAppend, int]:
        """Add whole frames to the append that takes them. The lock is held.

        Args:
            frames: the frames.
            after: futures that must succeed before they are sent.

        Returns:
            The append, to be pushed to the appender, and the frames' position in it.
        """
        append = self.tail(None, after)
        begin = append.length_bytes
        append.add_part(frames)
        return append, begin

    def frame(self, message: Any, stamp: Stamp) -> bytes:
        """Return the frame of a message, without adding it.

        Raises:
            ValidationError: it cannot be encoded.
            FramingError: likewise.
        """
        kind = self.kinds.get(type(message)) or self.kind(type(message))
        out = bytearray()
        self.encode(kind.encode(message, stamp), out)
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
        self.kinds[message_type] = kind
        return kind
