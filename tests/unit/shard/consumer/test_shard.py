from __future__ import annotations

import asyncio
import contextlib
import logging

from gazette_sdk.cluster.consumer_keys import ConsumerKeySpace
from gazette_sdk.cluster.item_keyspace import ItemEntry
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.shard.consumer import shard as module
from gazette_sdk.shard.consumer.shard import LocalShard, ShardParts
from support.etcd import run
from support.order_totals import totals


def a_shard(directory):
    parts = ShardParts(
        application=totals,
        transport=None,
        etcd=None,
        keyspace=ConsumerKeySpace("/app"),
        local_id=pb.ProcessSpec.ID(zone="local", suffix="process"),
        workers=None,
        directory=directory,
        lookups=asyncio.Semaphore(1),
        openings=asyncio.Semaphore(1),
    )
    spec = cpb.ShardSpec(id="orders/part-000")
    entry = ItemEntry(
        key=b"/app/items/orders/part-000",
        value=spec,
        create_revision=1,
        mod_revision=1,
        version=1,
        lease=0,
        raw=b"",
        id=spec.id,
    )
    return LocalShard(entry, parts)


def test_calls_that_use_a_store_too_long_are_named_when_it_is_closed(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(module, "USE_TIMEOUT_S", 0.01)

    async def scenario():
        shard = a_shard(tmp_path)
        with shard.in_use():
            await shard.shut_down()
        assert not list(tmp_path.iterdir())

    run(scenario())
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "the store of orders/part-000 is closed under 1 calls" in record.getMessage()


def test_a_shard_that_cannot_end_tells_what_it_waits_for(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(module, "END_NOTICE_S", 0.01)

    async def scenario():
        shard, asked, released = a_shard(tmp_path), asyncio.Event(), asyncio.Event()

        async def goes_on():
            while not released.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await released.wait()

        def running_call(self):
            asked.set()
            return described(self)

        described = LocalShard.running_call
        monkeypatch.setattr(LocalShard, "running_call", running_call)
        shard._run(goes_on(), "primary")
        await asyncio.sleep(0)
        ending = asyncio.create_task(shard.shut_down())
        await asked.wait()
        assert not ending.done()
        released.set()
        await ending

    run(scenario())
    assert "a shard cannot end yet: orders/part-000:" in caplog.text
