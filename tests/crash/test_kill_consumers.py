"""Consumer processes that end at each step of a commit, or stand still: each order counts once."""

from __future__ import annotations

import pytest

from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.shard.transaction.machine import CommitStep
from gazette_sdk.testing.shards import run_shards
from support import order_totals
from support.order_totals import create_journals, expected_totals, publish, published_totals

CRASHED = 137


def verify(shards, count):
    shards.wait_caught_up(timeout_s=90)
    assert published_totals(shards.transport) == expected_totals(count)
    last = {customer: found[-1] for customer, found in expected_totals(count).items()}
    assert order_totals.states(shards) == last


@pytest.mark.parametrize("step", list(CommitStep), ids=lambda step: step.name.lower())
def test_a_process_ends_at_a_step_of_a_commit(gazette, step):
    create_journals(gazette.transport)
    with run_shards(order_totals.totals, cluster=gazette, lease_ttl_s=5) as shards:
        publish(shards.transport, 50)
        shards.wait_caught_up()
        shards.crash_at(step, nth=2)
        publish(shards.transport, 100)
        publish(shards.transport, 100)
        assert shards.processes[0].wait_until_ended() == CRASHED
        shards.start(0)
        verify(shards, 250)


def test_a_process_that_stood_still_is_fenced(gazette):
    create_journals(gazette.transport)
    with run_shards(order_totals.totals, processes=2, cluster=gazette, lease_ttl_s=2) as shards:
        shards.wait_until(
            lambda found: (
                len(found) == 2
                and all(
                    [status.code for status in each.status].count(cpb.ReplicaStatus.STANDBY) == 1
                    for each in found
                )
            )
        )
        publish(shards.transport, 200)
        shards.pause(0)
        publish(shards.transport, 200)
        shards.wait_until(
            lambda found: all(
                each.route.primary >= 0
                and each.route.members[each.route.primary].suffix == "process-1"
                for each in found
            )
        )
        shards.resume(0)
        publish(shards.transport, 200)
        assert shards.processes[0].wait_until_ended() == 1  # its lease is lost
        verify(shards, 600)
