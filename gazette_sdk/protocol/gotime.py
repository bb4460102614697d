"""Go's time layouts: a time is formatted like the reference time ``Mon Jan 2 15:04:05 2006``.

Path postfix templates use them (protocol section 6.3). Times are UTC.
"""

from __future__ import annotations

import re
from datetime import datetime

__all__ = ["format_time"]

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
