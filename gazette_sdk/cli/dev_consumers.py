"""Consumer processes that run beside ``gazette dev``, found in its Etcd."""

from __future__ import annotations

import asyncio
import re
from contextlib import aclosing

from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_messages import prefix_end
from gazette_sdk.errors import ConfigurationError
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.shard.consumer.config import etcd_of_dev
from gazette_sdk.shard.consumer.process import CONSUMERS_PREFIX

_MEMBER = re.compile(rb"(.+)/members/[^#]+#[^#]+")
"""Key of a member; keys of items have no ``#``, those of assignments three."""

_REMEDY = "give the address of one of its processes with --consumer.address or CONSUMER_ADDRESS"


async def find_consumer(broker: str) -> str | None:
    """Return the endpoint of a process of the only application that runs beside ``gazette dev``.

    Args:
        broker: address of a broker.

    Returns:
        The endpoint; None if the broker is not of ``gazette dev``, or does not answer.

    Raises:
        ConfigurationError: no application runs, or there are several.
        EtcdError: Etcd does not answer.
    """
    endpoints = await find_consumers(broker)
    if endpoints is None:
        return None
    if not endpoints:
        raise none_runs(broker)
    if len(endpoints) > 1:
        running = ", ".join(f"{name} at {endpoint}" for name, endpoint in sorted(endpoints.items()))
        raise ConfigurationError(f"several applications run, {running}: {_REMEDY}")
    [endpoint] = endpoints.values()
    return endpoint


async def find_consumers(broker: str) -> dict[str, str] | None:
    """Return the endpoint of a process of each application that runs beside ``gazette dev``.

    Args:
        broker: address of a broker.

    Returns:
        Endpoints by the names of applications; None if the broker is not of ``gazette dev``, or
        does not answer.

    Raises:
        EtcdError: Etcd does not answer.
    """
    try:
        address = await asyncio.to_thread(
            etcd_of_dev, broker, remedy=_REMEDY, broker_remedy=_REMEDY
        )
    except ConfigurationError:
        return None
    return await _endpoints(address)


def none_runs(broker: str) -> ConfigurationError:
    """Return the error that no application runs beside a broker of ``gazette dev``."""
    return ConfigurationError(
        f"no consumer process runs beside the broker at {broker}; start one with `gazette "
        f"run-consumer MODULE:APPLICATION`, or {_REMEDY}"
    )


async def _endpoints(etcd: str) -> dict[str, str]:
    """Return a process' endpoint for each application with keys at their usual place."""
    root = f"{CONSUMERS_PREFIX}/".encode()
    async with aclosing(await Etcd.connect(etcd)) as client:
        found = await client.range(root, prefix_end(root))
    endpoints: dict[str, str] = {}
    for entry in found.entries:
        member = _MEMBER.fullmatch(entry.key.removeprefix(root))
        if member is not None:
            spec = cpb.ConsumerSpec.FromString(entry.value)
            endpoints.setdefault(member[1].decode(), spec.process_spec.endpoint)
    return endpoints
