"""The fixture `run_shards` of the SDK's pytest plugin."""

from support import order_totals
from support.order_totals import create_journals, publish


def test_shards_run_until_the_test_ends(gazette, run_shards):
    create_journals(gazette.transport, partitions=1)
    shards = run_shards(order_totals.totals)
    publish(gazette.transport, 5)
    shards.wait_caught_up(timeout_s=60)
    assert order_totals.states(shards, partitions=1) == {f"customer-{n}": 1 for n in range(5)}
