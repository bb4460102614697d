"""Pages of journals: states, orders, cursors, and what a page of many costs."""

from __future__ import annotations

import asyncio
import gc
import time

import pytest

from gazette_sdk.broker.listing import Listing
from gazette_sdk.broker.views.heads import HeadOf
from gazette_sdk.broker.views.page import (
    JournalPages,
    Line,
    cut_page,
    state_of,
)
from gazette_sdk.cluster.items import AssignmentEntry, ItemEntry
from gazette_sdk.errors import CallError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import cluster_pb2 as clpb
from gazette_sdk.protocol.authorization import Capability, Claims
from gazette_sdk.protocol.labels import parse_selector
from gazette_sdk.server.authorization import Call
from gazette_sdk.server.paging import ROWS_MAX, PageCut
from gazette_sdk.transport.loop import run
from support.brokers import Mirror, journal_spec

CALL = Call()
EVERYTHING = Claims(Capability.LIST | Capability.READ, pb.LabelSelector(), float("inf"))


def route(*members: tuple[str, str], primary: int = 0) -> pb.Route:
    ids = [pb.ProcessSpec.ID(zone=zone, suffix=suffix) for zone, suffix in members]
    return pb.Route(members=ids, primary=primary)


def assigned(*slots: tuple[str, str, int], agreed: bool = True) -> list[AssignmentEntry[pb.Route]]:
    """Assignments that agree on their route, or have none yet."""
    primaries = [at for at, (_, _, slot) in enumerate(slots) if slot == 0]
    members = [(zone, suffix) for zone, suffix, _ in slots]
    value = route(*members, primary=primaries[0] if primaries else -1) if agreed else pb.Route()
    return [
        AssignmentEntry(b"", value, 1, 1, 1, 0, b"", "aa/b", zone, suffix, slot)
        for zone, suffix, slot in slots
    ]


SUSPENDED = journal_spec("aa/b", replication=2)
SUSPENDED.suspend.level = pb.JournalSpec.Suspend.FULL
FIRST, SECOND, THIRD = ("a", "first", 0), ("b", "second", 1), ("b", "third", 2)
BESIDE = ("a", "second", 1)
TWO = journal_spec("aa/b", replication=2)


@pytest.mark.parametrize(
    ("spec", "assignments", "is_waiting", "zones", "expected"),
    [
        (TWO, assigned(FIRST, SECOND), False, 2, clpb.JOURNAL_OK),
        (TWO, assigned(FIRST, BESIDE), False, 1, clpb.JOURNAL_OK),
        (TWO, assigned(FIRST, BESIDE), False, 2, clpb.JOURNAL_SINGLE_ZONE),
        (TWO, assigned(FIRST), False, 2, clpb.JOURNAL_SHORT),
        (TWO, assigned(FIRST, SECOND, agreed=False), False, 2, clpb.JOURNAL_SHORT),
        (TWO, assigned(SECOND, THIRD), False, 2, clpb.JOURNAL_NO_PRIMARY),
        (TWO, [], False, 2, clpb.JOURNAL_UNASSIGNED),
        (TWO, assigned(FIRST, agreed=False), True, 2, clpb.JOURNAL_WAITING),
        (TWO, [], True, 2, clpb.JOURNAL_WAITING),
        (SUSPENDED, [], False, 2, clpb.JOURNAL_SUSPENDED),
        (journal_spec("aa/b"), assigned(FIRST), False, 2, clpb.JOURNAL_OK),
    ],
)
def test_each_state_follows_from_the_keys_of_a_journal(
    spec, assignments, is_waiting, zones, expected
):
    found = state_of(
        spec,
        assignments,
        is_waiting=is_waiting,
        several_zones=zones > 1,
        max_replication=9,
    )
    assert clpb.JournalState.Name(found) == clpb.JournalState.Name(expected)


def lines_of(names):
    return [
        Line(ItemEntry(b"", journal_spec(name), 1, 1, 1, 0, b"", name), [], clpb.JOURNAL_OK)
        for name in names
    ]


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("skip", [0, 3])
def test_a_page_by_names_looks_at_the_lines_near_its_cursor_alone(descending, skip):
    lines = lines_of(f"aa/{number:03}" for number in range(12))
    request = clpb.JournalsPageRequest(descending=descending, skip=skip, limit=2)
    found = []
    while True:
        page, request.after = run(cut_page(PageCut(request, by_id=clpb.BY_NAME), lines, ()), 10)
        found += page
        request.skip = 0
        if not request.after:
            break
    assert found == (lines[::-1] if descending else lines)[skip:]


SEVEN = HeadOf(head=7)


class Known:
    """Heads as they are given, of any journals; and what was asked for."""

    def __init__(self, heads=None):
        self.heads = heads or {}
        self.asked = []

    async def find(self, items, _call, *, primaries_only=False):
        assert primaries_only
        self.asked.append([item.id for item in items])
        return {item.id: self.heads.get(item.id, HeadOf(journal=item.id, head=7)) for item in items}


class World:
    """A mirror with pages over it, at a time that the test sets."""

    def __init__(self, *specs, heads=None):
        self.mirror = Mirror()
        self.mirror.batch(
            [self.mirror.member("first", zone="a"), self.mirror.member("second", zone="b")]
        )
        self.add(*specs)
        self.heads = Known(heads)
        self.now_s = 100.0
        listing = Listing(self.mirror.keyspace, None, pb.ProcessSpec.ID(zone="a", suffix="first"))
        self.pages = JournalPages(listing, self.heads, max_replication=9, now=lambda: self.now_s)

    def add(self, *specs):
        batch = []
        for spec in specs:
            batch.append(self.mirror.item(spec))
            batch.append(
                self.mirror.assignment(spec.name, "first", 0, route(("a", "first")), zone="a")
            )
        self.mirror.batch(batch)

    def page(self, claims=EVERYTHING, **fields):
        request = clpb.JournalsPageRequest(**fields)
        return run(self.pages.answer(request, claims, CALL), 20)


def names_of(page):
    return [row.name for row in page.rows]


def test_a_page_is_searched_in_names_and_labels_and_filtered_by_states():
    world = World(
        journal_spec("shop/orders", labels={"topic": "Orders"}),
        journal_spec("shop/visits", labels={"topic": "visits"}, replication=2),
        journal_spec("logs/orders-old"),
    )
    everything = world.page()
    assert names_of(everything) == ["logs/orders-old", "shop/orders", "shop/visits"]
    assert everything.total == 3
    assert everything.states == {"JOURNAL_OK": 2, "JOURNAL_SHORT": 1}
    assert everything.revision == world.mirror.revision
    assert names_of(world.page(search="ORDERS")) == ["logs/orders-old", "shop/orders"]
    assert names_of(world.page(search="topic=v")) == ["shop/visits"]
    assert names_of(world.page(selector=parse_selector("topic=Orders"))) == ["shop/orders"]
    short = world.page(states=[clpb.JOURNAL_SHORT])
    assert names_of(short) == ["shop/visits"]
    assert short.total == 1
    assert short.states == everything.states, "all states are counted"


def test_a_page_is_of_the_newest_keys():
    world = World(journal_spec("aa/b"))
    assert names_of(world.page()) == ["aa/b"]
    world.now_s += 20
    world.add(journal_spec("aa/c"))
    assert names_of(world.page()) == ["aa/b", "aa/c"]


def test_orders_by_heads_are_of_all_journals_that_match():
    heads = {
        "aa/1": HeadOf(journal="aa/1", head=5, rate=1.5, size=5, unstored=1),
        "aa/2": HeadOf(journal="aa/2", head=50, rate=0.5, size=2, unstored=9),
        "aa/3": HeadOf(journal="aa/3", error="down"),
    }
    world = World(
        *(journal_spec(name, replication=3 - int(name[-1]) % 3) for name in heads), heads=heads
    )
    for sort, expected in (
        (clpb.BY_HEAD, ["aa/2", "aa/1", "aa/3"]),
        (clpb.BY_RATE, ["aa/1", "aa/2", "aa/3"]),
        (clpb.BY_SIZE, ["aa/1", "aa/2", "aa/3"]),
        (clpb.BY_UNSTORED, ["aa/2", "aa/1", "aa/3"]),
        (clpb.BY_REPLICATION, ["aa/3", "aa/1", "aa/2"]),
    ):
        assert names_of(world.page(sort=sort, descending=True)) == expected
    [row] = world.page(search="aa/3").rows
    assert not row.HasField("head")
    assert not row.HasField("rate")


def test_without_the_capability_read_no_head_is_asked_for():
    world = World(journal_spec("aa/b"), journal_spec("aa/c"))
    claims = Claims(Capability.LIST, pb.LabelSelector(), float("inf"))
    page = world.page(claims, sort=clpb.BY_HEAD)
    assert names_of(page) == ["aa/b", "aa/c"]
    assert not any(row.HasField("head") for row in page.rows)
    assert not any(world.heads.asked)


def test_journals_that_no_one_may_read_have_no_head():
    hidden = journal_spec("aa/b", flags=pb.JournalSpec.O_WRONLY)
    [row] = World(hidden).page().rows
    assert not row.HasField("head")


def test_heads_of_all_journals_are_asked_for_at_most_every_two_seconds():
    world = World(*(journal_spec(f"aa/{number:04}") for number in range(600)))
    for now_s, asked in ((100.0, 1), (101.9, 1), (115.0, 2)):
        world.now_s = now_s
        world.page(sort=clpb.BY_RATE, limit=1)
        assert sum(len(names) == 600 for names in world.heads.asked) == asked


@pytest.mark.parametrize(
    ("fields", "text"),
    [({"limit": ROWS_MAX + 1}, "limit"), ({"limit": -1}, "limit"), ({"skip": -1}, "skip")],
)
def test_numbers_out_of_their_bounds_are_refused(fields, text):
    with pytest.raises(CallError, match=text):
        World(journal_spec("aa/b")).page(**fields)


def test_a_page_of_ten_thousand_journals_delays_no_other_task():
    """Making the table, searching it and sorting it are done in slices."""
    world = World(
        *(
            journal_spec(f"aa/{number:05}", labels={"topic": f"t{number % 7}"})
            for number in range(10_000)
        )
    )
    longest = 0.0

    async def tick():
        nonlocal longest
        while True:
            before = time.thread_time()
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - before)

    async def scenario():
        gc.disable()  # the pauses of a process that runs many tests are longer than a broker's
        ticking = asyncio.create_task(tick())
        begun = time.thread_time()
        request = clpb.JournalsPageRequest(sort=clpb.BY_HEAD, search="topic=t3", limit=100)
        page = await world.pages.answer(request, EVERYTHING, CALL)
        ticking.cancel()
        gc.enable()
        return page, time.thread_time() - begun

    page, cost_s = asyncio.run(scenario())
    assert len(page.rows) == 100
    assert page.total == 10_000 // 7 + 1
    assert cost_s < 2
    assert longest < 0.05
