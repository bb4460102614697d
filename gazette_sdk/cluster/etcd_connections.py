"""Connections to the members of an Etcd cluster: one is in use, another one replaces it.

All calls of a client run over one connection, so that they see one state of the connection. A
connection is used after its member answered a read that needs the cluster's leader. When it breaks,
or its member does not answer in time, or has no leader, it is closed: its calls end with
:class:`~gazette_sdk.errors.EtcdUnavailableError`. The next call dials all other addresses, one
shortly after the other, and takes the first that answers.

:class:`Endpoints` says which addresses to dial, in which order: those of the configuration, and
those of the member list. It does no I/O. A configured address comes first: it may lead through a
proxy or a load balancer, and it can be reached. An address of the member list is used for a member
that no configured address led to so far. It may be unreachable, or even be an address of another
cluster (``http://localhost:2379`` is Etcd's default), so whoever dials compares the id of the
cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import grpc
import grpc.aio

from gazette_sdk.cluster.etcd_messages import rpc, stubs
from gazette_sdk.errors import (
    ClosedError,
    ConfigurationError,
    EtcdCompactedError,
    EtcdError,
    EtcdUnavailableError,
    LeaseLostError,
)


def split_addresses(text: str) -> tuple[str, ...]:
    """Return the addresses of a comma separated list, without repetitions.

    Raises:
        ConfigurationError: there is none.
    """
    addresses = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not addresses:
        raise ConfigurationError(
            "no Etcd address is given: give one or more of http://HOST:PORT, separated by commas"
        )
    return addresses


class Endpoints:
    """Addresses of the members of one Etcd cluster, in the order in which they are to be dialled.

    Args:
        configured: addresses of the configuration; not empty.
    """

    def __init__(self, configured: Iterable[str]) -> None:
        self.configured = tuple(configured)
        self._is_tls = all(address.startswith("https://") for address in self.configured)
        self._member_of: dict[str, int] = {}
        self._members: dict[int, tuple[str, ...]] = {}
        self._failed: dict[str, None] = {}

    def copy(self) -> Endpoints:
        """Return the same addresses, with what is known of them now."""
        copy = Endpoints(self.configured)
        copy._member_of = dict(self._member_of)
        copy._members = dict(self._members)
        copy._failed = dict(self._failed)
        return copy

    @property
    def unknown(self) -> list[str]:
        """Configured addresses of which it is not known yet which member they lead to."""
        return [address for address in self.configured if address not in self._member_of]

    def reached(self, address: str, member_id: int) -> None:
        """Note that a member answered at an address."""
        self._member_of[address] = member_id
        self._failed.pop(address, None)

    def failed(self, address: str) -> None:
        """Note that an address does not answer: it is dialled last from now on."""
        self._failed.pop(address, None)
        self._failed[address] = None

    def replace_members(self, members: Mapping[int, Iterable[str]]) -> None:
        """Replace the member list.

        Args:
            members: id of each member, and its client URLs. Members without URLs have not started
                yet. An empty list is ignored.
        """
        if members:
            self._members = {member: tuple(urls) for member, urls in members.items()}

    def candidates(self) -> list[str]:
        """Return the addresses to dial, in order: those that failed come last, oldest first."""
        reached = {self._member_of.get(address) for address in self.configured}
        learned = [
            url
            for member, urls in sorted(self._members.items())
            if member not in reached
            for url in urls
            if self._is_usable(url)
        ]
        every = list(dict.fromkeys((*self.configured, *learned)))
        fresh = [address for address in every if address not in self._failed]
        return fresh + [address for address in self._failed if address in every]

    def _is_usable(self, url: str) -> bool:
        """Return True if a learned URL may be dialled: only with TLS where TLS is configured."""
        parts = urlsplit(url)
        return parts.scheme == ("https" if self._is_tls else "http") and bool(parts.hostname)


KEEPALIVE_LEAST_S = 5.5
"""Least pause between HTTP/2 pings on a silent connection. Etcd drops clients that ping more often
than every 5 s."""

_RETRYABLE = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.CANCELLED,
    }
)
"""Statuses caused by the connection or the server's state, not by the request."""


class EtcdNotReachedError(EtcdUnavailableError):
    """No member was reached, or none answered a read."""


class EtcdNoLeaderError(EtcdUnavailableError):
    """The member knows no leader of the cluster. It refused the request before doing anything."""


class EtcdTokenError(EtcdUnavailableError):
    """Etcd does not accept the token any more: the next call gets a new one."""


_TOKEN_ERRORS = ("invalid auth token", "revision of auth store is old")


class ThreadChannel:
    """Channel whose calls gRPC's own threads carry, for any event loop.

    grpc.aio serves one event loop of a process reliably, and another one renews leases. Of the
    interface of ``grpc.aio.Channel`` this has what renewals need: calls of one request and one
    response.

    Args:
        channel: the blocking channel.
    """

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self._state = grpc.ChannelConnectivity.IDLE

    def get_state(self) -> grpc.ChannelConnectivity:
        """Return READY while it is connected, as far as its calls have shown."""
        return self._state

    def unary_unary(self, path: str, **codecs: Any) -> Callable[..., asyncio.Task[Any]]:
        """Return a function that makes a call on the running loop."""
        method = self._channel.unary_unary(path, **codecs)

        def call(request: Any, **options: Any) -> asyncio.Task[Any]:
            work = self._call(method, request, options)
            return asyncio.get_running_loop().create_task(work)

        return call

    async def _call(self, method: Any, request: Any, options: dict[str, Any]) -> Any:
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def report(_: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the call was cancelled
                loop.call_soon_threadsafe(ended.set)

        answer = method.future(request, **options)
        answer.add_done_callback(report)
        try:
            await ended.wait()
        finally:
            answer.cancel()
        code, details = answer.code(), answer.details() or ""
        if code is grpc.StatusCode.OK:
            self._state = grpc.ChannelConnectivity.READY
            return answer.result()
        if is_of_connection(code, details):
            self._state = grpc.ChannelConnectivity.TRANSIENT_FAILURE
        nothing = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(code, nothing, nothing, details=details)

    async def close(self) -> None:
        """Close the channel, and end its calls."""
        self._channel.close()


def open_channel(
    address: str,
    *,
    answer_timeout_s: float,
    cert_file: Path | str | None = None,
    cert_key_file: Path | str | None = None,
    trusted_ca_file: Path | str | None = None,
) -> grpc.aio.Channel:
    """Return a channel to Etcd on the running loop, which connects when it is used.

    Args:
        address: ``http://HOST:PORT``, ``https://HOST:PORT`` or ``unix:///PATH``.
        answer_timeout_s: longest time until the answer to a ping of HTTP/2, after which the
            connection counts as broken. The pings are three times as far apart.
        cert_file: client certificate (PEM), for https.
        cert_key_file: its key.
        trusted_ca_file: certificates of the authorities to trust instead of the system's.

    Raises:
        ConfigurationError: the address or a file can not be used.
    """
    target, is_tls = dial_target(address)
    options = _options(answer_timeout_s)
    if is_tls:
        credentials = _credentials(cert_file, cert_key_file, trusted_ca_file)
        return grpc.aio.secure_channel(target, credentials, options)
    return grpc.aio.insecure_channel(target, options)


def open_thread_channel(
    address: str,
    *,
    answer_timeout_s: float,
    cert_file: Path | str | None = None,
    cert_key_file: Path | str | None = None,
    trusted_ca_file: Path | str | None = None,
) -> ThreadChannel:
    """Return the same for any event loop, as :func:`open_channel` does."""
    target, is_tls = dial_target(address)
    options = _options(answer_timeout_s)
    if is_tls:
        credentials = _credentials(cert_file, cert_key_file, trusted_ca_file)
        return ThreadChannel(grpc.secure_channel(target, credentials, options))
    return ThreadChannel(grpc.insecure_channel(target, options))


def _options(answer_timeout_s: float) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", int(max(KEEPALIVE_LEAST_S, 3 * answer_timeout_s) * 1000)),
        ("grpc.keepalive_timeout_ms", int(answer_timeout_s * 1000)),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.enable_http_proxy", 0),
        # Each client has its own connection, so that they break independently.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def dial_target(address: str) -> tuple[str, bool]:
    """Return the gRPC target of an address, and True if it uses TLS."""
    url = urlsplit(address)
    if url.scheme == "unix" and url.path:
        return f"unix:{url.path}", False
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigurationError(
            f"{address!r} is no Etcd address: give http://HOST:PORT, https://HOST:PORT "
            "or unix:///PATH"
        )
    try:
        port = url.port or 2379
    except ValueError as error:
        raise ConfigurationError(f"{address!r} is no Etcd address: {error}") from error
    host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
    return f"{host}:{port}", url.scheme == "https"


def _credentials(
    cert_file: Path | str | None,
    cert_key_file: Path | str | None,
    trusted_ca_file: Path | str | None,
) -> grpc.ChannelCredentials:
    def read(path: Path | str | None) -> bytes | None:
        try:
            return Path(path).read_bytes() if path else None
        except OSError as error:
            raise ConfigurationError(f"a certificate for Etcd cannot be read: {error}") from error

    return grpc.ssl_channel_credentials(
        root_certificates=read(trusted_ca_file),
        private_key=read(cert_key_file),
        certificate_chain=read(cert_file),
    )


def error_of_status(code: grpc.StatusCode, details: str, what: str) -> EtcdError:
    """Return the error for a failed call. Etcd's texts are part of its interface."""
    text = f"{what}: {details or code.name}"
    if "has been compacted" in details:
        return EtcdCompactedError(text)
    if "requested lease not found" in details:
        return LeaseLostError(text)
    if "no leader" in details:
        return EtcdNoLeaderError(text)
    if any(reason in details for reason in _TOKEN_ERRORS):
        return EtcdTokenError(text)
    if code in _RETRYABLE:
        return EtcdUnavailableError(text)
    return EtcdError(text)


def is_of_connection(code: grpc.StatusCode, details: str) -> bool:
    """Return True if a call failed by its connection, and not by an answer of Etcd."""
    return (
        code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN)
        and "etcdserver:" not in details
    )


def error_of_text(reason: str) -> EtcdError:
    """Return the error for the reason of a cancelled watch."""
    if "no leader" in reason:
        return EtcdNoLeaderError(reason)
    if "compacted" in reason:
        return EtcdCompactedError(reason)
    return EtcdError(reason)


DIAL_STAGGER_S = 0.1
"""Pause between the dials of two addresses. A refused dial is followed by the next one at once."""

ROUND_PAUSE_S = 0.05
"""Pause after all addresses failed. An election takes some tenths of a second."""

ROUND_PAUSE_MAX_S = 0.5
"""Longest such pause: it doubles with each round."""

SLOW_CALL_S = 0.25
"""Time after which the member is checked that does not answer a call."""

LATE_ANSWER_S = 0.05
"""Time for the answers of calls that the former leader decided."""

MEMBERS_PERIOD_S = 10.0
"""Longest period of reading the member list, which shows that the member in use answers."""

REQUIRE_LEADER = ("hasleader", "true")
"""Metadata of a call that a member without a leader refuses at once, before it does anything."""

_LINEARIZABLE = b"\x08\x01"
"""Field 1 of MemberListRequest of etcd 3.5, which the message of etcd3 0.12 does not have yet."""

_log = logging.getLogger(__name__)

CallT = TypeVar("CallT", bound=grpc.aio.Call)


def _stub(name: str) -> functools.cached_property[Any]:
    """Return an attribute of a connection: the stub of a service."""
    return functools.cached_property(lambda self: getattr(stubs, name)(self._channel))


class EtcdConnection:
    """Channel to one address, with its running calls.

    Attributes:
        address: the address.
        member_id: id of the member that answered, 0 before.
        raft_term: newest term of the cluster's leader in an answer.
        is_closed: True from :meth:`close` on.
        slow_calls: its calls that have had no answer for some time.
        probe: checks the member while there are such calls.
    """

    def __init__(self, channel: grpc.aio.Channel | ThreadChannel, address: str) -> None:
        self.address = address
        self.member_id = 0
        self.cluster_id = 0
        self.raft_term = 0
        self.is_closed = False
        self.slow_calls: set[object] = set()
        self.probe: asyncio.Task[None] | None = None
        self._channel = channel
        self._calls: dict[grpc.aio.Call, int] = {}
        self._steps: set[asyncio.Future[Any]] = set()
        self._closing: asyncio.Task[None] | None = None

    # The stubs are made at their first use: a ThreadChannel has no streams.
    kv = _stub("KVStub")
    lease = _stub("LeaseStub")
    watch = _stub("WatchStub")
    maintenance = _stub("MaintenanceStub")
    auth = _stub("AuthStub")
    cluster = _stub("ClusterStub")

    @functools.cached_property
    def renew(self) -> Callable[..., grpc.aio.Call]:
        """Call that renews a lease once.

        The method is a stream, of which this sends one request and its end. Etcd sends one response
        and the status, as for a call without streams.
        """
        return self._channel.unary_unary(
            "/etcdserverpb.Lease/LeaseKeepAlive",
            request_serializer=rpc.LeaseKeepAliveRequest.SerializeToString,
            response_deserializer=rpc.LeaseKeepAliveResponse.FromString,
        )

    @property
    def is_ready(self) -> bool:
        """True if it is connected, as far as known."""
        return not self.is_closed and self._channel.get_state() is grpc.ChannelConnectivity.READY

    @contextlib.contextmanager
    def running(self, call: CallT) -> Iterator[CallT]:
        """Cancel a call at the end of this block, or when the connection is closed."""
        self._calls[call] = self.raft_term
        try:
            yield call
        finally:
            del self._calls[call]
            call.cancel()

    async def step(self, awaitable: Awaitable[Any]) -> Any:
        """Await one read or write of a stream, which :meth:`close` can cancel."""
        step = asyncio.ensure_future(awaitable)
        self._steps.add(step)
        try:
            return await step
        finally:
            self._steps.discard(step)

    def note(self, header: Any) -> None:
        """Note what the header of an answer says about the member and its leader."""
        self.member_id, self.cluster_id = header.member_id, header.cluster_id
        self.raft_term = max(self.raft_term, header.raft_term)

    def calls_before(self, raft_term: int) -> list[grpc.aio.Call]:
        """Return the unary calls that began under an earlier leader, as far as known."""
        return [
            call
            for call, begun in self._calls.items()
            if 0 < begun < raft_term and isinstance(call, grpc.aio.UnaryUnaryCall)
        ]

    def close(self) -> None:
        """Begin to close the connection. Running calls end with an error."""
        if self.is_closed:
            return
        self.is_closed = True
        # Closing the channel ends only some of them, and does not wake pending writes.
        for call in (*self._calls, *self._steps):
            call.cancel()
        self._closing = asyncio.ensure_future(self._channel.close())

    async def aclose(self) -> None:
        """Close the connection, and wait until it is closed."""
        self.close()
        assert self._closing is not None
        await self._closing


class Connections:
    """The connection in use of a client, and its replacement.

    Args:
        endpoints: the addresses.
        open_channel: returns a channel to an address.
        answer_timeout_s: longest time until a live member answers.

    Attributes:
        endpoints: the addresses.
        cluster_id: of the Etcd cluster, from the first connection on.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        open_channel: Callable[[str], grpc.aio.Channel | ThreadChannel],
        *,
        answer_timeout_s: float,
    ) -> None:
        self.endpoints = endpoints
        self.cluster_id = 0
        self._answer_timeout_s = answer_timeout_s
        self._open_channel = open_channel
        self._current: EtcdConnection | None = None
        self._replaced: set[EtcdConnection] = set()
        self._dialling: asyncio.Task[EtcdConnection] | None = None
        self._probes: set[asyncio.Task[None]] = set()
        self._members: asyncio.Task[None] | None = None
        self._failed_rounds = 0
        self._is_closed = False

    def beside(
        self, open_channel: Callable[[str], ThreadChannel], *, answer_max_s: float
    ) -> Connections:
        """Return other connections to the same cluster, for another event loop.

        Args:
            open_channel: returns a channel to an address.
            answer_max_s: longest time until a live member answers, if it is shorter than here.
        """
        timeout_s = min(self._answer_timeout_s, answer_max_s)
        beside = Connections(self.endpoints.copy(), open_channel, answer_timeout_s=timeout_s)
        beside.cluster_id = self.cluster_id
        return beside

    async def aclose(self) -> None:
        """Close all connections. Running calls end with an error."""
        self._is_closed = True
        tasks = [t for t in (self._dialling, self._members, *self._probes) if t is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        closing = [c.aclose() for c in (self._current, *self._replaced) if c is not None]
        self._current = None
        await asyncio.gather(*closing)

    # -------------------------------------------------------------- the one in use

    async def current(self, deadline: float) -> EtcdConnection:
        """Return the connection in use. Dial until there is one.

        Args:
            deadline: loop time until which to dial.

        Raises:
            EtcdNotReachedError: no member answers.
            EtcdError: an address leads to another Etcd cluster.
        """
        loop = asyncio.get_running_loop()
        reason = "no answer in time"  # or why the last dial failed, also if the next one takes long
        while True:
            self._check_open()
            connection = self._current
            if connection is not None:
                if connection.is_ready:
                    return connection
                self.fail(connection, "the connection broke")
            dialling = self._dialling
            if dialling is None or dialling.done():
                dialling = loop.create_task(self._dial_any(), name="dial of Etcd")
                dialling.add_done_callback(_retrieve)
                self._dialling = dialling
            try:
                async with asyncio.timeout_at(deadline):
                    # It is cancelled by `aclose` only, and is no cancellation of this task.
                    await asyncio.wait([dialling])
                if not dialling.cancelled():
                    dialling.result()
                continue
            except TimeoutError:
                pass
            except EtcdUnavailableError as error:
                reason = str(error)
            pause_s = min(ROUND_PAUSE_S * 2**self._failed_rounds, ROUND_PAUSE_MAX_S)
            if loop.time() + pause_s >= deadline:
                addresses = ", ".join(self.endpoints.configured)
                raise EtcdNotReachedError(
                    f"no Etcd answers at {addresses} ({reason}); check the address, and that Etcd "
                    "runs"
                )
            await asyncio.sleep(pause_s)

    def fail(self, connection: EtcdConnection, reason: str) -> None:
        """Close a connection that broke, or whose member does not answer or has no leader."""
        if connection is self._current:
            _log.info("Etcd at %s is left: %s", connection.address, reason)
            self._current = None
            self.endpoints.failed(connection.address)
        self._close(connection)

    async def dial_other(self, suspect: EtcdConnection) -> EtcdConnection:
        """Return a connection other than one whose member does not answer.

        It is the one in use if that was replaced already. Else give it to :meth:`adopt` or
        :meth:`discard` after use.

        Raises:
            EtcdUnavailableError: no other member answers.
        """
        if self._current is not None and self._current is not suspect:
            return self._current
        candidates = self.endpoints.candidates()
        others = [address for address in candidates if address != suspect.address]
        # At last the same address again: the connection may be dead, and the member alive.
        return await self._first_of([*others, suspect.address])

    def adopt(self, connection: EtcdConnection, instead_of: EtcdConnection) -> None:
        """Use a connection whose member answered, where the one of ``instead_of`` does not."""
        if connection is self._current:
            return
        if self._current is None or self._current is instead_of:
            self.fail(instead_of, f"no answer in time, but there is one at {connection.address}")
            self._current = connection
        else:
            self._close(connection)

    def discard(self, connection: EtcdConnection) -> None:
        """Close a connection of :meth:`dial_other`, unless it came into use."""
        if connection is not self._current:
            self._close(connection)

    def _close(self, connection: EtcdConnection) -> None:
        self._replaced.add(connection)
        connection.close()
        closing = connection._closing  # noqa: SLF001 - of this module
        assert closing is not None
        closing.add_done_callback(lambda _: self._replaced.discard(connection))

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the Etcd client was closed: make another one")

    # -------------------------------------------------------------- dialling

    async def _dial_any(self) -> EtcdConnection:
        """Dial all candidates, and use the first that answers."""
        self._failed_rounds = min(self._failed_rounds + 1, 10)
        connection = await self._first_of(self.endpoints.candidates())
        self._failed_rounds = 0
        if self._current is None:
            self._current = connection
            if self._members is None:
                self._members = asyncio.get_running_loop().create_task(
                    self._follow_members(), name="member list of Etcd"
                )
        else:
            self._close(connection)
        return self._current

    async def _first_of(self, addresses: list[str]) -> EtcdConnection:
        """Return the first verified connection to one of the addresses, dialled in order.

        Raises:
            EtcdError: none could be made; another error than a missing answer comes first.
        """
        left = list(addresses)
        dials: set[asyncio.Task[EtcdConnection]] = set()
        failures: list[EtcdError] = []
        try:
            while left or dials:
                if left:
                    dials.add(asyncio.ensure_future(self._dial(left.pop(0))))
                done, _ = await asyncio.wait(
                    dials,
                    timeout=DIAL_STAGGER_S if left else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for dial in done:
                    dials.discard(dial)
                    try:
                        return dial.result()
                    except EtcdError as error:
                        failures.append(error)
        finally:
            await self._abandon(dials)
        failures.sort(key=lambda error: isinstance(error, EtcdUnavailableError))
        raise failures[0]

    async def _abandon(self, dials: set[asyncio.Task[EtcdConnection]]) -> None:
        """Cancel dials, and close the connections that were made nevertheless."""
        for dial in dials:
            dial.cancel()
        for ended in await asyncio.gather(*dials, return_exceptions=True):
            if isinstance(ended, EtcdConnection):
                self._close(ended)

    async def _dial(self, address: str) -> EtcdConnection:
        """Connect to an address, and check that its member answers and has a leader.

        Raises:
            EtcdUnavailableError: it does not.
            EtcdError: it is a member of another cluster.
        """
        connection = EtcdConnection(self._open_channel(address), address)
        try:
            await self._read_members(connection)
            self._check_cluster(connection)
        except BaseException as error:
            if isinstance(error, EtcdError):
                self.endpoints.failed(address)
            self._close(connection)
            raise
        return connection

    def _check_cluster(self, connection: EtcdConnection) -> None:
        if self.cluster_id == 0:
            self.cluster_id = connection.cluster_id
        if connection.cluster_id in (self.cluster_id, 0):
            return
        text = (
            f"etcd ClusterID mismatch (expected {self.cluster_id}, got {connection.cluster_id}) at "
            f"{connection.address}; this is another Etcd than before: restart the process"
        )
        if connection.address in self.endpoints.configured:
            raise EtcdError(text)
        raise EtcdUnavailableError(text)

    async def _read_members(self, connection: EtcdConnection) -> None:
        """Read the member list through the leader, which shows that the member has one.

        Raises:
            EtcdUnavailableError: no answer, or no leader.
        """
        request = rpc.MemberListRequest.FromString(_LINEARIZABLE)
        call = connection.cluster.MemberList(
            request, timeout=self._answer_timeout_s, metadata=(REQUIRE_LEADER,)
        )
        task = asyncio.current_task()
        assert task is not None
        try:
            with connection.running(call):
                response = await call
        except asyncio.CancelledError as error:
            if task.cancelling() or not connection.is_closed:
                raise
            raise EtcdNotReachedError("the connection was closed") from error
        except grpc.aio.AioRpcError as error:
            if error.code() in (
                grpc.StatusCode.PERMISSION_DENIED,
                grpc.StatusCode.UNAUTHENTICATED,
                grpc.StatusCode.INVALID_ARGUMENT,
            ):
                return  # an answer of Etcd that keeps its member list from strangers
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise EtcdNotReachedError(
                    f"no answer within {self._answer_timeout_s:g} s"
                ) from error
            raise error_of_status(error.code(), error.details() or "", "MemberList") from error
        connection.note(response.header)
        self.endpoints.reached(connection.address, connection.member_id)
        if self.cluster_id in (connection.cluster_id, 0):
            self.endpoints.replace_members(
                {member.ID: tuple(member.clientURLs) for member in response.members}
            )

    async def _follow_members(self) -> None:
        """Read the member list from time to time, and the members after configured addresses."""
        warned = False
        while True:
            for address in self.endpoints.unknown:
                try:
                    self._close(await self._dial(address))
                except EtcdUnavailableError as error:
                    _log.debug("Etcd at %s does not answer: %s", address, error)
                except EtcdError as error:
                    if not warned:
                        _log.warning("the address %s is of no use: %s", address, error)
                    warned = True
            await asyncio.sleep(min(MEMBERS_PERIOD_S, self._answer_timeout_s))
            connection = self._current
            if connection is not None and connection.is_ready:
                try:
                    await self._read_members(connection)
                except (EtcdNoLeaderError, EtcdNotReachedError) as error:
                    self.fail(connection, str(error))  # a watch may be all that runs over it
                except EtcdError as error:
                    _log.debug("the member list of Etcd was not read: %s", error)

    # -------------------------------------------------------------- slow calls

    @contextlib.contextmanager
    def checked_while_slow(self, connection: EtcdConnection) -> Iterator[None]:
        """Check the member of a connection while this block runs, after a short time.

        A member that does not answer is left. Calls that an earlier leader may have lost end.
        """
        call = object()

        def begin() -> None:
            connection.slow_calls.add(call)
            if connection.probe is None or connection.probe.done():
                connection.probe = asyncio.ensure_future(self._check(connection))
                self._probes.add(connection.probe)
                connection.probe.add_done_callback(self._probes.discard)

        timer = asyncio.get_running_loop().call_later(SLOW_CALL_S, begin)
        try:
            yield
        finally:
            timer.cancel()
            connection.slow_calls.discard(call)

    async def _check(self, connection: EtcdConnection) -> None:
        while connection.slow_calls and not connection.is_closed:
            try:
                await self._read_members(connection)
            except (EtcdNoLeaderError, EtcdNotReachedError) as error:
                self.fail(connection, str(error))
            except EtcdError as error:
                if not connection.is_ready:
                    self.fail(connection, str(error))
                # Else an election, for instance. The member answers, so it is asked again.
            if connection.calls_before(connection.raft_term):
                await asyncio.sleep(LATE_ANSWER_S)
                for call in connection.calls_before(connection.raft_term):
                    call.cancel()
            await asyncio.sleep(SLOW_CALL_S)


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Mark the error of a task as retrieved: all who waited for it may have been cancelled."""
    if not task.cancelled():
        task.exception()
