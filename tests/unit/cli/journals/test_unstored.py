from __future__ import annotations

import pytest

from gazette_sdk.cli.journals.list import (
    HEADS_OF_CALL,
    Extent,
    Unstored,
    extents_of,
    heads_of,
    unstored_of,
    unstored_spans,
)
from gazette_sdk.errors import CallError, UnavailableError
from gazette_sdk.fragment.content import CoverSet
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import cluster_pb2 as clpb
from support.etcd import run

MEMBERS = [pb.ProcessSpec.ID(zone="zone", suffix=f"broker-{number}") for number in range(3)]


def span(begin, end, mod_time=0):
    return pb.Fragment(journal="a/journal", begin=begin, end=end, mod_time=mod_time)


def covers(*spans):
    return CoverSet(span(*each) for each in spans)


@pytest.mark.parametrize(
    ("local", "stored", "expect"),
    [
        ([], (), Unstored(0)),
        ([(), ()], [(0, 10)], Unstored(0)),
        ([[(0, 10)], [(0, 10)]], [(0, 10)], Unstored(0)),
        ([[(0, 10)], [(0, 10)]], (), Unstored(10, 2)),
        ([[(0, 10)], [(5, 10)]], (), Unstored(10, 1)),
        ([[(0, 10)], [(5, 10)]], [(0, 5)], Unstored(5, 2)),
        ([[(0, 4), (4, 10)], [(0, 10)], [(10, 20)]], (), Unstored(20, 1)),
    ],
)
def test_spans(local, stored, expect):
    assert unstored_spans([covers(*each) for each in local], covers(*stored)) == expect


class Brokers:
    """Fragments of a journal on three brokers."""

    def __init__(self, *local, stored=()):
        self.local = local
        self.stored = stored
        self.asked = []

    async def list_fragments(self, request, target):
        number = MEMBERS.index(target.member)
        self.asked.append((number, request.unstored_only))
        if self.local[number] is None:
            raise UnavailableError("it is gone")
        response = pb.FragmentsResponse(status=pb.OK)
        found = list(self.local[number])
        if not request.unstored_only:
            found += [(*each, 77) for each in self.stored]
        page = sorted(each for each in found if each[0] >= request.next_page_token)
        for each in page[:1]:
            response.fragments.add(spec=span(*each))
        if len(page) > 1:
            response.next_page_token = page[1][0]
        return response


def found_of(brokers, level=pb.JournalSpec.Suspend.NONE, heads=None):
    journal = pb.ListResponse.Journal(route=pb.Route(members=MEMBERS, primary=1))
    journal.spec.name = "a/journal"
    journal.spec.suspend.level = level
    listing = pb.ListResponse(journals=[journal])
    return run(unstored_of(brokers, listing, heads))["a/journal"]


def test_what_is_appended_after_the_primarys_answer_is_left_out():
    brokers = Brokers([(0, 10), (10, 30)], [(0, 10), (10, 20)], [(0, 10), (10, 25)])
    assert found_of(brokers) == Unstored(20, 3)
    assert brokers.asked[0] == (1, True)
    assert {is_short for _, is_short in brokers.asked} == {True}


def test_what_one_broker_found_in_a_store_is_stored():
    brokers = Brokers([(0, 10), (10, 20)], [(10, 20)], [(10, 20)], stored=[(0, 10)])
    assert found_of(brokers) == Unstored(10, 3)


def test_a_broker_that_lacks_content_and_one_that_is_gone_count_less(caplog):
    assert found_of(Brokers([(0, 10), (10, 20)], [(0, 10), (10, 20)], [(10, 20)])) == Unstored(
        20, 2
    )
    assert found_of(Brokers([(0, 10)], None, [(0, 10)])) == Unstored(10, 2)
    assert "a broker does not tell what it has" in caplog.text
    assert found_of(Brokers(None, None, None)) == Unstored()


def test_a_journal_that_is_fully_suspended_has_nothing_that_is_not_stored():
    assert found_of(Brokers(), level=pb.JournalSpec.Suspend.FULL) == Unstored(0)


# ------------------------------------------------------------------- heads


def head(unstored, *replicas, **fields):
    """Heads of a journal at offset 30, with what each of some brokers has of it."""
    found = clpb.HeadsResponse.Head(journal="a/journal", head=30, unstored=unstored, **fields)
    for member, (end, of_replica, synced) in zip(MEMBERS, replicas, strict=False):
        found.replicas.add(member=member, head=end, unstored=of_replica, synced=synced)
    return {"a/journal": found}


def test_brokers_that_have_the_same_are_not_asked_for_fragments():
    brokers = Brokers()
    heads = head(20, (30, 20, True), (30, 20, True), (30, 20, True))
    assert found_of(brokers, heads=heads) == Unstored(20, 3)
    heads = head(0, (30, 0, True), (30, 0, True), (30, 0, True))
    assert found_of(brokers, heads=heads) == Unstored(0, None)
    assert not brokers.asked


@pytest.mark.parametrize(
    "replicas",
    [
        [(30, 20, True), (30, 20, True)],
        [(30, 20, True), (30, 20, True), (25, 20, True)],
        [(30, 20, True), (30, 20, True), (30, 10, True)],
        [(30, 20, True), (30, 20, True), (30, 20, False)],
    ],
)
def test_brokers_that_differ_are_asked_for_fragments(replicas):
    """One of them may have bytes that the primary lacks."""
    brokers = Brokers([(0, 10)], [(0, 10)], [(0, 10)])
    assert found_of(brokers, heads=head(20, *replicas)) == Unstored(10, 3)
    assert brokers.asked


class Viewed:
    """Brokers that show heads of any journals, or have no such call."""

    def __init__(self, error=None, left_out=()):
        self.error = error
        self.left_out = left_out
        self.asked = []

    async def view(self, _call, request):
        self.asked.append(len(request.journals))
        if self.error is not None:
            raise self.error
        return clpb.HeadsResponse(
            heads=[
                clpb.HeadsResponse.Head(journal=name, head=7, size=5)
                for name in request.journals
                if name not in self.left_out
            ]
        )


def listing_of(count):
    listing = pb.ListResponse()
    for number in range(count):
        listing.journals.add().spec.name = f"many/{number}"
    return listing


def test_heads_of_many_journals_are_few_calls():
    brokers, listing = Viewed(), listing_of(2 * HEADS_OF_CALL + 1)

    async def scenario():
        return await extents_of(brokers, listing, await heads_of(brokers, listing))

    extents = run(scenario())
    assert brokers.asked == [HEADS_OF_CALL, HEADS_OF_CALL, 1]
    assert set(extents.values()) == {Extent(7, 5)}


def test_a_head_that_is_not_permitted_is_unknown(caplog):
    brokers, listing = Viewed(left_out=("many/1",)), listing_of(2)

    async def scenario():
        return await extents_of(brokers, listing, await heads_of(brokers, listing))

    assert run(scenario()) == {"many/0": Extent(7, 5), "many/1": Extent()}
    assert "write head is unknown" in caplog.text


def test_brokers_without_the_call_are_asked_for_each_journal():
    unknown = CallError("unknown service", code="UNIMPLEMENTED")
    assert run(heads_of(Viewed(unknown), listing_of(1))) is None
    with pytest.raises(UnavailableError):
        run(heads_of(Viewed(UnavailableError("it is gone")), listing_of(1)))
