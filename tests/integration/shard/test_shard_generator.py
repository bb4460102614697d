"""The generator over real brokers: shards of journals that appear while it runs."""

from __future__ import annotations

import asyncio

import pytest

from gazette_sdk import Journals
from gazette_sdk.shard.application.generator import KnownShard, ShardGenerator
from gazette_sdk.shard.application.sources import selectors_of
from gazette_sdk.transport.listing import list_journals
from gazette_sdk.transport.loop import run
from support.order_totals import totals

WAIT_S = 60.0


class Shards:
    """Shards that the generator created, and whether it is to create more."""

    def __init__(self):
        self.specs = {}
        self.leads = True
        self._created = asyncio.Condition()
        self._lead_changed = asyncio.Event()

    async def existing(self):
        return {name: KnownShard(spec, 1) for name, spec in self.specs.items()}

    async def apply(self, changes):
        async with self._created:
            self.specs |= {each.upsert.id: each.upsert for each in changes}
            self._created.notify_all()

    async def wait_for(self, count):
        async with self._created:
            await self._created.wait_for(lambda: len(self.specs) == count)

    async def until_changed(self):
        await self._lead_changed.wait()
        self._lead_changed.clear()

    def lead(self):
        self.leads = True
        self._lead_changed.set()


def test_a_partition_that_appears_gets_a_shard_and_a_log(cluster):
    async def scenario():
        transport, shards = cluster.transport, Shards()
        journals = Journals(transport=transport)
        await journals.acreate("orders", partitions=1, replication=1)
        generator = ShardGenerator(
            totals,
            transport,
            selectors_of(totals.sources),
            existing=shards.existing,
            apply=shards.apply,
            leads=lambda: shards.leads,
            until_changed=shards.until_changed,
        )
        running = asyncio.create_task(generator.run())
        try:
            await shards.wait_for(1)
            await journals.acreate("orders", partitions=3, replication=1)
            await shards.wait_for(3)
            shards.leads = False  # another process does it meanwhile
            await journals.acreate("orders", partitions=4, replication=1)
            shards.lead()
            await shards.wait_for(4)
        finally:
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        name = totals.full_name
        ids = list(shards.specs)
        assert ids == [f"{name}/orders/part-{part:03}" for part in range(4)]
        logs = await list_journals(transport, "prefix=recovery/")
        assert [log.spec.name for log in logs.journals] == [f"recovery/{each}" for each in ids]

    run(scenario(), WAIT_S)
