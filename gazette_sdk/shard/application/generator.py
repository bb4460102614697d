"""Generator of an application's shards.

Shards and recovery logs follow from the journals that an application reads (:func:`generated`,
pure). Each journal has one shard, or the partitions of one number of several topics have. It is
named by the application and its first journal, and has a recovery log with the replication and
stores of that journal. A journal that a shard of another name reads, such as one of a manifest, has
its shard. Nothing is changed that exists, but for new partitions of a topic that every shard reads:
they are added to the shards that the generator has made.

The :class:`ShardGenerator` creates the shards of new source journals. It runs in every process of
the application, and works in the one that leads; and in ``gazctl shards generate``. Two that work
at a time are harmless: shards and logs are created only where there are none.

In a process it also deletes shards that it has made, once their source journals were deleted. That
must be certain (:class:`DeletedSources`): a listing may be empty, old, of another cluster, or
without what a token hides.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from gazette_sdk.errors import (
    ClosedError,
    ConfigurationError,
    EtcdTransactionFailedError,
    EtcdUnavailableError,
    GazetteError,
    ValidationError,
)
from gazette_sdk.journals.changes import apply_in_transactions, list_named
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.durations import SECOND_NS, from_ns
from gazette_sdk.protocol.labels import (
    BROADCAST,
    CONTENT_TYPE,
    MANAGED_BY,
    RECOVERY_LOG,
    TABLE,
    add,
    format_selector,
    label_set,
    topic_hint,
    value_of,
    values_of,
)
from gazette_sdk.protocol.shard_spec import (
    recovery_log,
    source_journals,
    validate_shard_spec,
)
from gazette_sdk.retries import Outage, pause
from gazette_sdk.shard.application.application import Application
from gazette_sdk.shard.application.sources import (
    JoinedTopics,
    group_journals,
    names_of,
    shown,
    source_of,
)
from gazette_sdk.shard.transaction.metrics import UnreadMetric
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.journal_reader import read_metadata
from gazette_sdk.transport.listing import WatchedList, list_journals

LOG_PREFIX = "recovery"
"""Prefix of the names of recovery logs."""

HINT_PREFIX = "/gazette/hints"
"""Prefix of the keys of hints in Etcd."""

HINT_BACKUPS = 2
"""Hints that are kept besides the newest."""


_ESCAPES = str.maketrans({"+": "+2B", "=": "+3D", "%": "+25"})


class KnownShard(NamedTuple):
    """Shard that exists.

    Attributes:
        spec: its spec, which is not changed.
        mod_revision: revision of Etcd of that spec.
    """

    spec: cpb.ShardSpec
    mod_revision: int


Existing: TypeAlias = Mapping[str, KnownShard]
"""Shards that exist, by their ids."""

NONE_EXIST: Existing = {}


class GrownShard(NamedTuple):
    """Shard that exists, with further sources.

    Attributes:
        spec: its new spec.
        mod_revision: revision of Etcd of the spec that it has.
        journals: the further sources.
    """

    spec: cpb.ShardSpec
    mod_revision: int
    journals: Sequence[str]


class Generated(NamedTuple):
    """Shards of an application, and their recovery logs.

    Attributes:
        shards: specs of shards, by name.
        grown: shards that exist, with further sources.
        logs: specs of recovery logs, in the same order; none of a store without files.
        faults: errors because of which journals have no shard.
        unread: names of the journals that no shard reads because of that.
    """

    shards: list[cpb.ShardSpec]
    grown: list[GrownShard]
    logs: list[pb.JournalSpec]
    faults: list[GazetteError]
    unread: list[str]


def shard_id(application: str, journal: str) -> str:
    """Return the id of the shard of a journal: different for different journals.

    Args:
        application: name of the application.
        journal: name of the journal. Characters that ids lack are written as ``+`` and their code.
    """
    return f"{application}/{journal.translate(_ESCAPES)}"


def is_generated(application: str, shard: cpb.ShardSpec) -> bool:
    """Return True if the generator has made a shard of an application: by its label and its id."""
    return value_of(shard.labels, MANAGED_BY) == application and any(
        shard.id == shard_id(application, source.journal) for source in shard.sources
    )


async def list_topics(
    transport: Transport, selectors: Iterable[pb.LabelSelector]
) -> list[list[pb.JournalSpec]]:
    """Return the specs of the journals of each selector.

    Raises:
        GazetteError: they cannot be listed.
    """
    return [
        [journal.spec for journal in (await list_journals(transport, selector)).journals]
        for selector in selectors
    ]


def generated(
    application: Application[Any, Any],
    listings: Sequence[Iterable[pb.JournalSpec]],
    existing: Existing = NONE_EXIST,
) -> Generated:
    """Return the shards that journals want and that do not exist, with their recovery logs.

    And those that exist, and are to read further partitions of a topic that every shard reads.

    Args:
        application: the application.
        listings: specs of the journals of each selector of its sources.
        existing: shards that exist; no others of their sources are returned.
    """
    name = application.full_name
    found = Generated([], [], [], [], [])
    readers = {
        source.journal: shard for shard, known in existing.items() for source in known.spec.sources
    }
    groups, fault, whole = group_journals(application.all_sources, listings)
    of_all = [spec for topic in whole.values() for spec in topic]
    if fault is not None:
        found.faults.append(fault)
        names = {journal.name for listing in listings for journal in listing}
        found.unread.extend(sorted(names - readers.keys()))
    for group in groups:
        journals = [journal.name for journal in group]
        shard = shard_id(name, journals[0])
        reader = next((readers[each] for each in journals if each in readers), shard)
        if reader in existing:
            read = {source.journal for source in existing[reader].spec.sources}
            unread = [each for each in journals if each not in read]
            new = [spec for spec in of_all if spec.name not in read]
            if unread or not _may_grow(name, existing[reader].spec, whole, new):
                unread += [spec.name for spec in new]
                wanted = [*journals, *(spec.name for spec in of_all)]
                found.faults.append(_other_partitions(reader, read, wanted))
                found.unread.extend(each for each in unread if each not in readers)
            elif new:
                found.grown.append(_grown(application, existing[reader], new))
            continue
        spec = _shard(application, name, shard, [*group, *of_all])
        try:
            validate_shard_spec(spec)
        except ValidationError as error:
            found.faults.append(_too_long(journals[0], error))
            found.unread.extend(journals)
            continue
        found.shards.append(spec)
        if spec.recovery_log_prefix:
            found.logs.append(_recovery_log(spec, group[0]))
    return found


def _other_partitions(
    shard: str, read: Collection[str], wanted: Sequence[str]
) -> ConfigurationError:
    return ConfigurationError(
        f"the shard {shard} reads {shown(sorted(read))}, and is to read {shown(sorted(wanted))}:"
        " the application's topics have changed, or journals whose names sort between others have"
        " changed the numbers of these. Change that back; or delete the application's shards by"
        " `gazctl shards delete --with-log`, so that they begin from nothing"
    )


def _too_long(journal: str, error: ValidationError) -> ValidationError:
    return ValidationError(
        f"the journal {journal} gets no shard, as its name or the application's is too long:"
        f" {error}",
        journal=journal,
    )


def _may_grow(
    name: str,
    shard: cpb.ShardSpec,
    whole: Mapping[str, Sequence[pb.JournalSpec]],
    new: Sequence[pb.JournalSpec],
) -> bool:
    """Return True if a shard may read new partitions of topics, of each of which it reads some."""
    read = values_of(shard.labels, BROADCAST)
    return not new or (
        is_generated(name, shard)
        and all(any(spec.name in read for spec in topic) for topic in whole.values())
    )


def _grown(
    application: Application[Any, Any], known: KnownShard, new: Sequence[pb.JournalSpec]
) -> GrownShard:
    """Return a shard that reads further journals, from their begin."""
    spec = cpb.ShardSpec()
    spec.CopyFrom(known.spec)
    _add_sources(application, spec, new)
    return GrownShard(spec, known.mod_revision, [journal.name for journal in new])


def _add_sources(
    application: Application[Any, Any], spec: cpb.ShardSpec, journals: Sequence[pb.JournalSpec]
) -> None:
    """Add journals to the sources of a shard, and to its labels of them."""
    added = [cpb.ShardSpec.Source(journal=journal.name) for journal in journals]
    sources = sorted([*spec.sources, *added], key=lambda source: source.journal)
    del spec.sources[:]
    spec.sources.extend(sources)
    topics = application.all_sources
    if not isinstance(topics, JoinedTopics):
        return
    tables = {table.topic for table in application.tables}
    for journal in journals:
        topic = source_of(topics, journal)
        if topic in tables:
            add(spec.labels, TABLE, journal.name)
        if topic in topics.broadcast:
            add(spec.labels, BROADCAST, journal.name)


def _shard(
    application: Application[Any, Any],
    name: str,
    shard: str,
    journals: Sequence[pb.JournalSpec],
) -> cpb.ShardSpec:
    spec = cpb.ShardSpec(
        id=shard,
        hot_standbys=application.hot_standbys,
        labels=label_set([(MANAGED_BY, name)]),
        disable_wait_for_ack=not application.waits_for_acks,
    )
    _add_sources(application, spec, journals)
    spec.max_txn_duration.CopyFrom(from_ns(round(application.max_txn_s * SECOND_NS)))
    spec.min_txn_duration.CopyFrom(from_ns(round(application.min_txn_s * SECOND_NS)))
    if getattr(application.store, "is_recorded", True):
        spec.recovery_log_prefix = LOG_PREFIX
        spec.hint_prefix = HINT_PREFIX
        spec.hint_backups = HINT_BACKUPS
    return spec


def _recovery_log(shard: cpb.ShardSpec, source: pb.JournalSpec) -> pb.JournalSpec:
    """Return the spec of a recovery log: its source's, for ever."""
    spec = pb.JournalSpec(
        name=recovery_log(shard),
        replication=source.replication,
        labels=label_set([(CONTENT_TYPE, RECOVERY_LOG)]),
        fragment=source.fragment,
    )
    spec.fragment.ClearField("retention")
    spec.fragment.ClearField("path_postfix_template")
    return spec


_log = logging.getLogger(__name__)

ApplyShards: TypeAlias = Callable[[Sequence[cpb.ApplyRequest.Change]], Awaitable[None]]
"""Function that applies changes of shards in one transaction, each under its expected revision."""

CHANGED_AT_ONCE = 25
"""Shards that are changed in one transaction of Etcd: each deletion has keys of hints, too."""

DELETION_GRACE_S = 30.0
"""Time for which the sources of a shard must be missing before it is deleted."""


class DeletedSources:
    """Sources of an application's shards that were deleted.

    A shard that the generator has made is to be deleted once all of its sources are missing, for
    `DELETION_GRACE_S`: from listings of their names that succeeded, at the begin and at the end of
    that time. Each must have shown a journal that the shard cannot be without, its recovery log,
    or, of one without a log, another source of the application. So it is no listing of another or
    an empty cluster, and no part of one. While tokens may hide journals, nothing is deleted.

    Args:
        application: name of the application.
        transport: transport to the journals.
        clock: returns monotonic seconds.

    Attributes:
        faults: errors of shards some of whose sources are missing; of the last look.
    """

    def __init__(
        self,
        application: str,
        transport: Transport,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._application = application
        self._transport = transport
        self._clock = clock
        self._missing_since: dict[str, float] = {}
        self.faults: Sequence[GazetteError] = ()

    async def look(
        self, listings: Sequence[Sequence[pb.JournalSpec]], existing: Existing
    ) -> list[KnownShard]:
        """Return the shards that are to be deleted.

        Args:
            listings: specs of the journals of each selector of the application's sources.
            existing: shards that exist.

        Raises:
            GazetteError: the journals cannot be listed. What was found before is as it was.
        """
        listed = {journal.name for listing in listings for journal in listing}
        unlisted = {
            shard: known
            for shard, known in existing.items()
            if any(source.journal not in listed for source in known.spec.sources)
            and is_generated(self._application, known.spec)
        }
        names = {name for known in unlisted.values() for name in source_journals(known.spec)}
        names |= {recovery_log(known.spec) for known in unlisted.values()} - {""}
        others = sorted(listed - names)[:1]
        found = await list_named(self._transport, [*sorted(names), *others])
        ended, faults = list[KnownShard](), list[GazetteError]()
        since, now = self._missing_since, self._clock()
        self._missing_since = {}
        for shard, known in unlisted.items():
            journals = source_journals(known.spec)
            missing = [each for each in journals if each not in found]
            if not missing:
                continue  # the journal has other labels, and is read on
            log = recovery_log(known.spec)
            if not set(missing).issuperset(_own_sources(known.spec)):
                faults.append(_source_missing(shard, missing))
            elif self._transport.may_hide_journals or not (log in found if log else found):
                faults.append(_source_hidden(shard, missing, log))
            else:
                begin = self._missing_since[shard] = since.get(shard, now)
                if now - begin >= DELETION_GRACE_S:
                    ended.append(known)
        self.faults = faults
        return ended

    def forget(self) -> None:
        """Forget what was found: the next look is the first one."""
        self._missing_since = {}
        self.faults = ()

    @property
    def waits(self) -> bool:
        """A shard is to be deleted if its sources stay missing."""
        return bool(self._missing_since)


def _own_sources(shard: cpb.ShardSpec) -> list[str]:
    """Return the sources of a shard but for those that others read, too."""
    of_all = values_of(shard.labels, BROADCAST)
    return [each for each in source_journals(shard) if each not in of_all]


def _source_missing(shard: str, journals: Sequence[str]) -> ConfigurationError:
    return ConfigurationError(
        f"the shard {shard} reads {shown(journals)}, which does not exist any more, and other"
        " journals, which do: it is not deleted. Create what is missing and read it by `gazctl"
        f" shards reset -l id={shard} --to begin`, or delete the other journals, too: the shard"
        " ends then"
    )


def _source_hidden(shard: str, journals: Sequence[str], log: str) -> ConfigurationError:
    return ConfigurationError(
        f"the shard {shard} reads {shown(journals)}, which brokers do not list any more. It is not"
        " deleted, as they may hide it: "
        + (f"they do not list {log} either, or " if log else "they list no other source, or ")
        + "the token of this process has a selector. Check the address and the token; or delete"
        f" the shard by `gazctl shards delete -l id={shard}`"
    )


class ShardGenerator:
    """Generator of the shards of one application.

    Args:
        application: the application.
        transport: transport to the journals.
        selectors: selectors of its source journals; none if it has none that are known.
        existing: returns the shards that exist.
        apply: applies changes of shards. It raises :class:`EtcdTransactionFailedError` if one is
            not as expected.
        deletes: delete shards that it has made, once their sources were deleted.
        leads: returns True while this process is to create shards; by default always.
        until_changed: waits until `leads` or `existing` may return something else; by default
            that is seldom, and looked at when journals change.
    """

    def __init__(
        self,
        application: Application[Any, Any],
        transport: Transport,
        selectors: Sequence[pb.LabelSelector],
        *,
        existing: Callable[[], Awaitable[Existing]],
        apply: ApplyShards,
        deletes: bool = False,
        leads: Callable[[], bool] = lambda: True,
        until_changed: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._application = application
        self._transport = transport
        self._selectors = selectors
        self._not_joined: Sequence[GazetteError] = ()
        self._deleted = DeletedSources(application.full_name, transport) if deletes else None
        self._unread = UnreadMetric()
        self._warned: set[int] = set()
        self._existing = existing
        self._apply = apply
        self._leads = leads
        self._until_changed = until_changed
        self._outage = Outage(_log, f"creation of shards of {application.full_name}")

    @property
    def faults(self) -> Sequence[GazetteError]:
        """Errors because of which journals are not read; of the last look."""
        missing = () if self._deleted is None else self._deleted.faults
        return [*missing, *self._not_joined]

    async def run(self) -> None:
        """Create shards until cancelled; return at once if there is no selector.

        Raises:
            GazetteError: a watch has ended for good.
        """
        if not self._selectors:
            return
        try:
            await self._follow()
        except ExceptionGroup as group:
            raise group.exceptions[0] from group
        finally:
            self._unread.note({})

    async def _follow(self) -> None:
        """Create shards whenever journals or shards change."""
        wake = asyncio.Event()
        async with contextlib.AsyncExitStack() as stack:
            topics = [
                await stack.enter_async_context(WatchedList(self._transport, selector))
                for selector in self._selectors
            ]
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            for topic in topics:
                tasks.create_task(_repeat(topic.changed, wake))
            if self._until_changed is not None:
                tasks.create_task(_repeat(self._until_changed, wake))
            attempt = 0
            while True:
                await wake.wait()
                wake.clear()
                listings = [
                    [journal.spec for journal in topic.snapshot.journals]
                    for topic in topics
                    if topic.snapshot is not None
                ]
                if len(listings) < len(topics):
                    continue
                if await self._keep_up(listings):
                    attempt = 0
                else:
                    await pause(attempt)
                    attempt += 1
                    wake.set()

    async def _keep_up(self, listings: Sequence[Sequence[pb.JournalSpec]]) -> bool:
        """Create and delete what is to be, while this process leads; return False to try again."""
        leads = self._leads()
        if not leads:
            self._unread.note({})
            if not isinstance(self._application.all_sources, JoinedTopics):
                if self._deleted is not None:
                    self._deleted.forget()
                return True
        try:
            ended = await self._look_for_deleted(listings, warns=leads)
            if not leads:
                await self._wanted(listings)  # any process may be asked for the errors
                return True
            self._warn_without_journals(listings)
            await self._delete(ended)
            await self.generate(listings)
        except GazetteError as error:
            if leads and not isinstance(error, EtcdTransactionFailedError):
                self._outage.failed(error)
            return False
        self._outage.ended()
        return self._deleted is None or not (self._deleted.waits or self._deleted.faults)

    async def _look_for_deleted(
        self, listings: Sequence[Sequence[pb.JournalSpec]], *, warns: bool
    ) -> Sequence[KnownShard]:
        """Return the shards whose sources were deleted; warn once of each that misses some."""
        if self._deleted is None:
            return []
        before = set(map(str, self._deleted.faults))
        ended = await self._deleted.look(listings, await self._existing())
        for text in map(str, self._deleted.faults if warns else ()):
            if text not in before:
                _log.warning("%s", text)
        return ended

    async def _delete(self, ended: Sequence[KnownShard]) -> None:
        """Delete shards whose sources were deleted, with their hints.

        Raises:
            EtcdTransactionFailedError: one was changed meanwhile; look again.
            GazetteError: the deletion failed.
        """
        for begin in range(0, len(ended), CHANGED_AT_ONCE):
            some = ended[begin : begin + CHANGED_AT_ONCE]
            await self._apply(
                [
                    cpb.ApplyRequest.Change(
                        delete=spec.id, expect_mod_revision=revision, delete_hints=True
                    )
                    for spec, revision in some
                ]
            )
            for spec, _ in some:
                log = recovery_log(spec)
                _log.warning(
                    "deleted the shard %s, as %s was deleted, which it read%s",
                    spec.id,
                    shown(_own_sources(spec)),
                    log
                    and f". Its recovery log {log} is kept: a shard of a new journal of that name"
                    f" would continue with it. Delete it by `gazctl journals delete {log}"
                    " --with-fragments`",
                )

    def _warn_without_journals(self, listings: Sequence[Sequence[pb.JournalSpec]]) -> None:
        """Warn of selectors that match no journal, once of each."""
        for number, listing in enumerate(listings):
            if listing or number in self._warned:
                continue
            self._warned.add(number)
            _log.warning(
                "no journal matches the sources of %s, %s; it waits for one: create it, or"
                " check the sources and the address of the broker%s",
                self._application.full_name,
                format_selector(self._selectors[number]),
                "".join(map(topic_hint, names_of(self._application.all_sources))),
            )

    async def generate(self, listings: Sequence[Sequence[pb.JournalSpec]]) -> None:
        """Create what journals want and what does not exist: first logs, then shards.

        Args:
            listings: specs of the journals of each selector.

        Raises:
            EtcdTransactionFailedError: another process has created some; list what exists again.
            ConfigurationError: the partitions of several topics cannot be joined.
            ValidationError: the name of a journal is too long. All others have their shards.
            GazetteError: the creation failed.
        """
        wanted = await self._wanted(listings)
        logs = await list_named(self._transport, [log.name for log in wanted.logs])
        changes = [
            pb.ApplyRequest.Change(upsert=log, expect_mod_revision=0)
            for log in wanted.logs
            if log.name not in logs
        ]
        await apply_in_transactions(self._transport, changes)
        for begin in range(0, len(wanted.shards), CHANGED_AT_ONCE):
            some = wanted.shards[begin : begin + CHANGED_AT_ONCE]
            await self._apply([cpb.ApplyRequest.Change(upsert=spec) for spec in some])
        await self._grow(wanted.grown)
        self._unread.note({name: await self._head(name) for name in wanted.unread})
        if wanted.faults:
            raise wanted.faults[0]

    async def _grow(self, grown: Sequence[GrownShard]) -> None:
        """Change shards that are to read new partitions of a topic that every shard reads.

        Raises:
            EtcdTransactionFailedError: one was changed meanwhile; list what exists again.
            ValidationError: one would read too much.
            GazetteError: the change failed.
        """
        for begin in range(0, len(grown), CHANGED_AT_ONCE):
            some = grown[begin : begin + CHANGED_AT_ONCE]
            for each in some:
                validate_shard_spec(each.spec)
            await self._apply(
                [
                    cpb.ApplyRequest.Change(upsert=each.spec, expect_mod_revision=each.mod_revision)
                    for each in some
                ]
            )
            journals = {journal for each in some for journal in each.journals}
            _log.info(
                "%s: added to the sources of %s, to be read from the begin",
                shown(sorted(journals)),
                shown([each.spec.id for each in some]),
            )

    async def _wanted(self, listings: Sequence[Sequence[pb.JournalSpec]]) -> Generated:
        """Return what is missing, and note why partitions cannot be joined."""
        wanted = generated(self._application, listings, await self._existing())
        if isinstance(self._application.all_sources, JoinedTopics):
            self._not_joined = wanted.faults
        return wanted

    async def _head(self, journal: str) -> int:
        """Return the write head of a journal; 0 while it is not known."""
        try:
            return (await read_metadata(self._transport, journal, -1)).write_head
        except GazetteError as error:
            _log.debug("the write head of %s is not known: %s", journal, error)
            return 0


async def _repeat(changed: Callable[[], Awaitable[None]], wake: asyncio.Event) -> None:
    """Wake the generator after each change, until the watch ends for good."""
    while True:
        try:
            await changed()
        except (ClosedError, ConfigurationError, EtcdUnavailableError):
            raise  # every further call would raise it at once
        except GazetteError as error:
            _log.debug("the watch of journals goes on by itself: %s", error)
        else:
            wake.set()
