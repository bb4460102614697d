"""Recovery log of a primary: appends that only the log's current author may make.

The register ``author`` of the journal names who recovered the log last. Each append checks it.
When another process has recovered the log, no append of this one can commit any more.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Sequence
from functools import partial
from typing import Protocol

from gazette_sdk.errors import FencedError, RegisterMismatchError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.labels import label_set
from gazette_sdk.shard.recovery.operation import AUTHOR_REGISTER, fence_of
from gazette_sdk.transport.append.queue import AnyFuture, PendingAppend

__all__ = ["LogAppender", "RecoveryLog"]


class LogAppender(Protocol):
    """Appender of the log's journal: strictly in order, sticky failures."""

    def append(
        self,
        content: bytes,
        *,
        after: Collection[AnyFuture] = (),
        check: pb.LabelSelector | None = None,
        union: pb.LabelSet | None = None,
    ) -> PendingAppend:
        """Queue an append. See :meth:`gazette_sdk.transport.append.appender.JournalAppender`."""


class RecoveryLog:
    """Log of one primary's run. On the event loop.

    Args:
        appender: of the log's journal, and of this run alone.
        log: name of the journal.
        author: number of the recorder, which has taken over the log.

    Attributes:
        failure: error after which nothing is appended any more; None while there is none.
    """

    def __init__(self, appender: LogAppender, log: str, author: int) -> None:
        fence = label_set(**{AUTHOR_REGISTER: fence_of(author)})
        self._appender = appender
        self._log = log
        self._check = pb.LabelSelector(include=fence)
        self._union = fence
        self._loop = asyncio.get_running_loop()
        self.failure: BaseException | None = None

    def append(
        self, contents: Sequence[bytes], *, after: Collection[AnyFuture] = ()
    ) -> asyncio.Future[int]:
        """Queue appends.

        Args:
            contents: of appends, in order. Without any, an empty append checks the author.
            after: futures that must succeed before the first is sent.

        Returns:
            Future of the offset behind the last append, once all are committed. Its error is a
            :class:`~gazette_sdk.errors.FencedError` if another author has taken over the log.
        """
        pending: PendingAppend | None = None
        for content in contents or (b"",):
            pending = self._appender.append(content, after=after, check=self._check)
        assert pending is not None
        return self._end_of(pending)

    def take_over(
        self, opening: bytes, *, after: Collection[AnyFuture] = ()
    ) -> asyncio.Future[int]:
        """Queue the append that opens a log, and makes this recorder its author.

        Args:
            opening: of the recorder; not empty, as only then registers change.
            after: futures that must succeed before it is sent.
        """
        assert opening, "an empty append changes no registers"
        return self._end_of(self._appender.append(opening, after=after, union=self._union))

    def _end_of(self, pending: PendingAppend) -> asyncio.Future[int]:
        """Return a future of the end of an append, on the event loop."""
        found: asyncio.Future[int] = self._loop.create_future()
        pending.add_done_callback(partial(self._ended, found))
        return found

    def _ended(self, found: asyncio.Future[int], pending: PendingAppend) -> None:
        """Have the future end on the event loop. Any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it who waits
            self._loop.call_soon_threadsafe(self._settle, found, pending)

    def _settle(self, found: asyncio.Future[int], pending: PendingAppend) -> None:
        error = pending.exception()
        if isinstance(error, RegisterMismatchError):
            fenced = FencedError(
                f"another process has taken over {self._log}: {error}", journal=self._log
            )
            fenced.__cause__ = error
            error = fenced
        if error is not None:
            self.failure = self.failure or error
        if found.done():  # cancelled by who waited
            return
        if error is None:
            found.set_result(pending.result().commit.end)
        else:
            found.set_exception(error)
            found.exception()  # `failure` keeps it: a shard that stops need not look at each
