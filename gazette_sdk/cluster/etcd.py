"""Etcd client: ranges at a revision, transactions, leases, watches.

``etcd3`` provides the messages and stubs, ``grpc.aio`` sends them on the running event loop.
Callers use plain dataclasses, and get the errors of :mod:`gazette_sdk.errors`:

* :class:`~gazette_sdk.errors.EtcdUnavailableError`: no answer; the same request may succeed later,
* :class:`~gazette_sdk.errors.EtcdCompactedError`: Etcd no longer keeps the revision,
* :class:`~gazette_sdk.errors.LeaseLostError`: the lease has ended,
* :class:`~gazette_sdk.errors.EtcdError`: all others, such as a refusal.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import operator
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf.unknown_fields import UnknownFieldSet

from gazette_sdk.cluster.etcd_connections import (
    REQUIRE_LEADER,
    Connections,
    Endpoints,
    EtcdConnection,
    EtcdNoLeaderError,
    EtcdTokenError,
    ThreadChannel,
    error_of_status,
    error_of_text,
    is_of_connection,
    open_channel,
    open_thread_channel,
    split_addresses,
)
from gazette_sdk.cluster.etcd_messages import (
    Compare,
    Delete,
    Operation,
    Put,
    RangeResult,
    TxnResult,
    WatchBatch,
    compare_message,
    header_of,
    operation_message,
    prefix_end,
    range_result_of,
    rpc,
    watch_batch_of,
)
from gazette_sdk.cluster.etcd_server import MINIMUM_VERSION, parse_version
from gazette_sdk.cluster.lease import LeaseLife, boot_s, keep_alive, run_beside
from gazette_sdk.errors import (
    ClosedError,
    ConfigurationError,
    EtcdCompactedError,
    EtcdError,
    EtcdUnavailableError,
    LeaseLostError,
)

CALL_TIMEOUT_S = 10.0
"""Bound of one request, including the wait for a connection."""

ANSWER_TIMEOUT_S = 5.0
"""Default of the longest time until a live member answers: a third of a lease of 15 s."""

REPEAT_PAUSE_S = 0.05
"""Pause before a request is repeated that may be repeated."""


@dataclass(frozen=True, slots=True)
class EtcdStatus:
    """State of one member of Etcd.

    Attributes:
        address: its address.
        error: why it did not answer; empty if it did.
        member_id: its id; 0 if it did not answer, as the next ones.
        version: its version.
        leader: id of the leader that it knows; 0 for none.
        size_bytes: size of its database.
        size_in_use_bytes: what a defragmentation leaves of it; None from versions that do not say.
        quota_bytes: size from which on it refuses writes; None from versions before 3.6.
        alarms: alarms and errors that it reports.
        answer_s: time to its answer, in seconds.
    """

    address: str
    error: str = ""
    member_id: int = 0
    version: str = ""
    leader: int = 0
    size_bytes: int = 0
    size_in_use_bytes: int | None = None
    quota_bytes: int | None = None
    alarms: tuple[str, ...] = ()
    answer_s: float = 0.0


_ERRORS, _IN_USE, _QUOTA = 8, 9, 13
"""Fields of StatusResponse that the message of etcd3 0.12 does not have yet."""


def _status_of(address: str, response: Any, answer_s: float) -> EtcdStatus:
    """Return the state of a member from its answer."""
    unknown: dict[int, list[Any]] = {}
    fields: Any = UnknownFieldSet(response)
    for field in fields:
        unknown.setdefault(field.field_number, []).append(field.data)
    return EtcdStatus(
        address=address,
        member_id=response.header.member_id,
        version=response.version,
        leader=response.leader,
        size_bytes=response.dbSize,
        size_in_use_bytes=unknown.get(_IN_USE, [None])[-1],
        quota_bytes=unknown.get(_QUOTA, [None])[-1],
        alarms=tuple(each.decode(errors="replace") for each in unknown.get(_ERRORS, ())),
        answer_s=answer_s,
    )


# ------------------------------------------------------------------ the client


class Etcd:
    """A client of one Etcd cluster, on the event loop that :meth:`connect` ran on.

    Attributes:
        address: its address.
        version: version of the server that answered :meth:`connect`.
    """

    def __init__(
        self,
        connections: Connections,
        address: str,
        open_beside: Callable[[str], ThreadChannel],
        open_with: Callable[[str], grpc.aio.Channel] | None = None,
    ) -> None:
        self.address = address
        self.version: tuple[int, ...] = (0,)
        self._connections = connections
        self._kv = _Methods("kv")
        self._lease = _Methods("lease")
        self._maintenance = _Methods("maintenance")
        self._auth = _Methods("auth")
        self._credentials: tuple[str, str] | None = None
        self._token = ""
        self._closed = False
        self._open_beside = open_beside
        self._open_with = open_with
        self._renewals: set[asyncio.Task[None]] = set()

    @classmethod
    async def connect(
        cls,
        address: str,
        *,
        dial_timeout_s: float = 5.0,
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
        cert_file: Path | str | None = None,
        cert_key_file: Path | str | None = None,
        trusted_ca_file: Path | str | None = None,
        user: str = "",
        password: str = "",
    ) -> Etcd:
        """Connect, and check that the server is new enough.

        Args:
            address: ``http://HOST:PORT``, ``https://HOST:PORT`` or ``unix:///PATH``; or several,
                separated by commas. Further members are learned from Etcd.
            dial_timeout_s: longest time until the connection and the first answer.
            answer_timeout_s: longest time until a live member answers; after it another member is
                used.
            cert_file: client certificate (PEM), for https.
            cert_key_file: its key.
            trusted_ca_file: certificates of the authorities to trust instead of the system's.
            user: user of Etcd, if it has authentication enabled; empty for none.
            password: password of the user.

        Raises:
            ConfigurationError: the address or a file can not be used, or Etcd refuses the user or
                the password.
            EtcdUnavailableError: no answer in time.
            EtcdError: the server is older than 3.5.
        """
        open_with = functools.partial(
            open_channel,
            answer_timeout_s=answer_timeout_s,
            cert_file=cert_file,
            cert_key_file=cert_key_file,
            trusted_ca_file=trusted_ca_file,
        )
        open_beside = functools.partial(open_thread_channel, **open_with.keywords)
        addresses = split_addresses(address)
        for each in addresses:  # a bad address, or a missing file, is reported before it is used
            await open_with(each).close()
        endpoints = Endpoints(addresses)
        connections = Connections(endpoints, open_with, answer_timeout_s=answer_timeout_s)
        client = cls(connections, address, open_beside, open_with)
        client._credentials = (user, password) if user else None
        try:
            await client._check_version(dial_timeout_s)
            await client._authenticate(await client._connected())
        except BaseException:
            await client.aclose()
            raise
        return client

    @property
    def cluster_id(self) -> int:
        """Id of the Etcd cluster."""
        return self._connections.cluster_id

    async def aclose(self) -> None:
        """Close the connections. Running calls and renewals end with an error."""
        self._closed = True
        for renewal in self._renewals:
            renewal.cancel()
        if self._renewals:
            await asyncio.wait(self._renewals)
        await self._connections.aclose()

    async def range(
        self, key: bytes, range_end: bytes = b"", *, revision: int = 0, limit: int = 0
    ) -> RangeResult:
        """Read ``key``, or all keys of ``[key, range_end)``.

        Args:
            key: first key.
            range_end: exclusive end of the range; see :func:`prefix_end`.
            revision: revision of the store to read at; 0: the current one.
            limit: greatest number of keys; 0: all.

        Raises:
            EtcdCompactedError: ``revision`` is no longer kept.
            EtcdUnavailableError: no answer.
        """
        request = rpc.RangeRequest(key=key, range_end=range_end, revision=revision, limit=limit)
        return range_result_of(await self._call(self._kv.Range, request, is_repeatable=True))

    async def txn(
        self,
        compares: Iterable[Compare],
        then: Iterable[Operation],
        otherwise: Iterable[Operation] = (),
    ) -> TxnResult:
        """Run one atomic transaction: ``then`` if all of ``compares`` hold, else ``otherwise``.

        Raises:
            LeaseLostError: an operation puts a key under a lease that has ended.
            EtcdUnavailableError: no answer. The transaction may or may not have happened.
            EtcdError: Etcd refused it, for instance as too large.
        """
        request = rpc.TxnRequest(
            compare=[compare_message(c) for c in compares],
            success=[operation_message(o) for o in then],
            failure=[operation_message(o) for o in otherwise],
        )
        response = await self._call(self._kv.Txn, request)
        header = header_of(response.header)
        return TxnResult(
            succeeded=response.succeeded,
            revision=header.revision,
            header=header,
            responses=tuple(
                range_result_of(r.response_range) if r.HasField("response_range") else None
                for r in response.responses
            ),
            deleted=sum(r.response_delete_range.deleted for r in response.responses),
        )

    async def put(self, key: bytes, value: bytes, *, lease: int = 0) -> int:
        """Write a key unconditionally, and return the revision."""
        return (await self.txn((), (Put(key, value, lease),))).revision

    async def delete(self, key: bytes, range_end: bytes = b"") -> int:
        """Delete a key or range unconditionally, and return the revision of the store."""
        return (await self.txn((), (Delete(key, range_end),))).revision

    # -------------------------------------------------------------- members

    async def statuses(self, *, timeout_s: float = ANSWER_TIMEOUT_S) -> list[EtcdStatus]:
        """Return the state of all members, each asked at its own address, at the same time.

        Args:
            timeout_s: longest time until the answer of a member.

        Raises:
            EtcdUnavailableError: no member has answered with the list of members.
        """
        connection = await self._connected()
        metadata = await self._authenticate(connection)
        with self._errors("MemberList", connection):
            call = connection.cluster.MemberList(
                rpc.MemberListRequest(), timeout=timeout_s, metadata=metadata
            )
            with connection.running(call):
                members = (await call).members
        addresses = [(each.clientURLs or [connection.address])[0] for each in members]
        return await asyncio.gather(*(self._status(each, timeout_s) for each in addresses))

    async def _status(self, address: str, timeout_s: float) -> EtcdStatus:
        """Return the state of the member at an address."""
        assert self._open_with is not None, "made by `connect`"
        begun = asyncio.get_running_loop().time()
        try:
            async with self._open_with(address) as channel:
                stub = EtcdConnection(channel, address).maintenance
                response = await stub.Status(rpc.StatusRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return EtcdStatus(address, error=error.details() or error.code().name)
        except ConfigurationError as error:
            return EtcdStatus(address, error=str(error))
        return _status_of(address, response, asyncio.get_running_loop().time() - begun)

    # -------------------------------------------------------------- leases

    async def grant(self, ttl_s: int) -> int:
        """Create a lease that lives for ``ttl_s`` seconds unless renewed, and return its id."""
        # A lease whose grant was not answered ends by itself, and nothing is attached to it.
        response = await self._call(
            self._lease.LeaseGrant, rpc.LeaseGrantRequest(TTL=ttl_s), is_repeatable=True
        )
        if response.error:
            raise EtcdError(f"Etcd did not grant a lease: {response.error}")
        lease: int = response.ID
        return lease

    async def revoke(self, lease: int, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """End a lease: all keys that are attached to it are deleted in one revision.

        Raises:
            LeaseLostError: it had ended already, perhaps by an earlier attempt of this call whose
                answer was lost.
        """
        request = rpc.LeaseRevokeRequest(ID=lease)
        await self._call(self._lease.LeaseRevoke, request, timeout_s=timeout_s, is_repeatable=True)

    async def leases(self) -> list[int]:
        """Return the ids of all leases."""
        response = await self._call(
            self._lease.LeaseLeases, rpc.LeaseLeasesRequest(), is_repeatable=True
        )
        return [status.ID for status in response.leases]

    async def time_to_live(self, lease: int) -> int:
        """Return the seconds until a lease ends unless it is renewed; -1 if it has ended."""
        request = rpc.LeaseTimeToLiveRequest(ID=lease)
        remaining: int = (
            await self._call(self._lease.LeaseTimeToLive, request, is_repeatable=True)
        ).TTL
        return remaining

    async def keep_alive(
        self,
        lease: int,
        ttl_s: float,
        *,
        granted_at: float | None = None,
        life: LeaseLife | None = None,
    ) -> None:
        """Renew ``lease`` every third of its ``ttl_s``, until cancelled.

        It is renewed on a thread and a connection of its own, so that no work of this event loop
        delays it. Broken connections are replaced for as long as the lease can still be alive. The
        schedule, and the end of a lease whose loop is stuck, are those of
        :mod:`~gazette_sdk.cluster.lease`.

        Args:
            lease: its id.
            ttl_s: its time to live.
            granted_at: time since boot (:func:`~gazette_sdk.cluster.lease.boot_s`) at which
                its grant was requested; by default now.
            life: gets the time until which the lease is alive.

        Raises:
            LeaseLostError: it ran out, or was revoked.
            ClosedError: this client was closed.
        """
        self._check_open()
        begun_at = boot_s() if granted_at is None else granted_at
        known = LeaseLife() if life is None else life
        known.alive_until = begun_at + ttl_s
        # A dial that waits for a silent member ends before the next renewal is due.
        connections = self._connections.beside(self._open_beside, answer_max_s=ttl_s / 3)
        beside = Etcd(connections, self.address, self._open_beside)
        beside._credentials = self._credentials

        async def work() -> None:
            async with contextlib.aclosing(beside):
                await keep_alive(
                    connections, beside._renew, lease, ttl_s, granted_at=begun_at, life=known
                )

        renewal = asyncio.ensure_future(run_beside(work(), known, sign_s=ttl_s / 10))
        self._renewals.add(renewal)
        try:
            await asyncio.wait([renewal])
            self._check_open()
            renewal.result()
        finally:
            renewal.cancel()
            await asyncio.wait([renewal])
            self._renewals.discard(renewal)

    async def _renew(self, connection: EtcdConnection, lease: int, timeout_s: float) -> float:
        """Renew a lease over one connection, and return its new time to live."""
        metadata = await self._authenticate(connection)
        with self._errors("keep-alive", connection):
            call = connection.renew(
                rpc.LeaseKeepAliveRequest(ID=lease),
                metadata=(REQUIRE_LEADER, *metadata),
                timeout=timeout_s,
            )
            with connection.running(call):
                response = await call
        connection.note(response.header)
        if response.TTL <= 0:
            raise LeaseLostError(
                f"the lease ran out or was revoked: lease {lease:x}; restart the process"
            )
        return float(response.TTL)

    # -------------------------------------------------------------- watches

    async def watch(
        self,
        prefix: bytes,
        start_revision: int,
        *,
        on_created: Callable[[], None] | None = None,
    ) -> AsyncGenerator[WatchBatch, None]:
        """Yield changes of keys that begin with ``prefix``, from ``start_revision`` on.

        It requests progress notifications, and an error when the server loses the cluster's
        leader. It ends only by an error; close the iterator after use
        (:func:`contextlib.aclosing`).

        Args:
            prefix: beginning of the keys.
            start_revision: first revision to send changes of.
            on_created: called when the server has accepted the watch.

        Raises:
            EtcdUnavailableError: the connection or the server was lost: watch again.
            EtcdCompactedError: changes from ``start_revision`` on are no longer kept.
            EtcdError: Etcd refused.
        """
        create = rpc.WatchCreateRequest(
            key=prefix,
            range_end=prefix_end(prefix),
            start_revision=start_revision,
            progress_notify=True,
        )
        connection = await self._connected()
        metadata = (REQUIRE_LEADER, *(await self._authenticate(connection, renew=True)))
        with (
            self._errors("watch", connection),
            connection.running(connection.watch.Watch(metadata=metadata)) as call,
        ):
            await connection.step(call.write(rpc.WatchRequest(create_request=create)))
            while (response := await connection.step(call.read())) is not grpc.aio.EOF:
                connection.note(response.header)
                if response.compact_revision:
                    raise EtcdCompactedError(
                        f"revision {start_revision} was compacted away; Etcd keeps changes "
                        f"from {response.compact_revision} on: restart the process",
                        compact_revision=response.compact_revision,
                    )
                if response.canceled:
                    failure = error_of_text(response.cancel_reason or "watch cancelled")
                    if isinstance(failure, EtcdNoLeaderError):
                        self._connections.fail(connection, str(failure))
                    raise failure
                if response.created:
                    if on_created is not None:
                        on_created()
                else:
                    yield watch_batch_of(response)
        raise EtcdUnavailableError(
            f"Etcd ended the watch from revision {start_revision}: check that it runs"
        )

    # -------------------------------------------------------------- calls

    async def _connected(self) -> EtcdConnection:
        """Return the connection in use, within the bound of a call."""
        self._check_open()
        deadline = asyncio.get_running_loop().time() + CALL_TIMEOUT_S
        return await self._connections.current(deadline)

    async def _check_version(self, timeout_s: float) -> None:
        status = await self._call(
            self._maintenance.Status,
            rpc.StatusRequest(),
            timeout_s=timeout_s,
            is_repeatable=True,
            authenticates=False,
        )
        self.version = parse_version(status.version)
        if self.version[: len(MINIMUM_VERSION)] < MINIMUM_VERSION:
            minimum = ".".join(map(str, MINIMUM_VERSION))
            raise EtcdError(
                f"Etcd at {self.address} is version {status.version}; upgrade it to {minimum} "
                "or later"
            )

    async def _call(
        self,
        method: _Method,
        request: Any,
        *,
        timeout_s: float = CALL_TIMEOUT_S,
        is_repeatable: bool = False,
        authenticates: bool = True,
    ) -> Any:
        """Send one unary request.

        Args:
            method: of the stub of a service.
            request: the request.
            timeout_s: bound of the call, including the wait for a connection.
            is_repeatable: repeat it if it is not known whether Etcd did it. Other requests are
                repeated only if Etcd certainly did not.
            authenticates: send the token.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        what = type(request).__name__
        token_errors = 0
        while True:
            self._check_open()
            connection = await self._connections.current(deadline)
            try:
                token = await self._authenticate(connection) if authenticates else ()
                with self._errors(what, connection):
                    call = method(connection)(
                        request,
                        timeout=max(0.0, deadline - loop.time()),
                        metadata=(REQUIRE_LEADER, *token),
                    )
                    with connection.running(call), self._connections.checked_while_slow(connection):
                        response = await call
            except EtcdTokenError:
                token_errors += 1  # an expired token is replaced once
                if token_errors > 1:
                    raise
            except EtcdUnavailableError as error:
                may_repeat = is_repeatable or isinstance(error, EtcdNoLeaderError)
                if not may_repeat or loop.time() + REPEAT_PAUSE_S >= deadline:
                    raise
                await asyncio.sleep(REPEAT_PAUSE_S)
            else:
                if hasattr(response, "header"):
                    connection.note(response.header)
                    # Unless the member list told it, which Etcd may keep from strangers.
                    self._connections.cluster_id = (
                        self._connections.cluster_id or connection.cluster_id
                    )
                return response

    async def _authenticate(
        self, connection: EtcdConnection, *, renew: bool = False
    ) -> tuple[tuple[str, str], ...]:
        """Return the metadata of a call, with a token if there are credentials.

        Args:
            connection: the connection of the call.
            renew: get a new token. Etcd reports an expired token of a watch as lack of permission.

        Raises:
            ConfigurationError: Etcd refuses the user or the password.
            EtcdUnavailableError: no answer.
        """
        if self._credentials is None:
            return ()
        if renew or not self._token:
            user, password = self._credentials
            request = rpc.AuthenticateRequest(name=user, password=password)
            try:
                with self._errors("Authenticate", connection):
                    call = connection.auth.Authenticate(
                        request, timeout=CALL_TIMEOUT_S, metadata=(REQUIRE_LEADER,)
                    )
                    with connection.running(call), self._connections.checked_while_slow(connection):
                        self._token = (await call).token
            except EtcdUnavailableError:
                raise
            except EtcdError as error:
                raise ConfigurationError(
                    f"Etcd at {self.address} refuses user {user!r}: {error}; check --etcd.user and "
                    "--etcd.password"
                ) from error
        return (("token", self._token),)

    def _check_open(self, cause: BaseException | None = None) -> None:
        if self._closed:
            raise ClosedError("the Etcd client was closed: make another one") from cause

    @contextlib.contextmanager
    def _errors(self, what: str, connection: EtcdConnection) -> Iterator[None]:
        """Translate errors of gRPC, and leave a connection that broke or has no leader.

        grpc.aio reports a call that was cancelled by closing its connection as the caller's
        cancellation, and may report the caller's cancellation as the status of the call. Both are
        corrected here.
        """
        self._check_open()
        task = asyncio.current_task()
        cancellations = task.cancelling() if task is not None else 0
        try:
            yield
        except (
            asyncio.CancelledError,
            asyncio.InvalidStateError,
            grpc.aio.AioRpcError,
            grpc.aio.UsageError,
        ) as error:
            if task is not None and task.cancelling() > cancellations:
                if isinstance(error, asyncio.CancelledError):
                    raise
                raise asyncio.CancelledError from error
            self._check_open(error)
            if not isinstance(error, grpc.aio.AioRpcError):
                raise EtcdUnavailableError(
                    f"{what}: the call was ended, because Etcd at {connection.address} does not "
                    "answer, or its leader changed"
                ) from error
            failure = error_of_status(error.code(), error.details() or "", what)
            if isinstance(failure, EtcdTokenError):
                self._token = ""
            if (
                isinstance(failure, EtcdNoLeaderError)
                or is_of_connection(error.code(), error.details() or "")
                or not connection.is_ready
            ):
                self._connections.fail(connection, str(failure))
            raise failure from error


_Method = Callable[[EtcdConnection], Any]
"""Selects a method of a stub of a connection."""


class _Methods:
    """Methods of one service of Etcd, to be called over any connection."""

    def __init__(self, service: str) -> None:
        self._service = service

    def __getattr__(self, name: str) -> _Method:
        return operator.attrgetter(f"{self._service}.{name}")
