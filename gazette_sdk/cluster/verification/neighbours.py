"""Connections to the members that follow this one, whose end is evidence that a member died.

Consumers have no streams to each other that would break. So each holds a connection to a few
others: those whose keys follow its own, in a ring. As long as one of three members next to each
other lives, a death is noticed; if they die together, the ring closes over them one by one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple

from gazette_sdk.cluster.item_keyspace import ProcessKeySpace
from gazette_sdk.cluster.verification.decision import NOTHING_LISTENS, Input
from gazette_sdk.protocol import broker_pb2 as pb

__all__ = ["Neighbours"]

NEIGHBOURS_MAX = 3
"""Members that one holds connections to. Their number bounds the cost, whatever the cluster's."""

OPEN_AGAIN_S = 1.0
"""Least time between two openings of a connection. Endpoints with TLS end it after an alert."""

_log = logging.getLogger(__name__)


class _Neighbour(NamedTuple):
    """A process: the member key of its successor has another revision."""

    zone: str
    suffix: str
    create_revision: int
    endpoint: str


class Neighbours:
    """Connections to the next members in the ring of member keys.

    A connection that worked, ended, and is refused or closed when it is opened again, is evidence.
    One that never worked is none: a member is announced before its port serves.

    Args:
        keyspace: mirror of the cluster; :meth:`observe` is to be one of its observers.
        local_id: this member.
        suspect: called with a member and the reason.
        hold: dials an endpoint, and returns when the connection has ended.
    """

    def __init__(
        self,
        keyspace: ProcessKeySpace[Any, Any, Any],
        local_id: pb.ProcessSpec.ID,
        suspect: Callable[[pb.ProcessSpec.ID, object], None],
        *,
        hold: Callable[[str], Awaitable[Input]],
    ) -> None:
        self._keyspace = keyspace
        self._local_id = local_id
        self._suspect = suspect
        self._hold = hold
        self._tasks: dict[_Neighbour, asyncio.Task[None]] = {}
        self._is_running = False

    async def run(self) -> None:
        """Hold the connections, until cancelled."""
        self._is_running = True
        self.observe()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self._is_running = False
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    def observe(self) -> None:
        """Open connections to new neighbours, and end those to members that are none any more."""
        if not self._is_running:
            return
        wanted = self._next_members()
        for neighbour in self._tasks.keys() - wanted:
            self._tasks[neighbour].cancel()
        for neighbour in sorted(wanted - self._tasks.keys()):
            task = asyncio.get_running_loop().create_task(
                self._follow(neighbour), name=f"neighbour {neighbour.zone}/{neighbour.suffix}"
            )
            self._tasks[neighbour] = task
            task.add_done_callback(partial(self._ended, neighbour))

    def _next_members(self) -> set[_Neighbour]:
        local = self._local_id.zone, self._local_id.suffix
        others = sorted(
            _Neighbour(
                member.zone,
                member.suffix,
                member.create_revision,
                member.value.process_spec.endpoint,
            )
            for member in self._keyspace.members()
            if (member.zone, member.suffix) != local
        )
        first = sum(each[:2] < local for each in others)
        return set((others[first:] + others[:first])[:NEIGHBOURS_MAX])

    async def _follow(self, neighbour: _Neighbour) -> None:
        """Hold a connection to a member, and suspect the member if it cannot be opened again."""
        loop = asyncio.get_running_loop()
        peer = pb.ProcessSpec.ID(zone=neighbour.zone, suffix=neighbour.suffix)
        has_worked = False
        while True:
            open_again_at = loop.time() + OPEN_AGAIN_S
            ended = await self._hold(neighbour.endpoint)
            has_worked |= ended is Input.REACHED
            if has_worked and ended in NOTHING_LISTENS:
                self._suspect(peer, "the connection to it ended, and cannot be opened again")
            await asyncio.sleep(open_again_at - loop.time())

    def _ended(self, neighbour: _Neighbour, task: asyncio.Task[None]) -> None:
        del self._tasks[neighbour]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s failed", task.get_name(), exc_info=error)
        if self._is_running:
            self.observe()  # it may be wanted again
