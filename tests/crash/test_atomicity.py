"""Appends are atomic: they never interleave, a dying client leaves nothing, readers see commits."""

import asyncio
import contextlib
import os
import random
import socket
import struct
import subprocess
import sys
import textwrap
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crash.appends import History, make_content
from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport import connect
from gazette_sdk.transport import loop as sdk_loop
from gazette_sdk.transport.append.append import append_once
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.journal_reader import RetryReader

SIZES = [1, 60, 3_000, 100_000, 1_000_000, 8 << 20]
WEIGHTS = [6, 6, 6, 4, 2, 1]
EPISODE_TIMEOUT_S = 60.0

JOURNAL = """
name: atomic/{name}
replication: 1
fragment:
  length: 4194304
  compression_codec: SNAPPY
  stores: ["file:///"]
  refresh_interval: 1s
"""


class GaveUpError(Exception):
    """A client that changed its mind in the middle of an append."""


async def give_up(transport: Transport, journal: str, content: bytes, history: History) -> None:
    """A client which streams content and then goes, without a commit."""
    history.given_up.append(content)

    async def items():
        yield pb.AppendRequest(journal=journal)
        async for chunk in chunks(content):
            yield chunk
        raise GaveUpError

    with contextlib.suppress(GaveUpError):
        await transport.append(items())


def die_over_http(address: str, journal: str, content: bytes, history: History) -> None:
    """A client whose connection is reset within the body of its request."""
    history.given_up.append(content)
    parts = urlsplit(address)
    with socket.create_connection((parts.hostname, parts.port), timeout=10) as connection:
        head = (
            f"PUT /{journal} HTTP/1.1\r\nHost: {parts.netloc}\r\n"
            f"Content-Length: {len(content) + 1}\r\n\r\n"
        )
        connection.sendall(head.encode() + content)
        # A zero linger time makes close() a reset, as the kernel does for a killed process.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def chunks(content: bytes):
    for begin in range(0, len(content), 64 << 10):
        yield content[begin : begin + (64 << 10)]


async def barrier(transport: Transport, journal: str) -> int:
    """The journal's head, once everything before is committed or rolled back."""
    request = pb.AppendRequest(journal=journal)
    return (await append_once(transport, request, chunks(b""))).commit.end


async def keep(transport: Transport, journal: str, content: bytes, history: History) -> None:
    """A client which waits for its answer."""
    response = await append_once(transport, pb.AppendRequest(journal=journal), chunks(content))
    assert response.commit.end - response.commit.begin == len(content)
    assert response.commit.begin not in history.acknowledged
    history.acknowledged[response.commit.begin] = content


async def tail(transport: Transport, journal: str, seen: bytearray) -> None:
    """A reader which follows the head."""
    reader = RetryReader(transport, pb.ReadRequest(journal=journal, block=True))
    async with contextlib.aclosing(reader):
        while (piece := await reader.read()) is not None:
            seen += piece


async def episode(cluster: EmbeddedCluster, journal: str, seed: int) -> None:
    """Clients at random, of which some die; then the journal is taken apart."""
    chance = random.Random(seed)
    history, seen = History(), bytearray()
    async with connect(cluster.address) as transport:
        follower = asyncio.create_task(tail(transport, journal, seen))
        # A body of a dead HTTP client is spread over time, so that others come in between.
        async with asyncio.TaskGroup() as clients:
            for _ in range(chance.randrange(8, 24)):
                content = make_content(chance, chance.choices(SIZES, WEIGHTS)[0])
                fate = chance.random()
                if fate < 0.7:
                    clients.create_task(keep(transport, journal, content, history))
                elif fate < 0.85:
                    clients.create_task(give_up(transport, journal, content, history))
                else:
                    clients.create_task(
                        asyncio.to_thread(die_over_http, cluster.address, journal, content, history)
                    )
        head = await barrier(transport, journal)
        assert head == sum(map(len, history.acknowledged.values()))
        while len(seen) < head:
            await asyncio.sleep(0.005)
            assert not follower.done(), "the follower ended by itself"
        follower.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await follower
    assert not history.unknown
    history.check(bytes(seen[:head]))
    assert len(seen) == head, "a reader saw bytes which were not committed"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory):
    with EmbeddedCluster(tmp_path_factory.mktemp("atomic"), sync_etcd=False) as cluster:
        yield cluster


@pytest.mark.slow
@pytest.mark.timeout(300)
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 2**32))
def test_appends_are_whole_or_not_there_whoever_dies(cluster: EmbeddedCluster, seed: int):
    name = f"episode-{seed}-{os.urandom(4).hex()}"
    cluster.apply(JOURNAL.format(name=name))
    sdk_loop.run(episode(cluster, f"atomic/{name}", seed), EPISODE_TIMEOUT_S)


KILLED_CLIENT = textwrap.dedent(
    """
    import asyncio, sys
    from gazette_sdk.protocol import broker_pb2 as pb
    from gazette_sdk.transport import connect

    address, journal = sys.argv[1:]

    async def main():
        async def items():
            yield pb.AppendRequest(journal=journal)
            for _ in range(1 << 30):
                yield b"x" * 65536
                print("streaming", flush=True)
        async with connect(address) as transport:
            await transport.append(items())

    asyncio.run(main())
    """
)


def test_a_client_killed_within_an_append_leaves_nothing(cluster: EmbeddedCluster, tmp_path: Path):
    cluster.apply(JOURNAL.format(name="killed"))
    script = tmp_path / "client.py"
    script.write_text(KILLED_CLIENT)
    for chunks in (1, 3, 20):
        client = subprocess.Popen(
            [sys.executable, str(script), cluster.address, "atomic/killed"],
            stdout=subprocess.PIPE,
        )
        for _ in range(chunks):
            assert client.stdout.readline() == b"streaming\n"
        client.kill()
        client.wait(10)
        client.stdout.close()

        async def head() -> int:
            async with connect(cluster.address) as transport:
                return await barrier(transport, "atomic/killed")

        assert sdk_loop.run(head(), 30) == 0
