from __future__ import annotations

import re

import pytest

from gazette_sdk.cluster.allocator import state as metrics
from gazette_sdk.cluster.allocator.loop import BatchedTxn
from gazette_sdk.cluster.allocator.moves import Checkpoint, ItemState, converge, remove_dead
from gazette_sdk.cluster.allocator.state import State
from gazette_sdk.cluster.etcd_messages import Compare, Delete, Put, TxnResult
from gazette_sdk.errors import EtcdError
from gazette_sdk.protocol import broker_pb2 as pb
from support.allocation import VectorAllocation, filled, item_value, member_value
from support.etcd import run
from support.vectors import group

FIXTURE = list(group("allocator", "keys")["decode_fixture"]["etcd"].items())
ITEM_STATES = {c["source"].rpartition(":")[2]: c for c in group("allocator", "item_state")}
CONVERGE = {c["source"].rpartition(":")[2]: c for c in group("allocator", "converge")}


def item_state(name):
    """The state of the one item of a vector, the state of all, and the vector."""
    vector = ITEM_STATES[name]
    member_leases = vector.get("member_leases", {})
    keys_of_current = [key for key, _ in vector["current"]]
    limits = vector.get("limits") or dict.fromkeys(vector["desired_members"], 100)
    leases = {f"/root/members/zone#{m}": int(lease, 16) for m, lease in member_leases.items()}
    leases |= {
        key: int(lease, 16)
        for key, lease in zip(keys_of_current, vector.get("leases", ()), strict=False)
    }
    keyspace = filled(
        [
            ("/root/items/item", item_value(vector["R"])),
            *((f"/root/members/zone#{m}", member_value(limit)) for m, limit in limits.items()),
            *vector["current"],
            *vector.get("other_items", ()),
            *vector.get("other_assignments", ()),
        ],
        leases=leases,
    )
    state = State(keyspace, VectorAllocation())
    desired = [state.member_index("zone", m) for m in vector["desired_members"]]
    assert state.items[0].id == "item"
    return ItemState(state, 0, desired), state, vector


def indices(assignments, vector):
    order = [key for key, _ in vector["current"]]
    return [order.index(a.key.decode()) for a in assignments]


@pytest.mark.parametrize(
    "name",
    [name for name, vector in ITEM_STATES.items() if "after_constrain_removals" in vector],
)
def test_removals_are_constrained(name):
    item, _, vector = item_state(name)
    item.constrain_removals()
    expect = vector["after_constrain_removals"]
    assert indices(item.remove, vector) == expect["remove_indices"]
    assert indices(item.keep, vector) == expect["keep_indices"]


@pytest.mark.parametrize("name", ["TestRemoveAndPromotePrimary", "TestPrimaryAlreadyExists"])
def test_a_primary_is_chosen(name):
    item, _, vector = item_state(name)
    if "remove_indices" in vector:
        assert indices(item.remove, vector) == vector["remove_indices"]
    item.constrain_order()
    assert indices(item.keep, vector) == vector["after_constrain_reorders_indices"]


def test_members_without_room_get_nothing():
    item, state, vector = item_state("TestAddMemberConstraints")
    item.constrain_additions()
    found = [[state.members[member].suffix, slot] for member, slot in item.add]
    assert found == vector["after_constrain_adds_member_slot"]


def check_built(state, vector, checkpoint):
    revisions = {entry.key.decode(): entry.mod_revision for entry in all_entries(state)}
    assert checkpoint.compares == [
        Compare.mod_revision(key.encode(), revisions[key])
        for key in vector["compare_mod_revision_of"]
    ]
    assert checkpoint.operations == [
        *(Delete(key.encode()) for key in vector.get("delete", ())),
        *(
            Put(put["key"].encode(), put["value"].encode(), int(put["lease"], 16))
            for put in vector["put"]
        ),
    ]
    assert state.total_count == vector["total_counts_after"]
    assert state.primary_count == vector["primary_counts_after"]


def all_entries(state):
    return [*state.items, *state.members, *state.assignments]


def test_additions_are_built():
    item, state, vector = item_state("TestBuildAddOps")
    check_built(state, vector, item.checkpoint())


def test_promotions_are_built():
    item, state, vector = item_state("TestBuildPromoteOps")
    item.constrain_order()
    checkpoint = Checkpoint()
    item._build_move(checkpoint, item.keep[0], 0)
    check_built(state, vector, checkpoint)


def described(checkpoints, state):
    names = {e.mod_revision: e.key.decode() for e in all_entries(state)}
    compares = [
        f"create_revision({c.key.decode()})=={c.value}"
        if c.target == "create_revision"
        else f"mod({names[c.value]})"
        for checkpoint in checkpoints
        for c in checkpoint.compares
    ]
    operations = [
        ["delete" if isinstance(o, Delete) else "put", o.key.decode()]
        for checkpoint in checkpoints
        for o in checkpoint.operations
    ]
    return compares, operations


def test_dead_assignments_are_removed_by_item():
    vector = CONVERGE["TestRemoveDeadAssignments"]
    state = State(filled(FIXTURE), VectorAllocation())
    assignments = state.assignments
    checkpoints = [
        remove_dead("/root", [a for a in assignments if a.item == item])
        for item in ("item-1", "item-missing", "item-two")
    ]
    compares, operations = described(checkpoints, state)
    by_index = [
        re.sub(r"assign\[(\d+)\]", lambda m: assignments[int(m[1])].key.decode(), text)
        for text in vector["compares_in_order"]
    ]
    assert compares == by_index
    assert [key for _, key in operations] == vector["deletes_in_order"]


def test_a_round_over_the_fixture():
    vector = CONVERGE["TestConvergeFixtureCases#1"]
    state = State(filled(FIXTURE), VectorAllocation())
    desired = [
        [state.member_index(z, s) for i, z, s in vector["desired"] if i == item.id]
        for item in state.items
    ]
    compares, operations = described(list(converge(state, desired)), state)
    assert compares == vector["compares"]
    assert operations == vector["ops"]


def test_a_settled_cluster_needs_nothing():
    state = State(
        filled(
            [
                ("/root/items/item", item_value(2)),
                ("/root/members/a#one", member_value(2)),
                ("/root/members/b#two", member_value(2)),
                ("/root/assign/item#a#one#1", ""),
                ("/root/assign/item#b#two#0", ""),
            ]
        ),
        VectorAllocation(),
    )
    assert list(converge(state, [[0, 1]])) == []


@pytest.mark.parametrize("value", ["", "consistent"])
def test_a_second_assignment_of_a_member_is_removed_at_once(value):
    entries = [
        ("/root/items/item", item_value(1)),
        ("/root/members/z#one", member_value(2)),
        ("/root/assign/item#z#one#0", value),
        ("/root/assign/item#z#one#1", value),
    ]
    state = State(filled(entries), VectorAllocation())
    (checkpoint,) = converge(state, [[0]])
    assert described([checkpoint], state)[1] == [["delete", "/root/assign/item#z#one#1"]]


def test_slots_are_packed_one_step_a_round_and_only_when_nothing_else_changes():
    def checkpoints(slots, desired):
        entries = [
            ("/root/items/item", item_value(3)),
            *((f"/root/members/z#m{n}", member_value(9)) for n in range(4)),
            *((f"/root/assign/item#z#m{n}#{slot}", "consistent") for n, slot in enumerate(slots)),
        ]
        state = State(filled(entries), VectorAllocation())
        (checkpoint,) = converge(state, [desired])
        return described([checkpoint], state)[1]

    packed = checkpoints([0, 5, 7], [0, 1, 2])
    assert packed == [
        ["delete", "/root/assign/item#z#m1#5"],
        ["put", "/root/assign/item#z#m1#1"],
    ]
    added = checkpoints([0, 5, 7], [0, 1, 2, 3])
    assert added == [["put", "/root/assign/item#z#m3#8"]]


def test_the_counters_tell_what_was_built():
    counters = (
        metrics.ASSIGNMENT_ADDED,
        metrics.ASSIGNMENT_REMOVED,
        metrics.ASSIGNMENT_PACKED,
    )
    before = [counter._value.get() for counter in counters]
    state = State(
        filled(
            [
                ("/root/items/one", item_value(1)),
                ("/root/items/two", item_value(1)),
                ("/root/items/zzz", item_value(1)),
                ("/root/members/z#m0", member_value(9)),
                ("/root/members/z#m1", member_value(9)),
                ("/root/assign/dead#z#m0#0", "consistent"),
                ("/root/assign/one#z#m0#0", "consistent"),
                ("/root/assign/one#z#m1#1", "consistent"),
                ("/root/assign/two#z#m1#3", "consistent"),
            ]
        ),
        VectorAllocation(),
    )
    operations = described(list(converge(state, [[1], [1], [0]])), state)[1]
    assert len(operations) == 1 + 3 + 2 + 1
    after = [counter._value.get() for counter in counters]
    # Removed: the dead one and one's primary; packed: two promotions; added: of zzz.
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 2, 2]
    names = {m.name for counter in counters for m in counter.collect()}
    assert names == {f"gazette_allocator_assignment_{w}" for w in ("added", "removed", "packed")}


def test_checkpoints_share_transactions_up_to_the_bound():
    vector = CONVERGE["TestTxnBatching"]
    fixed = [Compare.mod_revision(b"/leader", 1)] * vector["fixed_compares"]
    sent, outcomes = [], []

    async def commit(compares, operations):
        sent.append((len(compares), len(operations)))
        assert list(compares[: len(fixed)]) == fixed
        succeeded = outcomes.pop() if outcomes else True
        revision = 100 + len(sent)
        return TxnResult(succeeded, revision, pb.Header.Etcd(revision=revision), ())

    def expected(flushes):
        compares = flushes["compares"]
        extra = int(compares.partition("+")[2])
        return len(fixed) + extra, flushes["ops"]

    async def scenario():
        txn = BatchedTxn(commit, fixed, max_operations=vector["max_txn_ops"])
        assert txn.revision == 0
        for step in vector["steps"]:
            sent.clear()
            if (shape := step.get("checkpoint")) is not None:
                await txn.checkpoint(
                    Checkpoint(
                        [Compare.version(b"/k", 1)] * shape["compares"],
                        [Delete(b"/k")] * shape["ops"],
                    )
                )
            if step.get("then_flush_with_failed_response"):
                outcomes.append(False)
                revision = txn.revision
                with pytest.raises(EtcdError, match=step["error"]):
                    await txn.flush()
                assert txn.revision == revision
                continue
            if step.get("flush"):
                await txn.flush()
            assert sent == ([expected(step["flushes"])] if step["flushes"] else [])
            if sent:
                assert txn.revision == 101

    run(scenario())
