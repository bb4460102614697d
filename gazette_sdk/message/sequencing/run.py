"""Runs: messages of one journal as arrays, and their UUIDs parsed in bulk.

What the reading side works on. Whatever is delivered in the end (envelopes, rows of record
batches), a run says of each message where it stands and what its UUID says, so that whole runs
are sequenced by a few operations on arrays.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from gazette_sdk.message.uuid import (
    TEXT_BYTES,
    ZERO_UUID,
    RawUuid,
    number_of_text,
    parse_number,
    uuid_of_bytes,
    uuid_of_text,
)

__all__ = [
    "NO_OFFSETS",
    "NO_STAMPS",
    "InvalidUuidError",
    "Message",
    "Run",
    "ShortRun",
    "Stamps",
    "parse_raw_uuids",
    "parse_text_uuids",
    "parse_uuid_number",
    "stamps_of",
]

T = TypeVar("T")


class InvalidUuidError(ValueError):
    """One of many UUIDs is none.

    Attributes:
        index: which one; those before it are good.
    """

    def __init__(self, index: int, text: str) -> None:
        super().__init__(text)
        self.index = index


class Stamps(NamedTuple):
    """What the UUIDs of many messages say, see :class:`~gazette_sdk.message.uuid.UuidParts`.

    Attributes:
        producers: ids of their producers: six bytes each, as big-endian numbers.
        clocks: clocks; 0 where a message has no UUID.
        flags: flags.
    """

    producers: npt.NDArray[np.uint64]
    clocks: npt.NDArray[np.uint64]
    flags: npt.NDArray[np.uint16]


class Message(NamedTuple, Generic[T]):
    """One message as sequencing sees it.

    Attributes:
        journal: its journal.
        begin: offset of the first byte of its frame.
        end: offset behind the last byte of its frame.
        producer: id of its producer: six bytes, as a big-endian number.
        clock: its producer's clock; 0 where it has no UUID.
        flags: its flags.
        item: what is delivered.
    """

    journal: str
    begin: int
    end: int
    producer: int
    clock: int
    flags: int
    item: T


@dataclass(slots=True)
class Run(Generic[T]):
    """Messages of one journal, in the order of the journal. Arrays and items are equally long.

    Attributes:
        journal: the journal.
        begins: offsets of their frames' first bytes.
        ends: offsets behind their frames' last bytes.
        producers: ids of their producers: six bytes each, as big-endian numbers.
        clocks: clocks; 0 where a message has no UUID.
        flags: flags.
        items: what is delivered of each.
    """

    journal: str
    begins: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    producers: npt.NDArray[np.uint64]
    clocks: npt.NDArray[np.uint64]
    flags: npt.NDArray[np.uint16]
    items: Sequence[T]

    def __len__(self) -> int:
        return len(self.begins)

    @property
    def end(self) -> int:
        """Offset behind the last message, of which there is at least one."""
        return int(self.ends[-1])

    def messages(self, start: int = 0, stop: int | None = None) -> list[Message[T]]:
        """The messages of ``[start, stop)``, one by one."""
        part = slice(start, stop)
        rows = zip(
            repeat(self.journal),
            self.begins[part].tolist(),
            self.ends[part].tolist(),
            self.producers[part].tolist(),
            self.clocks[part].tolist(),
            self.flags[part].tolist(),
            self.items[part],
            strict=False,  # the journal repeats for ever
        )
        # Message._make, without a Python frame for each.
        make: Callable[[Any, Any], Message[T]] = tuple.__new__
        return list(map(make, repeat(Message), rows))


class ShortRun(Run[T]):
    """A run of few messages: what costs less as a list of them than as arrays.

    Arrays are made when they are asked for.

    Args:
        journal: the journal.
        messages: its messages, at least one.
    """

    __slots__ = ("_messages",)

    def __init__(self, journal: str, messages: list[Message[T]]) -> None:
        self.journal = journal
        self._messages = messages

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def end(self) -> int:
        """Offset behind the last message."""
        return self._messages[-1].end

    def messages(self, start: int = 0, stop: int | None = None) -> list[Message[T]]:
        """The messages of ``[start, stop)``, one by one."""
        return self._messages[start:stop]

    def __getattr__(self, name: str) -> Any:  # of a slot that is empty yet
        column = _COLUMNS.get(name)
        if column is None:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        place, kind = column
        values = [message[place] for message in self._messages]
        made = values if kind is None else np.array(values, kind)
        setattr(self, name, made)
        return made


_COLUMNS: dict[str, tuple[int, type[np.generic] | None]] = {
    "begins": (1, np.int64),
    "ends": (2, np.int64),
    "producers": (3, np.uint64),
    "clocks": (4, np.uint64),
    "flags": (5, np.uint16),
    "items": (6, None),
}
"""Of a run's columns: their place in a message, and what an array of them holds."""


# ---------------------------------------------------------------- UUIDs in bulk

_RAW_BYTES = 16
_NO_DIGITS = 0x100
"""What :data:`_OCTETS` says of two bytes that are no two hexadecimal digits."""


def _octets() -> npt.NDArray[np.uint16]:
    """By two bytes, the first being the lower: the value of these two hexadecimal digits."""
    digit = np.full(256, _NO_DIGITS, np.uint16)
    for value, character in enumerate("0123456789abcdef"):
        digit[ord(character)] = value
        digit[ord(character.upper())] = value
    first, second = digit[np.newaxis, :], digit[:, np.newaxis]
    octet = (first << 4) | second
    octet[(first | second) >= _NO_DIGITS] = _NO_DIGITS
    return octet.reshape(-1).astype(np.uint16)


_OCTETS = _octets()


NO_OFFSETS = np.empty(0, np.int64)
"""Offsets of no messages."""

NO_STAMPS = Stamps(np.empty(0, np.uint64), np.empty(0, np.uint64), np.empty(0, np.uint16))
"""Parts of no UUIDs."""


def parse_text_uuids(matrix: npt.NDArray[np.uint8]) -> Stamps | None:
    """What UUIDs in canonical text say.

    Args:
        matrix: shape [n, 36]: the text of one UUID in each row, ASCII, in any case.

    Returns:
        None if any row is no such text.
    """
    if matrix.shape[1] != TEXT_BYTES:
        raise ValueError(f"UUIDs in text have {TEXT_BYTES} characters, not {matrix.shape[1]}")
    count = len(matrix)
    digits = np.empty((count, 2 * _RAW_BYTES), np.uint8)
    digits[:, :8] = matrix[:, :8]
    digits[:, 8:12] = matrix[:, 9:13]
    digits[:, 12:16] = matrix[:, 14:18]
    digits[:, 16:20] = matrix[:, 19:23]
    digits[:, 20:] = matrix[:, 24:]
    octets = _OCTETS.take(digits.view("<u2"))
    hyphens = matrix[:, [8, 13, 18, 23]]
    if count and (octets.max() >= _NO_DIGITS or not bool((hyphens == ord("-")).all())):
        return None
    return parse_raw_uuids(octets.astype(np.uint8))


def parse_raw_uuids(matrix: npt.NDArray[np.uint8]) -> Stamps:
    """What UUIDs in binary form say.

    Args:
        matrix: shape [n, 16]: one UUID in each row.
    """
    if matrix.shape[1] != _RAW_BYTES:
        raise ValueError(f"UUIDs have {_RAW_BYTES} bytes, not {matrix.shape[1]}")
    halves = np.ascontiguousarray(matrix).view(">u8").astype(np.uint64)
    high, low = halves[:, 0], halves[:, 1]
    clocks = (
        (high & np.uint64(0x0FFF)) << np.uint64(52)
        | (high & np.uint64(0xFFFF_0000)) << np.uint64(20)
        | (high >> np.uint64(32)) << np.uint64(4)
        | (low >> np.uint64(58)) & np.uint64(0xF)
    )
    flags = ((low >> np.uint64(48)) & np.uint64(0x3FF)).astype(np.uint16)
    return Stamps(low & np.uint64(0xFFFF_FFFF_FFFF), clocks, flags)


def stamps_of(raw: Sequence[RawUuid]) -> Stamps:
    """What UUIDs say, as they stand in messages.

    All in canonical text, or all in binary, are parsed in bulk; others one by one.

    Raises:
        InvalidUuidError: one of them is no UUID.
    """
    stamps = _stamps_of_equals(raw) if raw else None
    if stamps is not None:
        return stamps
    whole = bytearray()
    for index, value in enumerate(raw):
        try:
            whole += _uuid_of(value).bytes
        except ValueError as error:
            raise InvalidUuidError(index, str(error)) from error
    return parse_raw_uuids(_matrix(whole, _RAW_BYTES))


def _stamps_of_equals(raw: Sequence[RawUuid]) -> Stamps | None:
    """As :func:`stamps_of` for UUIDs that all have one form; None if they have not."""
    first = raw[0]
    if first is None or isinstance(first, uuid.UUID):
        return None
    width = len(first)
    try:
        # Both refuse values of another type.
        joined: Any = "" if isinstance(first, str) else b""
        whole = joined.join(raw)
        whole = whole.encode("ascii") if isinstance(first, str) else whole
    except (TypeError, UnicodeEncodeError):
        return None
    sized: Sequence[Any] = raw
    if len(whole) != width * len(raw) or set(map(len, sized)) != {width}:
        return None
    if width == TEXT_BYTES:
        return parse_text_uuids(_matrix(whole, TEXT_BYTES))
    if width == _RAW_BYTES and not isinstance(first, str):
        return parse_raw_uuids(_matrix(whole, _RAW_BYTES))
    return None


def _matrix(whole: bytes | bytearray, width: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(whole, np.uint8).reshape(-1, width)


def parse_uuid_number(raw: RawUuid) -> tuple[int, int, int]:
    """What one UUID says: its producer as a number, its clock, its flags.

    Raises:
        ValueError: it is none.
    """
    if isinstance(raw, str) and raw:
        return parse_number(number_of_text(raw))
    if isinstance(raw, bytes) and len(raw) == TEXT_BYTES:
        return parse_number(number_of_text(raw.decode("ascii")))
    return parse_number(_uuid_of(raw).int)


def _uuid_of(raw: RawUuid) -> uuid.UUID:
    """A UUID in any of its forms; nothing, and empty text, are the zero UUID.

    Raises:
        ValueError: it is none.
    """
    if not raw:
        return ZERO_UUID
    if isinstance(raw, uuid.UUID):
        return raw
    if isinstance(raw, str):
        return uuid_of_text(raw)
    return uuid_of_text(raw.decode("ascii")) if len(raw) == TEXT_BYTES else uuid_of_bytes(raw)
