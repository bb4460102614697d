"""Restore of a cluster into an Etcd that has lost it.

What must not happen is that an offset is given twice. Three things prevent it:

- **Brokers come first.** Each starts over its spool directory, finds that this is another Etcd than
  before, and withholds what it has (`broker.recovery.etcd_history`). It claims the journals of
  which it has the last bytes, unless others have more. A journal that is created after that waits
  for those who claim it. A claim counts only if it ends where the backup and the stores end, or
  later.
- **A floor.** The spec of a journal that no broker claims is written with ``suspend.offset``: no
  append begins before it. It is the greatest of the saved head, the saved offset and the end of
  what stores have. A claimed journal continues at the head of those who claim it, and has no such
  offset: a broker without its bytes could begin there. An end before the floor is an error.
- **A skip.** No one may be left who has the last bytes of a journal that was appended to after the
  backup. So where no broker claims a journal, or all that held it may be lost, its floor is
  :data:`SKIP_BYTES` after that.

Positions of readers and shards have the create revision of each journal. Another Etcd gives another
one, so that a label of the spec has the first one (:data:`~gazette_sdk.protocol.labels.CONTINUES`).

Journals come before shards, with recovery logs first. Hints of a shard are written in the
transaction that creates it, and no process of an application may run until the end: it would create
shards without hints. A key of Etcd beside the cluster's own names the backup until all is done, so
that a restore that was interrupted is continued, and no other one is begun.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

import orjson

from gazette_sdk.cli.backup.archive import Backup, SavedJournal, SavedShard, spec_of
from gazette_sdk.cli.backup.capture import Keys, Stored, hints_problem, list_content, read_keys
from gazette_sdk.cli.backup.checks import ALL, CALLS_MAX, RestoreChecks, RestoreRefusedError, named
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_messages import Compare, Delete, Put, prefix_end
from gazette_sdk.cluster.items import item_key
from gazette_sdk.errors import (
    CallError,
    IndexHasGreaterOffsetError,
    StatusError,
    WrongAppendOffsetError,
)
from gazette_sdk.fragment.registry import StoreRegistry
from gazette_sdk.journals.changes import reset_head, stored_end
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.journal_spec import desired_replication, is_suspended, may_write
from gazette_sdk.protocol.labels import CONTINUES, SKIPPED_TO, set_value, skipped_to
from gazette_sdk.retries import pause
from gazette_sdk.transport.append.append import append
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.loop import for_each

SKIP_BYTES: Final = 1 << 40
"""Distance from the known end of a journal to its floor where no broker has its last bytes: more
than a journal takes between two backups. Readers pass over the gap."""

TXN_KEYS: Final = 100
"""Keys of one transaction. Etcd takes 128 operations unless configured otherwise."""

READY_TIMEOUT_S: Final = 90.0
"""Longest time until all journals take appends. The others are named."""

PATIENCE_S: Final = 1.0
"""Longest time of attempts of one append before its reason is noted."""


class State(StrEnum):
    """State of a journal or a shard in a restore."""

    CREATE = "create"
    """It is not there yet."""
    EXISTS = "exists"
    """An interrupted restore created it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalRow:
    """Journal of a restore.

    Attributes:
        name: its name.
        state: whether it is created.
        saved_head: its head at the backup; None if it was not known.
        stored_end: offset after its stored content.
        floor: offset before which no append begins.
        claimed_by: brokers that have its last bytes, as ZONE/ID.
        level: level of its suspension.
        skips: True if its floor is far after what is known.
        guessed: fields of its spec that are guessed.
        spec_bytes: the spec to write.
    """

    name: str
    state: State
    saved_head: int | None
    stored_end: int
    floor: int
    claimed_by: Sequence[str]
    level: str
    skips: bool
    guessed: Sequence[str]
    spec_bytes: bytes = field(repr=False)

    @property
    def notes(self) -> str:
        """Return what is special about it, in words."""
        notes = []
        if self.skips:
            notes.append("no broker has its last bytes: offsets are skipped")
        if self.level != "NONE":
            notes.append(f"suspended ({self.level.lower()})")
        if self.guessed:
            notes.append(f"guessed: {', '.join(self.guessed)}")
        return "; ".join(notes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRow:
    """Shard of a restore.

    Attributes:
        application: prefix of its application.
        id: its id.
        state: whether it is created.
        hints: number of its hints.
        log: its recovery log; empty without one.
        problem: why its hints do not lead to its state; empty if nothing is known.
        shard: what is written.
    """

    application: str
    id: str
    state: State
    hints: int
    log: str
    problem: str
    shard: SavedShard = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Plan of a restore.

    Attributes:
        journals: recovery logs first.
        shards: by application and id.
        continues: True if an interrupted restore of the same backup is continued.
        endpoints: of the brokers that serve.
    """

    journals: Sequence[JournalRow]
    shards: Sequence[ShardRow]
    continues: bool
    endpoints: Sequence[str]


class _Claim(NamedTuple):
    """Brokers that have the last bytes of a journal.

    Attributes:
        brokers: as ZONE/ID.
        end: offset at which they would continue it; None if it has a route already.
    """

    brokers: Sequence[str]
    end: int | None

    def reaches(self, known: int) -> bool:
        """Return True if they have what is known of the journal."""
        return self.end is None or self.end >= known


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Outcome of a restore.

    Attributes:
        heads: heads of the journals that take appends, by name.
        waiting: journals that do not take appends yet, with the reason.
        registers_lost: journals that had registers, and have none.
    """

    heads: Mapping[str, int]
    waiting: Mapping[str, str]
    registers_lost: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """Restore of a backup.

    Args:
        etcd: client of the new Etcd.
        consumers: prefix below which applications have their keys.
        checks: what is looked at before; it has the backup and how brokers are reached.
        skip_bytes: see :data:`SKIP_BYTES`.
    """

    etcd: Etcd
    consumers: str
    checks: RestoreChecks
    skip_bytes: int = SKIP_BYTES

    @property
    def backup(self) -> Backup:
        """The backup."""
        return self.checks.backup

    @property
    def marker(self) -> bytes:
        """Key that names the backup until the restore is done."""
        return f"/gazette_sdk/restore{self.checks.prefix.rstrip('/')}".encode()

    # ------------------------------------------------------------ plan

    async def plan(self, stores: StoreRegistry) -> Plan:
        """Return what is to be done. Nothing is written.

        Raises:
            RestoreRefusedError: the restore could do harm.
            GazetteError: Etcd did not answer.
        """
        keys = await read_keys(self.etcd, self.checks.prefix, self.consumers)
        continues = await self._continues()
        await self.checks.check(keys, continues=continues)
        claims = await self._claims()
        stored = await list_content(self.backup.journals, stores, self.checks.progress)
        failed = [each for each in stored.values() if each.error]
        if failed:
            raise RestoreRefusedError(
                f"the stores of {named(each.journal for each in failed)} cannot be listed, so that"
                f" it is not known where their content ends: {failed[0].error}"
            )
        logs = {each.log for each in self.backup.shards}
        journals = [
            self._journal(each, stored[each.name], claims.get(each.name), keys)
            for each in sorted(self.backup.journals, key=lambda each: each.name not in logs)
        ]
        present = {(application, name) for application, name, _ in keys.shards}
        shards = [
            ShardRow(
                application=each.application,
                id=each.id,
                state=State.EXISTS if (each.application, each.id) in present else State.CREATE,
                hints=len(each.hints),
                log=each.log,
                problem=hints_problem(each, stored.get(each.log)),
                shard=each,
            )
            for each in self.backup.shards
        ]
        return Plan(
            journals=journals,
            shards=shards,
            continues=continues,
            endpoints=[each.endpoint for each in keys.brokers],
        )

    async def _continues(self) -> bool:
        entries = (await self.etcd.range(self.marker)).entries
        if not entries:
            return False
        found = orjson.loads(entries[0].value)
        if found["backup"] != self.backup.id:
            raise RestoreRefusedError(
                "a restore of another backup was begun here, and not ended: continue that one"
                f" ({found['backup'][:12]}), or delete all keys of this Etcd and begin again"
            )
        return True

    async def _claims(self) -> Mapping[str, _Claim]:
        """Return the brokers with the last bytes of journals that Etcd does not have, by journal.

        Records of journals that an interrupted restore created count, too: a broker wrote them.
        """
        root = f"/gazette_sdk/routes{self.checks.prefix.rstrip('/')}/".encode()
        found: dict[str, _Claim] = {}
        for kv in (await self.etcd.range(root, prefix_end(root))).entries:
            journal, _, create_revision = kv.key[len(root) :].decode().rpartition("#")
            route = pb.Header.FromString(kv.value).route
            brokers = [f"{each.zone}/{each.suffix}" for each in route.members]
            is_claim = create_revision == "0"
            if is_claim or journal not in found:
                found[journal] = _Claim(brokers, route.stored_end if is_claim else None)
        return found

    def _journal(
        self, journal: SavedJournal, stored: Stored, claim: _Claim | None, keys: Keys
    ) -> JournalRow:
        spec = pb.JournalSpec.FromString(journal.spec_bytes)
        saved = max(journal.head or 0, spec.suspend.offset)
        known = max(saved, stored.end)
        claimed_by = claim.brokers if claim is not None and claim.reaches(known) else ()
        continues = bool(claimed_by) and not self._is_lost(spec)
        skips = not continues and self._may_have_lost(spec, known)
        floor = known + self.skip_bytes if skips else known
        is_as_saved = floor == spec.suspend.offset and self._is_suspended_still(spec, claimed_by)
        if continues and not is_as_saved:
            spec.suspend.Clear()
        elif floor != spec.suspend.offset:  # it was resumed after the backup, or may have been
            spec.suspend.level = pb.JournalSpec.Suspend.NONE
            spec.suspend.offset = floor
        if journal.create_revision:
            set_value(spec.labels, CONTINUES, str(journal.create_revision))
        if skips and self.skip_bytes:
            set_value(spec.labels, SKIPPED_TO, str(floor))
        present = keys.journals.get(journal.name)
        if present is not None:
            spec = pb.JournalSpec.FromString(present.value)
        return JournalRow(
            name=journal.name,
            state=State.CREATE if present is None else State.EXISTS,
            saved_head=journal.head,
            stored_end=stored.end,
            floor=floor if present is None else spec.suspend.offset,
            claimed_by=claimed_by,
            level=pb.JournalSpec.Suspend.Level.Name(spec.suspend.level),
            skips=bool(skipped_to(spec.labels)),
            guessed=journal.guessed,
            spec_bytes=spec_of(spec) if present is None else present.value,
        )

    def _may_have_lost(self, spec: pb.JournalSpec, known: int) -> bool:
        """Return True if brokers that are lost may have had bytes that no one claims.

        Brokers that are there would claim a journal that they held when it was appended to. One
        that was empty, or suspended, was appended to after the backup only if it is claimed, or
        lost with a disk.
        """
        if not self.backup.brokers:  # it is not known which there were
            return known > 0
        return self._is_lost(spec) or (bool(known) and not is_suspended(spec))

    def _is_suspended_still(self, spec: pb.JournalSpec, claimed_by: Sequence[str]) -> bool:
        """Return True if a journal that was suspended was not resumed after the backup.

        One that is suspended in part has one replica, which claims it. All replicas claim one that
        was resumed. Where that does not decide, it is taken for resumed.
        """
        return (
            is_suspended(spec)
            and len(claimed_by) <= 1
            and (not claimed_by or (spec.replication > 1 and not self.checks.lost))
        )

    def _is_lost(self, spec: pb.JournalSpec) -> bool:
        """Return True if all replicas of a journal may have been at brokers that are lost."""
        lost = len(self.backup.brokers) if ALL in self.checks.lost else len(set(self.checks.lost))
        return lost >= max(1, desired_replication(spec))

    # ------------------------------------------------------------ work

    async def run(self, plan: Plan) -> Outcome:
        """Write what is missing, and let the journals begin.

        Raises:
            RestoreRefusedError: somebody else writes to this Etcd.
            GazetteError: Etcd failed. The restore can be continued.
        """
        if not plan.continues:
            begun = {"backup": self.backup.id, "created": self.backup.created_s}
            put = Put(self.marker, orjson.dumps(begun | {"begun": time.time()}))
            result = await self.etcd.txn([Compare.create_revision(self.marker, 0)], [put])
            if not result.succeeded:
                raise RestoreRefusedError(
                    "another restore was begun just now: wait for its end, or run this one again"
                    " to continue it"
                )
        await self._write_journals(plan)
        await self._write_shards(plan)
        outcome = await self._begin(plan)
        if not outcome.waiting:
            await self.etcd.txn([], [Delete(self.marker)])
        return outcome

    async def _write_journals(self, plan: Plan) -> None:
        """Write journals in their order: each transaction after the one before."""
        missing = [each for each in plan.journals if each.state is State.CREATE]
        self.checks.progress.begin("Journals", len(missing))
        for at in range(0, len(missing), TXN_KEYS):
            some = missing[at : at + TXN_KEYS]
            keys = [item_key(self.checks.prefix, each.name) for each in some]
            result = await self.etcd.txn(
                [Compare.create_revision(key, 0) for key in keys],
                [Put(key, each.spec_bytes) for key, each in zip(keys, some, strict=True)],
            )
            if not result.succeeded:
                raise RestoreRefusedError(
                    f"one of the journals {named(each.name for each in some)} was created by"
                    " somebody else meanwhile: stop programs that create journals, and run this"
                    " again"
                )
            self.checks.progress.advance(at + len(some))

    async def _write_shards(self, plan: Plan) -> None:
        missing = [each for each in plan.shards if each.state is State.CREATE]
        self.checks.progress.begin("Shards", len(missing))
        done = 0

        async def write(row: ShardRow) -> None:
            nonlocal done
            key = item_key(row.application, row.id)
            values = [Put(name.encode(), value) for name, value in row.shard.hints.items()]
            result = await self.etcd.txn(
                [Compare.create_revision(key, 0)], [*values, Put(key, row.shard.spec_bytes)]
            )
            if not result.succeeded:
                raise RestoreRefusedError(
                    f"the shard {row.id} of {row.application} was created meanwhile by somebody"
                    " else, without its hints: stop the processes of the application, delete the"
                    " shard, and run this again"
                )
            done += 1
            self.checks.progress.advance(done)

        await for_each(missing, write, CALLS_MAX)

    async def _begin(self, plan: Plan) -> Outcome:
        """Let each journal begin at its floor or after it, by an append without content."""
        saved = {each.name: each for each in self.backup.journals}
        rows = [each for each in plan.journals if each.level == "NONE" and _takes_appends(each)]
        self.checks.progress.begin("Heads of journals", len(rows))
        heads: dict[str, int] = {}
        waiting: dict[str, str] = {each.name: "it is not served yet" for each in rows}
        lost: list[str] = []
        done = 0

        async def begin(row: JournalRow, transport: Transport) -> None:
            nonlocal done
            attempt = 0
            while row.name in waiting:
                try:
                    request = pb.AppendRequest(
                        journal=row.name, suspend=pb.AppendRequest.SUSPEND_NO_RESUME
                    )
                    response = await append(transport, request, [], patience_s=PATIENCE_S)
                except IndexHasGreaterOffsetError as error:
                    waiting[row.name] = str(error)
                    if not row.claimed_by:  # no broker has bytes that are in no store
                        await _reset(transport, row.name)
                except (CallError, StatusError, TimeoutError) as error:
                    waiting[row.name] = str(error)
                else:
                    if response.commit.end < row.floor:
                        raise RestoreRefusedError(
                            f"{row.name} begins at {response.commit.end}, before {row.floor}: its"
                            " broker does not know `suspend.offset`; run brokers of this SDK"
                        )
                    heads[row.name] = response.commit.end
                    if saved[row.name].registers and not response.registers.labels:
                        lost.append(row.name)
                    del waiting[row.name]
                    done += 1
                    self.checks.progress.advance(done)
                    return
                await pause(attempt)
                attempt += 1

        async with self.checks.open_transport(plan.endpoints[0]) as transport:
            try:
                async with asyncio.timeout(READY_TIMEOUT_S):
                    await for_each(rows, lambda row: begin(row, transport), CALLS_MAX)
            except TimeoutError:
                pass  # the others are named
        return Outcome(heads=heads, waiting=dict(waiting), registers_lost=sorted(lost))


async def _reset(transport: Transport, journal: str) -> None:
    try:
        await reset_head(transport, journal, await stored_end(transport, journal))
    except (WrongAppendOffsetError, CallError, StatusError):
        return  # others have reset it, or the next attempt does


def _takes_appends(row: JournalRow) -> bool:
    return may_write(pb.JournalSpec.FromString(row.spec_bytes))
