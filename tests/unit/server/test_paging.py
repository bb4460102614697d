"""Cursors and cuts of pages: the pages of an order have each row exactly once."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.errors import CallError
from gazette_sdk.server import paging
from gazette_sdk.server.paging import Cursor, PageCut

BY_ID, BY_VALUE = 0, 1


@dataclass
class Request:
    sort: int = BY_ID
    descending: bool = False
    after: str = ""
    skip: int = 0
    limit: int = 0


def page_of(request, rows):
    cut = PageCut.of(request, sorts=(BY_ID, BY_VALUE), by_id=BY_ID)
    for row_id, value in rows:
        cut.add(None if request.sort == BY_ID else value, row_id, row_id)
    return cut.rows()


VALUES = st.one_of(st.none(), st.integers(-3, 3), st.sampled_from([0.5, 1e300, 1 << 60]))


@given(
    rows=st.dictionaries(st.text("abé", max_size=4), VALUES, max_size=40),
    request=st.builds(
        Request,
        sort=st.sampled_from([BY_ID, BY_VALUE]),
        descending=st.booleans(),
        skip=st.integers(0, 3),
        limit=st.integers(1, 7),
    ),
    sorted_rows=st.integers(1, 9),
    data=st.data(),
)
def test_pages_together_are_the_whole_order(rows, request, sorted_rows, data):
    """Each row comes once, also among equal values; rows that are passed over come in none."""
    skip, descending, expected = request.skip, request.descending, sorted(rows)
    if request.sort == BY_ID:
        expected.sort(reverse=descending)
    else:
        known = [each for each in expected if rows[each] is not None]
        known.sort(key=lambda each: -rows[each] if descending else rows[each])
        expected = known + [each for each in expected if rows[each] is None]
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paging, "_SORTED_ROWS", sorted_rows)
        while True:
            shuffled = data.draw(st.permutations(list(rows.items())))
            page, request.after = page_of(request, shuffled)
            found += page
            request.skip = 0
            if not request.after:
                break
            assert len(page) == request.limit
    assert found == expected[skip:]


def test_a_cursor_stays_where_it_was_when_its_row_is_gone():
    request = Request(BY_VALUE, descending=True, limit=2)
    rows = {"a": 4, "b": 3, "c": 2, "d": None}
    page, request.after = page_of(request, rows.items())
    assert page == ["a", "b"]
    del rows["b"]
    assert page_of(request, rows.items()) == (["c", "d"], "")


@pytest.mark.parametrize(
    "after", ["%%", "abc", "bnVsbA", "W10", "WzAsZmFsc2UsMCwiYSIsMV0", "eyJhIjogMX0", "[0,1]", "é"]
)
def test_a_text_that_is_no_cursor_is_refused(after):
    with pytest.raises(CallError, match="not the `next`") as caught:
        Cursor.decode(Request(after=after))
    assert caught.value.code == "INVALID_ARGUMENT"


def test_a_cursor_of_another_order_is_refused():
    after = Cursor(BY_ID, False, None, "a").encode()
    for request in (Request(after=after, descending=True), Request(BY_VALUE, after=after)):
        with pytest.raises(CallError, match="another order"):
            Cursor.decode(request)
    assert Cursor.decode(Request(after=after)) == (BY_ID, False, None, "a")


@pytest.mark.parametrize("change", [{"limit": -1}, {"limit": 501}, {"skip": -1}, {"sort": 9}])
def test_numbers_out_of_their_bounds_are_refused(change):
    with pytest.raises(CallError, match=next(iter(change))) as caught:
        page_of(Request(**change), ())
    assert caught.value.code == "INVALID_ARGUMENT"
