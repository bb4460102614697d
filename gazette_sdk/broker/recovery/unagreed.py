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
from collections.abc import Callable
from typing import Final

from gazette_sdk.broker.replica import Replica
from gazette_sdk.broker.spool.directory import CompletedSpool

__all__ = ["Fate", "UnagreedSpools", "fate_of"]

POLL_S: Final = 0.1
"""Pause between two looks at the spools that wait. It costs nothing while there are none."""


class Fate(enum.Enum):
    """What becomes of a spool that waits."""

    WAIT = "its replica may still learn that all replicas have it"
    UPLOAD = "all replicas have it, or its journal is deleted: the upload drops it then"
    QUARANTINE = "our replica ended, or others continued the journal: they are asked"


def fate_of(
    end: int, acknowledged_end: int | None, *, journal_exists: bool, is_contested: bool
) -> Fate:
    """Return what becomes of a spool.

    Args:
        end: of the spool.
        acknowledged_end: offset through which all replicas have acknowledged the journal, as far
            as our replica knows; ``None`` if we have no replica.
        journal_exists: False if the journal is deleted.
        is_contested: True if others continued the journal since the spool was written.
    """
    if not journal_exists:
        return Fate.UPLOAD
    if acknowledged_end is None or is_contested:
        return Fate.QUARANTINE
    return Fate.UPLOAD if end <= acknowledged_end else Fate.WAIT


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
        self._waiting: list[CompletedSpool] = []
        self._added = asyncio.Event()

    def add(self, spool: CompletedSpool) -> None:
        """Let a spool wait."""
        self._waiting.append(spool)
        self._added.set()

    def holds(self, journal: str, create_revision: int) -> bool:
        """Return True if a spool of a journal waits."""
        key = (journal, create_revision)
        return any((each.fragment.journal, each.create_revision) == key for each in self._waiting)

    async def run(self) -> None:
        """Look at the spools that wait, until cancelled."""
        while True:
            if not self._waiting:
                self._added.clear()
                await self._added.wait()
            await asyncio.sleep(POLL_S)
            self.look()

    def look(self) -> None:
        """Decide about all spools that need not wait any more."""
        waiting, self._waiting = self._waiting, []
        for spool in waiting:
            match self._fate_of(spool):
                case Fate.WAIT:
                    self._waiting.append(spool)
                case Fate.UPLOAD:
                    self._upload(spool)
                case Fate.QUARANTINE:
                    self._quarantine(spool)

    def upload_all(self) -> None:
        """Upload all: no other broker is there which could continue the journals."""
        waiting, self._waiting = self._waiting, []
        for spool in waiting:
            self._upload(spool)

    def _fate_of(self, spool: CompletedSpool) -> Fate:
        fragment = spool.fragment
        replica = self._replica_of(fragment.journal, spool.create_revision)
        return fate_of(
            fragment.end,
            None if replica is None else replica.index.acknowledged_end,
            journal_exists=self._exists(fragment.journal, spool.create_revision),
            is_contested=self._is_contested(spool),
        )
