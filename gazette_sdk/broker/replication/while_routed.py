"""Work that is done only for as long as a journal has the route it was begun with."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from gazette_sdk.broker.replica import Replica
from gazette_sdk.broker.resolver import Resolver
from gazette_sdk.broker.slot import InvalidatedError
from gazette_sdk.protocol import broker_pb2 as pb

__all__ = ["while_routed"]

T = TypeVar("T")


async def while_routed(
    work: Coroutine[Any, Any, T], resolver: Resolver, replica: Replica, header: pb.Header
) -> T:
    """Run ``work`` to its end, or until the journal has another route.

    Changes of the journal's keys that leave its route as it is, such as the write of the
    synchronized route or of the stores, do not end it.

    Args:
        work: is cancelled at its end.
        resolver: gives the journal's present route.
        replica: ours, of the journal.
        header: of the journal's resolution with which the work began.

    Raises:
        InvalidatedError: the journal has another route.
    """
    task = asyncio.ensure_future(work)
    signal, handle, is_outdated = replica.signal, 0, False

    def check() -> None:
        nonlocal signal, handle, is_outdated
        if not resolver.has_route(replica, header):
            is_outdated = True
            task.cancel()
            return
        signal = replica.signal
        if not signal.fired:  # else it is the last one: the replica shuts down
            handle = signal.on_fire(check)

    check()
    try:
        await asyncio.wait([task])
    finally:
        signal.forget(handle)
        task.cancel()  # does nothing to a task that is done
    if is_outdated and task.cancelled():
        raise InvalidatedError
    return task.result()
