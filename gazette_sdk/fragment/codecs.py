"""Compression codecs of fragments (protocol section 7).

A compressed fragment may hold many members or frames, one after the other, and is complete on its
own: bytes after the last member are an error, as is an end in the middle of one. Readers read steps
of a quarter of a megabyte, since a journal is read from its beginning to its end.
"""

from __future__ import annotations

import io
import struct
import zlib
from abc import ABC, abstractmethod
from typing import BinaryIO, Final, cast

import snappy
import zstandard

from gazette_sdk.protocol import broker_pb2 as pb

CODECS: Final = (
    pb.NONE,
    pb.GZIP,
    pb.ZSTANDARD,
    pb.SNAPPY,
    pb.GZIP_OFFLOAD_DECOMPRESSION,
)
"""Every codec a fragment may have."""

STEP_BYTES: Final = 256 << 10
"""Number of compressed bytes read at once: large enough to hide Python's cost per step."""

_GZIP_HEADER: Final = bytes.fromhex("1f8b080000096e8800ff")
"""Deflate, no flags, a zero time, no extra flags, unknown system: the header of other writers."""

_SNAPPY_IDENTIFIER: Final = b"\xff\x06\x00\x00sNaPpY"

_ZSTD_LEVEL: Final = 3
_GZIP_LEVEL: Final = 4
"""More than twice as fast as zlib's own default of 6, for files about five percent larger."""


class CodecError(ValueError):
    """Compressed bytes are damaged, or end too early."""


def compressor(codec: int, out: BinaryIO) -> Compressor:
    """Return a compressor that writes to a file.

    Args:
        codec: one of :data:`CODECS`.
        out: file for the compressed bytes; it is not closed.

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
    """Return a reader of a file's decompressed content; the inverse of :func:`compressor`.

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
    """Writer of a compressed fragment to a file, batch by batch."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out

    @abstractmethod
    def write(self, data: bytes | memoryview) -> None:
        """Compress ``data``. The compressed bytes may be buffered until the batch ends."""

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
    """Writer of the framing format. A chunk holds up to 64 KiB, so small writes are gathered."""

    def __init__(self, out: BinaryIO) -> None:
        super().__init__(out)
        self._stream = snappy.StreamCompressor()
        self._identified = False
        self._pending: list[bytes] = []
        self._pending_bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        self._pending.append(bytes(data))
        self._pending_bytes += len(data)
        if self._pending_bytes >= STEP_BYTES:
            self.end_batch()

    def end_batch(self) -> None:
        if self._pending_bytes:
            # The stream writes its identifier before the first chunk.
            self._out.write(self._stream.compress(b"".join(self._pending)))
            self._identified = True
            self._pending.clear()
            self._pending_bytes = 0

    def close(self) -> None:
        self.end_batch()
        if not self._identified:
            self._out.write(_SNAPPY_IDENTIFIER)
            self._identified = True


# ------------------------------------------------------------------- reading


class _Reader(io.RawIOBase):
    """Base of decompressing readers, which closes the compressed file."""

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
        self._pending: bytes = b""  # compressed bytes that are not decompressed yet

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
    """Reader of zstandard frames, which holds at most one step in memory.

    A file that is cut in the middle of a frame reads like one that ends there: the reader of the
    fragment compares the length with the fragment's name.
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
    """Reader of the framing format, which verifies the checksum of every chunk.

    It holds one step of compressed bytes, what they decompress to, and the begin of a chunk.
    """

    def __init__(self, raw: BinaryIO) -> None:
        super().__init__(raw)
        self._stream = snappy.StreamDecompressor()
        self._identified = False
        self._ready = memoryview(b"")  # decompressed bytes that were not read yet

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        while not self._ready:
            data = self._raw.read(STEP_BYTES)
            if not self._identified:
                data = self._identify(data)
            if not data:
                # A repeated identifier is a whole chunk, but the stream keeps it for the next call.
                if self._stream.remains not in (None, _SNAPPY_IDENTIFIER):
                    raise CodecError("snappy content ends in the middle of a chunk")
                return 0
            try:
                self._ready = memoryview(self._stream.decompress(data))
            except OSError as error:
                raise CodecError(f"snappy content is damaged: {error}") from error
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _identify(self, data: bytes) -> bytes:
        """Return the first bytes of the content, which begin with a whole stream identifier.

        The library accepts content without one.
        """
        while len(data) < len(_SNAPPY_IDENTIFIER) and (more := self._raw.read(STEP_BYTES)):
            data += more
        if data and not data.startswith(_SNAPPY_IDENTIFIER):
            if _SNAPPY_IDENTIFIER.startswith(data):
                raise CodecError("snappy content ends in the middle of a chunk")
            raise CodecError("snappy content does not begin with a stream identifier")
        self._identified = True
        return data
