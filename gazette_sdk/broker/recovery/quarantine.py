"""Quarantine of recovered spools, until it is known how much of them is valid.

A primary that was killed may have committed an append which no peer has and which was never
acknowledged. If the others continued the journal without this broker, at an earlier offset, then
the bytes there are theirs. So a recovered spool is in quarantine first: in no replica's index and
not uploaded. `states` has the transitions; this module performs their effects:

- An uncontested spool is used as soon as its journal is assigned to this broker again.
- Otherwise the journal's brokers and stores are asked for their fragments. A spool of which they
  have nothing, or the same bytes, is used. A contested one is truncated or renamed where they
  have other bytes. They are asked again when the journal's route changes, and after a pause.
- Of a journal that Etcd lost no one has continued it: brokers that claim it use their spools, also
  where others have less; the others wait for them, as for brokers that continued it.
- Stores are not asked if the brokers have every byte of a journal's spools: what is stored would
  change nothing. So a broker joins its journals again while their stores fail.
- A replica waits for these decisions, except for contested spools that cannot be compared now: if
  others have every byte of them, or the journal waits for those who continued it. It begins without
  these spools, as at a broker that has nothing.
- When all spools of a journal are in use, and each of them is whole, its head is restored: if this
  broker is a member of the last route, or if as many members of that as the journal requires have
  nothing: then nothing was acknowledged, and the journal may as well begin with these spools.

Contested spools are recorded on disk before the revision from which the next start reads Etcd's
history; see :meth:`SpoolDirectory.forget_head`. So a stop or a crash at any time leaves them in
quarantine.

Unconfirmed spools (:class:`UnconfirmedSpools`) are closed, and it is not known whether all replicas
have their content. A primary commits an append to its own spool before its peers have it, and a
replica before it knows that the others have it, too. If such content was stored, and others
continued the journal at an earlier offset, then the store would have other bytes than the journal.
So a spool waits here until the journal's replicas have acknowledged everything in it. If our
replica ends before, the spool goes to the quarantine, which asks the others.
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
import logging
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from gazette_sdk.broker.recovery.peers import PeerInventory
from gazette_sdk.broker.recovery.spools import (
    ClosedGaps,
    closed_gaps,
    compare,
    is_ahead,
    serial_of,
    set_superseded_aside,
    truncate_spool,
)
from gazette_sdk.broker.recovery.states import (
    SPOOL_ENDS,
    SpoolEffect,
    SpoolInput,
    SpoolState,
    spool_step,
)
from gazette_sdk.broker.replica import Replica
from gazette_sdk.broker.replication.pipeline import Signal
from gazette_sdk.broker.spool.directory import Durability, SpoolDirectory
from gazette_sdk.broker.spool.files import CompletedSpool, ContentFile, Head
from gazette_sdk.cluster.items import AssignmentEntry, ItemEntry
from gazette_sdk.cluster.keyspace import Change
from gazette_sdk.errors import GazetteError, UnavailableError
from gazette_sdk.fragment.content import CoverSet
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import digest_of

ASK_TIMEOUT_S: Final = 15.0
"""Bound of one inventory with its stores. What does not answer is asked again later."""

READ_TIMEOUT_S: Final = 300.0
"""Bound of reading a span from the primary: that of an upload, which it replaces."""

PAUSE_S_MIN: Final = 0.05
PAUSE_S_MAX: Final = 2.0
"""Pauses between rounds, unless a route changes. Each round asks for all journals that are left."""

_WARNING_PAUSE_S = 1.0  # a normal start takes some rounds
_CONCURRENT_JOURNALS_MAX = 8
_READ_BYTES = 1 << 20
_WHY_SUPERSEDED = (
    "other brokers wrote them while this one was away; these bytes were never "
    "acknowledged, or with replication 1 only, and lost when others went on"
)

_log = logging.getLogger(__name__)

Key = tuple[str, int]
"""A journal's name, and the Etcd revision at which it was created."""


@dataclass(slots=True, eq=False)
class _Entry:
    """A spool in quarantine."""

    spool: CompletedSpool
    state: SpoolState = SpoolState.UNCONTESTED
    needs_stores: bool = False  # in the next round: the primary does not have all of its bytes

    def step(self, given: SpoolInput) -> SpoolEffect:
        effect, self.state = spool_step(self.state, given)
        return effect


class _OtherContent(NamedTuple):
    """Content of a journal outside of this broker's quarantine.

    Attributes:
        inventory: what others have, asked for after ``head``, and what we use ourselves.
        head: offset at which those continue who took the journal without this broker. They have
            learned all that was acknowledged. ``None`` if no one did, or it is not known.
        are_stores_listed: True if the inventory has what is stored.
    """

    inventory: list[pb.Fragment]
    head: int | None
    are_stores_listed: bool

    @property
    def is_empty(self) -> bool:
        """True if those who continued the journal, and the stores, have nothing of it."""
        return self.head == 0 and not self.inventory


class Quarantine:
    """Recovered spools of a broker which are not used yet. It belongs to the event loop.

    Args:
        directory: the directory of the spools.
        spools: all that were recovered.
        unverified: heads which are used only if no one has bytes after them.
        exists: returns True if a journal of this name and create revision exists.
        inventory: what peers and stores have.
        upload: takes a spool that is used; also one whose journal is deleted, which is dropped.
        replica_of: returns our replica of the journal of this name and create revision, if any.
        upload_agreed: takes a spool that a replica uses, to upload it when all replicas have
            acknowledged its content; by default ``upload``.
        restores_head: returns True if this broker is a member of a journal's last route.
        goes_on: returns True if brokers are there which may continue a journal without us: bytes
            after all that they have may become theirs at any time.
        continued_by: returns the members of a journal's last route if this broker is none of them.
        other_members: returns the other members of a journal's last route in any case.
        claims: returns True if Etcd lost a journal, and no broker has more of it than this one: no
            one has continued it, so that bytes after those of others are the journal's.
        are_claims_known: returns True if Etcd has no other claims to a journal than this broker
            knows: its watch may be late, and others may have more.
        stored_end: returns the end of a journal's content if all of its brokers have left, and
            stored it; 0 if they have not.
        waits: returns True if a journal waits for members of its last route, who are away.
        decided: called when nothing of a journal is in quarantine any more.
        is_withheld: returns True if the files of a journal are withheld. Its replicas wait, too.
    """

    def __init__(
        self,
        directory: SpoolDirectory,
        spools: Iterable[CompletedSpool],
        *,
        exists: Callable[[str, int], bool],
        inventory: PeerInventory,
        upload: Callable[[CompletedSpool], None],
        replica_of: Callable[[str, int], Replica | None],
        upload_agreed: Callable[[CompletedSpool], None] | None = None,
        restores_head: Callable[[str], bool] = lambda _: False,
        goes_on: Callable[[str], bool] = lambda _: False,
        continued_by: Callable[[str], Sequence[pb.ProcessSpec.ID]] = lambda _: (),
        other_members: Callable[[str], Sequence[pb.ProcessSpec.ID]] = lambda _: (),
        claims: Callable[[str], bool] = lambda _: False,
        are_claims_known: Callable[[str], Awaitable[bool]] | None = None,
        stored_end: Callable[[str], int] = lambda _: 0,
        waits: Callable[[str], bool] = lambda _: False,
        decided: Callable[[], None] = lambda: None,
        unverified: Iterable[Head] = (),
        is_withheld: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._directory = directory
        self._exists = exists
        self._inventory = inventory
        self._upload = upload
        self._replica_of = replica_of
        self._upload_agreed = upload_agreed or upload
        self._restores_head = restores_head
        self._goes_on = goes_on
        self._continued_by = continued_by
        self._other_members = other_members
        self._claims = claims
        self._are_claims_known = are_claims_known
        self._stored_end = stored_end
        self._waits = waits
        self._decided = decided
        self._is_withheld = is_withheld
        self._woken = asyncio.Event()
        self._whole: dict[Key, CompletedSpool | None] = {}  # last one, if all of them are whole
        self._entries: dict[Key, list[_Entry]] = {}  # without those that are being decided
        self._deciding: set[Key] = set()
        self._usable: dict[Key, list[CompletedSpool]] = {}  # for a replica which is made later
        self._ready: dict[Key, Signal] = {}  # of journals in quarantine
        self._unverified = {(head.journal, head.create_revision) for head in unverified}
        for key in self._unverified:
            self._entries.setdefault(key, [])
            self._ready.setdefault(key, Signal())
        for spool in spools:
            key = (spool.fragment.journal, spool.create_revision)
            self._entries.setdefault(key, []).append(_Entry(spool))
            self._ready.setdefault(key, Signal())

    def take(self, journal: str, create_revision: int) -> tuple[Sequence[CompletedSpool], Signal]:
        """Return the usable spools of a journal that was assigned to this broker.

        Uncontested spools are usable from now on, and are uploaded when all replicas have them.

        Returns:
            the spools, and a signal that fires, or has fired, when the replica may begin: no spool
            of the journal is in quarantine without which it is not complete.
        """
        key = (journal, create_revision)
        if self._is_withheld(journal):
            return [], self._ready.setdefault(key, Signal())
        taken = self._usable.pop(key, [])
        ready = self._ready.get(key)
        if ready is None:
            ready = Signal()
            ready.fire()
        elif key not in self._deciding:
            contested = []
            for entry in self._pop(key):
                if entry.step(SpoolInput.ASSIGNED) is SpoolEffect.USE:
                    self._note_whole(key, entry.spool, entry.spool)
                    taken.append(entry.spool)
                    self._upload_agreed(entry.spool)
                else:
                    contested.append(entry)
            self._put_back(key, contested)
        return taken, ready

    def hold(self, spool: CompletedSpool) -> None:
        """Take a spool of this process: others may have continued its journal without us.

        One that ends after our head is contested. It was kept at a replica's end, and the next one
        begins before it.
        """
        key = (spool.fragment.journal, spool.create_revision)
        entry = _Entry(spool)
        if spool.fragment.end > self._directory.head_end(*key):
            entry.step(SpoolInput.CONTINUED_BY_OTHERS)
        self._entries.setdefault(key, []).append(entry)
        self._ready.setdefault(key, Signal())
        self._woken.set()

    def release(self, key: Key, spools: Iterable[CompletedSpool]) -> None:
        """Take the spools of a journal which were withheld, and its unverified head.

        Args:
            key: the journal that they belong to now.
            spools: contested; there may be none.
        """
        if self._directory.unverified_head(key[0]) is not None:
            self._unverified.add(key)
        self._entries.setdefault(key, []).extend(map(_Entry, spools))
        self._ready.setdefault(key, Signal())
        self._woken.set()

    async def run(self) -> None:
        """Decide about all spools; return when none is in quarantine."""
        pause_s, is_warned = PAUSE_S_MIN, False
        while self._entries:
            self._woken.clear()
            room = asyncio.Semaphore(_CONCURRENT_JOURNALS_MAX)
            reasons = await asyncio.gather(*(self._try(key, room) for key in list(self._entries)))
            waiting = [reason for reason in reasons if reason]
            if not waiting:
                continue
            if pause_s >= _WARNING_PAUSE_S and not is_warned:
                is_warned = True
                _log.warning(
                    "recovered spools of %d journals stay in quarantine and are not uploaded: it "
                    "is not known yet what other brokers wrote there; asking again: %s",
                    len(waiting), waiting[0],
                )  # fmt: skip
            try:
                async with asyncio.timeout(pause_s):
                    await self._woken.wait()
                pause_s = PAUSE_S_MIN
            except TimeoutError:
                pause_s = min(pause_s * 2, PAUSE_S_MAX)

    def holds(self, journal: str, create_revision: int) -> bool:
        """Return True if a replica of a journal waits for what is in quarantine."""
        return (journal, create_revision) in self._ready or self._is_withheld(journal)

    def unverified_end(self, journal: str, create_revision: int) -> int | None:
        """Return the end of a journal's unverified head, of which nothing is decided yet.

        ``None`` if there is none, or this broker is no member of the journal's last route.
        """
        if (journal, create_revision) not in self._unverified or not self._restores_head(journal):
            return None
        head = self._directory.unverified_head(journal)
        return head.end if head is not None else None

    def observe(self, changes: Iterable[Change]) -> None:
        """Ask again at once if a journal with spools in quarantine is among changed keys.

        The replica of a deleted journal whose files are withheld ends without them.
        """
        changes = list(changes)
        for _, old, new in changes:
            if isinstance(old, ItemEntry) and new is None and self._is_withheld(old.id):
                ready = self._ready.pop((old.id, old.create_revision), None)
                if ready is not None:
                    ready.fire()
        if not self._entries:
            return
        held = {journal for journal, _ in self._entries}
        for change in changes:
            match change.new or change.old:
                case AssignmentEntry(item=journal) | ItemEntry(id=journal) if journal in held:
                    self._woken.set()
                    return

    def stop(self) -> None:
        """Let replicas end without waiting for decisions. Spools in quarantine stay on disk."""
        for ready in self._ready.values():
            ready.fire()

    # ------------------------------------------------------------ decisions

    async def _try(self, key: Key, room: asyncio.Semaphore) -> str:
        """Decide about a journal's spools. Return why not, or an empty string."""
        async with room:
            try:
                await self._decide(key)
            except TimeoutError:
                return f"{key[0]}: no answer in time"
            except (GazetteError, OSError) as error:
                return f"{key[0]}: {error}"
            except Exception as error:  # noqa: BLE001 - the broker continues without these spools
                _log.exception("deciding about recovered spools of %s failed", key[0])
                return f"{key[0]}: {error!r}"
        return ""

    async def _decide(self, key: Key) -> None:
        if not self._exists(*key):
            for entry in self._pop(key):
                entry.step(SpoolInput.JOURNAL_DELETED)
                self._upload(entry.spool)  # which drops it
            self._unverified.discard(key)
            self._put_back(key, [])
            return
        self._check_present(key)
        asked = list(self._entries.get(key, ()))
        others = self._others(key, asked)
        theirs = await self._ask(key, asked, others)
        self._check_present(key)  # they may have left before they were asked
        if self._others(key, asked) != others:
            raise UnavailableError("others have just continued it", journal=key[0])
        if (
            self._are_claims_known is not None
            and self._claims(key[0])
            and not await self._are_claims_known(key[0])
        ):
            raise UnavailableError("other brokers may have more of it", journal=key[0])
        await self._decide_about(key, asked, theirs)

    def _check_present(self, key: Key) -> None:
        """Put the contested spools of a journal aside that waits for those who continued it.

        Raises:
            UnavailableError: it does.
        """
        if self._waits(key[0]) and self._continued_by(key[0]):
            self._put_aside(key)
            raise UnavailableError("the brokers that continued it are away", journal=key[0])

    def _others(self, key: Key, asked: Sequence[_Entry]) -> Sequence[pb.ProcessSpec.ID]:
        """Return the brokers that continued a journal without this one, also if it is back."""
        find = self._other_members if self._is_any_contested(asked) else self._continued_by
        return list(find(key[0]))

    def _left_at(self, key: Key, asked: Sequence[_Entry]) -> int:
        """Return where those who continued a journal without this broker left it; 0 if unknown.

        All of its content was stored then. It may not be listed yet, and the journal continues at
        its end.
        """
        return self._stored_end(key[0]) if self._is_any_contested(asked) else 0

    def _is_any_contested(self, asked: Sequence[_Entry]) -> bool:
        return any(
            entry.state is SpoolState.CONTESTED or self._directory.is_contested(entry.spool)
            for entry in asked
        )

    async def _ask(
        self, key: Key, asked: Sequence[_Entry], others: Sequence[pb.ProcessSpec.ID]
    ) -> _OtherContent:
        """Ask brokers, and stores if need be, what they have of a journal.

        Args:
            key: the journal.
            asked: its spools.
            others: those who continued it without this broker.

        Raises:
            GazetteError: one of them did not answer.
            OSError: likewise.
        """
        is_verifying = key in self._unverified
        end = max((entry.spool.fragment.end for entry in asked), default=0)
        # With what begins at their end: then they close a gap. After a head: everything.
        limit = sys.maxsize if is_verifying else end + 1
        async with asyncio.timeout(ASK_TIMEOUT_S):
            # The head first: whatever others have in front of it, the inventory has.
            head = None
            if others:
                head = await self._inventory.head(key[0], others, self.unverified_end(*key))
            if left_at := self._left_at(key, asked):
                head = max(head or 0, left_at)
            inventory = await self._inventory.fragments_of_brokers(key[0], limit)
            are_stores_listed = _need_stores(asked, inventory) or is_verifying
            if are_stores_listed:
                inventory += await self._inventory.fragments_of_stores(key[0], limit)
        return _OtherContent(inventory, head, are_stores_listed)

    async def _decide_about(self, key: Key, asked: Sequence[_Entry], theirs: _OtherContent) -> None:
        # A replica may have taken some meanwhile. None does from here on.
        found = self._pop(key)
        entries = [entry for entry in found if entry in asked]
        held_since = [entry for entry in found if entry not in asked]  # their turn comes later
        # Of overlapping spools of our own the later one has the journal's bytes.
        entries.sort(key=lambda entry: serial_of(entry.spool.file.path))
        held = CoverSet(theirs.inventory)
        begins_here = theirs.is_empty
        covered: list[_Entry] = []
        failure: Exception | None = None
        self._deciding.add(key)
        try:
            while entries:
                try:
                    used = await self._advance(entries[-1], theirs)
                except (GazetteError, OSError) as error:
                    if not _is_covered(entries[-1], held):
                        raise
                    failure = error
                    covered.append(entries.pop())
                    continue
                self._note_whole(key, entries.pop().spool, used)
                if used is not None:
                    theirs.inventory.append(used.fragment)
                    self._use(key, used)
            if failure is not None:
                raise failure
            if key in self._unverified and not held_since:
                self._unverified.discard(key)
                self._judge_head(key, theirs.inventory)
        finally:
            self._deciding.discard(key)
            self._put_back(key, [*entries, *held_since], covered, begins_here=begins_here)

    def _put_aside(self, key: Key) -> None:
        """Let a replica begin without the contested spools, and the head, of a journal."""
        self._unverified.discard(key)  # it was for a member of the last route
        entries = self._pop(key)
        contested = [entry for entry in entries if entry.state is SpoolState.CONTESTED]
        others = [entry for entry in entries if entry.state is not SpoolState.CONTESTED]
        self._put_back(key, others, contested)

    async def _advance(self, entry: _Entry, theirs: _OtherContent) -> CompletedSpool | None:
        """Perform the effects of a spool's transitions to its end. Return the usable part.

        Raises:
            GazetteError: it cannot be decided yet.
            OSError: likewise.
        """
        spool = entry.spool
        inventory, head, are_stores_listed = theirs
        given, end = self._judge(spool, inventory, head or 0)
        while entry.state not in SPOOL_ENDS:
            effect = entry.step(given)
            if effect is SpoolEffect.CONTINUE_WAITING:
                raise UnavailableError(
                    "no broker has continued the journal yet", journal=spool.fragment.journal
                )
            try:
                match effect:
                    case SpoolEffect.COMPARE:
                        given = await self._compare_bytes(
                            entry, are_stores_listed=are_stores_listed
                        )
                    case SpoolEffect.COMPARE_SHARED:
                        closing = closed_gaps(spool.fragment, inventory, head or 0)
                        differs_at = await self._first_difference(spool, closing)
                        given, end = closing.judge(spool.fragment, differs_at)
                    case SpoolEffect.TRUNCATE:
                        spool, given = await self._truncate(spool, end), SpoolInput.DONE
                    case SpoolEffect.SET_SUPERSEDED_ASIDE:
                        await self._set_aside(spool)
                        given = SpoolInput.DONE
            except BaseException:
                entry.step(SpoolInput.FAILED)
                raise
        return spool if entry.state is SpoolState.IN_USE else None

    def _judge(
        self, spool: CompletedSpool, inventory: Sequence[pb.Fragment], head: int
    ) -> tuple[SpoolInput, int]:
        """Return what others have of a spool, and the offset from which they have it.

        Args:
            spool: the spool.
            inventory: what others have.
            head: offset at which those continue who took the journal; 0 for none.

        Raises:
            UnavailableError: others may write its offsets at any time.
        """
        ours = spool.fragment
        journal, create_revision = ours.journal, spool.create_revision
        is_alone = is_ahead(ours, inventory) and head < ours.end
        if (
            is_alone
            and self._goes_on(journal)
            and self._replica_of(journal, create_revision) is None
        ):
            raise UnavailableError(
                f"others have it up to an offset before {ours.end}, and may write there",
                journal=journal,
            )
        given, end = compare(ours, inventory, head)
        if self._claims(journal) and not CoverSet(inventory).covers(ours.begin, ours.end):
            return SpoolInput.NOT_HELD, end
        if is_alone and head and given is SpoolInput.NOT_HELD:
            # Those who continued the journal are going to write at these offsets, or before them.
            return SpoolInput.HELD_FROM_BEGIN, ours.begin
        return given, end

    async def _compare_bytes(self, entry: _Entry, *, are_stores_listed: bool) -> SpoolInput:
        """Compare a spool with what readers get.

        Raises:
            GazetteError: the primary did not answer, or does not have all of it, and the stores
                may have it.
        """
        ours = entry.spool.fragment
        async with asyncio.timeout(READ_TIMEOUT_S):
            digest = await self._inventory.digest(ours.journal, ours.begin, ours.end)
        if digest is None and not are_stores_listed:
            entry.needs_stores = True
            raise UnavailableError(
                f"its primary cannot read offsets {ours.begin} to {ours.end} yet",
                journal=ours.journal,
            )
        return SpoolInput.SAME_BYTES if digest == digest_of(ours.sum) else SpoolInput.OTHER_BYTES

    async def _first_difference(self, spool: CompletedSpool, closing: ClosedGaps) -> int | None:
        """Return the begin of the first shared span of which readers get other bytes.

        Raises:
            GazetteError: the primary cannot read a span yet.
        """
        journal, first = spool.fragment.journal, spool.fragment.begin
        async with asyncio.timeout(READ_TIMEOUT_S):
            for begin, end in closing.shared:
                theirs = await self._inventory.digest(journal, begin, end)
                if theirs is None:
                    raise UnavailableError(
                        f"its primary cannot read offsets {begin} to {end} yet", journal=journal
                    )
                digest = partial(_digest_of, spool.file, begin - first, end - first)
                if theirs != await self._directory.in_background(digest):
                    return begin
        return None

    async def _truncate(self, spool: CompletedSpool, end: int) -> CompletedSpool:
        synced = self._directory.durability is Durability.PERSISTED
        truncated = await self._directory.in_background(
            lambda: truncate_spool(spool, end, synced=synced)
        )
        _log.warning(
            "offsets %d to %d of %s are cut off %s: %s",
            end, spool.fragment.end, spool.fragment.journal, spool.file.path, _WHY_SUPERSEDED,
        )  # fmt: skip
        return truncated

    async def _set_aside(self, spool: CompletedSpool) -> None:
        aside = await self._directory.in_background(lambda: set_superseded_aside(spool))
        fragment = spool.fragment
        _log.warning(
            "offsets %d to %d of %s in %s are not used: %s; kept as %s",
            fragment.begin, fragment.end, fragment.journal, spool.file.path, _WHY_SUPERSEDED,
            aside.name,
        )  # fmt: skip

    def _use(self, key: Key, spool: CompletedSpool) -> None:
        """Use a spool. A replica shows it when all replicas have acknowledged its content."""
        if (replica := self._replica_of(*key)) is None:
            self._usable.setdefault(key, []).append(spool)
            self._upload(spool)
            return
        replica.index.add_unacknowledged(spool.fragment, spool.file)
        if self._directory.is_contested(spool):
            self._upload(spool)  # it was compared, and would be compared again
        else:
            self._upload_agreed(spool)

    def _pop(self, key: Key) -> list[_Entry]:
        """Remove and return the entries of a journal, in their states as of now."""
        entries = self._entries.pop(key, [])
        for entry in entries:
            is_contested = self._directory.is_contested(entry.spool)
            if is_contested and entry.state is SpoolState.UNCONTESTED:
                entry.step(SpoolInput.CONTINUED_BY_OTHERS)
        return entries

    def _put_back(
        self,
        key: Key,
        entries: list[_Entry],
        covered: Sequence[_Entry] = (),
        *,
        begins_here: bool = False,
    ) -> None:
        """Return undecided entries. Without any but covered ones a replica may begin.

        Args:
            key: the journal.
            entries: without which a replica is not complete.
            covered: the others.
            begins_here: the journal has no bytes but those of our spools.
        """
        needed = [*entries, *self._entries.pop(key, ())]  # some are held since
        is_needed = bool(needed) or key in self._unverified
        if is_needed or covered:
            self._entries[key] = [*needed, *covered]
        if covered:
            self._whole[key] = None  # the head that a replica begins without them is another one
        if not is_needed and (ready := self._ready.pop(key, None)) is not None:
            if begins_here or self._restores_head(key[0]):
                self._restore_head(self._whole.get(key))
            ready.fire()
            self._decided()
        if key not in self._entries:
            self._whole.pop(key, None)

    def _note_whole(self, key: Key, spool: CompletedSpool, used: CompletedSpool | None) -> None:
        """Note the last spool of a journal, as long as all that were decided are whole."""
        last = self._whole.get(key, spool)
        if used is None or used.fragment.end < spool.fragment.end:
            self._whole[key] = None
        elif last is not None:
            self._whole[key] = max(last, used, key=lambda each: each.fragment.end)

    def _judge_head(self, key: Key, inventory: Iterable[pb.Fragment]) -> None:
        """Use a journal's unverified head if its spools are whole, and no one has more."""
        head, is_whole = self._directory.unverified_head(key[0]), self._whole.get(key, True)
        if head is None or not is_whole or not self._restores_head(key[0]):
            return
        end = max((fragment.end for fragment in inventory), default=0)
        if end > head.end:
            _log.warning(
                "%s ends at %d here, and others have it up to %d: run `gazctl journals "
                "reset-head` if appends are refused", head.journal, head.end, end,
            )  # fmt: skip
            return
        try:
            self._directory.verify_head(head)
        except OSError as error:
            _log.warning("cannot write the head of %s: %s", head.journal, error)
        _log.info("%s continues at %d: no one has more", head.journal, head.end)

    def _restore_head(self, last: CompletedSpool | None) -> None:
        """Restore the head of a journal whose spools are all in use."""
        if last is None:
            return
        try:
            head = self._directory.restore_head(last)
        except OSError as error:
            _log.warning("cannot write the head of %s: %s", last.fragment.journal, error)
        else:
            if head is not None:
                _log.info("%s continues at %d: its spools are in use", head.journal, head.end)


def _need_stores(entries: Sequence[_Entry], inventory: Iterable[pb.Fragment]) -> bool:
    """Return True if stored fragments may change a decision about a journal's spools.

    They may not if brokers have every byte of the spools: then only the same bytes are used.
    """
    held = CoverSet(inventory)
    is_needed = False
    for entry in entries:
        ours = entry.spool.fragment
        is_needed |= entry.needs_stores or not held.covers(ours.begin, ours.end)
        entry.needs_stores = False
    return is_needed


def _is_covered(entry: _Entry, held: CoverSet) -> bool:
    """Return True if others continued a journal, and have every byte of our spool.

    The journal's bytes are theirs, whatever the comparison shows: a replica is complete without it.
    """
    ours = entry.spool.fragment
    return entry.state is SpoolState.CONTESTED and held.covers(ours.begin, ours.end)


def _digest_of(file: ContentFile, begin: int, end: int) -> bytes:
    """Return the SHA-1 of a part of a spool's content. Blocks."""
    found = hashlib.sha1(usedforsecurity=False)
    while begin < end:
        found.update(file.read_at(begin, min(end - begin, _READ_BYTES)))
        begin += _READ_BYTES
    return found.digest()


"""A journal's name, and the Etcd revision at which it was created."""


class SpoolAction(enum.Enum):
    """Decision about a spool that waits."""

    WAIT = "its replica may still learn that all replicas have it"
    UPLOAD = "all replicas have it, or its journal is deleted: the upload drops it then"
    QUARANTINE = "our replica ended, or others continued the journal: they are asked"


def spool_action(
    end: int,
    acknowledged_end: int,
    *,
    has_replica: bool = True,
    journal_exists: bool = True,
    is_contested: bool = False,
) -> SpoolAction:
    """Return what becomes of a spool.

    Args:
        end: of the spool.
        acknowledged_end: offset through which all replicas have acknowledged the journal, as far
            as our replica knows, or knew when it ended.
        has_replica: False if it ended.
        journal_exists: False if the journal is deleted.
        is_contested: True if others continued the journal since the spool was written.
    """
    if not journal_exists:
        return SpoolAction.UPLOAD
    if is_contested:
        return SpoolAction.QUARANTINE
    if end <= acknowledged_end:
        return SpoolAction.UPLOAD
    return SpoolAction.WAIT if has_replica else SpoolAction.QUARANTINE


@dataclass(slots=True, eq=False)
class _Waiting:
    spool: CompletedSpool
    replica: Replica | None = None  # the last one that we had


class UnconfirmedSpools:
    """Spools that wait. They belong to the event loop.

    Args:
        replica_of: returns our replica of the journal of this name and create revision, if any.
        exists: returns True if a journal of this name and create revision exists.
        is_contested: returns True if others continued a spool's journal since it was written.
        upload: takes a spool whose content all replicas have.
        quarantine: takes a spool about which others are asked.
    """

    def __init__(
        self,
        *,
        replica_of: Callable[[str, int], Replica | None],
        exists: Callable[[str, int], bool],
        is_contested: Callable[[CompletedSpool], bool],
        upload: Callable[[CompletedSpool], None],
        quarantine: Callable[[CompletedSpool], None],
    ) -> None:
        self._replica_of = replica_of
        self._exists = exists
        self._is_contested = is_contested
        self._upload = upload
        self._quarantine = quarantine
        self._waiting: dict[Key, list[_Waiting]] = {}
        self._due: set[Key] = set()
        self._woken = asyncio.Event()

    def add(self, spool: CompletedSpool) -> None:
        """Let a spool wait."""
        key = _key(spool)
        self._waiting.setdefault(key, []).append(_Waiting(spool))
        self._wake(key)

    def holds(self, journal: str, create_revision: int) -> bool:
        """Return True if a spool of a journal waits."""
        return (journal, create_revision) in self._waiting

    def observe(self, journals: Iterable[str]) -> None:
        """Look at the spools of journals whose keys have changed: our replicas may have, too."""
        if self._waiting:
            changed = set(journals)
            for key in self._waiting:
                if key[0] in changed:
                    self._wake(key)

    async def run(self) -> None:
        """Decide about spools when something has changed for them, until cancelled."""
        while True:
            await self._woken.wait()
            self._woken.clear()
            due, self._due = self._due, set()
            for key in due:
                self._look_at(key)

    def look(self) -> None:
        """Decide about all spools that need not wait any more."""
        for key in list(self._waiting):
            self._look_at(key)

    def upload_all(self) -> None:
        """Upload all: no other broker is there which could continue the journals."""
        waiting, self._waiting = self._waiting, {}
        for entries in waiting.values():
            for entry in entries:
                self._upload(entry.spool)

    def _wake(self, key: Key) -> None:
        self._due.add(key)
        self._woken.set()

    def _look_at(self, key: Key) -> None:
        """Decide about the spools of a journal. What its replica acknowledges wakes the others."""
        left = []
        for entry in self._waiting.pop(key, ()):
            match self._action_of(entry):
                case SpoolAction.WAIT:
                    left.append(entry)
                case SpoolAction.UPLOAD:
                    self._upload(entry.spool)
                case SpoolAction.QUARANTINE:
                    self._quarantine(entry.spool)
        if left:
            self._waiting[key] = left
        if (replica := self._replica_of(*key)) is not None:
            replica.index.on_acknowledged = partial(self._wake, key) if left else None

    def _action_of(self, entry: _Waiting) -> SpoolAction:
        spool = entry.spool
        replica = self._replica_of(*_key(spool))
        entry.replica = replica or entry.replica
        return spool_action(
            spool.fragment.end,
            entry.replica.index.acknowledged_end if entry.replica is not None else 0,
            has_replica=replica is not None,
            journal_exists=self._exists(*_key(spool)),
            is_contested=self._is_contested(spool),
        )


def _key(spool: CompletedSpool) -> Key:
    return spool.fragment.journal, spool.create_revision
