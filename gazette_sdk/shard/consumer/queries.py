"""Queries of a process' shards: threads of their own, bounds, and the interruption of those left.

A query never takes a thread that shards consume on. A peer, and all peers together, have a bounded
number of queries in progress; one more is refused at once. A query whose caller leaves, or whose
time is over, is interrupted: its store is made to give up what it computes, as SQLite can, and its
thread gets an exception between two steps of Python code. It keeps its place until it has returned.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

from gazette_sdk.errors import CallCancelledError, CallError
from gazette_sdk.server.call import Call
from gazette_sdk.server.listener import PeerLimits
from gazette_sdk.shard.workers import on_worker
from gazette_sdk.user_code import contained

__all__ = ["QUERIES_MAX", "QUERIES_OF_PEER_MAX", "Queries", "view_of"]

T = TypeVar("T")

QUERIES_MAX = 64
"""Queries in progress in a process, and threads for those of ``def`` functions."""

QUERIES_OF_PEER_MAX = 16
"""Queries in progress of one client, at the process that it asked."""


class Queries:
    """Queries in progress in a process.

    Args:
        count_max: bound of all.
        of_peer_max: bound of those of one IP address.
    """

    def __init__(
        self, *, count_max: int = QUERIES_MAX, of_peer_max: int = QUERIES_OF_PEER_MAX
    ) -> None:
        self._count_max = count_max
        self._count = 0
        self._peers = PeerLimits(
            calls_max=of_peer_max, calls_remedy="or ask other processes of the application"
        )
        self._threads = ThreadPoolExecutor(count_max, thread_name_prefix="query")

    @contextlib.contextmanager
    def counted(self, call: Call) -> Iterator[None]:
        """Count a query while the context is open.

        One that another process forwards was counted for its peer there.

        Raises:
            CallError: RESOURCE_EXHAUSTED: too many are in progress.
        """
        if self._count >= self._count_max:
            raise CallError(
                f"{self._count_max} queries are in progress in this process already; try again"
                " later, or start more processes",
                code="RESOURCE_EXHAUSTED",
            )
        with self._peers.calling("" if call.proxy_header is not None else call.peer):
            self._count += 1
            try:
                yield
            finally:
                self._count -= 1

    async def run(self, function: Callable[..., T], *arguments: object) -> T:
        """Call a function of a request on a thread, until it returns or is interrupted."""
        return await self._run(_Running(function, arguments, None))

    async def run_over(
        self, store: object, function: Callable[..., T], *arguments: object, **named: object
    ) -> T:
        """Call a function of a view of a store, as :meth:`run`.

        Args:
            store: the store, which must stay open until this has ended.
            function: called with the view.
            arguments: its further arguments.
            named: those by name.
        """
        return await self._run(_Running(function, arguments, store, named))

    async def _run(self, running: _Running[T]) -> T:
        return await on_worker(self._threads, running, on_cancelled=running.interrupt)

    def shut_down(self) -> None:
        """Start no further query. Those in progress are interrupted with their calls."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class _InterruptedQueryError(BaseException):
    """Interruption of a query: no failure that its function is to handle."""


class _Running(Generic[T]):
    """Call of one query's function, on a thread of its own.

    Args:
        function: called with the view of the store, if there is one, and the arguments.
        arguments: arguments of the function.
        store: its store; None of a function that is about no shard.
        named: arguments by name.
    """

    def __init__(
        self,
        function: Callable[..., T],
        arguments: Sequence[object],
        store: object,
        named: Mapping[str, object] | None = None,
    ) -> None:
        self._function = function
        self._arguments = arguments
        self._store = store
        self._named = named or {}
        self._lock = threading.Lock()  # held where the fields below change
        self._thread = 0
        self._view: Any = None
        self._is_interrupted = False

    def __call__(self) -> T:
        """Call the function.

        Raises:
            CallCancelledError: it was interrupted.
            Exception: whatever the function raises.
        """
        try:
            with contextlib.nullcontext() if self._store is None else view_of(self._store) as view:
                self._begin(view)
                try:
                    first = () if self._store is None else (view,)
                    return contained(self._function, *first, *self._arguments, **self._named)
                finally:
                    self._end()
        except _InterruptedQueryError as error:
            self._end()  # it may have come within the first call
            raise CallCancelledError("the query was interrupted: its caller has left") from error

    def interrupt(self) -> None:
        """Interrupt the function, from another thread. Repeated while it runs.

        A statement of SQLite that only begins now would miss the first call, for example.
        """
        with self._lock:
            self._is_interrupted = True
            if not self._thread:
                return
            interrupt = getattr(self._view, "interrupt", None)
            if interrupt is not None:
                interrupt()
            _raise_in(self._thread, _InterruptedQueryError)

    def _begin(self, view: object) -> None:
        with self._lock:
            if self._is_interrupted:
                raise _InterruptedQueryError
            self._thread = threading.get_ident()
            self._view = view

    def _end(self) -> None:
        """Note that the function has returned: from now on its thread is not interrupted."""
        with self._lock:
            thread, self._thread, self._view = self._thread, 0, None
        if self._is_interrupted:
            _raise_in(thread, None)  # what was not raised yet


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raise an exception in a thread between two steps of its code; None takes it back."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), None if error is None else ctypes.py_object(error)
    )


def view_of(store: Any) -> AbstractContextManager[Any]:
    """Return a view of what the store has committed; the store itself if it has no such view."""
    committed = getattr(store, "committed", None)
    if committed is None:
        return nullcontext(store)
    view: AbstractContextManager[Any] = contained(committed)
    return view
