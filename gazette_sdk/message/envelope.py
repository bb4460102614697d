"""Envelope of a message: its place in its journal, and its UUID."""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import Generic, TypeVar

import msgspec

from gazette_sdk.errors import DecodeError
from gazette_sdk.message.uuid import RawUuid, UuidParts, parse_uuid, time_of_clock, uuid_of

M = TypeVar("M")


class Envelope(msgspec.Struct, Generic[M], frozen=True, gc=False):
    """Message with its place in its journal. Immutable.

    Its UUID is parsed on access.

    Attributes:
        journal: name of the journal, as the user gave it.
        begin: offset of the first byte of its frame.
        end: offset after the last byte of its frame.
        message: the message.
        raw_uuid: its UUID as it is written in the message; see :attr:`uuid`.
        traceparent: context of the sampled span in which it was published, as of W3C Trace
            Context; empty for none, and where :mod:`~gazette_sdk.tracing` is not enabled.
    """

    journal: str
    begin: int
    end: int
    message: M
    raw_uuid: RawUuid = None
    traceparent: str = ""

    @property
    def uuid(self) -> uuid.UUID:
        """The message's UUID; the zero UUID, if it has none.

        Raises:
            DecodeError: the message has something else in the UUID's place.
        """
        try:
            return uuid_of(self.raw_uuid)
        except ValueError as error:
            raise DecodeError(
                f"{self.journal}: the message at offset {self.begin} has no valid UUID: {error};"
                " mend its writer",
                journal=self.journal,
                offset=self.begin,
            ) from error

    @property
    def parts(self) -> UuidParts:
        """Producer, clock and flags of the message's UUID."""
        return parse_uuid(self.uuid)

    @property
    def producer(self) -> bytes:
        """Id of the message's producer, six bytes."""
        return self.parts.producer

    @property
    def clock(self) -> int:
        """Clock of its producer, 64 bits; 0 for a message without UUID."""
        return self.parts.clock

    @property
    def flags(self) -> int:
        """Part in a transaction, see :mod:`~gazette_sdk.message.uuid`."""
        return self.parts.flags

    @property
    def time(self) -> datetime | None:
        """Time of its publication, in UTC; None for a message without UUID."""
        clock = self.clock
        return time_of_clock(clock) if clock else None
