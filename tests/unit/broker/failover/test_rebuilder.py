"""Whom a primary asks before it replaces a replica."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from gazette_sdk.broker.failover.decision import Action, Candidate, Decision
from gazette_sdk.broker.failover.failover import Rebuilder
from gazette_sdk.broker.replication.peer_stream import PeerStreams
from gazette_sdk.cluster.broker_keys import JournalAllocation
from gazette_sdk.cluster.etcd_messages import Delete, Put
from gazette_sdk.cluster.verification import Input
from gazette_sdk.errors import DeadlineExceededError, UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from support.brokers import ZONE, Mirror, journal_spec
from support.etcd import run


async def offer(_):
    raise AssertionError("it is not cut off")


async def is_silent(member):
    return member.suffix == "broker-d"


def rebuilder_of(mirror, dial, *, streams=None, offer=offer):
    """The rebuilder of `broker-a`."""
    return Rebuilder(
        None,
        mirror.keyspace,
        JournalAllocation(9),
        pb.ProcessSpec.ID(zone=ZONE, suffix="broker-a"),
        streams or PeerStreams(),
        ttl_s=5.0,
        dial=dial,
        is_silent=is_silent,
        offer=offer,
    )


def test_a_member_whose_link_is_cut_is_no_candidate_and_is_not_dialled():
    """A frozen one accepts the connection, and the dial would take its whole bound."""

    async def scenario():
        mirror, dialled = Mirror(), []
        mirror.put(dict(mirror.member(f"broker-{name}") for name in "abcd"))

        async def dial(endpoint):
            dialled.append(endpoint)
            return Input.REACHED if endpoint != endpoints["d"] else Input.UNCLEAR

        rebuilder = rebuilder_of(mirror, dial)
        endpoints = {name: mirror.keyspace.endpoint(ZONE, f"broker-{name}") for name in "bcd"}
        frozen = pb.ProcessSpec.ID(zone=ZONE, suffix="broker-b")
        rebuilder.failed(frozen, DeadlineExceededError("no answer"), waited_s=10.0)
        survey = await rebuilder._survey()
        assert survey.unreached == {(ZONE, "broker-b"), (ZONE, "broker-d")}
        assert survey.silent == {(ZONE, "broker-d")}
        found = {each.suffix: each.is_reached for each in survey.candidates}
        assert found == {"broker-b": False, "broker-c": True, "broker-d": False}
        # One that was not reached is dialled twice as often.
        assert sorted(dialled) == 2 * [endpoints["c"]] + 4 * [endpoints["d"]]
        await asyncio.sleep(0)
        await rebuilder.aclose()

    run(scenario())


@pytest.mark.parametrize(
    ("fields", "is_silent"),
    [
        ({"limit": 0}, True),
        ({"limit": 0, "exiting": True}, False),
        ({}, False),
    ],
)
def test_an_unreached_member_that_takes_no_journals_is_cut_off_itself(fields, is_silent):
    """It takes over nothing: it may be the one that is cut off, not this broker."""

    async def scenario():
        mirror = Mirror()
        mirror.put(dict([mirror.member("broker-a"), mirror.member("broker-b", **fields)]))

        async def dial(_):
            return Input.UNCLEAR

        survey = await rebuilder_of(mirror, dial)._survey()
        assert survey.unreached == {(ZONE, "broker-b")}
        assert survey.silent == ({(ZONE, "broker-b")} if is_silent else frozenset())

    run(scenario())


@pytest.mark.parametrize(
    ("error", "waited_s", "is_reached", "is_cut", "is_dialled"),
    [
        (DeadlineExceededError("no answer"), 10.0, True, True, False),
        (DeadlineExceededError("no answer"), 5.0, True, False, False),
        (UnavailableError("no HELLO"), 1.0, False, False, False),
        (UnavailableError("no HELLO"), 9.0, False, False, True),
        (UnavailableError("no HELLO"), 9.5, False, True, True),
        # It had to wait for somebody else before it refused.
        (UnavailableError("try again"), 9.5, True, False, True),
        (UnavailableError("refused"), 0.0, False, False, False),
    ],
)
def test_a_link_is_cut_by_the_wait_for_its_peer_whatever_ended_that(
    error, waited_s, is_reached, is_cut, is_dialled
):
    async def scenario():
        mirror, dialled = Mirror(), []
        mirror.put(dict(mirror.member(f"broker-{name}") for name in "ab"))

        async def dial(endpoint):
            dialled.append(endpoint)
            return Input.REACHED if is_reached else Input.UNCLEAR

        rebuilder = Rebuilder(
            None,
            mirror.keyspace,
            JournalAllocation(9),
            pb.ProcessSpec.ID(zone=ZONE, suffix="broker-a"),
            PeerStreams(answer_timeout_s=10.0),
            ttl_s=20.0,
            dial=dial,
            is_silent=is_silent,
            offer=offer,
        )
        peer = pb.ProcessSpec.ID(zone=ZONE, suffix="broker-b")
        rebuilder.failed(peer, error, waited_s=waited_s)
        for _ in range(3):
            await asyncio.sleep(0.001)
        assert rebuilder._is_cut((ZONE, "broker-b")) == is_cut
        assert bool(dialled) == is_dialled
        await rebuilder.aclose()

    run(scenario())


@pytest.mark.parametrize(("late", "is_reached"), [(0, True), (1, True), (3, True), (4, False)])
def test_a_few_late_answers_are_not_the_loss_of_a_member(late, is_reached):
    async def scenario():
        mirror, dialled = Mirror(), []
        mirror.put(dict(mirror.member(f"broker-{name}") for name in "ab"))

        async def dial(endpoint):
            dialled.append(endpoint)
            return Input.UNCLEAR if len(dialled) <= late else Input.REACHED

        rebuilder = rebuilder_of(mirror, dial)
        survey = await rebuilder._survey()
        assert [each.is_reached for each in survey.candidates] == [is_reached]

    run(scenario())


@pytest.mark.parametrize("is_heard", [False, True])
def test_a_member_that_answers_while_it_is_dialled_is_reached(is_heard):
    async def scenario():
        mirror, streams = Mirror(), PeerStreams()
        mirror.put(dict(mirror.member(f"broker-{name}") for name in "ab"))

        async def dial(_):
            if is_heard:
                streams._heard_at[ZONE, "broker-b"] = asyncio.get_running_loop().time()
            return Input.UNCLEAR

        rebuilder = rebuilder_of(mirror, dial, streams=streams)
        survey = await rebuilder._survey()
        assert [each.is_reached for each in survey.candidates] == [is_heard]

    run(scenario())


def test_only_a_hand_over_and_a_departure_for_good_follow_a_replacement_at_once():
    """A primary may be cut off from the others after it replaced a replica. The allocator assigns
    the replica again that takes journals, and does not otherwise."""

    async def scenario():
        mirror = Mirror()
        mirror.put(dict([mirror.member("broker-b"), mirror.member("broker-c", limit=0)]))
        mirror.put(
            dict(mirror.assignment("a/journal", f"broker-{c}", n) for n, c in enumerate("abc"))
        )
        _, taking, leaving = mirror.keyspace.assignments("a/journal")
        rebuilder = Rebuilder(
            None,
            mirror.keyspace,
            JournalAllocation(9),
            pb.ProcessSpec.ID(zone=ZONE, suffix="broker-a"),
            PeerStreams(),
            ttl_s=5.0,
            dial=None,
            is_silent=is_silent,
            offer=offer,
        )
        other = Candidate(ZONE, "broker-d", 0.0)
        now = asyncio.get_running_loop().time()
        for changed, age_s, decision, has_to_wait in [
            (Action.REPLACE, 1.0, Decision(Action.REPLACE, taking, other), True),
            (Action.REPLACE, 1.0, Decision(Action.REPLACE, leaving, other), True),
            (Action.REPLACE, 1.0, Decision(Action.REPLACE, taking), True),
            (Action.REPLACE, 1.0, Decision(Action.REPLACE, leaving), False),
            (Action.HAND_OVER, 1.0, Decision(Action.REPLACE, leaving), False),
            (Action.REPLACE, 6.0, Decision(Action.REPLACE, taking, other), False),
            (Action.REPLACE, 1.0, Decision(Action.HAND_OVER, taking, other), False),
            (Action.HAND_OVER, 1.0, Decision(Action.HAND_OVER, taking, other), True),
            (Action.HAND_OVER, 6.0, Decision(Action.HAND_OVER, taking, other), False),
        ]:
            rebuilder._changed["a/journal"] = now - age_s, changed
            assert rebuilder._has_to_wait("a/journal", decision) == has_to_wait
        assert not rebuilder._has_to_wait("another/journal", Decision(Action.REPLACE, taking))

    run(scenario())


def test_a_replica_that_is_assigned_again_leaves_again_once_it_takes_no_journals():
    """The allocator assigned it before it announced that: the primary waited for a lease."""

    async def scenario():
        mirror, transactions = Mirror(), asyncio.Queue()
        spec = journal_spec("a/journal", replication=2)
        mirror.put(dict([mirror.item(spec), *(mirror.member(f"broker-{c}") for c in "abc")]))
        mirror.put(
            dict(mirror.assignment("a/journal", f"broker-{c}", n) for n, c in [*enumerate("ab")])
        )

        class Etcd:
            async def txn(self, compares, operations):
                assert compares
                deleted = [each.key for each in operations if isinstance(each, Delete)]
                mirror.put({e.key: e.value for e in operations if isinstance(e, Put)}, deleted)
                held = [(a.suffix, a.slot) for a in mirror.keyspace.assignments("a/journal")]
                transactions.put_nowait(sorted(held))
                return SimpleNamespace(succeeded=True)

        async def dial(endpoint):
            return Input.UNCLEAR if endpoint == cut else Input.REACHED

        async def is_silent(_):
            return False

        rebuilder = Rebuilder(
            Etcd(),
            mirror.keyspace,
            JournalAllocation(9),
            pb.ProcessSpec.ID(zone=ZONE, suffix="broker-a"),
            PeerStreams(),
            ttl_s=2.0,
            dial=dial,
            is_silent=is_silent,
            offer=offer,
        )
        cut = mirror.keyspace.endpoint(ZONE, "broker-b")
        peer = pb.ProcessSpec.ID(zone=ZONE, suffix="broker-b")
        rebuilder.failed(peer, DeadlineExceededError("no answer"), waited_s=10.0)
        replaced = [("broker-a", 0), ("broker-c", 1)]
        begun = asyncio.get_running_loop().time()
        assert await transactions.get() == replaced
        mirror.put(dict([mirror.assignment("a/journal", "broker-b", 2)]))
        mirror.put(dict([mirror.member("broker-b", limit=0)]))
        assert await transactions.get() == replaced
        assert asyncio.get_running_loop().time() - begun < 2.0
        await rebuilder.aclose()

    run(scenario())


@pytest.mark.parametrize(
    ("primaries", "unreached", "withdraws"),
    [("", "bc", True), ("", "bcd", True), ("", "c", False), ("", "d", False), ("a", "bc", False)],
)
def test_a_broker_that_leads_nothing_looks_at_the_others_once_it_lost_a_journal(
    primaries, unreached, withdraws
):
    """`broker-d` is dead. A broker that leads journals without replicas keeps them."""

    async def scenario():
        mirror, offers, dialled = Mirror(), [], []
        mirror.put(dict(mirror.member(f"broker-{name}") for name in "abcd"))
        led = [mirror.assignment("own", f"broker-{name}", 0) for name in primaries]
        lost = mirror.assignment("a/journal", "broker-a", 1)
        moved = mirror.assignment("b/journal", "broker-a", 2)
        mirror.put(dict([lost, moved, *led]))

        async def dial(endpoint):
            dialled.append(endpoint)
            return Input.UNCLEAR if endpoint in cut else Input.REACHED

        async def offer(takes_journals):
            offers.append(takes_journals)

        rebuilder = rebuilder_of(mirror, dial, offer=offer)
        cut = {mirror.keyspace.endpoint(ZONE, f"broker-{name}") for name in unreached}
        (before,) = mirror.keyspace.assignments("b/journal")
        mirror.put(dict([mirror.assignment("b/journal", "broker-a", 1)]), delete=[moved[0]])
        rebuilder.lost(before)
        assert rebuilder._doubt is None  # it is only in another slot
        (before,) = mirror.keyspace.assignments("a/journal")
        mirror.put({}, delete=[lost[0]])
        for _ in range(2):
            rebuilder.lost(before)
        for _ in range(20):
            await asyncio.sleep(0)
        assert offers == [False] * withdraws
        assert len(set(dialled)) == (0 if primaries else 3)
        await rebuilder.aclose()

    run(scenario())


def test_the_link_to_a_process_that_has_left_says_nothing_about_its_successor():
    async def scenario():
        mirror = Mirror()
        key, value = mirror.member("broker-b")
        mirror.put({key: value})

        async def dial(_):
            return Input.REACHED

        rebuilder = Rebuilder(
            None,
            mirror.keyspace,
            JournalAllocation(9),
            pb.ProcessSpec.ID(zone=ZONE, suffix="broker-a"),
            PeerStreams(answer_timeout_s=10.0),
            ttl_s=20.0,
            dial=dial,
            is_silent=is_silent,
            offer=offer,
        )
        killed = pb.ProcessSpec.ID(zone=ZONE, suffix="broker-b")
        rebuilder.failed(killed, DeadlineExceededError("no answer"), waited_s=10.0)
        assert rebuilder._is_cut((ZONE, "broker-b"))
        mirror.put({}, delete=[key])
        rebuilder.left(ZONE, "broker-b")
        rebuilder.failed(killed, UnavailableError("it has left"), waited_s=10.0)
        mirror.put({key: value})
        assert (await rebuilder._survey()).unreached == frozenset()
        await rebuilder.aclose()

    run(scenario())


def test_a_broker_that_is_cut_off_takes_no_journals_until_it_reaches_most_of_the_others():
    async def scenario():
        mirror, offers, reached = Mirror(), asyncio.Queue(), set()
        mirror.put(dict(mirror.member(f"broker-{name}") for name in "abcd"))

        async def dial(endpoint):
            return Input.REACHED if endpoint in reached else Input.UNCLEAR

        async def offer(takes_journals):
            await asyncio.sleep(0)
            offers.put_nowait(takes_journals)

        rebuilder = Rebuilder(
            None,
            mirror.keyspace,
            JournalAllocation(9),
            pb.ProcessSpec.ID(zone=ZONE, suffix="broker-a"),
            PeerStreams(),
            ttl_s=0.02,
            dial=dial,
            is_silent=is_silent,
            offer=offer,
        )
        assert await asyncio.gather(rebuilder._withdraw(), rebuilder._withdraw()) == [True, True]
        assert await offers.get() is False
        reached.add(mirror.keyspace.endpoint(ZONE, "broker-b"))
        await asyncio.sleep(0.05)
        assert offers.empty()
        reached.add(mirror.keyspace.endpoint(ZONE, "broker-c"))
        assert await offers.get() is True
        assert await rebuilder._withdraw()
        assert await offers.get() is False
        await rebuilder.aclose()
        assert await rebuilder._withdraw()
        assert offers.empty()

    run(scenario())
