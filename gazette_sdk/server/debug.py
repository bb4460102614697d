"""Diagnostics under ``/debug/`` (operations section 1).

============================  ==================================================================
``/debug/ready``              200 as soon as the process serves; checks nothing else
``/debug/metrics``            Prometheus text
``/debug/vars``               command line and memory statistics as JSON
``/debug/pprof/``             index of: ``tasks``, ``threads`` (``goroutine`` is both),
                              ``heap``, ``profile?seconds=10`` (folded stacks), ``cmdline``
``/debug/requests``           running calls
``/debug/events``             the latest warnings and errors logged
============================  ==================================================================

Any other path is left to later mounts. Where authorization keys are configured, every page but
``/debug/ready`` requires a token with the capability LIST and without a selector: the pages show
all journals of the process.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from http import HTTPStatus

import orjson
from aiohttp import web

from gazette_sdk.errors import CallError, UnauthenticatedError, ValidationError
from gazette_sdk.protocol.authorization import AllowAll, Authority, Capability
from gazette_sdk.server import metrics, profiling
from gazette_sdk.server.grpc_server import GrpcServer
from gazette_sdk.server.http import Target, text_error
from gazette_sdk.server.logging import RECENT, hide_secrets

__all__ = ["DebugPages"]

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


class DebugPages:
    """Handler of ``/debug/…``. Mount it at ``/debug/``.

    Args:
        grpc: the server whose calls ``/debug/requests`` lists.

    Attributes:
        authority: verifies the tokens of requests.
    """

    def __init__(self, grpc: GrpcServer) -> None:
        self.authority: Authority | AllowAll = AllowAll()
        self._grpc = grpc
        self._pages: dict[str, Callable[[], web.Response]] = {
            "/debug/metrics": _metrics,
            "/debug/vars": _variables,
            "/debug/pprof/": lambda: web.Response(text=_INDEX, content_type="text/html"),
        }
        self._texts: dict[str, Callable[[], str]] = {
            "/debug/requests": self._requests,
            "/debug/events": lambda: "\n".join([*RECENT.lines, ""]),
            "/debug/pprof/tasks": profiling.dump_tasks,
            "/debug/pprof/threads": profiling.dump_threads,
            "/debug/pprof/goroutine": (
                lambda: f"{profiling.dump_tasks()}\n{profiling.dump_threads()}"
            ),
            "/debug/pprof/heap": profiling.heap_statistics,
            "/debug/pprof/cmdline": lambda: "\0".join(hide_secrets(sys.argv)),
        }

    async def __call__(self, request: web.Request, target: Target) -> web.StreamResponse | None:
        """Answer a request, or return None for a later mount.

        Raises:
            UnauthenticatedError: the page requires a token, and the request has none that suffices.
        """
        if target.path == "/debug/ready":
            return web.Response()
        page, text = self._pages.get(target.path), self._texts.get(target.path)
        is_profile = target.path == "/debug/pprof/profile"
        if page is None and text is None and not is_profile:
            return None
        self._authorize(request)
        if is_profile:
            return await _profile(target)
        return page() if page is not None else _text(text()) if text is not None else None

    def _authorize(self, request: web.Request) -> None:
        """Check the token of a request, where keys are configured."""
        claims = self.authority.verify(
            request.headers.get("Authorization"), Capability.LIST, time.time()
        )
        if not claims.allows_every_journal:
            raise UnauthenticatedError(
                "the diagnostics show all journals: use a token without a selector"
            )

    def _requests(self) -> str:
        now_s = time.monotonic()
        calls = sorted(self._grpc.active, key=lambda call: call.begun_s)
        lines = [f"{len(calls)} calls under way"]
        lines += [f"{now_s - call.begun_s:12.3f} s  {call.path}" for call in calls]
        return "\n".join([*lines, ""])


def _text(text: str) -> web.Response:
    return web.Response(text=text, headers={"X-Content-Type-Options": "nosniff"})


def _metrics() -> web.Response:
    return web.Response(
        body=metrics.metrics_text().encode(), headers={"Content-Type": metrics.CONTENT_TYPE}
    )


def _variables() -> web.Response:
    variables = {
        "cmdline": hide_secrets(sys.argv),
        "memstats": profiling.memory_statistics(),
    }
    return web.Response(
        body=orjson.dumps(variables), headers={"Content-Type": "application/json; charset=utf-8"}
    )


async def _profile(target: Target) -> web.Response:
    duration_s = PROFILE_DEFAULT_S
    for pair in target.query.split("&"):
        name, _, value = pair.partition("=")
        if name == "seconds":
            duration_s = _seconds(value)
    try:
        return _text(await profiling.profile(duration_s))
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
