"""Reports of a shard's status, as the value of its assignment in Etcd (shard section 5)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from gazette_sdk.cluster.consumer_keys import ConsumerKeySpace, ShardAssignment
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_messages import Compare, Put
from gazette_sdk.errors import EtcdError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.shard_spec import reduce_status
from gazette_sdk.transport.backoff import delay_s
from gazette_sdk.user_code import encodable

__all__ = ["ERROR_CHARACTERS_MAX", "StatusReports", "failed_status", "local_assignment"]

ERROR_CHARACTERS_MAX = 2048
"""Longer texts of errors are cut: the values of all assignments are in every process' memory."""

_CUT = " ...[truncated]"

_log = logging.getLogger(__name__)


def failed_status(errors: Iterable[str]) -> cpb.ReplicaStatus:
    """Return the status of a shard that failed, with texts of bounded length."""
    return cpb.ReplicaStatus(
        code=cpb.ReplicaStatus.FAILED,
        errors=[
            text if len(text) <= ERROR_CHARACTERS_MAX else f"{text[:ERROR_CHARACTERS_MAX]}{_CUT}"
            for text in map(encodable, errors)
        ],
    )


def local_assignment(
    keyspace: ConsumerKeySpace, shard: str, local_id: pb.ProcessSpec.ID
) -> ShardAssignment | None:
    """Return the first assignment of a shard to a process; None if there is none."""
    for entry in keyspace.assignments(shard):
        if (entry.zone, entry.suffix) == (local_id.zone, local_id.suffix):
            return entry
    return None


class StatusReports:
    """Reports of one shard of this process.

    Args:
        etcd: takes them.
        keyspace: the mirror.
        shard: the shard's id.
        local_id: this process.
    """

    def __init__(
        self, etcd: Etcd, keyspace: ConsumerKeySpace, shard: str, local_id: pb.ProcessSpec.ID
    ) -> None:
        self._etcd = etcd
        self._keyspace = keyspace
        self._shard = shard
        self._local_id = local_id

    async def report(self, status: cpb.ReplicaStatus) -> None:
        """Report a status, and wait until the mirror shows it.

        The new value is the old one reduced with ``status``: the code of an assignment never goes
        down. It tries again until it is cancelled, or the shard is not assigned to us any more;
        then its owner cancels the shard.
        """
        attempt = 0
        while (entry := local_assignment(self._keyspace, self._shard, self._local_id)) is not None:
            value = _reduced(entry.value, status)
            if value == entry.value:
                return
            try:
                if await self._write(entry, value):
                    return
            except EtcdError as error:
                _log.warning(
                    "status of a shard is not reported yet",
                    extra={"shard": self._shard, "err": str(error), "attempt": attempt},
                )
            await asyncio.sleep(delay_s(attempt))
            attempt += 1

    async def _write(self, entry: ShardAssignment, value: cpb.ReplicaStatus) -> bool:
        """Write a value; return False if the assignment was changed meanwhile."""
        result = await self._etcd.txn(
            (Compare.mod_revision(entry.key, entry.mod_revision),),
            (Put(entry.key, value.SerializeToString(), ignore_lease=True),),
        )
        if result.succeeded:
            await self._keyspace.wait_for_revision(result.revision)
        return result.succeeded


def _reduced(known: cpb.ReplicaStatus, status: cpb.ReplicaStatus) -> cpb.ReplicaStatus:
    """Return the reduction, in which an error that was reported already is not repeated."""
    fresh = [text for text in status.errors if text not in known.errors]
    return reduce_status([known, cpb.ReplicaStatus(code=status.code, errors=fresh)])
