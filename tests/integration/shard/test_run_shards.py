"""Processes of an application: they share its shards, and one goes on where another ended."""

from __future__ import annotations

import urllib.request

from gazette_sdk import Journals, Publisher, mapping
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.testing.shards import run_shards
from gazette_sdk.transport import loop as sdk_loop
from gazette_sdk.transport.append.append import append
from support import order_totals
from support.order_totals import Order, create_journals, expected_totals, publish, published_totals

READY = {cpb.ReplicaStatus.PRIMARY, cpb.ReplicaStatus.STANDBY}


def leads(shards):
    """By process, the number of shards that it leads."""
    found = {}
    for each in shards:
        if each.route.primary >= 0:
            leader = each.route.members[each.route.primary].suffix
            found[leader] = found.get(leader, 0) + 1
    return found


def all_ready(shards, replicas, count=2):
    return len(shards) == count and all(
        len(each.status) == replicas and {status.code for status in each.status} <= READY
        for each in shards
    )


def verify(shards, count):
    """Check that each order was counted once, in the state and in what was published."""
    shards.wait_caught_up(timeout_s=60)
    assert published_totals(shards.transport) == expected_totals(count)
    last = {customer: found[-1] for customer, found in expected_totals(count).items()}
    assert order_totals.states(shards) == last


def scraped(address):
    """The metrics of a process."""
    with urllib.request.urlopen(f"{address}/debug/metrics", timeout=30) as response:
        return response.read().decode()


def test_a_killed_process_goes_on_where_it_was(gazette):
    create_journals(gazette.transport)
    with run_shards(order_totals.totals, cluster=gazette, lease_ttl_s=2) as shards:
        publish(shards.transport, 100)
        shards.wait_caught_up()
        publish(shards.transport, 500)
        shards.crash(0)
        shards.start(0)
        publish(shards.transport, 50)
        # Each publisher begins with the first customer: 100, 500 and 50 are multiples of five.
        verify(shards, 650)
        text = scraped(shards.processes[0].address)
    name = "support.order_totals.totals"
    shard = f'shard="/gazette/consumers/{name}/items/{name}/orders/part-000"'
    journal = 'journal="orders/part-000"'
    for sample in [
        f'up{{shard="{name}/orders/part-000",status="PRIMARY"}} 1.0',
        f"read_lag_bytes{{{shard},{journal}}} 0.0",
        f"read_head{{{shard},{journal}}} ",
        f"transactions_total{{{shard}}} ",
        f"read_messages_total{{{shard}}} ",
        f"read_bytes_total{{{shard}}} ",
        f"recorded_bytes_total{{{shard}}} ",
        f'phase_seconds_total{{{shard},phase="10-not-running",type="sync"}} ',
        f'phase_seconds_total{{{shard},phase="20-consuming",type="sync"}} ',
        f'phase_seconds_total{{{shard},phase="30-stalled",type="sync"}} ',
        f'phase_seconds_total{{{shard},phase="40-preparing",type="sync"}} ',
        f'phase_seconds_total{{{shard},phase="50-committing",type="async"}} ',
        f'phase_seconds_total{{{shard},phase="60-acknowledging",type="async"}} ',
    ]:
        assert f"\ngazette_shard_{sample}" in text
    assert "\ngazette_recoverylog_recovered_bytes_total " in text
    assert f'\ngazette_sequencer_queued{{{journal},flag="OUTSIDE_TXN",' in text


def test_two_processes_share_the_shards_and_one_takes_over(gazette):
    create_journals(gazette.transport)
    with run_shards(order_totals.totals, processes=2, cluster=gazette, lease_ttl_s=3) as shards:
        shards.wait_until(
            lambda found: all_ready(found, 2) and sorted(leads(found).values()) == [1, 1]
        )
        publish(shards.transport, 300)
        shards.crash(0)
        publish(shards.transport, 300)
        shards.wait_until(lambda found: leads(found) == {"process-1": 2})
        verify(shards, 600)

        shards.start(0)
        shards.wait_until(lambda found: all_ready(found, 2))
        shards.drain(1)
        publish(shards.transport, 50)
        shards.wait_until(lambda found: leads(found) == {"process-0": 2})
        verify(shards, 650)


def test_a_new_partition_gets_a_shard(gazette):
    create_journals(gazette.transport)
    with run_shards(order_totals.totals, cluster=gazette) as shards:
        shards.wait_until(lambda found: all_ready(found, 1, count=2))
        create_journals(gazette.transport, partitions=3)
        shards.wait_until(lambda found: all_ready(found, 1, count=3))
        ids = [each.spec.id for each in shards.list_shards()]
        assert ids == [
            f"support.order_totals.totals/orders/part-{number:03}" for number in range(3)
        ]


def test_a_handler_that_raises_fails_its_shard_alone(gazette):
    create_journals(gazette.transport)
    with run_shards(order_totals.refusing_totals, cluster=gazette) as shards:
        shards.wait_until(lambda found: all_ready(found, 1))
        with Publisher(
            mapping=mapping.direct("orders/part-000"), transport=gazette.transport
        ) as to:
            good = to.publish(Order("ada", 1)).result(timeout=30)
            bad = to.publish(Order("bob", -1)).result(timeout=30)
        shards.wait_until(lambda found: found[0].status[0].code == cpb.ReplicaStatus.FAILED)
        (text,) = shards.list_shards()[0].status[0].errors
        assert text.startswith("runTransactions: consume: ValueError: an order of negative cents")
        assert text.endswith(f"record of orders/part-000 at offset {bad.begin}")
        assert bad.begin == good.end

        with Publisher(
            mapping=mapping.direct("orders/part-001"), transport=gazette.transport
        ) as to:
            to.publish(Order("eve", 7)).result(timeout=30)
        assert_reached(shards, "orders/part-001")
        assert dict(shards.store("orders/part-001").items()) == {"eve": 7}
        assert dict(shards.store("orders/part-000").items()).keys() <= {"ada"}


def test_a_shard_without_its_log_fails_with_the_reason(gazette):
    create_journals(gazette.transport)
    with run_shards(order_totals.totals, cluster=gazette) as shards:
        shards.wait_until(lambda found: all_ready(found, 1))
        shards.drain(0)
        log = "recovery/support.order_totals.totals/orders/part-000"
        Journals(transport=gazette.transport).delete([log])
        shards.start(0)
        shards.wait_until(
            lambda found: found[0].status and found[0].status[0].code == cpb.ReplicaStatus.FAILED
        )
        (text,) = shards.list_shards()[0].status[0].errors
        assert text.startswith(
            f"beginRecovery: fetching log spec: named journal does not exist ({log})"
        )
        assert_reached(shards, "orders/part-001")


def publisher_to(journal, gazette):
    return Publisher(mapping=mapping.direct(journal), transport=gazette.transport)


def assert_reached(shards, journal):
    """Wait until the shard of a journal has consumed all of it."""
    head = sdk_loop.run(write_head(shards.transport, journal), 30)
    shards.wait_until(lambda found: read_through(shards, found, journal) >= head)


def read_through(shards, found, journal):
    (spec,) = (each.spec for each in found if each.spec.sources[0].journal == journal)
    response = sdk_loop.run(
        shards.ask(lambda client: client.stat(cpb.StatRequest(shard=spec.id))), 30
    )
    return response.read_through.get(journal, -1)


async def write_head(transport, journal):
    return (await append(transport, pb.AppendRequest(journal=journal), [])).commit.end


def test_recovery_waits_for_brokers(gazette_cluster):
    cluster = gazette_cluster(1, zones=1)
    with run_shards(order_totals.totals, cluster=cluster, lease_ttl_s=2) as shards:
        transport = shards.transport
        create_journals(transport)
        publish(transport, 50)
        shards.wait_caught_up()
        shards.drain(0)
        cluster.broker("broker-0").kill()
        shards.start(0)
        shards.wait_until(
            lambda found: (
                len(found) == 2
                and all(
                    [status.code for status in each.status] == [cpb.ReplicaStatus.BACKFILL]
                    for each in found
                )
            )
        )
        cluster.broker("broker-0").start()
        publish(transport, 50)
        verify(shards, 100)
