"""Closed spools with content of which it is not known whether all replicas have it.

A primary commits an append to its own spool before its peers have it, and a replica before it is
told that the others have it, too. If such content was stored, and others continued the journal at
an earlier offset, then the store would have other bytes than the journal. So a spool waits here
until the journal's replicas have acknowledged everything in it. If our replica ends before, the
spool goes to the quarantine, which asks the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gazette_sdk.broker.replica import Replica
from gazette_sdk.broker.spool.directory import CompletedSpool

__all__ = ["Fate", "UnagreedSpools", "fate_of"]

POLL_S: Final = 0.1
"""Pause between two looks at the spools that wait. It costs nothing while there are none."""


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
        self._waiting: list[_Waiting] = []
        self._added = asyncio.Event()

    def add(self, spool: CompletedSpool) -> None:
        """Let a spool wait."""
        self._waiting.append(_Waiting(spool))
        self._added.set()

    def holds(self, journal: str, create_revision: int) -> bool:
        """Return True if a spool of a journal waits."""
        key = (journal, create_revision)
        return any(_key(each.spool) == key for each in self._waiting)

    async def run(self) -> None:
        """Look at the spools that wait, until cancelled."""
        while True:
            self._added.clear()
            # At once, too: a replica may end soon after all have agreed.
            self.look()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S if self._waiting else None):
                    await self._added.wait()

    def look(self) -> None:
        """Decide about all spools that need not wait any more."""
        waiting, self._waiting = self._waiting, []
        for entry in waiting:
            match self._fate_of(entry):
                case Fate.WAIT:
                    self._waiting.append(entry)
                case Fate.UPLOAD:
                    self._upload(entry.spool)
                case Fate.QUARANTINE:
                    self._quarantine(entry.spool)

    def upload_all(self) -> None:
        """Upload all: no other broker is there which could continue the journals."""
        waiting, self._waiting = self._waiting, []
        for entry in waiting:
            self._upload(entry.spool)

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


def _key(spool: CompletedSpool) -> tuple[str, int]:
    return spool.fragment.journal, spool.create_revision
