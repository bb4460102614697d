from __future__ import annotations

import asyncio
import io
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.broker.fragments.refresh import Retention, split_aged
from gazette_sdk.errors import StoreAuthorizationError
from gazette_sdk.fragment.content import CoverSet
from gazette_sdk.fragment.listing import StoredFragment, list_stored
from gazette_sdk.fragment.registry import StoreRegistry
from gazette_sdk.fragment.stores import open_store
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import content_path
from gazette_sdk.protocol.labels import NEEDED_FROM, RECOVERY_LOG, set_value
from support.brokers import journal_spec
from support.etcd import run

STORE = "file:///store/"
DAY_S = 86400
NOW = 100 * DAY_S


def spec_of(retention_s=10 * DAY_S, content_type="application/x-ndjson"):
    spec = journal_spec("a/journal", stores=[STORE])
    spec.fragment.retention.FromSeconds(retention_s)
    set_value(spec.labels, "content-type", content_type)
    return spec


def stored(begin, end, age_s, length=-1):
    fragment = pb.Fragment(
        journal="a/journal",
        begin=begin,
        end=end,
        sum=pb.SHA1Sum(part1=begin + 1),
        compression_codec=pb.NONE,
        backing_store=STORE,
        mod_time=int(NOW - age_s),
    )
    return StoredFragment(fragment, length)


def spans(fragments):
    return [(each.fragment.begin, each.fragment.end) for each in fragments]


def split(spec, listing, now_s=NOW):
    return split_aged(spec, listing, lambda _: now_s)


def test_aged_fragments_are_removed_from_the_begin_on():
    listing = [
        stored(0, 10, 30 * DAY_S),
        stored(10, 20, 10 * DAY_S),
        stored(20, 30, 9 * DAY_S),
        stored(30, 40, 1),
    ]
    parts = split(spec_of(), listing)
    assert spans(parts.aged) == [(0, 10), (10, 20)]
    assert spans(parts.left) == [(20, 30), (30, 40)]


def test_replicas_list_a_fragment_before_it_is_removed():
    spec = spec_of(retention_s=5)
    spec.fragment.refresh_interval.FromSeconds(60)
    listing = [stored(0, 10, 121), stored(10, 20, 119), stored(20, 30, 1)]
    assert spans(split(spec, listing).aged) == [(0, 10)]


def test_a_young_fragment_keeps_those_behind_it():
    """It was stored late. A gap after it would be waited for."""
    listing = [stored(0, 10, 1), stored(10, 20, 30 * DAY_S), stored(20, 30, 1)]
    assert split(spec_of(), listing).aged == []


def test_the_last_fragment_shows_where_the_journal_ends():
    listing = [stored(0, 10, 30 * DAY_S), stored(10, 20, 30 * DAY_S)]
    assert spans(split(spec_of(), listing).left) == [(10, 20)]


@pytest.mark.parametrize(
    "spec", [spec_of(retention_s=0), spec_of(content_type=RECOVERY_LOG)], ids=["none", "log"]
)
def test_journals_without_a_retention_and_recovery_logs_keep_everything(spec):
    listing = [stored(0, 10, 30 * DAY_S), stored(10, 20, 1)]
    assert split(spec, listing).aged == []


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20), st.integers(0, 20)), max_size=12))
def test_what_is_left_has_every_byte_from_its_begin_on(described):
    listing = [stored(begin, begin + length, days * DAY_S) for begin, length, days in described]
    parts = split(spec_of(), listing)
    assert sorted(spans([*parts.left, *parts.aged])) == sorted(spans(listing))
    before = CoverSet(each.fragment for each in listing)
    after = CoverSet(each.fragment for each in parts.left)
    assert after.end == before.end
    begin = after.begin if parts.left else 0
    for each in listing:
        part = max(each.fragment.begin, begin)
        if part < each.fragment.end:
            assert before.covers(part, each.fragment.end) == after.covers(part, each.fragment.end)


class Setting:
    def __init__(self, tmp_path, mode="true", now=NOW, opener=None):
        self.root = tmp_path
        (tmp_path / "store").mkdir()
        self.stores = StoreRegistry(tmp_path, opener=opener)
        self.retention = Retention(self.stores, mode, now=lambda: now)

    def put(self, *listing):
        store = open_store(STORE, file_root=self.root)
        for each in listing:
            store.put(content_path(each.fragment), io.BytesIO(b"x" * 10), 10)

    def paths(self):
        found = list_stored(open_store(STORE, file_root=self.root), "a/journal")
        return sorted(each.fragment.begin for each in found)


AGED, YOUNG, LAST = stored(0, 10, 30 * DAY_S), stored(10, 20, 5), stored(20, 30, 0)


def test_objects_are_removed(tmp_path, caplog):
    caplog.set_level("INFO")

    async def scenario():
        setting = Setting(tmp_path)
        setting.put(AGED, YOUNG, LAST)
        parts = setting.retention.split(spec_of(), [AGED, YOUNG, LAST])
        await setting.retention.remove(spec_of(), parts.aged)
        assert setting.paths() == [10, 20]
        await setting.retention.remove(spec_of(), parts.aged)  # which are gone
        await setting.stores.aclose()

    run(scenario())
    assert "1 fragments of a/journal are removed (10 bytes)" in caplog.text


@pytest.mark.parametrize("mode", ["false", "dry-run"])
def test_nothing_is_removed_unless_it_is_wished(tmp_path, caplog, mode):
    caplog.set_level("INFO")

    async def scenario():
        setting = Setting(tmp_path, mode)
        for _ in range(3):
            parts = setting.retention.split(spec_of(), [AGED, YOUNG, LAST])
            assert parts.aged == []
            assert len(parts.left) == 3
        await setting.stores.aclose()

    run(scenario())
    assert caplog.text.count("1 fragments of a/journal would be removed (10 bytes)") == (
        mode == "dry-run"
    )


@pytest.mark.parametrize("years", [-20, 20])
def test_a_wrong_clock_removes_nothing_that_is_young(tmp_path, years):
    async def scenario():
        setting = Setting(tmp_path, now=NOW + years * 365 * DAY_S)
        parts = setting.retention.split(spec_of(), [AGED, YOUNG, LAST])
        assert spans(parts.aged) == ([(0, 10)] if years > 0 else [])
        await setting.stores.aclose()

    run(scenario())


def test_the_time_of_a_store_passes_while_the_broker_runs(tmp_path):
    async def scenario():
        setting = Setting(tmp_path, now=math.inf)
        loop = asyncio.get_running_loop()
        assert setting.retention.split(spec_of(), [YOUNG, LAST]).aged == []
        late = loop.time() + 11 * DAY_S
        loop.time = lambda: late
        assert spans(setting.retention.split(spec_of(), [YOUNG, LAST]).aged) == [(10, 20)]
        await setting.stores.aclose()

    run(scenario())


def test_a_store_that_refuses_removals_is_named_once(tmp_path, caplog):
    class Refusing:
        def __init__(self, store):
            self.store = store

        def __getattr__(self, name):
            return getattr(self.store, name)

        def remove(self, path):
            raise StoreAuthorizationError(f"remove {path!r}: not allowed", store=STORE)

    async def scenario():
        opener = lambda url: Refusing(open_store(url, file_root=tmp_path))  # noqa: E731
        setting = Setting(tmp_path, opener=opener)
        setting.put(AGED)
        for _ in range(3):
            await setting.retention.remove(spec_of(), [AGED])
        assert setting.paths() == [0]
        await setting.stores.aclose()

    run(scenario())
    assert caplog.text.count("--broker.prune=false") == 1


@pytest.mark.parametrize(
    ("needed", "removed"),
    [
        ("", []),
        ("0", []),
        ("9", []),
        ("10", [(0, 10)]),
        ("25", [(0, 10), (10, 20)]),
        ("1000", [(0, 10), (10, 20)]),  # the last one stays, and one that was just stored
        ("-1", []),
        ("many", []),
    ],
)
def test_of_a_recovery_log_what_no_recovery_needs_is_removed(needed, removed):
    spec = spec_of(1, RECOVERY_LOG)
    if needed:
        set_value(spec.labels, NEEDED_FROM, needed)
    young = stored(20, 30, 1)
    listing = [stored(0, 10, 5 * DAY_S), stored(10, 20, DAY_S), young, stored(30, 40, DAY_S)]
    parts = split(spec, listing)
    assert spans(parts.aged) == removed
    assert parts.left == listing[len(removed) :]
