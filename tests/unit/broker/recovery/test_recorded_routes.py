"""Records of the last routes of journals, and when they are written."""

from __future__ import annotations

import pytest

from gazette_sdk.broker.recovery.routes import RecordedRoutes
from gazette_sdk.cluster.broker_keys import WITHDRAWN_ROUTE
from gazette_sdk.cluster.etcd_messages import Delete, Put
from gazette_sdk.protocol import broker_pb2 as pb
from support.brokers import ZONE, Mirror, journal_spec

JOURNAL = "a/journal"
A, B = (pb.ProcessSpec.ID(zone=ZONE, suffix=name) for name in ("broker-a", "broker-b"))
ROUTE = pb.Route(members=[A, B], primary=1, endpoints=["http://a.test", "http://b.test"])


@pytest.fixture
def world():
    mirror = Mirror()
    members = [mirror.member("broker-a"), mirror.member("broker-b")]
    mirror.put(dict([mirror.item(journal_spec(JOURNAL)), *members]))
    records = RecordedRoutes(mirror.keyspace, A)
    records.mirror.header.revision = 1
    recording = Mirror()
    recording.keyspace = records.mirror
    return mirror, records, recording


def test_a_record_has_the_route_without_endpoints_and_who_recorded_it(world):
    mirror, records, recording = world
    item = mirror.keyspace.item(JOURNAL)
    (put,) = records.change(item, ROUTE)
    assert isinstance(put, Put)
    name = f"a/journal#{item.create_revision}"
    assert put.key.decode() == f"/gazette_sdk/routes/gazette/cluster/{name}"
    assert put.lease == 0
    revision = recording.put({put.key: put.value})
    record = records.entry(item).value
    assert (record.journal, record.create_revision) == (JOURNAL, item.create_revision)
    assert record.route == pb.Route(members=[A, B], primary=1)
    assert (record.revision, record.recorded_by) == (revision, A)

    (put,) = records.change(item, ROUTE, revision=5)
    recording.put({put.key: put.value})
    assert records.entry(item).value.revision == 5
    (put,) = records.change(item, pb.Route.FromString(WITHDRAWN_ROUTE))
    recording.put({put.key: put.value})
    assert not records.entry(item).value.route.members


def test_the_record_of_a_suspended_journal_is_deleted(world):
    mirror, records, recording = world
    item = mirror.keyspace.item(JOURNAL)
    assert records.change(item, None) == ()
    (put,) = records.change(item, ROUTE)
    recording.put({put.key: put.value})
    assert records.change(item, None) == (Delete(put.key),)
    spec = journal_spec(JOURNAL)
    spec.suspend.level = pb.JournalSpec.Suspend.PARTIAL
    mirror.put(dict([mirror.item(spec)]))
    assert records.change(mirror.keyspace.item(JOURNAL), ROUTE) == (Delete(put.key),)


def test_a_lone_broker_records_nothing_unless_there_are_records(world):
    mirror, records, recording = world
    item = mirror.keyspace.item(JOURNAL)
    (put,) = records.change(item, ROUTE)
    mirror.put({}, delete=[mirror.member("broker-b")[0]])
    assert records.change(item, ROUTE) == ()
    recording.put({put.key: put.value})
    assert records.change(item, ROUTE) == (put,)


def test_nothing_is_recorded_before_the_records_are_loaded(world):
    mirror, _, _ = world
    records = RecordedRoutes(mirror.keyspace, A)
    assert records.change(mirror.keyspace.item(JOURNAL), ROUTE) == ()


def test_what_is_no_record_is_ignored(world, caplog):
    _, records, recording = world
    recording.put({f"{records.mirror.root}/{JOURNAL}#x".encode(): b"", b"/gazette_sdk/x": b""})
    assert records.mirror.entries == []
    assert "can not be decoded" in caplog.text
