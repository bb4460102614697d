"""Capture of a backup, from a cluster, and its check against stores.

All keys are read at one revision of Etcd, and heads of journals after it: a head that is saved is
never before the one that the hints of a recovery log know.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from google.protobuf.message import DecodeError

from gazette_sdk.broker.fragments.refresh import list_stores, whole_of
from gazette_sdk.cli.backup.archive import Backup, SavedJournal, SavedMember, SavedShard
from gazette_sdk.cli.formats import Progress
from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_messages import KeyValue, prefix_end
from gazette_sdk.cluster.items import items_prefix, members_prefix, parse_assignment
from gazette_sdk.errors import ConfigurationError, GazetteError, ValidationError
from gazette_sdk.fragment.content import CoverSet
from gazette_sdk.fragment.registry import StoreRegistry
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import cluster_pb2 as clpb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.labels import continued_revision
from gazette_sdk.protocol.shard_spec import hint_keys
from gazette_sdk.shard.recovery import hints as fsm_hints
from gazette_sdk.transport.loop import for_each

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_Spec = TypeVar("_Spec", pb.JournalSpec, cpb.ShardSpec)

PAGE_KEYS: Final = 1000
"""Keys of one read of Etcd, which bounds the size of its answer."""

HEADS_MAX: Final = 500
"""Journals of one call for heads."""

LISTINGS_MAX: Final = 16
"""Listings of stores at a time."""

GAPS_MAX: Final = 8
"""Missing ranges of a journal that are named."""

HeadsOf = Callable[[Sequence[str]], Awaitable[Mapping[str, clpb.HeadsResponse.Head]]]
"""Return the heads of journals, of which there are at most :data:`HEADS_MAX`."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of a cluster and its applications, at one revision.

    Attributes:
        cluster_id: of Etcd.
        revision: of all reads.
        journals: keys of journals, by name.
        brokers: brokers.
        assigned: brokers of each journal, as ZONE/ID, the primary first.
        shards: prefix of the application, id and key of each shard.
        consumers: processes of applications.
    """

    cluster_id: int
    revision: int
    journals: Mapping[str, KeyValue]
    brokers: Sequence[SavedMember]
    assigned: Mapping[str, Sequence[str]]
    shards: Sequence[tuple[str, str, KeyValue]]
    consumers: Sequence[SavedMember]


async def read_keys(etcd: Etcd, prefix: str, consumers: str) -> Keys:
    """Read the keys of a cluster, and of the applications below a prefix.

    Args:
        etcd: the client.
        prefix: of the cluster.
        consumers: prefix below which applications have theirs.

    Raises:
        EtcdError: Etcd failed.
    """
    header = (await etcd.range(prefix.encode(), limit=1)).header

    async def below(begin: bytes) -> list[KeyValue]:
        return await _read_all(etcd, begin, header.revision)

    items, members = items_prefix(prefix), members_prefix(prefix)
    assigned: dict[str, list[tuple[int, str]]] = {}
    begin = f"{prefix}/assign/".encode()
    for kv in await below(begin):
        journal, zone, suffix, slot = parse_assignment(kv.key[len(begin) :].decode())
        assigned.setdefault(journal, []).append((slot, f"{zone}/{suffix}"))
    shards: list[tuple[str, str, KeyValue]] = []
    processes: list[SavedMember] = []
    for kv in await below(f"{consumers}/".encode()):
        root, separator, name = kv.key.partition(b"/items/")
        if separator:
            shards.append((root.decode(), name.decode(), kv))
        elif b"/members/" in kv.key:
            root = kv.key.partition(b"/members/")[0]
            processes += _member(root.decode(), kv, cpb.ConsumerSpec)
    return Keys(
        cluster_id=header.cluster_id,
        revision=header.revision,
        journals={kv.key[len(items) :].decode(): kv for kv in await below(items)},
        brokers=[
            each for kv in await below(members) for each in _member(prefix, kv, pb.BrokerSpec)
        ],
        assigned={name: [each for _, each in sorted(found)] for name, found in assigned.items()},
        shards=shards,
        consumers=processes,
    )


async def _read_all(etcd: Etcd, prefix: bytes, revision: int) -> list[KeyValue]:
    found: list[KeyValue] = []
    key, end = prefix, prefix_end(prefix)
    has_more = True
    while has_more:
        page = await etcd.range(key, end, revision=revision, limit=PAGE_KEYS)
        found += page.entries
        has_more = page.has_more
        key = found[-1].key + b"\0" if found else key
    return found


def _member(
    prefix: str, kv: KeyValue, kind: type[pb.BrokerSpec | cpb.ConsumerSpec]
) -> Iterator[SavedMember]:
    try:
        process = kind.FromString(kv.value).process_spec
    except DecodeError as error:
        _log.warning("the member %r is left out: %s", kv.key, error)
        return
    name = f"{process.id.zone}/{process.id.suffix}"
    yield SavedMember(prefix=prefix, id=name, endpoint=process.endpoint)


# ---------------------------------------------------------------- capture


async def capture(
    etcd: Etcd,
    prefix: str,
    consumers: str,
    *,
    heads_of: HeadsOf,
    versions: Mapping[str, str],
    progress: Progress,
) -> Backup:
    """Return the backup of a cluster.

    Args:
        etcd: the client.
        prefix: of the cluster.
        consumers: prefix below which applications have their keys.
        heads_of: asks brokers.
        versions: of members, by endpoint.
        progress: shows the steps.

    Raises:
        ConfigurationError: the cluster has no journals, or a spec cannot be read.
        GazetteError: Etcd or the brokers did not answer.
    """
    progress.begin("Keys of Etcd")
    keys = await read_keys(etcd, prefix, consumers)
    if not keys.journals:
        raise ConfigurationError(
            f"Etcd has no journals below {prefix}, so that there is nothing to back up: check"
            " --etcd.address and --etcd.prefix"
        )
    progress.begin("Hints of shards", len(keys.shards))
    done = 0

    async def saved_shard(found: tuple[str, str, KeyValue]) -> SavedShard:
        nonlocal done
        application, name, kv = found
        spec = _decoded(cpb.ShardSpec, kv)
        values = {}
        for key in hint_keys(spec):
            entries = (await etcd.range(key.encode(), revision=keys.revision)).entries
            if entries:
                values[key] = entries[0].value
        done += 1
        progress.advance(done)
        return SavedShard(application=application, id=name, spec_bytes=kv.value, hints=values)

    shards = await for_each(keys.shards, saved_shard, LISTINGS_MAX)

    names = list(keys.journals)
    progress.begin("Heads of journals", len(names))
    heads: dict[str, clpb.HeadsResponse.Head] = {}
    for at in range(0, len(names), HEADS_MAX):
        heads.update(await heads_of(names[at : at + HEADS_MAX]))
        progress.advance(min(at + HEADS_MAX, len(names)))
    none = clpb.HeadsResponse.Head()
    return Backup(
        prefix=prefix,
        cluster_id=keys.cluster_id,
        revision=keys.revision,
        journals=[
            _saved_journal(name, kv, heads.get(name, none), keys.assigned.get(name, ()))
            for name, kv in keys.journals.items()
        ],
        shards=shards,
        members=[
            SavedMember(
                prefix=each.prefix,
                id=each.id,
                endpoint=each.endpoint,
                version=versions.get(each.endpoint, ""),
            )
            for each in (*keys.brokers, *keys.consumers)
        ],
    )


def _saved_journal(
    name: str, kv: KeyValue, head: clpb.HeadsResponse.Head, brokers: Sequence[str]
) -> SavedJournal:
    spec = _decoded(pb.JournalSpec, kv)
    return SavedJournal(
        name=name,
        spec_bytes=kv.value,
        head=head.head if head.HasField("head") else None,
        begin=head.begin if head.HasField("begin") else None,
        create_revision=continued_revision(spec.labels) or kv.create_revision,
        registers=[(label.name, label.value) for label in head.registers.labels],
        brokers=brokers,
    )


def _decoded(kind: type[_Spec], kv: KeyValue) -> _Spec:
    try:
        return kind.FromString(kv.value)
    except DecodeError as error:
        raise ConfigurationError(
            f"the key {kv.key.decode(errors='replace')} of Etcd is no spec ({error}): delete or"
            " correct it, so that the backup is whole"
        ) from error


# ---------------------------------------------------------------- stores


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Content of a journal in its stores.

    Attributes:
        journal: its name.
        begin: offset of the first stored byte.
        end: offset after the last stored byte, torn fragments included: their offsets were given.
        bytes: number of stored bytes.
        gaps: missing ranges between them.
        error: why the stores could not be listed; empty if they were.
    """

    journal: str
    begin: int = 0
    end: int = 0
    bytes: int = 0
    gaps: Sequence[tuple[int, int]] = ()
    error: str = ""

    def missing(self, journal: SavedJournal) -> Sequence[tuple[int, int]]:
        """Return the ranges up to a saved head that no store has.

        Content before the first stored byte was removed by retention, and is not missing.
        """
        missing = [gap for gap in self.gaps if journal.begin is None or gap[1] > journal.begin]
        if journal.head is not None and journal.head > self.end:
            begin = max(self.end, journal.begin or 0)
            if begin < journal.head:
                missing.append((begin, journal.head))
        return missing


def hints_problem(shard: SavedShard, stored: Stored | None) -> str:
    """Return why the hints of a shard do not lead to its state; empty if nothing is known.

    A recovery begins at the least offset of the newest hints. Pruning removes what the hints of the
    moment do not need, so that those of an old backup may need more than there is.

    Args:
        shard: the shard.
        stored: what stores have of its recovery log; None if that is not known.
    """
    if not shard.log or stored is None or stored.error:
        return ""
    if stored.begin > 0 and not shard.hints:
        return f"it has no hints, and {shard.log} begins at {stored.begin}"
    newest = next((key for key in hint_keys(shard.spec) if key in shard.hints), "")
    if not newest:
        return ""
    try:
        hints = fsm_hints.from_bytes(shard.hints[newest])
    except ValidationError as error:
        return f"{newest}: {error}"
    needed = [
        each.first_offset
        for node in hints.live_nodes
        for each in node.segments
        if (each.log or hints.log) == shard.log
    ]
    first = min(needed, default=stored.begin)
    if first < stored.begin:
        return f"its hints need {shard.log} from {first} on, and it begins at {stored.begin}"
    return ""


@asynccontextmanager
async def opened_stores(file_root: Path | None) -> AsyncIterator[StoreRegistry]:
    """Open a registry of stores, and close it at the end."""
    stores = StoreRegistry(file_root)
    try:
        yield stores
    finally:
        await stores.aclose()


async def list_content(
    journals: Iterable[SavedJournal], stores: StoreRegistry, progress: Progress
) -> Mapping[str, Stored]:
    """Return what stores have of journals, by name. An error of a store is a part of the answer."""
    wanted = list(journals)
    progress.begin("Fragments of journals", len(wanted))
    done = 0

    async def look(journal: SavedJournal) -> Stored:
        nonlocal done
        try:
            found = await list_stores(journal.name, journal.spec.fragment.stores, stores)
        except (GazetteError, OSError) as error:
            return Stored(journal=journal.name, error=str(error))
        finally:
            done += 1
            progress.advance(done)
        whole = sorted(whole_of(found), key=lambda each: (each.begin, each.end))
        return stored_of(journal.name, whole, max((each.fragment.end for each in found), default=0))

    return {each.journal: each for each in await for_each(wanted, look, LISTINGS_MAX)}


def stored_of(journal: str, fragments: Sequence[pb.Fragment], end: int) -> Stored:
    """Return what fragments have of a journal.

    Args:
        journal: its name.
        fragments: in the order of their offsets.
        end: the greatest end of a fragment, also of one that is torn.
    """
    cover = CoverSet(fragments)
    gaps: list[tuple[int, int]] = []
    at, length = cover.begin, 0
    for each in cover:
        if each.begin > at and len(gaps) < GAPS_MAX:
            gaps.append((at, each.begin))
        length += max(0, each.end - max(at, each.begin))
        at = max(at, each.end)
    if end > at and cover:
        gaps.append((at, end))
    return Stored(journal=journal, begin=cover.begin, end=end, bytes=length, gaps=tuple(gaps))
