"""Heads of journals: rates, merged answers of brokers, and those that have no such call."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.broker.fragments.index import Index
from gazette_sdk.broker.views.heads import (
    HEADS_MAX,
    RATE_FORGOTTEN_S,
    HeadOf,
    Heads,
    LocalHeads,
    Rates,
)
from gazette_sdk.errors import CallError, UnavailableError
from gazette_sdk.fragment.content import CoverSet
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import cluster_pb2 as clpb
from gazette_sdk.protocol.authorization import Capability, Claims
from gazette_sdk.protocol.labels import label_set, parse_selector
from gazette_sdk.server.authorization import Call
from gazette_sdk.transport.loop import run
from gazette_sdk.transport.member_calls import MemberAnswer
from support.brokers import Mirror, journal_spec

CALL = Call(authorization="Bearer of-the-caller")
READER = Claims(Capability.READ, pb.LabelSelector(), float("inf"))
JOURNAL = "shop/orders"


# ------------------------------------------------------------------- rates


class Clock:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


def test_a_rate_is_of_the_last_ten_seconds():
    clock = Clock()
    rates = Rates(clock)
    assert rates.rate(JOURNAL, 1, 0) is None, "nothing earlier is known"
    found = []
    for second in range(1, 31):
        clock.now_s += 1
        head = second * 100 if second <= 15 else 1500
        found.append(rates.rate(JOURNAL, 1, head))
    assert found[:15] == [100.0] * 15
    assert found[-1] == 0.0, "nothing was appended for fifteen seconds"


def test_answers_in_quick_succession_have_the_rate_of_a_longer_time():
    clock = Clock()
    rates = Rates(clock)
    rates.rate(JOURNAL, 1, 0)
    clock.now_s += 0.1
    assert rates.rate(JOURNAL, 1, 1_000_000) is None
    clock.now_s += 1.9
    assert rates.rate(JOURNAL, 1, 1_000_000) == 500_000


@pytest.mark.parametrize("create_revision", [1, 2])
def test_an_old_head_and_that_of_an_earlier_journal_say_nothing(create_revision):
    clock = Clock()
    rates = Rates(clock)
    rates.rate(JOURNAL, 1, 50)
    clock.now_s += RATE_FORGOTTEN_S + 1 if create_revision == 1 else 2
    assert rates.rate(JOURNAL, create_revision, 100) is None


def test_journals_that_no_one_asks_for_are_forgotten():
    clock = Clock()
    rates = Rates(clock)
    for number in range(100):
        rates.rate(f"shop/{number}", 1, 0)
    clock.now_s += 2 * RATE_FORGOTTEN_S
    rates.rate(JOURNAL, 1, 0)
    assert len(rates) == 1


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 1000)), max_size=30))
def test_a_rate_is_never_negative_nor_above_the_greatest_growth(steps):
    clock = Clock()
    rates = Rates(clock)
    head = 0
    for pause_s, appended in steps:
        clock.now_s += pause_s
        head += appended
        rate = rates.rate(JOURNAL, 1, head)
        assert rate is None or 0 <= rate <= head


# ------------------------------------------------------------------- local


def fragment(begin, end, mod_time=0):
    return pb.Fragment(journal=JOURNAL, begin=begin, end=end, mod_time=mod_time)


def test_an_extent_counts_the_bytes_that_exist():
    index = Index()
    assert tuple(index.extent()) == (0, 0, 0)
    index.replace_remote(CoverSet([fragment(100, 200, 1), fragment(150, 250, 1)]))
    assert tuple(index.extent()) == (100, 250, 150)
    index.commit(fragment(300, 310), object())
    assert tuple(index.extent()) == (100, 310, 160), "there is a gap of 50 bytes"
    index.commit(fragment(300, 350), object())
    assert tuple(index.extent()) == (100, 350, 200)
    index.replace_remote(CoverSet([fragment(100, 350, 1)]))
    assert tuple(index.extent()) == (100, 350, 250)


def test_uploaded_fragments_are_stored_before_a_listing_shows_them():
    index = Index()
    for begin, end in ((0, 10), (10, 30), (30, 35)):
        index.commit(fragment(begin, end), object())
    assert index.unstored().length_bytes() == 35
    index.note_uploaded(fragment(10, 30))
    assert index.unstored().length_bytes() == 15
    index.expect_stored(10)
    assert index.unstored().length_bytes() == 5
    index.commit(fragment(30, 50), object())
    assert index.unstored().length_bytes() == 20


class Replicas:
    """A broker's replicas, by name."""

    def __init__(self, *replicas):
        self.of = {replica.journal: replica for replica in replicas}

    def replica(self, journal):
        return self.of.get(journal)


def replica(*, is_listed=True, head_is_known=False, is_primary=True, fragments=((0, 7),)):
    index = Index()
    if is_listed:
        index.replace_remote(CoverSet())
    for begin, end in fragments:
        index.commit(fragment(begin, end), object())
    return SimpleNamespace(
        journal=JOURNAL,
        create_revision=1,
        index=index,
        is_primary=is_primary,
        is_synchronized=False,
        head_is_known=head_is_known,
        spool=SimpleNamespace(
            peek=lambda: SimpleNamespace(first_append_s=90.0, registers=label_set(owner="ada"))
        ),
    )


def local_heads(*replicas):
    return LocalHeads(
        Replicas(*replicas),
        SimpleNamespace(unstored=lambda *_: ()),
        pb.ProcessSpec.ID(zone="zone-a", suffix="first"),
        now=lambda: 100.0,
    )


def test_a_replica_shows_what_is_in_no_store_and_since_when():
    served = replica()
    served.index.spool_end = lambda: 7
    head = local_heads(served).head(JOURNAL)
    assert (head.head, head.begin, head.size, head.unstored) == (7, 0, 7, 7)
    assert head.oldest_unstored_s == 10.0
    assert head.registers == label_set(owner="ada")
    assert not head.HasField("rate")
    [of_replica] = head.replicas
    assert (of_replica.member.suffix, of_replica.head, of_replica.synced) == ("first", 7, True)


def test_the_head_is_not_shown_before_it_is_known():
    served = replica(is_listed=False, fragments=())
    head = local_heads(served).head(JOURNAL)
    assert not head.HasField("head")
    assert "not listed yet" in head.error
    served.index.note_refresh_failure("no such bucket")
    assert "no such bucket" in local_heads(served).head(JOURNAL).error


def test_a_head_that_an_earlier_process_recorded_is_shown_without_its_begin():
    head = local_heads(replica(is_listed=False, head_is_known=True)).head(JOURNAL)
    assert head.head == 7
    assert not head.HasField("begin")
    assert not head.HasField("size")


def test_a_journal_of_other_brokers_has_no_local_head():
    assert local_heads().head(JOURNAL) is None


# ----------------------------------------------------------------- cluster


class Members:
    """Other brokers: their answers, by suffix; and what they were asked."""

    def __init__(self, answers):
        self.answers = answers
        self.asked = []

    async def ask(self, _rpc, requests, call):
        assert call is CALL
        found = []
        for member, request in requests:
            assert request.local
            self.asked.append((member.id.suffix, list(request.journals)))
            answer = self.answers[member.id.suffix]
            if isinstance(answer, Exception):
                found.append(MemberAnswer(member, error=answer))
            else:
                heads = [head for head in answer if head.journal in request.journals]
                found.append(MemberAnswer(member, clpb.HeadsResponse(heads=heads)))
        return found


def of(suffix, journal, head, **fields):
    member = pb.ProcessSpec.ID(zone="zone", suffix=suffix)
    return HeadOf(
        journal=journal,
        head=head,
        replicas=[clpb.HeadsResponse.Replica(member=member, head=head)],
        **fields,
    )


UNKNOWN_CALL = CallError("unknown service", code="UNIMPLEMENTED")


class World:
    """Journals of other brokers, and of none."""

    def __init__(self, answers, routes, *, reads=None):
        self.mirror = Mirror()
        batch = [self.mirror.member(suffix, "zone") for suffix in ("itself", *answers)]
        for journal, suffixes in routes.items():
            batch.append(self.mirror.item(journal_spec(journal, labels={"of": journal})))
            batch += [
                self.mirror.assignment(journal, suffix, slot, zone="zone")
                for slot, suffix in enumerate(suffixes)
            ]
        self.mirror.batch(batch)
        self.members = Members(answers)
        self.reads = []
        self.read_answers = reads or {}
        self.heads = Heads(
            self.mirror.keyspace,
            pb.ProcessSpec.ID(zone="zone-a", suffix="first"),
            local_heads(),
            self.members,
            self.read,
        )

    async def read(self, request, call):
        assert call is CALL
        assert request.metadata_only
        self.reads.append(request.journal)
        answer = self.read_answers[request.journal]
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            await asyncio.Event().wait()
        yield answer

    def ask(self, *journals, claims=READER, **fields):
        request = clpb.HeadsRequest(journals=journals, **fields)
        return run(self.heads.answer(request, claims, CALL), 20)

    def find(self, *journals):
        items = [self.mirror.keyspace.item(journal) for journal in journals]
        return run(self.heads.find(items, CALL, primaries_only=True), 20)


def test_each_broker_is_asked_once_for_all_of_its_journals():
    answers = {
        "second": [of("second", "shop/a", 10, unstored=3), of("second", "shop/b", 4)],
        "third": [of("third", "shop/a", 9), of("third", "shop/b", 6, rate=2.0)],
    }
    world = World(answers, {"shop/a": ["second", "third"], "shop/b": ["third", "second"]})
    heads = world.ask("shop/b", "shop/a", "shop/b")
    assert [(head.journal, head.head) for head in heads] == [("shop/b", 6), ("shop/a", 10)]
    assert sorted(world.members.asked) == [
        ("second", ["shop/b", "shop/a"]),
        ("third", ["shop/b", "shop/a"]),
    ]
    assert heads[0].rate == 2.0, "the primary's answer counts"
    assert [each.member.suffix for each in heads[1].replicas] == ["second", "third"]
    assert [each.head for each in heads[1].replicas] == [10, 9]


def test_only_primaries_are_asked_for_a_page():
    answers = {"second": [of("second", "shop/a", 10)], "third": [of("third", "shop/b", 6)]}
    world = World(answers, {"shop/a": ["second", "third"], "shop/b": ["third", "second"]})
    found = world.find("shop/a", "shop/b")
    assert {name: head.head for name, head in found.items()} == {"shop/a": 10, "shop/b": 6}
    assert world.members.asked == [("second", ["shop/a"]), ("third", ["shop/b"])]


def test_the_broker_that_reaches_furthest_stands_for_a_primary_that_is_down():
    answers = {
        "second": UnavailableError("no connection"),
        "third": [of("third", "shop/a", 5)],
        "fourth": [of("fourth", "shop/a", 8)],
    }
    world = World(answers, {"shop/a": ["second", "third", "fourth"], "shop/b": ["second"]})
    first, second = world.ask("shop/a", "shop/b")
    assert first.head == 8
    assert [each.member.suffix for each in first.replicas] == ["fourth", "third"]
    assert not second.HasField("head")
    assert "no connection" in second.error


def test_journals_of_brokers_without_this_call_are_read():
    read = pb.ReadResponse(status=pb.OK, offset=5, write_head=30)
    empty = pb.ReadResponse(status=pb.OFFSET_NOT_YET_AVAILABLE, offset=0, write_head=0)
    failed = pb.ReadResponse(status=pb.INSUFFICIENT_JOURNAL_BROKERS)
    world = World(
        {"second": UNKNOWN_CALL, "third": [of("third", "shop/mixed", 3)]},
        {
            "shop/foreign": ["second"],
            "shop/empty": ["second"],
            "shop/failed": ["second"],
            "shop/broken": ["second"],
            "shop/mixed": ["second", "third"],
        },
        reads={
            "shop/foreign": read,
            "shop/empty": empty,
            "shop/failed": failed,
            "shop/broken": UnavailableError("it is gone"),
        },
    )
    foreign, none, failed_head, broken, mixed = world.ask(
        "shop/foreign", "shop/empty", "shop/failed", "shop/broken", "shop/mixed"
    )
    assert (foreign.head, foreign.begin, foreign.size, foreign.error) == (30, 5, 25, "")
    assert (none.head, none.begin, none.size) == (0, 0, 0)
    assert failed_head.error == "INSUFFICIENT_JOURNAL_BROKERS"
    assert "it is gone" in broken.error
    assert mixed.head == 3
    assert "shop/mixed" not in world.reads


def test_a_read_without_an_answer_ends_in_time():
    world = World({"second": UNKNOWN_CALL}, {"shop/a": ["second"]}, reads={"shop/a": None})
    [head] = world.ask("shop/a")
    assert not head.HasField("head")
    assert head.error


def test_a_suspended_journal_is_asked_of_no_one():
    world = World({}, {})
    spec = journal_spec("shop/asleep")
    spec.suspend.level = pb.JournalSpec.Suspend.FULL
    spec.suspend.offset = 77
    world.mirror.put(dict([world.mirror.item(spec)]))
    [head] = world.ask("shop/asleep")
    assert (head.head, head.unstored) == (77, 0)


def test_journals_that_do_not_exist_or_are_not_permitted_are_left_out_alike():
    world = World({"second": []}, {"shop/a": [], "shop/b": []})
    claims = Claims(Capability.READ, parse_selector("of=shop/b"), float("inf"))
    assert [head.journal for head in world.ask("shop/none", "shop/a", "shop/b", claims=claims)] == [
        "shop/b"
    ]


def test_too_many_journals_are_refused():
    with pytest.raises(CallError, match="at most 500"):
        World({}, {}).ask(*(f"shop/{number}" for number in range(HEADS_MAX + 1)))
