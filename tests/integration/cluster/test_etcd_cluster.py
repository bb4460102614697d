"""An Etcd of three members, of which one after the other is killed or stopped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterable
from contextlib import aclosing
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import pytest

from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_messages import Compare, Put, rpc
from gazette_sdk.cluster.lease import boot_s
from gazette_sdk.cluster.membership import Membership
from gazette_sdk.errors import EtcdError, EtcdUnavailableError, LeaseLostError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.testing.tcp_proxy import TcpProxy
from support.etcd import leader_of, run, within

TTL_S = 5
STALL_MAX_S = 15.0
"""Bound of a stall on a busy machine; an idle one takes 1 s for an election, else 0.05 s."""


class Writer:
    """Continuous transactions, a watch and a lease over one client.

    Attributes:
        acknowledged: key and revision of each transaction that was acknowledged.
        unknown: keys of those that may or may not have happened.
        watched: key and revision of each change that the watch delivered.
        longest_s: longest time between two acknowledged transactions.
    """

    def __init__(self, client: Etcd) -> None:
        self.client = client
        self.acknowledged: dict[bytes, int] = {}
        self.unknown: set[bytes] = set()
        self.watched: list[tuple[bytes, int]] = []
        self.longest_s = 0.0
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self.lease = await self.client.grant(TTL_S)
        revision = await self.client.put(b"/leased", b"", lease=self.lease)
        work = (self._write(), self._watch(revision + 1), self.client.keep_alive(self.lease, TTL_S))
        self._tasks = [asyncio.ensure_future(each) for each in work]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            assert isinstance(result, asyncio.CancelledError), result

    async def _write(self) -> None:
        last = time.monotonic()
        for number in range(1_000_000):
            key = b"/k/%07d" % number
            try:
                result = await self.client.txn([Compare.version(key, 0)], [Put(key, b"")])
            except EtcdUnavailableError:
                self.unknown.add(key)
            else:
                assert result.succeeded
                self.acknowledged[key] = result.revision
                self.longest_s = max(self.longest_s, time.monotonic() - last)
                last = time.monotonic()
            await asyncio.sleep(0.002)

    async def _watch(self, revision: int) -> None:
        while True:
            with contextlib.suppress(EtcdUnavailableError):
                async with aclosing(self.client.watch(b"/k/", revision)) as batches:
                    async for batch in batches:
                        self.watched += [(e.kv.key, e.kv.mod_revision) for e in batch.events]
                        if batch.events:
                            revision = batch.events[-1].kv.mod_revision + 1

    async def more(self, count: int = 50) -> None:
        """Wait until more transactions were acknowledged, and the lease was renewed."""
        wanted = len(self.acknowledged) + count
        await until(
            lambda: len(self.acknowledged) >= wanted or any(task.done() for task in self._tasks)
        )
        for task in self._tasks:
            assert not task.done(), task.exception()

    async def stored_by_each(self, keys: Iterable[bytes]) -> dict[str, dict[bytes, int]]:
        """Return what each member that runs has of some keys: tells who lost them."""
        request = rpc.RangeRequest(key=b"/k/", range_end=b"/k0", serializable=True)
        stored = {}
        for address in self.client._connections.endpoints.candidates():
            with contextlib.suppress(EtcdUnavailableError):
                async with aclosing(await Etcd.connect(address)) as member:
                    answer = await member._call(member._kv.Range, request)
                    found = {kv.key: kv.mod_revision for kv in answer.kvs}
                    stored[address] = {key: found.get(key, 0) for key in keys}
        return stored

    async def check(self) -> None:
        """Check that nothing is lost, repeated or reordered."""
        await self.more(1)
        self._tasks[0].cancel()
        await asyncio.wait([self._tasks[0]])
        found = await self.client.range(b"/k/", b"/k0")
        stored = {kv.key: kv.mod_revision for kv in found.entries}
        lost = {k: r for k, r in self.acknowledged.items() if stored.get(k) != r}
        assert not lost, await self.stored_by_each(lost)
        # One more was on its way when the writer was cancelled, and may come even later.
        assert len(set(stored) - set(self.acknowledged) - self.unknown) <= 1
        await until(lambda: len(self.watched) >= len(stored))
        in_order = sorted(stored.items(), key=lambda item: item[1])
        assert self.watched[: len(stored)] == in_order
        assert len(self.watched) <= len(stored) + 1
        assert [kv.lease for kv in (await self.client.range(b"/leased")).entries] == [self.lease]


async def until(condition):
    """Wait until a condition holds."""
    while not condition():  # noqa: ASYNC110 - the changes come from tasks that know nothing of it
        await asyncio.sleep(0.01)


def is_stopped(pid):
    """Return True if all threads of a process have stopped; the signal alone does not tell."""
    stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


async def connected_to(cluster, first):
    """A client that is connected to one of the members."""
    others = [member for member in cluster.servers if member is not first]
    client = await Etcd.connect(",".join(member.endpoint for member in (first, *others)))
    assert client._connections._current.address == first.endpoint
    return client


async def put_until_known(client, key, value):
    """Write a key again for as long as it is unknown whether it was written."""
    while True:
        with contextlib.suppress(EtcdUnavailableError):
            await client.put(key, value)
            return


@pytest.mark.parametrize("connected", ["leader", "follower"])
@pytest.mark.parametrize("killed", ["leader", "follower"])
def test_a_killed_member_loses_nothing(etcd_cluster, connected, killed, record_property):
    async def scenario():
        leader = await leader_of(etcd_cluster)
        follower, other = (m for m in etcd_cluster.servers if m is not leader)
        client = await connected_to(etcd_cluster, leader if connected == "leader" else follower)
        # Of two followers the connected one is killed.
        victim = leader if killed == "leader" else (other if connected == "leader" else follower)
        async with aclosing(client), Writer(client) as writer:
            await writer.more()
            victim.kill()
            await writer.more()
            await victim.start()
            await writer.more()
            (await leader_of(etcd_cluster)).kill()
            await writer.more()
            await writer.check()
            assert writer.longest_s < STALL_MAX_S
            record_property("longest_stall_s", writer.longest_s)
            print(f"\nconnected to the {connected}, {killed} killed: {writer.longest_s:.3f} s")

    run(scenario(), timeout_s=90)


@pytest.mark.parametrize("stopped", ["leader", "follower"])
def test_a_member_that_does_not_answer_is_left(etcd_cluster, stopped):
    async def scenario():
        leader = await leader_of(etcd_cluster)
        follower = next(m for m in etcd_cluster.servers if m is not leader)
        victim = leader if stopped == "leader" else follower
        others = ",".join(m.endpoint for m in etcd_cluster.servers if m is not victim)
        client = await Etcd.connect(f"{victim.endpoint},{others}", answer_timeout_s=TTL_S / 3)
        async with aclosing(client), Writer(client) as writer:
            await writer.more()
            os.kill(victim.pid, signal.SIGSTOP)
            try:
                await writer.more()
                assert client._connections._current.address != victim.endpoint
                await asyncio.sleep(TTL_S + 1)  # the lease is renewed elsewhere
                await writer.check()
            finally:
                os.kill(victim.pid, signal.SIGCONT)

    run(scenario(), timeout_s=90)


def test_an_idle_client_leaves_a_member_that_does_not_renew_its_lease(etcd_cluster):
    async def scenario():
        victim = await leader_of(etcd_cluster)
        client = await Etcd.connect(victim.endpoint)  # the others are learned
        async with aclosing(client), Membership(client, b"/root/members/a#b", ttl_s=3) as member:
            revision = await member.announce(pb.BrokerSpec(journal_limit=1))
            os.kill(victim.pid, signal.SIGSTOP)
            try:
                async with aclosing(client.watch(b"/root/", revision + 1)) as batches:
                    with pytest.raises(EtcdUnavailableError):
                        await within(anext(batches))
                await asyncio.sleep(4)
                assert not member.lost.done()
                assert (await client.range(b"/root/members/a#b")).count == 1
            finally:
                os.kill(victim.pid, signal.SIGCONT)

    run(scenario(), timeout_s=90)


def test_a_blocked_loop_keeps_its_lease_when_the_member_that_renews_it_stops(etcd_cluster):
    async def scenario():
        leader = await leader_of(etcd_cluster)
        victim = next(m for m in etcd_cluster.servers if m is not leader)
        client = await connected_to(etcd_cluster, victim)
        async with aclosing(client), Membership(client, b"/root/members/a#b", ttl_s=3) as member:
            await member.announce(pb.BrokerSpec(journal_limit=1))
            os.kill(victim.pid, signal.SIGSTOP)
            try:
                time.sleep(5)  # noqa: ASYNC251 - blocks the loop
                assert member.life.alive_until > boot_s()
                assert not member.lost.done()
            finally:
                os.kill(victim.pid, signal.SIGCONT)

    run(scenario(), timeout_s=90)


def test_without_a_majority_calls_fail_in_time_and_go_on_with_it(etcd_cluster):
    async def scenario():
        first, second, third = etcd_cluster.servers
        client = await connected_to(etcd_cluster, first)
        async with aclosing(client):
            await client.put(b"/k", b"1")
            second.kill()
            third.kill()
            with pytest.raises(EtcdUnavailableError):
                await client.revoke(await client.grant(60), timeout_s=2)
            await second.start()
            await put_until_known(client, b"/k", b"2")
            assert (await client.range(b"/k")).entries[0].value == b"2"

    run(scenario(), timeout_s=90)


def test_members_are_learned_and_a_proxy_is_not_passed_by(etcd_cluster):
    async def scenario():
        first, second, third = etcd_cluster.servers
        async with (
            TcpProxy(urlsplit(first.endpoint).port) as proxy,
            aclosing(await Etcd.connect(f"http://127.0.0.1:{proxy.port}")) as client,
        ):
            assert client._connections.endpoints.candidates()[0].endswith(f":{proxy.port}")
            assert set(client._connections.endpoints.candidates()[1:]) == {
                second.endpoint,
                third.endpoint,
            }
            proxy.refuse()
            await put_until_known(client, b"/k", b"1")
            second.kill()
            while client._connections._current.address != third.endpoint:
                await client.range(b"/k")
            assert (await client.range(b"/k")).count == 1

    run(scenario(), timeout_s=90)


def test_an_address_of_another_cluster_is_never_used(etcd_cluster, etcd):
    async def scenario():
        first = etcd_cluster.servers[0]
        addresses = f"{etcd_cluster.address},{etcd.address}"
        async with aclosing(await Etcd.connect(addresses)) as client:
            await client.put(b"/k", b"1")
            for member in etcd_cluster.servers:
                member.kill()
            with pytest.raises(EtcdError, match="ClusterID mismatch"):
                await put_until_known(client, b"/k", b"2")
            async with etcd.client() as other:
                assert (await other.range(b"/k")).count == 0
        assert first.pid is None

    run(scenario(), timeout_s=90)


def test_a_transaction_whose_outcome_is_unknown_is_not_repeated(etcd_cluster):
    async def scenario():
        leader = await leader_of(etcd_cluster)
        client = await connected_to(etcd_cluster, leader)
        async with aclosing(client):
            await client.put(b"/n", b"")
            os.kill(leader.pid, signal.SIGSTOP)
            await until(lambda: is_stopped(leader.pid))
            putting = asyncio.ensure_future(client.put(b"/n", b"x"))
            await asyncio.sleep(0.2)
            leader.kill()
            with pytest.raises(EtcdUnavailableError):
                await putting
            assert [kv.version for kv in (await client.range(b"/n")).entries] == [1]

    run(scenario(), timeout_s=90)


def test_a_lease_that_was_revoked_is_lost_on_every_member(etcd_cluster):
    async def scenario():
        client = await Etcd.connect(etcd_cluster.address)
        async with aclosing(client):
            lease = await client.grant(TTL_S)
            await client.revoke(lease)
            (await leader_of(etcd_cluster)).kill()
            with pytest.raises(LeaseLostError, match="ran out or was revoked"):
                await client.keep_alive(lease, TTL_S)

    run(scenario(), timeout_s=90)
