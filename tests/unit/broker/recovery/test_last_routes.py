"""The last route of a journal, as a mirror without Etcd's history tells it."""

from __future__ import annotations

import pytest

from gazette_sdk.broker.recovery.peers import replaced
from gazette_sdk.broker.recovery.routes import (
    LastRoutes,
    RecordedRoutes,
    members_required,
    waiting_text,
)
from gazette_sdk.cluster.broker_keys import WITHDRAWN_ROUTE
from gazette_sdk.protocol import broker_pb2 as pb
from support.brokers import ZONE, Mirror, journal_spec

JOURNAL = "a/journal"
A, B, C, D = (pb.ProcessSpec.ID(zone=ZONE, suffix=f"broker-{name}") for name in "abcd")


def value_of(*members):
    return pb.Route(members=members, primary=0).SerializeToString() if members else b""


class World:
    """A mirror, and the last routes that it tells."""

    def __init__(self):
        self.mirror = Mirror()
        self.keyspace = self.mirror.keyspace
        self.records = RecordedRoutes(self.keyspace, A)
        self.routes = LastRoutes(self.keyspace, self.records)
        self.keyspace.observers.append(self.routes.observe)
        self.records.mirror.observers.append(self.routes.observe_records)
        self.recording = Mirror()
        self.recording.keyspace = self.records.mirror

    def record(self, *members, revision=0, by=A):
        """Record a route of these members; without any a withdrawn one."""
        route = pb.Route(members=members, primary=0 if members else -1)
        header = pb.Header(process_id=by, route=route, etcd=pb.Header.Etcd(revision=revision))
        created = self.keyspace.item(JOURNAL).create_revision
        key = f"{self.records.mirror.root}/{JOURNAL}#{created}".encode()
        self.recording.revision = max(self.recording.revision, self.mirror.revision)
        return self.recording.put({key: header.SerializeToString()})

    def claim(self, *members, end=1):
        """Let brokers claim the journal now, whatever routes Etcd has."""
        route = pb.Route(members=members, primary=-1, stored_end=end)
        key = f"{self.records.mirror.root}/{JOURNAL}#0".encode()
        self.recording.revision = max(self.recording.revision, self.mirror.revision)
        header = pb.Header(process_id=members[0], route=route)
        self.recording.put({key: header.SerializeToString()})
        self.mirror.revision = self.recording.revision

    def spec(self, *, replication=1, level=pb.JournalSpec.Suspend.NONE):
        spec = journal_spec(JOURNAL, replication=replication)
        spec.suspend.level = level
        self.mirror.put(dict([self.mirror.item(spec)]))

    def key(self, member, slot):
        return self.keyspace.assignment_key(JOURNAL, member.zone, member.suffix, slot)

    def assign(self, *members, route=()):
        """Make these the members, with a route as the value of each assignment."""
        there = {entry.key for entry in self.keyspace.assignments(JOURNAL)}
        wanted = {self.key(member, slot): value_of(*route) for slot, member in enumerate(members)}
        self.mirror.put(wanted, delete=sorted(there - set(wanted)))

    @property
    def absent(self):
        absent = list(self.routes.absent_brokers(JOURNAL))
        assert self.routes.waiting == ({JOURNAL} if absent else set())
        return absent


@pytest.fixture
def world():
    made = World()
    made.spec()
    return made


def test_claims_replace_an_older_route_until_a_newer_one_is_written(world):
    world.record(A)
    world.assign(A, route=[A])
    world.claim(B, C)
    assert world.routes.last(JOURNAL).is_claimed
    assert world.absent == [B, C]  # the route of the assignment is older, too
    world.assign(C, route=[C])
    assert not world.routes.last(JOURNAL).is_claimed
    assert world.absent == []
    world.mirror.revision += 1
    world.record(C)
    assert world.records.entry(world.keyspace.item(JOURNAL)).value.route.members == [C]


def test_an_old_route_that_is_recorded_late_does_not_end_claims(world):
    world.assign(A, route=[A])
    written = world.routes.last(JOURNAL).revision
    world.claim(B)
    world.mirror.revision += 1
    world.record(A, revision=written)
    assert world.absent == [B]


def test_a_journal_without_any_route_does_not_wait(world):
    world.assign(A)
    world.assign(B)
    assert world.absent == []
    assert world.routes.route(JOURNAL) is None


def test_a_route_outlives_the_leases_of_its_members(world):
    world.assign(A, route=[A])
    assert world.absent == []
    world.assign()
    assert world.absent == [A]
    world.assign(B)
    assert world.absent == [A]
    world.assign(A)
    assert world.absent == []


def test_a_member_of_the_last_route_or_any_route_ends_the_wait(world):
    world.spec(replication=3)
    world.assign(A, B, C, route=[A, B, C])
    world.assign(D)
    assert world.absent == [A, B, C]
    world.assign(D, B)
    assert world.absent == []
    world.assign(D)
    world.assign(D, route=[D])  # too short for a last route, but it has all bytes
    assert world.absent == []
    assert list(world.routes.route(JOURNAL).members) == [A, B, C]


def test_a_short_route_counts_only_if_the_spec_changed_later(world):
    world.spec(replication=2)
    world.assign(A, route=[A])
    assert world.routes.route(JOURNAL) is None
    world.spec(replication=3)
    assert list(world.routes.route(JOURNAL).members) == [A]
    spec = journal_spec(JOURNAL, replication=2)
    assert members_required(spec, 5, 6, 9) == 2
    assert members_required(spec, 5, 6, 1) == 1
    assert members_required(spec, 7, 6, 9) == 1


def test_the_suspension_of_a_journal_ends_its_route_and_the_resumption_begins_one(world):
    world.assign(A, route=[A])
    world.spec(level=pb.JournalSpec.Suspend.PARTIAL)
    world.assign(B)
    assert world.absent == []
    world.assign(B, route=[B])
    world.spec()
    assert list(world.routes.route(JOURNAL).members) == [B]
    world.assign(C)
    assert world.absent == [B]
    world.spec(level=pb.JournalSpec.Suspend.FULL)
    world.spec()
    assert world.absent == []


def test_a_journal_that_is_created_again_has_no_route(world):
    world.assign(A, route=[A])
    world.mirror.put({}, delete=[world.keyspace.item_key(JOURNAL)])
    assert world.routes.route(JOURNAL) is None
    world.spec()
    assert world.routes.route(JOURNAL) is None
    assert world.absent == []


def test_a_withdrawn_route_ends_the_wait_until_the_next_one(world):
    world.assign(A, route=[A])
    world.mirror.put({world.key(A, 0): WITHDRAWN_ROUTE})
    assert world.routes.is_withdrawn(JOURNAL)
    world.assign(B)
    assert world.absent == []
    assert world.routes.is_withdrawn(JOURNAL)
    world.assign(B, route=[B])
    assert not world.routes.is_withdrawn(JOURNAL)
    world.assign(C)
    assert world.absent == [B]


def test_an_empty_value_withdraws_nothing(world):
    """The allocator may write it twice."""
    world.assign(A, route=[A])
    world.assign(B)
    world.assign(B)
    assert world.absent == [A]
    assert not world.routes.is_withdrawn(JOURNAL)


def test_a_recorded_route_that_the_mirror_never_showed_counts(world):
    world.assign(A, route=[A])
    world.assign(B)
    assert world.absent == [A]
    world.record(B)  # its route ended with its lease
    world.assign(C)
    assert world.absent == [B]
    assert world.routes.last(JOURNAL).is_recorded
    world.record()
    assert world.routes.is_withdrawn(JOURNAL)
    assert world.absent == []


def test_of_a_recorded_route_and_one_of_the_mirror_the_newer_one_counts(world):
    world.record(A)
    assert list(world.routes.route(JOURNAL).members) == [A]
    world.mirror.revision = world.recording.revision
    world.assign(B, route=[B])
    last = world.routes.last(JOURNAL)
    assert (list(last.route.members), last.is_recorded) == ([B], False)
    assert last.revision == world.mirror.revision
    world.record(A, revision=last.revision - 1)  # written late
    assert list(world.routes.route(JOURNAL).members) == [B]
    world.record(C, revision=last.revision + 1)  # seen early
    assert list(world.routes.route(JOURNAL).members) == [C]


def test_the_record_of_a_suspended_or_an_earlier_journal_does_not_count(world):
    world.record(A)
    world.spec(level=pb.JournalSpec.Suspend.FULL)
    assert world.routes.route(JOURNAL) is None
    world.mirror.put({}, delete=[world.keyspace.item_key(JOURNAL)])
    world.spec()
    assert world.routes.route(JOURNAL) is None


def test_the_newest_of_several_values_counts(world):
    world.mirror.put({world.key(B, 1): value_of(B)})
    world.mirror.put({world.key(A, 0): value_of(A)})
    assert list(world.routes.route(JOURNAL).members) == [A]


def test_the_text_names_the_brokers_and_the_remedies():
    text = waiting_text([A, B])
    assert "local/broker-a, local/broker-b" in text
    assert "spool directory" in text
    assert "reset-head" in text


@pytest.mark.parametrize(
    ("members", "gone"),
    [
        ([A], [A]),
        ([A, B, C], [A]),
        ([A, D, C], [A, D]),
        ([None, B, C], [B]),
        ([None, D, B], [D]),
    ],
)
def test_a_takeover_replaces_the_first_member_and_our_own_assignment(world, members, gone):
    world.mirror.put(
        {world.key(each, slot): b"" for slot, each in enumerate(members) if each is not None}
    )
    entries = replaced(world.keyspace.assignments(JOURNAL), D)
    assert [entry.suffix for entry in entries] == [member.suffix for member in gone]
