"""Records of an input, and the keys before them (cli section 5, append). Pure."""

from __future__ import annotations

import base64
import binascii
from typing import Literal

from gazette_sdk.errors import FramingError, GazetteError
from gazette_sdk.framing import Cutter, FixedProtobuf, Framing, JsonLines

__all__ = ["Record", "Records"]

Record = tuple[bytes, bytes]
"""Key of a record, or empty bytes, and its content with its framing."""


class Records:
    """Cutter of input into records.

    Args:
        framing: ``lines`` or ``fixed``; records keep their newlines or headers.
        has_keys: a key of the same framing precedes each record.
        base64_keys: keys are base64.
    """

    def __init__(
        self, framing: Literal["lines", "fixed"], *, has_keys: bool, base64_keys: bool
    ) -> None:
        self._framing: Framing = JsonLines() if framing == "lines" else FixedProtobuf()
        self._cutter = Cutter(self._framing)
        self._has_keys = has_keys
        self._base64_keys = base64_keys
        self._key: bytes | None = None

    @property
    def has_dangling_key(self) -> bool:
        """True if the last frame was a key without a record yet."""
        return self._key is not None

    def feed(self, block: bytes) -> tuple[list[Record], GazetteError | None]:
        """Return the records that a block completes, and the error behind them.

        Args:
            block: further input; empty bytes at its end.
        """
        cut = self._cutter.feed(block) if block else self._cutter.finish()
        records: list[Record] = []
        for begin, end in zip(cut.frames.begins, cut.frames.ends, strict=True):
            frame = bytes(cut.buffer[begin:end])
            if not self._has_keys:
                records.append((b"", frame))
            elif self._key is None:
                try:
                    self._key = self._key_of(frame)
                except GazetteError as error:
                    return records, error
            else:
                records.append((self._key, frame))
                self._key = None
        return records, self._explained(cut.frames.error)

    def _key_of(self, frame: bytes) -> bytes:
        if isinstance(self._framing, FixedProtobuf):
            return frame[self._framing.header_bytes :]
        key = frame.rstrip(b"\r\n")
        if not self._base64_keys:
            return key
        try:
            return base64.b64decode(key, validate=True)
        except binascii.Error as error:
            raise FramingError(f"the partition key {key!r} is not base64: {error}") from error

    def _explained(self, error: FramingError | None) -> FramingError | None:
        if error is None:
            return None
        what = "record" if self._key is not None or not self._has_keys else "partition key"
        return FramingError(f"input at byte {error.offset}: no whole {what}: {error}")
