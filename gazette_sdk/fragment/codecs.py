"""Compression codecs of fragments (protocol section 7).

A compressed fragment may hold many members or frames, one after the other, and is complete on its
own: bytes after the last member are an error, as is an end in the middle of one. Readers here take
steps of a quarter of a megabyte, since a journal is read from its beginning to its end.
"""

from __future__ import annotations

import io
import struct
import zlib
from abc import ABC, abstractmethod
from typing import BinaryIO, Final, cast

import cramjam
import zstandard

from gazette_sdk.protocol import broker_pb2 as pb

__all__ = ["CODECS", "CodecError", "Compressor", "compressor", "decompressor"]

CODECS: Final = (
    pb.NONE,
    pb.GZIP,
    pb.ZSTANDARD,
    pb.SNAPPY,
    pb.GZIP_OFFLOAD_DECOMPRESSION,
)
"""Every codec a fragment may have."""

STEP_BYTES: Final = 256 << 10
"""Compressed bytes read at once: large enough that Python's cost per step does not count."""

_GZIP_HEADER: Final = bytes.fromhex("1f8b080000096e8800ff")
"""Deflate, no flags, a zero time, no extra flags, unknown system: what other writers send."""

_SNAPPY_IDENTIFIER: Final = b"\xff\x06\x00\x00sNaPpY"

_ZSTD_LEVEL: Final = 3
_GZIP_LEVEL: Final = 4
"""More than twice as fast as zlib's own default of 6, for files about five percent larger."""


class CodecError(ValueError):
    """Compressed bytes are damaged, or end too early."""


def compressor(codec: int, out: BinaryIO) -> Compressor:
    """Compress into a file.

    Args:
        codec: one of :data:`CODECS`.
        out: gets the compressed bytes; it is not closed.

    Raises:
        ValueError: no such codec.
    """
    match codec:
        case pb.NONE:
            return _Plain(out)
        case pb.GZIP:
            return _Gzip(out, members=True)
        case pb.GZIP_OFFLOAD_DECOMPRESSION:
            return _Gzip(out, members=False)
        case pb.ZSTANDARD:
            return _Zstandard(out)
        case pb.SNAPPY:
            return _Snappy(out)
        case _:
            raise ValueError(f"codec {codec} is not a compression codec")


def decompressor(codec: int, raw: BinaryIO) -> BinaryIO:
    """Decompress a file; the counterpart of :func:`compressor`.

    Args:
        codec: one of :data:`CODECS`. GZIP_OFFLOAD_DECOMPRESSION expects compressed bytes: use NONE
            where a store has decompressed them already.
        raw: the compressed bytes; closing the result closes it.

    Returns:
        An unbuffered binary reader. Reading raises :class:`CodecError` for damaged bytes.

    Raises:
        ValueError: no such codec.
    """
    match codec:
        case pb.NONE:
            return raw
        case pb.GZIP | pb.GZIP_OFFLOAD_DECOMPRESSION:
            return cast("BinaryIO", _GzipReader(raw))
        case pb.ZSTANDARD:
            return cast("BinaryIO", _ZstandardReader(raw))
        case pb.SNAPPY:
            return cast("BinaryIO", _SnappyReader(raw))
        case _:
            raise ValueError(f"codec {codec} is not a compression codec")


# ------------------------------------------------------------------- writing


class Compressor(ABC):
    """Compresses a fragment, batch after batch, into a file."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out

    @abstractmethod
    def write(self, data: bytes | memoryview) -> None:
        """Compress ``data``; what comes of it may be held back until the batch ends."""

    @abstractmethod
    def end_batch(self) -> None:
        """End a batch: all bytes so far can be read back from the file.

        GZIP closes a member here; GZIP_OFFLOAD_DECOMPRESSION stays one single stream.
        """

    @abstractmethod
    def close(self) -> None:
        """End the last batch, and the file's content. The file itself stays open."""


class _Plain(Compressor):
    def write(self, data: bytes | memoryview) -> None:
        self._out.write(data)

    def end_batch(self) -> None:
        pass

    def close(self) -> None:
        pass


class _Gzip(Compressor):
    def __init__(self, out: BinaryIO, *, members: bool) -> None:
        super().__init__(out)
        self._members = members
        self._written = False
        self._deflate: zlib._Compress | None = None
        self._crc = self._length = 0

    def write(self, data: bytes | memoryview) -> None:
        if not data:
            return
        if self._deflate is None:
            self._begin_member()
        assert self._deflate is not None
        self._crc = zlib.crc32(data, self._crc)
        self._length += len(data)
        self._out.write(self._deflate.compress(data))

    def end_batch(self) -> None:
        if self._deflate is None:
            return
        if self._members:
            self._end_member()
        else:
            self._out.write(self._deflate.flush(zlib.Z_SYNC_FLUSH))

    def close(self) -> None:
        if self._deflate is None and not self._written:
            self._begin_member()  # no content at all: still one valid member
        if self._deflate is not None:
            self._end_member()

    def _begin_member(self) -> None:
        self._deflate = zlib.compressobj(_GZIP_LEVEL, wbits=-zlib.MAX_WBITS)
        self._crc = self._length = 0
        self._written = True
        self._out.write(_GZIP_HEADER)

    def _end_member(self) -> None:
        assert self._deflate is not None
        self._out.write(self._deflate.flush())
        self._out.write(struct.pack("<II", self._crc, self._length & 0xFFFFFFFF))
        self._deflate = None


class _Zstandard(Compressor):
    def __init__(self, out: BinaryIO) -> None:
        super().__init__(out)
        options = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_content_size=False)
        self._frame = options.compressobj()

    def write(self, data: bytes | memoryview) -> None:
        self._out.write(self._frame.compress(data))

    def end_batch(self) -> None:
        self._out.write(self._frame.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))

    def close(self) -> None:
        self._out.write(self._frame.flush(zstandard.COMPRESSOBJ_FLUSH_FINISH))


class _Snappy(Compressor):
    """The framing format; each chunk holds up to 64 KiB, so small writes are gathered first."""

    def __init__(self, out: BinaryIO) -> None:
        super().__init__(out)
        self._pending = bytearray()
        self._out.write(_SNAPPY_IDENTIFIER)

    def write(self, data: bytes | memoryview) -> None:
        self._pending += data
        if len(self._pending) >= STEP_BYTES:
            self._flush()

    def end_batch(self) -> None:
        self._flush()

    def close(self) -> None:
        self._flush()

    def _flush(self) -> None:
        if self._pending:
            framed = memoryview(cramjam.snappy.compress(self._pending))
            self._out.write(framed[len(_SNAPPY_IDENTIFIER) :])
            self._pending.clear()


# ------------------------------------------------------------------- reading


class _Reader(io.RawIOBase):
    """Base of decompressing readers: closes what it reads from."""

    def __init__(self, raw: BinaryIO) -> None:
        super().__init__()
        self._raw = raw

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        if not self.closed:
            self._raw.close()
        super().close()


class _GzipReader(_Reader):
    def __init__(self, raw: BinaryIO) -> None:
        super().__init__(raw)
        self._member: zlib._Decompress | None = None
        self._pending: bytes = b""  # compressed bytes not yet taken

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        wanted = len(buffer)
        while wanted:
            if not self._pending:
                self._pending = self._raw.read(STEP_BYTES)
            if not self._pending:
                if self._member is not None:
                    raise CodecError("gzip content ends in the middle of a member")
                return 0
            if self._member is None:
                self._member = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
            try:
                data = self._member.decompress(self._pending, wanted)
            except zlib.error as error:
                raise CodecError(f"gzip content is damaged: {error}") from error
            if self._member.eof:
                self._pending = self._member.unused_data
                self._member = None
            else:
                self._pending = self._member.unconsumed_tail
            if data:
                buffer[: len(data)] = data
                return len(data)
        return 0


class _ZstandardReader(_Reader):
    """Never more than a step stands in memory, however well the content compresses.

    A file cut in the middle of a frame reads like one that ends there: whoever reads a fragment
    knows its length, and finds it short.
    """

    def __init__(self, raw: BinaryIO) -> None:
        super().__init__(raw)
        self._frames = zstandard.ZstdDecompressor().stream_reader(
            raw, read_size=STEP_BYTES, read_across_frames=True, closefd=False
        )

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        try:
            return self._frames.readinto(buffer)
        except zstandard.ZstdError as error:
            raise CodecError(f"zstandard content is damaged: {error}") from error


class _SnappyReader(_Reader):
    """Cuts whole chunks, and lets many of them be decoded and their checksums tested at once."""

    def __init__(self, raw: BinaryIO) -> None:
        super().__init__(raw)
        self._pending = bytearray()  # compressed bytes: the begin of an incomplete chunk
        self._ready = memoryview(b"")  # decompressed bytes not yet given
        self._identified = False

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        while not self._ready:
            data = self._raw.read(STEP_BYTES)
            if not data:
                if self._pending:
                    raise CodecError("snappy content ends in the middle of a chunk")
                return 0
            self._pending += data
            whole = self._whole_chunks()
            if whole:
                chunks = bytes(self._pending[:whole])
                del self._pending[:whole]
                self._ready = self._decode(chunks)
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _whole_chunks(self) -> int:
        """How many of the pending bytes are whole chunks."""
        end, have = 0, len(self._pending)
        while end + 4 <= have:
            length = int.from_bytes(self._pending[end + 1 : end + 4], "little")
            if end + 4 + length > have:
                break
            end += 4 + length
        return end

    def _decode(self, chunks: bytes) -> memoryview:
        if not self._identified:
            if not chunks.startswith(_SNAPPY_IDENTIFIER):
                raise CodecError("snappy content does not begin with a stream identifier")
            self._identified = True
        else:
            chunks = _SNAPPY_IDENTIFIER + chunks
        try:
            return memoryview(cramjam.snappy.decompress(chunks))
        except cramjam.DecompressionError as error:
            raise CodecError(f"snappy content is damaged: {error}") from error
