"""Cluster of ``gazette dev`` with several brokers: a process for each, and controls."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from gazette_sdk.local_cluster import LocalCluster
from gazette_sdk.local_cluster.control import ControlServer

__all__ = ["DevProcesses"]

RESUME_TIMEOUT_S = 10.0
"""Limit of waiting for the journals of an earlier run, which takes some tenths of a second."""

_log = logging.getLogger(__name__)


class DevProcesses:
    """A local cluster on the running event loop, with the methods of an embedded one.

    Args:
        cluster: the cluster, which is not started yet.
    """

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._control = ControlServer(cluster)

    @property
    def data(self) -> Path:
        """Directory of all data."""
        return self._cluster.data

    @property
    def addresses(self) -> list[str]:
        """URLs of all brokers."""
        return [broker.address for broker in self._cluster.brokers]

    async def astart(self) -> None:
        """Start the cluster, and wait for the journals of an earlier run, with a limit."""
        starting = asyncio.create_task(asyncio.to_thread(self._cluster.start))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.wait([starting])  # then astop() finds every process
            raise
        try:
            await asyncio.to_thread(self._cluster.wait_until_ready, RESUME_TIMEOUT_S)
        except TimeoutError as error:
            _log.warning("some journals are not served: they may require more brokers: %s", error)
        await self._control.start()

    async def astop(self) -> None:
        """Stop the cluster, and store its spools."""
        await self._control.stop()
        await asyncio.to_thread(self._cluster.stop)

    async def ended(self) -> None:
        """Wait until the cluster fails.

        Raises:
            GazetteError: the failure.
        """
        await asyncio.to_thread(self._cluster.wait_for_failure)
