"""A message where it stands in its journal."""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import Generic, TypeVar

import msgspec

from gazette_sdk.errors import DecodeError
from gazette_sdk.message.clock import time_of_clock
from gazette_sdk.message.uuid import (
    ZERO_UUID,
    RawUuid,
    UuidParts,
    parse_uuid,
    uuid_of_bytes,
    uuid_of_text,
)

__all__ = ["Envelope"]

M = TypeVar("M")


class Envelope(msgspec.Struct, Generic[M], frozen=True, gc=False):
    """A message and where it stands. Immutable.

    What its UUID says is worked out when it is asked for.

    Attributes:
        journal: name of the journal, as it was asked for.
        begin: offset of the first byte of its frame.
        end: offset behind the last byte of its frame.
        message: the message.
        raw_uuid: its UUID as it stands in the message; see :attr:`uuid`.
    """

    journal: str
    begin: int
    end: int
    message: M
    raw_uuid: RawUuid = None

    @property
    def uuid(self) -> uuid.UUID:
        """The message's UUID; the zero UUID, if it has none.

        Raises:
            DecodeError: what stands in its place is no UUID.
        """
        raw = self.raw_uuid
        if raw is None:
            return ZERO_UUID
        if isinstance(raw, uuid.UUID):
            return raw
        try:
            if isinstance(raw, str):
                return uuid_of_text(raw) if raw else ZERO_UUID
            return uuid_of_text(raw.decode("ascii")) if len(raw) == 36 else uuid_of_bytes(raw)
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
        """Its producer's clock, 64 bits; 0 for a message without UUID."""
        return self.parts.clock

    @property
    def flags(self) -> int:
        """Its part in a transaction, see :mod:`~gazette_sdk.message.flags`."""
        return self.parts.flags

    @property
    def time(self) -> datetime | None:
        """When it was published, in UTC; None for a message without UUID."""
        clock = self.clock
        return time_of_clock(clock) if clock else None
