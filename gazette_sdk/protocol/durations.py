"""Durations: Go's duration strings, ``google.protobuf.Duration``, and integers of nanoseconds.

Text is Go's: ``1h0m0s``, ``1.5s``, ``100ms``, ``-2m``; see journal-space YAML, protocol section 14.

:func:`format_time` formats a time in UTC by one of Go's layouts, which are forms of the reference
time ``Mon Jan 2 15:04:05 2006``; path postfix templates use them (protocol section 6.3).
:func:`encode_varint` and :func:`decode_varint` are protobuf's integers of variable length, for
messages that are encoded by hand.
"""

from __future__ import annotations

import re
from datetime import datetime
from decimal import Decimal

from google.protobuf.duration_pb2 import Duration

from gazette_sdk.errors import ValidationError

MILLISECOND_NS = 1_000_000
SECOND_NS = 1_000_000_000
MINUTE_NS = 60 * SECOND_NS
HOUR_NS = 60 * MINUTE_NS

_UNITS_NS = {
    "ns": 1,
    "us": 1_000,
    "µs": 1_000,  # micro sign
    "μs": 1_000,  # Greek mu
    "ms": MILLISECOND_NS,
    "s": SECOND_NS,
    "m": MINUTE_NS,
    "h": HOUR_NS,
}
_TERM = r"(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h)"
_TERMS = re.compile(_TERM, re.ASCII)
_WHOLE = re.compile(rf"([-+]?)((?:{_TERM})+)", re.ASCII)

_GREATEST_NS = (1 << 63) - 1
"""Durations are 64-bit integers of nanoseconds in other implementations."""


def parse_duration(text: str) -> int:
    """Return the nanoseconds of a Go duration string.

    Raises:
        ValidationError: the text is no duration, or one of more than 64 bits of nanoseconds.
    """
    if text in {"0", "+0", "-0"}:
        return 0
    whole = _WHOLE.fullmatch(text)
    if whole is None:
        raise ValidationError(
            f"not a duration ({text!r}): write `90s`, `1h30m`, `100ms`", kind="invalid_duration"
        )
    total = sum(int(Decimal(number) * _UNITS_NS[unit]) for number, unit in _TERMS.findall(whole[2]))
    if total > _GREATEST_NS:
        raise ValidationError(f"duration is too long ({text!r})", kind="invalid_duration")
    return -total if whole[1] == "-" else total


def format_duration(ns: int) -> str:
    """Return the Go duration string of nanoseconds; inverse of :func:`parse_duration`."""
    if ns == 0:
        return "0s"
    sign, ns = ("-", -ns) if ns < 0 else ("", ns)
    for unit, size_ns in (("ns", 1), ("µs", 1_000), ("ms", MILLISECOND_NS)):
        if ns < size_ns * 1_000:
            return f"{sign}{_decimal(ns, size_ns)}{unit}"
    minutes, rest_ns = divmod(ns, MINUTE_NS)
    hours, minutes = divmod(minutes, 60)
    text = f"{_decimal(rest_ns, SECOND_NS)}s"
    if hours:
        return f"{sign}{hours}h{minutes}m{text}"
    return f"{sign}{minutes}m{text}" if minutes else sign + text


def to_ns(duration: Duration) -> int:
    """Return the nanoseconds of a protobuf duration."""
    return duration.seconds * SECOND_NS + duration.nanos


def from_ns(ns: int) -> Duration:
    """Return the protobuf duration of nanoseconds; seconds and nanos have the same sign."""
    seconds, nanos = divmod(abs(ns), SECOND_NS)
    return (
        Duration(seconds=-seconds, nanos=-nanos)
        if ns < 0
        else Duration(seconds=seconds, nanos=nanos)
    )


def to_seconds(duration: Duration) -> float:
    """Return the seconds of a protobuf duration."""
    return duration.seconds + duration.nanos / SECOND_NS


def from_seconds(seconds: float) -> Duration:
    """Return the protobuf duration of seconds, to the nanosecond."""
    return from_ns(round(seconds * SECOND_NS))


def _decimal(ns: int, size_ns: int) -> str:
    """Return ``ns`` in units of ``size_ns``, exactly and without trailing zeros."""
    whole, rest = divmod(ns, size_ns)
    if not rest:
        return str(whole)
    digits = len(str(size_ns)) - 1
    return f"{whole}.{rest:0{digits}d}".rstrip("0")


# In the order in which they are matched at each position of the layout. `Jan` and `Mon` before a
# small letter are text.
_ELEMENT = re.compile(
    r"""
    (?P<literal>_(?=2006))
    | January | Jan(?![a-z]) | Monday | Mon(?![a-z]) | MST
    | 002 | 01 | 02 | 03 | 04 | 05 | 06
    | 15 | 1 | 2006 | 2 | __2 | _2 | 3 | 4 | 5 | PM | pm
    | -07:00:00 | -070000 | -07:00 | -0700 | -07
    | Z07:00:00 | Z070000 | Z07:00 | Z0700 | Z07
    | [.,](?P<fraction>0+|9+)(?!\d)
    """,
    re.VERBOSE | re.ASCII,
)

_MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def format_time(time: datetime, layout: str) -> str:
    """Return the text of a UTC time, as Go's ``Time.Format`` writes it.

    Args:
        time: the time, in UTC.
        layout: the reference time in the wanted format: ``2006-01-02T15:04:05Z07:00``.
    """

    def element(match: re.Match[str]) -> str:
        if match["literal"]:
            return match[0]
        if match["fraction"]:
            return _fraction(time, match[0])
        return _element(time, match[0])

    return _ELEMENT.sub(element, layout)


def _fraction(time: datetime, text: str) -> str:
    digits = f"{time.microsecond:06d}000"[: len(text) - 1].ljust(len(text) - 1, "0")
    if text[1] == "9":
        digits = digits.rstrip("0")
        if not digits:
            return ""
    return text[0] + digits


def _element(time: datetime, name: str) -> str:
    if name.startswith("-07"):
        return name.replace("-", "+").replace("7", "0")
    if name.startswith("Z07"):
        return "Z"
    hour12 = time.hour % 12 or 12
    year_day = time.timetuple().tm_yday
    values: dict[str, str] = {
        "2006": f"{time.year:04d}",
        "06": f"{time.year % 100:02d}",
        "January": _MONTHS[time.month - 1],
        "Jan": _MONTHS[time.month - 1][:3],
        "01": f"{time.month:02d}",
        "1": str(time.month),
        "Monday": _DAYS[time.weekday()],
        "Mon": _DAYS[time.weekday()][:3],
        "02": f"{time.day:02d}",
        "_2": f"{time.day:2d}",
        "2": str(time.day),
        "002": f"{year_day:03d}",
        "__2": f"{year_day:3d}",
        "15": f"{time.hour:02d}",
        "03": f"{hour12:02d}",
        "3": str(hour12),
        "04": f"{time.minute:02d}",
        "4": str(time.minute),
        "05": f"{time.second:02d}",
        "5": str(time.second),
        "PM": "AM" if time.hour < 12 else "PM",
        "pm": "am" if time.hour < 12 else "pm",
        "MST": "UTC",
    }
    return values[name]


_SINGLE_BYTES = tuple(bytes((value,)) for value in range(0x80))
_BYTES_MAX = 9
"""Greatest length of a non-negative number of 64 bits. Negative ones have ten bytes."""


def encode_varint(value: int) -> bytes:
    """Return the encoding of a non-negative number."""
    if value < 0x80:
        return _SINGLE_BYTES[value]
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def decode_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the non-negative number at a position, and the position after it.

    Returns:
        -1 and ``at`` if the bytes end inside the number, or the number is negative.
    """
    value = shift = 0
    for position in range(at, min(at + _BYTES_MAX, len(data))):
        byte = data[position]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position + 1
        shift += 7
    return -1, at
