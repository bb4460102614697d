"""The journals and shards of the example stream_sum, created for a test."""

from __future__ import annotations

from pathlib import Path

from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol import shardspace
from gazette_sdk.testing.shards import RunningShards
from gazette_sdk.transport import loop as sdk_loop

EXAMPLE = Path(__file__).parents[2] / "examples" / "stream_sum"
APPLY_TIMEOUT_S = 60.0


def journals(replication: int) -> str:
    """Return the specs of the journals, with another replication."""
    text = (EXAMPLE / "journals.yaml").read_text(encoding="utf-8")
    return text.replace("replication: 3", f"replication: {replication}")


def shard_specs() -> cpb.ApplyRequest:
    """Return the request that creates the shards."""
    space = shardspace.parse((EXAMPLE / "shards.yaml").read_text(encoding="utf-8"))
    shardspace.push_down(space)
    return shardspace.to_apply_request(space)


def sources() -> list[str]:
    """Return the names of the source journals, one of each shard."""
    changes = shard_specs().changes
    return [source.journal for change in changes for source in change.upsert.sources]


def create_shards(shards: RunningShards, request: cpb.ApplyRequest | None = None) -> None:
    """Create the shards, once a process answers."""
    request = shard_specs() if request is None else request
    sdk_loop.run(shards.ask(lambda client: client.apply(request)), APPLY_TIMEOUT_S)
