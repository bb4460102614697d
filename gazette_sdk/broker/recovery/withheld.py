"""Withheld spools: those of a history that Etcd does not have any more.

An Etcd that was restored from an older backup, or replaced by another one, does not know journals
that were created since, nor who continued with the others. What the spool directory has of them may
be the only copy of acknowledged bytes, or may have been written anew by others since. So all of it
is *withheld*: in no index, not uploaded, never removed; and this broker serves none of these
journals. That ends for a journal

- when its spec is applied again: then its bytes belong to the journal of that name,
- when an operator accepts the Etcd (`gazette spools accept`), for the journals which Etcd knows.

Then its spools are contested, and its head is unverified (`states`): the other brokers and the
stores are asked what they have, and nothing of theirs is replaced. A journal that was created again
may be given to brokers without these bytes: it waits for those that recorded that they have some
(`routes`).

A directory recognizes the history by a key that it has seen (`HistoryMark`): a revision alone does
not show it, because Etcd may have reached it again. If Etcd has compacted that revision it is not
known whether a missing journal was deleted, so that its spools are withheld, too. So are those of a
journal that was created after it, just before the broker was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from gazette_sdk.broker.recovery.spools import WithheldJournal
from gazette_sdk.broker.spool.directory import SpoolDirectory
from gazette_sdk.broker.spool.files import CompletedSpool
from gazette_sdk.cluster.broker_keys import BrokerKeySpace, JournalEntry
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.keyspace import Continuity, HistoryMark, compare_history
from gazette_sdk.retries import Outage

POLL_S: Final = 1.0
"""Pause between looks for the operator's acceptance."""

_NAMED_MAX: Final = 5
"""Number of journals that the log names."""

_log = logging.getLogger(__name__)


async def withhold_other_history(
    etcd: Etcd, directory: SpoolDirectory, seen: HistoryMark | None, root: str
) -> Continuity:
    """Withhold all files of a directory if Etcd does not have the history that was seen.

    To be called before recovery.

    Args:
        etcd: the client.
        directory: the spool directory.
        seen: mark of the history; ``None`` if the directory has none.
        root: prefix of the cluster in Etcd.

    Raises:
        EtcdError: Etcd did not answer.
        OSError: the files could not be withheld.
    """
    if seen is None:
        return Continuity.UNKNOWN
    continuity = await compare_history(etcd, seen, root)
    if continuity is Continuity.OTHER:
        now = (await etcd.range(root.encode())).header
        mark = HistoryMark(now.cluster_id, now.revision)
        await asyncio.to_thread(directory.withhold_all, mark)
        _log.error(
            "this is not the Etcd that %s has seen: %s; it was restored from an older backup, or "
            "is another one",
            directory.root,
            f"its revision {now.revision} has not what revision {seen.revision} had"
            if now.cluster_id == seen.cluster_id
            else f"its cluster id is {now.cluster_id:x}, and was {seen.cluster_id:x}",
        )
    return continuity


async def withhold_missing(
    directory: SpoolDirectory,
    keyspace: BrokerKeySpace,
    recovered: Iterable[CompletedSpool],
    seen_revision: int,
) -> list[CompletedSpool]:
    """Withhold recovered spools of journals that Etcd does not have. Return the others.

    Args:
        directory: the spool directory.
        keyspace: mirror of Etcd.
        recovered: spools, by journal.
        seen_revision: revision up to which Etcd is known to have the history that was seen; 0 if it
            is not. A journal that was created by then is deleted if it is missing.

    Raises:
        OSError: the files could not be withheld.
    """
    missing: dict[str, list[CompletedSpool]] = {}
    others: list[CompletedSpool] = []
    for spool in recovered:
        is_new = spool.create_revision > seen_revision
        if is_new and keyspace.item(spool.fragment.journal) is None:
            missing.setdefault(spool.fragment.journal, []).append(spool)
        else:
            others.append(spool)
    for spools in missing.values():
        await asyncio.to_thread(directory.withhold, spools, keyspace.mark())
    return others


def is_released_by(withheld: WithheldJournal, item: JournalEntry, cluster_id: int) -> bool:
    """Return True if a journal's spec was applied again since its files were withheld.

    Args:
        withheld: what is withheld.
        item: the journal of that name.
        cluster_id: of the Etcd cluster.
    """
    mark = withheld.mark
    return cluster_id == mark.cluster_id and item.create_revision > mark.revision


class WithheldSpools:
    """Withheld spools of a broker. They belong to the event loop.

    Args:
        directory: the spool directory.
        keyspace: mirror of Etcd. The caller adds :meth:`wake` to its observers.
        release: takes a journal's key and its spools, which are contested from now on.
    """

    def __init__(
        self,
        directory: SpoolDirectory,
        keyspace: BrokerKeySpace,
        release: Callable[[JournalEntry, Sequence[CompletedSpool]], None],
    ) -> None:
        self._directory = directory
        self._keyspace = keyspace
        self._release = release
        self._released: set[tuple[str, int]] = set()
        self._woken = asyncio.Event()
        self._outage = Outage(_log, "release of withheld spools")

    def refusal(self, journal: str) -> str:
        """Return why a journal is not served here, with the remedy; empty if it is."""
        if not self._directory.is_withheld(journal):
            return ""
        return (
            f"a broker that has bytes of it does not serve it: Etcd was restored from an older "
            f"backup, or is another one; start all brokers, and run `gazette spools accept "
            f"{self._directory.root}` there"
        )

    def was_released(self, journal: str) -> bool:
        """Return True if the journal that now has this name got withheld spools."""
        item = self._keyspace.item(journal)
        return item is not None and (journal, item.create_revision) in self._released

    def wake(self) -> None:
        """Look at all journals again: keys have changed."""
        self._woken.set()

    def log(self) -> None:
        """Log what is withheld, and what to do."""
        withheld = self._directory.withheld()
        if not withheld:
            return
        names = sorted(each.journal for each in withheld)
        more = ", …" if len(names) > _NAMED_MAX else ""
        _log.error(
            "%d spools of %d journals (%s%s) stay in %s, unverified: they are not served, not "
            "uploaded and not removed, since Etcd does not have their history. Start all brokers, "
            "apply the specs of journals that are missing (`gazctl journals apply`), which brings "
            "their content back, and then run `gazette spools accept %s`, which continues the "
            "others",
            sum(len(each.spools) for each in withheld), len(names), ", ".join(names[:_NAMED_MAX]),
            more, self._directory.root, self._directory.root,
        )  # fmt: skip

    async def run(self) -> None:
        """Release what may be used, until nothing is withheld."""
        while withheld := self._directory.withheld():
            self._woken.clear()
            directory = self._directory
            is_accepted = await directory.in_background(directory.take_acceptance)
            try:
                for each in withheld:
                    item = self._keyspace.item(each.journal)
                    cluster_id = self._keyspace.header.cluster_id
                    if item is not None and (is_accepted or is_released_by(each, item, cluster_id)):
                        await self._release_journal(item)
                if is_accepted:
                    await directory.in_background(directory.end_acceptance)
                self._outage.ended()
            except OSError as error:
                self._outage.failed(error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._woken.wait()

    async def _release_journal(self, item: JournalEntry) -> None:
        directory = self._directory
        self._released.add((item.id, item.create_revision))
        spools = await directory.in_background(
            lambda: directory.release(item.id, item.create_revision)
        )
        _log.warning(
            "%d spools of %s are used again where no other broker has other bytes: its spec was "
            "applied again, or Etcd was accepted", len(spools), item.id,
        )  # fmt: skip
        self._release(item, spools)
