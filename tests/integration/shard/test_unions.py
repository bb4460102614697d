"""Messages of several classes in one topic, on real brokers."""

from __future__ import annotations

import contextlib

from gazette_sdk import Publisher
from gazette_sdk.testing.shards import run_shards
from support.tagged_events import (
    TO_EVENTS,
    Driver,
    Milestone,
    Ride,
    Seen,
    create_journals,
    events,
    seen,
)

DRIVERS = [f"driver-{number}" for number in range(8)]


def publish(transport, numbers):
    """Publish rides and drivers in turns: in bulk, in transactions, and some that are dropped."""
    found = []
    with Publisher(TO_EVENTS, transport=transport) as publisher:
        for number in numbers:
            rides = [Ride(name, number) for name in DRIVERS]
            drivers = [Driver(name, f"car {number}") for name in DRIVERS]
            publisher.publish_batch([*rides, *drivers])
            with publisher.transaction() as txn:
                txn.publish_batch(drivers)
                for each in rides:
                    txn.publish(each)
            with contextlib.suppress(InterruptedError), publisher.transaction() as txn:
                txn.publish_batch([Ride(name, -1) for name in DRIVERS])
                raise InterruptedError
            found += [*rides, *drivers, *drivers, *rides]
    return found


def test_events_of_two_classes_are_counted_once_when_a_process_is_killed(gazette):
    create_journals(gazette.transport)
    with run_shards(events, processes=2, cluster=gazette, lease_ttl_s=2) as shards:
        published = publish(shards.transport, range(5))
        shards.wait_caught_up(timeout_s=60)
        published += publish(shards.transport, range(5, 10))
        shards.crash(0)
        published += publish(shards.transport, range(10, 15))
        shards.start(0)
        shards.wait_caught_up(timeout_s=60)
        found = seen(shards.transport)
    for name in DRIVERS:
        expected = []
        of_driver = [each for each in published if each.driver == name]
        for count, event in enumerate(of_driver, 1):
            expected.append(Seen(name, event, count))
            expected += [Milestone(name, count)] if count % 10 == 0 else []
        assert [each for each in found if each.driver == name] == expected
