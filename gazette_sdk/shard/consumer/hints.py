"""Hints of a shard's recovery in Etcd (shard sections 3 and 5, recovery log section 7).

While a primary runs, it stores what it recorded under one *primary* key. After each recovery it
stores the recovered hints as the first *backup*, and older backups move on by one key.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gazette_sdk.cluster.consumer_keys import ShardAssignment, ShardEntry
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_messages import Compare, Get, KeyValue, Put
from gazette_sdk.errors import EtcdError, ValidationError
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol import recoverylog_pb2 as rpb
from gazette_sdk.protocol.shard_spec import (
    backup_hint_keys,
    hint_keys,
    primary_hint_key,
    recovery_log,
)
from gazette_sdk.retries import delay_s
from gazette_sdk.shard.recovery import hints as fsm_hints

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredHints:
    """All hints of a shard.

    Attributes:
        primary: recorded by a primary while it ran; None if there are none.
        backups: of past recoveries, the latest first; None where a key is missing.
    """

    primary: rpb.FSMHints | None
    backups: Sequence[rpb.FSMHints | None]


async def load_hints(etcd: Etcd, spec: cpb.ShardSpec) -> StoredHints:
    """Read and check all hints of a shard.

    Raises:
        ValidationError: a value cannot be decoded, breaks a rule, or is of another log.
        EtcdError: Etcd failed.
    """
    keys = hint_keys(spec)
    if not keys:
        return StoredHints(None, [None] * spec.hint_backups)
    values = await _read(etcd, keys)
    log = recovery_log(spec)
    primary, *backups = (
        None if kv is None else _checked(kv, key, log) for key, kv in zip(keys, values, strict=True)
    )
    return StoredHints(primary, backups)


async def store_recorded_hints(
    etcd: Etcd, item: ShardEntry, hints: rpb.FSMHints, assignment: ShardAssignment
) -> bool:
    """Store hints of a running primary.

    Args:
        etcd: the client.
        item: the shard's key.
        hints: what was recorded, and is committed.
        assignment: of the primary.

    Returns:
        False if the shard is deleted, or the assignment is not the same any more. That is no
        error: hints are advice.

    Raises:
        EtcdError: Etcd failed.
    """
    result = await etcd.txn(
        _unchanged(item, assignment),
        (Put(primary_hint_key(item.value).encode(), fsm_hints.to_json(hints)),),
    )
    return result.succeeded


async def store_recovered_hints(
    etcd: Etcd,
    item: ShardEntry,
    hints: rpb.FSMHints,
    assignment: Callable[[], ShardAssignment | None],
) -> None:
    """Store hints of a recovery as the first backup; older ones move on up to an empty key.

    Call it once the store was restored: hints that do not lead to a store must not push out good
    ones. It tries again until it is cancelled, or the shard is not assigned to us any more.

    Args:
        etcd: the client.
        item: the shard's key.
        hints: of the player.
        assignment: returns the current assignment of the primary; None if there is none.
    """
    keys = backup_hint_keys(item.value)
    recovered = fsm_hints.to_json(hints)
    attempt = 0
    is_in_doubt = False
    while keys and (entry := assignment()) is not None:
        try:
            conditions = _unchanged(item, entry)
            if await _rotate(etcd, keys, recovered, conditions, is_in_doubt=is_in_doubt):
                return
        except EtcdError as error:
            is_in_doubt = True
            _log.warning(
                "recovered hints are not stored yet",
                extra={"shard": item.id, "err": str(error), "attempt": attempt},
            )
        await asyncio.sleep(delay_s(attempt))
        attempt += 1


def _unchanged(item: ShardEntry, assignment: ShardAssignment) -> Sequence[Compare]:
    """Return the conditions that a shard exists, and an assignment: both are the same ones."""
    return [Compare.create_revision(each.key, each.create_revision) for each in (item, assignment)]


async def _rotate(
    etcd: Etcd,
    keys: Sequence[str],
    recovered: bytes,
    conditions: Sequence[Compare],
    *,
    is_in_doubt: bool,
) -> bool:
    known = await _read(etcd, keys)
    if is_in_doubt and (newest := known[0]) is not None and newest.value == recovered:
        return True  # an attempt whose answer was lost: twice, it would push out an older backup
    values = fsm_hints.rotate(recovered, [None if kv is None else kv.value for kv in known])
    touched = list(zip(keys, known, values, strict=False))
    result = await etcd.txn(
        (
            *conditions,
            *(
                Compare.mod_revision(key.encode(), 0 if kv is None else kv.mod_revision)
                for key, kv, _ in touched
            ),
        ),
        [Put(key.encode(), value) for key, _, value in touched],
    )
    return result.succeeded


async def _read(etcd: Etcd, keys: Sequence[str]) -> list[KeyValue | None]:
    """Read keys in one transaction; None where a key is missing."""
    result = await etcd.txn((), [Get(key.encode()) for key in keys])
    found: list[KeyValue | None] = []
    for response in result.responses:
        assert response is not None, "the response of a get"
        found.append(response.entries[0] if response.entries else None)
    return found


def _checked(kv: KeyValue, key: str, log: str) -> rpb.FSMHints:
    try:
        hints = fsm_hints.from_bytes(kv.value)
        fsm_hints.validate(hints, log)
    except ValidationError as error:
        raise error.within(key) from None
    return hints
