"""Many small appends to many journals: batched, ordered per journal, tried until they succeed.

Client section 4. Per journal there is a chain of appends, of which the newest still takes
writes while the one before is on its way: so at most one RPC per journal is in flight, and what
queues meanwhile becomes the next one. An append may depend on others (of other journals) having
committed first, which is how barriers are built.

    append = await service.start(request)
    append.write(b"content")
    append.release()
    response = await append          # of the whole batch that it became part of
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Generator, Iterable
from types import TracebackType
from typing import Any, Self, TypeAlias

from gazette_sdk.errors import (
    ClosedError,
    ConfigurationError,
    FragmentStoreUnhealthyError,
    GazetteError,
    IndexHasGreaterOffsetError,
    JournalNotFoundError,
    NotAllowedError,
    RegisterMismatchError,
    WrongAppendOffsetError,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.names import strip_meta
from gazette_sdk.transport.append_buffer import AppendBuffer, MemoryBudget
from gazette_sdk.transport.appender import TRANSIENT, append_once, check_opening
from gazette_sdk.transport.backoff import Pause, pause
from gazette_sdk.transport.base import Transport

__all__ = ["AppendService", "AsyncAppend", "Dependency", "DependencyFailedError"]

logger = logging.getLogger(__name__)

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

Dependency: TypeAlias = "asyncio.Future[Any]"
"""What must have succeeded before an append begins; compared by identity."""


class DependencyFailedError(GazetteError):
    """An append was not made, because something it depends on failed."""


class AsyncAppend:
    """One append of a chain, exclusively held from ``start`` to ``release``.

    Await it for the response, which is that of the whole batch.

    Attributes:
        request: what the append asks for.
        future: resolves with the response, or the terminal error. Never cancel it.
        last_error: why the last attempt failed, while it is tried again.
        dependencies: what must have succeeded before it is sent.
        buffer: the content of the batch.
        is_handed_out: whether anybody started to write to it.
        next: the append behind it in its journal's chain.
    """

    def __init__(self, chain: _Chain) -> None:
        self.request = pb.AppendRequest(journal=chain.journal)
        self.dependencies: frozenset[Dependency] = frozenset()
        self.future: asyncio.Future[pb.AppendResponse] = chain.loop.create_future()
        self.future.add_done_callback(_mark_as_seen)
        self.last_error: Exception | None = None
        self.buffer = AppendBuffer(chain.service.budget)
        self.is_handed_out = False
        self.next: AsyncAppend | None = None
        self._chain = chain
        self._required: Exception | None = None

    def __await__(self) -> Generator[Any, None, pb.AppendResponse]:
        return asyncio.shield(self.future).__await__()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Release; an error of the block rolls its writes back."""
        if error is None:
            self.release()
            return
        self._roll_back()

    @property
    def is_done(self) -> bool:
        """Whether it has committed, or failed for good."""
        return self.future.done()

    def write(self, content: bytes | bytearray | memoryview) -> None:
        """Add content. Only between ``start`` and ``release``.

        Raises:
            TypeError: it is not bytes-like; the release will roll back.
        """
        try:
            kept = content if isinstance(content, bytes) else memoryview(content).tobytes()
        except TypeError as error:
            self.require(error)
            raise
        if not self.future.done():
            self.buffer.write(kept)

    def require(self, error: Exception | None) -> Self:
        """Remember the first error: the release raises it, and rolls back."""
        if self._required is None:
            self._required = error
        return self

    def release(self) -> None:
        """End the exclusive hold, and let the writes be appended.

        Raises:
            Exception: the error that was required or that a write raised; what was written
                since ``start`` is rolled back, and others' writes in the batch stay.
        """
        error = self._required
        if error is not None:
            self._roll_back()
            raise error
        self.buffer.checkpoint()
        self._chain.release()

    def _roll_back(self) -> None:
        self._required = None
        self.buffer.roll_back()
        self._chain.release()


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
        self._chains: dict[str, _Chain] = {}
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
            chain = self._chains[request.journal] = _Chain(self, request.journal)
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
        tasks = [chain.worker for chain in self._chains.values() if chain.worker is not None]
        if self._spilling is not None:
            tasks.append(self._spilling)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

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

    def forget(self, chain: _Chain) -> None:
        """A chain has nothing to do any more."""
        if self._chains.get(chain.journal) is chain:
            del self._chains[chain.journal]

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the append service was closed")


class _Chain:
    """The appends of one journal, oldest first, and the task that sees them through."""

    def __init__(self, service: AppendService, journal: str) -> None:
        self.service = service
        self.journal = journal
        self.loop = asyncio.get_running_loop()
        self.worker: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self._starts = 0  # callers that hold the lock, or wait for it
        self._newest = self._oldest = AsyncAppend(self)
        self._failed: AsyncAppend | None = None

    async def hold(self) -> None:
        """Take the journal's lock; the longest waiting first."""
        self._starts += 1
        try:
            await self._lock.acquire()
        except BaseException:
            self._starts -= 1
            raise

    def release(self) -> None:
        """Give the journal's lock back."""
        self._starts -= 1
        self._lock.release()
        self.service.keep_within_memory()

    def join(self, request: pb.AppendRequest, dependencies: frozenset[Dependency]) -> AsyncAppend:
        """The append that takes the next write. The lock is held."""
        if self._failed is not None:
            refused = AsyncAppend(self)
            error = self._failed.future.exception()
            assert error is not None
            refused.future.set_exception(error)
            return refused
        newest = self._newest
        if newest.is_handed_out and not (
            newest.buffer.kept_bytes <= self.service.batch_bytes_max
            and dependencies <= newest.dependencies
            and request == newest.request
        ):
            newest = self._extend()
        if not newest.is_handed_out:
            newest.is_handed_out = True
            newest.request.CopyFrom(request)
            newest.dependencies = dependencies
        if self.worker is None:
            self.worker = asyncio.create_task(self._work())
        return newest

    def pending(self) -> Dependency | None:
        """The future of the newest append that was handed out and did not succeed, if any."""
        if self._failed is not None:
            return self._failed.future
        futures = [append.future for append in self._appends() if append.is_handed_out]
        return futures[-1] if futures else None

    def buffers(self) -> list[AppendBuffer]:
        """Buffers of all appends that have not been sent."""
        return [append.buffer for append in self._appends()]

    def _appends(self) -> Iterable[AsyncAppend]:
        append: AsyncAppend | None = self._oldest
        while append is not None:
            yield append
            append = append.next

    def _extend(self) -> AsyncAppend:
        self._newest.next = AsyncAppend(self)
        self._newest = self._newest.next
        return self._newest

    async def _work(self) -> None:
        try:
            while await self._cut():
                append = self._oldest
                response = await self._see_through(append)
                assert append.next is not None
                self._oldest = append.next
                append.buffer.release()
                append.future.set_result(response)
        except GazetteError as error:
            self._fail(error)
        except Exception as error:
            logger.exception("appending to %s failed", self.journal)
            failure = GazetteError(
                f"{self.journal}: appending failed for a reason nobody thought of: {error!r}; the"
                " log has its traceback",
                journal=self.journal,
            )
            failure.__cause__ = error
            self._fail(failure)
        except asyncio.CancelledError:
            self._fail(self._given_up())
            raise
        finally:
            self.worker = None

    async def _cut(self) -> bool:
        """Let the oldest append take no more writes; false when there is nothing to append."""
        async with self._lock:
            if self._oldest is self._newest:
                if not self._newest.is_handed_out:
                    if not self._starts:
                        self.service.forget(self)
                    return False
                self._extend()
        return True

    async def _see_through(self, append: AsyncAppend) -> pb.AppendResponse:
        """Append once all dependencies succeeded; again and again, until that succeeds."""
        if append.dependencies:
            await asyncio.wait(append.dependencies)
            for dependency in append.dependencies:
                if not _succeeded(dependency):
                    raise self._dependency_failed(dependency)
        attempt = 0
        while True:
            try:
                return await append_once(
                    self.service.transport, append.request, append.buffer.chunks()
                )
            except (GazetteError, OSError) as error:
                if self.service.is_terminal(append.request, error):
                    raise
                append.last_error = error
                if attempt > 0 or not isinstance(error, TRANSIENT):
                    logger.warning("append to %s is tried again: %s", self.journal, error)
            await self.service.pause(attempt)
            attempt += 1

    def _fail(self, error: GazetteError) -> None:
        """Fail what is pending, and from now on everything."""
        self._failed = self._oldest
        for append in self._appends():
            append.future.set_exception(error)
            append.buffer.release()

    def _given_up(self) -> GazetteError:
        for dependency in self._oldest.dependencies:
            if not _succeeded(dependency):
                return self._dependency_failed(dependency)
        return ClosedError(
            "the append service was closed before the append was acknowledged",
            journal=self.journal,
        )

    def _dependency_failed(self, dependency: Dependency) -> DependencyFailedError:
        cause = None
        if dependency.done() and not dependency.cancelled():
            cause = dependency.exception()
        failure = DependencyFailedError(
            f"{self.journal}: not appended, as something it depends on failed: "
            f"{cause or 'it was given up'}",
            journal=self.journal,
        )
        failure.__cause__ = cause
        return failure


def _succeeded(dependency: Dependency) -> bool:
    return dependency.done() and not dependency.cancelled() and dependency.exception() is None


def _mark_as_seen(future: asyncio.Future[Any]) -> None:
    """Not every append is awaited; one that failed is no news then."""
    if not future.cancelled():
        future.exception()
