"""Whether a fragment store works (broker section 15, "Health check").

A store is probed by what brokers do with it: put, get, list, sign, and fetch of the signed URL. One
:class:`StoreHealth` repeats that for a store: seldom while it is healthy; with growing pauses while
it fails; and every two seconds while it fails and somebody wants it, so that a broker knows within
five seconds that a store is lost, and within five that it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import logging
import random
import threading
import urllib.request
from collections.abc import Callable
from typing import BinaryIO, Final, TypeVar
from urllib.parse import urlsplit

from gazette_sdk.errors import GazetteError, StoreError
from gazette_sdk.fragment import metrics
from gazette_sdk.fragment.stores.base import Store, describe

__all__ = ["CHECK_PENDING", "StoreHealth", "check_delete", "check_store", "next_delay"]

T = TypeVar("T")

_log = logging.getLogger(__name__)

CHECK_PENDING: Final = "first check pending"
"""What a store's health says until its first check is done."""

CHECK_TIMEOUT_S: Final = 60.0
"""Longest time of one check."""

HEALTHY_INTERVAL_S: Final = 30 * 60.0
"""Pause after a check that went well."""

FAILING_BOUND_S: Final = 3.0
"""A check of a store that does not work (yet) counts as failed when it has not ended after this.

It runs on, and when it succeeds late then the store is healthy, only slow.
"""

WANTED_INTERVAL_S: Final = 2.0
"""Pause after a failed check while somebody wants the store."""

WANTED_FOR_S: Final = 15.0
"""How long a request to check soon holds."""

GLANCE_INTERVAL_S: Final = 1.0
"""Pause between glances at a healthy store which somebody wants.

A glance only asks whether the probe's object is there: it costs a store next to nothing, and tells
of one that is lost long before the next check is due.
"""

GLANCE_BOUND_S: Final = 1.0
"""A glance without an answer after this has failed; a check then tells whether the store has."""

_OVERLAPPING_CHECKS_MAX: Final = 4
"""Checks that hang may be overtaken by this many later ones, which find out that it is back."""

_PROBE_PATH: Final = ".test/health-check"
_PROBE_CONTENT: Final = b"health-check\n"
_PROBE_TTL_S: Final = 300.0
_FETCH_TIMEOUT_S: Final = 10.0
_CLOSE_TIMEOUT_S: Final = 1.0
_DELETE_PROBE_NAME: Final = ".gazette-delete-probe"

_DELAYS_S: Final = (0.0, 0.1, 1.0, 1.0, 10.0, 10.0)
_LONGEST_DELAY_S: Final = 100.0


def next_delay(consecutive_failures: int) -> float:
    """Seconds from the end of a check to the next one, before a jitter of 20 percent.

    Args:
        consecutive_failures: how many checks in a row have failed; 0 when the last one went well.
    """
    if consecutive_failures == 0:
        return HEALTHY_INTERVAL_S
    if consecutive_failures <= len(_DELAYS_S):
        return _DELAYS_S[consecutive_failures - 1]
    return _LONGEST_DELAY_S


def check_store(store: Store) -> None:
    """Probe a store by all that brokers do with it, except for removing. Blocks.

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
    """Probe that a store lets objects be removed below a prefix. Blocks.

    Args:
        store: the store.
        prefix: content path to which the name of the probe object is appended as it is.

    Raises:
        StoreError: names the step that failed.
    """
    path = prefix + _DELETE_PROBE_NAME
    with store.bounded(CHECK_TIMEOUT_S):
        _step("put of the delete probe", store, lambda: _put_probe(store, path))
        _step("remove of the delete probe", store, lambda: store.remove(path))


def _step(name: str, store: Store, perform: Callable[[], T]) -> T:
    """One step of a probe, whose errors name it."""
    try:
        return perform()
    except StoreError as error:
        raise _named(type(error), name, store, error) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise _named(StoreError, name, store, error) from error


def _named(kind: type[StoreError], name: str, store: Store, error: Exception) -> StoreError:
    return kind(f"{name} failed: {describe(error)}", store=store.url)


def _put_probe(store: Store, path: str) -> None:
    # Replacing it proves more than finding that somebody else once could write it.
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
    if not store.exists(_PROBE_PATH):
        raise StoreError(f"{_PROBE_PATH} is not there any more", store=store.url)


def _fetch_probe(url: str) -> None:
    with urllib.request.urlopen(url, timeout=_FETCH_TIMEOUT_S) as answer:  # noqa: S310 - http(s)
        if answer.status != 200:
            raise ValueError(f"HTTP status {answer.status}, expected 200")
        _expect(answer.read(len(_PROBE_CONTENT) + 1), "content behind the signed URL")


# ------------------------------------------------------------------ schedule


class StoreHealth:
    """The health of one store, checked in the background. Make it on the event loop.

    Args:
        url: the store's URL.
        open_store: gives the store; called in a thread for each check, so that a store which
            could not be made, or was dropped, is made anew.
        check: probes a store, and raises where that fails.
        jitter: gives a number around 1 by which each pause is multiplied.

    Attributes:
        url: the store's URL.
        error: why the store is not healthy, None when it is. :data:`CHECK_PENDING` at first.
        consecutive_failures: how many checks in a row have failed.
        checked_at: loop time of the last outcome, be it of a check or of a glance that failed.
        failing_since: loop time of the first of those failures; None while there are none.
    """

    def __init__(
        self,
        url: str,
        open_store: Callable[[], Store],
        *,
        check: Callable[[Store], None] = check_store,
        jitter: Callable[[], float] = lambda: random.uniform(0.8, 1.2),  # noqa: S311 - no secret
    ) -> None:
        self.url = url
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
        self._wanted = asyncio.Event()
        self._wanted_until = 0.0
        self._running: set[asyncio.Future[str | None]] = set()
        self._task = self._loop.create_task(self._run(), name=f"store-health {url}")

    @property
    def healthy(self) -> bool:
        """Whether the last check went well."""
        return self.error is None

    async def wait_first(self) -> None:
        """Wait for the outcome of the first check: at most about three seconds."""
        await self._first.wait()

    async def changed(self) -> None:
        """Wait for the next outcome of a check, be it the same as before."""
        await asyncio.shield(self._changed)

    def request_soon(self) -> None:
        """Say that somebody wants the store: it is looked at every two seconds.

        While it fails it is checked that often. While it is healthy a glance has to do, and a
        check follows when that finds something wrong.

        That holds for some seconds; who waits for long says it again with each wait.
        """
        self._wanted_until = self._loop.time() + WANTED_FOR_S
        self._wanted.set()

    async def check_delete(self, prefix: str) -> None:
        """Probe that objects can be removed below a prefix.

        Raises:
            StoreError: they cannot, or the store could not be made.
        """
        await asyncio.to_thread(lambda: check_delete(self._open_store(), prefix))

    async def aclose(self) -> None:
        """Stop checking. A check that hangs is left to its own time limit, after a second."""
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
            return  # one of those that hang must end first, and its limit sees to that
        outcome = self._begin(self._check)
        limit_s = CHECK_TIMEOUT_S if self.healthy else FAILING_BOUND_S
        done, _ = await asyncio.wait({outcome}, timeout=limit_s)
        if not done:
            self._record(f"check has not ended within {limit_s:.0f} s", late=False)
            outcome.add_done_callback(lambda late: self._record(late.result(), late=True))
        else:
            self._record(outcome.result(), late=False)

    def _begin(self, look: Callable[[Store], None]) -> asyncio.Future[str | None]:
        """Look in a thread of its own: one that hangs shall not take a shared thread away."""
        outcome: asyncio.Future[str | None] = self._loop.create_future()
        self._running.add(outcome)
        outcome.add_done_callback(self._running.discard)

        def run() -> None:
            try:
                look(self._open_store())
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
        metrics.STORE_HEALTH_CHECKS.labels(self.url, "ok" if error is None else "error").inc()
        if error is None:
            if self.error is not None:
                _log.info("store %s is healthy", self.url)
            self.consecutive_failures = 0
            self.failing_since = None
        else:
            if late and self.healthy:
                return  # a later check has overtaken it, and knows better
            if self.error != error:
                _log.warning("store %s is not healthy: %s", self.url, error)
            if not late:
                self.consecutive_failures += 1
            if self.failing_since is None:
                self.failing_since = self._loop.time()
        self.error = error
        self.checked_at = self._loop.time()
        self._first.set()
        settled, self._changed = self._changed, self._loop.create_future()
        settled.set_result(None)

    async def _glance(self) -> bool:
        """Whether the probe's object is still there. A failure stands until a check is done."""
        outcome = self._begin(_find_probe)
        done, _ = await asyncio.wait({outcome}, timeout=GLANCE_BOUND_S)
        error = outcome.result() if done else f"no answer within {GLANCE_BOUND_S:.0f} s"
        if error is not None:
            self._record(error, late=False)
        return error is None

    async def _pause(self, ended: float) -> None:
        """Wait until the next check is due, which somebody who wants the store may hasten."""
        delay_s = next_delay(self.consecutive_failures) * self._jitter()
        while True:
            now = self._loop.time()
            until = ended + delay_s
            is_wanted = now < self._wanted_until
            if is_wanted and not self.healthy:
                until = min(until, ended + WANTED_INTERVAL_S)
            if now >= until:
                return
            if is_wanted and self.healthy:
                await asyncio.sleep(min(GLANCE_INTERVAL_S, until - now))
                if not await self._glance():
                    return
                continue
            self._wanted.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await self._wanted.wait()
