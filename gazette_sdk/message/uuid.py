"""UUIDs of messages, which hold their producer, clock and flags (message section 1).

A message's UUID is an RFC 4122 UUID of version 1: its time is the upper part of the producer's
clock, its clock sequence holds the clock's lowest four bits and the flags, and its node is the
producer.

The clock of a producer orders its messages (message section 2). The flags are the message's part in
a transaction (message section 3).

An :class:`Envelope` is a message with its place in its journal, and its UUID.
"""

from __future__ import annotations

import functools
import os
import threading
import time
import uuid
from binascii import unhexlify
from datetime import UTC, datetime, timedelta
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from gazette_sdk.errors import DecodeError

PRODUCER_BYTES = 6
"""Length of a producer id."""

TEXT_BYTES = 36
"""Length of a UUID's canonical text."""

_HYPHEN = ord("-")

ZERO_UUID = uuid.UUID(int=0)
"""The UUID of a message that opts out of sequencing."""

RawUuid: TypeAlias = bytes | str | uuid.UUID | None
"""A UUID as it stands in a message: text (as str or ASCII), 16 bytes, or nothing at all."""

_CLOCK_MAX = (1 << 64) - 1


@functools.cache
def _four_digits() -> npt.NDArray[np.uint32]:
    """Return the four hexadecimal digits of each 16-bit number, their bytes as one number."""
    return np.frombuffer(b"".join(b"%04x" % n for n in range(1 << 16)), dtype=np.uint32)


class UuidParts(NamedTuple):
    """Parts of a message's UUID.

    Attributes:
        producer: id of its producer, six bytes.
        clock: the producer's clock, 64 bits; orders the producer's messages.
        flags: its part in a transaction, see :mod:`~gazette_sdk.message.uuid`.
    """

    producer: bytes
    clock: int
    flags: int


def new_producer_id() -> bytes:
    """Return a random producer id. Its multicast bit is set, so it equals no hardware address."""
    producer = bytearray(os.urandom(PRODUCER_BYTES))
    producer[0] |= 0x01
    return bytes(producer)


def build_uuid(producer: bytes, clock: int, flags: int) -> uuid.UUID:
    """Return the UUID of a producer's message.

    Args:
        producer: six bytes.
        clock: the producer's clock, 64 bits.
        flags: at most ``0x3FF``.

    Raises:
        ValueError: an argument is out of its range.
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
    """Return the parts of a UUID. Version and variant are ignored: the zero UUID has clock 0."""
    producer, clock, flags = _parse_number(value.int)
    return UuidParts(producer.to_bytes(PRODUCER_BYTES, "big"), clock, flags)


def parse_raw_uuid(raw: RawUuid) -> tuple[int, int, int]:
    """Return the parts of a UUID as it is written in a message, all as numbers.

    Raises:
        ValueError: ``raw`` is no UUID.
    """
    if isinstance(raw, bytes) and len(raw) == TEXT_BYTES:
        digits = raw.replace(b"-", b"")
        if len(digits) == 32 and raw[8] == raw[13] == raw[18] == raw[23] == _HYPHEN:
            try:
                return _parse_number(int.from_bytes(unhexlify(digits), "big"))
            except ValueError:
                pass  # the text's error is raised below
        raw = raw.decode("ascii")
    if isinstance(raw, str) and raw:
        return _parse_number(_number_of_text(raw))
    return _parse_number(uuid_of(raw).int)


def _parse_number(number: int) -> tuple[int, int, int]:
    clock = (
        (number >> 64 & 0x0FFF) << 52
        | (number >> 80 & 0xFFFF) << 36
        | (number >> 96 & 0xFFFF_FFFF) << 4
        | (number >> 58 & 0xF)
    )
    return number & 0xFFFF_FFFF_FFFF, clock, number >> 48 & FLAGS_MAX


def uuid_of(raw: RawUuid) -> uuid.UUID:
    """Return a UUID as it is written in a message; nothing, and empty text, are the zero UUID.

    Raises:
        ValueError: ``raw`` is no UUID.
    """
    if not raw:
        return ZERO_UUID
    if isinstance(raw, uuid.UUID):
        return raw
    if isinstance(raw, str):
        return uuid_of_text(raw)
    return uuid_of_text(raw.decode("ascii")) if len(raw) == TEXT_BYTES else uuid_of_bytes(raw)


def uuid_of_text(text: str) -> uuid.UUID:
    """Return a UUID from any of its textual forms.

    Args:
        text: 36 characters with hyphens, the same after ``urn:uuid:`` or in braces, or 32
            hexadecimal digits; in any case.

    Raises:
        ValueError: ``text`` is none of these.
    """
    return uuid.UUID(int=_number_of_text(text))


def is_uuid_text(value: object) -> bool:
    """Return True if ``value`` is a UUID in any of its textual forms."""
    try:
        return isinstance(value, str) and _number_of_text(value) >= 0
    except ValueError:
        return False


def _number_of_text(text: str) -> int:
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
        # bytes.fromhex skips blanks; then the length is wrong.
        raw = bytes.fromhex(digits)
    except ValueError:
        raw = b""
    if len(raw) != 16 or len(digits) != 32:
        raise ValueError(f"invalid UUID format: {text!r}")
    return int.from_bytes(raw, "big")


def uuid_of_bytes(raw: bytes) -> uuid.UUID:
    """Return a UUID from its first 16 bytes; bytes that are missing are zero."""
    return uuid.UUID(bytes=raw[:16].ljust(16, b"\0"))


class Stamp:
    """Formatter of the UUIDs of one producer's messages.

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
        """Advance the clock to the wall clock's time, and tick. Not synchronised."""
        now = ((time.time_ns() // 100 + UNIX_EPOCH) << 4) + TICK
        clock = self.clock + TICK
        self.clock = now if now > clock else clock  # noqa: FURB136 - once per message

    def reserve(self, count: int) -> int:
        """Advance to the wall clock's time, and tick ``count`` times; return the first tick.

        Not synchronised. The clock is the last tick.
        """
        self.tick_now()
        first = self.clock
        self.clock = first + (count - 1) * TICK
        return first

    def texts(self, first: int, count: int, before: bytes, after: bytes) -> npt.NDArray[np.uint8]:
        """Return the texts of successive UUIDs, each between the same constant bytes.

        Args:
            first: clock of the first; each further one is a tick later.
            count: how many.
            before: bytes in front of each text.
            after: bytes after each text.

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
        """Return the UUID as lower-case text with hyphens, ASCII."""
        clock = self.clock
        if clock & self._CONSTANT_BITS != self._constant or self.flags != self._tail_flags:
            self._format()
        return b"%08x%b" % (clock >> 4 & 0xFFFF_FFFF, self._tail)

    def raw(self) -> bytes:
        """Return the UUID as 16 bytes."""
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


TICK = 160
"""One tick of a clock: a microsecond, in units of 100 ns that are shifted by four bits."""

UNIX_EPOCH = 122_192_928_000_000_000
"""Time from 1582-10-15, the epoch of UUIDs, to 1970-01-01, in units of 100 ns."""

_MASK = (1 << 64) - 1


def clock_of_unix_ns(unix_ns: int) -> int:
    """Return the clock at a time in nanoseconds since 1970."""
    return ((unix_ns // 100 + UNIX_EPOCH) << 4) & _MASK


def clock_of_time(time: datetime) -> int:
    """Return the least clock of a time, which has a time zone; times before 1970 are 1970."""
    micros = (time - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
    return clock_of_unix_ns(max(0, micros) * 1000)


def unix_100ns_of_clock(clock: int) -> int:
    """Return the time of a clock, in units of 100 ns since 1970."""
    return (clock >> 4) - UNIX_EPOCH


def time_of_clock(clock: int) -> datetime:
    """Return the time of a clock, in UTC, rounded down to a microsecond.

    Raises:
        OverflowError: the time is after the year 9999.
    """
    micros = unix_100ns_of_clock(clock) // 10
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=micros)


class Clock:
    """Clock that never goes back. Publishers and threads may share it.

    Args:
        value: its first value.

    Attributes:
        value: its value, 64 bits.
    """

    __slots__ = ("_lock", "value")

    def __init__(self, value: int = 0) -> None:
        self.value = value
        self._lock = threading.RLock()  # a signal handler may publish within

    def update(self, unix_ns: int) -> None:
        """Advance to a time in nanoseconds since 1970, unless the clock is later."""
        candidate = clock_of_unix_ns(unix_ns)
        with self._lock:
            self.value = max(self.value, candidate)

    def tick(self, count: int = 1) -> int:
        """Advance by one microsecond, ``count`` times; return the value after the first."""
        with self._lock:
            first = (self.value + TICK) & _MASK
            self.value = (self.value + count * TICK) & _MASK
            return first

    def unlock(self) -> None:
        """Replace the lock in a forked child, as another thread of the parent may have held it."""
        self._lock = threading.RLock()  # a signal handler may publish within


OUTSIDE_TXN = 0x0
"""Not part of a transaction: committed by its own presence."""

CONTINUE_TXN = 0x1
"""Opens or continues a transaction: committed by a later acknowledgement."""

ACK_TXN = 0x2
"""Acknowledges the producer's transaction in this journal, or rolls it back."""

FLAGS_MAX = 0x3FF
"""Flags have ten bits."""

_NAMES = {OUTSIDE_TXN: "OUTSIDE_TXN", CONTINUE_TXN: "CONTINUE_TXN", ACK_TXN: "ACK_TXN"}


def flags_text(flags: int) -> str:
    """Return the name of ``flags``, which is one value and no set of bits: 3 is ``Flags(3)``."""
    return _NAMES.get(flags) or f"Flags({flags:x})"


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
