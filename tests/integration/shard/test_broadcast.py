"""Topics of which every shard reads all partitions, on real brokers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from operator import attrgetter

import pytest

from gazette_sdk import Journals, JsonMessage, mapping, shard
from gazette_sdk.errors import ConfigurationError
from gazette_sdk.testing.shards import run_shards
from support import currency_rides
from support.currency_rides import (
    RATES,
    TO_FARES,
    TO_RATES,
    Fare,
    Rate,
    bills,
    bills_by_source,
    create_journals,
    publish,
    published,
)

DRIVERS = [f"driver-{number}" for number in range(8)]
CURRENCIES = ["usd", "gbp", "chf", "sek", "pln"]


def wait_for(condition, timeout_s=60):
    ends_at = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < ends_at, "it has not happened in time"
        time.sleep(0.05)
    return found


def publish_rates(transport, factor):
    rates = [Rate(name, factor * (number + 1)) for number, name in enumerate(CURRENCIES)]
    publish(transport, rates, TO_RATES)


def publish_fares(transport, amount, currencies=CURRENCIES):
    fares = [Fare(driver, name, amount) for driver in DRIVERS for name in currencies]
    publish(transport, fares, TO_FARES)


def sums(bills_of_all):
    """The euros of each driver."""
    found = dict.fromkeys(DRIVERS, 0)
    for each in bills_of_all:
        found[each.driver] += each.euros
    return found


def expected(*runs):
    """The euros of each driver, of runs of an amount and a factor."""
    total = sum(
        amount * factor * (number + 1)
        for amount, factor in runs
        for number in range(len(CURRENCIES))
    )
    return dict.fromkeys(DRIVERS, total)


def sources(shards):
    return {each.spec.id: [source.journal for source in each.spec.sources] for each in shards}


def embedded(gazette, application):
    return shard.EmbeddedConsumer(
        application, transport=gazette.transport, etcd=gazette.etcd_endpoint
    )


@pytest.mark.parametrize("application", [bills, bills_by_source])
def test_every_shard_has_all_rates_whichever_process_is_killed(gazette, application):
    create_journals(gazette.transport)
    publish_rates(gazette.transport, 1)
    with run_shards(application, processes=2, cluster=gazette, lease_ttl_s=2) as shards:
        shards.wait_caught_up(timeout_s=60)
        publish_fares(shards.transport, 10)
        shards.crash(0)
        shards.start(0)
        shards.wait_caught_up(timeout_s=60)
        publish_rates(shards.transport, 2)
        shards.wait_caught_up(timeout_s=60)
        shards.crash(1)
        publish_fares(shards.transport, 100)
        shards.start(1)
        shards.wait_caught_up(timeout_s=60)
        assert sums(published(shards.transport)) == expected((10, 1), (100, 2))
        rates = ["rates/part-000", "rates/part-001"]
        assert sources(shards.list_shards()) == {
            f"{application.name}/fares/part-00{number}": [f"fares/part-00{number}", *rates]
            for number in range(2)
        }


@pytest.mark.parametrize("application", [bills, bills_by_source])
def test_partitions_that_are_added_are_read_by_the_shards_that_exist(gazette, application, caplog):
    caplog.set_level("INFO")
    create_journals(gazette.transport, fares=2, rates=1)
    publish_rates(gazette.transport, 1)
    with embedded(gazette, application) as consumer:
        consumer.wait_caught_up(timeout_s=60)
        publish_fares(gazette.transport, 10)
        consumer.wait_caught_up(timeout_s=60)
        create_journals(gazette.transport, fares=2, rates=3)
        publish_rates(gazette.transport, 2)
        consumer.wait_caught_up(timeout_s=60)
        for read in sources(consumer.list_shards()).values():
            assert read[1:] == ["rates/part-000", "rates/part-001", "rates/part-002"]
        texts = [text for text in caplog.messages if "added to the sources of" in text]
        assert any("rates/part-002" in text for text in texts)
        # Whichever of the partitions a rate is in: the newest of a key is the last one that was
        # published, as all that is published is read before the fares.
        publish_fares(gazette.transport, 100)
        consumer.wait_caught_up(timeout_s=60)
        found = published(gazette.transport)
        assert len(found) == 2 * len(DRIVERS) * len(CURRENCIES)
    # A process that starts again reads on, and so does a shard of a further partition of fares.
    create_journals(gazette.transport, fares=3, rates=3)
    with embedded(gazette, application) as consumer:
        consumer.wait_caught_up(timeout_s=60)
        publish_rates(gazette.transport, 3)
        consumer.wait_caught_up(timeout_s=60)
        publish_fares(gazette.transport, 1000, CURRENCIES[:1])
        consumer.wait_caught_up(timeout_s=60)
        assert len(sources(consumer.list_shards())) == 3
        last = published(gazette.transport)[len(found) :]
        assert [each.euros for each in last] == [3000] * len(DRIVERS)


def test_a_topic_without_partitions_is_refused_at_the_start(gazette):
    create_journals(gazette.transport, rates=0)
    with pytest.raises(ConfigurationError, match=f"{RATES}, which every shard reads, has no part"):
        embedded(gazette, bills).start()


def test_a_topic_that_is_deleted_is_shown(gazette, gazctl):
    create_journals(gazette.transport, fares=1, rates=1)
    with embedded(gazette, bills) as consumer:
        consumer.wait_caught_up(timeout_s=60)
        gazctl.environ["CONSUMER_ADDRESS"] = consumer.address
        Journals(transport=gazette.transport).delete("rates/part-000")
        text = "the shard bills/fares/part-000 reads rates/part-000, which does not exist any more"
        wait_for(lambda: text in gazctl.ok("shards", "list").stderr)
        assert len(consumer.list_shards()) == 1


@dataclass
class Closed(JsonMessage):
    driver: str
    begin: float


@pytest.mark.parametrize("grows", [False, True])
def test_a_quiet_broadcast_topic_lets_windows_close(gazette, grows):
    """As any quiet source does: also one with partitions that were never written to."""
    create_journals(gazette.transport, fares=1, rates=1)
    Journals(transport=gazette.transport).create("closed", partitions=1, replication=1)

    @shard.handler(
        message={currency_rides.FARES: Fare, RATES: Rate},
        sources=shard.partitions(currency_rides.FARES, shard.broadcast(RATES)),
        store=shard.RocksStore,
        name="windows",
        event_time="published",
        idle_s=0.5,
        windows=shard.windows.Tumbling(size_s=0.2, by=attrgetter("driver"), state=int),
    )
    def windows(txn, message):
        if isinstance(message, Fare):
            for window in txn.windows(message):
                window.state = message.amount

    @windows.closed
    def emit(txn, window):
        txn.publish(Closed(window.key, window.begin), mapping=mapping.direct("closed/part-000"))

    def closed():
        reader = currency_rides.Reader(
            Closed, "topic=closed", block=False, transport=gazette.transport
        )
        return [each.message.driver for each in reader]

    with embedded(gazette, windows) as consumer:
        publish(gazette.transport, [Rate("usd", 1)], TO_RATES)
        publish(gazette.transport, [Fare("ada", "usd", 1)], TO_FARES)
        wait_for(lambda: closed() == ["ada"])
        if grows:
            create_journals(gazette.transport, fares=1, rates=2)
            wait_for(lambda: "rates/part-001" in str(sources(consumer.list_shards())))
        publish(gazette.transport, [Fare("bo", "usd", 1)], TO_FARES)
        wait_for(lambda: closed() == ["ada", "bo"])
