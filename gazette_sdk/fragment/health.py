"""Health checks of a fragment store (broker section 15, "Health check").

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
from collections.abc import Callable
from typing import BinaryIO, Final, TypeVar
from urllib.parse import urlsplit

from gazette_sdk.errors import GazetteError, StoreError
from gazette_sdk.fragment.content import open_without_redirects
from gazette_sdk.fragment.stores.base import STORE_HEALTH_CHECKS, Store, describe

T = TypeVar("T")

_log = logging.getLogger(__name__)

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
