"""Challenges in Etcd: keys that a living member deletes at once.

They stand below ``/gazette_sdk/failover{root}``, outside the cluster's own prefix::

    answering/{zone}#{suffix}     the member answers challenges; under its own lease
    challenges/{zone}#{suffix}    asks the member whether it lives; under the verifier's lease

A challenge is created by one verifier at a time. The challenged deletes it. So does every
other member which reaches its endpoint: a member that others hear is never deposed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_messages import Compare, Delete, Put
from gazette_sdk.cluster.item_keyspace import ProcessKeySpace
from gazette_sdk.cluster.keyspace import Entry, KeySpace
from gazette_sdk.cluster.verification.decision import Input
from gazette_sdk.errors import EtcdError
from gazette_sdk.outage import Outage
from gazette_sdk.protocol import broker_pb2 as pb

__all__ = ["Challenges"]

RETRY_S = 10.0
"""Pause before challenges are watched again, after Etcd refused it."""

MEMBERS_MIN = 2
"""Members of a cluster in which challenges are made."""

_log = logging.getLogger(__name__)


class Challenges:
    """Answers of one member to challenges, and its own challenges of others.

    Args:
        etcd: the client.
        keyspace: mirror of the cluster.
        local_id: this member.
        lease: id of this member's lease.
        dial: dials an endpoint.
    """

    def __init__(
        self,
        etcd: Etcd,
        keyspace: ProcessKeySpace[Any, Any, Any],
        local_id: pb.ProcessSpec.ID,
        lease: int,
        dial: Callable[[str], Awaitable[Input]],
    ) -> None:
        self._etcd = etcd
        self._keyspace = keyspace
        self._local_id = local_id
        self._lease = lease
        self._dial = dial
        root = f"/gazette_sdk/failover{keyspace.root.rstrip('/')}"
        self._mirror = KeySpace(root, _decode)
        self._mirror.observers.append(self._observe)
        self._answering: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Answer challenges, until cancelled. Etcd may forbid it: then leases decide alone."""
        try:
            await self._run()
        finally:
            answering = list(self._answering)
            for task in answering:
                task.cancel()
            if answering:
                await asyncio.wait(answering)

    async def _run(self) -> None:
        outage = Outage(_log, "watch of fail-over challenges")
        while True:
            try:
                await self._mirror.load(self._etcd)
                outage.ended()
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._announce(), name="announce")
                    group.create_task(self._mirror.watch(self._etcd, delay_s=0), name="watch")
            except* EtcdError as errors:
                outage.failed(errors.exceptions[0])
            await asyncio.sleep(RETRY_S)

    async def _announce(self) -> None:
        """Tell that we answer challenges, when there is a member which may challenge us."""
        while len(self._keyspace.members()) < MEMBERS_MIN:
            await self._keyspace.wait_for_update()
        key = self._key("answering", self._local_id)
        await self._etcd.txn((), (Put(key, b"", self._lease),))

    # ---------------------------------------------------------- of a verifier

    def are_answered_by(self, member: pb.ProcessSpec.ID, lease: int) -> bool:
        """Return True if a member, under its present lease, answers challenges while it lives."""
        entry = self._mirror.find(self._key("answering", member))
        return entry is not None and entry.lease == lease

    async def create(self, member: pb.ProcessSpec.ID) -> int:
        """Challenge a member. Return the revision of the challenge; 0 if there is one already.

        Raises:
            EtcdError: Etcd refused, or did not answer.
        """
        key = self._key("challenges", member)
        value = _name(self._local_id).encode()
        result = await self._etcd.txn((Compare.version(key, 0),), (Put(key, value, self._lease),))
        return result.revision if result.succeeded else 0

    async def gone(self, member: pb.ProcessSpec.ID, revision: int = 0) -> None:
        """Return when there is no challenge of a member that is as new as ``revision``."""
        key = self._key("challenges", member)
        while self._mirror.find(key) is not None or self._mirror.header.revision < revision:
            await self._mirror.wait_for_update()

    async def end(self, member: pb.ProcessSpec.ID, revision: int, *compares: Compare) -> bool:
        """Delete a challenge. Return True if it was unanswered, and everything compared holds.

        Args:
            member: the challenged.
            revision: of the challenge.
            compares: further conditions.

        Raises:
            EtcdError: Etcd refused, or did not answer.
        """
        key = self._key("challenges", member)
        compare = Compare.create_revision(key, revision)
        return (await self._etcd.txn((compare, *compares), (Delete(key),))).succeeded

    # ---------------------------------------------------------- of the challenged, and others

    def _observe(self) -> None:
        """Answer the challenges of the last changes."""
        prefix = self._key("challenges")
        for _, _, entry in self._mirror.changes:
            if entry is None or not entry.key.startswith(prefix):
                continue
            zone, _, suffix = entry.key.removeprefix(prefix).decode().partition("#")
            challenged = pb.ProcessSpec.ID(zone=zone, suffix=suffix)
            if challenged == self._local_id or entry.value != _name(self._local_id).encode():
                task = asyncio.get_running_loop().create_task(
                    self._answer(challenged, entry.create_revision), name="answer a challenge"
                )
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)

    async def _answer(self, challenged: pb.ProcessSpec.ID, revision: int) -> None:
        """Answer a challenge if it is ours, or if we reach the challenged."""
        if challenged != self._local_id:
            endpoint = self._keyspace.endpoint(challenged.zone, challenged.suffix)
            if endpoint is None or await self._dial(endpoint) is not Input.REACHED:
                return
        try:
            await self.end(challenged, revision)
        except EtcdError as error:
            _log.warning("the challenge of %s was not answered: %s", _name(challenged), error)

    def _key(self, directory: str, member: pb.ProcessSpec.ID | None = None) -> bytes:
        return f"{self._mirror.root}/{directory}/{_name(member) if member else ''}".encode()


def _name(member: pb.ProcessSpec.ID) -> str:
    return f"{member.zone}#{member.suffix}"


def _decode(kv: Any) -> Entry[bytes]:
    return Entry.of(kv, kv.value)
