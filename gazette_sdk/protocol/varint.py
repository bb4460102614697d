"""Variable-length integers of protobuf's encoding, for messages that are encoded by hand."""

from __future__ import annotations

__all__ = ["decode_varint", "encode_varint"]

_SINGLE_BYTES = tuple(bytes((value,)) for value in range(0x80))
_BYTES_MAX = 9
"""Greatest length of a non-negative number of 64 bits. Negative ones have ten bytes."""


def encode_varint(value: int) -> bytes:
    """Return the encoding of a non-negative number."""
    if value < 0x80:
        return _SINGLE_BYTES[value]
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def decode_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the non-negative number at a position, and the position behind it.

    Returns:
        -1 and ``at`` if the bytes end inside the number, or the number is negative.
    """
    value = shift = 0
    for position in range(at, min(at + _BYTES_MAX, len(data))):
        byte = data[position]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position + 1
        shift += 7
    return -1, at
