"""Durations: Go's duration strings, ``google.protobuf.Duration``, and integers of nanoseconds.

Text is Go's: ``1h0m0s``, ``1.5s``, ``100ms``, ``-2m``; see journal-space YAML, protocol
section 14.
"""

from __future__ import annotations

import re
from decimal import Decimal

from google.protobuf.duration_pb2 import Duration

from gazette_sdk.errors import ValidationError

__all__ = [
    "HOUR_NS",
    "MILLISECOND_NS",
    "MINUTE_NS",
    "SECOND_NS",
    "format_duration",
    "from_ns",
    "from_seconds",
    "parse_duration",
    "to_ns",
    "to_seconds",
]

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
