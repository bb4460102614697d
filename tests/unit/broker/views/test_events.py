"""Events of a cluster: what is recorded, how streams resume, and slow readers."""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette_sdk.broker.views.events import (
    AUDIT_EVENTS,
    BATCH_EVENTS_MAX,
    OVERLAP_US,
    QUEUE_EVENTS_MAX,
    RING_EVENTS,
    STREAMS_MAX,
    ClusterEvents,
    EventQueue,
    EventRecorder,
    EventRing,
    Position,
)
from gazette_sdk.errors import CallError, UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import cluster_pb2 as clpb
from gazette_sdk.server.authorization import AuditEvent, Call
from gazette_sdk.server.logging import RECENT
from gazette_sdk.transport.loop import run
from support.brokers import Mirror, journal_spec

CALL = Call()
OURS, OTHER = "zone/first", "zone/second"


def ring_at(*times_s, process=OURS):
    """A ring with an event at each of some times."""
    clock = iter(times_s)
    ring = EventRing(process, now=lambda: next(clock))
    for number in range(len(times_s)):
        ring.record("log", f"logger {number}", "it broke", clpb.WARNING)
    return ring


def kept(ring, after="", *, only_local=False):
    return list(ring.after(Position.parse(after), only_local=only_local))


def test_numbers_ascend_also_when_the_clock_goes_back():
    events = kept(ring_at(5.0, 4.0, 4.0, 6.0))
    assert [event.time_us for event in events] == [5_000_000, 5_000_001, 5_000_002, 6_000_000]
    assert [event.id for event in events][:2] == [f"{OURS}:5000000", f"{OURS}:5000001"]


@given(st.integers(0, 30))
def test_a_ring_resumes_after_each_of_its_events(count):
    ring = ring_at(*range(1, count + 1))
    events = kept(ring)
    for at, event in enumerate(events):
        assert kept(ring, event.id) == events[at + 1 :]


def test_a_ring_keeps_the_latest_events():
    ring = ring_at(*range(RING_EVENTS + 10))
    assert len(kept(ring)) == RING_EVENTS
    assert kept(ring)[-1].subject == f"logger {RING_EVENTS + 9}"


def test_records_of_the_audit_log_are_events_that_displace_no_others():
    ring = EventRing(OURS)
    for _ in range(RING_EVENTS):
        ring.record("log", "a logger", "it broke")
    recorder = EventRecorder(ring, Mirror().keyspace)
    applied = AuditEvent("Apply", "OK", "192.0.2.1", "a/b", "ada")
    recorder.audited(applied, 0)
    recorder.audited(None, 7)
    recorder.audited(applied._replace(outcome="no", is_refusal=True, subject="", peer=""), 2)
    events = [event for event in kept(ring) if event.kind == "audit"]
    assert [(event.subject, event.text, event.severity) for event in events] == [
        ("a/b", "Apply by ada at 192.0.2.1: OK", clpb.INFO),
        ("", "7 calls were left out: there were too many", clpb.INFO),
        (
            "a/b",
            "Apply by someone at an unknown address, 2 more times: no",
            clpb.WARNING,
        ),
    ]
    for _ in range(1000):
        recorder.audited(applied, 0)
    assert len(kept(ring)) == RING_EVENTS + AUDIT_EVENTS
    times = [event.time_us for event in kept(ring)]
    assert times == sorted(times)


def test_an_id_that_is_no_longer_kept_and_one_of_another_process_are_places_in_time():
    ring = ring_at(1.0, 2.0, 3.0)
    assert [event.time_us for event in kept(ring, "zone/gone:2500000")] == [3_000_000]
    assert [event.time_us for event in kept(ring, "zone/gone:2000000")] == [3_000_000]
    assert [event.time_us for event in kept(ring, "zone/a:2000000")] == [2_000_000, 3_000_000]


def test_changes_in_etcd_are_repeated_after_an_id_of_a_stream_of_another_broker():
    """It may have seen them later than this one."""
    ring = EventRing(OURS, now=lambda: 10.0)
    ring.record("journal", "shop/a", "the journal was created", is_shared=True)
    after = f"{OTHER}:{10_000_000 + OVERLAP_US // 2}"
    assert [event.subject for event in kept(ring, after)] == ["shop/a"]
    assert not kept(ring, f"{OTHER}:{10_000_001 + OVERLAP_US}")
    assert not kept(ring, after, only_local=True)
    number = 10_000_000 + OVERLAP_US // 2
    ring.pass_on(clpb.Event(id=after, time_us=number, member=OTHER))
    assert not kept(ring, after), "it was in a stream of this broker"


@pytest.mark.parametrize("event_id", ["1", "a:", "a:b", ":-1", "a:1e3", "a:" + "1" * 40, "a:²"])
def test_a_text_that_is_no_id_is_refused(event_id):
    with pytest.raises(CallError, match="no id of an event"):
        Position.parse(event_id)


# ---------------------------------------------------------------- recorder


def recorded(change):
    """The events of a change of a mirror that has a journal and two brokers."""
    mirror = Mirror()
    mirror.put(
        dict(
            [
                mirror.item(journal_spec("shop/a")),
                mirror.member("first"),
                mirror.member("second"),
                mirror.assignment("shop/a", "first", 0),
            ]
        )
    )

    async def scenario():
        ring = EventRing(OURS)
        recorder = EventRecorder(ring, mirror.keyspace)
        recorder.begin()
        try:
            change(mirror)
        finally:
            recorder.end()
        mirror.put(dict([mirror.item(journal_spec("shop/later"))]))
        return [(each.kind, each.subject, each.text) for each in kept(ring)]

    return run(scenario(), 20)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda m: m.put(dict([m.item(journal_spec("shop/b"))])),
            ("journal", "shop/b", "the journal was created"),
        ),
        (
            lambda m: m.put(dict([m.item(journal_spec("shop/a", replication=2))])),
            ("journal", "shop/a", "the spec of the journal was changed"),
        ),
        (
            lambda m: m.put({}, [m.keyspace.item_key("shop/a")]),
            ("journal", "shop/a", "the journal was deleted"),
        ),
        (
            lambda m: m.put(dict([m.member("third")])),
            ("member", "local/third", "the broker has joined, at http://local-third.test"),
        ),
        (
            lambda m: m.put({}, [m.keyspace.member_key("local", "second")]),
            ("member", "local/second", "the broker has left"),
        ),
        (
            lambda m: m.put(dict([m.member("second", exiting=True)])),
            ("member", "local/second", "the broker drains, and will leave"),
        ),
        (
            lambda m: m.put(dict([m.member("second", limit=0)])),
            ("member", "local/second", "the broker takes up to 0 replicas"),
        ),
        (
            lambda m: m.put(dict([m.assignment("shop/a", "second", 1)])),
            ("route", "shop/a", "the primary is local/first; replicas: local/second"),
        ),
        (
            lambda m: m.put({}, [m.keyspace.assignment_key("shop/a", "local", "first", 0)]),
            ("route", "shop/a", "no broker holds the journal"),
        ),
        (
            lambda m: m.put(
                dict([m.assignment("shop/a", "first", 1)]),
                [m.keyspace.assignment_key("shop/a", "local", "first", 0)],
            ),
            ("route", "shop/a", "the journal has no primary; replicas: local/first"),
        ),
    ],
)
def test_each_change_in_etcd_is_one_event(change, expected):
    assert recorded(change) == [expected]


def test_a_route_that_is_only_confirmed_is_no_event():
    route = pb.Route(members=[pb.ProcessSpec.ID(zone="local", suffix="first")])
    assert recorded(lambda m: m.put(dict([m.assignment("shop/a", "first", 0, route)]))) == []


def test_many_changes_at_once_are_few_events_and_their_number():
    def change(mirror):
        mirror.batch([mirror.item(journal_spec(f"many/{number}")) for number in range(5000)])

    events = recorded(change)
    assert len(events) == BATCH_EVENTS_MAX + 1
    more = 5000 - BATCH_EVENTS_MAX
    assert events[-1] == ("journal", "", f"{more} more changes of this kind came at the same time")


def test_warnings_of_the_log_are_events_without_secrets_of_any_thread():
    async def scenario():
        ring = EventRing(OURS)
        recorder = EventRecorder(ring, Mirror().keyspace)
        recorder.begin()
        logger, audit = logging.getLogger("shop.stores"), logging.getLogger("gazette.audit")
        for each in (logger, audit):
            each.addHandler(RECENT)
        try:

            def log():
                logger.info("nothing")
                logger.warning("the disk is %s", "full", extra={"free": 3, "token": "abc"})
                audit.warning("List refused")
                logger.error("it failed with password=hunter2")

            thread = threading.Thread(target=log)
            thread.start()
            await asyncio.to_thread(thread.join)
            recorder.store_changed("s3://shop/", "no such bucket")
            recorder.store_changed("s3://shop/", None)
            await asyncio.sleep(0)
        finally:
            recorder.end()
        logger.error("after the end")
        for each in (logger, audit):
            each.removeHandler(RECENT)
        return kept(ring)

    events = run(scenario(), 20)
    assert sorted((event.kind, event.subject, event.text, event.severity) for event in events) == [
        ("log", "shop.stores", "it failed with password=…", clpb.ERROR),
        ("log", "shop.stores", "the disk is full free=3 token=…", clpb.WARNING),
        ("store", "s3://shop/", "the store is healthy again", clpb.INFO),
        ("store", "s3://shop/", "the store is not healthy: no such bucket", clpb.WARNING),
    ]


# ----------------------------------------------------------------- streams


class Members:
    """Other brokers with rings of their own."""

    def __init__(self, **rings):
        self.rings = rings
        self.time_limit_s = 0.2
        self.asked = []

    def others(self):
        return [
            pb.ProcessSpec(id=pb.ProcessSpec.ID(zone="zone", suffix=suffix))
            for suffix in self.rings
        ]

    async def stream(self, _rpc, request, member, call):
        assert request.local
        self.asked.append((member.id.suffix, request.after, request.no_wait))
        ring = self.rings[member.id.suffix]
        if isinstance(ring, Exception):
            raise ring
        if ring is None:
            await asyncio.Event().wait()
        async with aclosing(ClusterEvents(ring, Members()).stream(request, call)) as events:
            async for event in events:
                yield event


def stream(ring, members=None, *, count=None, after="", no_wait=True):
    async def scenario():
        events = ClusterEvents(ring, members or Members())
        request = clpb.EventsRequest(after=after, no_wait=no_wait)
        found = []
        async with aclosing(events.stream(request, CALL)) as responses:
            async for event in responses:
                found.append(event)
                if len(found) == count:
                    break
        return found

    return run(scenario(), 20)


def test_the_events_of_all_brokers_are_sorted_by_time():
    """Those that are down, silent or of another implementation are left out."""
    members = Members(
        second=ring_at(1.5, 3.5, process=OTHER),
        third=UnavailableError("down"),
        fourth=None,
        fifth=CallError("unknown service", code="UNIMPLEMENTED"),
    )
    events = stream(ring_at(1.0, 2.0, 3.0), members)
    assert [event.time_us / 1e6 for event in events] == [1.0, 1.5, 2.0, 3.0, 3.5]
    assert {event.member for event in events} == {OURS, OTHER}


@given(
    ours=st.lists(st.integers(1, 50), max_size=8),
    others=st.lists(st.integers(1, 50), max_size=8),
)
def test_a_stream_resumes_after_each_event_of_any_broker(ours, others):
    ring = ring_at(*sorted(ours))
    members = Members(second=ring_at(*sorted(others), process=OTHER))
    events = stream(ring, members)
    assert len(events) == len(ours) + len(others)
    for at, event in enumerate(events):
        assert stream(ring, members, after=event.id) == events[at + 1 :]


def test_a_stream_has_what_happens_while_it_is_open():
    async def scenario():
        ring, other = EventRing(OURS), EventRing(OTHER)
        ring.record("log", "before", "text")
        other.record("log", "other before", "text")
        members = Members(second=other)
        events = ClusterEvents(ring, members).stream(clpb.EventsRequest(), CALL)
        found = []
        async with aclosing(events):
            found += [await anext(events), await anext(events)]
            following = asyncio.ensure_future(anext(events))
            while len(members.asked) < 2:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.01)
            other.record("store", "s3://x/", "text")
            ring.record("log", "later", "text")
            found += [await following, await anext(events)]
        return [event.subject for event in found], members.asked

    subjects, asked = run(scenario(), 20)
    assert sorted(subjects[:2]) == ["before", "other before"]
    assert subjects[2:] == ["s3://x/", "later"]
    assert [ask[2] for ask in asked] == [True, False]
    assert asked[1][1].startswith(f"{OTHER}:"), "it is followed from its last event on"


def test_a_slow_reader_is_refused_with_the_place_to_resume():
    async def scenario():
        ring = EventRing(OURS)
        ring.record("log", "first", "text")
        events = ClusterEvents(ring, Members()).stream(clpb.EventsRequest(), CALL)
        async with aclosing(events):
            first = await anext(events)
            following = asyncio.ensure_future(anext(events))
            await asyncio.sleep(0)
            ring.record("log", "second", "text")
            second = await following
            for number in range(QUEUE_EVENTS_MAX + 5):
                ring.record("log", f"more {number}", "text")
            with pytest.raises(CallError, match="too slow") as caught:
                await anext(events)
        return first, second, caught.value, len(ring._readers)

    _, second, error, readers = run(scenario(), 20)
    assert error.code == "RESOURCE_EXHAUSTED"
    assert f"resume after {second.id}" in str(error)
    assert readers == 0


def test_too_many_streams_are_refused():
    ring = EventRing(OURS)
    readings = [ring.reading(EventQueue()) for _ in range(STREAMS_MAX)]
    for reading in readings:
        reading.__enter__()
    with pytest.raises(CallError, match="streams of events"), ring.reading(EventQueue()):
        pass
    readings[0].__exit__(None, None, None)
    with ring.reading(EventQueue()):
        pass
