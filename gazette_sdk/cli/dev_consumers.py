"""Consumer processes that run beside ``gazette dev``, found in its Etcd."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from gazette_sdk.cluster.consumer_keys import CONSUMERS_PREFIX, read_consumers
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.membership import etcd_of_dev
from gazette_sdk.errors import ConfigurationError

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
    async with aclosing(await Etcd.connect(etcd)) as client:
        found = await read_consumers(client, CONSUMERS_PREFIX)
    return {name: specs[0].process_spec.endpoint for name, specs in found.items() if specs}
