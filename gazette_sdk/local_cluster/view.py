"""Conditions of the keys of a cluster in Etcd."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from contextlib import aclosing

from gazette_sdk.cluster.broker_keys import BrokerKeySpace
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.errors import EtcdError

__all__ = ["current_revision", "wait_until"]

RETRY_PAUSE_S = 0.1
"""Pause before Etcd is reached again."""

CHECK_S = 0.25
"""Pause between checks while no key changes."""

DIAL_TIMEOUT_S = 2.0
"""Limit of reaching one member of Etcd, before another is tried."""

_log = logging.getLogger(__name__)


async def wait_until(
    endpoint: Callable[[], str], condition: Callable[[BrokerKeySpace], bool]
) -> None:
    """Wait until the keys of a cluster meet a condition. Failures of Etcd are waited out.

    Args:
        endpoint: returns the URL of a member of Etcd that runs.
        condition: returns True if the keys meet it. It may depend on the state of processes, too.
    """
    while True:
        try:
            async with aclosing(
                await Etcd.connect(endpoint(), dial_timeout_s=DIAL_TIMEOUT_S)
            ) as etcd:
                keyspace = BrokerKeySpace()
                await keyspace.load(etcd)
                watch = asyncio.create_task(keyspace.watch(etcd, delay_s=0))
                try:
                    while not condition(keyspace):
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(CHECK_S):
                                await keyspace.wait_for_update()
                    return
                finally:
                    watch.cancel()
                    await asyncio.gather(watch, return_exceptions=True)
        except EtcdError as error:
            _log.debug("Etcd is tried again: %s", error)
            await asyncio.sleep(RETRY_PAUSE_S)


async def current_revision(endpoint: Callable[[], str]) -> int:
    """Return the revision of Etcd. Failures of Etcd are waited out.

    Args:
        endpoint: returns the URL of a member of Etcd that runs.
    """
    while True:
        try:
            async with aclosing(
                await Etcd.connect(endpoint(), dial_timeout_s=DIAL_TIMEOUT_S)
            ) as etcd:
                return (await etcd.range(b"\x00")).header.revision
        except EtcdError as error:
            _log.debug("Etcd is tried again: %s", error)
            await asyncio.sleep(RETRY_PAUSE_S)
