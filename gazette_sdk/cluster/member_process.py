"""MemberProcess: what every member of a cluster does in the same way (allocator section 4).

It connects to Etcd, has a lease and a member key, runs tasks, one of them the allocator, and ends
with the first fatal error of any of them. A broker and a consumer each hold one, and add their
parts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gazette_sdk.cluster.allocator.codec import Allocation
from gazette_sdk.cluster.allocator.loop import run_allocator
from gazette_sdk.cluster.etcd import ANSWER_TIMEOUT_S, Etcd
from gazette_sdk.cluster.item_keyspace import ItemKeySpace
from gazette_sdk.cluster.membership import LEASE_TTL_S, Membership
from gazette_sdk.errors import EtcdUnavailableError
from gazette_sdk.outage import Outage

__all__ = ["DIAL_RETRY_S", "EtcdConfig", "MemberProcess"]

DIAL_RETRY_S = 1.0
"""Pause between attempts to reach Etcd at the start."""

_log = logging.getLogger(__name__)


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
        outage = Outage(_log, "connection to Etcd")
        while True:
            try:
                self.etcd = await Etcd.connect(
                    config.endpoint,
                    dial_timeout_s=max(1.0, config.lease_ttl_s / 20),
                    answer_timeout_s=min(ANSWER_TIMEOUT_S, config.lease_ttl_s / 3),
                    cert_file=config.cert_file,
                    cert_key_file=config.cert_key_file,
                    trusted_ca_file=config.trusted_ca_file,
                    user=config.user,
                    password=config.password,
                )
            except EtcdUnavailableError as error:
                outage.failed(error)
            else:
                outage.ended()
                return self.etcd
            await asyncio.sleep(DIAL_RETRY_S)

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
            self.ended.exception()  # retrieved: nobody awaits it while the process is stopped

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or self.ended.done():
            return
        error = task.exception()
        if error is not None:
            self.fail(error)

    def _lease_ended(self, lost: asyncio.Future[None]) -> None:
        if not lost.cancelled() and (error := lost.exception()) is not None:
            self.fail(error)
