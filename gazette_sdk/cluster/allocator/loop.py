"""The allocation loop: every member runs it, one of them leads (allocator section 5).

:class:`BatchedTxn` batches checkpoints into transactions (allocator section 9).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from gazette_sdk.cluster.allocator import state as metrics
from gazette_sdk.cluster.allocator.moves import (
    Checkpoint,
    Exchanges,
    balance_primaries,
    converge,
    current_placement,
    shortfall,
)
from gazette_sdk.cluster.allocator.solver import solve
from gazette_sdk.cluster.allocator.state import Allocation, State, leader_of
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_messages import Compare, Operation, TxnResult
from gazette_sdk.cluster.items import ItemKeySpace, MemberEntry
from gazette_sdk.errors import EtcdError, LeaseLostError
from gazette_sdk.retries import Outage

TXN_MAX = 128
"""Bound of comparisons, and of operations, of a transaction: Etcd's own default."""

Commit = Callable[[Sequence[Compare], Sequence[Operation]], Awaitable[TxnResult]]


class BatchedTxn:
    """Batch of checkpoints, as many as fit in one transaction.

    Args:
        commit: sends a transaction, as :meth:`Etcd.txn <gazette_sdk.cluster.etcd.Etcd.txn>`.
        fixed: comparisons of every transaction, which count for its bound.
        max_operations: bound of comparisons and of operations.

    Attributes:
        revision: revision of the last transaction that succeeded, 0 before.
    """

    def __init__(
        self, commit: Commit, fixed: Sequence[Compare], *, max_operations: int = TXN_MAX
    ) -> None:
        self.revision = 0
        self._commit = commit
        self._fixed = tuple(fixed)
        self._max_operations = max_operations
        self._compares = list(fixed)
        self._operations: list[Operation] = []

    async def checkpoint(self, checkpoint: Checkpoint) -> None:
        """Add a checkpoint. If it does not fit, send the batch first.

        Raises:
            EtcdError: see :meth:`flush`.
        """
        if not checkpoint.operations:
            assert not checkpoint.compares, "a checkpoint without operations compares nothing"
            return
        if (
            len(self._compares) + len(checkpoint.compares) > self._max_operations
            or len(self._operations) + len(checkpoint.operations) > self._max_operations
        ):
            await self.flush()
        self._compares += checkpoint.compares
        self._operations += checkpoint.operations

    async def flush(self) -> None:
        """Send the batch, unless it is empty.

        Raises:
            EtcdError: the comparisons did not hold, or Etcd failed. Earlier transactions stay.
        """
        if not self._operations:
            return
        compares, operations = self._compares, self._operations
        self._compares, self._operations = list(self._fixed), []
        result = await self._commit(compares, operations)
        if not result.succeeded:
            raise EtcdError("transaction checks did not succeed")
        self.revision = result.revision


OnRound = Callable[[int, bool], Awaitable[None]]
"""Called after each round of the leader: its number from 0, and True if it wrote nothing."""

RETRY_S = 5.0
"""Pause after a round that failed, unless the mirror changes earlier."""

SHORTAGE_WARNING_S = 5.0
"""Replicas without a member are logged after this time: brokers that start, and clients that create
journals for as many brokers as there are, end such a shortage at once."""

_log = logging.getLogger(__name__)


async def run_allocator(
    etcd: Etcd,
    keyspace: ItemKeySpace[Any, Any, Any],
    zone: str,
    suffix: str,
    allocation: Allocation[Any, Any, Any],
    *,
    max_operations: int = TXN_MAX,
    on_round: OnRound | None = None,
) -> None:
    """Assign items to members while this process is the leader; else wait to be it.

    Returns when the member is exiting and holds no items any more. Leadership needs no election:
    each transaction compares the leader's own key.

    Args:
        etcd: the client.
        keyspace: the mirror; the caller loads and watches it.
        zone: zone of this member.
        suffix: suffix of this member.
        allocation: rules for the values.
        max_operations: bound of comparisons and of operations of a transaction.
        on_round: called after each round, for tests.

    Raises:
        LeaseLostError: the member's key is gone.
        EtcdUnavailableError: the watch of the mirror has ended.
    """
    allocator = _Allocator(etcd, keyspace, allocation, max_operations)
    number = 0
    while True:
        member = keyspace.member(zone, suffix)
        if member is None:
            raise LeaseLostError("member key not found in Etcd")
        if allocation.is_exiting(member.value) and not any(
            keyspace.item(a.item) for a in keyspace.local_assignments(zone, suffix)
        ):
            allocator.note_shortage(None)
            return
        next_revision = keyspace.revision + 1
        if leader_of(keyspace.members()) is member:
            outcome = await allocator.round(member)
            next_revision = max(next_revision, outcome.revision)
            if not outcome.succeeded:
                # If the comparisons failed, the change arrives soon; if Etcd failed, none may.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_S):
                        await keyspace.wait_for_revision(next_revision)
                continue
            if on_round is not None:
                await on_round(number, outcome.revision == 0)
            number += 1
        await keyspace.wait_for_revision(next_revision)


class _RoundOutcome(NamedTuple):
    """Outcome of a round: True if all of it was written, and the last revision (0: no write)."""

    succeeded: bool
    revision: int


class _Shortage(NamedTuple):
    """Shortage of members: the replicas without one, of all; and if items are not served so."""

    missing: int
    wanted: int
    stops_items: bool


class _Allocator:
    """State of the leader between rounds: the solution, and its input."""

    def __init__(
        self,
        etcd: Etcd,
        keyspace: ItemKeySpace[Any, Any, Any],
        allocation: Allocation[Any, Any, Any],
        max_operations: int,
    ) -> None:
        self._etcd = etcd
        self._keyspace = keyspace
        self._allocation = allocation
        self._max_operations = max_operations
        self._outage = Outage(_log, "allocation of journals")
        self._solved: object = None
        self._desired: list[list[int]] = []
        self._exchanges = Exchanges()
        self._shortage: _Shortage | None = None
        self._shortage_timer: asyncio.TimerHandle | None = None
        self._logged_shortage: _Shortage | None = None  # what was logged of a shortage that lasts

    async def round(self, leader: MemberEntry[Any]) -> _RoundOutcome:
        """Run one round."""
        # The round is built from one snapshot, even if the mirror changes meanwhile.
        state = State(self._keyspace, self._allocation)
        if state.network != self._solved:
            # Assignments are no input of the solution: a lost one is added again as it was.
            self._desired = await self._solve(state)
            self._solved = state.network
            self._exchanges.restart()
        elif (kept := kept_placement(state, self._desired)) is not None:
            self._desired = kept

        txn = BatchedTxn(
            self._etcd.txn,
            [Compare.mod_revision(leader.key, leader.mod_revision)],
            max_operations=self._max_operations,
        )
        try:
            for checkpoint in converge(state, self._desired):
                await txn.checkpoint(checkpoint)
            await txn.flush()
            if txn.revision == 0 and self._allocation.balances_primaries:
                for checkpoint in balance_primaries(state, self._exchanges):
                    await txn.checkpoint(checkpoint)
                await txn.flush()
        except EtcdError as error:
            self._outage.failed(error)
            return _RoundOutcome(succeeded=False, revision=txn.revision)
        self._outage.ended()
        metrics.CONVERGE.inc()
        metrics.ITEMS.set(len(state.items))
        metrics.MEMBERS.set(len(state.members))
        metrics.DESIRED_REPLICATION_SLOTS.set(state.item_slots)
        return _RoundOutcome(succeeded=True, revision=txn.revision)

    async def _solve(self, state: State) -> list[list[int]]:
        started = time.monotonic()
        desired = await asyncio.to_thread(solve, state)
        duration_s = time.monotonic() - started
        metrics.MAX_FLOW_RUNTIME_SECONDS.observe(duration_s)
        _log_solution(state, desired, duration_s)
        missing = state.item_slots - sum(map(len, desired))
        stops_items = self._allocation.needs_all_replicas or not all(
            members or not wanted
            for members, wanted in zip(desired, state.replication, strict=True)
        )
        shortage = _Shortage(missing, state.item_slots, stops_items)
        self.note_shortage(shortage if missing else None)
        return desired

    def note_shortage(self, shortage: _Shortage | None) -> None:
        """Log replicas without a member if the shortage lasts: once, and again if it gets worse."""
        self._shortage = shortage
        if shortage is None:
            self._logged_shortage = None
            if self._shortage_timer is not None:
                self._shortage_timer.cancel()
                self._shortage_timer = None
        elif self._shortage_timer is None and self._is_worse(shortage):
            loop = asyncio.get_running_loop()
            self._shortage_timer = loop.call_later(SHORTAGE_WARNING_S, self._log_shortage)

    def _is_worse(self, shortage: _Shortage) -> bool:
        logged = self._logged_shortage
        return logged is None or (
            shortage.stops_items and (not logged.stops_items or shortage.missing > logged.missing)
        )

    def _log_shortage(self) -> None:
        self._shortage_timer = None
        shortage = self._logged_shortage = self._shortage
        assert shortage is not None, "the timer is cancelled when the shortage ends"
        if shortage.stops_items:
            _log.warning(
                "%d of %d replicas have no place: add members, or raise their limits",
                shortage.missing,
                shortage.wanted,
            )
        else:
            _log.info(
                "%d of %d replicas have no place: they are standbys; add processes for them",
                shortage.missing,
                shortage.wanted,
            )


def kept_placement(state: State, desired: list[list[int]]) -> list[list[int]] | None:
    """Return the current placement, if it is another one than desired, and no worse.

    A primary that does not reach a replica gives its place to another member by itself. What is
    assigned then is kept: the solution would bring the first one back.
    """
    assigned = len(state.assignments) - len(state.dead_assignments)
    if state.holders == desired and assigned == sum(map(len, desired)):
        return None
    current = current_placement(state)
    if current is None or shortfall(state, current) > shortfall(state, desired):
        return None
    return current


def _log_solution(state: State, desired: Sequence[Sequence[int]], duration_s: float) -> None:
    """Log a solution."""
    current = {(a.item, state.member_index(a.zone, a.suffix)) for a in state.assignments}
    wanted = {
        (item.id, member)
        for item, members in zip(state.items, desired, strict=True)
        for member in members
    }
    _log.info(
        "solved for assignments of %s at revision %d: %d items in %d slots, %d members with %d "
        "slots, %d assignments now, %d next (%d added, %d removed, %d the same), in %.3f s",
        state.root,
        state.revision,
        len(state.items),
        state.item_slots,
        len(state.members),
        state.member_slots,
        len(current),
        len(wanted),
        len(wanted - current),
        len(current - wanted),
        len(current & wanted),
        duration_s,
    )
