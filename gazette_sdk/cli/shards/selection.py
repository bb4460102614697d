"""Selection of the shards that a command works on."""

from __future__ import annotations

from gazette_sdk.cli.failure import CommandFailedError
from gazette_sdk.errors import ConfigurationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.labels import parse_selector
from gazette_sdk.shard.consumer.client import ShardClient

__all__ = ["list_some", "required_selector"]


def required_selector(text: str) -> pb.LabelSelector:
    """Return the selector of a command that needs one.

    Raises:
        ConfigurationError: it was not given.
        ValidationError: it is malformed.
    """
    if not text:
        raise ConfigurationError(
            "the required option --selector was not given; `-l id` selects all shards"
        )
    return parse_selector(text)


async def list_some(client: ShardClient, text: str) -> cpb.ListResponse:
    """Return the selected shards, at least one.

    Raises:
        CommandFailedError: no shard matches.
        GazetteError: the listing failed.
    """
    listing = await client.list(required_selector(text))
    if not listing.shards:
        raise CommandFailedError(
            f"no shards match the selector {text!r}; `gazctl shards list` shows all"
        )
    return listing
