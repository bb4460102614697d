from __future__ import annotations

from itertools import pairwise

import pytest

from gazette_sdk.cluster.broker_keys import (
    BrokerKeySpace,
    JournalAllocation,
    implied_route,
    is_consistent,
    route_value,
)
from gazette_sdk.cluster.etcd_messages import KeyValue, WatchBatch, WatchEvent
from gazette_sdk.cluster.items import (
    AssignmentEntry,
    ItemEntry,
    MemberEntry,
    assignment_key,
    item_key,
    member_key,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.journal_spec import DEFAULT_MAX_REPLICATION
from support.vectors import cases, golden, group, label_set, route

ROOT = "/gazette/cluster"


def keyspace_of(*values, root=ROOT):
    keyspace = BrokerKeySpace(root)
    for revision, (key, raw) in enumerate(values, 1):
        apply(keyspace, KeyValue(key, raw, revision, revision, 1, 0))
    return keyspace


def apply(keyspace, kv, *, is_delete=False):
    header = pb.Header.Etcd(revision=kv.mod_revision)
    keyspace.apply([WatchBatch(header, (WatchEvent(is_delete, kv),))])


def assignment(zone, suffix, slot, value, item="a/journal"):
    key = assignment_key(ROOT, item, zone, suffix, slot)
    return AssignmentEntry(key, value, 1, 1, 1, 0, b"", item, zone, suffix, slot)


JOURNAL = pb.JournalSpec(
    name="a/journal", replication=1, fragment={"length": 1 << 20, "compression_codec": pb.SNAPPY}
)
JOURNAL.fragment.stores.append("file:///")
JOURNAL.fragment.refresh_interval.seconds = 60
BROKER = pb.BrokerSpec(
    process_spec={"id": {"zone": "zone", "suffix": "broker"}, "endpoint": "http://host:8080"},
    journal_limit=5,
)


@pytest.mark.parametrize("case", cases("broker", "etcd_keys"))
def test_keys(case):
    match case["kind"]:
        case "member":
            assert member_key("/root", case["zone"], case["suffix"]) == case["key"].encode()
        case "item":
            assert item_key("/root", "item-1") == case["key"].encode()
        case "assignment":
            built = assignment_key(
                "/root", "a/journal/part-000", case["zone"], case["suffix"], case["slot"]
            )
            assert built == case["key"].encode()
        case "ignored":
            keyspace = keyspace_of(
                *((key.encode(), JOURNAL.SerializeToString()) for key in case["keys"]),
                root="/root",
            )
            assert keyspace.entries == []
            assert keyspace.revision == len(case["keys"])
        case "ascending":
            assert all(a.encode() < b.encode() for a, b in pairwise(case["keys"]))
        case "refused":
            for part in case["parts"]:
                with pytest.raises(ValueError, match="can not be a part"):
                    item_key("/root", part)
        case other:
            raise AssertionError(other)


@pytest.mark.parametrize("case", cases("broker", "journal_consistent"))
def test_consistency_of_journals(case):
    assignments = [
        assignment(a["zone"], a["suffix"], a["slot"], route(a["value"]))
        for a in case["assignments"]
    ]
    assert is_consistent(assignments) == case["expect"]
    allocation = JournalAllocation()
    for a in assignments:
        assert allocation.is_consistent(None, a, assignments) == case["expect"]


@pytest.mark.parametrize("case", group("allocator", "journal_route_init")["cases"])
def test_the_route_of_assignments(case):
    implied = implied_route([assignment(*a, pb.Route()) for a in case["assignments"]])
    assert [f"{m.zone}/{m.suffix}" for m in implied.members] == case["members"]
    assert implied.primary == case["primary"]


def test_a_pack_keeps_a_journal_consistent_and_a_promotion_does_not():
    members = [("a", "member-1"), ("b", "member-2"), ("b", "member-3")]

    def at(slots):
        return [assignment(*m, slot, None) for m, slot in zip(members, slots, strict=True)]

    value = implied_route(at([1, 0, 3]))

    def with_value(slots):
        return [assignment(a.zone, a.suffix, a.slot, value) for a in at(slots)]

    assert is_consistent(with_value([1, 0, 3]))
    assert is_consistent(with_value([1, 0, 2]))
    assert not is_consistent(with_value([0, 4, 2]))
    assert not is_consistent(with_value([1, 4, 2]))


@pytest.mark.parametrize("case", cases("broker", "desired_replication"))
def test_desired_replication(case):
    maximum = case["max_replication"]
    allocation = JournalAllocation(DEFAULT_MAX_REPLICATION if maximum is None else maximum)
    spec = pb.JournalSpec(replication=case["replication"])
    spec.suspend.level = pb.JournalSpec.Suspend.Level.Value(case["suspend_level"])
    assert allocation.desired_replication(spec) == case["expect"]


def test_members_offer_their_limit_until_they_are_exiting():
    allocation = JournalAllocation()
    assert allocation.item_limit(BROKER) == 5
    assert not allocation.is_exiting(BROKER)
    assert allocation.is_exiting(pb.BrokerSpec(exiting=True))


def test_an_empty_assignment_has_no_primary():
    key = assignment_key(ROOT, "a/journal", "zone", "broker", 0)
    keyspace = keyspace_of((key, b""))
    assert keyspace.assignments("a/journal")[0].value == pb.Route(primary=-1)
    assert route_value(pb.Route(primary=-1)) == bytes.fromhex("10ffffffffffffffffff01")


def test_the_written_route_has_no_endpoints():
    value = pb.Route(members=[{"zone": "zone", "suffix": "broker"}], endpoints=["http://host"])
    assert pb.Route.FromString(route_value(value)) == pb.Route(members=value.members)


def recorded_entries():
    for name in ("broker/etcd_one_broker.json", "broker/etcd_three_brokers.json"):
        for moment, entries in golden(name).items():
            if isinstance(entries, list):
                listed = [e for e in entries if isinstance(e, dict) and "value_hex" in e]
                for number, entry in enumerate(listed):
                    yield pytest.param(entry, id=f"{name[7:-5]}-{moment}-{number}"[:80])


@pytest.mark.parametrize("recorded", list(recorded_entries()))
def test_recorded_values_decode_to_what_they_say_and_encode_to_the_same_bytes(recorded):
    raw = bytes.fromhex(recorded["value_hex"])
    keyspace = keyspace_of((recorded["key"].encode(), raw))
    decoded = recorded["decoded"]
    if not any(kind in decoded for kind in ("JournalSpec", "BrokerSpec", "Route", "empty")):
        assert keyspace.entries == []
        return
    (entry,) = keyspace.entries
    match entry:
        case ItemEntry(id=name):
            assert name == decoded["JournalSpec"]["name"]
            expected = decoded["JournalSpec"]["labels"].get("labels", [])
            assert entry.value.labels == label_set(expected)
        case MemberEntry(zone=zone, suffix=suffix):
            process = decoded["BrokerSpec"]["process_spec"]
            assert process["id"] == {"zone": zone, "suffix": suffix}
            assert keyspace.endpoint(zone, suffix) == process["endpoint"]
            assert entry.value.journal_limit == decoded["BrokerSpec"]["journal_limit"]
        case AssignmentEntry() if "empty" in decoded:
            assert entry.value == pb.Route(primary=-1)
            return
        case AssignmentEntry():
            assert entry.value == route(decoded["Route"])
            assert route_value(entry.value) == raw
    assert entry.value.SerializeToString() == raw


def test_the_recorded_cluster_of_three_is_consistent_once_it_settled():
    moments = golden("broker/etcd_one_broker.json")
    keyspace = keyspace_of(
        *(
            (e["key"].encode(), bytes.fromhex(e["value_hex"]))
            for e in moments["after_first_journal"]
        )
    )
    (journal,) = keyspace.items()
    assert is_consistent(keyspace.assignments(journal.id))
    assert keyspace.journal_route(journal.id).primary == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("items/a/journal", b"\xff\xff"),
        ("items/another/journal", JOURNAL.SerializeToString()),
        ("items/a/journal", pb.JournalSpec(name="a/journal").SerializeToString()),
        ("members/zone#broker", b"\xff"),
        ("members/zone#other-broker", BROKER.SerializeToString()),
        ("members/zone#broker", pb.BrokerSpec(journal_limit=1 << 20).SerializeToString()),
        ("assign/a/journal#zone#broker#0", b"\xff"),
        ("assign/a/journal#zone#broker#0", pb.Route(primary=3).SerializeToString()),
    ],
)
def test_values_that_break_a_rule_are_left_out_and_a_good_one_later_counts(key, value, caplog):
    full = f"{ROOT}/{key}".encode()
    keyspace = keyspace_of((full, value))
    assert keyspace.entries == []
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert full.decode() in caplog.text


def test_lookups_follow_changes():
    item, member = item_key(ROOT, "a/journal"), member_key(ROOT, "zone", "broker")
    first = assignment_key(ROOT, "a/journal", "zone", "broker", 2)
    keyspace = keyspace_of(
        (item, JOURNAL.SerializeToString()), (member, BROKER.SerializeToString()), (first, b"")
    )
    assert keyspace.item("a/journal").value == JOURNAL
    assert keyspace.member("zone", "broker").value == BROKER
    assert [a.slot for a in keyspace.local_assignments("zone", "broker")] == [2]

    # A promotion: the old key goes and the new one comes in one revision.
    second = assignment_key(ROOT, "a/journal", "zone", "broker", 0)
    events = (
        WatchEvent(is_delete=True, kv=KeyValue(first, b"", 0, 4, 0, 0)),
        WatchEvent(is_delete=False, kv=KeyValue(second, b"", 4, 4, 1, 0)),
    )
    keyspace.apply([WatchBatch(pb.Header.Etcd(revision=4), events)])
    assert [a.slot for a in keyspace.local_assignments("zone", "broker")] == [0]
    assert [a.slot for a in keyspace.assignments("a/journal")] == [0]

    for revision, key in enumerate((item, member, second), 5):
        apply(keyspace, KeyValue(key, b"", 0, revision, 0, 0), is_delete=True)
    assert keyspace.item("a/journal") is None
    assert keyspace.member("zone", "broker") is None
    assert keyspace.endpoint("zone", "broker") is None
    assert keyspace.assignments("a/journal") == []
    assert keyspace.local_assignments("zone", "broker") == []
    assert keyspace._by_item == keyspace._by_member == {}


def test_assignments_are_in_order_whenever_they_came():
    values = [(assignment_key(ROOT, "a/journal", z, "broker", 0), b"") for z in "cab"]
    keyspace = keyspace_of(*values)
    assert [a.zone for a in keyspace.assignments("a/journal")] == ["a", "b", "c"]
    implied = keyspace.journal_route("a/journal")
    assert [m.zone for m in implied.members] == ["a", "b", "c"]


def test_a_sibling_prefix_is_dropped_but_raises_the_revision():
    keyspace = keyspace_of((b"/gazette/cluster-2/items/a/journal", JOURNAL.SerializeToString()))
    assert keyspace.entries == []
    assert keyspace.revision == 1
