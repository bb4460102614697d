"""Topics that are joined by the numbers of their partitions, on real brokers."""

from __future__ import annotations

import json
import time
import urllib.request
from operator import attrgetter

import pytest

from gazette_sdk import Journals, Publisher, shard
from gazette_sdk.errors import ConfigurationError
from gazette_sdk.testing import CommitStep
from gazette_sdk.testing.shards import run_shards
from support import ride_join
from support.ride_join import Driver, Joined, Ride, create_journals, joined, published

DRIVERS = [f"driver-{number}" for number in range(8)]


def publish(transport, messages, mapping):
    with Publisher(mapping=mapping, transport=transport) as publisher:
        publisher.publish_batch(messages).result(timeout=30)


def publish_cars(transport, color):
    cars = [Driver(name, f"{color} car of {name}") for name in DRIVERS]
    publish(transport, cars, ride_join.TO_DRIVERS)


def publish_rides(transport, numbers):
    rides = [Ride(name, number) for number in numbers for name in DRIVERS]
    publish(transport, rides, ride_join.TO_RIDES)


def wait_for(condition, timeout_s=30):
    ends_at = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < ends_at, "it has not happened in time"
        time.sleep(0.05)
    return found


def each_leads(shards):
    """Return True if the two processes lead one shard each."""
    leaders = {
        each.route.members[each.route.primary].suffix for each in shards if each.route.primary >= 0
    }
    return len(leaders) == 2


def by_driver(found):
    rides = {name: [] for name in DRIVERS}
    for each in found:
        rides[each.driver].append((each.number, each.car, each.rides))
    return rides


def test_rides_meet_the_car_of_their_driver_whichever_process_is_killed(gazette):
    create_journals(gazette.transport)
    with run_shards(joined, processes=2, cluster=gazette, lease_ttl_s=2) as shards:
        publish_cars(shards.transport, "red")
        shards.wait_caught_up(timeout_s=60)
        publish_rides(shards.transport, range(50))
        shards.crash(0)
        shards.start(0)
        shards.wait_caught_up(timeout_s=60)
        publish_cars(shards.transport, "blue")
        shards.wait_caught_up(timeout_s=60)
        publish_rides(shards.transport, range(50, 80))
        shards.wait_caught_up(timeout_s=60)
        found = by_driver(published(shards.transport))
        for name in DRIVERS:
            assert found[name] == [
                (number, f"{'red' if number < 50 else 'blue'} car of {name}", number + 1)
                for number in range(80)
            ]
        sources = {
            each.spec.id: [source.journal for source in each.spec.sources]
            for each in shards.list_shards()
        }
    assert sources == {
        f"joined-rides/rides/part-00{number}": [
            f"drivers/part-00{number}",
            f"rides/part-00{number}",
        ]
        for number in range(2)
    }


def test_topics_of_different_numbers_of_partitions_are_refused_at_the_start(gazette):
    create_journals(gazette.transport, drivers=3)
    consumer = shard.EmbeddedConsumer(
        joined, transport=gazette.transport, etcd=gazette.etcd_endpoint
    )
    with pytest.raises(ConfigurationError, match="rides has 2 partitions, topic=drivers has 3"):
        consumer.start()


def test_a_topic_that_grows_under_a_join_is_shown_and_read_once_both_have_grown(gazette, gazctl):
    create_journals(gazette.transport)
    journals = Journals(transport=gazette.transport)
    with shard.EmbeddedConsumer(
        joined, transport=gazette.transport, etcd=gazette.etcd_endpoint
    ) as consumer:
        publish_cars(gazette.transport, "red")
        consumer.wait_caught_up(timeout_s=30)
        with urllib.request.urlopen(f"{consumer.address}/drivers/driver-3", timeout=30) as answer:
            assert json.loads(answer.read())["car"] == "red car of driver-3"

        journals.create("drivers", partitions=3, replication=1)
        gazctl.environ["CONSUMER_ADDRESS"] = consumer.address
        text = "topic=rides has 2 partitions, topic=drivers has 3"
        wait_for(lambda: gazctl.ok("shards", "list").stderr.count(text) == 1)
        assert gazctl.ok("shards", "list").stdout.count(b"PRIMARY") == 2
        publish_cars(gazette.transport, "blue")
        with pytest.raises(TimeoutError, match=text):
            consumer.wait_caught_up(timeout_s=2)
        # What is read is joined as before.
        publish_rides(gazette.transport, [1])
        wait_for(lambda: published(gazette.transport))

        journals.create("rides", partitions=3, replication=1)
        wait_for(lambda: len(consumer.list_shards()) == 3)
        wait_for(lambda: text not in gazctl.ok("shards", "list").stderr)
        consumer.wait_caught_up(timeout_s=30)


def test_a_table_is_joined_and_queried_whichever_process_is_killed(gazette):
    create_journals(gazette.transport)
    with run_shards(ride_join.by_table, processes=2, cluster=gazette, lease_ttl_s=2) as shards:
        publish_cars(shards.transport, "red")
        shards.wait_caught_up(timeout_s=60)
        publish_rides(shards.transport, range(50))
        shards.wait_until(each_leads)
        shards.crash_at(CommitStep.LOCALLY_COMMITTED)
        publish_cars(shards.transport, "green")
        shards.processes[0].wait_until_ended()
        shards.start(0)
        shards.wait_caught_up(timeout_s=60)
        publish_cars(shards.transport, "blue")
        shards.wait_caught_up(timeout_s=60)
        publish_rides(shards.transport, range(50, 80))
        shards.wait_caught_up(timeout_s=60)
        found = by_driver(published(shards.transport))
        for name in DRIVERS:
            assert [number for number, *_ in found[name]] == list(range(80))
            colors = [car.split()[0] for _, car, _ in found[name]]
            assert set(colors[:50]) <= {"red", "green"}
            assert set(colors[50:]) == {"blue"}
        for process in shards.processes:
            url = f"{process.address}/cars/driver-3"
            with urllib.request.urlopen(url, timeout=30) as answer:
                assert json.loads(answer.read()) == {"car": "blue car of driver-3"}


def test_a_shard_whose_application_has_lost_its_table_fails_and_says_so(gazette):
    create_journals(gazette.transport)
    publish_cars(gazette.transport, "red")
    publish_rides(gazette.transport, [1])
    connection = {"transport": gazette.transport, "etcd": gazette.etcd_endpoint}
    with shard.EmbeddedConsumer(ride_join.by_table, **connection) as consumer:
        wait_for(lambda: len(published(gazette.transport)) == len(DRIVERS))
    without = shard.handler(
        message=Ride,
        sources=ride_join.RIDES,
        store=shard.RocksStore[str, int],
        name=ride_join.by_table.name,
    )(lambda txn, ride: None)
    with shard.EmbeddedConsumer(without, **connection) as consumer:

        def failures():
            found = [status.errors for each in consumer.list_shards() for status in each.status]
            return " ".join(text for errors in found for text in errors)

        wait_for(lambda: "its `tables=` has changed" in failures())


@pytest.mark.parametrize("has_drivers", [True, False])
def test_a_table_is_read_through_before_the_first_message(gazette, has_drivers):
    """Also one whose journals are empty. Later both are read as they are written."""
    create_journals(gazette.transport)
    publish_rides(gazette.transport, range(200))
    if has_drivers:
        publish(
            gazette.transport,
            [Driver(name, f"car {number}") for number in range(300) for name in DRIVERS],
            ride_join.TO_DRIVERS,
        )
    cars = shard.table(ride_join.DRIVERS, key=attrgetter("driver"), message=Driver, bootstrap=True)

    def consume(txn, ride):
        driver = txn.table(cars).get(ride.driver)
        found = Joined(ride.driver, ride.number, driver.car if driver else "none", 0)
        txn.publish(found, mapping=ride_join.TO_JOINED)

    application = shard.handler(
        message=Ride,
        sources=ride_join.RIDES,
        tables=[cars],
        store=shard.RocksStore,
        name="bootstrapped",
        max_txn_s=0.02,  # several transactions
    )(consume)
    with shard.EmbeddedConsumer(
        application, transport=gazette.transport, etcd=gazette.etcd_endpoint
    ) as consumer:
        consumer.wait_caught_up(timeout_s=30)
        found = published(gazette.transport)
        assert len(found) == 200 * len(DRIVERS)
        assert {each.car for each in found} == {"car 299" if has_drivers else "none"}
        publish_cars(gazette.transport, "blue")
        consumer.wait_caught_up(timeout_s=30)
        publish_rides(gazette.transport, [200])
        consumer.wait_caught_up(timeout_s=30)
        last = published(gazette.transport)[len(found) :]
        assert sorted(each.car for each in last) == [f"blue car of {name}" for name in DRIVERS]
