"""Fragments: their names in stores, their sums, their rules (protocol section 7)."""

from __future__ import annotations

import re
import struct

from gazette_sdk.errors import ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.names import at, clean_path, validate_journal, validate_path_component

__all__ = [
    "PATH_POSTFIX_LENGTH_BYTES",
    "codec_extension",
    "codec_of_extension",
    "content_name",
    "content_path",
    "digest_of",
    "is_zero_sum",
    "length_of",
    "parse_content_path",
    "set_sum",
    "sum_of",
    "validate_codec",
    "validate_fragment",
]

PATH_POSTFIX_LENGTH_BYTES = (0, 512)
"""Bounds of the path between a journal's name and a fragment's content name."""

_EXTENSIONS = {
    pb.CompressionCodec.NONE: ".raw",
    pb.CompressionCodec.GZIP: ".gz",
    pb.CompressionCodec.ZSTANDARD: ".zst",
    pb.CompressionCodec.SNAPPY: ".sz",
    pb.CompressionCodec.GZIP_OFFLOAD_DECOMPRESSION: "",
}
_CODECS_BY_EXTENSION = {
    **{extension: codec for codec, extension in _EXTENSIONS.items()},
    ".gzip": pb.CompressionCodec.GZIP,
    ".zstandard": pb.CompressionCodec.ZSTANDARD,
    ".snappy": pb.CompressionCodec.SNAPPY,
    ".gzod": pb.CompressionCodec.GZIP_OFFLOAD_DECOMPRESSION,
}
_SUM = struct.Struct(">QQI")
_HEX = re.compile(r"\+?[0-9a-fA-F]+")
_GREATEST_OFFSET = (1 << 63) - 1


def content_name(fragment: pb.Fragment) -> str:
    """Return a fragment's content-addressed name: ``BEGIN-END-SUM`` and the codec's extension."""
    return (
        f"{fragment.begin:016x}-{fragment.end:016x}-{digest_of(fragment.sum).hex()}"
        f"{codec_extension(fragment.compression_codec)}"
    )


def content_path(fragment: pb.Fragment) -> str:
    """Return a fragment's path in a store: journal, path postfix and content name, cleaned."""
    return clean_path(f"{fragment.journal}/{fragment.path_postfix}/{content_name(fragment)}")


def parse_content_path(journal: str, relative_path: str) -> pb.Fragment:
    """Return the fragment of a store's object, by its path below the journal's directory.

    Raises:
        ValidationError: the object is no fragment of the journal: kind ``wrong_format``,
            ``invalid_hex``, ``invalid_sum_length``, ``unknown_extension``, or as
            :func:`validate_fragment`. Foreign files below a journal are common.
    """
    postfix, _, final = relative_path.rpartition("/")
    stem, dot, suffix = final.rpartition(".")
    if not dot:
        stem, suffix = final, ""
    parts = stem.split("-")
    if len(parts) != 3:
        raise ValidationError(
            f"wrong format ({final!r}; expected BEGIN-END-SUM)", kind="wrong_format"
        )
    try:
        postfix.encode()
    except UnicodeEncodeError:  # a directory's name is any bytes
        raise ValidationError(
            f"wrong format ({postfix!r} is no text)", kind="wrong_format"
        ) from None
    fragment = pb.Fragment(
        journal=journal,
        begin=_parse_offset(parts[0], "Begin"),
        end=_parse_offset(parts[1], "End"),
        sum=_parse_sum(parts[2]),
        compression_codec=codec_of_extension(dot + suffix),
        path_postfix=postfix,
    )
    validate_fragment(fragment)
    return fragment


def validate_fragment(fragment: pb.Fragment, path: str = "") -> None:
    """Check a fragment: journal, begin <= end, codec, path postfix.

    Raises:
        ValidationError: of the first rule that is broken.
    """
    validate_journal(fragment.journal, at(path, "Journal"))
    if fragment.begin > fragment.end:
        raise ValidationError(
            f"expected begin <= end (have {fragment.begin}, {fragment.end})",
            kind="begin_after_end",
            path=path,
        )
    validate_codec(fragment.compression_codec, at(path, "CompressionCodec"))
    if fragment.path_postfix:
        validate_path_component(
            fragment.path_postfix, at(path, "PathPostfix"), *PATH_POSTFIX_LENGTH_BYTES
        )


def length_of(fragment: pb.Fragment) -> int:
    """Return the number of bytes of the journal that the fragment holds."""
    return fragment.end - fragment.begin


# ---------------------------------------------------------------- sums


def digest_of(content_sum: pb.SHA1Sum) -> bytes:
    """Return the 20 bytes of a SHA-1 digest."""
    return _SUM.pack(content_sum.part1, content_sum.part2, content_sum.part3)


def sum_of(digest: bytes) -> pb.SHA1Sum:
    """Return the message of a SHA-1 digest of 20 bytes."""
    part1, part2, part3 = _SUM.unpack(digest)
    return pb.SHA1Sum(part1=part1, part2=part2, part3=part3)


def is_zero_sum(content_sum: pb.SHA1Sum) -> bool:
    """Return True if it is the sum of an empty fragment: all zeros, not the digest of no bytes."""
    return not (content_sum.part1 or content_sum.part2 or content_sum.part3)


def set_sum(content_sum: pb.SHA1Sum, digest: bytes) -> None:
    """Set a message's sum to a SHA-1 digest of 20 bytes."""
    content_sum.part1, content_sum.part2, content_sum.part3 = _SUM.unpack(digest)


# ---------------------------------------------------------------- codecs


def codec_extension(codec: pb.CompressionCodec) -> str:
    """Return the extension of a codec's fragments; empty for offloaded gzip.

    Raises:
        ValidationError: the codec is INVALID or unknown.
    """
    validate_codec(codec, "CompressionCodec")
    return _EXTENSIONS[codec]


def codec_of_extension(extension: str) -> pb.CompressionCodec:
    """Return the codec of a name's extension, with its dot and in any case.

    Raises:
        ValidationError: kind ``unknown_extension``.
    """
    codec = _CODECS_BY_EXTENSION.get(extension.lower())
    if codec is None:
        raise ValidationError(
            f"unknown compression extension ({extension!r})", kind="unknown_extension"
        )
    return codec


def validate_codec(codec: int, path: str) -> None:
    """Check that a compression codec is known, and not INVALID.

    Raises:
        ValidationError: kind ``invalid_codec``.
    """
    if codec not in _EXTENSIONS:
        known = ", ".join(pb.CompressionCodec.Name(codec) for codec in _EXTENSIONS)
        raise ValidationError(
            f"invalid compression codec ({codec}; expected one of {known})",
            kind="invalid_codec",
            path=path,
        )


def _parse_offset(text: str, path: str) -> int:
    value = int(text, 16) if _HEX.fullmatch(text) else -1
    if not 0 <= value <= _GREATEST_OFFSET:
        raise ValidationError(f"not a 64-bit hex offset ({text!r})", kind="invalid_hex", path=path)
    return value


def _parse_sum(text: str) -> pb.SHA1Sum:
    if len(text) % 2 or not re.fullmatch("[0-9a-fA-F]*", text):
        raise ValidationError(f"not hex ({text!r})", kind="invalid_hex", path="Sum")
    digest = bytes.fromhex(text)
    if len(digest) != _SUM.size:
        raise ValidationError(
            f"invalid SHA-1 length ({len(digest)} bytes; expected {_SUM.size})",
            kind="invalid_sum_length",
            path="Sum",
        )
    return sum_of(digest)
