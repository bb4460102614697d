"""Registry of a process's fragment stores, one for each URL, and their health (broker section 15).

A check performs all operations that brokers need: put, get, list, sign, and fetch of the signed
URL. One :class:`StoreHealth` repeats the check for a store: every half hour while it is healthy,
and with growing pauses while it fails. While an append needs a failing store, it is checked every
two seconds: a broker detects within five seconds that a store is lost, and within five that it is
back.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import logging
import random
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar
from urllib.parse import urlsplit

from gazette_sdk.errors import (
    ClosedError,
    FragmentNotFoundError,
    GazetteError,
    StoreError,
    ValidationError,
)
from gazette_sdk.fragment.content import open_without_redirects
from gazette_sdk.fragment.stores import Store, open_store
from gazette_sdk.fragment.stores.base import (
    STORE_ACTIVE,
    STORE_HEALTH_CHECKS,
    describe,
    remove_store,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import content_path

T = TypeVar("T")

_log = logging.getLogger(__name__)

TEMPORARY_CHECKS_MAX = 4
"""Greatest number of stores that are checked at a time without being in use."""


GROUP_S = 0.02
"""Time for which calls of one turn of the loop share a thread. Each gets one of its own then."""


class _Group:
    """Short calls of one store, made in one turn of the loop. They run in one thread, in order.

    A change of threads costs more than a listing of a small directory. Calls that wait for a slow
    one are given to other threads.
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


CHECK_PENDING: Final = "first check pending"
"""Error of a store until its first check has ended."""

CHECK_TIMEOUT_S: Final = 60.0
"""Longest time of one check."""

HEALTHY_INTERVAL_S: Final = 30 * 60.0
"""Pause after a check that succeeded."""

FAILING_TIMEOUT_S: Final = 3.0
"""A check of a store that is not healthy counts as failed when it has not ended after this.

It runs on. If it succeeds late, the store is healthy, but slow.
"""

URGENT_INTERVAL_S: Final = 2.0
"""Pause after a failed check while :meth:`StoreHealth.request_soon` holds."""

URGENT_FOR_S: Final = 15.0
"""Time for which :meth:`StoreHealth.request_soon` holds."""

QUICK_CHECK_INTERVAL_S: Final = 1.0
"""Pause between quick checks of a healthy store while :meth:`StoreHealth.request_soon` holds.

A quick check only tests that the probe's object exists: it costs a store little, and detects a lost
one long before the next check is due.
"""

QUICK_CHECK_TIMEOUT_S: Final = 1.0
"""A quick check without an answer after this has failed; a check follows."""

_OVERLAPPING_CHECKS_MAX: Final = 4
"""Greatest number of checks at a time: later ones detect that a store is back while others hang."""

_PROBE_PATH: Final = ".test/health-check"
_PROBE_CONTENT: Final = b"health-check\n"
_PROBE_TTL_S: Final = 300.0
_FETCH_TIMEOUT_S: Final = 10.0
_CLOSE_TIMEOUT_S: Final = 1.0
_DELETE_PROBE_NAME: Final = ".gazette-delete-probe"

_DELAYS_S: Final = (0.0, 0.1, 1.0, 1.0, 10.0, 10.0)
_LONGEST_DELAY_S: Final = 100.0


def next_delay(consecutive_failures: int) -> float:
    """Return seconds from the end of a check to the next one, before a jitter of 20 percent.

    Args:
        consecutive_failures: number of checks in a row that failed; 0 when the last one succeeded.
    """
    if consecutive_failures == 0:
        return HEALTHY_INTERVAL_S
    if consecutive_failures <= len(_DELAYS_S):
        return _DELAYS_S[consecutive_failures - 1]
    return _LONGEST_DELAY_S


def check_store(store: Store) -> None:
    """Perform all operations that brokers need, except for removing. It blocks.

    Brokers share the probe object, ``.test/health-check``, and leave it there.

    Raises:
        StoreError: names the step that failed.
    """
    with store.bounded(CHECK_TIMEOUT_S):
        _step("put", store, lambda: _put_probe(store, _PROBE_PATH))
        content = _step("get", store, lambda: store.open(_PROBE_PATH))
        _step("read", store, lambda: _read_probe(content.raw))
        _step("list", store, lambda: _list_probe(store))
        url = _step("sign", store, lambda: store.sign_get(_PROBE_PATH, _PROBE_TTL_S))
        if urlsplit(url).scheme in {"http", "https"}:
            _step("fetch of the signed URL", store, lambda: _fetch_probe(url))


def check_delete(store: Store, prefix: str) -> None:
    """Check that objects can be removed below a prefix. It blocks.

    Args:
        store: the store.
        prefix: content path to which the name of the probe object is appended.

    Raises:
        StoreError: names the step that failed.
    """
    path = prefix + _DELETE_PROBE_NAME
    with store.bounded(CHECK_TIMEOUT_S):
        _step("put of the delete probe", store, lambda: _put_probe(store, path))
        _step("remove of the delete probe", store, lambda: store.remove(path))


def _step(name: str, store: Store, perform: Callable[[], T]) -> T:
    """Perform one step of a check, and name it in errors."""
    try:
        return perform()
    except StoreError as error:
        raise _named(type(error), name, store, error) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise _named(StoreError, name, store, error) from error


def _named(kind: type[StoreError], name: str, store: Store, error: Exception) -> StoreError:
    return kind(f"{name} failed: {describe(error)}", store=store.url)


def _put_probe(store: Store, path: str) -> None:
    # Replacing it proves that this process may write now.
    store.put(path, io.BytesIO(_PROBE_CONTENT), len(_PROBE_CONTENT), overwrite=True)


def _expect(content: bytes, what: str) -> None:
    if content != _PROBE_CONTENT:
        raise ValueError(f"{what} is {content[:40]!r}, expected {_PROBE_CONTENT!r}")


def _read_probe(raw: BinaryIO) -> None:
    with raw:
        _expect(raw.read(), f"content of {_PROBE_PATH}")


def _list_probe(store: Store) -> None:
    directory, _, name = _PROBE_PATH.rpartition("/")
    if not any(found.path == name for found in store.list(directory + "/")):
        raise ValueError(f"{_PROBE_PATH} is not listed")


def _find_probe(store: Store) -> None:
    found = store.status(_PROBE_PATH)
    if found is None:
        raise StoreError(f"{_PROBE_PATH} does not exist any more", store=store.url)
    if found.length != len(_PROBE_CONTENT):
        raise StoreError(
            f"{_PROBE_PATH} has {found.length} bytes, expected {len(_PROBE_CONTENT)}",
            store=store.url,
        )


def _fetch_probe(url: str) -> None:
    with open_without_redirects(url, _FETCH_TIMEOUT_S) as answer:
        if answer.status != 200:
            raise ValueError(f"HTTP status {answer.status}, expected 200")
        _expect(answer.read(len(_PROBE_CONTENT) + 1), "content at the signed URL")


# ------------------------------------------------------------------ schedule


class StoreHealth:
    """Health of one store, checked in the background. Construct it on the event loop.

    Args:
        url: the store's URL.
        open_store: returns the store; called in a thread for each check, so that a store that
            could not be opened, or was dropped, is opened again.
        check: checks a store, and raises if it fails.
        jitter: returns a number around 1 by which each pause is multiplied.
        on_change: called with the URL, and with the reason why the store is not healthy any more or
            why it is not at first, or None when it is healthy again.

    Attributes:
        url: the store's URL.
        error: the reason why the store is not healthy, else None. :data:`CHECK_PENDING` at first.
        consecutive_failures: number of checks in a row that failed.
        checked_at: loop time of the last outcome of a check, or of a quick check that failed.
        failing_since: loop time of the first of those failures; None while there are none.
    """

    def __init__(
        self,
        url: str,
        open_store: Callable[[], Store],
        *,
        check: Callable[[Store], None] = check_store,
        jitter: Callable[[], float] = lambda: random.uniform(0.8, 1.2),  # noqa: S311 - no secret
        on_change: Callable[[str, str | None], None] = lambda _url, _error: None,
    ) -> None:
        self.url = url
        self._on_change = on_change
        self.error: str | None = CHECK_PENDING
        self.consecutive_failures = 0
        self.checked_at = 0.0
        self.failing_since: float | None = None
        self._open_store = open_store
        self._check = check
        self._jitter = jitter
        self._loop = asyncio.get_running_loop()
        self._changed: asyncio.Future[None] = self._loop.create_future()
        self._first = asyncio.Event()
        self._urgent = asyncio.Event()
        self._urgent_until = 0.0
        self._running: set[asyncio.Future[str | None]] = set()
        self._task = self._loop.create_task(self._run(), name=f"store-health {url}")

    @property
    def healthy(self) -> bool:
        """Return True if the last check succeeded."""
        return self.error is None

    async def wait_first(self) -> None:
        """Wait for the outcome of the first check: at most about three seconds."""
        await self._first.wait()

    async def changed(self) -> None:
        """Wait for the next outcome of a check, even if it equals the last one."""
        await asyncio.shield(self._changed)

    async def ended(self) -> None:
        """Wait until no check runs any more: each ends by its time limit."""
        while self._running:
            await asyncio.wait(set(self._running))

    def request_soon(self) -> None:
        """Request frequent checks, because an append needs the store.

        A failing store is checked every two seconds. A healthy one is checked quickly every
        second, and fully when a quick check fails.

        This holds for some seconds: call it again while waiting for the store.
        """
        self._urgent_until = self._loop.time() + URGENT_FOR_S
        self._urgent.set()

    async def check_delete(self, prefix: str) -> None:
        """Check that objects can be removed below a prefix.

        Raises:
            StoreError: they cannot, or the store could not be opened.
        """
        await asyncio.to_thread(lambda: check_delete(self._open_store(), prefix))

    async def aclose(self) -> None:
        """Stop checking, and wait up to a second for checks that run; others end by themselves."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._running:
            await asyncio.wait(self._running, timeout=_CLOSE_TIMEOUT_S)
        if not self._changed.done():
            self._changed.set_result(None)

    # -------------------------------------------------------------- inside

    async def _run(self) -> None:
        while True:
            await self._check_once()
            await self._pause(self._loop.time())

    async def _check_once(self) -> None:
        """Begin a check, and wait for its outcome or until it counts as failed."""
        if len(self._running) >= _OVERLAPPING_CHECKS_MAX:
            return  # one of the hanging checks must end first, by its time limit
        outcome = self._begin(self._check)
        limit_s = CHECK_TIMEOUT_S if self.healthy else FAILING_TIMEOUT_S
        done, _ = await asyncio.wait({outcome}, timeout=limit_s)
        if not done:
            self._record(f"check has not ended within {limit_s:.0f} s", late=False)
            outcome.add_done_callback(lambda late: self._record(late.result(), late=True))
        else:
            self._record(outcome.result(), late=False)

    def _begin(self, check: Callable[[Store], None]) -> asyncio.Future[str | None]:
        """Run a check in a thread of its own: a hanging check must not block a shared thread."""
        outcome: asyncio.Future[str | None] = self._loop.create_future()
        self._running.add(outcome)
        outcome.add_done_callback(self._running.discard)

        def run() -> None:
            try:
                check(self._open_store())
            except GazetteError as failure:
                error: str | None = describe(failure)
            except Exception as failure:  # noqa: BLE001 - a thread's outermost boundary
                _log.exception("store %s: health check broke", self.url)
                error = f"{type(failure).__name__}: {describe(failure)}"
            else:
                error = None
            with contextlib.suppress(RuntimeError):  # the loop ended meanwhile
                self._loop.call_soon_threadsafe(outcome.set_result, error)

        threading.Thread(target=run, name=f"store-health {self.url}", daemon=True).start()
        return outcome

    def _record(self, error: str | None, *, late: bool) -> None:
        if self._task.done():
            return
        STORE_HEALTH_CHECKS.labels(self.url, "ok" if error is None else "error").inc()
        if error is None:
            if self.error is not None:
                _log.info("store %s is healthy", self.url)
                if self.error != CHECK_PENDING:
                    self._on_change(self.url, None)
            self.consecutive_failures = 0
            self.failing_since = None
        else:
            if late and self.healthy:
                return  # a check that began later has succeeded
            if self.error != error:
                _log.warning("store %s is not healthy: %s", self.url, error)
                self._on_change(self.url, error)
            if not late:
                self.consecutive_failures += 1
            if self.failing_since is None:
                self.failing_since = self._loop.time()
        self.error = error
        self.checked_at = self._loop.time()
        self._first.set()
        settled, self._changed = self._changed, self._loop.create_future()
        settled.set_result(None)

    async def _quick_check(self) -> bool:
        """Return True if the probe's object exists. A failure is recorded until a check follows."""
        outcome = self._begin(_find_probe)
        done, _ = await asyncio.wait({outcome}, timeout=QUICK_CHECK_TIMEOUT_S)
        error = outcome.result() if done else f"no answer within {QUICK_CHECK_TIMEOUT_S:.0f} s"
        if error is not None:
            self._record(error, late=False)
        return error is None

    async def _pause(self, ended: float) -> None:
        """Wait until the next check is due, or sooner after :meth:`request_soon`."""
        delay_s = next_delay(self.consecutive_failures) * self._jitter()
        while True:
            now = self._loop.time()
            until = ended + delay_s
            is_urgent = now < self._urgent_until
            if is_urgent and not self.healthy:
                until = min(until, ended + URGENT_INTERVAL_S)
            if now >= until:
                return
            if is_urgent and self.healthy:
                await asyncio.sleep(min(QUICK_CHECK_INTERVAL_S, until - now))
                if not await self._quick_check():
                    return
                continue
            self._urgent.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await self._urgent.wait()
