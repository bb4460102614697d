import pytest

from gazette_sdk.server.http import guess_content_type


@pytest.mark.parametrize(
    ("content", "media_type"),
    [
        (b"first line\n", "text/plain; charset=utf-8"),
        (b'{"a": 1}\n', "text/plain; charset=utf-8"),
        ("grüß".encode(), "text/plain; charset=utf-8"),
        (b"\x1f\x8b\x08\x00\x00", "application/x-gzip"),
        (b"  \n<!doctype html><p>", "text/html; charset=utf-8"),
        (b"<a>not html without a space or bracket<a", "text/html; charset=utf-8"),
        (b"<article>", "text/plain; charset=utf-8"),
        (b" <?xml version", "text/xml; charset=utf-8"),
        (b"%PDF-1.7", "application/pdf"),
        (b"\x89PNG\r\n\x1a\n", "image/png"),
        (b"PK\x03\x04", "application/zip"),
        (b"\xfe\xff\x00a", "text/plain; charset=utf-16be"),
        (b"a\x00b", "application/octet-stream"),
        (b"\x66\x33\x93\x36\x01", "application/octet-stream"),
        (b"x" * 512 + b"\x00", "text/plain; charset=utf-8"),
    ],
)
def test_the_first_bytes_say_the_media_type(content, media_type):
    assert guess_content_type(content) == media_type
