"""Many small appends to many journals: batched, ordered per journal, tried until they succeed.

Client section 4. Per journal there is a chain of appends, of which the newest takes writes until
it is sent. Where the transport has lanes (`lane`), it is sent at once, unless several are in
flight already: then what queues meanwhile becomes the next one. Elsewhere one is in flight at a
time; so is one with preconditions. An append may depend on others (of other journals) having
committed first, which is how barriers are built.

    append = await service.start(request)
    append.write(b"content")
    append.release()
    response = await append          # of the whole batch that it became part of
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from gazette_sdk.errors import (
    ClosedError,
    ConfigurationError,
    FragmentStoreUnhealthyError,
    IndexHasGreaterOffsetError,
    JournalNotFoundError,
    NotAllowedError,
    RegisterMismatchError,
    WrongAppendOffsetError,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.names import strip_meta
from gazette_sdk.transport.append.append_buffer import MemoryBudget
from gazette_sdk.transport.append.append_chain import Chain
from gazette_sdk.transport.append.appender import check_opening
from gazette_sdk.transport.append.async_append import AsyncAppend, Dependency, DependencyFailedError
from gazette_sdk.transport.backoff import Pause, pause
from gazette_sdk.transport.base import Transport

__all__ = ["AppendService", "AsyncAppend", "Dependency", "DependencyFailedError"]

BATCH_BYTES_MAX = 64 << 20
"""A batch that is larger takes no further appends: a retry sends all of it again."""

MEMORY_BYTES_MAX = 256 << 20
"""Content in memory of all journals together; more than that waits on disk."""

_GIVEN_UP = (ClosedError, ConfigurationError)
"""The transport will not carry any call any more."""

_TERMINAL = (
    FragmentStoreUnhealthyError,
    IndexHasGreaterOffsetError,
    JournalNotFoundError,
    NotAllowedError,
    RegisterMismatchError,
    WrongAppendOffsetError,
    *_GIVEN_UP,
)
"""Failures which another attempt would not mend. They stick to the journal."""


class AppendService:
    """Starts appends, batches them, and sees them through. Belongs to one event loop.

    Args:
        transport: how to reach journals.
        batch_bytes_max: a batch beyond this takes no further appends.
        memory_bytes_max: bound of buffered content in memory, for all journals together.
        retry_checked_registers: try on, too, where an append that checks registers is refused
            with a status that otherwise is terminal.
        pause: waits between attempts.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        batch_bytes_max: int = BATCH_BYTES_MAX,
        memory_bytes_max: int = MEMORY_BYTES_MAX,
        retry_checked_registers: bool = False,
        pause: Pause = pause,
    ) -> None:
        self.transport = transport
        self.budget = MemoryBudget(memory_bytes_max, pause)
        self.pause = pause
        self.batch_bytes_max = batch_bytes_max
        self._retry_checked_registers = retry_checked_registers
        self._chains: dict[str, Chain] = {}
        self._spilling: asyncio.Task[None] | None = None
        self._is_closed = False

    async def start(
        self, request: pb.AppendRequest, dependencies: Collection[Dependency] = ()
    ) -> AsyncAppend:
        """Hold the journal's newest append, or a new one, to write to it.

        Starts of one journal are served in order. After a terminal error of the journal, the
        append that is returned has failed already.

        Args:
            request: names the journal, and preconditions. Appends with different requests, or
                with dependencies the batch doesn't have, never share a batch.
            dependencies: futures that must have succeeded before it is sent.

        Raises:
            ValidationError: the request is malformed.
            ClosedError: the service was closed.
        """
        chain = self._chains.get(request.journal)
        if chain is None or request != chain.plain:  # which was found valid
            check_opening(request)
            if request.journal != strip_meta(request.journal):
                stripped = pb.AppendRequest()
                stripped.CopyFrom(request)
                stripped.journal = strip_meta(request.journal)
                request = stripped
        await self.budget.room()
        self._check_open()
        chain = self._chains.get(request.journal)
        if chain is None:
            chain = self._chains[request.journal] = Chain(self, request.journal)
        await chain.hold()
        if self._is_closed:
            chain.release()
            self._check_open()
        return chain.join(request, frozenset(dependencies))

    async def append(
        self,
        request: pb.AppendRequest,
        content: bytes,
        dependencies: Collection[Dependency] = (),
    ) -> AsyncAppend:
        """Start an append, write ``content`` to it and release it."""
        append = await self.start(request, dependencies)
        with append:
            append.write(content)
        return append

    def pending_except(self, journal: str) -> set[Dependency]:
        """What is pending for every journal but one, to depend on.

        Args:
            journal: the one to leave out; empty for none.

        Returns:
            The future of the newest append of each journal, and a failed one of each journal
            that failed for good.
        """
        pending: set[Dependency] = set()
        for name, chain in self._chains.items():
            if name != journal and (future := chain.pending()) is not None:
                pending.add(future)
        return pending

    async def flush(self) -> None:
        """Wait until all that is pending has committed.

        Raises:
            GazetteError: the first failure.
        """
        await asyncio.gather(*(asyncio.shield(future) for future in self.pending_except("")))

    async def aclose(self) -> None:
        """Give up what is pending; :meth:`flush` first to see it through."""
        self._is_closed = True
        chains = list(self._chains.values())
        tasks = [chain.worker for chain in chains if chain.worker is not None]
        if self._spilling is not None:
            tasks.append(self._spilling)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for chain in chains:
            chain.give_up()

    # ---------------------------------------------------------- of its chains

    def is_terminal(self, request: pb.AppendRequest, error: Exception) -> bool:
        """Whether an error ends the journal's appends for good."""
        if self._retry_checked_registers and request.HasField("check_registers"):
            return isinstance(error, _GIVEN_UP)
        return isinstance(error, _TERMINAL)

    def keep_within_memory(self) -> None:
        """Begin to move content to files, when much of it lies in memory."""
        if self.budget.is_short and (self._spilling is None or self._spilling.done()):
            buffers = [buffer for chain in self._chains.values() for buffer in chain.buffers()]
            self._spilling = asyncio.create_task(self.budget.spill(buffers))

    def forget(self, chain: Chain) -> None:
        """A chain has nothing to do any more."""
        if self._chains.get(chain.journal) is chain:
            del self._chains[chain.journal]

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the append service was closed")
