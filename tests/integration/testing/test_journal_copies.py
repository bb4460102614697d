"""Copies on brokers and stores of a running cluster, compared with what was appended."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.testing.journal_checker import JournalChecker, Promise
from gazette_sdk.testing.journal_copies import check_journals, journal_copies
from gazette_sdk.transport import loop
from gazette_sdk.transport.base import requests_of
from gazette_sdk.transport.listing import list_journals

SPEC = """
name: {name}
replication: {replication}
labels: [{{name: content-type, value: application/x-ndjson}}]
fragment: {{length: 4096, compression_codec: GZIP, stores: ["file:///"], refresh_interval: 1s}}
"""


PARTITIONS = SPEC.format(name="copies/", replication=3) + "children:\n"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    from gazette_sdk.embedded import EmbeddedCluster  # noqa: PLC0415 - it imports a broker

    with EmbeddedCluster(tmp_path_factory.mktemp("cluster"), brokers=3, sync_etcd=False) as made:
        yield made


async def append_some(transport, journal, checker, count):
    chance = random.Random(3)
    for number in range(count):
        content = chance.randbytes(chance.randrange(1, 2000))
        response = await transport.append(requests_of(pb.AppendRequest(journal=journal), [content]))
        assert response.status == pb.OK
        commit = response.commit
        checker.acknowledged(journal, commit.begin, commit.end, content, client=f"append {number}")


def check(cluster, checker, **more):
    return loop.run(
        check_journals(checker, cluster.transport, file_root=cluster.fragments, **more), timeout=90
    )


def test_a_replicated_journal_is_the_same_on_every_broker_and_in_the_store(cluster):
    cluster.apply(SPEC.format(name="copies/all", replication=3))
    checker = JournalChecker()
    loop.run(append_some(cluster.transport, "copies/all", checker, 40), timeout=60)
    assert check(cluster, checker, settle_s=20) == []

    async def sources():
        async with journal_copies(
            cluster.transport, "copies/all", file_root=cluster.fragments
        ) as copies:
            return [(each.source, each.begin, each.end, each.complete) for each in copies]

    found = loop.run(sources(), timeout=60)
    brokers = [each for each in found if each[3]]
    assert len(brokers) == 3
    assert len({source for source, *_ in brokers}) == 3
    assert {(begin, end) for _, begin, end, _ in brokers} == {(0, brokers[0][2])}
    assert all(source == "store file:///" for source, *_, complete in found if not complete)


def test_primaries_are_spread_amid_appends_which_stay_as_they_were_acknowledged(cluster):
    names = [f"copies/part-{number:02}" for number in range(12)]
    checker = JournalChecker()
    spread = asyncio.Event()

    async def append(name):
        while not spread.is_set():
            await append_some(cluster.transport, name, checker, 1)

    async def primaries():
        listing = await list_journals(cluster.transport)
        routes = [each.route for each in listing.journals if each.spec.name in names]
        return Counter(
            route.members[route.primary].suffix for route in routes if route.primary >= 0
        )

    async def scenario():
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            for name in names:
                group.create_task(append(name))
            while not (len(led := await primaries()) == 3 and max(led.values()) <= 5):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            spread.set()

    cluster.apply(PARTITIONS + "".join(f"- name: {name}\n" for name in names))
    loop.run(scenario(), timeout=60)
    assert check(cluster, checker, settle_s=20) == []


def test_what_stands_in_the_store_alone_is_read_there(cluster):
    cluster.apply(SPEC.format(name="copies/stored", replication=1))
    checker = JournalChecker()
    loop.run(append_some(cluster.transport, "copies/stored", checker, 40), timeout=60)
    violations = check(cluster, checker)
    assert violations == []
    assert list((cluster.fragments / "copies/stored").iterdir())


def test_planted_violations_are_found(cluster):
    cluster.apply(SPEC.format(name="copies/planted", replication=3))
    checker = JournalChecker()
    loop.run(append_some(cluster.transport, "copies/planted", checker, 3), timeout=60)
    checker.read("copies/planted", 0, b"no such bytes", reader="r")
    checker.acknowledged("copies/planted", 1 << 20, (1 << 20) + 3, b"abc")
    promises = {each.promise for each in check(cluster, checker)}
    assert promises == {Promise.READ_COMMITTED, Promise.READABLE}
