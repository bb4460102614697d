"""Membership of a process in its cluster (allocator section 4).

A process has a lease, which it renews while it serves. Its member key, and the assignments that the
allocator writes, are attached to the lease. When the lease ends, Etcd deletes all of them in one
revision: peers then treat the process as gone, and it must stop serving.

::

    async with Membership(etcd, key, ttl_s=20) as membership:
        revision = await membership.announce(spec)
        await keyspace.load(etcd, revision)
        ...
        await membership.set_exiting()

A :class:`MemberProcess` is what every member of a cluster does in the same way. It connects to
Etcd, has a lease and a member key, runs tasks, one of them the allocator, and ends with the first
fatal error of any of them. A broker and a consumer each hold one, and add their parts.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from gazette_sdk.cluster.allocator.loop import run_allocator
from gazette_sdk.cluster.allocator.state import Allocation
from gazette_sdk.cluster.etcd import ANSWER_TIMEOUT_S, Etcd
from gazette_sdk.cluster.etcd_messages import Compare, Get, Put, TxnResult
from gazette_sdk.cluster.items import ItemKeySpace
from gazette_sdk.cluster.lease import LeaseLife, boot_s
from gazette_sdk.errors import (
    ConfigurationError,
    EtcdError,
    EtcdUnavailableError,
    GazetteError,
    LeaseLostError,
)
from gazette_sdk.retries import Outage, retrying

LEASE_TTL_S = 20
"""Default time after which a process that does not renew its lease is no member any more."""

ANNOUNCE_RETRY_S = 10.0
"""Longest pause before the next attempt to announce a key that another process holds. Its deletion
ends the pause."""

ANNOUNCE_ERROR_RETRY_S = 1.0
"""Pause before the next attempt after an error of Etcd."""

UPDATE_TIMEOUT_S = 10.0
"""Time for which an update is tried again while Etcd does not answer."""

UPDATE_RETRY_S = 0.1
"""Pause before that."""

REVOKE_TIMEOUT_S = 5.0
"""Longest time for revoking the lease when a process ends; it expires by itself later."""

DEV_VARIABLE = "GAZETTE_DEV"
"""Environment variable of brokers on one machine: they tell consumers the address of their Etcd."""

DEV_TIMEOUT_S = 5.0
"""Limit of asking a broker for its Etcd."""

_log = logging.getLogger(__name__)


class MemberSpec(Protocol):
    """The value of a member's key: a ``BrokerSpec`` or a ``ConsumerSpec``."""

    exiting: bool

    def SerializeToString(self) -> bytes:  # noqa: N802 -- protobuf's name
        """Return the bytes of the message."""

    def CopyFrom(self, other: Self) -> None:  # noqa: N802 -- protobuf's name
        """Copy the fields of ``other``."""


class Membership:
    """Lease and member key of one process.

    Use it as an asynchronous context manager, or call :meth:`start` and :meth:`revoke`.

    Args:
        etcd: the client.
        key: the member's key.
        ttl_s: seconds the lease outlives the last renewal; whole seconds.
        retry_s: longest pause between attempts to announce.

    Attributes:
        lost: done when the lease is lost, with LeaseLostError as its exception: the process must
            end. Not done while the lease is alive, cancelled after :meth:`revoke`.
        life: time until which the lease is alive by the answers of Etcd.
    """

    def __init__(
        self,
        etcd: Etcd,
        key: bytes,
        *,
        ttl_s: int = LEASE_TTL_S,
        retry_s: float = ANNOUNCE_RETRY_S,
    ) -> None:
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.life = LeaseLife()
        self._etcd = etcd
        self._key = key
        self._ttl_s = ttl_s
        self._retry_s = retry_s
        self._lease = 0
        self._revision = 0
        self._spec: MemberSpec | None = None
        self._renewal: asyncio.Task[None] | None = None

    @property
    def lease(self) -> int:
        """Id of the lease, 0 while there is none."""
        return self._lease

    @property
    def ttl_s(self) -> float:
        """Time to live of the lease, in seconds."""
        return self._ttl_s

    @property
    def lease_left_s(self) -> float | None:
        """Seconds for which the lease is alive by the answers of Etcd; None before the first."""
        left_s = self.life.alive_until - boot_s()
        return None if math.isinf(left_s) else left_s

    @property
    def revision(self) -> int:
        """Revision of the last write of the member's key, 0 before the announcement."""
        return self._revision

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        await self.revoke()

    async def start(self) -> None:
        """Create the lease, and begin to renew it.

        Raises:
            EtcdError: Etcd did not grant it.
        """
        requested_at = boot_s()
        self._lease = await self._etcd.grant(self._ttl_s)
        self._renewal = asyncio.create_task(self._renew(requested_at), name="gazette-lease")

    async def announce(self, spec: MemberSpec) -> int:
        """Create the member's key. While another process holds it, wait for its deletion.

        The key of another process is never overwritten: it may be alive, and its assignments are
        attached to its lease.

        Args:
            spec: the (valid) spec to announce.

        Returns:
            The revision to load the mirror at, so that it contains this key.

        Raises:
            LeaseLostError: this process's own lease ended meanwhile.
        """
        put = Put(self._key, spec.SerializeToString(), self._lease)
        key = self._key.decode()
        outage = Outage(_log, f"announcement of {key}")
        while True:
            if self.lost.done():
                await asyncio.shield(self.lost)
            try:
                result = await self._etcd.txn(
                    (Compare.version(self._key, 0),), (put,), (Get(self._key),)
                )
            except LeaseLostError:
                raise
            except EtcdError as error:
                outage.failed(error)
                await self._pause(asyncio.sleep(min(ANNOUNCE_ERROR_RETRY_S, self._retry_s)))
                continue
            revision = self._own_revision(result)
            if revision:
                outage.ended()
                self._revision, self._spec = revision, spec
                return revision
            outage.failed("the key is held by another process; it is free when its lease ends")
            await self._pause(self._deletion(result.revision))

    def _own_revision(self, result: TxnResult) -> int:
        """Return the revision of this announcement; 0 if another process holds the key."""
        if result.succeeded:
            return result.revision
        found = result.responses[0]
        if found is not None and found.entries and found.entries[0].lease == self._lease:
            # An earlier attempt whose answer was lost wrote it.
            return found.entries[0].mod_revision
        return 0

    @property
    def spec(self) -> MemberSpec:
        """The announced spec.

        Raises:
            EtcdError: it is not announced yet.
        """
        if self._spec is None:
            raise EtcdError("the member key is not announced yet; call announce() first")
        return self._spec

    async def update(self, spec: MemberSpec) -> int:
        """Replace the announced spec, keep the lease, and return the revision.

        Raises:
            EtcdError: another process modified or deleted the key, or Etcd failed.
        """
        result = await self._replace(spec)
        if not result.succeeded:
            found = result.responses[0]
            entry = found.entries[0] if found is not None and found.entries else None
            ours = entry is not None and (
                entry.lease == self._lease and entry.value == spec.SerializeToString()
            )
            if entry is None or not ours:
                raise EtcdError(
                    f"{self._key.decode()}: key modified or deleted externally "
                    f"(expected revision {self._revision})"
                )
            # An earlier attempt whose answer was lost has written it.
            self._revision = entry.mod_revision
        else:
            self._revision = result.revision
        self._spec = spec
        return self._revision

    async def _replace(self, spec: MemberSpec) -> TxnResult:
        """Write a spec where the key has the last known revision.

        It is written again while Etcd does not answer: :meth:`update` finds an earlier attempt
        that was done.
        """
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + UPDATE_TIMEOUT_S
        while True:
            try:
                return await self._etcd.txn(
                    (Compare.mod_revision(self._key, self._revision),),
                    (Put(self._key, spec.SerializeToString(), ignore_lease=True),),
                    (Get(self._key),),
                )
            except EtcdUnavailableError:
                if self.lost.done() or loop.time() >= give_up_at:
                    raise
                await asyncio.sleep(UPDATE_RETRY_S)

    async def set_exiting(self) -> int:
        """Announce that this process is leaving: the allocator moves its items away.

        Returns:
            The revision; that of the last write if the process was exiting before.

        Raises:
            EtcdError: as :meth:`update`.
        """
        if self.spec.exiting:
            return self._revision
        spec = type(self.spec)()
        spec.CopyFrom(self.spec)
        spec.exiting = True
        return await self.update(spec)

    async def revoke(self) -> None:
        """End the lease: Etcd deletes the member's key and its assignments at once.

        A lease that was lost without an answer of Etcd is revoked, too: Etcd may have been away and
        still hold it, and a successor would wait for its end. Bounded by
        :data:`REVOKE_TIMEOUT_S` and by the lease's time to live.
        """
        renewal, self._renewal = self._renewal, None
        if renewal is not None:
            renewal.cancel()
            await asyncio.wait([renewal])
        self.lost.cancel()
        lease, self._lease = self._lease, 0
        if not lease:
            return
        try:
            await self._etcd.revoke(lease, timeout_s=min(REVOKE_TIMEOUT_S, self._ttl_s))
        except LeaseLostError:
            _log.info("lease %x had ended already", lease)
        except EtcdUnavailableError as error:
            _log.warning("the lease was not revoked, it will expire: %s", error)

    async def _renew(self, requested_at: float) -> None:
        try:
            await self._etcd.keep_alive(
                self._lease, self._ttl_s, granted_at=requested_at, life=self.life
            )
        except GazetteError as error:
            self._set_lost(error)
        except Exception as error:  # noqa: BLE001 -- the boundary of this task
            # A lease that is not renewed is lost, for any reason.
            _log.exception("renewing member lease %x of %s s failed", self._lease, self._ttl_s)
            self._set_lost(error)

    def _set_lost(self, error: Exception) -> None:
        if not self.lost.done():
            self.lost.set_exception(LeaseLostError(f"unable to keep member lease alive: {error}"))
            self.lost.exception()  # marks it as retrieved: not every caller awaits it

    async def _pause(self, wait: Coroutine[Any, Any, None]) -> None:
        """Wait for the next attempt, or for the loss of the lease."""
        waiting = asyncio.ensure_future(wait)
        try:
            await asyncio.wait(
                [self.lost, waiting],
                timeout=self._retry_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            waiting.cancel()
            await asyncio.wait([waiting])
        if not waiting.cancelled():
            waiting.result()

    async def _deletion(self, revision: int) -> None:
        """Wait until the member's key is deleted after a revision.

        An error of the watch is logged, and ends the wait after a pause.
        """
        try:
            async with aclosing(self._etcd.watch(self._key, revision + 1)) as batches:
                async for batch in batches:
                    if any(e.is_delete and e.kv.key == self._key for e in batch.events):
                        return
        except EtcdError as error:
            _log.info("the watch of %s ended: %s", self._key.decode(), error)
            await asyncio.sleep(ANNOUNCE_ERROR_RETRY_S)


DIAL_RETRY_S = 1.0
"""Pause between attempts to reach Etcd at the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdConfig:
    """How a member reaches Etcd, and for how long it is one without renewing its lease.

    Attributes:
        endpoint: URL of Etcd, or several separated by commas.
        cert_file: client certificate toward Etcd.
        cert_key_file: its key.
        trusted_ca_file: authorities to trust with Etcd.
        user: user of Etcd, if it has authentication enabled.
        password: password of the user.
        lease_ttl_s: time after which a silent process is no member any more.
    """

    endpoint: str = "http://localhost:2379"
    cert_file: Path | None = None
    cert_key_file: Path | None = None
    trusted_ca_file: Path | None = None
    user: str = ""
    password: str = field(default="", repr=False)
    lease_ttl_s: int = LEASE_TTL_S

    async def connect(
        self, *, dial_timeout_s: float = 5.0, answer_timeout_s: float = ANSWER_TIMEOUT_S
    ) -> Etcd:
        """Connect once (:meth:`Etcd.connect <gazette_sdk.cluster.etcd.Etcd.connect>`)."""
        return await Etcd.connect(
            self.endpoint,
            dial_timeout_s=dial_timeout_s,
            answer_timeout_s=answer_timeout_s,
            cert_file=self.cert_file,
            cert_key_file=self.cert_key_file,
            trusted_ca_file=self.trusted_ca_file,
            user=self.user,
            password=self.password,
        )


def etcd_of_dev(address: str, *, remedy: str, broker_remedy: str) -> str:
    """Ask the broker of ``gazette dev``, or of an embedded cluster, for the address of its Etcd.

    Args:
        address: address of the broker; empty for a broker without one.
        remedy: text that says how to give the address of another Etcd.
        broker_remedy: text that says how to give the address of another broker.

    Raises:
        ConfigurationError: the broker is another one, or does not answer.
    """
    if not address.startswith(("http://", "https://")):
        where = f"the broker at {address}" if address else "a broker without an address"
        raise ConfigurationError(f"{where} is not asked for its Etcd; {remedy}")
    try:
        with urlopen(f"{address.rstrip('/')}/v1/dev", timeout=DEV_TIMEOUT_S) as response:  # noqa: S310 - http only
            found: object = json.load(response).get("etcd")
    except HTTPError as error:
        if error.code in {HTTPStatus.NOT_FOUND, HTTPStatus.NOT_IMPLEMENTED}:
            raise ConfigurationError(
                f"the broker at {address} does not tell its Etcd, only that of `gazette dev` does"
                f"; {remedy}"
            ) from error
        raise ConfigurationError(f"the broker at {address} answers {error}; {remedy}") from error
    except (URLError, OSError, ValueError, AttributeError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        text = reason.strerror if isinstance(reason, OSError) and reason.strerror else reason
        raise ConfigurationError(
            f"the broker at {address} cannot be asked for its Etcd: {text}; start it, as by "
            f"`gazette dev`, or {broker_remedy}"
        ) from error
    if not isinstance(found, str) or not found:
        raise ConfigurationError(f"the broker at {address} does not tell its Etcd; {remedy}")
    return found


class MemberProcess:
    """Connection, membership and tasks of one process, on the running event loop.

    Args:
        config: how it reaches Etcd.
        kind: what it is called in the names of its tasks: ``broker`` or ``consumer``.

    Attributes:
        ended: done when it has drained, or with the first fatal error, such as
            :class:`~gazette_sdk.errors.LeaseLostError`.
        etcd: the connection, from :meth:`connect` on.
        membership: the lease and the member key, from :meth:`join` on.
        tasks: the running tasks, by name.
    """

    def __init__(self, config: EtcdConfig, *, kind: str) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.etcd: Etcd | None = None
        self.membership: Membership | None = None
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._config = config
        self._kind = kind

    async def connect(self) -> Etcd:
        """Connect to Etcd, however long that takes.

        Raises:
            ConfigurationError: its address or certificates cannot be used.
            EtcdError: Etcd refused.
        """
        config = self._config
        self.etcd = await retrying(
            lambda: config.connect(
                dial_timeout_s=max(1.0, config.lease_ttl_s / 20),
                answer_timeout_s=min(ANSWER_TIMEOUT_S, config.lease_ttl_s / 3),
            ),
            (EtcdUnavailableError,),
            outage=Outage(_log, "connection to Etcd"),
            pause=lambda _: asyncio.sleep(DIAL_RETRY_S),
        )
        return self.etcd

    async def join(self, key: bytes) -> Membership:
        """Take a lease, whose loss ends this process. The member key is announced later.

        Args:
            key: the member key.

        Raises:
            EtcdError: Etcd did not grant it.
        """
        assert self.etcd is not None
        self.membership = Membership(self.etcd, key, ttl_s=self._config.lease_ttl_s)
        await self.membership.start()
        self.membership.lost.add_done_callback(self._lease_ended)
        return self.membership

    async def allocate(
        self,
        keyspace: ItemKeySpace[Any, Any, Any],
        zone: str,
        suffix: str,
        allocation: Allocation[Any, Any, Any],
    ) -> None:
        """Run the allocator. Its return ends this process: it has drained.

        Args:
            keyspace: the mirror.
            zone: zone of this process.
            suffix: its suffix.
            allocation: rules for the values.
        """
        assert self.etcd is not None
        await run_allocator(self.etcd, keyspace, zone, suffix, allocation)
        self.end()

    # ---------------------------------------------------------------- tasks

    def run(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Run a task. Its error ends this process."""
        task = asyncio.get_running_loop().create_task(work, name=f"{self._kind} {name}")
        self.tasks[name] = task
        task.add_done_callback(self._task_ended)

    async def cancel(self, *names: str) -> None:
        """Cancel tasks, and wait for their end."""
        tasks = [self.tasks.pop(name) for name in names if name in self.tasks]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def end(self) -> None:
        """Note that this process has drained."""
        if not self.ended.done():
            self.ended.set_result(None)

    def fail(self, error: BaseException) -> None:
        """Note a fatal error, unless it has ended before."""
        if not self.ended.done():
            self.ended.set_exception(error)
            self.ended.exception()  # retrieved: no one awaits it while the process is stopped

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or self.ended.done():
            return
        error = task.exception()
        if error is not None:
            self.fail(error)

    def _lease_ended(self, lost: asyncio.Future[None]) -> None:
        if not lost.cancelled() and (error := lost.exception()) is not None:
            self.fail(error)
