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
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import aclosing
from types import TracebackType
from typing import Any, Protocol, Self

from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_lease import LeaseLife, boot_s
from gazette_sdk.cluster.etcd_messages import Compare, Get, Put, TxnResult
from gazette_sdk.errors import EtcdError, EtcdUnavailableError, GazetteError, LeaseLostError
from gazette_sdk.outage import Outage

__all__ = ["ANNOUNCE_RETRY_S", "LEASE_TTL_S", "MemberSpec", "Membership"]

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
