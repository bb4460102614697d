"""Brokers and consumers serve the console on their port, unless they are asked not to."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest

from gazette_sdk import shard
from gazette_sdk.broker.api.served import ServedBroker
from gazette_sdk.server.process import Server
from gazette_sdk.transport.loop import run
from support.brokers import config_for
from support.raw_http import exchange


@contextlib.asynccontextmanager
async def broker(etcd, directory, **options):
    served = ServedBroker(
        Server(host="127.0.0.1"),
        lambda endpoint: replace(config_for(etcd, directory), endpoint=endpoint),
        **options,
    )
    try:
        await served.start()
        yield served.endpoint
    finally:
        await served.stop(grace_s=0.5)


@pytest.mark.parametrize(("options", "status"), [({}, 200), ({"has_console": False}, 404)])
def test_a_broker_serves_it(etcd, tmp_path, options, status):
    async def scenario():
        async with broker(etcd, tmp_path, **options) as endpoint:
            page = await exchange(endpoint, "GET", "/console/a")
            return await exchange(endpoint, "GET", "/console/"), page

    page, journal = run(scenario(), 60)
    assert journal.status == 404, "a journal of that name does not exist"
    if status == 200:
        assert page.status == 200
        assert b'name="component" content="broker"' in page.body
    else:
        assert page.status in {400, 404}, "it is the path of a journal"


def test_a_consumer_serves_it(gazette):
    @shard.handler(message=dict, store=shard.RocksStore[str, int], sources="topic=none", name="x")
    def nothing(txn, message):
        pass

    consumer = shard.EmbeddedConsumer(
        nothing, transport=gazette.transport, etcd=gazette.etcd_endpoint
    )
    with consumer:
        answer = run(exchange(consumer.address, "GET", "/console/"), 20)
    assert answer.status == 200
    assert b'name="component" content="consumer"' in answer.body
