from __future__ import annotations

import pytest

from gazette_sdk.errors import StoreError
from gazette_sdk.fragment import CoverSet, list_fragments, open_store
from gazette_sdk.fragment.listing import list_stored, readable
from gazette_sdk.protocol.fragments import content_path, length_of, parse_content_path
from support.stores import put_bytes
from support.vectors import cases

SUM = "00000000000000000000000000000000000000aa"


def content_of(path):
    """Content of the length that a fragment's name states."""
    return bytes(length_of(parse_content_path("a/journal", path.removeprefix("a/journal/"))))


@pytest.fixture
def store():
    made = open_store("memory://listing/pre/fix/")
    yield made
    for found in list(made.list("")):
        made.remove(found.path)


@pytest.mark.parametrize("case", cases("broker", "walk_stores"))
def test_listings_of_all_stores_follow_the_vectors(case):
    stores = {}
    for url, paths in case["stores"].items():
        name = f"{case['id']}-{url.removeprefix('s3://')}"
        stores[url] = open_store(f"memory://{name}")
        for path in paths:
            put_bytes(stores[url], path, content_of(path))
    cover = CoverSet(f for each in stores.values() for f in list_fragments(each, "a/journal"))
    assert len(cover) == case.get("expect_count", 0)
    if "query" not in case:
        assert case["expect"] == []
        return
    assert (cover.begin, cover.end) == (case["begin"], case["end"])
    index, found = cover.longest_overlap(case["query"]["offset"])
    assert found
    best = cover[index]
    holder = stores[case["query"]["store"]]
    assert best.backing_store == holder.url
    url = holder.sign_get(content_path(best), 60)
    assert url.endswith(case["query"]["fragment_url_suffix"])


def test_foreign_objects_are_passed_over_and_logged_once(store, caplog):
    good = f"a/journal/day=1/{0:016x}-{10:016x}-{SUM}.gz"
    for path in (
        good,
        "a/journal/README",
        "a/journal/x/y.txt",
        f"a/journal/{0:016x}-{10:016x}-{SUM}.bz2",
        f"a/journal/{10:016x}-{0:016x}-{SUM}.gz",
        "a/journal/zz",
        f"a/other/{0:016x}-{10:016x}-{SUM}.gz",
    ):
        put_bytes(store, path, b"x")
    (found,) = list_fragments(store, "a/journal")
    assert content_path(found) == good
    assert (found.path_postfix, found.backing_store) == ("day=1", store.url)
    assert found.mod_time > 0
    (record,) = [record for record in caplog.records if record.name.endswith("listing")]
    assert "skipped 5 objects" in record.getMessage()
    assert record.getMessage().endswith(", …")


def test_objects_whose_length_contradicts_their_name_are_torn(store, caplog):
    names = [f"{begin:016x}-{begin + 10:016x}-{SUM}" for begin in range(0, 60, 10)]
    contents = [
        (".raw", bytes(10)), (".raw", bytes(9)), (".raw", b""), (".gz", b""), (".gz", b"x"),
        (".raw", bytes(11)),
    ]  # fmt: skip
    for name, (suffix, content) in zip(names, contents, strict=True):
        put_bytes(store, f"a/journal/{name}{suffix}", content)
    assert [each.begin for each in list_fragments(store, "a/journal")] == [0, 40]
    torn = [each for each in list_stored(store, "a/journal") if each.is_torn]
    assert [(each.fragment.begin, each.length) for each in torn] == [
        (10, 9), (20, 0), (30, 0), (50, 11)
    ]  # fmt: skip
    assert "4 objects do not have the length that their names state" in caplog.text
    assert f"{names[1]}.raw (9 bytes)" in caplog.text


def test_a_reader_finds_a_torn_object_only_where_nothing_else_has_its_content(store):
    for begin, end, length in ((0, 10, 10), (0, 10, 9), (10, 20, 9), (20, 30, 9), (20, 40, 20)):
        name = f"{begin:016x}-{end:016x}-{length:040x}.raw"
        put_bytes(store, f"a/journal/{name}", bytes(length))
    assert [(each.begin, each.end, each.sum.part3) for each in readable(store, "a/journal")] == [
        (0, 10, 10), (10, 20, 9), (20, 40, 20)
    ]  # fmt: skip


def test_fragments_are_listed_in_the_order_of_offsets(tmp_path):
    begins = [(number * 7919) % 100 for number in range(100)]
    store = open_store("file:///", file_root=tmp_path)
    for begin in begins:
        name = f"{begin:016x}-{begin + 1:016x}-{SUM}.gz"
        put_bytes(store, f"a/journal/day={begin % 3}/{name}", b"x")
    found = list_fragments(store, "a/journal")
    assert [each.begin for each in found] == list(range(100))
    assert {each.path_postfix for each in found} == {"day=0", "day=1", "day=2"}


def test_a_store_that_fails_fails_the_listing(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    broken = open_store("file:///sub/", file_root=root)
    (root / "sub").symlink_to(tmp_path)
    with pytest.raises(StoreError, match="leads out"):
        list_fragments(broken, "a/journal")
