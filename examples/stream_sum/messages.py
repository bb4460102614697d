"""Messages of stream_sum, in the form that Gazette's own stream-sum has."""

from collections.abc import Sequence

import msgspec

from gazette_sdk import GazetteError, mapping

SUMS = "examples/stream-sum/sums"
"""Journal of finished sums."""

ID_BYTES = 16
NO_ID = (0,) * ID_BYTES

_POLYNOMIAL = 0xC96C5795D7870F42  # ECMA-182, reflected
_ALL_ONES = (1 << 64) - 1


class WrongChunkError(GazetteError):
    """A chunk is not the next one of its stream: one was lost, repeated or reordered."""


class Chunk(msgspec.Struct, rename={"id": "ID", "seq_no": "SeqNo", "data": "Data"}):
    """Part of a stream.

    Attributes:
        id: of the stream, sixteen bytes.
        seq_no: number of the chunk, from 1.
        data: its content; empty or None in the chunk that ends the stream.
    """

    id: Sequence[int] = NO_ID
    seq_no: int = 0
    data: bytes | None = None


class Sum(msgspec.Struct, rename={"id": "ID", "seq_no": "SeqNo", "value": "Value"}):
    """Sum of the chunks of a stream so far.

    Attributes:
        id: of the stream, sixteen bytes.
        seq_no: number of its last chunk.
        value: CRC-64/ECMA of the data of its chunks.
    """

    id: Sequence[int] = NO_ID
    seq_no: int = 0
    value: int = 0

    def add(self, chunk: Chunk) -> bool:
        """Add the next chunk; return True if it ends the stream.

        Raises:
            WrongChunkError: it is of another stream, or not the next one.
        """
        if tuple(chunk.id) != tuple(self.id):
            raise WrongChunkError(f"a chunk of stream {hex_of(chunk)} is not of {hex_of(self)}")
        if chunk.seq_no != self.seq_no + 1:
            raise WrongChunkError(
                f"stream {hex_of(self)}: chunk {chunk.seq_no} follows chunk {self.seq_no}"
            )
        self.seq_no = chunk.seq_no
        self.value = crc64(chunk.data or b"", self.value)
        return not chunk.data


def key_of(message: Chunk | Sum) -> bytes:
    """Return the id of a message's stream, as bytes."""
    return bytes(message.id)


def hex_of(message: Chunk | Sum) -> str:
    """Return the id of a message's stream, as text."""
    return key_of(message).hex()


def crc64(data: bytes, value: int = 0) -> int:
    """Return the CRC-64/ECMA of data that follows data with the CRC ``value``."""
    value ^= _ALL_ONES
    for byte in data:
        value = _TABLE[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ _ALL_ONES


def _entry(value: int) -> int:
    for _ in range(8):
        value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
    return value


_TABLE = [_entry(byte) for byte in range(256)]

TO_CHUNKS = mapping.modulo("app.gazette.dev/message-type=stream_sum.Chunk", key=key_of)
"""Mapping of chunks: all of a stream stand in one journal."""

TO_SUMS = mapping.direct(SUMS)
"""Mapping of sums."""
