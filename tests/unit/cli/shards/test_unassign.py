from __future__ import annotations

import asyncio

import pytest

from gazette_sdk.cli.shards import logs as unassign
from gazette_sdk.cli.shards.commands import UnassignSettings
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb

FAILED = cpb.ReplicaStatus(code=cpb.ReplicaStatus.FAILED, errors=["bad"])


class Recorder:
    """Client that notes the shards of each request."""

    def __init__(self):
        self.batches = []

    async def unassign(self, request):
        self.batches.append(list(request.shards))
        return cpb.UnassignResponse(shards=request.shards)


@pytest.mark.parametrize(("replicas", "most"), [(0, 100), (1, 100), (3, 33), (101, 1)])
def test_a_request_fits_into_one_transaction_of_etcd(replicas, most, capsys):
    listing = cpb.ListResponse(
        shards=[
            cpb.ListResponse.Shard(
                spec=cpb.ShardSpec(id=f"shard-{number:03}"),
                status=[FAILED] * replicas,
                route=pb.Route(members=[pb.ProcessSpec.ID(zone="a", suffix="b")] * replicas),
            )
            for number in range(150)
        ]
    )
    client = Recorder()
    asyncio.run(unassign._unassign(client, listing, UnassignSettings(selector="id")))
    sizes = [len(batch) for batch in client.batches]
    assert max(sizes) == most
    asked = [shard for batch in client.batches for shard in batch]
    assert asked == [shard.spec.id for shard in listing.shards]
    assert capsys.readouterr().out.count("unassigned") == 150
