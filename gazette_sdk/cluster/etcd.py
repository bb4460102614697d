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
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio

from gazette_sdk.cluster._etcd3 import rpc, stubs
from gazette_sdk.cluster.etcd_binary import MINIMUM_VERSION, parse_version
from gazette_sdk.cluster.etcd_channel import (
    EtcdTokenError,
    error_of_status,
    error_of_text,
    open_channel,
)
from gazette_sdk.cluster.etcd_messages import (
    Compare,
    Delete,
    Get,
    KeyValue,
    Operation,
    Put,
    RangeResult,
    TxnResult,
    WatchBatch,
    WatchEvent,
    compare_message,
    header_of,
    operation_message,
    prefix_end,
    range_result_of,
    watch_batch_of,
)
from gazette_sdk.errors import (
    ClosedError,
    ConfigurationError,
    EtcdCompactedError,
    EtcdError,
    EtcdUnavailableError,
    LeaseLostError,
)
from gazette_sdk.outage import Outage

__all__ = [
    "Compare",
    "Delete",
    "Etcd",
    "Get",
    "KeyValue",
    "Operation",
    "Put",
    "RangeResult",
    "TxnResult",
    "WatchBatch",
    "WatchEvent",
    "prefix_end",
]

CALL_TIMEOUT_S = 10.0
"""Bound of one request, including the wait for a connection."""

DIAGNOSIS_TIMEOUT_S = 0.5
"""Additional time of a failed connect to find the reason of the failure."""

RENEWAL_RETRY_S = 0.5
"""Pause before a broken stream of lease renewals is replaced."""

_log = logging.getLogger(__name__)

CallT = TypeVar("CallT", bound=grpc.aio.Call)


# ------------------------------------------------------------------ the client


class Etcd:
    """A client of one Etcd cluster, on the event loop that :meth:`connect` ran on.

    Attributes:
        address: its address.
        version: version of the server that answered :meth:`connect`.
    """

    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        self.address = address
        self.version: tuple[int, ...] = (0,)
        self._channel = channel
        self._kv = stubs.KVStub(channel)
        self._lease = stubs.LeaseStub(channel)
        self._watch = stubs.WatchStub(channel)
        self._maintenance = stubs.MaintenanceStub(channel)
        self._auth = stubs.AuthStub(channel)
        self._credentials: tuple[str, str] | None = None
        self._token = ""
        self._calls: set[grpc.aio.Call] = set()
        self._steps: set[asyncio.Future[Any]] = set()
        self._closed = False

    @classmethod
    async def connect(
        cls,
        address: str,
        *,
        dial_timeout_s: float = 5.0,
        cert_file: Path | str | None = None,
        cert_key_file: Path | str | None = None,
        trusted_ca_file: Path | str | None = None,
        user: str = "",
        password: str = "",
    ) -> Etcd:
        """Connect, and check that the server is new enough.

        Args:
            address: ``http://HOST:PORT``, ``https://HOST:PORT`` or ``unix:///PATH``.
            dial_timeout_s: longest time until the connection and the first answer.
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
        channel = open_channel(
            address,
            cert_file=cert_file,
            cert_key_file=cert_key_file,
            trusted_ca_file=trusted_ca_file,
        )
        client = cls(channel, address)
        client._credentials = (user, password) if user else None
        try:
            await client._check_version(dial_timeout_s)
            await client._authenticate()
        except BaseException:
            await client.aclose()
            raise
        return client

    async def aclose(self) -> None:
        """Close the connection. Running calls end with an error."""
        self._closed = True
        # Closing the channel ends only some of them, and does not wake pending writes.
        for call in (*self._calls, *self._steps):
            call.cancel()
        await self._channel.close()

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
        return range_result_of(await self._call(self._kv.Range, request))

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

    # -------------------------------------------------------------- leases

    async def grant(self, ttl_s: int) -> int:
        """Create a lease that lives for ``ttl_s`` seconds unless renewed, and return its id."""
        response = await self._call(self._lease.LeaseGrant, rpc.LeaseGrantRequest(TTL=ttl_s))
        if response.error:
            raise EtcdError(f"Etcd did not grant a lease: {response.error}")
        lease: int = response.ID
        return lease

    async def revoke(self, lease: int, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """End a lease: all keys that are attached to it are deleted in one revision.

        Raises:
            LeaseLostError: it had ended already.
        """
        request = rpc.LeaseRevokeRequest(ID=lease)
        await self._call(self._lease.LeaseRevoke, request, timeout_s=timeout_s)

    async def leases(self) -> list[int]:
        """Return the ids of all leases."""
        response = await self._call(self._lease.LeaseLeases, rpc.LeaseLeasesRequest())
        return [status.ID for status in response.leases]

    async def keep_alive(self, lease: int, ttl_s: float) -> None:
        """Renew ``lease`` every third of its ``ttl_s``, until cancelled.

        Broken connections are replaced for as long as the lease can still be alive.

        Raises:
            LeaseLostError: it ran out, or was revoked.
        """
        loop = asyncio.get_running_loop()
        expires_at = loop.time() + ttl_s
        outage = Outage(_log, "renewal of the lease")
        while True:
            try:
                # Counted from the moment of sending, so it is never later than Etcd's time.
                async with asyncio.timeout_at(expires_at) as bound:
                    with self._errors("keep-alive"):
                        async for expires_at in self._renewals(lease, ttl_s / 3):
                            outage.ended()
                            bound.reschedule(expires_at)
            except TimeoutError:
                raise LeaseLostError(
                    f"unable to keep the lease alive: no renewal within {ttl_s:g} s"
                ) from None
            except EtcdUnavailableError as error:
                outage.failed(error)
            await asyncio.sleep(min(RENEWAL_RETRY_S, ttl_s / 10))

    async def _renewals(self, lease: int, pause_s: float) -> AsyncIterator[float]:
        """Renew over one stream, and yield the loop time at which the lease may end."""
        loop = asyncio.get_running_loop()
        metadata = await self._authenticate(renew=True)
        renewals = self._lease.LeaseKeepAlive(metadata=metadata, wait_for_ready=True)
        with self._running(renewals) as call:
            while True:
                sent_at = loop.time()
                await self._step(call.write(rpc.LeaseKeepAliveRequest(ID=lease)))
                response = await self._step(call.read())
                if response is grpc.aio.EOF:
                    raise EtcdUnavailableError(
                        f"Etcd ended the stream that renews lease {lease:x}: check that it runs"
                    )
                if response.TTL <= 0:
                    raise LeaseLostError(
                        f"the lease ran out or was revoked: lease {lease:x}; restart the process"
                    )
                yield sent_at + response.TTL
                await asyncio.sleep(pause_s)

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
        metadata = (("hasleader", "true"), *(await self._authenticate(renew=True)))
        with (
            self._errors("watch"),
            self._running(self._watch.Watch(metadata=metadata, wait_for_ready=True)) as call,
        ):
            await self._step(call.write(rpc.WatchRequest(create_request=create)))
            while (response := await self._step(call.read())) is not grpc.aio.EOF:
                if response.compact_revision:
                    raise EtcdCompactedError(
                        f"revision {start_revision} was compacted away; Etcd keeps changes "
                        f"from {response.compact_revision} on: restart the process",
                        compact_revision=response.compact_revision,
                    )
                if response.canceled:
                    raise error_of_text(response.cancel_reason or "watch cancelled")
                if response.created:
                    if on_created is not None:
                        on_created()
                else:
                    yield watch_batch_of(response)
        raise EtcdUnavailableError(
            f"Etcd ended the watch from revision {start_revision}: check that it runs"
        )

    # -------------------------------------------------------------- calls

    async def _check_version(self, timeout_s: float) -> None:
        request = rpc.StatusRequest()
        try:
            status = await self._call(self._maintenance.Status, request, timeout_s=timeout_s)
        except EtcdUnavailableError as error:
            reason = str(error)
            # A call that does not wait for the connection fails with the reason.
            try:
                await self._maintenance.Status(request, timeout=DIAGNOSIS_TIMEOUT_S)
            except grpc.aio.AioRpcError as failure:
                if failure.code() is grpc.StatusCode.UNAVAILABLE:
                    reason = failure.details() or reason
            raise EtcdUnavailableError(
                f"no Etcd answers at {self.address} ({reason}); check the address, "
                "and that Etcd runs"
            ) from error
        self.version = parse_version(status.version)
        if self.version[: len(MINIMUM_VERSION)] < MINIMUM_VERSION:
            minimum = ".".join(map(str, MINIMUM_VERSION))
            raise EtcdError(
                f"Etcd at {self.address} is version {status.version}; upgrade it to {minimum} "
                "or later"
            )

    async def _call(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable,
        request: Any,
        *,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> Any:
        """Send one unary request. The time limit includes the wait for a connection."""
        for _ in range(2):  # an expired token is replaced once
            metadata = await self._authenticate()
            try:
                with self._errors(type(request).__name__):
                    call = method(
                        request, timeout=timeout_s, metadata=metadata, wait_for_ready=True
                    )
                    with self._running(call):
                        return await call
            except EtcdTokenError as error:
                refused = error
        raise refused

    async def _authenticate(self, *, renew: bool = False) -> tuple[tuple[str, str], ...]:
        """Return the metadata of a call, with a token if there are credentials.

        Args:
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
                with self._errors("Authenticate"):
                    call = self._auth.Authenticate(
                        request, timeout=CALL_TIMEOUT_S, wait_for_ready=True
                    )
                    with self._running(call):
                        self._token = (await call).token
            except EtcdUnavailableError:
                raise
            except EtcdError as error:
                raise ConfigurationError(
                    f"Etcd at {self.address} refuses user {user!r}: {error}; check --etcd.user and "
                    "--etcd.password"
                ) from error
        return (("token", self._token),)

    @contextlib.contextmanager
    def _running(self, call: CallT) -> Iterator[CallT]:
        """Cancel a call at the end of this block, or when :meth:`aclose` is called."""
        self._calls.add(call)
        try:
            yield call
        finally:
            self._calls.discard(call)
            call.cancel()

    async def _step(self, awaitable: Awaitable[Any]) -> Any:
        """Await one read or write of a stream, which :meth:`aclose` can cancel."""
        step = asyncio.ensure_future(awaitable)
        self._steps.add(step)
        try:
            return await step
        finally:
            self._steps.discard(step)

    def _check_open(self, cause: BaseException | None = None) -> None:
        if self._closed:
            raise ClosedError("the Etcd client was closed: make another one") from cause

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Translate errors of gRPC.

        grpc.aio reports a call that :meth:`aclose` cancelled as the caller's cancellation, and may
        report the caller's cancellation as the status of the call. Both are corrected here.
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
            if isinstance(error, grpc.aio.AioRpcError):
                failure = error_of_status(error.code(), error.details() or "", what)
                if isinstance(failure, EtcdTokenError):
                    self._token = ""
                raise failure from error
            raise EtcdUnavailableError(f"{what}: the call was ended ({error})") from error
