"""Replicas let go of local content soon after the primary has stored it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib

from gazette_sdk.protocol import broker_pb2 as pb
from support.brokers import HandCluster, journal_spec
from support.etcd import run
from support.scripted_replicas import JOURNAL, without_pulses

CHUNK = bytes(range(256)) * 1024  # 256 KiB
CHUNKS = 80
FRAGMENT_BYTES = 1 << 20


def held_bytes(cluster, name):
    """Return the size of the files of a broker's replica, with those that have no name any more."""
    broker = cluster.brokers[name]
    replica = broker.resolver.replica(JOURNAL)
    files = {file.path: file for _, file in replica.index.local()}
    directory = cluster.directory / f"spools-{name}"
    sizes = {}
    for path in directory.rglob("*.content"):
        with contextlib.suppress(FileNotFoundError):  # it was released just now
            sizes[path] = path.stat().st_size
    sizes |= {path: len(file.read_at(0, 1 << 30)) for path, file in files.items()}
    return sum(sizes.values())


def test_twenty_megabytes_are_released_within_seconds(etcd, tmp_path, monkeypatch):
    without_pulses(monkeypatch)

    async def scenario():
        async with HandCluster(etcd, tmp_path) as cluster:
            names = ["broker-1", "broker-2", "broker-3"]
            clients = [await cluster.start(name) for name in names]
            spec = journal_spec(
                JOURNAL,
                replication=3,
                stores=["file:///"],
                length=FRAGMENT_BYTES,
                refresh_interval_s=300,
            )
            await clients[0].apply(spec)
            await cluster.assign(JOURNAL, *names)
            for _ in range(CHUNKS):
                assert (await clients[0].append(JOURNAL, CHUNK)).status == pb.OK
            # The primary's upload, our listing, and our own check of the store.
            async with asyncio.timeout(30):
                for name in names[1:]:
                    while held_bytes(cluster, name) > 2 * FRAGMENT_BYTES:  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
            expect = hashlib.sha1(CHUNK * CHUNKS).hexdigest()
            for client in clients:
                found = await client.read(JOURNAL, do_not_proxy=False)
                assert hashlib.sha1(found).hexdigest() == expect
            stored = list((tmp_path / "fragments").rglob("*.raw"))
            # Nobody stored a fragment twice.
            assert sum(path.stat().st_size for path in stored) <= len(CHUNK) * CHUNKS

    run(scenario())
