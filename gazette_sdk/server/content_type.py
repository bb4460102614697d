"""Media type of a body, guessed from its first bytes as browsers do.

A gateway has no media type of a journal's bytes. The rules are those of the "MIME Sniffing"
standard of the WHATWG, sections 6 and 7, without the container formats whose header needs parsing.
"""

from __future__ import annotations

import re

__all__ = ["SNIFFED_BYTES", "guess_content_type"]

SNIFFED_BYTES = 512
"""Number of the first bytes that are examined."""

_TEXT = "text/plain; charset=utf-8"

_HTML = re.compile(
    rb"[\t\n\f\r ]*<(?:!DOCTYPE HTML|HTML|HEAD|SCRIPT|IFRAME|H1|DIV|FONT|TABLE|A|STYLE|TITLE|B|BODY"
    rb"|BR|P|!--)[ >]",
    re.IGNORECASE,
)
_XML = re.compile(rb"[\t\n\f\r ]*<\?xml")

_SIGNATURES: tuple[tuple[bytes, str], ...] = (
    (b"%PDF-", "application/pdf"),
    (b"%!PS-Adobe-", "application/postscript"),
    (b"\xfe\xff", "text/plain; charset=utf-16be"),
    (b"\xff\xfe", "text/plain; charset=utf-16le"),
    (b"\xef\xbb\xbf", _TEXT),
    (b"\x00\x00\x01\x00", "image/x-icon"),
    (b"BM", "image/bmp"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"ID3", "audio/mpeg"),
    (b"OggS\x00", "application/ogg"),
    (b"\x1a\x45\xdf\xa3", "video/webm"),
    (b"\x00\x01\x00\x00", "font/ttf"),
    (b"OTTO", "font/otf"),
    (b"wOFF", "font/woff"),
    (b"wOF2", "font/woff2"),
    (b"\x1f\x8b\x08", "application/x-gzip"),
    (b"PK\x03\x04", "application/zip"),
    (b"Rar!\x1a\x07", "application/x-rar-compressed"),
    (b"\x00asm", "application/wasm"),
)

_BINARY = re.compile(rb"[\x00-\x08\x0b\x0e-\x1a\x1c-\x1f]")


def guess_content_type(content: bytes) -> str:
    """Return the media type of a body that begins with ``content``, which must not be empty."""
    head = content[:SNIFFED_BYTES]
    if _HTML.match(head):
        return "text/html; charset=utf-8"
    if _XML.match(head):
        return "text/xml; charset=utf-8"
    for signature, media_type in _SIGNATURES:
        if head.startswith(signature):
            return media_type
    return "application/octet-stream" if _BINARY.search(head) else _TEXT
