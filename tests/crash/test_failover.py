"""The longest stall of appends when a broker of a cluster dies, freezes or leaves.

Real processes: four brokers in two zones, over one etcd, with leases of 5 s. The stall is what the
client's appender sees. The tests allow twice the bar, since other work may share the machine; the
figures of a quiet machine are stated with each.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from dataclasses import dataclass

import pytest

from crash.broker_processes import BrokerProcesses, Stalls, journal_spec, primary_of
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_messages import prefix_end
from gazette_sdk.errors import GazetteError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.connect import connect

TTL_S = 5
JOURNAL = "crash/journal"
MEMBERS = b"/gazette/cluster/members/"
SLACK = 2.0
"""Factor of the bars on a machine that is shared."""


@dataclass(frozen=True)
class Event:
    """Fault of a broker.

    Attributes:
        signal: that it is sent.
        bar_s: of the longest stall.
        lasts_s: time for which appends are watched behind it.
    """

    signal: signal.Signals
    bar_s: float
    lasts_s: float


KILL = Event(signal.SIGKILL, 2.0, 4.0)  # measured: 0.54 s
FREEZE = Event(signal.SIGSTOP, TTL_S + 1.0, TTL_S + 3.0)  # measured: 5.1 s, a replica: 2.9 s
DRAIN = Event(signal.SIGTERM, 0.5, 4.0)  # measured: 0.1 to 0.3 s


@pytest.mark.parametrize("replication", [pytest.param(2, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("role", ["primary", "replica"])
@pytest.mark.parametrize("event", [KILL, FREEZE, DRAIN], ids=["kill", "freeze", "drain"])
def test_appends_stall_no_longer_than_the_bar(tmp_path, event, role, replication):
    with BrokerProcesses(tmp_path, ttl_s=TTL_S) as cluster:
        longest_s = asyncio.run(measure(cluster, event, role, replication))
    assert longest_s < event.bar_s * SLACK


async def measure(cluster: BrokerProcesses, event: Event, role: str, replication: int) -> float:
    """Return the longest stall, and check that every acknowledged append is there."""
    async with asyncio.timeout(100):
        await created(cluster, replication)
        victim = await chosen(cluster, role, replication)
        address = next(url for name, url in cluster.urls.items() if name != victim)
        transport = connect(address, cache_size=100)
        await led(transport)
        appender = Stalls(transport, JOURNAL)
        appending = asyncio.create_task(appender.run())
        await appender.reach(100)
        appender.longest_s = 0.0
        cluster.signal(victim, event.signal)
        await asyncio.sleep(event.lasts_s)
        await appender.reach(20)
        appending.cancel()
        await asyncio.wait([appending])
        content = b""
        async for item in transport.read(pb.ReadRequest(journal=JOURNAL)):
            content += item if isinstance(item, bytes) else b""
        await transport.aclose()
    lines = content.splitlines()
    found = [int(line) for line in dict.fromkeys(lines)]
    assert found[: appender.acknowledged] == list(range(appender.acknowledged))
    print(f"the longest stall was {appender.longest_s:.2f} s")
    return appender.longest_s


async def led(transport: Transport) -> None:
    """Return when the mirror of a broker has the journal's primary."""
    while True:
        with contextlib.suppress(GazetteError):
            await primary_of(transport, JOURNAL)
            return
        await asyncio.sleep(0.1)


async def created(cluster: BrokerProcesses, replication: int) -> None:
    """Create the journal, once a broker answers."""
    change = pb.ApplyRequest.Change(upsert=journal_spec(JOURNAL, replication))
    while True:
        transport = connect(next(iter(cluster.urls.values())))
        try:
            with contextlib.suppress(GazetteError):
                if (await transport.apply(pb.ApplyRequest(changes=[change]))).status == pb.OK:
                    return
        finally:
            await transport.aclose()
        await asyncio.sleep(0.2)


async def chosen(cluster: BrokerProcesses, role: str, replication: int) -> str:
    """Return a member of the journal, once all brokers are there and it has its replicas."""
    transport = connect(next(iter(cluster.urls.values())))
    etcd = await Etcd.connect(cluster.etcd.endpoint)
    try:
        while True:
            with contextlib.suppress(GazetteError):
                primary, replicas = await primary_of(transport, JOURNAL)
                found = await etcd.range(MEMBERS, prefix_end(MEMBERS))
                if len(replicas) == replication - 1 and len(found.entries) == len(cluster.urls):
                    return primary if role == "primary" else replicas[0]
            await asyncio.sleep(0.2)
    finally:
        await etcd.aclose()
        await transport.aclose()
