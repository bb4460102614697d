"""``gazctl journals store-health``."""

from __future__ import annotations

import sys

from gazette_sdk.cli.client import open_broker
from gazette_sdk.cli.command import Invocation
from gazette_sdk.cli.failure import CommandFailedError
from gazette_sdk.cli.journals.settings import STORE_HEALTH
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.listing import store_health

__all__ = ["run"]


async def run(invocation: Invocation) -> None:
    """Print the result of a broker's check of a fragment store.

    Raises:
        CommandFailedError: the store is unhealthy.
    """
    (url,) = invocation.arguments
    prefix = invocation.settings(STORE_HEALTH).check_delete_prefix
    async with open_broker(invocation) as transport:
        response = await store_health(transport, url, prefix)
    if response.status != pb.OK:
        raise CommandFailedError(
            f"fragment store {url} is unhealthy: {response.store_health_error}"
        )
    sys.stdout.write(f"Fragment store {url} is healthy\n")
