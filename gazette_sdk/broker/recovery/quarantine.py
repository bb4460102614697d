"""What an earlier process left in its spools, until it is clear how much of it is still good.

A primary that was killed may have committed an append which no other broker has, and of which
nobody was told. If the others went on with the journal without us, at an earlier offset, then the
bytes there are theirs. So a recovered spool is *held back* at first: it is in no replica's index,
and not uploaded.

- Where nobody went on without us, and the journal is assigned to us again, it is used at once.
- Else the brokers of the journal are asked what they have of it, and its stores are listed
  (`reconcile` has the rule). What nobody else has is used, and what has just their bytes.
- Where they have other bytes, and went on without us, ours are cut off, or put aside.

Until then our replica of the journal has no spool: nobody appends to it at an offset which the
bytes held back may have. Which spools others passed is written down before the revision is noted
since when others may have done so, see :meth:`SpoolDirectory.forget_head`: a crash or a stop at
any time leaves them held back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

from gazette_sdk.broker.recovery.reconcile import kept_end
from gazette_sdk.broker.recovery.spools import serial_of
from gazette_sdk.broker.recovery.truncate import keep_beginning, put_superseded_aside
from gazette_sdk.broker.replica import Replica
from gazette_sdk.broker.slot import Signal
from gazette_sdk.broker.spool.directory import CompletedSpool, Durability, SpoolDirectory
from gazette_sdk.errors import GazetteError, UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import digest_of

__all__ = ["HeldBack", "Others"]

ASK_TIMEOUT_S: Final = 15.0
"""Whoever does not answer within this is asked again later."""

READ_TIMEOUT_S: Final = 300.0
"""As long as an upload may take, which is what it saves or costs."""

PAUSE_S_MIN: Final = 0.05
PAUSE_S_MAX: Final = 5.0
"""Between rounds, in each of which all journals are asked about that are left."""

_TOLD_PAUSE_S = 1.0  # a start takes some rounds; one that takes longer says why
_CONCURRENT_QUESTIONS_MAX = 8

_log = logging.getLogger(__name__)

Key = tuple[str, int]
"""A journal's name, and the Etcd revision at which it was created."""


class Others(Protocol):
    """Tells what is known of a journal's content elsewhere."""

    async def before(self, journal: str, end: int) -> list[pb.Fragment]:
        """The fragments that begin before an offset.

        Raises:
            GazetteError: it is not known just now.
            OSError: likewise.
        """

    async def digest(self, journal: str, begin: int, end: int) -> bytes | None:
        """SHA-1 of what readers get of a span; ``None`` if they do not get all of it.

        Raises:
            GazetteError: it is not known just now.
            OSError: likewise.
        """


class HeldBack:
    """The recovered spools of a broker. It belongs to the event loop.

    Args:
        directory: where they stand.
        spools: all that were recovered.
        exists: whether a journal of this name and create revision exists.
        others: whom it asks.
        upload: takes a spool that is good; and one whose journal is deleted, to be dropped.
        replica_of: our replica of the journal of this name and create revision, if there is one.
    """

    def __init__(
        self,
        directory: SpoolDirectory,
        spools: Iterable[CompletedSpool],
        *,
        exists: Callable[[str, int], bool],
        others: Others,
        upload: Callable[[CompletedSpool], None],
        replica_of: Callable[[str, int], Replica | None],
    ) -> None:
        self._directory = directory
        self._exists = exists
        self._others = others
        self._upload = upload
        self._replica_of = replica_of
        self._held: dict[Key, list[CompletedSpool]] = {}
        self._usable: dict[Key, list[CompletedSpool]] = {}  # for a replica to be
        self._ready: dict[Key, Signal] = {}  # of journals of which anything is held back
        for spool in spools:
            key = (spool.fragment.journal, spool.create_revision)
            self._held.setdefault(key, []).append(spool)
            self._ready.setdefault(key, Signal())

    def take(self, journal: str, create_revision: int) -> tuple[Sequence[CompletedSpool], Signal]:
        """What a new replica has from its beginning on.

        What nobody passed is good, since the journal is assigned to us again: it is uploaded.

        Returns:
            the spools, and what fires, or has fired, when nothing of the journal is held back.
        """
        key = (journal, create_revision)
        taken = self._usable.pop(key, [])
        ready = self._ready.get(key)
        if ready is None:
            ready = Signal()
            ready.fire()
            return taken, ready
        held = self._held.pop(key, None)
        if held is None:
            return taken, ready  # it is just being decided
        passed = [spool for spool in held if self._directory.is_passed(spool)]
        for spool in held:
            if spool not in passed:
                taken.append(spool)
                self._upload(spool)
        self._leave(key, passed)
        return taken, ready

    async def run(self) -> None:
        """Ask until nothing is held back any more."""
        pause_s, is_told = PAUSE_S_MIN, False
        while self._held:
            room = asyncio.Semaphore(_CONCURRENT_QUESTIONS_MAX)
            reasons = await asyncio.gather(*(self._try(key, room) for key in list(self._held)))
            waiting = [reason for reason in reasons if reason]
            if not waiting:
                continue
            if pause_s >= _TOLD_PAUSE_S and not is_told:
                is_told = True
                _log.warning(
                    "recovered spools of %d journals are held back, asking again until it is known "
                    "what others wrote of them: %s", len(waiting), waiting[0],
                )  # fmt: skip
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, PAUSE_S_MAX)

    def let_go(self) -> None:
        """The broker stops: replicas need not wait any more. What is held back stays on disk."""
        for ready in self._ready.values():
            ready.fire()

    # --------------------------------------------------------------- inside

    async def _try(self, key: Key, room: asyncio.Semaphore) -> str:
        """Decide what becomes of a journal's spools; or why that cannot be done yet."""
        async with room:
            try:
                await self._decide(key)
            except TimeoutError:
                return f"{key[0]}: no answer in time"
            except (GazetteError, OSError) as error:
                return f"{key[0]}: {error}"
            except Exception as error:  # noqa: BLE001 - a broker does not end for what it keeps
                _log.exception("deciding on recovered spools of %s failed", key[0])
                return f"{key[0]}: {error!r}"
        return ""

    async def _decide(self, key: Key) -> None:
        journal, create_revision = key
        if not self._exists(journal, create_revision):
            for spool in self._held.pop(key, ()):
                self._upload(spool)
            self._leave(key, [])
            return
        end = max((spool.fragment.end for spool in self._held.get(key, ())), default=0)
        async with asyncio.timeout(ASK_TIMEOUT_S):
            known = await self._others.before(journal, end)
        # A replica may have taken some meanwhile. From here on none does.
        spools = self._held.pop(key, [])
        # Of our own, too, the bytes written later are those which the journal went on with.
        spools.sort(key=lambda spool: serial_of(spool.file.path))
        try:
            while spools:
                kept = await self._kept(spools[-1], known)
                spools.pop()
                if kept is None:
                    continue
                known.append(kept.fragment)
                if (replica := self._replica_of(*key)) is not None:
                    replica.index.commit(kept.fragment, kept.file)
                else:
                    self._usable.setdefault(key, []).append(kept)
                self._upload(kept)
        finally:
            self._leave(key, spools)

    async def _kept(
        self, spool: CompletedSpool, known: Sequence[pb.Fragment]
    ) -> CompletedSpool | None:
        """What is left of a spool, given what others have."""
        fragment = spool.fragment
        journal, begin, end = fragment.journal, fragment.begin, fragment.end
        good_end = kept_end(fragment, known)
        if good_end == end:
            return spool
        if not self._directory.is_passed(spool):
            raise UnavailableError("nobody went on with it yet, with us or without us")
        if good_end == begin:
            async with asyncio.timeout(READ_TIMEOUT_S):
                theirs = await self._others.digest(journal, begin, end)
            if theirs == digest_of(fragment.sum):
                return spool
        why = (
            "other brokers wrote them while this one was away; these bytes were never "
            "acknowledged, or with replication 1 only, and lost when others went on"
        )
        if good_end > begin:
            synced = self._directory.durability is Durability.PERSISTED
            cut = await self._directory.in_background(
                lambda: keep_beginning(spool, good_end, synced=synced)
            )
            _log.warning(
                "offsets %d to %d of %s are cut off %s: %s",
                good_end, end, journal, spool.file.path, why,
            )  # fmt: skip
            return cut
        aside = await self._directory.in_background(lambda: put_superseded_aside(spool))
        _log.warning(
            "offsets %d to %d of %s in %s are not used: %s; kept as %s",
            begin, end, journal, spool.file.path, why, aside.name,
        )  # fmt: skip
        return None

    def _leave(self, key: Key, spools: list[CompletedSpool]) -> None:
        """Leave these held back, of a journal of which nothing is in :attr:`_held` now."""
        if spools:
            self._held[key] = spools
        elif (ready := self._ready.pop(key, None)) is not None:
            ready.fire()
