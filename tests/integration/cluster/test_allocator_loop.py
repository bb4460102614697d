"""Events of a cluster's life with real Etcd, members each with a mirror and a loop of their own."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import pytest

from gazette_sdk.cluster.allocator import loop as module
from gazette_sdk.cluster.allocator import state as metrics
from gazette_sdk.cluster.allocator.loop import run_allocator
from gazette_sdk.cluster.etcd_messages import Compare, Delete, Put
from gazette_sdk.cluster.items import assignment_key, item_key, member_key
from gazette_sdk.errors import EtcdUnavailableError, LeaseLostError
from support.allocation import VectorAllocation, item_value, member_value, vector_keyspace
from support.etcd import run, within
from support.spools import until as poll

ROOT = "/root"


class Member:
    """A member that runs the allocation loop, and marks what it holds as consistent."""

    def __init__(self, client, zone, suffix, limit=100):
        self.client, self.zone, self.suffix, self.limit = client, zone, suffix, limit
        self.key = member_key(ROOT, zone, suffix)
        self.keyspace = vector_keyspace(ROOT)
        self.rounds = []
        self.lease = 0
        self.allocator = None
        self._tasks = []

    async def start(self, *, marks=True):
        self.lease = await self.client.grant(600)
        revision = await self.client.put(self.key, member_value(self.limit), lease=self.lease)
        await self.keyspace.load(self.client, revision)
        self.allocator = asyncio.create_task(
            run_allocator(
                self.client,
                self.keyspace,
                self.zone,
                self.suffix,
                VectorAllocation(),
                on_round=self._on_round,
            )
        )
        self._tasks = [
            self.allocator,
            asyncio.create_task(self.keyspace.watch(self.client, delay_s=0)),
        ]
        if marks:
            self._tasks.append(asyncio.create_task(self._mark()))
        return self

    async def _on_round(self, number, is_idle):
        self.rounds.append((number, is_idle))

    async def _mark(self):
        while True:
            for assignment in self.keyspace.local_assignments(self.zone, self.suffix):
                if not assignment.value:
                    await self.client.txn(
                        [Compare.mod_revision(assignment.key, assignment.mod_revision)],
                        [Put(assignment.key, b"consistent", ignore_lease=True)],
                    )
            await self.keyspace.wait_for_update()

    async def set_exiting(self):
        value = member_value(self.limit, exiting=True)
        result = await self.client.txn([], [Put(self.key, value, ignore_lease=True)])
        await self.keyspace.wait_for_revision(result.revision)

    async def leave(self):
        """What a process does when its loop returned, and Etcd when the process died."""
        await self.stop()
        await self.client.revoke(self.lease)

    async def stop(self):
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError, LeaseLostError):
                await task


@contextlib.asynccontextmanager
async def cluster(client, *names):
    members = [await Member(client, *name.split("/")).start() for name in names]
    try:
        yield members
    finally:
        for member in members:
            await member.stop()


async def apply(client, **items):
    """Write items; a replication of ``None`` deletes."""
    operations = [
        Delete(item_key(ROOT, item)) if r is None else Put(item_key(ROOT, item), item_value(r))
        for item, r in items.items()
    ]
    await client.txn([], operations)


async def until(member, condition):
    """Wait for a state of a member's mirror."""
    async with asyncio.timeout(10):
        while not condition():
            await member.keyspace.wait_for_update()


async def settled(member, **expected):
    """Wait until each item has just so many consistent assignments, in slots 0 and up.

    Returns, of each item, the names of its members by slot.
    """
    keyspace = member.keyspace

    def view():
        found = {}
        for a in keyspace.all_assignments():
            found.setdefault(a.item, []).append(a)
        return found

    def is_settled(found):
        return all(
            sorted(a.slot for a in found.get(item, [])) == list(range(count))
            and all(a.value for a in found.get(item, []))
            for item, count in expected.items()
        ) and not set(found) - set(expected)

    await until(member, lambda: is_settled(view()))
    return {
        item: [a.suffix for a in sorted(assignments, key=lambda a: a.slot)]
        for item, assignments in view().items()
    }


def test_one_member_takes_what_comes_and_lets_go_of_what_goes(etcd):
    async def scenario():
        async with etcd.client() as client, cluster(client, "a/lone") as (lone,):
            await apply(client, one=1, two=3)
            # Of three replicas a lone member can hold but one.
            assert await settled(lone, one=1, two=1) == {"one": ["lone"], "two": ["lone"]}
            assert metrics.ITEMS._value.get() == 2
            assert metrics.MEMBERS._value.get() == 1
            assert metrics.DESIRED_REPLICATION_SLOTS._value.get() == 4
            leases = {a.lease for a in lone.keyspace.all_assignments()}
            assert leases == {lone.lease}
            await apply(client, one=None)
            await settled(lone, two=1)
            await apply(client, two=0)
            await settled(lone, two=0)

    run(scenario())


def test_a_lost_assignment_comes_back_without_solving_again(etcd, monkeypatch):
    solved = []

    def counting(state):
        solved.append(state.revision)
        return solve(state)

    solve = module.solve
    monkeypatch.setattr(module, "solve", counting)

    async def scenario():
        async with etcd.client() as client, cluster(client, "a/lone") as (lone,):
            await apply(client, one=1)
            await settled(lone, one=1)
            before = list(solved)
            (assignment,) = lone.keyspace.assignments("one")
            await client.delete(assignment.key)
            await lone.keyspace.wait_for_revision(assignment.mod_revision + 1)
            await settled(lone, one=1)
            assert solved == before

    run(scenario())


def test_a_replica_that_its_primary_replaced_stays_replaced(etcd):
    async def scenario():
        names = ("a/one1", "a/two2", "a/three")
        async with etcd.client() as client, cluster(client, *names) as (one, two, three):
            await apply(client, item=2)
            before = (await settled(one, item=2))["item"]
            members = {member.suffix: member for member in (one, two, three)}
            (spare,) = set(members) - set(before)
            gone = next(a for a in one.keyspace.assignments("item") if a.slot == 1)
            key = assignment_key(ROOT, "item", "a", spare, 1)
            change = [Delete(gone.key), Put(key, b"", members[spare].lease)]
            revision = (await client.txn([], change)).revision
            await one.keyspace.wait_for_revision(revision)
            assert (await settled(one, item=2))["item"] == [before[0], spare]
            await apply(client, item=2, other=1)  # also where something else is solved
            assert (await settled(one, item=2, other=1))["item"] == [before[0], spare]

    run(scenario())


def test_a_bad_item_does_no_harm_and_a_good_value_mends_it(etcd):
    async def scenario():
        async with etcd.client() as client, cluster(client, "a/lone") as (lone,):
            key = item_key(ROOT, "one")
            await client.put(key, b"not JSON")
            await apply(client, two=1)
            await settled(lone, two=1)
            await client.put(key, item_value(1))
            await settled(lone, one=1, two=1)

    run(scenario())


def test_an_exiting_lone_member_stays_while_there_are_items_and_leaves_when_they_go(etcd):
    async def scenario():
        async with etcd.client() as client, cluster(client, "a/lone") as (lone,):
            await apply(client, one=1)
            await settled(lone, one=1)
            await lone.set_exiting()
            await settled(lone, one=1)
            assert not lone.allocator.done()
            # It still leads.
            await apply(client, two=1)
            await settled(lone, one=1, two=1)
            await apply(client, one=None, two=None)
            assert await within(lone.allocator) is None

    run(scenario())


def test_an_exiting_member_without_items_leaves_at_once(etcd):
    async def scenario():
        async with etcd.client() as client, cluster(client, "a/lone") as (lone,):
            await lone.set_exiting()
            assert await within(lone.allocator) is None

    run(scenario())


def test_a_member_whose_key_vanished_ends_with_an_error(etcd):
    async def scenario():
        async with etcd.client() as client, cluster(client, "a/lone") as (lone,):
            await client.revoke(lone.lease)
            with pytest.raises(LeaseLostError, match="member key not found in Etcd"):
                await within(lone.allocator)

    run(scenario())


def test_a_crashed_leader_is_followed_by_the_next_and_its_items_move(etcd):
    async def scenario():
        names = ("a/first", "a/second", "b/third")
        async with etcd.client() as client, cluster(client, *names) as members:
            first, second, third = members
            await apply(client, one=2, two=2, three=1)
            await settled(third, one=2, two=2, three=1)
            assert first.rounds
            assert not second.rounds
            await first.leave()
            await until(third, lambda: third.keyspace.member("a", "first") is None)
            held = await settled(third, one=2, two=2, three=1)
            assert all("first" not in holders for holders in held.values())
            assert second.rounds
            assert not third.rounds

    run(scenario())


def test_an_exiting_leader_hands_over_before_it_leaves(etcd):
    async def scenario():
        async with etcd.client() as client, cluster(client, "a/first", "b/second") as members:
            first, second = members
            await apply(client, **{f"item-{n}": 1 for n in range(6)})
            await settled(second, **{f"item-{n}": 1 for n in range(6)})
            await first.set_exiting()
            assert await within(first.allocator) is None
            await until(second, lambda: not second.keyspace.local_assignments("a", "first"))
            held = await settled(second, **{f"item-{n}": 1 for n in range(6)})
            assert set(map(tuple, held.values())) == {("second",)}

    run(scenario())


def test_many_items_are_placed_in_batches_and_a_lost_race_recovers(etcd, monkeypatch, caplog):
    async def scenario():
        async with etcd.client() as client, etcd.client() as other:
            count = 300
            for first in range(0, count, 100):
                await apply(client, **{f"item-{n:03}": 1 for n in range(first, first + 100)})
            lone = Member(client, "a", "lone", limit=count + 1)
            txn, sizes, all_answered = client.txn, {True: [], False: []}, asyncio.Event()

            async def racing_txn(compares, operations, *rest):
                if compares and len(sizes[True]) == 1 and not sizes[False]:
                    # The leader's own key changes within the round: the rest must not land.
                    limit = member_value(count)
                    await other.txn([], [Put(lone.key, limit, ignore_lease=True)])
                result = await txn(compares, operations, *rest)
                if compares:
                    sizes[result.succeeded].append(len(operations))
                if sum(sizes[True]) == count:
                    all_answered.set()
                return result

            monkeypatch.setattr(client, "txn", racing_txn)
            await lone.start(marks=False)
            await until(lone, lambda: len(lone.keyspace.all_assignments()) == count)
            # The watch may show the last batch before its transaction is answered.
            await asyncio.wait_for(all_answered.wait(), 10)
            # 127 comparisons of members and that of the leader. The second did not succeed, and
            # may fail again until the mirror has the leader's change, too.
            assert sizes[True] == [127, 127, 46]
            assert set(sizes[False]) == {127}
            assert {a.slot for a in lone.keyspace.all_assignments()} == {0}
            await lone.stop()

    with caplog.at_level(logging.WARNING):
        run(scenario())
    assert "transaction checks did not succeed" in caplog.text


def test_what_has_no_place_is_told(etcd, caplog, monkeypatch):
    monkeypatch.setattr("gazette_sdk.cluster.allocator.loop.SHORTAGE_WARNING_S", 0.0)

    async def scenario():
        async with etcd.client() as client, cluster(client, "a/lone") as (lone,):
            await apply(client, one=3)
            await settled(lone, one=1)

    with caplog.at_level(logging.INFO):
        run(scenario())
    assert "2 of 3 replicas have no place: add members" in caplog.text
    assert "solved for assignments of /root" in caplog.text


def levels_of(caplog):
    """Return the level of each record about a shortage, and its first number."""
    return [
        (record.levelname, record.args[0])
        for record in caplog.records
        if "have no place" in record.getMessage()
    ]


def test_a_shortage_is_told_again_only_if_it_is_worse_or_comes_back(etcd, caplog, monkeypatch):
    monkeypatch.setattr(module, "SHORTAGE_WARNING_S", 0.0)

    async def scenario():
        async with etcd.client() as client, cluster(client, "a/lone") as (lone,):
            await apply(client, one=3)
            await poll(lambda: len(levels_of(caplog)) == 1)
            await apply(client, two=1)
            await settled(lone, one=1, two=1)
            await apply(client, two=2)
            await poll(lambda: len(levels_of(caplog)) == 2)
            await apply(client, one=1, two=1)
            await poll(lambda: "2 items in 2 slots" in caplog.text)
            await apply(client, one=2)
            await poll(lambda: len(levels_of(caplog)) == 3)

    with caplog.at_level(logging.INFO):
        run(scenario())
    assert levels_of(caplog) == [("WARNING", 2), ("WARNING", 3), ("WARNING", 1)]


def test_standbys_without_a_place_are_no_reason_for_a_warning(etcd, caplog, monkeypatch):
    monkeypatch.setattr(module, "SHORTAGE_WARNING_S", 0.0)
    monkeypatch.setattr(VectorAllocation, "needs_all_replicas", False)

    async def scenario():
        async with etcd.client() as client:
            lone = await Member(client, "a", "lone", limit=2).start()
            await apply(client, one=2)
            await poll(lambda: len(levels_of(caplog)) == 1)
            await apply(client, two=2)
            await settled(lone, one=1, two=1)
            assert levels_of(caplog) == [("INFO", 1)]
            await apply(client, three=1)  # which the member has no room for
            await poll(lambda: len(levels_of(caplog)) == 2)
            await lone.stop()

    with caplog.at_level(logging.INFO):
        run(scenario())
    assert levels_of(caplog) == [("INFO", 1), ("WARNING", 3)]


def test_a_shortage_that_ends_soon_is_not_told(etcd, caplog):
    async def scenario():
        async with etcd.client() as client, cluster(client, "a/lone") as (lone,):
            await apply(client, one=3)
            await settled(lone, one=1)
            await apply(client, one=1)
            await settled(lone, one=1)

    with caplog.at_level(logging.WARNING):
        run(scenario())
    assert "have no place" not in caplog.text


def test_a_round_that_failed_is_tried_again_though_nothing_changes(etcd, monkeypatch):
    monkeypatch.setattr(module, "RETRY_S", 0.05)

    async def scenario():
        async with etcd.client() as client, etcd.client() as writer:
            failures = 2
            txn = client.txn

            async def failing_txn(compares, *args):
                nonlocal failures
                if failures and compares:
                    failures -= 1
                    raise EtcdUnavailableError("Etcd is away for a moment")
                return await txn(compares, *args)

            monkeypatch.setattr(client, "txn", failing_txn)
            await apply(writer, one=1)
            lone = await Member(client, "a", "lone").start(marks=False)
            await until(lone, lone.keyspace.all_assignments)
            assert failures == 0
            await lone.stop()

    run(scenario())
