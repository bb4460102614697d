"""The appends of one journal, from their start until they are acknowledged, in their order.

A chain is a list: first the appends in flight, then those which wait for their turn, at its end
the one that takes writes. A task, the worker, begins appends for as long as there is something
to begin; answers are taken by callbacks of the event loop. The first failure stops both: when all
that was in flight has ended, the worker begins again with the append that failed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from functools import partial
from typing import Protocol

from gazette_sdk.errors import ClosedError, GazetteError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport import metrics
from gazette_sdk.transport.append.append_buffer import AppendBuffer, MemoryBudget
from gazette_sdk.transport.append.appender import (
    TRANSIENT,
    append_once,
    append_pieces,
    status_error,
)
from gazette_sdk.transport.append.async_append import AsyncAppend, Dependency, DependencyFailedError
from gazette_sdk.transport.backoff import Pause
from gazette_sdk.transport.base import Transport

__all__ = ["IN_FLIGHT_BYTES_MAX", "IN_FLIGHT_MAX", "Chain"]

logger = logging.getLogger(__name__)

IN_FLIGHT_MAX = 8
"""Appends of a journal in flight; what queues behind them becomes one."""

IN_FLIGHT_BYTES_MAX = 16 << 20
"""Content in flight behind which no further append is begun."""


class Service(Protocol):
    """Whom a chain belongs to."""

    transport: Transport
    budget: MemoryBudget
    pause: Pause
    batch_bytes_max: int

    def is_terminal(self, request: pb.AppendRequest, error: Exception) -> bool:
        """Whether an error ends the journal's appends for good."""

    def keep_within_memory(self) -> None:
        """Begin to move content to files, when much of it lies in memory."""

    def forget(self, chain: Chain) -> None:
        """A chain has nothing to do any more."""


class Chain:
    """The appends of one journal, oldest first.

    Args:
        service: it belongs to.
        journal: its name, without metadata.

    Attributes:
        plain: the request of an append without preconditions.
        worker: begins appends, while there are any to begin.
    """

    def __init__(self, service: Service, journal: str) -> None:
        self.service = service
        self.budget = service.budget
        self.journal = journal
        self.plain = pb.AppendRequest(journal=journal)
        self.loop = asyncio.get_running_loop()
        self.worker: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self._starts = 0  # callers that hold the lock, or wait for it
        self._newest = self._next = self._oldest = AsyncAppend(self)  # next: the first not begun
        self._failed: AsyncAppend | None = None
        self._lane = service.transport.lane(self.plain)
        self._flying = 0
        self._flying_bytes = 0
        self._trouble: Exception | None = None  # of the oldest append; what is behind didn't run
        self._attempt = 0
        self._stirred: asyncio.Future[None] | None = None

    # ---------------------------------------------------------------- its start

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
        self._stir()  # the worker comes before the next who starts
        self._lock.release()
        if self._newest.is_handed_out and self._failed is None:
            self._see_to_it()
        self.service.keep_within_memory()

    def join(self, request: pb.AppendRequest, dependencies: frozenset[Dependency]) -> AsyncAppend:
        """The append that takes the next write. The lock is held."""
        if self._failed is not None:
            refused = AsyncAppend(self)
            error = self._failed.future.exception()
            assert error is not None
            refused.settle(error if isinstance(error, Exception) else GazetteError(f"{error!r}"))
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
            if request != self.plain:
                newest.request.CopyFrom(request)
            newest.dependencies = dependencies
        return newest

    def pending(self) -> Dependency | None:
        """The future of the newest append that was handed out and did not succeed, if any."""
        if self._failed is not None:
            return self._failed.future
        futures = [append.future for append in self._appends() if append.is_handed_out]
        return futures[-1] if futures else None

    def buffers(self) -> list[AppendBuffer]:
        """Buffers of all appends that have not been acknowledged."""
        return [append.buffer for append in self._appends()]

    def give_up(self) -> None:
        """Fail what is pending, when the worker has ended."""
        assert self.worker is None or self.worker.done()
        if self._failed is None:
            self._fail(self._given_up())

    def _appends(self) -> Iterable[AsyncAppend]:
        append: AsyncAppend | None = self._oldest
        while append is not None:
            yield append
            append = append.next

    def _extend(self) -> AsyncAppend:
        self._newest.next = AsyncAppend(self)
        self._newest = self._newest.next
        return self._newest

    # --------------------------------------------------------------- its worker

    def _see_to_it(self) -> None:
        if self.worker is None:
            self.worker = self.loop.create_task(self._work())

    def _stir(self) -> None:
        """Let the worker look again."""
        if self._stirred is not None and not self._stirred.done():
            self._stirred.set_result(None)

    async def _stirring(self) -> None:
        """Wait for an answer, or for the end of a hold."""
        self._stirred = self.loop.create_future()
        try:
            await self._stirred
        finally:
            self._stirred = None

    async def _work(self) -> None:
        try:
            while await self._cut():
                if self._trouble is not None:
                    await self._recover(self._trouble)
                elif not await self._begin(self._next):
                    if self._flying:
                        await self._stirring()
                    else:
                        append = self._next
                        response = await self._see_through(append)
                        self._next = _behind(append)
                        self._committed(append, response)
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
        finally:
            self.worker = None
            self._forget_if_idle()

    async def _cut(self) -> bool:
        """Let the next append take no more writes; false when there is nothing to do."""
        while self._trouble is None and self._next is self._newest:
            if not self._newest.is_handed_out:
                return False
            if not self._lock.locked():
                self._extend()
            else:
                await self._stirring()
        return True

    async def _begin(self, append: AsyncAppend) -> bool:
        """Send an append behind those in flight, if it may be."""
        lane = self._lane
        if lane is None or append.dependencies or append.request != self.plain:
            return False
        size = append.buffer.kept_bytes
        if self._flying and (
            self._flying >= IN_FLIGHT_MAX or self._flying_bytes + size > IN_FLIGHT_BYTES_MAX
        ):
            return False
        self._next = _behind(append)
        self._flying += 1
        self._flying_bytes += size
        content = append.buffer.whole()
        try:
            begun = await lane.begin(
                append.buffer.chunks() if content is None else content,
                partial(self._answered, append, size),
            )
        except (GazetteError, OSError) as error:
            self._flown(size)
            self._next = append
            while self._flying:
                await self._stirring()
            # Those before it may have failed, too.
            await self._recover(self._trouble or error)
            return True
        except BaseException:
            self._flown(size)
            raise
        if begun:
            metrics.count_appended(self.journal, size)
        else:
            self._flown(size)
            self._next = append
        return begun

    def _answered(
        self, append: AsyncAppend, size: int, result: pb.AppendResponse | Exception
    ) -> None:
        """An append in flight has ended. A callback of the event loop."""
        self._flown(size)
        if self._trouble is None:
            if isinstance(result, Exception):
                self._trouble = result
            elif result.status != pb.OK:
                self._trouble = status_error(append.request, result)
            else:
                self._committed(append, result)
        self._stir()
        if self._trouble is not None:
            self._see_to_it()
        else:
            self._forget_if_idle()

    def _flown(self, size: int) -> None:
        self._flying -= 1
        self._flying_bytes -= size

    def _committed(self, append: AsyncAppend, response: pb.AppendResponse) -> None:
        assert append is self._oldest
        self._oldest = _behind(append)
        self._attempt = 0
        append.settle(response)

    async def _recover(self, error: Exception) -> None:
        """Begin again with the oldest append, when nothing is in flight any more.

        Raises:
            Exception: another attempt would not mend it.
        """
        while self._flying:
            await self._stirring()
        self._trouble = None
        self._next = self._oldest
        await self._weigh(self._oldest, error, self._attempt)
        self._attempt += 1

    async def _see_through(self, append: AsyncAppend) -> pb.AppendResponse:
        """Append once all dependencies succeeded; again and again, until that succeeds."""
        if append.dependencies:
            await asyncio.wait(append.dependencies)
            for dependency in append.dependencies:
                if not _succeeded(dependency):
                    raise self._dependency_failed(dependency)
        transport, attempt = self.service.transport, 0
        while True:
            content = append.buffer.whole()
            try:
                if content is None:
                    return await append_once(transport, append.request, append.buffer.chunks())
                return await append_pieces(transport, append.request, content)
            except (GazetteError, OSError) as error:
                await self._weigh(append, error, attempt)
            attempt += 1

    async def _weigh(self, append: AsyncAppend, error: Exception, attempt: int) -> None:
        """Wait before the next attempt, if there is to be one.

        Raises:
            Exception: the same, where there is none.
        """
        is_known = isinstance(error, GazetteError | OSError)
        if not is_known or self.service.is_terminal(append.request, error):
            raise error
        append.last_error = error
        if attempt > 0 or not isinstance(error, TRANSIENT):
            logger.warning("append to %s is tried again: %s", self.journal, error)
        await self.service.pause(attempt)

    # ------------------------------------------------------------------ its end

    @property
    def _is_idle(self) -> bool:
        busy = self._starts or self._flying or self.worker or self._newest.is_handed_out
        return not busy and self._failed is None

    def _forget_if_idle(self) -> None:
        """Let the service forget it, unless whoever waits appends again at once."""
        if self._is_idle:
            self.loop.call_soon(self._forget)

    def _forget(self) -> None:
        if self._is_idle:
            self.service.forget(self)

    def _fail(self, error: GazetteError) -> None:
        """Fail what is pending, and from now on everything."""
        if self._flying and self._lane is not None:
            self._lane.give_up()
        self._failed = self._oldest
        for append in self._appends():
            append.settle(error)

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


def _behind(append: AsyncAppend) -> AsyncAppend:
    assert append.next is not None, "it was cut"
    return append.next


def _succeeded(dependency: Dependency) -> bool:
    return dependency.done() and not dependency.cancelled() and dependency.exception() is None
