"""Filters that Spark pushes down: which ranges of journals no wanted row can be in. Pure.

Ranges are left out, and no rows: every filter is handed back to Spark, which applies it again.
A schema may give metadata columns other types, which may be less exact. Filters of those leave out
nothing.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)

__all__ = ["Pruning"]


@dataclass(slots=True)
class Pruning:
    """Limits of the rows that filters keep.

    Attributes:
        journals: names of journals; None for all.
        prefixes: prefixes that journals' names must have.
        begin: least offset of a row.
        end: greatest offset of a row; None for no limit.
        since: least time of a row; None for no limit.
    """

    journals: frozenset[str] | None = None
    prefixes: list[str] = field(default_factory=list)
    begin: int = 0
    end: int | None = None
    since: dt.datetime | None = None

    @classmethod
    def of(cls, filters: Iterable[Filter]) -> Pruning:
        """Return the limits of filters that must all be true. Others than these are left out."""
        found = cls()
        for each in filters:
            attribute = getattr(each, "attribute", None)
            if isinstance(attribute, tuple) and len(attribute) == 1:
                {
                    "_journal": found._add_journal,
                    "_offset": found._add_offset,
                    "_time": found._add_time,
                }.get(attribute[0], lambda _: None)(each)
        return found

    def keeps_journal(self, name: str) -> bool:
        """Return True if rows of a journal may be wanted."""
        is_named = self.journals is None or name in self.journals
        return is_named and all(name.startswith(prefix) for prefix in self.prefixes)

    def keeps_range(self, begin: int, end: int) -> bool:
        """Return True if rows at offsets of ``[begin, end)`` may be wanted."""
        return end > self.begin and (self.end is None or begin <= self.end)

    def _add_journal(self, given: Filter) -> None:
        if isinstance(given, EqualTo | In):
            value: Any = given.value
            names = frozenset([value] if isinstance(given, EqualTo) else value)
            if all(isinstance(name, str | None) for name in names):
                self.journals = names if self.journals is None else self.journals & names
        elif isinstance(given, StringStartsWith) and isinstance(given.value, str):
            self.prefixes.append(given.value)

    def _add_offset(self, given: Filter) -> None:
        if type(getattr(given, "value", None)) not in {int, Decimal}:
            return
        if isinstance(given, EqualTo | GreaterThan | GreaterThanOrEqual):
            self.begin = max(self.begin, given.value)
        if isinstance(given, EqualTo | LessThan | LessThanOrEqual):
            self.end = given.value if self.end is None else min(self.end, given.value)

    def _add_time(self, given: Filter) -> None:
        if isinstance(given, EqualTo | GreaterThan | GreaterThanOrEqual):
            time = given.value
            if not isinstance(time, dt.datetime):
                return
            time = time if time.tzinfo else time.replace(tzinfo=dt.UTC)
            self.since = time if self.since is None else max(self.since, time)
