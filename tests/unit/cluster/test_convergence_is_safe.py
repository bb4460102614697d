"""Rounds on random clusters, whose replicas synchronise at random: what must hold in each step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.cluster.allocator.moves import converge
from gazette_sdk.cluster.allocator.solver import solve
from gazette_sdk.cluster.allocator.state import State
from gazette_sdk.cluster.etcd_messages import Delete, Put
from support.allocation import VectorAllocation, filled, item_value, member_value

ITEMS = st.lists(st.integers(0, 3), max_size=6)
MEMBERS = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 12), st.booleans()), min_size=1, max_size=5
)
HELD = st.lists(
    st.tuples(
        st.integers(0, 6), st.integers(0, 5), st.integers(0, 9), st.sampled_from(["", "consistent"])
    ),
    max_size=15,
    unique_by=lambda held: held[:2],
)


def name_of(members, number):
    return f"{members[number][0]}#member-{number}" if number < len(members) else "a#gone"


def state_of(keys):
    return State(filled(keys.items()), VectorAllocation())


def apply(keys, checkpoint):
    for operation in checkpoint.operations:
        key = operation.key.decode()
        match operation:
            case Delete():
                assert key in keys
                del keys[key]
            case Put(value=value):
                assert key not in keys
                keys[key] = value.decode()


def consistent_counts(state):
    return {
        item.id: sum(a.value for a in assignments)
        for item, assignments in zip(state.items, state.item_assignments, strict=True)
    }


def check_step(before, after):
    """Of one round, however its transactions fell."""
    had, has = consistent_counts(before), consistent_counts(after)
    for item, wanted in zip(after.items, after.replication, strict=True):
        # Replicas in sync only go while as many as the item wants remain.
        assert has[item.id] >= min(had[item.id], wanted)
    for member, count in enumerate(after.total_count):
        assert count <= max(before.total_count[member], after.effective_limit(member))


@given(ITEMS, MEMBERS, HELD, st.randoms(use_true_random=False))
def test_rounds_are_safe_and_come_to_an_end(items, members, held, random):
    keys = {f"/root/items/item-{n}": item_value(r).decode() for n, r in enumerate(items)}
    for number, (_, limit, exiting) in enumerate(members):
        name = name_of(members, number)
        keys[f"/root/members/{name}"] = member_value(limit, exiting=exiting).decode()
    taken = set()
    for item, member, slot, value in held:
        if (item, name_of(members, member)) not in taken:
            taken.add((item, name_of(members, member)))
            keys[f"/root/assign/item-{item}#{name_of(members, member)}#{slot}"] = value

    desired = solve(state_of(keys))
    for _ in range(100):
        before = state_of(keys)
        checkpoints = list(converge(state_of(keys), desired))
        for checkpoint in checkpoints:
            assert checkpoint.operations
            apply(keys, checkpoint)
        check_step(before, state_of(keys))
        # Replicas synchronise when they do.
        unsynced = [k for k, v in keys.items() if k.startswith("/root/assign/") and not v]
        if not checkpoints and not unsynced:
            break
        for key in unsynced:
            if not checkpoints or random.random() < 0.5:
                keys[key] = "consistent"
    else:
        raise AssertionError("no end after 100 rounds")

    state = state_of(keys)
    assert not state.dead_assignments
    for assignments, wanted, holders in zip(
        state.item_assignments, state.replication, desired, strict=True
    ):
        assert sorted(a.slot for a in assignments) == list(range(len(assignments)))
        has_room = all(state.effective_limit(m) > len(items) for m in holders)
        if len(holders) == wanted and has_room:
            found = {state.member_index(a.zone, a.suffix) for a in assignments}
            assert found == set(holders)
