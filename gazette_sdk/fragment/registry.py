"""Registry of a process's fragment stores, one for each URL (broker section 15)."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from gazette_sdk.errors import ClosedError, FragmentNotFoundError, StoreError, ValidationError
from gazette_sdk.fragment.health import StoreHealth
from gazette_sdk.fragment.stores import Store, open_store
from gazette_sdk.fragment.stores.base import STORE_ACTIVE, remove_store
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import content_path

T = TypeVar("T")

TEMPORARY_CHECKS_MAX = 4
"""Greatest number of stores that are checked at a time without being in use."""


GROUP_S = 0.02
"""Time for which calls of one turn of the loop share a thread. Each gets one of its own then."""


class _Group:
    """Short calls of one store, made in one turn of the loop. They run in one thread, in order.

    A change of threads costs more than a listing of a small directory. Calls that wait behind a
    slow one are given to other threads.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[tuple[asyncio.Future[Any], Callable[[], Any]]] = deque()
        self._ended: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()

    def add(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Add a call before the group starts."""
        ended: asyncio.Future[T] = self._loop.create_future()
        self._calls.append((ended, call))
        return ended

    def start(self) -> None:
        """Run the calls."""
        if len(self._calls) > 1:
            self._loop.call_later(GROUP_S, self._spread)
        self._loop.run_in_executor(None, self._run)

    def _spread(self) -> None:
        for _ in range(len(self._calls)):
            self._loop.run_in_executor(None, self._run)
        self._report()

    def _run(self) -> None:
        """Run calls until none is left. In a thread."""
        while self._calls:
            try:
                future, call = self._calls.popleft()
            except IndexError:  # another thread took it
                break
            try:
                self._ended.append((future, call(), None))
            except Exception as error:  # noqa: BLE001 - the caller's
                self._ended.append((future, None, error))
        with suppress(RuntimeError):  # the loop is closed: no one waits
            self._loop.call_soon_threadsafe(self._report)

    def _report(self) -> None:
        while self._ended:
            future, found, error = self._ended.popleft()
            if future.done():
                continue
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(found)


class StoreRegistry:
    """Stores by URL, opened at the first use and closed when not used for an hour or two.

    Get a store by its URL at each use, and do not keep it: a store that was closed, or could not
    be opened before, is opened again.

    Args:
        file_root: directory below which ``file`` stores lie.
        file_only: True to keep every store below ``file_root``, independent of its URL.
        opener: opens the store of a URL; by default :func:`~.stores.open_store`.

    Attributes:
        on_health: called when the health of a store that is in use has changed, with its URL and
            the reason why it is not healthy; None if it is healthy again.
    """

    def __init__(
        self,
        file_root: Path | None = None,
        file_only: bool = False,  # noqa: FBT001, FBT002 - the flag of that name
        *,
        opener: Callable[[str], Store] | None = None,
    ) -> None:
        self._opener = opener or (
            lambda url: open_store(url, file_root=file_root, file_only=file_only)
        )
        self.on_health: Callable[[str, str | None], None] = lambda _url, _error: None
        self._lock = threading.Lock()
        self._opening: dict[str, threading.Lock] = {}
        self._stores: dict[str, Store] = {}
        self._health: dict[str, StoreHealth] = {}
        self._used: set[str] = set()  # URLs used since the last sweep
        self._temporary = asyncio.Semaphore(TEMPORARY_CHECKS_MAX)
        self._ending: set[asyncio.Task[None]] = set()
        self._groups: dict[str, _Group] = {}  # calls of this turn of the loop
        self._closed = False

    def get(self, url: str) -> Store:
        """Return the store of a URL; the same one as long as it is in use.

        The first use of a URL blocks for imports: on an event loop use :meth:`aget`.

        Raises:
            StoreError: it cannot be opened. The next use tries again.
            ClosedError: the registry is closed.
        """
        self._used.add(url)
        return self._obtain(url)

    async def aget(self, url: str) -> Store:
        """Return the store of a URL, opened in a thread when it is not open yet."""
        if url in self._stores:
            return self.get(url)
        return await asyncio.to_thread(self.get, url)

    async def in_thread(self, url: str, call: Callable[[], T]) -> T:
        """Run a call of a store in a thread, and return its result.

        Calls of many journals that are made in one turn of the loop share a thread while they are
        short.

        Args:
            url: of the store.
            call: it may block.
        """
        group = self._groups.get(url)
        if group is None:
            loop = asyncio.get_running_loop()
            group = self._groups[url] = _Group(loop)
            loop.call_soon(self._start, url)
        return await group.add(call)

    def _start(self, url: str) -> None:
        self._groups.pop(url).start()

    async def remove(self, fragment: pb.Fragment) -> bool:
        """Remove a fragment from the store that it names. Return False if it is not there.

        Raises:
            StoreError: the store refuses it, or cannot be opened.
            OSError: likewise.
        """
        store = await self.aget(fragment.backing_store)
        try:
            await asyncio.to_thread(store.remove, content_path(fragment))
        except FragmentNotFoundError:
            return False
        return True

    def health(self, url: str) -> StoreHealth:
        """Return the health of a URL's store. The first use, on the loop, begins to check it."""
        self._ensure_open()
        self._used.add(url)
        if url not in self._health:
            # Checks do not count as a use of the store.
            self._health[url] = StoreHealth(
                url,
                lambda: self._obtain(url),
                on_change=self._report_health,
            )
        return self._health[url]

    def healths(self) -> Sequence[StoreHealth]:
        """Return the healths of all stores that are checked."""
        return list(self._health.values())

    @asynccontextmanager
    async def temporary_health(self, url: str) -> AsyncIterator[StoreHealth]:
        """Check a store that is not in use, for as long as the context is open.

        Nothing of it remains. Only few such checks run at a time; others wait.
        """
        await self._temporary.acquire()
        stores: list[Store] = []

        def obtain() -> Store:
            if not stores:
                stores.append(self._open(url))
            return stores[0]

        try:
            self._ensure_open()
            health = StoreHealth(url, obtain)
        except BaseException:
            self._temporary.release()
            raise
        try:
            yield health
        finally:
            # A check that hangs keeps its place until its time limit: threads stay bounded.
            ending = asyncio.get_running_loop().create_task(self._end_temporary(health, stores))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    async def _end_temporary(self, health: StoreHealth, stores: list[Store]) -> None:
        try:
            await health.aclose()
            await health.ended()
            for store in stores:
                await asyncio.to_thread(store.close)
        finally:
            if health.url not in self._stores:
                remove_store(health.url)
            self._temporary.release()

    async def sweep(self) -> None:
        """Close stores that were not used since the last sweep. Servers call it hourly."""
        with self._lock:
            idle = (self._stores.keys() | self._health.keys()) - self._used
            self._used.clear()
            dropped = [self._stores.pop(url) for url in idle if url in self._stores]
        unwatched = [self._health.pop(url) for url in idle if url in self._health]
        await self._release(dropped, unwatched)

    async def aclose(self) -> None:
        """Stop all checks, and close all stores."""
        with self._lock:
            self._closed = True
            dropped = list(self._stores.values())
            self._stores.clear()
        unwatched = list(self._health.values())
        self._health.clear()
        await self._release(dropped, unwatched)
        for ending in tuple(self._ending):
            ending.cancel()
        await asyncio.gather(*self._ending, return_exceptions=True)

    # -------------------------------------------------------------- inside

    def _report_health(self, url: str, error: str | None) -> None:
        self.on_health(url, error)

    def _obtain(self, url: str) -> Store:
        """Return the store of a URL, opened when it is not open yet."""
        with self._lock:
            self._ensure_open()
            if store := self._stores.get(url):
                return store
            opening = self._opening.setdefault(url, threading.Lock())
        with opening:  # not the registry's lock: uses of other stores do not wait
            with self._lock:
                if store := self._stores.get(url):
                    return store
            store = self._open(url)
            with self._lock:
                self._opening.pop(url, None)
                if self._closed:
                    store.close()
                self._ensure_open()
                self._stores[url] = store
                STORE_ACTIVE.inc()
                return store

    def _ensure_open(self) -> None:
        if self._closed:
            raise ClosedError("the registry of fragment stores is closed: make another one")

    def _open(self, url: str) -> Store:
        try:
            return self._opener(url)
        except ValidationError as error:
            raise StoreError(f"fragment store {url!r}: {error}", store=url) from error

    @staticmethod
    async def _release(stores: list[Store], unwatched: list[StoreHealth]) -> None:
        await asyncio.gather(*(health.aclose() for health in unwatched))
        for store in stores:
            STORE_ACTIVE.dec()
            await asyncio.to_thread(store.close)
