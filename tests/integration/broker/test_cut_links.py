"""Live brokers that do not reach each other: nobody is deposed, and journals go on."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import pytest

from gazette_sdk.broker.process import Broker
from gazette_sdk.errors import GazetteError
from gazette_sdk.protocol import broker_pb2 as pb
from support.brokers import LIMIT_S, ZONE, journal_spec
from support.etcd import run
from support.spools import until
from support.wired_brokers import WiredCluster

JOURNAL = "a/journal"
TTL_S = 5
"""Lease of the brokers, as their configuration of tests has it."""


class Cluster(WiredCluster):
    """Four brokers with allocators, each behind a proxy that everybody else dials."""

    broker_type = Broker

    async def begin(self, replication: int) -> None:
        self.clients = {}
        for number in range(4):
            name = f"broker-{number}"
            self.clients[name] = await self.start(name)
        await self.clients["broker-0"].apply(journal_spec(JOURNAL, replication=replication))
        await self.append(b"(begin)", within_s=LIMIT_S)
        await until(lambda: len(self.route) == replication)

    @property
    def route(self) -> list[str]:
        """Members of the journal, the primary first."""
        keyspace = self.brokers["broker-0"].keyspace
        assignments = sorted(keyspace.assignments(JOURNAL), key=lambda a: a.slot)
        return [assignment.suffix for assignment in assignments]

    @property
    def members(self) -> list[str]:
        return [m.suffix for m in self.brokers["broker-0"].keyspace.members()]

    async def append(self, content: bytes, within_s: float) -> None:
        """Append by whichever broker answers, tried until it succeeds."""
        async with asyncio.timeout(within_s):
            while True:
                for client in self.clients.values():
                    with contextlib.suppress(GazetteError, TimeoutError):
                        async with asyncio.timeout(3):
                            response = await client.append(JOURNAL, content)
                        if response.status == pb.OK:
                            return
                await asyncio.sleep(0.02)

    async def read(self, broker: str) -> bytes:
        return await self.clients[broker].read(JOURNAL, do_not_proxy=True)


@pytest.fixture
def cluster(etcd, tmp_path):
    @contextlib.asynccontextmanager
    async def started(replication):
        async with Cluster(etcd, tmp_path) as made:
            await made.begin(replication)
            yield made

    return started


@pytest.mark.parametrize("is_refusing", [True, False])
def test_a_replica_that_its_primary_does_not_reach_is_replaced_and_stays_a_member(
    cluster, is_refusing, caplog
):
    async def scenario():
        async with cluster(3) as brokers:
            primary, cut, kept = brokers.route
            (spare,) = {*brokers.clients} - {*brokers.route}
            proxy = brokers.proxies[cut]
            if is_refusing:
                proxy.refuse()
            else:
                proxy.cut()
            # The bound of the issue; twice of it, as machines may be slow.
            await brokers.append(b"(cut)", within_s=2 * (TTL_S + 1))
            await until(lambda: sorted(brokers.route) == sorted([primary, kept, spare]))
            for number in range(10):
                await brokers.append(b"(%d)" % number, within_s=LIMIT_S)
            assert len(brokers.members) == 4
            assert cut not in brokers.route
            content = await brokers.read(primary)
            assert content.endswith(b"(9)")
            assert content.endswith(await brokers.read(spare))

    with caplog.at_level(logging.WARNING):
        run(scenario(), timeout_s=60)
    assert not [message for message in caplog.messages if "is revoked" in message]


def test_a_primary_that_reaches_nobody_hands_its_journal_over(cluster, caplog):
    async def scenario():
        async with cluster(2) as brokers:
            primary, peer = brokers.route
            others = [proxy for name, proxy in brokers.proxies.items() if name != primary]
            for proxy in others:
                proxy.refuse()
            append = asyncio.ensure_future(brokers.append(b"(cut)", within_s=2 * (TTL_S + 1)))
            await until(lambda: brokers.route[0] == peer)
            # A proxy refuses everybody: the others do not reach each other, either, and the broker
            # that is cut off takes no place among them.
            for proxy in others:
                proxy.heal()
            await append
            assert brokers.route[0] == peer
            assert len(brokers.members) == 4
            assert (await brokers.read(peer)).startswith(b"(begin)")

    with caplog.at_level(logging.WARNING):
        run(scenario(), timeout_s=60)
    assert not [message for message in caplog.messages if "is revoked" in message]


def test_a_member_key_that_is_gone_ends_the_wait_for_its_answers(cluster):
    async def scenario():
        async with cluster(2) as brokers:
            primary, peer = brokers.route
            streams = brokers.brokers[primary].service._appends.streams
            assert streams._open[ZONE, peer]
            brokers.proxies[peer].cut("answers")
            append = asyncio.ensure_future(brokers.clients[primary].append(JOURNAL, b"x"))
            await until(lambda: not append.done())
            await brokers.etcd.revoke(brokers.brokers[peer]._membership.lease)
            with pytest.raises(GazetteError):
                await asyncio.wait_for(append, 2)
            brokers.proxies[peer].heal()

    run(scenario(), timeout_s=60)
