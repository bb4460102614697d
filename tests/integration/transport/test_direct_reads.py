"""Readers open stored fragments themselves where they can, and ask a broker where they cannot."""

import asyncio
import contextlib
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport import connect
from gazette_sdk.transport import loop as sdk_loop
from gazette_sdk.transport.append.append import append
from gazette_sdk.transport.journal_reader import RetryReader
from gazette_sdk.transport.listing import list_all_fragments

JOURNAL = """
name: direct/journal
replication: 1
fragment:
  length: 1024
  compression_codec: GZIP
  stores: ["file:///"]
  refresh_interval: 1s
"""
PIECES = [bytes([i]) * 2000 for i in range(5)]


async def fill(cluster: EmbeddedCluster) -> None:
    """Append until most of the journal is stored, and known to be."""
    request = pb.AppendRequest(journal="direct/journal")
    for piece in PIECES:
        await append(cluster.transport, request, [piece])
    while True:
        listed = await list_all_fragments(
            cluster.transport, pb.FragmentsRequest(journal="direct/journal")
        )
        if sum(bool(fragment.spec.backing_store) for fragment in listed.fragments) >= 3:
            return
        await asyncio.sleep(0.05)  # the store is listed every second, and tells nobody


async def read(address: str, file_root: Path | None, wire: str) -> bytes:
    content = bytearray()
    async with connect(address, wire=wire) as transport:
        request = pb.ReadRequest(journal="direct/journal", end_offset=sum(map(len, PIECES)))
        async with contextlib.aclosing(
            RetryReader(transport, request, file_root=file_root)
        ) as reader:
            while (piece := await reader.read()) is not None:
                content += piece
    return bytes(content)


def opened() -> float:
    labels = {"journal": "direct/journal", "codec": "GZIP"}
    return REGISTRY.get_sample_value("gazette_fragment_open_total", labels) or 0.0


@pytest.fixture
def filled(gazette: EmbeddedCluster) -> EmbeddedCluster:
    gazette.apply(JOURNAL)
    sdk_loop.run(fill(gazette), 30)
    return gazette


@pytest.mark.parametrize("wire", ["grpc", "stream", "auto"])
def test_fragments_below_a_file_root_are_opened_directly(filled: EmbeddedCluster, wire: str):
    before = opened()
    content = sdk_loop.run(read(filled.address, filled.fragments, wire), 30)
    assert content == b"".join(PIECES)
    assert opened() - before >= 3


@pytest.mark.parametrize("wire", ["grpc", "stream", "auto"])
def test_fragments_out_of_reach_are_read_through_the_broker(filled: EmbeddedCluster, wire: str):
    before = opened()
    assert sdk_loop.run(read(filled.address, None, wire), 30) == b"".join(PIECES)
    assert opened() == before
