r"""CSV: one record per message, quoted only where needed (message section 8).

Content is cut in bulk: quotes toggle between inside and outside of fields, and line feeds
outside end records. That is right as long as every quote stands where one may stand, which is
checked in bulk, too. A record in which one does not, and a record which is not whole yet, are
looked through field by field.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from gazette_sdk.errors import DecodeError, FramingError, TornFrameError
from gazette_sdk.framing.base import Buffer, Frames, Framing

__all__ = ["Csv"]

_LINE_FEED = 0x0A
_RETURN = 0x0D
_QUOTE = 0x22
_COMMA = 0x2C

_WINDOW_BYTES = 16 << 10
"""So much is looked at in bulk first, and more behind what was good: a stream of bad records,
of which one is reported per call, must not cost a look at the whole buffer for each."""

_BLANK = (b"\n", b"\r\n", b"\r")
"""Lines without a record; the last stands only at the end of a stream."""

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
        """The framing of one stream, which knows its number of fields."""
        return _Stream()

    def cut(self, buffer: Buffer, *, searched: int = 0, final: bool = False) -> Frames:
        """Find all whole records of ``buffer``, taken for the begin of a stream."""
        del searched
        return _Stream().cut(buffer, final=final)

    def payloads(self, buffer: Buffer, frames: Frames) -> list[bytes]:
        """Each record's text, without its end."""
        whole = bytes(buffer)
        return [
            _without_end(whole[begin:end])
            for begin, end in zip(frames.begins, frames.ends, strict=True)
        ]


def _is_record(payload: bytes) -> bool:
    # A return at the end would be taken for a part of the record's end.
    return _one_record(payload) is not None and not payload.endswith(b"\r")


def _without_end(record: bytes) -> bytes:
    return record.removesuffix(b"\n").removesuffix(b"\r")


class _Bulk(NamedTuple):
    """What a window holds: record by record its begin, end and number of fields.

    ``at`` is the index behind the last line; ``is_bad`` says that a quote stands in a wrong place
    in the record there.
    """

    begins: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    fields: npt.NDArray[np.int64]
    at: int
    is_bad: bool


class _Place(enum.Enum):
    """Where a scanner stands."""

    FIELD_BEGIN = enum.auto()
    UNQUOTED = enum.auto()
    QUOTED = enum.auto()
    BAD = enum.auto()
    END = enum.auto()


@dataclass(slots=True)
class _Scanner:
    """Goes through one record, as far as there is content, and on from there.

    Attributes:
        at: how far it came, counted from the record's begin.
        place: what stands there.
        fields: number of fields that were ended.
        error: what is wrong with the record. Everything to the end of that line belongs to it.
        error_at: where that is.
    """

    at: int = 0
    place: _Place = _Place.FIELD_BEGIN
    fields: int = 0
    error: str = ""
    error_at: int = 0

    def scan(self, buffer: Buffer, begin: int, *, final: bool) -> bool:
        """Go on in the record at index ``begin``; whether it is whole."""
        size = len(buffer) - begin
        while self.place is not _Place.END and self.at < size:
            if self.place is _Place.QUOTED:
                if not self._through_quoted(buffer, begin, final=final):
                    break
            elif self.place is _Place.UNQUOTED:
                self._through_unquoted(buffer, begin)
            elif self.place is _Place.BAD:
                self._through_line(buffer, begin)
            elif buffer[begin + self.at] == _QUOTE:
                self.place = _Place.QUOTED
                self.at += 1
            else:
                self.place = _Place.UNQUOTED
        if self.place is _Place.END:
            return True
        if not final or self.place is _Place.QUOTED:
            return False
        self.fields += 1
        return True

    def _through_unquoted(self, buffer: Buffer, begin: int) -> None:
        found = _in_unquoted(buffer, begin + self.at)
        if found is None:
            self.at = len(buffer) - begin
            return
        self.at = found.start() - begin
        if buffer[begin + self.at] == _QUOTE:
            self._fail('bare " in non-quoted field')
        else:
            self._end_field(buffer, begin)

    def _through_quoted(self, buffer: Buffer, begin: int, *, final: bool) -> bool:
        """Whether what follows the next quote is known."""
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
            self.place = _Place.END
            self.fields += 1
        else:
            self._fail('extraneous or missing " in quoted field')
        return True

    def _end_field(self, buffer: Buffer, begin: int) -> None:
        """A comma or a line feed stands here."""
        self.place = _Place.FIELD_BEGIN if buffer[begin + self.at] == _COMMA else _Place.END
        self.fields += 1
        self.at += 1

    def _fail(self, error: str) -> None:
        self.place = _Place.BAD
        self.error = error
        self.error_at = self.at

    def _through_line(self, buffer: Buffer, begin: int) -> None:
        found = buffer.find(b"\n", begin + self.at)
        self.at = (len(buffer) if found < 0 else found + 1) - begin
        if found >= 0:
            self.place = _Place.END


class _Stream(Csv):
    """The records of one stream: remembers the number of fields, and counts lines."""

    def __init__(self) -> None:
        self._fields = 0
        self._lines = 0
        self._scanner: _Scanner | None = None
        self._scanned_bytes = 0

    def cut(self, buffer: Buffer, *, searched: int = 0, final: bool = False) -> Frames:
        """Find all whole records that follow what was consumed by earlier cuts."""
        scanner, self._scanner = self._scanner, None
        if searched != self._scanned_bytes:
            scanner = None
        frames = Frames([], [], 0)
        if scanner is None or self._take_scanned(buffer, frames, scanner, final=final):
            self._take_all(buffer, frames, final=final)
        self._lines += buffer.count(b"\n", 0, frames.consumed)
        return frames

    def _take_all(self, buffer: Buffer, frames: Frames, *, final: bool) -> None:
        window = _WINDOW_BYTES
        size = len(buffer)
        while frames.consumed < size:
            stop = min(frames.consumed + window, size)
            bulk = _look(buffer, frames.consumed, stop)
            if not self._take_bulk(buffer, frames, bulk):
                return
            if bulk.is_bad or stop == size:
                if frames.consumed < size and not self._take_scanned(
                    buffer, frames, _Scanner(), final=final
                ):
                    return
                # A record of which the quotes only seemed to be wrong would be looked at again.
                assert not bulk.is_bad or frames.error is not None
            window *= 4

    def _take_bulk(self, buffer: Buffer, frames: Frames, bulk: _Bulk) -> bool:
        """Take over a window's records; whether all are good."""
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
                self._refuse_number(buffer, frames, int(begins[first]))
                return False
            frames.begins += begins.tolist()
            frames.ends += ends.tolist()
        frames.consumed = bulk.at
        return True

    def _take_scanned(
        self, buffer: Buffer, frames: Frames, scanner: _Scanner, *, final: bool
    ) -> bool:
        """Take the record behind what is consumed; whether it is whole and good."""
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
            self._refuse_number(buffer, frames, begin)
            return False
        frames.begins.append(begin)
        frames.ends.append(end)
        return True

    def _refuse_number(self, buffer: Buffer, frames: Frames, begin: int) -> None:
        line = self._line_at(buffer, begin)
        frames.error = DecodeError(f"record on line {line}: wrong number of fields", offset=begin)

    def _line_at(self, buffer: Buffer, at: int) -> int:
        return self._lines + 1 + buffer.count(b"\n", 0, at)


def _look(buffer: Buffer, begin: int, stop: int) -> _Bulk:
    """All whole records of ``buffer[begin:stop]``, which begins at the begin of one."""
    content = np.frombuffer(buffer, dtype=np.uint8, count=stop - begin, offset=begin)
    ends_line = content == _LINE_FEED
    separates = content == _COMMA
    is_bad = False
    if buffer.find(b'"', begin, stop) >= 0:
        is_quote = content == _QUOTE
        # Sums of bytes overflow, which leaves alone whether they are odd.
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
    """Index of the first quote that stands where none may, if the content behind is known.

    By turns quotes open and close: one that opens stands at a field's begin, one that closes at
    its end, and a doubled one closes and opens.
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
