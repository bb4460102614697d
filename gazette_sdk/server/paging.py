"""Pages of rows: orders, cursors, and the cut of one page out of all rows.

A cursor is the place of a page's last row in its order: the row's value, and its id. So a page
after it begins at the right row also if that one is gone by then. While nothing changes, the pages
of an order have each row exactly once.

Rows whose value is unknown, or may not be seen, come last, in both directions. Of equal values ids
ascend.
"""

from __future__ import annotations

import base64
from collections.abc import Container, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import orjson

from gazette_sdk.errors import CallError

ROWS = 100
"""Rows of a page where the request does not say."""

ROWS_MAX = 500
"""Greatest number of rows of a page."""

_SORTED_ROWS = 512

R = TypeVar("R")


class PageRequest(Protocol):
    """Fields that all requests of pages have."""

    @property
    def sort(self) -> int:
        """Number of an order."""

    @property
    def descending(self) -> bool:
        """True if the order is reversed."""

    @property
    def after(self) -> str:
        """Cursor of an earlier page; empty for the first page."""

    @property
    def skip(self) -> int:
        """Number of rows that are passed over."""

    @property
    def limit(self) -> int:
        """Greatest number of rows; 0 for the default."""


class Cursor(NamedTuple):
    """Place after a row of an order.

    Attributes:
        sort: the order.
        descending: True if it is reversed.
        value: value of the row; None if it is unknown.
        id: id of the row.
    """

    sort: int
    descending: bool
    value: float | None
    id: str

    def encode(self) -> str:
        """Return it as text, for the next request."""
        return base64.urlsafe_b64encode(orjson.dumps(tuple(self))).decode().rstrip("=")

    @classmethod
    def decode(cls, request: PageRequest) -> Cursor | None:
        """Return the place after which a page begins; None for the first page.

        Raises:
            CallError: it is none, or is of another order.
        """
        if not request.after:
            return None
        try:
            padded = request.after + "=" * (-len(request.after) % 4)
            found = orjson.loads(base64.urlsafe_b64decode(padded))
        except ValueError:
            found = None
        match found:
            case [
                int() as sort,
                bool() as descending,
                None | int() | float() as value,
                str() as id_,
            ]:
                if (sort, descending) == (request.sort, request.descending):
                    return cls(sort, descending, value, id_)
                raise _invalid(
                    "`after` is of a page in another order: leave it out for the first page"
                )
        raise _invalid("`after` is not the `next` of an earlier page: give that, unchanged")


_Place = tuple[bool, float, str]
"""Place of a row in an order: unknown values last, then the value, then the id."""


class PageCut(Generic[R]):
    """Cut of one page out of all rows, which come in any order.

    It keeps the rows of the page, those that are passed over, and one more. Rows are sorted some
    hundreds at a time: sorting all would hold the event loop.

    Args:
        request: the request.
        by_id: the order that has no values. Its reverse has descending ids.

    Attributes:
        after: place after which the page begins; None for the first page.
        descending: True if the order is reversed.
        kept: number of rows that it keeps.
    """

    def __init__(self, request: PageRequest, *, by_id: int) -> None:
        self.after = Cursor.decode(request)
        self.descending = request.descending
        self._sort_by = request.sort
        self._skip = request.skip
        self._limit = request.limit or ROWS
        self._is_reversed = request.descending and request.sort == by_id
        self._is_negated = request.descending and request.sort != by_id
        self.kept = self._skip + self._limit + 1
        self._begin = None if self.after is None else self._place(self.after.value, self.after.id)
        self._end: _Place | None = None
        # Ids differ, so that rows are never compared.
        self._best: list[tuple[bool, float, str, float | None, R]] = []
        self._new: list[tuple[bool, float, str, float | None, R]] = []

    @classmethod
    def of(cls, request: PageRequest, *, sorts: Container[int], by_id: int) -> PageCut[R]:
        """Return the cut of a request.

        Args:
            request: the request.
            sorts: the orders that there are.
            by_id: as of the class.

        Raises:
            CallError: the request is malformed.
        """
        if not 0 <= request.limit <= ROWS_MAX:
            raise _invalid(f"`limit` is {request.limit}: ask for 1 to {ROWS_MAX} rows")
        if request.skip < 0:
            raise _invalid(f"`skip` is {request.skip}: it must not be negative")
        if request.sort not in sorts:
            raise _invalid(f"`sort` is {request.sort}: there is no such order")
        return cls(request, by_id=by_id)

    def add(self, value: float | None, row_id: str, row: R) -> None:
        """Add a row. Orders without values have the value None."""
        place = self._place(value, row_id)
        if self._begin is not None and not self._is_before(self._begin, place):
            return
        if self._end is not None and not self._is_before(place, self._end):
            return
        self._new.append((*place, value, row))
        if len(self._new) >= _SORTED_ROWS:
            self._sort()

    def rows(self) -> tuple[Sequence[R], str]:
        """Return the rows of the page, and the cursor of the next one; empty at the last."""
        self._sort()
        page = self._best[self._skip : self._skip + self._limit]
        following = ""
        if page and len(self._best) == self.kept:
            _, _, last_id, value, _ = page[-1]
            following = Cursor(self._sort_by, self.descending, value, last_id).encode()
        return [each[-1] for each in page], following

    def _place(self, value: float | None, row_id: str) -> _Place:
        if value is None:
            return True, 0.0, row_id
        return False, -value if self._is_negated else value, row_id

    def _is_before(self, place: _Place, other: _Place) -> bool:
        return place > other if self._is_reversed else place < other

    def _sort(self) -> None:
        self._best += self._new
        self._best.sort(reverse=self._is_reversed)
        del self._best[self.kept :]
        self._new = []
        if len(self._best) == self.kept:
            self._end = self._best[-1][:3]


def _invalid(text: str) -> CallError:
    return CallError(text, code="INVALID_ARGUMENT")
