"""Runs: messages of one journal as arrays, and their UUIDs parsed in bulk.

A run holds the place and the UUID's parts of each message, whatever is delivered in the end
(envelopes, rows of record batches). So whole runs are sequenced by a few operations on arrays.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from gazette_sdk.message.uuid import TEXT_BYTES, RawUuid, uuid_of

T = TypeVar("T")


class InvalidUuidError(ValueError):
    """One of many UUIDs is invalid.

    Attributes:
        index: its index; the UUIDs before it are valid.
    """

    def __init__(self, index: int, text: str) -> None:
        super().__init__(text)
        self.index = index


class Stamps(NamedTuple):
    """Parts of the UUIDs of many messages, see :class:`~gazette_sdk.message.uuid.UuidParts`.

    Attributes:
        producers: ids of their producers: six bytes each, as big-endian numbers.
        clocks: clocks; 0 where a message has no UUID.
        flags: flags.
    """

    producers: npt.NDArray[np.uint64]
    clocks: npt.NDArray[np.uint64]
    flags: npt.NDArray[np.uint16]

    @classmethod
    def none(cls, count: int) -> Stamps:
        """Return the parts of messages without UUIDs."""
        producers, clocks = np.zeros((2, count), np.uint64)
        return cls(producers, clocks, np.zeros(count, np.uint16))

    def first(self, count: int) -> Stamps:
        """Return the parts of the first UUIDs."""
        return Stamps(self.producers[:count], self.clocks[:count], self.flags[:count])


class Message(NamedTuple, Generic[T]):
    """One message, as it is sequenced.

    Attributes:
        journal: its journal.
        begin: offset of the first byte of its frame.
        end: offset after the last byte of its frame.
        producer: id of its producer: six bytes, as a big-endian number.
        clock: its producer's clock; 0 where it has no UUID.
        flags: its flags.
        item: the object to deliver.
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
    """Messages of one journal, in its order. Arrays and items have equal lengths.

    Attributes:
        journal: the journal.
        begins: offsets of their frames' first bytes.
        ends: offsets after their frames' last bytes.
        producers: ids of their producers: six bytes each, as big-endian numbers.
        clocks: clocks; 0 where a message has no UUID.
        flags: flags.
        items: the objects to deliver.
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
        """Offset after the last message, of which there is at least one."""
        return int(self.ends[-1])

    def messages(self, start: int = 0, stop: int | None = None) -> list[Message[T]]:
        """Return the messages of ``[start, stop)`` as a list."""
        part = slice(start, stop)
        rows = zip(
            repeat(self.journal),
            self.begins[part].tolist(),
            self.ends[part].tolist(),
            self.producers[part].tolist(),
            self.clocks[part].tolist(),
            self.flags[part].tolist(),
            self.items[part],
            strict=False,  # the journal repeats without end
        )
        # Message._make, without a Python frame for each.
        make: Callable[[Any, Any], Message[T]] = tuple.__new__
        return list(map(make, repeat(Message), rows))


class ShortRun(Run[T]):
    """Run of few messages: a list of them costs less than arrays.

    Arrays are made on access.

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
        """Offset after the last message."""
        return self._messages[-1].end

    def messages(self, start: int = 0, stop: int | None = None) -> list[Message[T]]:
        """Return the messages of ``[start, stop)`` as a list."""
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
"""Columns of a run: their place in a message, and the type of their array."""


# ---------------------------------------------------------------- UUIDs in bulk

_RAW_BYTES = 16
_NO_DIGITS = 0x100
"""Entry of :data:`_OCTETS` for two bytes that are no two hexadecimal digits."""


def _octets() -> npt.NDArray[np.uint16]:
    """Return the value of two hexadecimal digits, by their bytes as a little-endian number."""
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

NO_STAMPS = Stamps.none(0)
"""Parts of no UUIDs."""


def parse_text_uuids(matrix: npt.NDArray[np.uint8]) -> Stamps | None:
    """Return the parts of UUIDs in canonical text.

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
    """Return the parts of UUIDs in binary form.

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
    """Return the parts of UUIDs as they are written in messages.

    UUIDs that are all canonical text, or all binary, are parsed in bulk; others one by one.

    Raises:
        InvalidUuidError: one of them is no UUID.
    """
    stamps = _stamps_of_one_form(raw) if raw else None
    if stamps is not None:
        return stamps
    whole = bytearray()
    for index, value in enumerate(raw):
        try:
            whole += uuid_of(value).bytes
        except ValueError as error:
            raise InvalidUuidError(index, str(error)) from error
    return parse_raw_uuids(_matrix(whole, _RAW_BYTES))


def valid_stamps(raw: Sequence[RawUuid]) -> tuple[Stamps, InvalidUuidError | None]:
    """Return the parts of all UUIDs before the first invalid one, and the error of that."""
    try:
        return stamps_of(raw), None
    except InvalidUuidError as error:
        return stamps_of(raw[: error.index]), error


def _stamps_of_one_form(raw: Sequence[RawUuid]) -> Stamps | None:
    """Return the parts of UUIDs that all have one form; None if they have not."""
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
