"""Workload of the simulation: clients that append unique lines, and readers that tail journals."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

from gazette_sdk.errors import STATUS_NAMES, GazetteError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.wire import ANYWHERE, AppendItem, Target
from simulation.checker import Checker, Promise

__all__ = ["Workload", "append_line", "read_all"]

APPEND_TIMEOUT_S = 30.0
"""Bound of one append: a client that hears nothing gives up, and does not know its outcome."""

_RETRY_S = 0.3

_log = logging.getLogger(__name__)


class Workload:
    """Clients of a cluster.

    Args:
        checker: hears of everything they do.
        rng: decides what they do.
        members: returns the suffixes of the cluster's members, as Etcd has them.
    """

    def __init__(
        self, checker: Checker, rng: random.Random, members: Callable[[], frozenset[str]]
    ) -> None:
        self._checker = checker
        self._rng = rng
        self._members = members
        self._number = 0
        self._began = asyncio.Event()
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    def start_writer(self, transport: Transport, journals: list[str], pause_s: float) -> None:
        """Append to journals, one append at a time, with pauses of this mean length."""
        self._tasks.append(asyncio.create_task(self._write(transport, journals, pause_s)))

    def start_reader(self, transport: Transport, journal: str, name: str) -> None:
        """Tail a journal from its beginning."""
        self._tasks.append(asyncio.create_task(self._read(transport, journal, name)))

    async def stop(self) -> None:
        """Stop all clients. Appends under way are given up."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def append(self, transport: Transport, journal: str, target: Target = ANYWHERE) -> str:
        """Append a line. Return an empty string, or the reason why it was not acknowledged."""
        self._number += 1
        filling = "x" * self._rng.choice((0, 10, 60, 300, 900))
        content = f"{journal}:{self._number:06d}:{filling}\n".encode()
        self._checker.began(journal, content)
        self._began.set()
        members = self._members()
        try:
            async with asyncio.timeout(APPEND_TIMEOUT_S):
                response = await append_line(transport, journal, content, target)
        except TimeoutError:
            _log.info("%r: no answer", content[:16])
            return "no answer in time"
        except GazetteError as error:
            _log.info("%r: %s", content[:16], error)
            return str(error)
        if response.status != pb.OK:
            name = STATUS_NAMES[response.status]
            _log.info("%r: %s %s", content[:16], name, response.store_health_error)
            return f"{name} {response.store_health_error}".strip()
        commit = response.commit
        _log.info("%r: acknowledged [%d, %d)", content[:16], commit.begin, commit.end)
        self._checker.succeeded(journal, content, commit.begin, commit.end)
        by = response.header.process_id.suffix
        if by not in members | self._members():
            self._checker.violated(
                Promise.MEMBER, f"{journal}: {by}, which is no member, acknowledged an append"
            )
        return ""

    async def next_append(self) -> None:
        """Wait until the next append is sent."""
        self._began.clear()
        await self._began.wait()

    async def _write(self, transport: Transport, journals: list[str], pause_s: float) -> None:
        while not self._stopping:
            refused = await self.append(transport, self._rng.choice(journals))
            await asyncio.sleep(self._rng.expovariate(1 / (_RETRY_S if refused else pause_s)))

    async def _read(self, transport: Transport, journal: str, name: str) -> None:
        offset = 0
        while not self._stopping:
            request = pb.ReadRequest(journal=journal, offset=offset, block=True)
            try:
                async with aclosing(transport.read(request)) as items:
                    async for item in items:
                        if isinstance(item, bytes):
                            self._checker.read(journal, name, offset, item)
                            offset += len(item)
                        elif item.status == pb.OK and not item.content:
                            offset = item.offset
            except GazetteError as error:
                _log.debug("reader of %s: %s", journal, error)
            await asyncio.sleep(_RETRY_S)


async def append_line(
    transport: Transport, journal: str, content: bytes, target: Target = ANYWHERE
) -> pb.AppendResponse:
    """Append content, once."""

    async def items() -> AsyncIterator[AppendItem]:
        yield pb.AppendRequest(journal=journal)
        yield content
        yield pb.AppendRequest()

    return await transport.append(items(), target)


async def read_all(transport: Transport, journal: str, target: Target, end: int) -> bytes:
    """Return a journal's content up to an offset, as one broker serves it itself."""
    request = pb.ReadRequest(journal=journal, offset=0, block=True, do_not_proxy=False)
    request.end_offset = end
    parts: list[bytes] = []
    async with aclosing(transport.read(request, target)) as items:
        async for item in items:
            if isinstance(item, bytes):
                parts.append(item)
            elif item.status != pb.OK:
                raise GazetteError(STATUS_NAMES[item.status])
    return b"".join(parts)
