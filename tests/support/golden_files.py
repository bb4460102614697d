"""Looks into stored fragment files."""

from __future__ import annotations

import io
import zlib

from gazette_sdk.fragment.codecs import decompressor
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import codec_extension

__all__ = ["decoded", "gzip_members"]


def decoded(extension: str, raw: bytes) -> bytes:
    """The content of a fragment file, by the extension of its name."""
    codec = next(
        codec
        for codec in (pb.NONE, pb.GZIP, pb.ZSTANDARD, pb.SNAPPY)
        if codec_extension(codec) == extension
    )
    return decompressor(codec, io.BytesIO(raw)).read()


def gzip_members(raw: bytes) -> list[int]:
    """The lengths of the contents of a file's gzip members."""
    sizes: list[int] = []
    while raw:
        member = zlib.decompressobj(16 + zlib.MAX_WBITS)
        sizes.append(len(member.decompress(raw)))
        assert member.eof, "the last member is cut"
        raw = member.unused_data
    return sizes
