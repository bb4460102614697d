from __future__ import annotations

import asyncio

import pytest

from gazette_sdk.shard.application import handler as module
from gazette_sdk.shard.application.application import source_selector
from gazette_sdk.shard.application.handler import ShardGenerator
from gazette_sdk.transport.loop import run
from support.log_records import on_record
from support.memory_transport import MemoryTransport
from support.order_totals import totals

WAIT_S = 10.0


def test_sources_without_journals_are_warned_of_once(caplog):
    transport = MemoryTransport()
    warned, asked = asyncio.Event(), asyncio.Semaphore(0)

    async def existing():
        asked.release()
        return [f"{totals.full_name}/orders/part-000"]

    async def create(_):
        pytest.fail("the shard exists")

    async def scenario():
        generator = ShardGenerator(
            totals, transport, source_selector(totals), existing=existing, create=create
        )
        with on_record(module.__name__, warned.set):
            running = asyncio.create_task(generator.run())
            await warned.wait()
            await asked.acquire()
            transport.create("orders/part-000", topic="orders")
            await asked.acquire()
            transport.delete("orders/part-000")
            await asked.acquire()
            running.cancel()
            await asyncio.wait([running])

    run(scenario(), WAIT_S)
    [record] = caplog.records
    assert record.getMessage().startswith(
        f"no journal matches the sources of {totals.full_name}, topic=orders; it waits for one"
    )
