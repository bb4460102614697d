"""Recorded operations: their frames, and the chain of checksums over them (recovery log 1).

A frame is a fixed header and a protobuf message. The content of a write follows its frame; it is
not part of the message, and the checksum does not cover it.
"""

from __future__ import annotations

import posixpath

import google_crc32c
from google.protobuf.message import DecodeError as ProtobufDecodeError

from gazette_sdk.errors import DecodeError, ValidationError
from gazette_sdk.framing.base import FixedProtobuf
from gazette_sdk.protocol.recoverylog_pb2 import RecordedOp

__all__ = [
    "AUTHOR_REGISTER",
    "HEADER_BYTES",
    "clean_path",
    "crc32c",
    "decode_operation",
    "fence_of",
    "frame_operation",
]

HEADER_BYTES = FixedProtobuf.header_bytes
"""Length of the header of a frame, which the checksum does not cover."""

AUTHOR_REGISTER = "author"
"""Register of a log's journal that names the author who may append."""

_FENCE_DIGITS = "0123456789abcdefghijklmnopqrstuv"
_AUTHOR_MAX = 0xFFFF_FFFF
_framing = FixedProtobuf()


def crc32c(content: bytes, before: int = 0) -> int:
    """Return the CRC-32C of content that continues content with the checksum ``before``."""
    return int(google_crc32c.extend(before, content))


def fence_of(author: int) -> str:
    """Return an author as the value of the register ``author``: in base 32, without padding.

    Raises:
        ValidationError: it is not a number of 32 bits above 0.
    """
    if not 0 < author <= _AUTHOR_MAX:
        raise ValidationError(
            f"{author} is not in [1, {_AUTHOR_MAX}]", kind="invalid_author", path="author"
        )
    digits = []
    while author:
        digits.append(_FENCE_DIGITS[author & 31])
        author >>= 5
    return "".join(reversed(digits))


def clean_path(path: str) -> str:
    """Return a path as operations have it: absolute, without ``.``, ``..`` and double slashes.

    Raises:
        ValidationError: it does not begin with a slash, or names the directory itself.
    """
    cleaned = "/" + posixpath.normpath(path).lstrip("/")
    if not path.startswith("/") or cleaned == "/":
        raise ValidationError(
            f"{path!r} is no absolute path of a file", kind="not_clean", path="path"
        )
    return cleaned


def frame_operation(operation: RecordedOp) -> bytes:
    """Return the frame of an operation. The content of a write is appended behind it."""
    out = bytearray()
    _framing.encode(operation.SerializeToString(), out)
    return bytes(out)


def decode_operation(message: bytes) -> RecordedOp:
    """Return the operation of a frame without its header.

    Raises:
        DecodeError: it is no operation.
    """
    operation = RecordedOp()
    try:
        operation.ParseFromString(message)
    except ProtobufDecodeError as error:
        raise DecodeError(f"a frame holds no recorded operation: {error}") from error
    return operation
