"""The allocation loop: every member runs it, one of them leads (allocator section 5).

Batching of checkpoints into transactions (allocator section 9).

Description of a cluster for a simulation: its members, its items, and their assignments.

It comes from the mirror of a live cluster, or from YAML::

    members:                  # in the order in which they joined
    - {zone: a, id: broker-1, limit: 1024}
    - {zone: b, id: broker-2, limit: 1024, exiting: true}
    journals:
    - name: orders/part-000
      replication: 2
      assignments: [a/broker-1, b/broker-2]     # the primary first
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, Field
from pydantic import ValidationError as PydanticValidationError

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
from gazette_sdk.errors import EtcdError, GazetteError, LeaseLostError, ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.names import validate_journal
from gazette_sdk.protocol.rules import JOURNAL_LIMIT_MOST, validate_process_id
from gazette_sdk.protocol.strict_yaml import problem_of
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


class MemberId(NamedTuple):
    """Zone of a member, and its id within the zone. Its text is ``zone/id``."""

    zone: str
    id: str

    def __str__(self) -> str:
        """Return the text by which options and descriptions name the member."""
        return f"{self.zone}/{self.id}"

    @classmethod
    def parse(cls, text: str) -> MemberId:
        """Return the id of a text ``zone/id``, or ``zone#id`` for a zone with slashes.

        Raises:
            ValidationError: the text is no such name.
        """
        zone, _, name = text.partition("#" if "#" in text else "/")
        if not zone or not name:
            raise ValidationError(f"{text!r} names no member: write ZONE/ID, such as a/broker-1")
        found = cls(zone, name)
        validate_process_id(pb.ProcessSpec.ID(zone=zone, suffix=name), text)
        return found


@dataclass(frozen=True, slots=True)
class DescribedMember:
    """Member of a described cluster.

    Attributes:
        id: its zone and its id.
        limit: number of items that it offers to hold.
        exiting: True if it is leaving.
    """

    id: MemberId
    limit: int
    exiting: bool = False


@dataclass(frozen=True, slots=True)
class DescribedItem:
    """Item of a described cluster.

    Attributes:
        name: its name.
        replication: number of members that it should have.
        holders: its members, the primary first.
    """

    name: str
    replication: int
    holders: tuple[MemberId, ...] = ()


@dataclass(frozen=True, slots=True)
class ClusterDescription:
    """Members of a cluster in the order in which they joined, and its items by name.

    Raises:
        ValidationError: a name is used twice, or an item is assigned to an unknown member, or
            twice to the same one.
    """

    members: tuple[DescribedMember, ...]
    items: tuple[DescribedItem, ...]

    def __post_init__(self) -> None:
        members = [member.id for member in self.members]
        _check_unique("member", map(str, members))
        _check_unique("journal", (item.name for item in self.items))
        known = set(members)
        for item in self.items:
            _check_unique(f"{item.name}: assignment to", map(str, item.holders))
            for holder in item.holders:
                if holder not in known:
                    raise ValidationError(
                        f"{item.name} is assigned to {holder}, which is no member"
                    )


def describe(
    keyspace: ItemKeySpace[Any, Any, Any], allocation: Allocation[Any, Any, Any]
) -> ClusterDescription:
    """Return the description of a live cluster.

    Args:
        keyspace: its mirror. Assignments without their item or member are left out: they are
            about to be removed.
        allocation: rules for its values.
    """
    entries = sorted(keyspace.members(), key=lambda m: (m.create_revision, m.key))
    members = tuple(
        DescribedMember(
            MemberId(m.zone, m.suffix),
            allocation.item_limit(m.value),
            allocation.is_exiting(m.value),
        )
        for m in entries
    )
    known = {member.id for member in members}
    items = []
    for item in keyspace.items():
        slots = sorted(keyspace.assignments(item.id), key=lambda a: a.slot)
        holders = dict.fromkeys(MemberId(a.zone, a.suffix) for a in slots)
        items.append(
            DescribedItem(
                item.id,
                allocation.desired_replication(item.value),
                tuple(holder for holder in holders if holder in known),
            )
        )
    return ClusterDescription(members, tuple(items))


# ------------------------------------------------------------------- YAML


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)


class _Member(_Strict):
    zone: str
    id: str
    limit: Annotated[int, Field(ge=0, le=JOURNAL_LIMIT_MOST)]
    exiting: bool = False


class _Journal(_Strict):
    name: str
    replication: Annotated[int, Field(ge=0)]
    assignments: list[str] = []


class _Cluster(_Strict):
    members: list[_Member]
    journals: list[_Journal] = []


def parse_description(text: str | bytes) -> ClusterDescription:
    """Return the cluster that a YAML document describes.

    Raises:
        ValidationError: the document is malformed; the text names the place.
    """
    try:
        cluster = _Cluster.model_validate(yaml.load(text, Loader=_Loader))  # noqa: S506 - is safe
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValidationError(f"the description is not YAML: {problem_of(error)}") from None
    except PydanticValidationError as error:
        problem = error.errors()[0]
        place = ".".join(str(part) for part in problem["loc"]) or "it"
        raise ValidationError(f"the description is malformed: {place}: {problem['msg']}") from None
    try:
        return ClusterDescription(
            tuple(
                DescribedMember(_member_id(each), each.limit, each.exiting)
                for each in cluster.members
            ),
            tuple(_item(each) for each in cluster.journals),
        )
    except GazetteError as error:
        raise ValidationError(f"the description is malformed: {error}") from None


def dump_description(description: ClusterDescription) -> str:
    """Return a description as YAML, which :func:`parse_description` reads."""
    members = [
        {"zone": each.id.zone, "id": each.id.id, "limit": each.limit}
        | ({"exiting": True} if each.exiting else {})
        for each in description.members
    ]
    journals = [
        {
            "name": each.name,
            "replication": each.replication,
            "assignments": [_text(holder) for holder in each.holders],
        }
        for each in description.items
    ]
    text: str = yaml.dump(
        {"members": members, "journals": journals},
        Dumper=_Dumper,
        sort_keys=False,
        default_flow_style=None,
        allow_unicode=True,
        width=1 << 20,
    )
    return text


_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def _member_id(member: _Member) -> MemberId:
    return MemberId.parse(f"{member.zone}#{member.id}")


def _item(journal: _Journal) -> DescribedItem:
    validate_journal(journal.name, journal.name)
    holders = tuple(MemberId.parse(text) for text in journal.assignments)
    return DescribedItem(journal.name, journal.replication, holders)


def _text(member: MemberId) -> str:
    """Return the name of a member in YAML, with the zone apart from the id."""
    return str(member) if "/" not in member.zone else f"{member.zone}#{member.id}"


def _check_unique(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValidationError(f"{what} {name} is there twice")
        seen.add(name)


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
        elif (kept := _kept_placement(state, self._desired)) is not None:
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


def _kept_placement(state: State, desired: list[list[int]]) -> list[list[int]] | None:
    """Return the current placement, if it is another one than desired, and no worse.

    A primary that does not reach a replica gives its place to another member by itself. What is
    assigned then is kept: the solution would bring the first one back.
    """
    if all(
        len(current) == len(members)
        and all(
            state.member_index(assignment.zone, assignment.suffix) == member
            for assignment, member in zip(current, members, strict=True)
        )
        for current, members in zip(state.item_assignments, desired, strict=True)
    ):
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
