"""``gazette allocator simulate`` says what a real leader then does, and writes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json

from gazette_sdk.cluster.allocator.loop import run_allocator
from gazette_sdk.cluster.allocator.state import leader_of
from gazette_sdk.cluster.broker_keys import BrokerKeySpace, JournalAllocation
from gazette_sdk.cluster.etcd_messages import Delete, Put
from gazette_sdk.cluster.items import assignment_key, item_key, member_key
from gazette_sdk.protocol import broker_pb2 as pb
from support.etcd import run

ROOT = "/gazette/cluster"
BROKERS = (("a", "broker-1"), ("a", "broker-2"), ("b", "broker-3"), ("b", "broker-4"))
JOURNALS = [f"orders/part-{number:03}" for number in range(8)]


class AlwaysConsistent(JournalAllocation):
    """Journals whose replicas synchronize at once."""

    def is_consistent(self, item, assignment, assignments):
        return True


def member_put(zone, suffix):
    spec = pb.BrokerSpec(journal_limit=100)
    spec.process_spec.id.zone, spec.process_spec.id.suffix = zone, suffix
    spec.process_spec.endpoint = "http://localhost:8080"
    return Put(member_key(ROOT, zone, suffix), spec.SerializeToString())


def journal_put(name, replication=3):
    spec = pb.JournalSpec(name=name, replication=replication)
    spec.fragment.length, spec.fragment.compression_codec = 65536, pb.NONE
    spec.fragment.refresh_interval.FromSeconds(60)
    return Put(item_key(ROOT, name), spec.SerializeToString())


async def lead(etcd, *operations):
    """Change Etcd, run the leader until a round writes nothing, and return the brokers by journal.

    The brokers of a journal are in order of their slots.
    """
    async with etcd.client() as client:
        await client.txn([], operations)
        keyspace = BrokerKeySpace(ROOT)
        await keyspace.load(client)
        idle = asyncio.Event()

        async def on_round(_number, is_idle):
            if is_idle:
                idle.set()

        leader = leader_of(keyspace.members())
        allocation = AlwaysConsistent()
        tasks = [
            asyncio.create_task(
                run_allocator(
                    client, keyspace, leader.zone, leader.suffix, allocation, on_round=on_round
                )
            ),
            asyncio.create_task(keyspace.watch(client, delay_s=0)),
            asyncio.create_task(idle.wait()),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            assert idle.is_set()
        finally:
            for task in tasks:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        return {
            item.id: [
                f"{a.zone}/{a.suffix}"
                for a in sorted(keyspace.assignments(item.id), key=lambda a: a.slot)
            ]
            for item in keyspace.items()
        }


async def revision_of(etcd):
    async with etcd.client() as client:
        return (await client.range(b"\x00")).header.revision


def simulated(gazette, etcd, held, *arguments):
    """Return the brokers of each journal as the tool predicts them, and its report."""
    before = run(revision_of(etcd))
    outcome = gazette.ok(
        "allocator", "simulate", "--etcd.address", etcd.address, "--format=json", *arguments
    )
    assert run(revision_of(etcd)) == before, "a dry run writes nothing"
    report = json.loads(outcome.text)
    changed = {each["name"]: each["after"] for each in report["journals"]}
    return {**held, **changed}, report


def lost(held, zone, suffix):
    """Return what Etcd deletes with the lease of a broker."""
    return [
        Delete(member_key(ROOT, zone, suffix)),
        *(
            Delete(assignment_key(ROOT, journal, zone, suffix, brokers.index(name)))
            for name in [f"{zone}/{suffix}"]
            for journal, brokers in held.items()
            if name in brokers
        ),
    ]


def moved(before, after):
    return sum(len(set(after[name]) - set(before.get(name, ()))) for name in after)


def test_a_leader_does_what_the_simulation_says(gazette, etcd):
    puts = [*(member_put(*each) for each in BROKERS), *map(journal_put, JOURNALS)]
    held = run(lead(etcd, *puts))
    assert all(len(brokers) == 3 for brokers in held.values())
    assert simulated(gazette, etcd, held)[0] == held

    # A broker is lost: what it held moves.
    told, report = simulated(gazette, etcd, held, "--remove=b/broker-3")
    degraded = run(lead(etcd, *lost(held, "b", "broker-3")))
    assert degraded == told
    assert moved(held, degraded) == report["moves"] == report["moves_min"] == 6

    # It comes back. Only what others hold above their fair share of 6 journals moves to it.
    told, report = simulated(gazette, etcd, degraded, "--add=b/broker-3:100")
    back = run(lead(etcd, member_put("b", "broker-3")))
    assert back == told
    assert moved(degraded, back) == report["moves"] == report["moves_min"] == 6

    # The specs change.
    told, _ = simulated(
        gazette, etcd, back, "--replication=orders/part-003=4", "--replication=orders/part-004=1"
    )
    changes = (journal_put("orders/part-003", 4), journal_put("orders/part-004", 1))
    assert run(lead(etcd, *changes)) == told


def test_three_journals_stay_where_they_are_when_a_broker_returns(gazette, etcd):
    puts = [*(member_put(*each) for each in BROKERS), *map(journal_put, JOURNALS[:3])]
    held = run(lead(etcd, *puts))
    degraded = run(lead(etcd, *lost(held, "a", "broker-2")))
    assert run(lead(etcd, member_put("a", "broker-2"))) == degraded


def test_an_etcd_without_a_cluster_is_told(gazette, etcd):
    outcome = gazette("allocator", "simulate", "--etcd.address", etcd.address)
    assert outcome.status == 1
    assert "there is no cluster below /gazette/cluster in the Etcd at" in outcome.stderr
    assert outcome.stderr.count("\n") == 1


def test_a_described_live_cluster_gives_the_same_result(gazette, etcd):
    held = run(lead(etcd, *map(journal_put, JOURNALS), *(member_put(*each) for each in BROKERS)))
    live, _ = simulated(gazette, etcd, held, "--remove-zone=a", "--save=live.yaml")
    outcome = gazette.ok(
        "allocator", "simulate", "--cluster=live.yaml", "--remove-zone=a", "--format=json"
    )
    changed = {each["name"]: each["after"] for each in json.loads(outcome.text)["journals"]}
    assert {**held, **changed} == live
