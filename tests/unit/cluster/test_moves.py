"""Assignments move only where balance or a limit requires it."""

from __future__ import annotations

import copy
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.cluster.allocator import moves as module
from gazette_sdk.cluster.allocator.moves import complete, fair_share, shortfall, undo_needless_moves
from gazette_sdk.cluster.allocator.solver import FlowNetwork, PushRelabel, solve
from gazette_sdk.cluster.allocator.state import State
from support.allocation import VectorAllocation, filled, item_value, member_value

ITEMS = st.lists(st.integers(0, 4), max_size=9)
MEMBERS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 6), st.booleans()), max_size=7)
HELD = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 8)), max_size=24, unique=True)


def state_of(replications, members, placement):
    """The state of items, of ``{name: (limit, is exiting)}``, and of names by item."""
    entries = [
        *((f"/root/items/item-{n:04}", item_value(r)) for n, r in enumerate(replications)),
        *(
            (f"/root/members/{name}", member_value(limit, exiting=exiting))
            for name, (limit, exiting) in members.items()
        ),
        *(
            (f"/root/assign/item-{n:04}#{name}#{slot}", "consistent")
            for n, holders in enumerate(placement)
            for slot, name in enumerate(holders)
        ),
    ]
    return State(filled(entries or [("/root/assign/x#a#none#0", "")]), VectorAllocation())


def names_of(state, desired):
    names = [f"{member.zone}#{member.suffix}" for member in state.members]
    return [[names[member] for member in holders] for holders in desired]


def solved(replications, members, placement=()):
    state = state_of(replications, members, placement)
    return names_of(state, solve(state))


def added(before, after):
    return sum(len(set(new) - set(old)) for old, new in zip(before, after, strict=True))


def without(placement, lost):
    return [[name for name in holders if name != lost] for holders in placement]


@given(ITEMS, MEMBERS, HELD)
def test_undoing_moves_makes_nothing_worse(items, members, held):
    limits = {f"{z}#member-{n}": (limit, e) for n, (z, limit, e) in enumerate(members)}
    names = [*limits, *(f"a#gone-{n}" for n in range(9))]
    placement = [[names[m] for i, m in held if i == n] for n in range(len(items))]
    state = state_of(items, limits, placement)
    network = FlowNetwork(state, 0, len(items))
    solver = PushRelabel(network)
    solver.solve()
    desired = network.extract(solver)
    complete(state, desired)
    before = copy.deepcopy(desired)

    undo_needless_moves(state, desired)

    assert shortfall(state, desired) <= shortfall(state, before)
    assert [len(holders) for holders in desired] == [len(holders) for holders in before]
    assert all(holders == sorted(set(holders)) for holders in desired)
    assert added(state.holders, desired) <= added(state.holders, before)
    counts = [sum(member in holders for holders in desired) for member in range(len(limits))]
    assert all(count <= state.effective_limit(m) for m, count in enumerate(counts))


@pytest.mark.parametrize("seed", range(5))
def test_a_lost_member_moves_only_what_it_held(seed):
    members = {f"{zone}#broker-{n}": (1024, False) for zone in "abc" for n in range(4)}
    # Each member holds 150 items, and each item is in all three zones.
    random = Random(seed)
    zones = [[f"{zone}#broker-{n % 4}" for n in range(600)] for zone in "abc"]
    for names in zones:
        random.shuffle(names)
    placement = [list(holders) for holders in zip(*zones, strict=True)]
    replications = [3] * len(placement)
    assert solved(replications, members, placement) == placement

    lost = random.choice(sorted(members))
    del members[lost]
    left = without(placement, lost)
    desired = solved(replications, members, left)
    assert added(left, desired) == 150
    state = state_of(replications, members, desired)
    assert shortfall(state, solve(state)) == (0, 0, 0)
    assert solved(replications, members, desired) == desired


@pytest.mark.parametrize("journals", [1, 2, 3, 4, 5, 8, 13, 40, 100])
@pytest.mark.parametrize("lost", ["a#one-", "a#two-", "b#one-", "b#two-"])
def test_a_member_that_returns_gets_only_what_balance_requires(journals, lost):
    members = dict.fromkeys(("a#one-", "a#two-", "b#one-", "b#two-"), (1024, False))
    replications = [3] * journals
    placement = solved(replications, members)

    left = {name: limit for name, limit in members.items() if name != lost}
    degraded = solved(replications, left, without(placement, lost))
    assert all(holders == sorted(left) for holders in degraded)

    # Three members hold everything. Each gives up what is above its fair share of four.
    returned = solved(replications, members, degraded)
    share = fair_share(state_of(replications, members, degraded), 0)
    assert added(degraded, returned) == 3 * max(0, journals - share)
    assert all(name != lost or journals > 3 for holders in returned for name in holders)
    # A new leader, who solves afresh, moves nothing.
    assert solved(replications, members, returned) == returned


@pytest.mark.parametrize("seed", range(20))
def test_a_leader_of_another_implementation_moves_nothing_again(seed):
    # Others solve by push/relabel alone.
    random = Random(seed)
    names = [f"{'abc'[n % random.choice((2, 3))]}#broker-{n}" for n in range(random.randint(4, 8))]
    members = dict.fromkeys(names, (1024, False))
    replications = [3] * random.choice((1, 2, 4, 8, 20, 60))
    placement = solved(replications, members)
    for change in ("lost", "back"):
        if change == "lost":
            lost = random.choice(names)
            del members[lost]
            placement = without(placement, lost)
        else:
            members[lost] = (1024, False)
        placement = solved(replications, members, placement)
        state = state_of(replications, members, placement)
        network = FlowNetwork(state, 0, len(replications))
        solver = PushRelabel(network)
        solver.solve()
        assert network.extract(solver) == state.holders


def test_a_search_that_takes_too_long_leaves_the_moves(monkeypatch):
    # Item 1 could stay on the second member, if item 0 took the place on the third.
    members = {f"a#member-{n}": (1, False) for n in range(3)}
    state = state_of([1, 1, 1], members, [[], ["a#member-1"], ["a#member-0"]])
    placement = [[1], [2], [0]]
    monkeypatch.setattr(module, "PROBES_PER_REPLICA", 0)
    undo_needless_moves(state, placement)
    assert placement == [[1], [2], [0]]
    monkeypatch.undo()
    undo_needless_moves(state, placement)
    assert placement == [[2], [1], [0]]


def test_a_chain_of_new_items_makes_room():
    # Item 0 leaves member 0 for member 2. Item 1, new to member 0, is on member 2 already, so it
    # goes to member 1, and item 2, new there, to member 2.
    members = {"a#member-0": (1, False), "a#member-1": (1, False), "a#member-2": (2, False)}
    state = state_of([1, 2, 1], members, [["a#member-0"], ["a#member-2"], []])
    placement = [[2], [0, 2], [1]]
    undo_needless_moves(state, placement)
    assert placement == [[0], [1, 2], [2]]


def test_zones_are_kept_when_moves_are_undone():
    # Item 0 cannot stay on member a#two-: then item 1 would be in one zone only.
    members = dict.fromkeys(("a#one-", "a#two-", "b#one-"), (1, False))
    state = state_of([1, 2], members, [["b#one-"], ["a#one-"]])
    placement = [[1], [0, 2]]
    undo_needless_moves(state, placement)
    assert placement == [[1], [0, 2]]


def test_an_item_without_its_own_share_of_the_loss_stays_where_it_is():
    # Push/relabel alone moves item 1 to the free member and item 0 to the place of item 1.
    members = dict.fromkeys(("a#left", "a#gone", "b#left"), (2, False))
    replications = [1, 1]
    placement = [["a#gone"], ["a#left"]]
    del members["a#gone"]
    desired = solved(replications, members, without(placement, "a#gone"))
    assert desired == [["b#left"], ["a#left"]]
