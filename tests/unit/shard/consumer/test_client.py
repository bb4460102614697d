"""Client of the shard service."""

import asyncio
from contextlib import closing
from socket import socket

import pytest

from gazette_sdk.errors import UnavailableError
from gazette_sdk.shard.consumer.client import ShardClient


def test_an_address_without_a_process_is_named_with_the_remedy():
    with closing(socket()) as bound:  # nobody listens, and nobody else takes the port
        bound.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{bound.getsockname()[1]}"

        async def list_shards() -> None:
            async with ShardClient(address, connect_timeout_s=0.5) as client:
                await client.list()

        with pytest.raises(
            UnavailableError, match="check that a process of the application runs"
        ) as raised:
            asyncio.run(list_shards())
    assert address in str(raised.value)
    assert "CONSUMER_ADDRESS" in str(raised.value)
