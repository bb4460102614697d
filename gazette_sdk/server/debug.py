"""Diagnostics under ``/debug/`` (operations section 1).

============================  ==================================================================
``/debug/ready``              200 as soon as the process serves, or 503 and why it is not ready
``/debug/live``               200 while the process lives, or 503 and why it must be started again
``/debug/health``             checks of the process as JSON; 503 if one of them fails
``/debug/log``                GET: the level of the log; POST: another one for some minutes
``/debug/metrics``            Prometheus text
``/debug/vars``               command line and memory statistics as JSON
``/debug/pprof/``             index of: ``tasks``, ``threads`` (``goroutine`` is both),
                              ``heap``, ``profile?seconds=10`` (folded stacks), ``cmdline``
``/debug/requests``           running calls
``/debug/events``             the latest warnings and errors logged
============================  ==================================================================

Any other path is left to later mounts. Where authorization keys are configured, every page but
``/debug/ready`` and ``/debug/live`` requires a token with the capability LIST and without a
selector: the pages show all journals of the process. A POST requires APPLY, too.

The functions below return the state of a running process: tasks, threads, memory and a CPU profile.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import gzip
import logging
import math
import sys
import threading
import time
import traceback
import tracemalloc
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from http import HTTPStatus
from types import FrameType
from typing import Any

import orjson
from aiohttp import web
from prometheus_client import REGISTRY

from gazette_sdk.errors import CallError, UnauthenticatedError, ValidationError
from gazette_sdk.protocol.authorization import AllowAll, Authority, Capability
from gazette_sdk.server import metrics
from gazette_sdk.server.authorization import AuditEvent, AuditLog
from gazette_sdk.server.grpc_server import GrpcServer
from gazette_sdk.server.health import Check, MemberHealth
from gazette_sdk.server.http import Target, accepts_gzip, text_error
from gazette_sdk.server.json_gateway import check_origin
from gazette_sdk.server.listener import peer_of
from gazette_sdk.server.logging import LEVEL, LEVELS, RECENT, hide_secrets
from gazette_sdk.user_code import described

_log = logging.getLogger(__name__)

_SUSPENDED = ("cr", "ag", "gi")
"""Prefixes of the attributes of coroutines, asynchronous and plain generators."""

SAMPLE_INTERVAL_S = 0.01
"""Seconds between two samples of a CPU profile."""

TOP_TYPES = 50
"""Number of types in the heap statistics."""

_profiling = threading.Lock()
"""Held while a CPU profile of this process is taken: each sample stops all threads."""


def dump_tasks() -> str:
    """Return every task of the running loop with its stack."""
    tasks = sorted(asyncio.all_tasks(), key=lambda task: task.get_name())
    out = [f"{len(tasks)} tasks\n"]
    for task in tasks:
        out.append(f"\n{task.get_name()}: {task.get_coro()!r}\n")
        out += traceback.StackSummary.extract(_awaited(task.get_coro())).format()
    return "".join(out)


def _awaited(waiting: Any) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames of a suspended coroutine, the outermost first."""
    while waiting is not None:
        kind = next((kind for kind in _SUSPENDED if hasattr(waiting, f"{kind}_frame")), None)
        if kind is None:
            return
        frame = getattr(waiting, f"{kind}_frame")
        if frame is not None:
            # Frames of compiled coroutines (those of grpcio) have no line.
            yield frame, frame.f_lineno or 1
        waiting = getattr(waiting, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")


def dump_threads() -> str:
    """Return every thread with its stack."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = _frames()
    out = [f"{len(frames)} threads\n"]
    for ident, frame in frames.items():
        out.append(f"\nthread {ident} {names.get(ident, '')}\n")
        out += traceback.format_stack(frame)
    return "".join(out)


def memory_statistics() -> dict[str, int | float]:
    """Return memory sizes and counts that cost little."""
    statistics: dict[str, int | float] = {
        f"gc_{name}_generation_{generation}": value
        for generation, values in enumerate(gc.get_stats())
        for name, value in values.items()
    }
    statistics["allocated_blocks"] = sys.getallocatedblocks()
    for name in ("process_resident_memory_bytes", "process_virtual_memory_bytes"):
        value = REGISTRY.get_sample_value(name)
        if value is not None:
            statistics[name] = value
    return statistics


def heap_statistics() -> str:
    """Return objects by type, and allocations by line if ``tracemalloc`` is on."""
    objects = gc.get_objects()
    counts = Counter(type(item).__qualname__ for item in objects)
    lines = [f"{len(objects)} objects under garbage collection"]
    lines += [f"{count:10} {name}" for name, count in counts.most_common(TOP_TYPES)]
    if tracemalloc.is_tracing():
        lines += [
            str(line) for line in tracemalloc.take_snapshot().statistics("lineno")[:TOP_TYPES]
        ]
    else:
        lines.append("for allocations by line, start the process with PYTHONTRACEMALLOC=1")
    return "\n".join([*lines, ""])


async def profile(duration_s: float) -> str:
    """Take a CPU profile of the process, as :func:`sample_stacks`. Cancelling ends the sampling.

    It is taken on a thread of its own. The event loop's thread pool, which is small, must never
    wait for a profile: the broker's own work needs it.

    Raises:
        CallError: ``RESOURCE_EXHAUSTED``: another profile is being taken.
    """
    if not _profiling.acquire(blocking=False):
        raise CallError(
            "another profile is being taken; try again when it has ended",
            code="RESOURCE_EXHAUSTED",
        )
    stopped = threading.Event()
    taken: concurrent.futures.Future[str] = concurrent.futures.Future()

    def sample() -> None:
        try:
            stacks = sample_stacks(duration_s, stopped)
        finally:
            _profiling.release()
        if taken.set_running_or_notify_cancel():
            taken.set_result(stacks)

    try:
        threading.Thread(target=sample, name="profile", daemon=True).start()
    except RuntimeError:  # the system refuses a further thread
        _profiling.release()
        raise
    try:
        return await asyncio.wrap_future(taken)
    finally:
        stopped.set()


def sample_stacks(duration_s: float, stopped: threading.Event) -> str:
    """Return a CPU profile from samples of all threads. Blocks its own thread.

    Args:
        duration_s: seconds to sample for.
        stopped: ends the sampling early.

    Returns:
        Folded stacks, the outermost frame first, with counts: the input of flame graph tools.
    """
    counts: Counter[str] = Counter()
    own = threading.get_ident()
    until_s = time.monotonic() + duration_s
    while time.monotonic() < until_s and not stopped.wait(SAMPLE_INTERVAL_S):
        for ident, frame in _frames().items():
            if ident != own:
                counts[_folded(frame)] += 1
    return "".join(f"{stack} {count}\n" for stack, count in counts.most_common())


def _frames() -> dict[int, FrameType]:
    return sys._current_frames()  # noqa: SLF001 - documented, despite its name


def _folded(frame: FrameType | None) -> str:
    names: list[str] = []
    while frame is not None:
        code = frame.f_code
        module = frame.f_globals.get("__name__", "?")
        names.append(f"{module}.{code.co_qualname}")
        frame = frame.f_back
    return ";".join(reversed(names))


PROFILE_DEFAULT_S = 10.0
"""Default seconds of a CPU profile."""

PROFILE_MAX_S = 60.0
"""Greatest duration of a CPU profile. No other profile can be taken meanwhile, and each sample
stops all threads."""

_INDEX = """<!DOCTYPE html><title>/debug/pprof/</title>
<ul>
<li><a href="tasks">tasks</a>: stacks of all asyncio tasks
<li><a href="threads">threads</a>: stacks of all threads
<li><a href="goroutine">goroutine</a>: both
<li><a href="heap">heap</a>: objects by type, allocations
<li><a href="profile?seconds=10">profile</a>: CPU profile as folded stacks
<li><a href="cmdline">cmdline</a>: the command line
</ul>
"""


REFRESH_TIMEOUT_S = 2.0
"""Longest time for which a scrape waits for numbers that are found when it is made."""

LEVEL_MINUTES_MAX = 60.0
"""Longest time of another level of the log."""


class DebugPages:
    """Handler of ``/debug/…``. Mount it at ``/debug/``.

    Args:
        grpc: the server whose calls ``/debug/requests`` lists.

    Attributes:
        authority: verifies the tokens of requests.
        unready: returns why the process is not ready though it serves; empty text if it is.
        health: checks of the process; None if it is no member of a cluster.
        refreshers: awaited before a scrape: they find numbers that cost too much to be kept.
    """

    def __init__(self, grpc: GrpcServer) -> None:
        self.unready: Callable[[], str] = str
        self.health: MemberHealth | None = None
        self.refreshers: list[Callable[[], Awaitable[None]]] = []
        self.audit = AuditLog()
        self.authority: Authority | AllowAll = AllowAll()
        self._grpc = grpc
        self._pages: dict[str, Callable[[], web.Response]] = {
            "/debug/vars": _variables,
            "/debug/pprof/": lambda: web.Response(text=_INDEX, content_type="text/html"),
        }
        self._texts: dict[str, Callable[[], str]] = {
            "/debug/requests": self._requests,
            "/debug/events": lambda: "\n".join([*RECENT.lines, ""]),
            "/debug/pprof/tasks": dump_tasks,
            "/debug/pprof/threads": dump_threads,
            "/debug/pprof/goroutine": (lambda: f"{dump_tasks()}\n{dump_threads()}"),
            "/debug/pprof/heap": heap_statistics,
            "/debug/pprof/cmdline": lambda: "\0".join(hide_secrets(sys.argv)),
        }
        self._answers: dict[str, Callable[[web.BaseRequest, Target], Awaitable[web.Response]]] = {
            "/debug/metrics": self._metrics,
            "/debug/health": self._checks,
            "/debug/log": self._level,
            "/debug/pprof/profile": _profile,
        }
        self._probes: dict[str, Callable[[], str]] = {
            "/debug/ready": self._unready,
            "/debug/live": self._dead,
        }

    def show(self, health: MemberHealth, refresh: Callable[[], Awaitable[None]]) -> None:
        """Show the health of a member of a cluster, until :meth:`end`.

        Args:
            health: its checks and metrics.
            refresh: finds numbers before a scrape.
        """
        self.health = health
        self.refreshers.append(refresh)
        health.begin()

    def end(self) -> None:
        """Show the health no more, and log what is left for the audit log."""
        self.refreshers.clear()
        self.audit.close()
        if self.health is not None:
            self.health.end()

    async def __call__(self, request: web.BaseRequest, target: Target) -> web.StreamResponse | None:
        """Answer a request, or return None for a later mount.

        Raises:
            UnauthenticatedError: the page requires a token, and the request has none that suffices.
        """
        probe = self._probes.get(target.path)
        if probe is not None:
            reason = probe()
            return text_error(HTTPStatus.SERVICE_UNAVAILABLE, reason) if reason else web.Response()
        page, text = self._pages.get(target.path), self._texts.get(target.path)
        answer = self._answers.get(target.path)
        if page is None and text is None and answer is None:
            return None
        if target.path == "/debug/log" and request.method == "POST":
            return await self._change_level(request)
        self._authorize(request)
        if answer is not None:
            return await answer(request, target)
        return page() if page is not None else _text(text()) if text is not None else None

    def _authorize(self, request: web.BaseRequest, required: Capability = Capability.LIST) -> None:
        """Check the token of a request, where keys are configured."""
        claims = self.authority.verify(request.headers.get("Authorization"), required, time.time())
        if not claims.allows_every_journal:
            raise UnauthenticatedError(
                "the diagnostics show all journals: use a token without a selector"
            )

    def _unready(self) -> str:
        return self.unready()

    def _dead(self) -> str:
        return "" if self.health is None else self.health.dead

    async def _metrics(self, request: web.BaseRequest, _target: Target) -> web.Response:
        """Return all metrics. What cannot be found in time is as it was before."""
        refreshing = [asyncio.ensure_future(refresh()) for refresh in self.refreshers]
        if refreshing:
            try:
                await asyncio.wait(refreshing, timeout=REFRESH_TIMEOUT_S)
            finally:
                for each in refreshing:
                    each.cancel()
            for found in await asyncio.gather(*refreshing, return_exceptions=True):
                if isinstance(found, Exception):
                    _log.warning("metrics are left out: %s", described(found))
        body = (await metrics.sliced_metrics_text()).encode()
        headers = {"Content-Type": metrics.CONTENT_TYPE}
        if accepts_gzip(request):
            headers |= {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
            body = await asyncio.to_thread(gzip.compress, body, 1, mtime=0)
        return web.Response(body=body, headers=headers)

    async def _checks(self, request: web.BaseRequest, _target: Target) -> web.Response:
        """Return the checks of the process as JSON, with status 503 if one of them fails."""
        checks: Sequence[Check] = ()
        if self.health is not None:
            checks = await self.health.checks(request.headers.get("Authorization"))
        healthy = all(check.ok for check in checks)
        shown = {"healthy": healthy, "checks": [check._asdict() for check in checks]}
        status = HTTPStatus.OK if healthy else HTTPStatus.SERVICE_UNAVAILABLE
        return _json(shown, status)

    async def _level(self, _request: web.BaseRequest, _target: Target) -> web.Response:
        return _json(LEVEL.shown())

    async def _change_level(self, request: web.BaseRequest) -> web.Response:
        """Change the level of the log for some minutes, which is in the audit log."""
        authorization = request.headers.get("Authorization")
        peer = peer_of((request.remote or "",))
        subject, token_id = self.authority.identity(authorization)

        def record(outcome: str, *, is_refusal: bool = False) -> None:
            self.audit.record(
                AuditEvent("SetLogLevel", outcome, peer, "", subject, token_id, is_refusal)
            )

        try:
            check_origin((), request)
            self._authorize(request, Capability.LIST | Capability.APPLY)
        except UnauthenticatedError as error:
            record(str(error), is_refusal=True)
            raise
        level, minutes = _asked_level(await request.read())
        LEVEL.change(level, minutes * 60)
        record(f"level {level} for {minutes:g} minutes")
        return _json(LEVEL.shown())

    def _requests(self) -> str:
        now_s = time.monotonic()
        calls = sorted(self._grpc.active, key=lambda call: call.begun_s)
        lines = [f"{len(calls)} calls under way"]
        lines += [f"{now_s - call.begun_s:12.3f} s  {call.path}" for call in calls]
        return "\n".join([*lines, ""])


def _text(text: str) -> web.Response:
    return web.Response(text=text, headers={"X-Content-Type-Options": "nosniff"})


def _json(shown: object, status: HTTPStatus = HTTPStatus.OK) -> web.Response:
    return web.Response(
        body=orjson.dumps(shown),
        status=status,
        headers={"Content-Type": "application/json; charset=utf-8"},
    )


def _variables() -> web.Response:
    return _json({"cmdline": hide_secrets(sys.argv), "memstats": memory_statistics()})


def _asked_level(body: bytes) -> tuple[str, float]:
    """Return the level and the minutes of a request.

    Raises:
        ValidationError: it has none, or they are out of bounds.
    """
    try:
        asked = orjson.loads(body)
        level, minutes = str(asked["level"]), float(asked["minutes"])
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        raise ValidationError(
            'must be a JSON object such as {"level": "debug", "minutes": 10}', path="body"
        ) from None
    if level not in LEVELS:
        raise ValidationError(f"must be one of {', '.join(LEVELS)}", path="level")
    if not 0 < minutes <= LEVEL_MINUTES_MAX:
        raise ValidationError(
            f"must be a number of minutes, up to {LEVEL_MINUTES_MAX:.0f}", path="minutes"
        )
    return level, minutes


async def _profile(_request: web.BaseRequest, target: Target) -> web.Response:
    duration_s = PROFILE_DEFAULT_S
    for pair in target.query.split("&"):
        name, _, value = pair.partition("=")
        if name == "seconds":
            duration_s = _seconds(value)
    try:
        return _text(await profile(duration_s))
    except CallError as error:
        response = text_error(HTTPStatus.TOO_MANY_REQUESTS, str(error))
        response.headers["Retry-After"] = f"{PROFILE_MAX_S:.0f}"
        return response


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= PROFILE_MAX_S:
        raise ValidationError(
            f"must be a number of seconds, up to {PROFILE_MAX_S:.0f} s, not {text!r}",
            path="seconds",
        )
    return value
