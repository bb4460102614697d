"""UUIDs of messages: who wrote a message, in which order, and as part of what (message section 1).

A message's UUID is an RFC 4122 UUID of version 1 whose fields say more than usual: the time is
the upper part of the producer's clock, the clock sequence holds the clock's lowest four bits and
the flags, and the node is the producer.
"""

from __future__ import annotations

import functools
import os
import time
import uuid
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from gazette_sdk.message.clock import TICK, UNIX_EPOCH
from gazette_sdk.message.flags import FLAGS_MAX

__all__ = [
    "PRODUCER_BYTES",
    "TEXT_BYTES",
    "ZERO_UUID",
    "RawUuid",
    "Stamp",
    "UuidParts",
    "build_uuid",
    "new_producer_id",
    "number_of_text",
    "parse_number",
    "parse_uuid",
    "uuid_of_bytes",
    "uuid_of_text",
]

PRODUCER_BYTES = 6
"""Length of a producer id."""

TEXT_BYTES = 36
"""Length of a UUID's canonical text."""

ZERO_UUID = uuid.UUID(int=0)
"""The UUID of a message that opts out of sequencing."""

RawUuid: TypeAlias = bytes | str | uuid.UUID | None
"""A UUID as it stands in a message: text (as str or ASCII), 16 bytes, or nothing at all."""

_CLOCK_MAX = (1 << 64) - 1


@functools.cache
def _four_digits() -> npt.NDArray[np.uint32]:
    """The four hexadecimal digits of each 16-bit number, as one number of their ASCII bytes."""
    return np.frombuffer(b"".join(b"%04x" % n for n in range(1 << 16)), dtype=np.uint32)


class UuidParts(NamedTuple):
    """What a message's UUID says.

    Attributes:
        producer: id of its producer, six bytes.
        clock: the producer's clock, 64 bits; orders the producer's messages.
        flags: its part in a transaction, see :mod:`~gazette_sdk.message.flags`.
    """

    producer: bytes
    clock: int
    flags: int


def new_producer_id() -> bytes:
    """A random producer id. Its multicast bit is set: it equals no network card's address."""
    producer = bytearray(os.urandom(PRODUCER_BYTES))
    producer[0] |= 0x01
    return bytes(producer)


def build_uuid(producer: bytes, clock: int, flags: int) -> uuid.UUID:
    """The UUID of a producer's message.

    Args:
        producer: six bytes.
        clock: the producer's clock, 64 bits.
        flags: at most ``0x3FF``.

    Raises:
        ValueError: an argument is out of its range: an error of the calling program.
    """
    if len(producer) != PRODUCER_BYTES:
        raise ValueError(f"a producer id has {PRODUCER_BYTES} bytes, not {len(producer)}")
    if not 0 <= clock <= _CLOCK_MAX:
        raise ValueError(f"a clock has 64 bits: {clock:#x}")
    if not 0 <= flags <= FLAGS_MAX:
        raise ValueError(f"flags have 10 bits: {flags:#x}")
    high = (clock >> 4 & 0xFFFF_FFFF) << 32 | (clock >> 36 & 0xFFFF) << 16 | 0x1000 | (clock >> 52)
    low = (0x8000 | (clock & 0xF) << 10 | flags) << 48 | int.from_bytes(producer, "big")
    return uuid.UUID(int=high << 64 | low)


def parse_uuid(value: uuid.UUID) -> UuidParts:
    """What ``value`` says. Version and variant are not looked at: the zero UUID has clock 0."""
    producer, clock, flags = parse_number(value.int)
    return UuidParts(producer.to_bytes(PRODUCER_BYTES, "big"), clock, flags)


def parse_number(number: int) -> tuple[int, int, int]:
    """What a UUID says whose 128 bits are ``number``: producer, clock and flags as numbers."""
    clock = (
        (number >> 64 & 0x0FFF) << 52
        | (number >> 80 & 0xFFFF) << 36
        | (number >> 96 & 0xFFFF_FFFF) << 4
        | (number >> 58 & 0xF)
    )
    return number & 0xFFFF_FFFF_FFFF, clock, number >> 48 & FLAGS_MAX


def uuid_of_text(text: str) -> uuid.UUID:
    """A UUID from any of its textual forms, see :func:`number_of_text`."""
    return uuid.UUID(int=number_of_text(text))


def number_of_text(text: str) -> int:
    """The number, of 128 bits, of a UUID in any of its textual forms.

    Args:
        text: 36 characters with hyphens, the same after ``urn:uuid:`` or in braces, or 32
            hexadecimal digits; in any case.

    Raises:
        ValueError: ``text`` is none of these.
    """
    digits = text
    if len(text) == 45 and text[:9].lower() == "urn:uuid:":
        digits = text[9:]
    elif len(text) == 38 and text[0] == "{" and text[-1] == "}":
        digits = text[1:-1]
    if len(digits) == 36:
        if not digits[8] == digits[13] == digits[18] == digits[23] == "-":
            raise ValueError(f"invalid UUID format: {text!r}")
        digits = digits.replace("-", "")
    elif digits is not text or len(digits) != 32:
        raise ValueError(f"invalid UUID length: {len(text)}")
    try:
        # bytes.fromhex passes over blanks, which the length then gives away.
        raw = bytes.fromhex(digits)
    except ValueError:
        raw = b""
    if len(raw) != 16 or len(digits) != 32:
        raise ValueError(f"invalid UUID format: {text!r}")
    return int.from_bytes(raw, "big")


def uuid_of_bytes(raw: bytes) -> uuid.UUID:
    """A UUID from its binary form: as much as fits is taken, the rest is zero."""
    return uuid.UUID(bytes=raw[:16].ljust(16, b"\0"))


class Stamp:
    """Writes the UUIDs of one producer's messages, in the forms of messages.

    All but 32 bits of the clock stay the same for minutes: their text is formatted once.

    Args:
        producer: the producer's id.

    Attributes:
        clock: clock of the message to be written next.
        flags: flags of the message to be written next.
    """

    __slots__ = ("_constant", "_number", "_tail", "_tail_flags", "clock", "flags", "producer")

    _CONSTANT_BITS = ~(0xFFFF_FFFF << 4)

    def __init__(self, producer: bytes) -> None:
        self.producer = producer
        self.clock = 0
        self.flags = 0
        self._constant = -1
        self._number = 0
        self._tail = b""
        self._tail_flags = -1

    def tick_now(self) -> None:
        """Move the clock on to the wall clock's time, and tick. Not synchronised."""
        now = ((time.time_ns() // 100 + UNIX_EPOCH) << 4) + TICK
        clock = self.clock + TICK
        self.clock = now if now > clock else clock  # noqa: FURB136 - once per message

    def reserve(self, count: int) -> int:
        """Move on to the wall clock's time, and tick ``count`` times; returns the first tick's.

        Not synchronised. The clock is that of the last tick.
        """
        self.tick_now()
        first = self.clock
        self.clock = first + (count - 1) * TICK
        return first

    def texts(self, first: int, count: int, before: bytes, after: bytes) -> npt.NDArray[np.uint8]:
        """The texts of successive UUIDs, each between the same constant bytes.

        Args:
            first: clock of the first; each further one is a tick later.
            count: how many.
            before: what stands in front of each text.
            after: what stands behind each.

        Returns:
            A matrix of bytes, one row for each UUID.
        """
        head, four_digits = len(before), _four_digits()
        rows = np.empty((count, head + TEXT_BYTES + len(after)), dtype=np.uint8)
        done = 0
        while done < count:
            clock = first + done * TICK
            # Only the first eight digits change until they overflow, which is every 7 minutes.
            left = ((clock | 0xFFFF_FFFF0) - clock) // TICK + 1
            run = slice(done, min(count, done + left))
            text = str(build_uuid(self.producer, clock, self.flags)).encode()
            rows[run] = np.frombuffer(before + text + after, dtype=np.uint8)
            ticks = np.arange(run.stop - run.start, dtype=np.int64) * (TICK >> 4)
            low = (clock >> 4 & 0xFFFF_FFFF) + ticks
            digits = np.empty((len(low), 2), dtype=np.uint32)
            digits[:, 0] = four_digits[low >> 16]
            digits[:, 1] = four_digits[low & 0xFFFF]
            rows[run, head : head + 8] = digits.view(np.uint8)
            done = run.stop
        return rows

    def text(self) -> bytes:
        """The UUID as lower-case text with hyphens, ASCII."""
        clock = self.clock
        if clock & self._CONSTANT_BITS != self._constant or self.flags != self._tail_flags:
            self._format()
        return b"%08x%b" % (clock >> 4 & 0xFFFF_FFFF, self._tail)

    def raw(self) -> bytes:
        """The UUID as 16 bytes."""
        clock = self.clock
        if clock & self._CONSTANT_BITS != self._constant or self.flags != self._tail_flags:
            self._format()
        return ((clock >> 4 & 0xFFFF_FFFF) << 96 | self._number).to_bytes(16, "big")

    def _format(self) -> None:
        constant = self.clock & self._CONSTANT_BITS
        value = build_uuid(self.producer, constant, self.flags)
        self._tail = str(value).encode()[8:]
        self._number = value.int
        self._constant = constant
        self._tail_flags = self.flags
