"""Lists of 10,000 journals on a server's port: their cost, and the waits of others meanwhile."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import time

import grpc.aio
import pytest

from gazette_sdk.broker.listing import PAGE_JOURNALS, Listing
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Claims
from gazette_sdk.protocol.labels import label_set
from gazette_sdk.transport.loop import run
from support.brokers import Mirror, journal_spec
from support.raw_http import exchange
from support.scripted_journals import ScriptedJournals, serving, stub

JOURNALS = 10_000
BROKERS = 5
CPU_S_MAX = 0.3
PAUSE_S_MAX = 0.05
CLAIMS = Claims(2**32 - 1, pb.LabelSelector(), math.inf)


@pytest.fixture(scope="module")
def journals():
    """A service that lists journals of three replicas, each with five labels."""
    mirror, entries = Mirror(), {}
    for number in range(JOURNALS):
        spec = journal_spec(f"company/topic-{number // 100:03}/part-{number % 100:03}")
        spec.labels.CopyFrom(
            label_set(
                {
                    "app.gazette.dev/managed-by": "team",
                    "app.gazette.dev/message-type": "Order",
                    "content-type": "application/x-ndjson",
                    "part": f"{number % 100:03}",
                    "topic": f"topic-{number // 100:03}",
                }.items()
            )
        )
        spec.fragment.stores.append("s3://bucket/path/")
        entries.update([mirror.item(spec)])
        suffixes = sorted(f"broker-{(number + k) % BROKERS}" for k in range(3))
        members = [pb.ProcessSpec.ID(zone="zone", suffix=suffix) for suffix in suffixes]
        for slot, suffix in enumerate(suffixes):
            route = pb.Route(members=members)
            entries.update([mirror.assignment(spec.name, suffix, slot, route, zone="zone")])
    entries.update(mirror.member(f"broker-{k}", "zone") for k in range(BROKERS))
    mirror.put(entries)
    listing = Listing(mirror.keyspace, None, pb.ProcessSpec.ID(zone="zone", suffix="broker-0"))
    journals = ScriptedJournals()
    journals.on_list = lambda request, _call: listing.snapshots(request, CLAIMS)
    return journals


async def longest_pause(work) -> float:
    """The longest time for which the loop did not run other tasks during some work."""
    doing = asyncio.ensure_future(work)
    longest_s, last_s = 0.0, time.perf_counter()
    while not doing.done():
        await asyncio.sleep(0)
        now_s = time.perf_counter()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
    await doing
    return longest_s


async def json_list(server, *headers: str) -> bytes:
    answer = await exchange(
        server.endpoint, "POST", "/v1/journals/list", body=b"{}", headers=headers, timeout_s=60
    )
    assert answer.status == 200
    return answer.body


@pytest.mark.serial
def test_a_json_list_costs_little_processor_time(journals):
    async def scenario():
        async with serving(journals) as server:
            costs_s = []
            for _ in range(4):
                begun_s = time.process_time()
                body = await json_list(server, "Accept-Encoding: gzip")
                costs_s.append(time.process_time() - begun_s)
        rows = [json.loads(line)["result"]["journals"] for line in gzip.decompress(body).split()]
        assert sum(map(len, rows)) == JOURNALS
        assert len(body) < 1 << 20
        return costs_s

    _first, *later = run(scenario(), 60)
    assert min(later) <= CPU_S_MAX


@pytest.mark.serial
def test_no_other_request_waits_for_a_long_list(journals):
    async def list_as_json(server) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.listener.port)
        head = "POST /v1/journals/list HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        writer.write(f"{head}Content-Length: 2\r\n\r\n{{}}".encode())
        size = 0
        while piece := await reader.read(1 << 16):
            size += len(piece)
        assert size > 5 << 20
        writer.close()

    async def list_over_grpc(server) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.listener.port}") as channel:
            rows = [len(page.journals) async for page in stub(channel, "List")(pb.ListRequest())]
            assert rows == [PAGE_JOURNALS] * (JOURNALS // PAGE_JOURNALS)

    async def scenario():
        async with serving(journals) as server:
            for listed in (list_as_json, list_over_grpc):
                pauses_s = [await longest_pause(listed(server)) for _ in range(3)]
                assert min(pauses_s) <= PAUSE_S_MAX, listed

    run(scenario(), 60)


def test_a_plain_list_and_one_in_gzip_are_the_same(journals):
    async def scenario():
        async with serving(journals) as server:
            plain = await json_list(server)
            refused = await json_list(server, "Accept-Encoding: br, gzip; q=0")
            packed = await json_list(server, "Accept-Encoding: br, GZIP;q=0.5")
            assert gzip.decompress(packed) == plain == refused

    run(scenario(), 60)
