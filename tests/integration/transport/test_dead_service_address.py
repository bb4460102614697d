"""Clients whose only configured address is that of a broker that has died."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

import pytest

from gazette_sdk.errors import UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.testing import gazette_cluster
from gazette_sdk.transport.append.append import append
from gazette_sdk.transport.connect import connect
from gazette_sdk.transport.listing import list_journals

CALL_S_MAX = 30.0

JOURNALS = """
name: dead/
replication: 3
fragment: {length: 65536, compression_codec: NONE, stores: ["file:///"], refresh_interval: 5s}
children:
  - name: dead/known
  - name: dead/unknown
"""


async def calls(cluster, wire):
    configured = cluster.brokers[0]
    async with aclosing(connect(configured.address, wire=wire)) as transport:
        await append(transport, pb.AppendRequest(journal="dead/known"), [b"known\n"])
        await asyncio.to_thread(configured.kill)
        begin = time.monotonic()
        while True:
            try:
                found = await list_journals(transport)
                break
            except UnavailableError:  # of the dead broker, once
                assert time.monotonic() < begin + CALL_S_MAX
        assert [each.spec.name for each in found.journals] == ["dead/known", "dead/unknown"]
        transport.routes.invalidate("dead/unknown")
        request = pb.AppendRequest(journal="dead/unknown")
        response = await append(transport, request, [b"unknown\n"])
        assert response.status == pb.OK
        assert time.monotonic() < begin + CALL_S_MAX


@pytest.mark.parametrize("wire", ["stream", "grpc"])
def test_other_brokers_that_it_knows_are_asked(wire):
    with gazette_cluster(4, lease_ttl_s=3.0) as cluster:
        cluster.apply(JOURNALS)
        cluster.wait_until_ready(60.0)
        asyncio.run(asyncio.wait_for(calls(cluster, wire), 60.0))
