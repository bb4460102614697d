"""Shards and recovery logs of the journals that an application reads. Pure.

Each journal has one shard, named by the application and the journal, and each shard a recovery
log with the replication and stores of its source. A journal that a shard of another name reads,
such as one of a manifest, has its shard. Nothing is changed that exists, and a journal that
disappears deletes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.durations import SECOND_NS, from_ns
from gazette_sdk.protocol.journal_spec import may_read
from gazette_sdk.protocol.labels import CONTENT_TYPE, MANAGED_BY, NAME, label_set, value_of
from gazette_sdk.protocol.shard_spec import recovery_log, validate_shard_spec
from gazette_sdk.shard.application.application import Application

__all__ = [
    "HINT_PREFIX",
    "LOG_CONTENT_TYPE",
    "LOG_PREFIX",
    "Existing",
    "Generated",
    "existing_shards",
    "generated",
    "shard_id",
    "source_selector",
]

LOG_PREFIX = "recovery"
"""Prefix of the names of recovery logs."""

HINT_PREFIX = "/gazette/hints"
"""Prefix of the keys of hints in Etcd."""

HINT_BACKUPS = 2
"""Hints that are kept besides the newest."""

LOG_CONTENT_TYPE = "application/x-gazette-recoverylog"
"""Content type of recovery logs."""

_ESCAPES = str.maketrans({"+": "+2B", "=": "+3D", "%": "+25"})


Existing: TypeAlias = Collection[str] | Mapping[str, Collection[str]]
"""Ids of the shards that exist; a mapping has the journals that each of them reads."""


class Generated(NamedTuple):
    """Shards of an application, and their recovery logs.

    Attributes:
        shards: specs of shards, by name.
        logs: specs of recovery logs, in the same order; none of a store without files.
    """

    shards: list[cpb.ShardSpec]
    logs: list[pb.JournalSpec]


def shard_id(application: str, journal: str) -> str:
    """Return the id of the shard of a journal: different for different journals.

    Args:
        application: name of the application.
        journal: name of the journal. Characters that ids lack are written as ``+`` and their code.
    """
    return f"{application}/{journal.translate(_ESCAPES)}"


def source_selector(application: Application[Any, Any]) -> pb.LabelSelector | None:
    """Return the selector of the application's sources; None if it declares none."""
    names = application.source_names
    if names:
        labels = label_set((NAME, name) for name in sorted(set(names)))
        return pb.LabelSelector(include=labels)
    return application.source_selector


def existing_shards(specs: Iterable[cpb.ShardSpec]) -> Mapping[str, Collection[str]]:
    """Return the source journals of shards, by the ids of the shards."""
    return {spec.id: {source.journal for source in spec.sources} for spec in specs}


def generated(
    application: Application[Any, Any],
    journals: Iterable[pb.JournalSpec],
    existing: Existing = (),
) -> Generated:
    """Return the shards that journals want and that do not exist, with their recovery logs.

    Args:
        application: the application.
        journals: specs of the journals that its sources select.
        existing: shards that exist; neither they nor other ones of their sources are returned.

    Raises:
        ValidationError: the name of a journal is too long for an id or the name of a log.
    """
    name = application.full_name
    found = Generated([], [])
    read: set[str] = set()
    if isinstance(existing, Mapping):
        read.update(*existing.values())
    for journal in sorted(journals, key=lambda spec: spec.name.encode()):
        is_log = value_of(journal.labels, CONTENT_TYPE) == LOG_CONTENT_TYPE
        has_shard = journal.name in read or shard_id(name, journal.name) in existing
        if is_log or has_shard or not may_read(journal):
            continue
        spec = _shard(application, name, journal.name)
        validate_shard_spec(spec)
        found.shards.append(spec)
        if spec.recovery_log_prefix:
            found.logs.append(_log(spec, journal))
    return found


def _shard(application: Application[Any, Any], name: str, journal: str) -> cpb.ShardSpec:
    spec = cpb.ShardSpec(
        id=shard_id(name, journal),
        sources=[cpb.ShardSpec.Source(journal=journal)],
        hot_standbys=application.hot_standbys,
        labels=label_set([(MANAGED_BY, name)]),
        disable_wait_for_ack=not application.waits_for_acks,
    )
    spec.max_txn_duration.CopyFrom(from_ns(round(application.max_txn_s * SECOND_NS)))
    spec.min_txn_duration.CopyFrom(from_ns(round(application.min_txn_s * SECOND_NS)))
    if getattr(application.store, "is_recorded", True):
        spec.recovery_log_prefix = LOG_PREFIX
        spec.hint_prefix = HINT_PREFIX
        spec.hint_backups = HINT_BACKUPS
    return spec


def _log(shard: cpb.ShardSpec, source: pb.JournalSpec) -> pb.JournalSpec:
    """Return the spec of a recovery log: its source's, for ever."""
    spec = pb.JournalSpec(
        name=recovery_log(shard),
        replication=source.replication,
        labels=label_set([(CONTENT_TYPE, LOG_CONTENT_TYPE)]),
        fragment=source.fragment,
    )
    spec.fragment.ClearField("retention")
    spec.fragment.ClearField("path_postfix_template")
    return spec
