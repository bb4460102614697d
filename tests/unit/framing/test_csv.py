"""CSV: the conformance vectors, what is refused, and a naive reader as the oracle."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gazette_sdk.errors import DecodeError, TornFrameError
from gazette_sdk.framing import Csv, Cutter, csv
from support.vectors import group

VECTORS = group("message", "csv_framing")


def follow(chunks, offset=0):
    """(payload, begin, end) of all records, and (text, begin, end) of all errors."""
    cutter = Cutter(Csv(), offset)
    records, errors = [], []

    def note(cut):
        texts = Csv().payloads(cut.buffer, cut.frames)
        for text, begin, end in zip(texts, cut.frames.begins, cut.frames.ends, strict=True):
            records.append((text, cut.offset + begin, cut.offset + end))
        error = cut.frames.error
        if error is not None:
            errors.append((str(error), error.offset, cutter.offset))
        return isinstance(error, DecodeError)

    for chunk in chunks:
        going = note(cutter.feed(chunk))
        while going:
            going = note(cutter.feed(b""))
    while note(cutter.finish()):
        pass
    return records, errors


def naive(content: bytes):
    """The rules, a byte at a time."""
    records, errors = [], []
    at, fixed = 0, None
    while at < len(content):
        begin, fields, error, place = at, 1, None, "begin"
        while at < len(content):
            byte, following = content[at : at + 1], content[at + 1 : at + 2]
            at += 1
            if place == "bad":
                if byte == b"\n":
                    break
            elif place == "quoted":
                if byte == b'"' and following == b'"':
                    at += 1
                elif byte == b'"':
                    place = "behind"
            elif byte == b"\n":
                place = "end"
                break
            elif byte == b",":
                place, fields = "begin", fields + 1
            elif place == "behind":
                if byte != b"\r" or following not in {b"\n", b""}:
                    error, place = "extraneous", "bad"
            elif byte == b'"':
                error, place = ("bare", "bad") if place == "field" else (None, "quoted")
            else:
                place = "field"
        text = content[begin:at].removesuffix(b"\n").removesuffix(b"\r")
        if error is not None:
            errors.append((error, begin, at))
        elif place == "quoted":
            errors.append(("unexpected EOF", begin, begin))
        elif text:
            fixed = fixed or fields
            if fields == fixed:
                records.append((text, begin, at))
            else:
                errors.append(("wrong number", begin, at))
    return records, errors


CONTENT = st.lists(
    st.sampled_from([b"a", b"bc", b",", b",", b"\n", b"\n", b"\r\n", b"\r", b'"', b'"', b'""'])
    | st.sampled_from([b"a,b\n", b'"a\n",b\n', b'a,"b"\r\n']),
    max_size=40,
).map(b"".join)
PLACES = st.lists(st.integers(0, 1000), max_size=12)


def chunks_of(content: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(content) + 1) for place in places), len(content)]
    return [content[a:b] for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize("window_bytes", [1, 7, 16 << 10])
@given(CONTENT, PLACES)
@example(b'a,"', [])
@example(b'a,"b"\r', [])
@example(b'"a""\n', [3, 4])
@example(b"\r", [])
def test_records_and_errors_are_those_of_a_naive_reader(window_bytes, content, places):
    before = csv._WINDOW_BYTES
    csv._WINDOW_BYTES = window_bytes
    try:
        records, errors = follow(chunks_of(content, places), 0)
    finally:
        csv._WINDOW_BYTES = before
    expected_records, expected_errors = naive(content)
    assert records == expected_records
    assert [error[1:] for error in errors] == [error[1:] for error in expected_errors]
    for (text, *_), (expected, *_) in zip(errors, expected_errors, strict=True):
        assert expected in text


@given(CONTENT, PLACES)
def test_errors_say_the_same_however_content_arrives(content, places):
    assert follow(chunks_of(content, places)) == follow([content])


def test_records_are_written_as_recorded():
    case = VECTORS["encode"][0]
    out = bytearray()
    payloads = [line for line in case["expect_stream_utf8"].encode().split(b"\n") if line]
    Csv().encode_many(payloads, out)
    assert out.decode() == case["expect_stream_utf8"]
    # The second has another number of fields.
    assert follow([bytes(out)])[0] == [(payloads[0], 0, len(payloads[0]) + 1)]


def test_another_number_of_fields_is_an_error_as_recorded():
    case = VECTORS["decode"][1]
    content = case["stream_utf8"].encode()
    records, errors = follow([content])
    assert [record[0].decode().split(",") for record in records] == case["expect"][:1]
    line = content.index(b"\n") + 1
    assert errors == [(case["expect"][1]["error"], line, len(content))]


def test_lines_are_counted_with_blank_ones_and_those_within_fields():
    content = b'\n\r\na,"1\n2\n3"\n\nb,c\n"x,\n\n\ny"\nd,e\n'
    records, errors = follow([content[at : at + 1] for at in range(len(content))])
    assert [record[0] for record in records] == [b'a,"1\n2\n3"', b"b,c", b"d,e"]
    assert [error[0] for error in errors] == ["record on line 8: wrong number of fields"]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b'a,b"c\n', 'parse error on line 1, column 4: bare " in non-quoted field'),
        (b'a,"b"c\n', 'parse error on line 1, column 5: extraneous or missing " in quoted field'),
        (
            b'a,b\n"c\nd"e,f\n',
            "record on line 2; parse error on line 3, column 2: extraneous or missing",
        ),
    ],
)
def test_a_quote_in_a_wrong_place_is_an_error_of_its_record(content, text):
    _, [error] = follow([content + b"1,2\n"])
    assert text in error[0]
    assert error[2] == len(content)


def test_a_record_with_a_wrong_quote_fixes_no_number_of_fields():
    records, errors = follow([b'a"b\n1,2\n3,4\n'])
    assert [record[0] for record in records] == [b"1,2", b"3,4"]
    assert len(errors) == 1


def test_blank_lines_belong_to_no_record():
    records, errors = follow([b"\n\r\n1,2\n\n\n3,4\r\n\n"], 1000)
    assert records == [(b"1,2", 1003, 1007), (b"3,4", 1009, 1014)]
    assert errors == []


@pytest.mark.parametrize("tail", [b"3,4", b"3,4\r", b'3,"4"', b'3,"4"\r', b"3,"])
def test_the_last_record_of_a_stream_may_lack_its_end(tail):
    records, errors = follow([b"1,2\n" + tail])
    assert records[1:] == [(tail.removesuffix(b"\r"), 4, 4 + len(tail))]
    assert errors == []


def test_the_last_record_needs_the_number_of_fields_and_the_end_of_its_quotes():
    cutter = Cutter(Csv())
    cutter.feed(b"1,2\n3")
    error = cutter.finish().frames.error
    assert (str(error), error.offset) == ("record on line 2: wrong number of fields", 4)
    cutter.feed(b'3,"4\n')
    error = cutter.finish().frames.error
    assert isinstance(error, TornFrameError)
    assert "5 bytes of a record with a quoted field that does not end" in str(error)


def test_a_cut_of_the_framing_itself_is_one_of_a_new_stream():
    framing = Csv()
    for content in (b"a,b\n", b"a\n", b"a,b,c\n"):
        frames = framing.cut(content)
        assert (frames.ends, frames.error) == ([len(content)], None)


def test_a_record_of_many_lines_is_not_looked_at_again_with_each_chunk(monkeypatch):
    looked_at = 0
    scan = csv._Scanner.scan

    def counting(self, buffer, begin, *, final):
        nonlocal looked_at
        before = self.at
        whole = scan(self, buffer, begin, final=final)
        looked_at += self.at - before
        return whole

    monkeypatch.setattr(csv._Scanner, "scan", counting)
    monkeypatch.setattr(
        csv, "_cut_bulk", lambda *_: pytest.fail("in bulk") if looked_at else REAL(*_)
    )
    content = b'a,"' + b'line ""of\n a text\n' * 5000 + b'"\n'
    records, errors = follow([content[at : at + 100] for at in range(0, len(content), 100)])
    assert [record[1:] for record in records] == [(0, len(content))]
    assert errors == []
    assert looked_at == len(content)


REAL = csv._cut_bulk


def test_many_bad_records_cost_a_look_at_their_neighbourhood_each(monkeypatch):
    looked_at = 0

    def counting(buffer, begin, stop):
        nonlocal looked_at
        looked_at += stop - begin
        return REAL(buffer, begin, stop)

    monkeypatch.setattr(csv, "_cut_bulk", counting)
    content = b"a,b\n" + b"c\n" * 500 + b"d,e\n" * 100_000
    records, errors = follow([content])
    assert (len(records), len(errors)) == (100_001, 500)
    assert looked_at < 502 * csv._WINDOW_BYTES + 2 * len(content)
