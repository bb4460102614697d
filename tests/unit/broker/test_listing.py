from __future__ import annotations

import asyncio
import math

import pytest

from gazette_sdk.broker.listing import PAGE_JOURNALS, Listing
from gazette_sdk.errors import ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Claims
from gazette_sdk.protocol.labels import label_set, parse_selector
from gazette_sdk.protocol.rules import validate
from support.brokers import Mirror, journal_spec
from support.etcd import run
from support.vectors import cases, group, selector

LOCAL = pb.ProcessSpec.ID(zone="zone", suffix="suffix")
EVERYTHING = pb.LabelSelector()


def claims(of=EVERYTHING):
    return Claims(2**32 - 1, of, math.inf)


def filled(journals):
    mirror = Mirror()
    items = []
    for name, labels in journals.items():
        spec = journal_spec(name)
        spec.labels.CopyFrom(label_set((label["name"], label["value"]) for label in labels))
        items.append(mirror.item(spec))
    mirror.put(dict([*items, mirror.member("suffix", "zone")]))
    return mirror


def listing_of(mirror):
    return Listing(mirror.keyspace, None, LOCAL)


async def names(listing, request, of=EVERYTHING):
    return [
        journal.spec.name
        async for response in listing.snapshots(request, claims(of))
        for journal in response.journals
    ]


@pytest.mark.parametrize("case", cases("broker", "list_select"))
def test_journals_are_selected(case):
    listing = listing_of(filled(group("broker", "list_select")["journals"]))
    request = pb.ListRequest(selector=selector(case["selector"]))
    if case["expect"] == "validation_error":
        with pytest.raises(ValidationError):
            validate(request)
        return
    found = run(names(listing, request, selector(case.get("claims_selector"))))
    assert found == case["expect"]


def test_headers_are_those_of_no_journal():
    (case,) = (p.values[0] for p in cases("broker", "unrouted_header"))
    mirror = Mirror()
    mirror.revision = 55
    mirror.put(dict([mirror.member("suffix", "zone")]))
    header = listing_of(mirror).header()
    expect = case["expect"]
    assert (header.process_id.zone, header.process_id.suffix) == ("zone", "suffix")
    assert header.route == pb.Route(primary=expect["route"]["primary"])
    for name, value in expect["etcd"].items():
        assert getattr(header.etcd, name) == value
    mirror.put({}, delete=[mirror.member("suffix", "zone")[0]])
    assert listing_of(mirror).header().process_id == pb.ProcessSpec.ID()


def test_pages_hold_25_journals_and_only_the_first_has_a_header():
    case = cases("broker", "list_watch")[1].values[0]
    assert case["page_size"] == PAGE_JOURNALS
    mirror = filled({f"j/{n:03}": [] for n in range(case["journals"])})

    async def scenario():
        request = pb.ListRequest()
        pages = [p async for p in listing_of(mirror).snapshots(request, claims())]
        assert [len(page.journals) for page in pages] == case["expect_messages"]
        assert pages[0].header.etcd.revision == mirror.revision
        for page in pages[1:]:
            assert page.header == pb.Header(
                process_id=pb.ProcessSpec.ID(), route=pb.Route(), etcd=pb.Header.Etcd()
            )

    run(scenario())


def test_journals_listed_by_name_are_looked_up_without_a_visit_of_all(monkeypatch):
    journals = {f"jour/{n}": [{"name": "topic", "value": f"{n % 2}"}] for n in range(6)}
    listing = listing_of(filled(journals))
    monkeypatch.setattr(listing.keyspace, "items", lambda: pytest.fail("all were visited"))
    by_name = parse_selector("name in (jour/4,jour/1,jour/2,other)")
    assert run(names(listing, pb.ListRequest(selector=by_name))) == ["jour/1", "jour/2", "jour/4"]
    allowed = parse_selector("topic=0")
    assert run(names(listing, pb.ListRequest(selector=by_name), allowed)) == ["jour/2", "jour/4"]


def test_an_empty_snapshot_has_its_header():
    async def scenario():
        listing = listing_of(filled({}))
        (page,) = [p async for p in listing.snapshots(pb.ListRequest(), claims())]
        assert page.header.etcd.revision > 0
        assert not page.journals

    run(scenario())


class Watch:
    def __init__(self, listing, request):
        self.responses = listing.snapshots(request, claims())

    async def snapshot(self):
        found = []
        is_first = True
        while True:
            response = await asyncio.wait_for(anext(self.responses), 5)
            if not is_first and not response.journals and not response.header.etcd.revision:
                return found
            is_first = False
            found += [journal.spec.name for journal in response.journals]


def test_a_watch_tells_of_changes_of_what_it_matches():
    case = cases("broker", "list_watch")[0].values[0]

    async def scenario():
        mirror = filled(group("broker", "list_select")["journals"])
        request = pb.ListRequest(watch=True)
        request.selector.include.labels.add(name="name", value="journal/1/", prefix=True)
        watch = Watch(listing_of(mirror), request)
        assert await watch.snapshot() == case["initial"]
        for event in case["events"]:
            if "cancel" in event:
                break
            mirror.put({}, delete=[mirror.keyspace.item_key(event["delete"])])
            if event["snapshot"] is not None:
                assert await watch.snapshot() == event["snapshot"]
        await watch.responses.aclose()

    run(scenario())


def test_a_change_of_routes_only_sends_no_snapshot():
    async def scenario():
        mirror = filled({"a/journal": []})
        watch = Watch(listing_of(mirror), pb.ListRequest(watch=True))
        assert await watch.snapshot() == ["a/journal"]
        waiting = asyncio.ensure_future(anext(watch.responses))
        await asyncio.sleep(0)
        mirror.put(dict([mirror.assignment("a/journal", "suffix", 0, zone="zone")]))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiting.done()
        mirror.put(dict([mirror.item(journal_spec("a/journal", length=2048))]))
        response = await waiting
        (journal,) = response.journals
        assert journal.spec.fragment.length == 2048
        assert journal.mod_revision == mirror.revision
        assert journal.create_revision < mirror.revision
        assert [m.suffix for m in journal.route.members] == ["suffix"]
        assert journal.route.endpoints == ["http://zone-suffix.test"]
        await watch.responses.aclose()

    run(scenario())


def test_a_watch_resumed_from_an_earlier_etcd_is_answered_at_once():
    async def scenario():
        mirror = filled({"a/journal": []})
        request = pb.ListRequest(watch=True)
        listing = listing_of(mirror)
        request.watch_resume.etcd.cluster_id = listing.header().etcd.cluster_id + 1
        request.watch_resume.etcd.revision = mirror.revision + 1000
        watch = Watch(listing, request)
        assert await watch.snapshot() == ["a/journal"]
        await watch.responses.aclose()

    run(scenario())


def test_a_resumed_watch_waits_for_a_later_revision_and_then_always_tells():
    async def scenario():
        mirror = filled({"a/journal": []})
        request = pb.ListRequest(watch=True)
        request.watch_resume.etcd.revision = mirror.revision
        watch = Watch(listing_of(mirror), request)
        waiting = asyncio.ensure_future(watch.snapshot())
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiting.done()
        mirror.put(dict([mirror.member("other")]))
        assert await waiting == ["a/journal"]
        await watch.responses.aclose()

    run(scenario())
