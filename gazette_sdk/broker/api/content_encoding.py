"""Decoder of a request's compressed body, which must be complete (RFC 9110, section 8.4)."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from gazette_sdk.errors import ValidationError

__all__ = ["BodyDecoder", "decoder_of"]

STEP_BYTES = 256 * 1024
"""Greatest piece of decoded content: a small body can decode to a thousand times its size."""

_GZIP_BITS = 16 + zlib.MAX_WBITS


def decoder_of(encoding: str) -> BodyDecoder | None:
    """Return the decoder of a ``Content-Encoding``; None if the body is sent as it is.

    Raises:
        ValidationError: the encoding is not supported.
    """
    match encoding.strip().lower():
        case "" | "identity":
            return None
        case "gzip" | "x-gzip":
            return BodyDecoder(_GZIP_BITS)
        case "deflate":
            return BodyDecoder(zlib.MAX_WBITS)
        case _:
            raise ValidationError(
                f"Content-Encoding {encoding[:40]!r} is not supported: send gzip, deflate or none"
            )


class BodyDecoder:
    """Incremental decoder of a body. gzip may have many members; there is nothing behind the last.

    Args:
        window_bits: format, as of :func:`zlib.decompressobj`.
    """

    def __init__(self, window_bits: int) -> None:
        self._window_bits = window_bits
        self._member = zlib.decompressobj(window_bits)
        self._is_inside = False
        self._is_begun = False

    def feed(self, encoded: bytes) -> Iterator[bytes]:
        """Yield the content of the next bytes, in pieces of bounded size.

        Raises:
            ValidationError: the bytes are damaged.
        """
        while encoded:
            if self._member.eof:
                self._member = zlib.decompressobj(self._window_bits)
            self._is_begun = self._is_inside = True
            try:
                content = self._member.decompress(encoded, STEP_BYTES)
            except zlib.error as error:
                raise ValidationError(f"the compressed body is damaged: {error}") from None
            self._is_inside = not self._member.eof
            encoded = self._member.unused_data or self._member.unconsumed_tail
            if content:
                yield content

    def finish(self) -> None:
        """Check that the body is complete.

        Raises:
            ValidationError: it ends inside a member.
        """
        if self._is_inside or not self._is_begun:
            raise ValidationError(
                "the compressed body is truncated: nothing was appended; send all of it"
            )
