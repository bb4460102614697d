"""Content of an append that is all there, as the requests of an append."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator

from gazette_sdk.protocol import broker_pb2 as pb

__all__ = ["CHUNK_BYTES", "requests_of"]

CHUNK_BYTES = 128 << 10
"""Content per message: far below the 4 MiB that brokers accept, and large enough that more
makes no difference (measured over loopback)."""


async def requests_of(pieces: Iterable[bytes]) -> AsyncIterator[pb.AppendRequest | bytes]:
    """What follows the opening request: chunks, and the commit."""
    for piece in pieces:
        for chunk in _chunks(piece):
            yield chunk
    yield pb.AppendRequest()


def _chunks(piece: bytes) -> Iterator[bytes]:
    if 0 < len(piece) <= CHUNK_BYTES:
        yield piece
        return
    for begin in range(0, len(piece), CHUNK_BYTES):
        yield piece[begin : begin + CHUNK_BYTES]
