"""Contract of the model of Etcd: the same operations have the same results as at a real Etcd."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio
import pytest

from gazette_sdk.cluster import etcd as etcd_module
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_messages import Compare, Delete, Get, KeyValue, Put, rpc, stubs
from gazette_sdk.errors import EtcdCompactedError, EtcdError, LeaseLostError
from simulation.etcd_channel import ETCD_ADDRESS, EtcdHost, use_channels
from simulation.loop import VirtualLoop
from simulation.network import Network
from support.etcd import EtcdFixture, etcd, etcd_server, run

__all__ = ["etcd", "etcd_server"]

PREFIX = b"/contract/"
KEYS = [PREFIX + b"key-%d" % number for number in range(5)]
END = b"/contract0"


def run_on_model(scenario: Callable[[Etcd, EtcdHost], Coroutine[Any, Any, Any]]) -> Any:
    """Run a coroutine with a client of the model, on a virtual clock."""
    loop = VirtualLoop()

    async def main() -> Any:
        network = Network(random.Random(1), 0.001)
        host = EtcdHost(network, random.Random(2))
        with pytest.MonkeyPatch.context() as patch:
            for name in ("open_channel", "open_thread_channel", "run_beside"):
                patch.setattr(etcd_module, name, None)  # restored at the end
            patch.setattr(time, "clock_gettime", lambda _: loop.time())  # counts time since boot
            use_channels(network)
            client = await Etcd.connect(ETCD_ADDRESS)
            try:
                return await scenario(client, host)
            finally:
                await client.aclose()

    try:
        return loop.run_until_complete(main())
    finally:
        loop.close()


class Script:
    """Random operations on one client, and their results in terms of the script itself.

    Args:
        client: the client.
        compact: compacts the history up to a revision.
        seed: decides on the operations.
    """

    def __init__(self, client: Etcd, compact: Callable[[int], Awaitable[None]], seed: int) -> None:
        self._client = client
        self._compact_at = compact
        self._rng = random.Random(seed)
        self._base = 0
        self._revision = 0
        self._compacted = 0
        self._leases: list[int] = []
        self.results: list[Any] = []

    async def run(self, count: int) -> list[Any]:
        """Run so many operations, then read the history by a watch. Return all results."""
        self._base = self._revision = (await self._client.range(b"\0")).header.revision
        live: list[Any] = []
        created = asyncio.Event()
        watching = asyncio.create_task(self._watch(self._base + 1, live, created.set))
        await created.wait()
        operations = (
            self._put, self._put, self._delete, self._txn, self._txn, self._txn, self._range,
            self._grant, self._revoke, self._past,
        )  # fmt: skip
        for _ in range(count):
            operation = self._rng.choice(operations)
            self.results.append((operation.__name__, await self._outcome(operation())))
        await self._client.put(KEYS[0], b"the end")
        await watching
        self.results.append(("live watch", live))
        late: list[Any] = []
        await self._watch(self._base + 1, late, lambda: None)
        self.results.append(("late watch", late))
        self.results.append(("compaction", await self._outcome(self._compact())))
        return self.results

    async def _watch(self, start: int, events: list[Any], created: Callable[[], None]) -> None:
        async with aclosing(self._client.watch(PREFIX, start, on_created=created)) as batches:
            async for batch in batches:
                events += [(event.is_delete, self._entry(event.kv)) for event in batch.events]
                if batch.events and batch.events[-1].kv.value == b"the end":
                    return

    async def _outcome(self, work: Awaitable[Any]) -> Any:
        try:
            return await work
        except EtcdError as error:
            return type(error).__name__

    def _entry(self, kv: KeyValue) -> Any:
        lease = self._leases.index(kv.lease) + 1 if kv.lease else 0
        created = kv.create_revision - self._base if kv.create_revision else None
        return kv.key, kv.value, created, kv.mod_revision - self._base, kv.version, lease

    def _lease(self) -> int:
        return self._rng.choice([0, 0, *self._leases])

    async def _put(self) -> Any:
        key, value = self._rng.choice(KEYS), b"%d" % self._rng.randrange(100)
        return await self._client.put(key, value, lease=self._lease()) - self._base

    async def _delete(self) -> Any:
        key = self._rng.choice(KEYS)
        end = self._rng.choice([b"", b"", END])
        return await self._client.delete(key, end) - self._base

    async def _txn(self) -> Any:
        rng, compares = self._rng, []
        for _ in range(rng.randrange(3)):
            key, number = rng.choice(KEYS), rng.randrange(4)
            mod_revision = number and self._base + rng.randrange(1, 40)
            compares.append(
                rng.choice(
                    [
                        Compare.version(key, number),
                        Compare.create_revision(key, mod_revision),
                        Compare.mod_revision(key, mod_revision),
                        Compare.lease(key, self._lease()),
                    ]
                )
            )
        branches = [[self._operation() for _ in range(rng.randrange(4))] for _ in range(2)]
        result = await self._client.txn(compares, *branches)
        return (
            result.succeeded,
            result.revision - self._base,
            result.deleted,
            [
                None if response is None else [self._entry(kv) for kv in response.entries]
                for response in result.responses
            ],
        )

    def _operation(self) -> Any:
        rng, key = self._rng, self._rng.choice(KEYS)
        value = b"t%d" % rng.randrange(100)
        return rng.choice(
            [
                Put(key, value),
                Put(key, value, lease=self._lease()),
                Put(key, value, ignore_lease=True),
                Delete(key),
                Get(key),
                Get(PREFIX, END),
            ]
        )

    async def _range(self) -> Any:
        found = await self._client.range(PREFIX, END, limit=self._rng.randrange(4))
        self._revision = found.header.revision
        return [self._entry(kv) for kv in found.entries], found.has_more, found.count

    async def _past(self) -> Any:
        return await self._at(self._rng.randrange(self._base + 1, self._revision + 3))

    async def _at(self, revision: int) -> Any:
        found = await self._client.range(PREFIX, END, revision=revision)
        return [self._entry(kv) for kv in found.entries]

    async def _grant(self) -> Any:
        self._leases.append(await self._client.grant(600))

    async def _revoke(self) -> Any:
        if self._leases:
            await self._client.revoke(self._rng.choice(self._leases))

    async def _compact(self) -> Any:
        current = (await self._client.range(b"\0")).header.revision
        await self._compact_at(current)
        results = [await self._outcome(self._at(revision)) for revision in (current - 1, current)]
        events: list[Any] = []
        late = await self._outcome(self._watch(current - 1, events, lambda: None))
        await self._watch(current, events, lambda: None)
        return results, late, events


@pytest.mark.parametrize("seed", range(8))
def test_operations_have_the_results_of_a_real_etcd(etcd: EtcdFixture, seed: int) -> None:
    async def real() -> list[Any]:
        target = etcd.address.removeprefix("http://")
        async with etcd.client() as client, grpc.aio.insecure_channel(target) as channel:

            async def compact(revision: int) -> None:
                await stubs.KVStub(channel).Compact(rpc.CompactionRequest(revision=revision))

            return await Script(client, compact, seed).run(60)

    async def modelled(client: Etcd, host: EtcdHost) -> list[Any]:
        async def compact(revision: int) -> None:
            host.model.compact(revision)

        return await Script(client, compact, seed).run(60)

    for ours, theirs in zip(run_on_model(modelled), run(real()), strict=True):
        assert ours == theirs


def test_a_lease_that_is_not_renewed_ends_on_the_virtual_clock() -> None:
    async def scenario(client: Etcd, _: EtcdHost) -> None:
        loop = asyncio.get_running_loop()
        lease = await client.grant(5)
        await client.put(KEYS[0], b"value", lease=lease)
        await asyncio.sleep(4.9 - loop.time())
        assert (await client.range(KEYS[0])).entries
        await asyncio.sleep(1.0)
        assert not (await client.range(KEYS[0])).entries
        with pytest.raises(LeaseLostError):
            await client.revoke(lease)

    run_on_model(scenario)


def test_a_lease_that_is_renewed_lives_on() -> None:
    async def scenario(client: Etcd, _: EtcdHost) -> None:
        lease = await client.grant(5)
        await client.put(KEYS[0], b"value", lease=lease)
        renewing = asyncio.create_task(client.keep_alive(lease, 5))
        await asyncio.sleep(60)
        assert (await client.range(KEYS[0])).entries
        renewing.cancel()
        await asyncio.sleep(7)
        assert not (await client.range(KEYS[0])).entries

    run_on_model(scenario)


def test_an_outage_breaks_watches_and_ends_no_lease() -> None:
    async def scenario(client: Etcd, host: EtcdHost) -> None:
        lease = await client.grant(5)
        await client.put(KEYS[0], b"value", lease=lease)
        created = asyncio.Event()

        async def watch() -> None:
            async with aclosing(client.watch(PREFIX, 1, on_created=created.set)) as batches:
                async for _ in batches:
                    pass

        watching = asyncio.create_task(watch())
        await created.wait()
        host.stop()
        await asyncio.sleep(1)
        assert isinstance(watching.exception(), EtcdError)
        await asyncio.sleep(10)
        host.start()
        assert (await client.range(KEYS[0])).entries

    run_on_model(scenario)


def test_a_watch_from_a_compacted_revision_fails() -> None:
    async def scenario(client: Etcd, host: EtcdHost) -> None:
        for number in range(5):
            await client.put(KEYS[0], b"%d" % number)
        host.model.compact(4)
        with pytest.raises(EtcdCompactedError):
            async for _ in client.watch(PREFIX, 3):
                pass

    run_on_model(scenario)
