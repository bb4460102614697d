"""Several tabs of one browser share the six connections that it has to a server."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from gazette_sdk.transport.loop import run
from support.console_stand_in import PRODUCER, event, line, sample_content, sample_name

NAMES = [sample_name(number) for number in range(4)]
EVENTS = "/events"


def happen(cluster, *numbers):
    async def scenario():
        cluster.world.events += [
            event(number, "journal", NAMES[0], f"has event {number}") for number in numbers
        ]
        cluster.world.wake()

    run(scenario(), 10)


def append(cluster, name, value):
    async def scenario():
        cluster.world.append(name, line(PRODUCER, 9, 0, value))

    run(scenario(), 10)


def see_events(visit, *numbers):
    """Wait until a page shows exactly these events, the newest first."""
    expect(visit.page.locator(".events li > div")).to_have_text(
        [f"{NAMES[0]} has event {number}" for number in reversed(numbers)]
    )


def streams(visit):
    return [url for url in visit.requests if "/v1/cluster/events" in url]


@pytest.fixture(params=["locks", "leases"])
def first(visits, request):
    """The first tab of a browser; pages by plain HTTP of another host have no locks."""
    first = visits()
    if request.param == "leases":
        first.page.context.add_init_script("delete Navigator.prototype.locks")
    return first


@pytest.fixture
def cluster(stand_in):
    cluster = stand_in(content=dict.fromkeys(NAMES, sample_content()))
    happen(cluster, 1, 2)
    return cluster


def test_one_tab_reads_the_events_for_all_and_is_replaced_without_a_loss(cluster, visits, first):
    endpoint = cluster.server.endpoint
    others = [visits(beside=first) for _ in range(2)]
    for tab in (first, *others):
        tab.open(endpoint, EVENTS)
        see_events(tab, 1, 2)
    happen(cluster, 3)
    for tab in (first, *others):
        see_events(tab, 1, 2, 3)
    assert [len(streams(tab)) for tab in (first, *others)] == [1, 0, 0]
    first.page.close()
    happen(cluster, 4, 5)
    for tab in others:
        see_events(tab, 1, 2, 3, 4, 5)
    assert [url.partition("?")[2] for tab in others for url in streams(tab)] == ["after=p1%3A3"]
    last = visits(beside=others[0])
    last.open(endpoint, EVENTS)
    see_events(last, 1, 2, 3, 4, 5)
    assert streams(last) == []
    assert cluster.world.most_streams["events"] == 1


def test_a_hidden_tab_leaves_the_events_to_another_one_and_catches_up(cluster, visits):
    first = visits()
    first.page.clock.install()
    first.open(cluster.server.endpoint, EVENTS)
    see_events(first, 1, 2)
    second = visits(beside=first)
    second.open(cluster.server.endpoint, EVENTS)
    see_events(second, 1, 2)
    first.be(hidden=True)
    with second.page.expect_request("**/v1/cluster/events?after=p1%3A2"):
        first.page.clock.fast_forward(31_000)
    happen(cluster, 3, 4)
    see_events(second, 1, 2, 3, 4)
    see_events(first, 1, 2)
    first.be(hidden=False)
    see_events(first, 1, 2, 3, 4)
    assert len(streams(first)) == 1
    assert cluster.world.most_streams["events"] <= 2, "the first one may end a moment later"


def test_tabs_with_other_tokens_have_their_own_events(cluster, visits):
    first = visits()
    first.open(cluster.server.endpoint, EVENTS)
    see_events(first, 1, 2)
    second = visits(beside=first)
    second.page.goto(f"{cluster.server.endpoint}/console/#token=a.b.c")
    expect(second.page.get_by_text("What needs you")).to_be_visible()
    second.page.keyboard.press("g")
    second.page.keyboard.press("e")
    see_events(second, 1, 2)
    assert [len(streams(tab)) for tab in (first, second)] == [1, 1]


def test_paused_events_stay_and_later_ones_are_counted(cluster, visit):
    page = visit.open(cluster.server.endpoint, EVENTS)
    see_events(visit, 1, 2)
    page.get_by_role("button", name="Pause").click()
    happen(cluster, 3, 4)
    expect(page.get_by_role("button", name="Continue (2 new)")).to_be_visible()
    see_events(visit, 1, 2)
    page.get_by_role("button", name="Continue").click()
    see_events(visit, 1, 2, 3, 4)


def test_three_tabs_are_live_and_a_fourth_one_waits_for_its_turn(cluster, visits, first):
    tabs = [first, *(visits(beside=first) for _ in NAMES[1:])]
    for tab, name in zip(tabs, NAMES, strict=True):
        tab.open(cluster.server.endpoint, f"/journals/{name}?live=1")
        if tab is not tabs[-1]:
            expect(tab.page.locator(".rows .row")).to_have_count(9)
    last = tabs[-1].page
    expect(last.get_by_text("Three other tabs are live")).to_be_visible()
    last.get_by_role("button", name="Show the last messages").click()
    expect(last.locator(".rows .row")).to_have_count(9)
    last.get_by_role("button", name="Go live").click()
    expect(last.get_by_text("Three other tabs are live")).to_be_visible()
    first.page.close()
    expect(last.locator(".foot")).to_contain_text("live")
    append(cluster, NAMES[-1], {"customer": "gus"})
    expect(last.locator(".rows .row").last).to_contain_text("gus")
    expect(last.locator(".rows .row")).to_have_count(10)
    assert cluster.world.most_streams["tails"] == 3


def test_a_tab_that_waits_for_its_turn_is_left_without_a_trace(cluster, visits):
    first = visits()
    tabs = [first, *(visits(beside=first) for _ in NAMES[1:])]
    for tab, name in zip(tabs, NAMES, strict=True):
        tab.open(cluster.server.endpoint, f"/journals/{name}?live=1")
        if tab is not tabs[-1]:
            expect(tab.page.locator(".foot")).to_contain_text("live")
    expect(tabs[-1].page.get_by_text("Three other tabs are live")).to_be_visible()
    tabs[-1].page.get_by_role("link", name="Journals", exact=True).click()
    expect(tabs[-1].page.locator("h1")).to_have_text("Journals")
    held = first.page.evaluate("navigator.locks.query()")
    assert (len(held["held"]), held["pending"]) == (3, [])
