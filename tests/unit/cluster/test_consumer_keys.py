from __future__ import annotations

import pytest

from gazette_sdk.cluster.consumer_keys import ConsumerKeySpace, ShardAllocation
from gazette_sdk.cluster.etcd_messages import KeyValue, WatchBatch, WatchEvent
from gazette_sdk.cluster.items import (
    AssignmentEntry,
    ItemEntry,
    assignment_key,
    item_assignments_prefix,
    item_key,
    member_key,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.rules import complete
from support.vectors import golden, group

ROOT = "/gazette/consumers/my-app"
SHARD = cpb.ShardSpec(id="shard-id", max_txn_duration={"seconds": 1})
CONSUMER = cpb.ConsumerSpec(
    process_spec={"id": {"zone": "zone", "suffix": "suffix"}, "endpoint": "http://host:8080"},
    shard_limit=5,
)


def keyspace_of(*values):
    keyspace = ConsumerKeySpace(ROOT)
    for revision, (key, raw) in enumerate(values, 1):
        kv = KeyValue(key.encode(), raw, revision, revision, 1, 0)
        keyspace.apply([WatchBatch(pb.Header.Etcd(revision=revision), (WatchEvent(False, kv),))])
    return keyspace


def assignment(slot, code, suffix="name"):
    errors = ["why"] if code == cpb.ReplicaStatus.FAILED else []
    status = cpb.ReplicaStatus(code=code, errors=errors)
    key = assignment_key(ROOT, "shard-id", "zone", suffix, slot)
    return AssignmentEntry(key, status, 1, 1, 1, 0, b"", "shard-id", "zone", suffix, slot)


def test_keys_follow_the_vectors():
    vector = group("message", "etcd_keys")
    root = vector["root"]
    assert member_key(root, "zone", "suffix").decode() == vector["member"]
    assert item_key(root, "shard-id").decode() == vector["item"]
    made = assignment_key(root, "shard-id", "zone", "suffix", 0)
    assert made.decode() == vector["assignment"]
    prefix = item_assignments_prefix(root, "shard-id")
    assert prefix.decode() == vector["assignment_prefix"]


def test_the_mirror_decodes_its_values():
    vector = group("message", "etcd_keys")
    keyspace = keyspace_of(
        (vector["item"], SHARD.SerializeToString()),
        (vector["member"], CONSUMER.SerializeToString()),
        (vector["assignment"], b""),
    )
    assert keyspace.item("shard-id").value == SHARD
    assert keyspace.member("zone", "suffix").value == CONSUMER
    (held,) = keyspace.assignments("shard-id")
    assert held.value.code == cpb.ReplicaStatus.IDLE
    assert keyspace.shard_route("shard-id") == pb.Route(
        members=[{"zone": "zone", "suffix": "suffix"}], primary=0, endpoints=["http://host:8080"]
    )
    assert keyspace.shard_route("other").primary == -1


@pytest.mark.parametrize(
    ("key", "raw"),
    [
        ("items/other-id", SHARD.SerializeToString()),
        ("items/shard-id", b"\xff"),
        ("items/shard-id", cpb.ShardSpec(id="shard-id").SerializeToString()),
        ("members/zone#another", CONSUMER.SerializeToString()),
        ("assign/shard-id#zone#suffix#0", cpb.ReplicaStatus(code=400).SerializeToString()),
    ],
)
def test_bad_values_are_ignored(key, raw):
    keyspace = keyspace_of((f"{ROOT}/{key}", raw))
    assert keyspace.entries == []
    assert keyspace.revision == 1


@pytest.mark.parametrize("case", group("message", "shard_consistency")["cases"])
def test_consistency_follows_the_vectors(case):
    item = ItemEntry(b"key", SHARD, 1, 1, 1, 0, b"", "shard-id")
    primary = assignment(0, case["primary"], "aaaa")
    replica = assignment(1, case["replica"], "bbbb")
    found = ShardAllocation().is_consistent(item, replica, [primary, replica])
    assert found is case["expect"]


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (100, 0), (200, 1), (300, 1), (400, 1)])
def test_consistency_of_a_primary_alone(code, expected):
    item = ItemEntry(b"key", SHARD, 1, 1, 1, 0, b"", "shard-id")
    primary = assignment(0, code)
    assert ShardAllocation().is_consistent(item, primary, [primary]) is bool(expected)


def test_the_allocator_rules():
    allocation = ShardAllocation(max_hot_standbys=1)
    assert allocation.desired_replication(SHARD) == 1
    assert allocation.desired_replication(cpb.ShardSpec(hot_standbys=5)) == 2
    assert allocation.desired_replication(cpb.ShardSpec(hot_standbys=5, disable=True)) == 0
    assert allocation.item_limit(CONSUMER) == 5
    assert not allocation.is_exiting(CONSUMER)
    assert allocation.is_exiting(cpb.ConsumerSpec(exiting=True))


def test_recorded_keys_of_real_processes_decode():
    events = golden("consumer/etcd/lifecycle.json")["events"]
    ours = [event for event in events if event.get("key", "").startswith("/gold/json4/")]
    puts = [event for event in ours if event["type"] == "PUT"]
    assert {event["key"].split("/")[3] for event in puts} == {"members", "items", "assign"}
    for event in puts:
        keyspace = ConsumerKeySpace("/gold/json4")
        kv = KeyValue(event["key"].encode(), bytes.fromhex(event["value_hex"]), 1, 1, 1, 0)
        keyspace.apply([WatchBatch(pb.Header.Etcd(revision=1), (WatchEvent(False, kv),))])
        (entry,) = keyspace.entries
        # What we write for the same value is the same, byte for byte.
        assert complete(entry.value).SerializeToString() == kv.value
