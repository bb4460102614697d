"""Input to records and keys."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.cli.journals.read import Records
from gazette_sdk.errors import FramingError
from gazette_sdk.framing import FixedProtobuf


def cut(records, *blocks):
    """All records of an input, and the first error."""
    found = []
    for block in (*blocks, b""):
        more, error = records.feed(block)
        found += more
        if error is not None:
            return found, error
    return found, None


def fixed(*payloads):
    out = bytearray()
    for payload in payloads:
        FixedProtobuf().encode(payload, out)
    return bytes(out)


lines = st.lists(st.binary(max_size=20).map(lambda line: line.replace(b"\n", b"") + b"\n"))


@given(lines, st.integers(1, 30))
def test_lines_are_the_same_however_they_come(found, size):
    content = b"".join(found)
    blocks = [content[begin : begin + size] for begin in range(0, len(content), size)]
    records = Records("lines", has_keys=False, base64_keys=False)
    assert cut(records, *blocks) == ([(b"", line) for line in found], None)


@given(st.lists(st.tuples(st.binary(max_size=9), st.binary(max_size=30))), st.integers(1, 30))
def test_fixed_records_keep_their_headers_and_keys_lose_theirs(pairs, size):
    content = b"".join(fixed(key, value) for key, value in pairs)
    blocks = [content[begin : begin + size] for begin in range(0, len(content), size)]
    records = Records("fixed", has_keys=True, base64_keys=False)
    assert cut(records, *blocks) == ([(key, fixed(value)) for key, value in pairs], None)


def test_keys_of_lines_lose_their_line_ends():
    records = Records("lines", has_keys=True, base64_keys=False)
    assert cut(records, b"key\r\nvalue\r\n") == ([(b"key", b"value\r\n")], None)


def test_empty_lines_are_records_and_keys_as_well():
    assert cut(Records("lines", has_keys=False, base64_keys=False), b"\n\nx\n") == (
        [(b"", b"\n"), (b"", b"\n"), (b"", b"x\n")],
        None,
    )
    records = Records("lines", has_keys=True, base64_keys=False)
    assert cut(records, b"\n\n\nx\n") == ([(b"", b"\n"), (b"", b"x\n")], None)


def test_keys_may_be_base64():
    records = Records("lines", has_keys=True, base64_keys=True)
    assert cut(records, base64.b64encode(b"\n\0") + b"\nvalue\n") == ([(b"\n\0", b"value\n")], None)


def test_a_key_without_a_record_is_remembered():
    records = Records("lines", has_keys=True, base64_keys=False)
    assert cut(records, b"key\n") == ([], None)
    assert records.has_dangling_key


@pytest.mark.parametrize(
    ("framing", "has_keys", "content", "whole", "problem"),
    [
        ("lines", False, b"one\ntwo", 1, "no whole record"),
        ("lines", True, b"key\nvalue\nkey", 1, "no whole partition key"),
        ("lines", True, b"key\nval", 0, "no whole record"),
        ("fixed", False, fixed(b"good") + b"f3\x936\x06\0\0\0br", 1, "no whole record"),
        ("fixed", False, b"this is no fixed frame", 0, "are no frame"),
    ],
)
def test_what_is_whole_before_an_error_is_kept(framing, has_keys, content, whole, problem):
    records, error = cut(Records(framing, has_keys=has_keys, base64_keys=False), content)
    assert len(records) == whole
    assert isinstance(error, FramingError)
    assert problem in str(error)


def test_a_key_which_is_no_base64_is_named():
    records, error = cut(Records("lines", has_keys=True, base64_keys=True), b"!!!\nv\n")
    assert records == []
    assert "!!!" in str(error)
