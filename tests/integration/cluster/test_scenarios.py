"""The allocator's scenarios, against a real Etcd (allocator section 13).

Assignments are compared key for key. Where several solutions are equally good this holds because
the solver takes the same steps as other implementations' does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest

from gazette_sdk.cluster.allocator.loop import run_allocator
from gazette_sdk.cluster.allocator.state import leader_of
from gazette_sdk.cluster.etcd_messages import Compare, Delete, Put, prefix_end
from support.allocation import VectorAllocation, vector_keyspace
from support.etcd import run
from support.vectors import group

SCENARIOS = group("allocator", "scenarios")
ASSIGNMENTS = b"/root/assign/"


class Cluster:
    """The keys of a scenario, in Etcd."""

    def __init__(self, client):
        self.client = client
        self.lease = 0

    async def write(self, keys, *, version_is_zero):
        compare = [Compare.version(key.encode(), 0) for key, _ in keys]
        puts = [Put(key.encode(), value.encode(), self._lease_of(key)) for key, value in keys]
        result = await self.client.txn(compare, puts)
        assert result.succeeded == version_is_zero
        if not version_is_zero:
            for key, _ in keys:
                assert (await self.client.range(key.encode())).count == 1
            puts = [Put(put.key, put.value, ignore_lease=True) for put in puts]
            assert (await self.client.txn([], puts)).succeeded

    def _lease_of(self, key):
        return 0 if "/items/" in key else self.lease

    async def mark_consistent(self, when):
        found = await self.client.range(ASSIGNMENTS, prefix_end(ASSIGNMENTS))
        puts = [
            Put(kv.key, b"consistent", ignore_lease=True)
            for kv in found.entries
            if kv.value == when.encode()
        ]
        if puts:
            await self.client.txn([], puts)
        return len(puts)

    async def assignment_keys(self):
        found = await self.client.range(ASSIGNMENTS, prefix_end(ASSIGNMENTS))
        assert all(kv.lease == self.lease for kv in found.entries)
        return [kv.key.decode() for kv in found.entries]

    async def serve(self, mark, *, member=None):
        """Allocate as the leader until there is nothing left to do. Returns the idle round.

        As ``member`` allocate until that exits.
        """
        keyspace = vector_keyspace()
        await keyspace.load(self.client)
        watch = asyncio.create_task(keyspace.watch(self.client, delay_s=0))
        idle = asyncio.get_running_loop().create_future()

        async def on_round(number, is_idle):
            if is_idle and not await self.mark_consistent(mark) and not idle.done():
                idle.set_result(number)

        leader = leader_of(keyspace.members())
        if member is not None:
            leader = keyspace.find(member.encode())
        loop = asyncio.create_task(
            run_allocator(
                self.client,
                keyspace,
                leader.zone,
                leader.suffix,
                VectorAllocation(),
                on_round=on_round,
            )
        )
        try:
            ends = [loop, watch] if member is not None else [loop, watch, idle]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if member is not None:
                return await loop
            return idle.result()
        finally:
            for task in (loop, watch):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario["name"])
def test_scenario(etcd, scenario):
    async def play():
        async with etcd.client() as client:
            cluster = Cluster(client)
            cluster.lease = await client.grant(600)
            for step in scenario["steps"]:
                await take(cluster, step)

    run(play())


async def take(cluster, step):
    match step["op"]:
        case "insert":
            await cluster.write(step["keys"], version_is_zero=True)
        case "update":
            await cluster.write(step["keys"], version_is_zero=False)
        case "delete":
            await cluster.client.txn([], [Delete(step["key"].encode())])
        case "serve_until_idle":
            found = await cluster.serve(step["mark_consistent_when_value_is"])
            assert found == step.get("expect_idle_round", found)
        case "serve_as_member_until_it_exits":
            assert step["expect_error"] is None
            mark = step["on_idle_mark_consistent_when_value_is"]
            await cluster.serve(mark, member=step["member_key"])
        case "expect_assignment_keys":
            assert await cluster.assignment_keys() == step["keys"]
        case "expect_assignment_count":
            assert len(await cluster.assignment_keys()) == step["count"]
        case "expect_no_assignment_mentions":
            found = await cluster.assignment_keys()
            assert not [k for k in found if any(f"#{m}#" in k for m in step["members"])]
        case other:
            raise AssertionError(f"unknown step {other}: {json.dumps(step)}")
