"""Brokers keep their promises while stores, and the way to brokers, fail."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing

from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.errors import GazetteError, UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.testing import (
    FaultyTransport,
    JournalChecker,
    StoreFaultInjector,
    StoreFaults,
    TransportFaults,
    check_journals,
    raise_violations,
)
from gazette_sdk.transport import loop
from gazette_sdk.transport.base import requests_of

JOURNAL = "faulty/journal"
SPEC = """
name: faulty/journal
replication: 3
fragment: {length: 8192, compression_codec: GZIP, stores: ["file:///"], refresh_interval: 1s}
"""
SEED = 11
WRITERS = 4
APPENDS = 120


async def write(transport, checker, number):
    """Append, and tell the checker what became of each append."""
    chance = random.Random(f"{SEED} {number}")
    client = f"writer {number}"
    for _ in range(APPENDS):
        content = chance.randbytes(chance.randrange(1, 1500))
        request = pb.AppendRequest(journal=JOURNAL)
        try:
            response = await transport.append(requests_of(request, [content]))
        except UnavailableError as error:
            if "dropped requests" in str(error):
                checker.rejected(JOURNAL, content, client=client)
            else:
                checker.uncertain(JOURNAL, content, client=client, attempts=2)
            continue
        except GazetteError:
            checker.uncertain(JOURNAL, content, client=client, attempts=2)
            continue
        if response.status != pb.OK:  # the first one of a duplicated append may be there
            checker.uncertain(JOURNAL, content, client=client, attempts=2)
            continue
        begin, end = response.commit.begin, response.commit.end
        # A duplicate stands before the append that was answered.
        checker.acknowledged(JOURNAL, begin, end, content, client=client, attempts=2)


async def tail(transport, checker, reader):
    """Read from the begin on, and tell the checker what was seen."""
    offset = 0
    request = pb.ReadRequest(journal=JOURNAL, block=True)
    async with aclosing(transport.read(request)) as items:
        async for item in items:
            content, head = item, None
            if isinstance(item, pb.ReadResponse):
                offset, content, head = item.offset, item.content, item.write_head
            checker.read(JOURNAL, offset, content, reader=reader, write_head=head)
            offset += len(content)


def test_no_promise_is_broken_while_stores_and_calls_fail(tmp_path):
    faults = StoreFaults(
        latency_s=(0.0, 0.02), errors_before=0.1, errors_after=0.1, partial_uploads=0.2
    )
    injector = StoreFaultInjector(faults, seed=SEED)
    checker = JournalChecker()
    with (
        injector.installed(),
        EmbeddedCluster(tmp_path, brokers=3, sync_etcd=False) as cluster,
    ):
        cluster.apply(SPEC)
        faulty = FaultyTransport(
            cluster.transport,
            TransportFaults(0.1, 0.1, 0.1, delay_s=(0.0, 0.01), calls=("append",)),
            seed=SEED,
        )

        async def use():
            tails = [
                asyncio.create_task(tail(cluster.transport, checker, f"reader {number}"))
                for number in range(2)
            ]
            await asyncio.gather(*(write(faulty, checker, n) for n in range(WRITERS)))
            for task in tails:
                task.cancel()
            await asyncio.gather(*tails, return_exceptions=True)
            injector.heal()
            return await check_journals(
                checker, cluster.transport, file_root=cluster.fragments, settle_s=20
            )

        raise_violations(loop.run(use(), timeout=100))
    assert {each.fault for each in injector.injected} >= {"errors_before", "partial_uploads"}
    assert {each.fault for each in faulty.injected} >= {"dropped_answers", "duplicates"}
