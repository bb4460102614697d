"""Members of a cluster: what a process says of itself, and requests that it forwards to others.

:class:`ProcessView` describes the running process for ``Cluster.Members``: its version, clock,
lease, keys and the lag of its event loop. :class:`LoopLag` measures that lag by a timer, and
samples counters of which rates are made.

:class:`MemberGateway` answers ``/v1/at/ZONE/ID/…`` by what the member of that zone and id answers,
so that a browser which reaches one broker reaches all members. A target is only ever a member that
Etcd has. A request is forwarded once, with the caller's token and no other header of its own, and
its body, its answer and its time are bounded.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import platform
import ssl
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import nullcontext
from functools import cache
from typing import NamedTuple, TypeGuard
from urllib.parse import urlsplit

import aiohttp
import yarl
from aiohttp import hdrs, web

from gazette_sdk.cluster.membership import MemberProcess
from gazette_sdk.errors import (
    CallError,
    GazetteError,
    UnauthenticatedError,
    UnavailableError,
    ValidationError,
)
from gazette_sdk.meters import LATENCY_BOUNDS_S, PlainHistogram
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import cluster_pb2 as clpb
from gazette_sdk.protocol.authorization import AllowAll, Authority, Capability, Claims
from gazette_sdk.protocol.names import is_tls, may_send_token
from gazette_sdk.protocol.rules import validate_process_id
from gazette_sdk.server.authorization import Call, NoteRefusal
from gazette_sdk.server.http import CONTENT_HEADERS, Target, origin_form, quote_path
from gazette_sdk.server.json_gateway import (
    BODY_BYTES_MAX,
    check_origin,
    cors_headers,
    failure_response,
)
from gazette_sdk.server.listener import PeerLimits, peer_of

LOOP_LAG_SECONDS = PlainHistogram(
    "gazette_event_loop_lag_seconds",
    "How late a timer of one second ran: the event loop was busy for so long.",
    bounds=(0.001, *LATENCY_BOUNDS_S),
).buckets()

LAG_PERIOD_S = 1.0
"""Period of the timer that measures the lag of an event loop. What holds the loop for longer is
always seen, what holds it for less by chance: a loop that is often held is seen soon."""

LAG_WINDOW_S = 10.0
"""Time over which the longest lag counts, and over which rates are."""


class LoopLag:
    """Lag of the running event loop, and rates of counters.

    Args:
        counters: returns the present values of counters, always as many.
        now: the time in seconds, for tests.

    Attributes:
        counters: as given.
        started_us: time of the start, in microseconds since 1970.
    """

    def __init__(
        self,
        counters: Callable[[], tuple[int, ...]] = tuple,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = counters
        self.started_us = 0
        self._now = now
        self._lags: deque[float] = deque(maxlen=round(LAG_WINDOW_S / LAG_PERIOD_S))
        self._samples: deque[tuple[float, tuple[int, ...]]] = deque(
            maxlen=round(LAG_WINDOW_S / LAG_PERIOD_S) + 1
        )
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0

    def start(self) -> None:
        """Begin to measure the running loop."""
        self.started_us = _now_us()
        self._samples.append((self._now(), self.counters()))
        self._wait()

    def stop(self) -> None:
        """Measure no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def longest_s(self) -> float:
        """Longest lag in the last seconds; also one that lasts while this is called."""
        return max(*self._lags, self._now() - self._due_s, 0.0)

    def rates(self) -> tuple[float, ...] | None:
        """Return what the counters gained each second; None before there are two samples."""
        begin_s, before = self._samples[0] if self._samples else (0.0, ())
        elapsed_s = self._now() - begin_s
        if not self._samples or elapsed_s < 1:
            return None
        return tuple(
            max(0, now - then) / elapsed_s
            for now, then in zip(self.counters(), before, strict=True)
        )

    def _wait(self) -> None:
        self._due_s = self._now() + LAG_PERIOD_S
        self._timer = asyncio.get_running_loop().call_later(LAG_PERIOD_S, self._measure)

    def _measure(self) -> None:
        now_s = self._now()
        lag_s = max(0.0, now_s - self._due_s)
        self._lags.append(lag_s)
        LOOP_LAG_SECONDS.observe(lag_s)
        self._samples.append((now_s, self.counters()))
        self._wait()


def verify_view(authority: Authority | AllowAll, authorization: str | None) -> Claims:
    """Return the claims of a caller that may see a cluster as a whole.

    Args:
        authority: verifies tokens.
        authorization: header of the caller.

    Returns:
        the claims. Those of a caller without a token have READ where it is admitted.

    Raises:
        UnauthenticatedError: the token lacks LIST, or has a selector.
    """
    try:
        claims = authority.verify(authorization, Capability.LIST | Capability.READ, time.time())
    except UnauthenticatedError:
        claims = authority.verify(authorization, Capability.LIST, time.time())
    if not claims.allows_every_journal:
        raise UnauthenticatedError(
            "this call shows the whole cluster: use a token with the capability LIST and without "
            "a selector"
        )
    return claims


class ProcessView:
    """Description of this process.

    Args:
        component: ``broker``, or the name of the application.
        member: its connection to Etcd and its lease.
        authority: has the ids of its keys.
        lag: lag of its event loop.
    """

    def __init__(
        self,
        component: str,
        member: MemberProcess,
        authority: Authority | AllowAll,
        lag: LoopLag,
    ) -> None:
        self._component = component
        self._version = installed_version()  # of this process, whatever is installed later
        self._member = member
        self._authority = authority
        self._lag = lag

    def describe(self, process: pb.ProcessSpec) -> clpb.Member:
        """Return what this process knows of itself, without its items."""
        described = clpb.Member(
            id=process.id,
            component=self._component,
            endpoint=process.endpoint,
            version=self._version,
            python=platform.python_version(),
            started_us=self._lag.started_us,
            clock_us=_now_us(),
            loop_lag_s=self._lag.longest_s,
            key_ids=self._authority.key_ids,
        )
        if self._member.etcd is not None:
            described.etcd_version = ".".join(map(str, self._member.etcd.version))
        membership = self._member.membership
        if membership is not None:
            described.lease_s = membership.ttl_s
            if (left_s := membership.lease_left_s) is not None:
                described.lease_left_s = left_s
        return described


@cache
def installed_version() -> str:
    """Return the version of the installed distribution; of a bare checkout, a word."""
    try:
        return importlib.metadata.version("gazette-sdk")
    except importlib.metadata.PackageNotFoundError:
        return "development"


def _now_us() -> int:
    return time.time_ns() // 1000


# ---------------------------------------------------------------- forwarding

AT_PREFIX = "/v1/at/"
"""Prefix of the paths of other members."""

FORWARDED_HEADER = "x-gazette-forwarded"
"""Header of a request that was forwarded. It is not forwarded again."""

FORWARD_TIMEOUT_S = 30.0
"""Longest time of a forwarded request and its answer, but for a stream of events."""

FORWARD_CONNECT_S = 2.0
"""Longest time of a connection to a member."""

ANSWER_BYTES_MAX = 64 << 20
"""Greatest answer that is passed on, but for a stream of events. A list of 10,000 journals has 15
MiB."""

FORWARDS_MAX = 64
"""Requests that are forwarded at the same time."""

_EVENTS = "/v1/cluster/events"
_PAGES = frozenset({"/debug/metrics", "/debug/health", "/debug/requests", "/debug/events"})
_PAGES_BELOW = "/debug/pprof/"
_MEDIA_TYPES = frozenset({"application/json", "text/html", "text/plain"})
_AUTOMATIC_HEADERS = (hdrs.ACCEPT, hdrs.ACCEPT_ENCODING, hdrs.USER_AGENT, hdrs.CONTENT_TYPE)

FindMember = Callable[[str, str], Awaitable[str | None]]
"""Returns the endpoint of the member of a zone and an id; None if Etcd has no such member."""


class MemberGateway:
    """Answers ``/v1/at/ZONE/ID/…`` by the answer of another member. Mount it before ``/v1/``.

    Args:
        find: finds members.
        endpoint: endpoint of this process.
        authority: verifies that a caller has a good token. The member checks what it allows.
        tls: returns the context of connections to members.
        limits: limits of each peer.
        allow_origins: origins whose pages may call from a browser.
        note_refusal: records requests that are refused for their token or for a limit, as calls of
            the name ``Forward``; None for none.
        timeout_s: longest time of a forwarded request.
        answer_bytes_max: greatest answer.
    """

    def __init__(
        self,
        find: FindMember,
        *,
        endpoint: str,
        authority: Authority | AllowAll | None = None,
        tls: Callable[[], ssl.SSLContext] = ssl.create_default_context,
        limits: PeerLimits | None = None,
        allow_origins: Iterable[str] = (),
        note_refusal: NoteRefusal | None = None,
        timeout_s: float = FORWARD_TIMEOUT_S,
        answer_bytes_max: int = ANSWER_BYTES_MAX,
    ) -> None:
        self._find = find
        self._endpoint = endpoint
        self._authority = authority or AllowAll()
        self._tls = tls
        self._limits = limits
        self._allow_origins = frozenset(allow_origins)
        self._note_refusal = note_refusal
        self._timeout_s = timeout_s
        self._answer_bytes_max = answer_bytes_max
        self._running = 0

    async def __call__(self, request: web.BaseRequest, target: Target) -> web.StreamResponse:
        """Answer a request."""
        cors = cors_headers(self._allow_origins, request)
        if request.method == "OPTIONS":
            return web.Response(headers=cors)
        response = web.StreamResponse(headers={**CONTENT_HEADERS, **cors})
        peer = peer_of((request.remote or "",))
        call = Call(authorization=request.headers.get(hdrs.AUTHORIZATION), peer=peer)
        limited = self._limits.calling(peer) if self._limits is not None else nullcontext()
        try:
            with limited:
                return await self._forward(request, target, response)
        except (GazetteError, aiohttp.ClientError, OSError, TimeoutError) as error:
            if self._note_refusal is not None and _is_refusal(error):
                self._note_refusal("Forward", call, error)
            if response.prepared:
                # An answer without its end must not look complete.
                if request.transport is not None:
                    request.transport.abort()
                return response
            return failure_response(_error_of(error, target), cors)

    async def _forward(
        self, request: web.BaseRequest, target: Target, response: web.StreamResponse
    ) -> web.StreamResponse:
        authorization = request.headers.get(hdrs.AUTHORIZATION)
        self._authority.verify(authorization, Capability(0), time.time())
        if request.method == "POST":
            check_origin(self._allow_origins, request)  # the member does not see the origin
        if FORWARDED_HEADER in request.headers:
            raise _refused("a forwarded request is not forwarded again: call the member itself")
        if request.method not in {"GET", "POST"}:
            raise _refused(f"{request.method} is not forwarded: use GET or POST")
        zone, suffix, path = parse_path(target.path, request.raw_path)
        endpoint = await self._find(zone, suffix)
        if endpoint is None:
            raise CallError(
                f"there is no member {zone}/{suffix}: GET /v1/cluster/members has all",
                code="NOT_FOUND",
            )
        if authorization and not may_send_token(self._endpoint, endpoint):
            raise CallError(
                f"the token is not sent to {zone}/{suffix}, which has no TLS: serve TLS there",
                code="FAILED_PRECONDITION",
            )
        if self._running >= FORWARDS_MAX:
            raise CallError(
                f"{FORWARDS_MAX} requests are being forwarded: try again later",
                code="RESOURCE_EXHAUSTED",
            )
        self._running += 1
        try:
            is_endless = path == _EVENTS
            async with asyncio.timeout(None if is_endless else self._timeout_s):
                to = _Forward(endpoint, path, target.query, await _body(request))
                await self._exchange(request, response, to)
        finally:
            self._running -= 1
        await response.write_eof()
        return response

    async def _exchange(
        self,
        request: web.BaseRequest,
        response: web.StreamResponse,
        to: _Forward,
    ) -> None:
        """Send a request to a member, and its answer to the client."""
        headers = {FORWARDED_HEADER: "1"}
        if authorization := request.headers.get(hdrs.AUTHORIZATION):
            headers[hdrs.AUTHORIZATION] = authorization
        if to.body:
            headers[hdrs.CONTENT_TYPE] = "application/json"
        base, connector = _dialled(to.endpoint)
        query = f"?{to.query}" if to.query else ""
        url = yarl.URL(base + quote_path(to.path) + query, encoded=True)
        left = float("inf") if to.path == _EVENTS else self._answer_bytes_max
        async with (
            aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                skip_auto_headers=_AUTOMATIC_HEADERS,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=FORWARD_CONNECT_S),
            ) as client,
            client.request(
                request.method,
                url,
                data=to.body or None,
                headers=headers,
                allow_redirects=False,
                ssl=self._tls() if is_tls(to.endpoint) else True,
            ) as answer,
        ):
            if 300 <= answer.status < 400:
                raise UnavailableError(f"the member answers with a redirect ({answer.status})")
            response.set_status(answer.status)
            known = answer.content_type in _MEDIA_TYPES
            response.content_type = answer.content_type if known else "text/plain"
            if response.content_type.startswith("text/"):
                response.charset = "utf-8"
            if answer.status == 401:
                response.headers[hdrs.WWW_AUTHENTICATE] = "Bearer"
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                left -= len(chunk)
                if left < 0:
                    raise UnavailableError(
                        f"the answer is longer than {self._answer_bytes_max} bytes; ask for less"
                    )
                await response.write(chunk)


class _Forward(NamedTuple):
    """Request that is sent to a member."""

    endpoint: str
    path: str
    query: str
    body: bytes


def parse_path(path: str, raw: str) -> tuple[str, str, str]:
    """Return zone, id and path of a request to a member.

    ``/v1/at/ZONE/ID/cluster/members`` is ``/v1/cluster/members`` of that member, and
    ``/v1/at/ZONE/ID/debug/metrics`` its ``/debug/metrics``. A member's whole path
    (``/v1/at/ZONE/ID/v1/cluster/members``) is taken, too.

    Args:
        path: the decoded path.
        raw: target of the request line, of which zone and id are taken as they are.

    Raises:
        CallError: the zone or the id is malformed, or the path is none that may be called.
    """
    zone, _, rest = path.removeprefix(AT_PREFIX).partition("/")
    suffix, _, rest = rest.partition("/")
    try:
        validate_process_id(pb.ProcessSpec.ID(zone=zone, suffix=suffix))
    except ValidationError as error:
        raise _refused(str(error)) from error
    if not origin_form(raw).startswith(f"{AT_PREFIX}{zone}/{suffix}/") or not rest:
        raise _refused(f"write {AT_PREFIX}ZONE/ID/ and a path, with zone and id as they are")
    rest = rest.removeprefix("v1/")
    if rest.startswith("debug/"):
        page = f"/{rest}"
        if page not in _PAGES and not page.startswith(_PAGES_BELOW):
            raise _refused(f"{page} is not shown of other members")
        return zone, suffix, page
    if f"/v1/{rest}/".startswith(AT_PREFIX):
        raise _refused("a request is forwarded once: name the member itself")
    return zone, suffix, f"/v1/{rest}"


async def _body(request: web.BaseRequest) -> bytes:
    """Return the body of a request.

    Raises:
        web.HTTPRequestEntityTooLarge: it is too long.
    """
    body = bytearray()
    async for chunk in request.content.iter_any():
        body += chunk
        if len(body) > BODY_BYTES_MAX:
            raise web.HTTPRequestEntityTooLarge(max_size=BODY_BYTES_MAX, actual_size=len(body))
    return bytes(body)


def _dialled(endpoint: str) -> tuple[str, aiohttp.BaseConnector | None]:
    """Return the URL before the path, and the connector, of an endpoint."""
    parts = urlsplit(endpoint)
    if parts.scheme == "unix":
        return "http://localhost", aiohttp.UnixConnector(path=parts.path)
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}", None


def _is_refusal(error: Exception) -> TypeGuard[GazetteError]:
    """Return True if a token or a limit is the reason of an error."""
    is_limit = isinstance(error, CallError) and error.code == "RESOURCE_EXHAUSTED"
    return is_limit or isinstance(error, UnauthenticatedError)


def _refused(text: str) -> CallError:
    return CallError(text, code="INVALID_ARGUMENT")


def _error_of(error: Exception, target: Target) -> GazetteError:
    """Return the error that the client gets. Texts of connections have addresses of members."""
    member = "/".join(target.path.removeprefix(AT_PREFIX).split("/")[:2])
    if isinstance(error, GazetteError):
        return error
    if isinstance(error, TimeoutError):
        return CallError(f"{member} did not answer in time", code="DEADLINE_EXCEEDED")
    return CallError(
        f"{member} does not answer ({type(error).__name__}); try again", code="UNAVAILABLE"
    )
