"""Closed spools with content of which it is not known whether all replicas have it.

A primary commits an append to its own spool before its peers have it, and a replica before it is
told that the others have it, too. If such content was stored, and others continued the journal at
an earlier offset, then the store would have other bytes than the journal. So a spool waits here
until the journal's replicas have acknowledged everything in it. If our replica ends before, the
spool goes to the quarantine, which asks the others.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from gazette_sdk.broker.replica import Replica
from gazette_sdk.broker.spool.content_file import CompletedSpool

__all__ = ["Fate", "UnagreedSpools", "fate_of"]

Key = tuple[str, int]
"""A journal's name, and the Etcd revision at which it was created."""


class Fate(enum.Enum):
    """Decision about a spool that waits."""

    WAIT = "its replica may still learn that all replicas have it"
    UPLOAD = "all replicas have it, or its journal is deleted: the upload drops it then"
    QUARANTINE = "our replica ended, or others continued the journal: they are asked"


def fate_of(
    end: int,
    acknowledged_end: int,
    *,
    has_replica: bool = True,
    journal_exists: bool = True,
    is_contested: bool = False,
) -> Fate:
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
        return Fate.UPLOAD
    if is_contested:
        return Fate.QUARANTINE
    if end <= acknowledged_end:
        return Fate.UPLOAD
    return Fate.WAIT if has_replica else Fate.QUARANTINE


@dataclass(slots=True, eq=False)
class _Waiting:
    spool: CompletedSpool
    replica: Replica | None = None  # the last one that we had


class UnagreedSpools:
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
            match self._fate_of(entry):
                case Fate.WAIT:
                    left.append(entry)
                case Fate.UPLOAD:
                    self._upload(entry.spool)
                case Fate.QUARANTINE:
                    self._quarantine(entry.spool)
        if left:
            self._waiting[key] = left
        if (replica := self._replica_of(*key)) is not None:
            replica.index.on_acknowledged = partial(self._wake, key) if left else None

    def _fate_of(self, entry: _Waiting) -> Fate:
        spool = entry.spool
        replica = self._replica_of(*_key(spool))
        entry.replica = replica or entry.replica
        return fate_of(
            spool.fragment.end,
            entry.replica.index.acknowledged_end if entry.replica is not None else 0,
            has_replica=replica is not None,
            journal_exists=self._exists(*_key(spool)),
            is_contested=self._is_contested(spool),
        )


def _key(spool: CompletedSpool) -> Key:
    return spool.fragment.journal, spool.create_revision
