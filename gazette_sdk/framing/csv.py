r"""CSV: one record per message, quoted only where needed (message section 8).

Content is cut in bulk: quotes toggle between inside and outside of fields, and line feeds
outside end records. That is right if every quote is at a legal place, which is checked in bulk,
too. Records with a quote at another place, and incomplete records, are scanned field by field.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from gazette_sdk.errors import DecodeError, FramingError, TornFrameError
from gazette_sdk.framing.base import Buffer, Frames, Framing, register

_LINE_FEED = 0x0A
_RETURN = 0x0D
_QUOTE = 0x22
_COMMA = 0x2C

_WINDOW_BYTES = 16 << 10
"""Size of the first window that is cut in bulk; later ones grow. One bad record is reported per
call: a stream of bad records must not cost a scan of the whole buffer for each."""

_BLANK = (b"\n", b"\r\n", b"\r")
"""Lines without a record; the last one only at the end of a stream."""

_QUOTED = rb'"[^"]*+(?:""[^"]*+)*+"'
_FIELD = rb'(?:%b|[^",\n]*+)' % _QUOTED
_one_record = re.compile(rb"%b(?:,%b)*+" % (_FIELD, _FIELD)).fullmatch
_in_unquoted = re.compile(rb'[",\n]').search


class Csv(Framing):
    r"""``text/csv``: fields separated by commas, records ended by ``\n``.

    A payload is a record's text without its end. ``\r\n`` ends a record, too; blank lines are no
    records; the last record of a stream may lack its end. The first record of a stream fixes the
    number of fields of all later ones: a record with another number, or with quotes in wrong
    places, is an error of that record alone.
    """

    content_type: ClassVar[str] = "text/csv"
    form: ClassVar[str] = "csv"
    trailer_bytes: ClassVar[int] = 1

    def encode(self, payload: bytes, out: bytearray) -> None:
        """Append ``payload``, the text of one record, and a line feed."""
        quoted = b'"' in payload or b"\n" in payload or payload[-1:] == b"\r"
        if not payload or (quoted and not _is_record(payload)):
            raise FramingError(
                f"a payload of {len(payload)} bytes is no CSV record: quote fields which hold line"
                " breaks, double the quotes in them, and write at least one field"
            )
        out += payload
        out += b"\n"

    def stream(self) -> Framing:
        """Return the framing of one stream, which checks the number of fields."""
        return _Stream()

    def cut(self, buffer: Buffer, *, searched: int = 0, final: bool = False) -> Frames:
        """Find all whole records of ``buffer``, which is the begin of a stream."""
        del searched
        return _Stream().cut(buffer, final=final)

    def payloads(self, buffer: Buffer, frames: Frames) -> list[bytes]:
        """Return each record's text, without its end."""
        whole = bytes(buffer)
        return [
            _without_end(whole[begin:end])
            for begin, end in zip(frames.begins, frames.ends, strict=True)
        ]


def _is_record(payload: bytes) -> bool:
    # A return at the end would become a part of the record's end.
    return _one_record(payload) is not None and not payload.endswith(b"\r")


def _without_end(record: bytes) -> bytes:
    return record.removesuffix(b"\n").removesuffix(b"\r")


class _Bulk(NamedTuple):
    """Records of a window: the begin, end and number of fields of each.

    ``at`` is the index after the last line; ``is_bad`` is True if the record there has a quote at
    a wrong place.
    """

    begins: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    fields: npt.NDArray[np.int64]
    at: int
    is_bad: bool


class _ScanState(enum.Enum):
    """State of a scanner."""

    FIELD_BEGIN = enum.auto()
    UNQUOTED = enum.auto()
    QUOTED = enum.auto()
    BAD = enum.auto()
    END = enum.auto()


@dataclass(slots=True)
class _Scanner:
    """Scanner of one record, which resumes when more content is there.

    Attributes:
        at: number of bytes of the record that were scanned.
        state: state after them.
        fields: number of fields that have ended.
        error: the error of the record, if any. The record ends at the end of that line.
        error_at: position of the error, counted from the record's begin.
    """

    at: int = 0
    state: _ScanState = _ScanState.FIELD_BEGIN
    fields: int = 0
    error: str = ""
    error_at: int = 0

    def scan(self, buffer: Buffer, begin: int, *, final: bool) -> bool:
        """Scan on in the record at index ``begin``. Return True if it is whole."""
        size = len(buffer) - begin
        while self.state is not _ScanState.END and self.at < size:
            if self.state is _ScanState.QUOTED:
                if not self._scan_quoted(buffer, begin, final=final):
                    break
            elif self.state is _ScanState.UNQUOTED:
                self._scan_unquoted(buffer, begin)
            elif self.state is _ScanState.BAD:
                self._scan_bad_line(buffer, begin)
            elif buffer[begin + self.at] == _QUOTE:
                self.state = _ScanState.QUOTED
                self.at += 1
            else:
                self.state = _ScanState.UNQUOTED
        if self.state is _ScanState.END:
            return True
        if not final or self.state is _ScanState.QUOTED:
            return False
        self.fields += 1
        return True

    def _scan_unquoted(self, buffer: Buffer, begin: int) -> None:
        found = _in_unquoted(buffer, begin + self.at)
        if found is None:
            self.at = len(buffer) - begin
            return
        self.at = found.start() - begin
        if buffer[begin + self.at] == _QUOTE:
            self._fail('bare " in non-quoted field')
        else:
            self._end_field(buffer, begin)

    def _scan_quoted(self, buffer: Buffer, begin: int, *, final: bool) -> bool:
        """Scan up to the next quote. Return False if more content is needed to continue."""
        found = buffer.find(b'"', begin + self.at)
        if found < 0:
            self.at = len(buffer) - begin
            return False
        self.at = found - begin
        following = bytes(buffer[found + 1 : found + 3])
        if following[:1] == b'"':
            self.at += 2
        elif following[:1] in {b",", b"\n"}:
            self.at += 1
            self._end_field(buffer, begin)
        elif following == b"\r\n":
            self.at += 2
            self._end_field(buffer, begin)
        elif following in {b"", b"\r"}:
            if not final:
                return False
            self.at = len(buffer) - begin
            self.state = _ScanState.END
            self.fields += 1
        else:
            self._fail('extraneous or missing " in quoted field')
        return True

    def _end_field(self, buffer: Buffer, begin: int) -> None:
        """End a field at a comma or a line feed."""
        self.state = _ScanState.FIELD_BEGIN if buffer[begin + self.at] == _COMMA else _ScanState.END
        self.fields += 1
        self.at += 1

    def _fail(self, error: str) -> None:
        self.state = _ScanState.BAD
        self.error = error
        self.error_at = self.at

    def _scan_bad_line(self, buffer: Buffer, begin: int) -> None:
        found = buffer.find(b"\n", begin + self.at)
        self.at = (len(buffer) if found < 0 else found + 1) - begin
        if found >= 0:
            self.state = _ScanState.END


class _Stream(Csv):
    """Framing of one stream: it stores the number of fields, and counts lines."""

    def __init__(self) -> None:
        self._fields = 0
        self._lines = 0
        self._scanner: _Scanner | None = None
        self._scanned_bytes = 0
        # Of a record that is too long: the scanner, and its last bytes, which are not scanned yet.
        self._passing = _Scanner()
        self._unscanned = b""

    def find_end(self, head: bytes, passed: int, buffer: Buffer) -> int:
        """Return the index in ``buffer`` after a record; -1 if it does not end there."""
        del head
        if not passed:
            self._passing, self._scanner = self._scanner or _Scanner(), None
            self._unscanned = b""
        content = self._unscanned + buffer if self._unscanned else buffer
        before = passed - len(self._unscanned)
        is_whole = self._passing.scan(content, -before, final=False)
        end = self._passing.at - before - len(self._unscanned) if is_whole else -1
        self._lines += buffer.count(b"\n", 0, end if is_whole else len(buffer))
        self._unscanned = bytes(content[self._passing.at - before :])
        return end

    def cut(self, buffer: Buffer, *, searched: int = 0, final: bool = False) -> Frames:
        """Find all whole records after the bytes that earlier cuts consumed."""
        scanner, self._scanner = self._scanner, None
        if searched != self._scanned_bytes:
            scanner = None
        frames = Frames([], [], 0)
        if scanner is None or self._cut_one(buffer, frames, scanner, final=final):
            self._cut_all(buffer, frames, final=final)
        self._lines += buffer.count(b"\n", 0, frames.consumed)
        return frames

    def _cut_all(self, buffer: Buffer, frames: Frames, *, final: bool) -> None:
        window = _WINDOW_BYTES
        size = len(buffer)
        while frames.consumed < size:
            stop = min(frames.consumed + window, size)
            bulk = _cut_bulk(buffer, frames.consumed, stop)
            if not self._add_bulk(buffer, frames, bulk):
                return
            if bulk.is_bad or stop == size:
                if frames.consumed < size and not self._cut_one(
                    buffer, frames, _Scanner(), final=final
                ):
                    return
                # A good record that was taken for a bad one would be scanned again and again.
                assert not bulk.is_bad or frames.error is not None
            window *= 4

    def _add_bulk(self, buffer: Buffer, frames: Frames, bulk: _Bulk) -> bool:
        """Add a window's records to the frames. Return True if all are good."""
        begins, ends = bulk.begins, bulk.ends
        if ends.size:
            if not self._fields:
                self._fields = int(bulk.fields[0])
            wrong = np.flatnonzero(bulk.fields != self._fields)
            if wrong.size:
                first = int(wrong[0])
                frames.begins += begins[:first].tolist()
                frames.ends += ends[:first].tolist()
                frames.consumed = int(ends[first])
                self._report_field_count(buffer, frames, int(begins[first]))
                return False
            frames.begins += begins.tolist()
            frames.ends += ends.tolist()
        frames.consumed = bulk.at
        return True

    def _cut_one(self, buffer: Buffer, frames: Frames, scanner: _Scanner, *, final: bool) -> bool:
        """Cut the record after the consumed bytes. Return True if it is whole and good."""
        begin = frames.consumed
        if not scanner.scan(buffer, begin, final=final):
            if final:
                frames.error = TornFrameError(
                    f"unexpected EOF: {len(buffer) - begin} bytes of a record with a quoted field"
                    " that does not end",
                    offset=begin,
                )
            else:
                self._scanner = scanner
                self._scanned_bytes = len(buffer) - begin
            return False
        end = begin + scanner.at
        frames.consumed = end
        if scanner.error:
            at = begin + scanner.error_at
            line = self._line_at(buffer, at)
            column = at - buffer.rfind(b"\n", 0, at)
            text = f"parse error on line {line}, column {column}: {scanner.error}"
            first_line = self._line_at(buffer, begin)
            if first_line != line:
                text = f"record on line {first_line}; {text}"
            frames.error = DecodeError(text, offset=begin)
            return False
        if end - begin <= 2 and buffer[begin:end] in _BLANK:
            return True
        if not self._fields:
            self._fields = scanner.fields
        if scanner.fields != self._fields:
            self._report_field_count(buffer, frames, begin)
            return False
        frames.begins.append(begin)
        frames.ends.append(end)
        return True

    def _report_field_count(self, buffer: Buffer, frames: Frames, begin: int) -> None:
        line = self._line_at(buffer, begin)
        frames.error = DecodeError(f"record on line {line}: wrong number of fields", offset=begin)

    def _line_at(self, buffer: Buffer, at: int) -> int:
        return self._lines + 1 + buffer.count(b"\n", 0, at)


def _cut_bulk(buffer: Buffer, begin: int, stop: int) -> _Bulk:
    """Return all whole records of ``buffer[begin:stop]``, which begins at the begin of one."""
    content = np.frombuffer(buffer, dtype=np.uint8, count=stop - begin, offset=begin)
    ends_line = content == _LINE_FEED
    separates = content == _COMMA
    is_bad = False
    if buffer.find(b'"', begin, stop) >= 0:
        is_quote = content == _QUOTE
        # Sums of bytes overflow, but stay odd or even.
        is_inside = (np.cumsum(is_quote, dtype=np.uint8) & 1).view(np.bool_)
        ends_line &= ~is_inside
        separates &= ~is_inside
        bad = _first_bad_quote(content, np.flatnonzero(is_quote))
        if bad is not None:
            ends_line[bad:] = False
            is_bad = True
    ends = np.flatnonzero(ends_line) + 1
    if not ends.size:
        return _Bulk(ends, ends, ends, begin, is_bad)
    begins = np.concatenate([np.zeros(1, dtype=ends.dtype), ends[:-1]])
    fields = np.diff(np.searchsorted(np.flatnonzero(separates), ends), prepend=0) + 1
    at = begin + int(ends[-1])
    lengths = ends - begins
    if lengths.min() <= 2:
        is_blank = (lengths == 1) | ((lengths == 2) & (content[begins] == _RETURN))
        begins, ends, fields = begins[~is_blank], ends[~is_blank], fields[~is_blank]
    return _Bulk(begins + begin, ends + begin, fields, at, is_bad)


_BESIDE_QUOTE = np.zeros(256, dtype=np.bool_)
_BESIDE_QUOTE[[_COMMA, _LINE_FEED, _QUOTE]] = True


def _first_bad_quote(content: npt.NDArray[np.uint8], quotes: npt.NDArray[np.int64]) -> int | None:
    """Return the index of the first quote at a wrong place, as far as the content after is known.

    Quotes open and close in turn: an opening one is at a field's begin, a closing one at its end,
    and a doubled one closes and opens.
    """
    opening, closing = quotes[0::2], quotes[1::2]
    opens_well = _BESIDE_QUOTE[content[opening - 1]]
    if opening[0] == 0:
        opens_well[0] = True
    last = content.size - 1
    next_ = content[np.minimum(closing + 1, last)]
    ends_line = (next_ == _RETURN) & (
        (content[np.minimum(closing + 2, last)] == _LINE_FEED) | (closing + 2 > last)
    )
    closes_well = _BESIDE_QUOTE[next_] | ends_line | (closing == last)
    bad = [
        int(quotes_of[~are_well][0])
        for quotes_of, are_well in ((opening, opens_well), (closing, closes_well))
        if not are_well.all()
    ]
    return min(bad) if bad else None


register(Csv())
