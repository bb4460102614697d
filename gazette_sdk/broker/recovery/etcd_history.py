"""Etcd history: heads that are still valid by it, and spools of another one, which are withheld.

Heads are valid only if no one continued their journals without this broker.

A broker that starts again reads the heads of its journals from its spool directory. A primary
appends to a journal only after it wrote the synchronized route into the journal's assignments, and
every member of that route has every byte. So a head is outdated exactly if a synchronized route
without this broker was written since. A route of fewer members than the journal requires does not
count: nothing is appended over it. (Our primaries do not write such a route; other ones may.)

:class:`EtcdHistory` reads the changes of assignments since the revision at which the earlier
process was last a member. Where Etcd has compacted that history, every head is outdated, and the
operator has to confirm the journal's end by `reset-head`.

:class:`WithheldSpools` are those of a history that Etcd does not have any more. An Etcd that was
restored from an older backup, or replaced by another one, does not know journals that were created
since, nor who continued with the others. What the spool directory has of them may be the only copy
of acknowledged bytes, or may have been written anew by others since. So all of it is *withheld*: in
no index, not uploaded, never removed; and this broker serves none of these journals. That ends for
a journal

- when its spec is applied again: then its bytes belong to the journal of that name,
- when an operator accepts the Etcd (`gazette spools accept`), for the journals which Etcd knows.

Then its spools are contested, and its head is unverified (`states`): the other brokers and the
stores are asked what they have, and nothing of theirs is replaced. The journal may be given to
brokers without these bytes, or with less: it waits for those that recorded that they have the most
(claims, `routes`). A broker that finds such an Etcd and withholds nothing of a journal of which
Etcd has no newer route takes no appends to it either, until an operator accepts the Etcd: those
that claim it may not have started yet.

A directory recognizes the history by a key that it has seen (`HistoryMark`): a revision alone does
not show it, because Etcd may have reached it again. If Etcd has compacted that revision it is not
known whether a missing journal was deleted, so that its spools are withheld, too. So are those of a
journal that was created after it, just before the broker was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Final

from google.protobuf.message import DecodeError

from gazette_sdk.broker.recovery.routes import LastRoutes, changes_since, members_required
from gazette_sdk.broker.recovery.spools import WithheldJournal
from gazette_sdk.broker.recovery.states import HeadInput
from gazette_sdk.broker.spool.directory import Durability, SpoolDirectory, replace_file
from gazette_sdk.broker.spool.files import CompletedSpool
from gazette_sdk.cluster.broker_keys import BrokerKeySpace, JournalEntry
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_messages import prefix_end
from gazette_sdk.cluster.items import (
    AssignmentEntry,
    assignments_prefix,
    item_assignments_prefix,
    parse_assignment,
)
from gazette_sdk.cluster.keyspace import Continuity, HistoryMark, compare_history
from gazette_sdk.errors import EtcdCompactedError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.journal_spec import DEFAULT_MAX_REPLICATION
from gazette_sdk.retries import Outage

HISTORY_TIMEOUT_S = 10.0
"""Bound of reading the history. When it is over, the history counts as compacted."""

WRITE_DELAY_S = 1.0
"""Delay before a revision is written, so that a burst of changes costs one write."""

_REVISION_NAME = "revision"
_WORDS = 6
"""Words of the file: cluster, revision, zone, suffix; key and revision of the mark. One more is the
id of the history (`routes`); earlier versions did not write it."""

_log = logging.getLogger(__name__)


class RevisionFile:
    """File with the last revision of Etcd at which this broker was a member, and its id.

    It also has the key by which that history of Etcd is recognized.

    Args:
        path: the file.
        local_id: this broker; by default the file gets no id.
        synced: force the content to disk before it replaces the old one.
    """

    def __init__(
        self, path: Path, local_id: pb.ProcessSpec.ID | None = None, *, synced: bool = False
    ) -> None:
        self._path = path
        self._synced = synced
        self._local_id = local_id
        self._mark = HistoryMark(0, 0)
        self._history_id = 0
        self._timer: asyncio.TimerHandle | None = None

    def read(self, cluster_id: int) -> int:
        """Return the revision written; 0 if there is none of this Etcd cluster."""
        try:
            written_cluster, revision = map(int, self._words()[:2])
        except ValueError:
            if self._path.exists():
                _log.warning("%s holds no revision; it is written anew", self._path)
            return 0
        return revision if written_cluster == cluster_id else 0

    def read_id(self) -> pb.ProcessSpec.ID | None:
        """Return the id of the broker that wrote the file; ``None`` if it has none."""
        words = self._words()
        return pb.ProcessSpec.ID(zone=words[2], suffix=words[3]) if len(words) >= 4 else None

    def read_mark(self) -> HistoryMark | None:
        """Return the mark of the history that was seen; ``None`` if the file has none."""
        words = self._words()
        try:
            cluster_id, revision = map(int, words[:2])
            if len(words) < _WORDS:  # of an earlier version
                return HistoryMark(cluster_id, revision)
            return HistoryMark(cluster_id, revision, bytes.fromhex(words[4]), int(words[5]))
        except ValueError:
            return None

    def read_history_id(self) -> int:
        """Return the id of the history that was seen; 0 if the file has none."""
        try:
            return int(self._words()[_WORDS], 16)
        except (IndexError, ValueError):
            return 0

    def _words(self) -> list[str]:
        try:
            return self._path.read_text("ascii").split(" ")
        except (FileNotFoundError, UnicodeDecodeError):
            return []

    def write_later(self, mark: HistoryMark, history_id: int = 0) -> None:
        """Write a revision, its mark and its history after :data:`WRITE_DELAY_S`."""
        self._mark, self._history_id = mark, history_id
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(WRITE_DELAY_S, self.flush)

    def flush(self) -> None:
        """Write the pending revision now, if there is one."""
        if self._timer is None:
            return
        self._timer.cancel()
        self._timer = None
        cluster_id, revision, key, mod_revision = self._mark
        words = [str(cluster_id), str(revision)]
        if self._local_id is not None:
            words += [self._local_id.zone, self._local_id.suffix, key.hex(), str(mod_revision)]
            words.append(f"{self._history_id:x}")
        try:
            replace_file(self._path, " ".join(words).encode("ascii"), synced=self._synced)
        except OSError as error:
            # With an older revision the next start only reads more of the history.
            _log.warning("cannot write the revision of Etcd to %s: %s", self._path, error)


class EtcdHistory:
    """Check of a broker's heads against the routes in Etcd, at the start and from then on.

    Args:
        directory: has the heads; forgets the outdated ones.
        keyspace: mirror of Etcd.
        local_id: this broker.
        last_routes: last routes of journals, which are loaded before :meth:`check`.
        max_replication: cap of every journal's replication.
    """

    def __init__(
        self,
        directory: SpoolDirectory,
        keyspace: BrokerKeySpace,
        local_id: pb.ProcessSpec.ID,
        last_routes: LastRoutes,
        max_replication: int = DEFAULT_MAX_REPLICATION,
    ) -> None:
        self._directory = directory
        self._keyspace = keyspace
        self._local_id = local_id
        self._last_routes = last_routes
        self._max_replication = max_replication
        self._revision = RevisionFile(
            directory.root / _REVISION_NAME,
            local_id,
            synced=directory.durability is Durability.PERSISTED,
        )
        self._former_id: pb.ProcessSpec.ID | None = None
        self._checked_revision = 0

    @staticmethod
    def seen(directory: SpoolDirectory) -> HistoryMark | None:
        """Return the mark of the history that a spool directory has seen."""
        return RevisionFile(directory.root / _REVISION_NAME).read_mark()

    @staticmethod
    def seen_id(directory: SpoolDirectory) -> int:
        """Return the id of the history that a spool directory has seen; 0 if it has none."""
        return RevisionFile(directory.root / _REVISION_NAME).read_history_id()

    async def check(self, etcd: Etcd) -> None:
        """Forget the heads that became outdated while this broker was away.

        The earlier process may have had another id: then routes with that id are its own. Without
        the history only heads of journals stay whose last route is known, and has that id. If only
        a record has that route, the head is unverified first (`states`).

        Args:
            etcd: the client. The mirror is just loaded at the revision of our announcement.
        """
        keyspace = self._keyspace
        self._checked_revision = keyspace.revision
        since_revision = self._revision.read(keyspace.header.cluster_id)
        former_id = self._revision.read_id() or self._local_id
        self._former_id = former_id if since_revision else None
        continued = await journals_continued_by_others(
            etcd, keyspace, former_id, since_revision, self._max_replication
        )
        reason = HeadInput.CONTINUED_BY_OTHERS
        if continued is None:
            continued = {item.id for item in keyspace.items() if not self._is_sure(item.id)}
            reason = HeadInput.HISTORY_LOST
        for journal in sorted(continued):
            self._directory.forget_head(journal, reason)
        for item in keyspace.items():
            if self._is_claimed_by_others(item.id):
                self._directory.forget_head(item.id, HeadInput.CONTINUED_BY_OTHERS)
        # Only now: a process that ends before has to check the same history again.
        self._note_seen()
        self._revision.flush()

    def observe(self) -> None:
        """Forget heads that became outdated by the last batch of changes of the mirror."""
        keyspace, local = self._keyspace, self._local_id
        for change in keyspace.changes:
            new = change.new
            if isinstance(new, AssignmentEntry) and self._is_continued_in(new):
                self._directory.forget_head(new.item, HeadInput.CONTINUED_BY_OTHERS)
        if keyspace.member(local.zone, local.suffix) is not None:
            self._note_seen()

    def _note_seen(self) -> None:
        history_id = self._last_routes.records.history.id
        self._revision.write_later(self._keyspace.mark(), history_id)

    def observe_records(self) -> None:
        """Forget heads that became outdated by the last batch of changes of recorded routes.

        The cluster's mirror may never show a route that soon ended with its last member. The
        caller adds this method to the observers of the records, after that of the last routes.
        """
        for _, _, new in self._last_routes.records.mirror.changes:
            if new is None or new.value.revision <= self._checked_revision:
                continue
            if new.value.create_revision == 0:
                if self._is_claimed_by_others(new.value.journal):
                    reason = HeadInput.CONTINUED_BY_OTHERS
                    self._directory.forget_head(new.value.journal, reason)
                continue
            journal, route = new.value.journal, self._last_routes.route(new.value.journal)
            others = route.members if route is not None else ()
            is_withdrawn = self._last_routes.is_withdrawn(journal)
            if (others and self._local_id not in others) or (
                is_withdrawn and new.value.recorded_by != self._local_id
            ):
                self._directory.forget_head(journal, HeadInput.CONTINUED_BY_OTHERS)

    def was_member(self, journal: str) -> bool:
        """Return True if a journal's last route has the broker that used the directory before."""
        route = self._last_routes.route(journal)
        return route is not None and self._former_id in route.members

    def is_or_was_member(self, journal: str) -> bool:
        """Return True if a journal's last route has this broker, or :meth:`was_member` holds."""
        route = self._last_routes.route(journal)
        is_member = route is not None and self._local_id in route.members
        return is_member or self.was_member(journal)

    def continued_by(self, journal: str) -> Sequence[pb.ProcessSpec.ID]:
        """Return the members of a journal's last route if this broker is none of them."""
        route = self._last_routes.route(journal)
        if route is None or self.is_or_was_member(journal):
            return ()
        return self.other_members(journal)

    def other_members(self, journal: str) -> Sequence[pb.ProcessSpec.ID]:
        """Return the other members of a journal's last route.

        They have, or have learned of, every acknowledged byte. None are returned for routes of one
        member: with replication 1 the bytes of the broker before may have been acknowledged. Of a
        claim they are the brokers that have more than this one, and none where it claims, too.
        """
        last = self._last_routes.last(journal)
        if last is None or self.claims(journal):
            return ()
        if len(last.route.members) < 2 and not last.is_claimed:
            return ()
        ours = (self._local_id, self._former_id)
        return [member for member in last.route.members if member not in ours]

    def claims(self, journal: str) -> bool:
        """Return True if Etcd lost a journal, and no broker has more of it than this one."""
        last = self._last_routes.last(journal)
        return last is not None and last.is_claimed and self._local_id in last.route.members

    def _is_claimed_by_others(self, journal: str) -> bool:
        """Return True if others claim a journal of Etcd: its last route was without this broker.

        Of one that is created again no broker has continued anything: it is newer than the claims.
        """
        last, item = self._last_routes.last(journal), self._keyspace.item(journal)
        return (
            last is not None
            and item is not None
            and last.is_claimed
            and last.revision > item.create_revision
            and not self.is_or_was_member(journal)
            and not self._directory.is_withheld(journal)
        )

    def _is_sure(self, journal: str) -> bool:
        """Return True if :meth:`was_member` holds, also if other implementations wrote routes."""
        last = self._last_routes.last(journal)
        return last is not None and not last.is_recorded and self.was_member(journal)

    def continued_at(self, journal: str) -> int:
        """Return the newest revision of a journal's synchronized route without this broker.

        It is 0 if the mirror has none now.
        """
        assignments = self._keyspace.assignments(journal)
        return max(
            (each.mod_revision for each in assignments if self._is_continued_in(each)), default=0
        )

    async def is_continued_in(self, etcd: Etcd, item: JournalEntry, record: bytes) -> bool:
        """Return True if Etcd has a route of a journal without this broker.

        Args:
            etcd: the client.
            item: the journal.
            record: key of its recorded route.

        Raises:
            EtcdError: Etcd did not answer.
        """
        prefix = item_assignments_prefix(self._keyspace.root, item.id)
        found = await etcd.range(prefix, prefix_end(prefix))
        routes = [pb.Route.FromString(each.value) for each in found.entries if each.value]
        recorded = await etcd.range(record)
        routes += [pb.Header.FromString(each.value).route for each in recorded.entries]
        return any(is_route_without(route, self._local_id) for route in routes)

    def flush(self) -> None:
        """Write the last revision now."""
        self._revision.flush()

    def _is_continued_in(self, entry: AssignmentEntry[pb.Route]) -> bool:
        required = _members_required(
            self._keyspace.item(entry.item), entry.mod_revision, self._max_replication
        )
        return is_route_without(entry.value, self._local_id, required)


def is_route_without(
    route: pb.Route, local_id: pb.ProcessSpec.ID, members_required: int = 1
) -> bool:
    """Return True if an assignment's value is a synchronized route without this broker.

    Args:
        route: the value.
        local_id: this broker.
        members_required: a route of fewer members does not count.
    """
    return len(route.members) >= max(1, members_required) and local_id not in route.members


async def journals_continued_by_others(
    etcd: Etcd,
    keyspace: BrokerKeySpace,
    local_id: pb.ProcessSpec.ID,
    since_revision: int,
    max_replication: int = DEFAULT_MAX_REPLICATION,
) -> set[str] | None:
    """Return the journals whose last synchronized route since a revision is without this broker.

    Args:
        etcd: the client.
        keyspace: the mirror, just loaded at the revision of our announcement.
        local_id: this broker.
        since_revision: when this broker was last a member; 0 if that is not known.
        max_replication: cap of every journal's replication.

    Returns:
        their names; ``None`` if Etcd's history does not reach back that far.
    """
    continued: dict[str, bool] = {}
    try:
        async with asyncio.timeout(HISTORY_TIMEOUT_S):
            async for journal, route, revision in _routes_since(etcd, keyspace, since_revision + 1):
                item = keyspace.item(journal)
                required = _members_required(item, revision, max_replication)
                if len(route.members) >= required:
                    continued[journal] = is_route_without(route, local_id)
    except (EtcdCompactedError, TimeoutError) as error:
        _log.warning(
            "Etcd has no history since revision %d (%s): heads in the spool directory are used "
            "only where the last route is known; run `gazctl journals reset-head` where appends "
            "are refused",
            since_revision,
            error,
        )
        return None
    return {journal for journal, is_without in continued.items() if is_without}


async def _routes_since(
    etcd: Etcd, keyspace: BrokerKeySpace, first_revision: int
) -> AsyncGenerator[tuple[str, pb.Route, int]]:
    """Yield journals with synchronized routes and their revisions, up to that of the mirror."""
    prefix = assignments_prefix(keyspace.root)
    async with aclosing(changes_since(etcd, keyspace, first_revision)) as events:
        async for event in events:
            if event.is_delete or not event.kv.key.startswith(prefix) or not event.kv.value:
                continue
            try:
                journal = parse_assignment(event.kv.key[len(prefix) :].decode())[0]
                route = pb.Route.FromString(event.kv.value)
            except (ValueError, DecodeError) as error:
                _log.warning("%r in Etcd's history is ignored: %s", event.kv.key, error)
            else:
                yield journal, route, event.kv.mod_revision


def _members_required(item: JournalEntry | None, revision: int, max_replication: int) -> int:
    if item is None:
        return 1
    return members_required(item.value, item.mod_revision, revision, max_replication)


POLL_S: Final = 1.0
"""Pause between looks for the operator's acceptance."""

_NAMED_MAX: Final = 5
"""Number of journals that the log names."""


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
        last_routes: last routes of journals.
        release: takes a journal's key and its spools, which are contested from now on.
    """

    def __init__(
        self,
        directory: SpoolDirectory,
        keyspace: BrokerKeySpace,
        last_routes: LastRoutes,
        release: Callable[[JournalEntry, Sequence[CompletedSpool]], None],
    ) -> None:
        self._directory = directory
        self._keyspace = keyspace
        self._last_routes = last_routes
        self._unaccepted_revision = directory.unaccepted_revision()
        self._release = release
        self._released: set[tuple[str, int]] = set()
        self._woken = asyncio.Event()
        self._outage = Outage(_log, "release of withheld spools")

    def refusal(self, journal: str) -> str:
        """Return why a journal is not served here, with the remedy; empty if it is."""
        if self._directory.is_withheld(journal):
            what = "a broker that has bytes of it does not serve it"
        elif self._may_lack_route(journal):
            what = "other brokers may have bytes of it"
        else:
            return ""
        return (
            f"{what}: Etcd was restored from an older backup, or is another one; start all "
            f"brokers, and run `gazette spools accept {self._directory.root}` there"
        )

    def _may_lack_route(self, journal: str) -> bool:
        """Return True if Etcd may have lost a journal's last route, and no one has accepted it."""
        item = self._keyspace.item(journal)
        if item is None or item.create_revision > self._unaccepted_revision:
            return False
        last = self._last_routes.last(journal)
        return last is None or last.revision <= self._unaccepted_revision

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
            if self._unaccepted_revision and self._has_older_journals():
                _log.error(
                    "this broker takes no appends to journals which Etcd had at revision %d, since "
                    "Etcd may not have their last routes. Start all brokers, and then run `gazette "
                    "spools accept %s`",
                    self._unaccepted_revision, self._directory.root,
                )  # fmt: skip
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
        """Release what may be used, until nothing is withheld, and Etcd is accepted."""
        directory = self._directory
        while directory.withheld() or self._unaccepted_revision:
            self._woken.clear()
            is_accepted = await directory.in_background(directory.take_acceptance)
            try:
                for each in directory.withheld():
                    item = self._keyspace.item(each.journal)
                    cluster_id = self._keyspace.header.cluster_id
                    if item is not None and (is_accepted or is_released_by(each, item, cluster_id)):
                        await self._release_journal(item)
                if is_accepted or not self._has_older_journals():
                    await directory.in_background(directory.end_acceptance)
                    self._unaccepted_revision = 0
                self._outage.ended()
            except OSError as error:
                self._outage.failed(error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._woken.wait()

    def _has_older_journals(self) -> bool:
        """Return True if Etcd has a journal from before it went back, or spools are withheld."""
        return bool(self._directory.withheld()) or any(
            item.create_revision <= self._unaccepted_revision for item in self._keyspace.items()
        )

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
        directory.end_withholding(item.id)  # without a wait before they are taken
        self._release(item, spools)
