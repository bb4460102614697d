"""Reads of stored `file://` fragments, compared with plain decompression of the same files.

    python benchmarks/fragments.py [--rounds 5] [--mib 256] [--json]

The SDK's fragment store transport also verifies each fragment's SHA-1. Plain decompression is a
loop with the codec's own library. An uncompressed fragment is compared with hashing the file, the
least cost of verification.
"""

from __future__ import annotations

import hashlib
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import snappy
import zstandard
from measure import Figure, arguments, cluster, in_turn, report

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport import Transport, connect
from gazette_sdk.transport import loop as sdk_loop
from gazette_sdk.transport.append.append import append
from gazette_sdk.transport.journal_reader import RetryReader

BAR = 0.7
PIECE_BYTES = 256 << 10
FRAGMENT_BYTES = 32 << 20
CODECS = {"GZIP": "gz", "ZSTANDARD": "zst", "SNAPPY": "sz", "NONE": "raw"}
JOURNALS = "name: bench/\nchildren:\n" + "".join(
    f"""
  - name: bench/{name.lower()}
    replication: 1
    fragment:
      length: {FRAGMENT_BYTES}
      compression_codec: {name}
      stores: ["file:///"]
      refresh_interval: 1s
"""
    for name in sorted(CODECS)
)


def text(length: int) -> bytes:
    """Return JSON lines that compress like real ones."""
    lines = []
    size = number = 0
    while size < length:
        digest = hashlib.sha1(str(number).encode()).hexdigest()
        line = b'{"UUID":"%s-0000","customer":"user-%d","cents":%d,"city":"springfield"}\n' % (
            digest[:31].encode(),
            number % 1000,
            number * 7,
        )
        lines.append(line)
        size += len(line)
        number += 1
    return b"".join(lines)


def pieces(path: Path) -> Iterator[bytes]:
    """Yield pieces of a file."""
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            yield piece


def gunzip(path: Path) -> int:
    """Decompress a gzip file of many members."""
    length, inflate = 0, zlib.decompressobj(31)
    for piece in pieces(path):
        rest = piece
        while rest:
            length += len(inflate.decompress(rest))
            rest = inflate.unused_data
            if inflate.eof:
                inflate = zlib.decompressobj(31)
    return length


def unzstd(path: Path) -> int:
    """Decompress a zstd file."""
    length = 0
    with path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as reader:
        while piece := reader.read(PIECE_BYTES):
            length += len(piece)
    return length


def unsnappy(path: Path) -> int:
    """Decompress a framed snappy file."""
    stream = snappy.StreamDecompressor()
    return sum(len(stream.decompress(piece)) for piece in pieces(path))


def hashed(path: Path) -> int:
    """Read and hash a file."""
    length, digest = 0, hashlib.sha1()
    for piece in pieces(path):
        digest.update(piece)
        length += len(piece)
    return length


PLAIN: dict[str, Callable[[Path], int]] = {
    "GZIP": gunzip,
    "ZSTANDARD": unzstd,
    "SNAPPY": unsnappy,
    "NONE": hashed,
}


async def read(transport: Transport, journal: str, length: int) -> int:
    """Read a journal; return the number of bytes."""
    reader = RetryReader(transport, pb.ReadRequest(journal=journal, end_offset=length))
    received = 0
    while (piece := await reader.read()) is not None:
        received += len(piece)
    await reader.aclose()
    return received


def rate(length: int, run: Callable[[], int]) -> float:
    """Return MB/s of uncompressed content."""
    begun = time.perf_counter()
    assert run() == length
    return length / 1e6 / (time.perf_counter() - begun)


async def fill(address: str, content: bytes) -> None:
    """Append the content to every journal, an eighth of a fragment at a time."""
    step = FRAGMENT_BYTES // 8
    async with connect(address) as transport:
        for name in CODECS:
            request = pb.AppendRequest(journal=f"bench/{name.lower()}")
            for begin in range(0, len(content), step):
                await append(transport, request, [content[begin : begin + step]])


def main() -> None:
    """Measure, and print the figures."""
    options = arguments(__doc__ or "", mib=256)
    content = text(options.mib << 20)
    figures = []
    with cluster(JOURNALS) as running:
        sdk_loop.run(fill(running.address, content))
        running.stop()  # which stores what is left
        root = running.data / "fragments"
        transport = connect(f"file://{root}/")
        for name, extension in CODECS.items():
            journal = f"bench/{name.lower()}"
            files = sorted((root / journal).glob(f"*.{extension}"))
            assert files, f"{journal} has no fragments"
            medians = in_turn(
                options.rounds,
                ours=lambda journal=journal: rate(
                    len(content), lambda: sdk_loop.run(read(transport, journal, len(content)))
                ),
                plain=lambda files=files, name=name: rate(
                    len(content), lambda: sum(map(PLAIN[name], files))
                ),
            )
            figures.append(Figure(name, medians["ours"], medians["plain"], "MB/s", BAR))
        sdk_loop.run(transport.aclose())
    report(figures, options)


if __name__ == "__main__":
    main()
