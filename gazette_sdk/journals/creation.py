"""Creation of the partitions of a topic, with defaults that depend on the cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from gazette_sdk.errors import (
    ConfigurationError,
    EtcdTransactionFailedError,
    InsufficientJournalBrokersError,
    JournalExistsError,
)
from gazette_sdk.journals.changes import (
    AppliedChange,
    Change,
    Existing,
    apply_in_transactions,
    count_brokers,
    list_named,
    retried,
    warn_without_spare,
)
from gazette_sdk.journals.options import (
    JSON_LINES,
    JournalOptions,
    apply_options,
    check_options,
    default_spec,
    differences,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.labels import CONTENT_TYPE
from gazette_sdk.protocol.names import validate_journal
from gazette_sdk.transport.backoff import pause
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.listing import list_journals, store_health

__all__ = ["PARTITIONS_MAX", "TOPIC", "create_journals", "partition_names"]

TOPIC = "topic"
"""Label of new journals that selectors use; its value is the name given to ``create``."""

PARTITIONS_MAX = 1000
"""Mappings choose among partitions in the order of their names, which end in three digits."""

DEFAULT_REPLICATION = 3
"""Most replicas of a new journal: with fewer than four brokers, one of them is spared."""

DEFAULT_STORE = "file:///"
"""Store of the first journals of a cluster whose brokers keep fragments in files."""

ASSIGNMENT_TIMEOUT_S = 10.0
"""Limit of waiting for brokers to take new journals, which takes some tenths of a second."""


def partition_names(name: str, partitions: int) -> list[str]:
    """Return the names of a topic's partitions; for 0 partitions the name itself.

    Raises:
        ConfigurationError: the number of partitions is out of range.
        ValidationError: the name is not that of a journal.
    """
    if not 0 <= partitions <= PARTITIONS_MAX:
        raise ConfigurationError(
            f"{name}: {partitions} partitions; use 1 to {PARTITIONS_MAX}, or 0 for one journal of "
            "exactly this name"
        )
    names = [f"{name}/part-{index:03}" for index in range(partitions)] or [name]
    validate_journal(names[-1], "Name")  # the longest
    return names


async def create_journals(
    transport: Transport, name: str, partitions: int, options: JournalOptions
) -> list[AppliedChange]:
    """Create the partitions of a topic that do not exist.

    Args:
        transport: how to reach the cluster.
        name: name of the topic.
        partitions: number of partitions; 0 for one journal of exactly this name.
        options: values of the journals. New partitions of an existing topic take the others from
            its first partition.

    Returns:
        The outcome of each partition, in order.

    Raises:
        JournalExistsError: a partition exists, and a given value differs.
        ConfigurationError: there is no default store, or a value cannot be used.
        ValidationError: a name or a value breaks a rule of specs.
        GazetteError: a call failed.
    """
    names = partition_names(name, partitions)
    check_options(options)
    given = _with_default_labels(name, options)

    async def create() -> list[AppliedChange]:
        existing = await list_named(transport, names)
        _refuse_different(existing, given)
        specs = {each: listed.spec for each, listed in existing.items()}
        if len(specs) < len(names):
            brokers = await count_brokers(transport, names[0])
            base = await _base_spec(transport, existing, given, brokers)
            changes = [_creation(each, base, given) for each in names if each not in existing]
            await apply_in_transactions(transport, changes)
            specs |= {change.upsert.name: change.upsert for change in changes}
            if not existing and given.get("replication") is None:
                specs |= await _limit_replication(transport, names, brokers)
            warn_without_spare((specs[each] for each in names if each not in existing), brokers)
        return [
            AppliedChange("unchanged" if each in existing else "created", specs[each])
            for each in names
        ]

    return await retried(create)


def _with_default_labels(name: str, options: JournalOptions) -> JournalOptions:
    labels = dict(options.get("labels") or {})
    labels.setdefault(TOPIC, name)
    content_type = options.get("content_type")
    if content_type is None and CONTENT_TYPE not in labels:
        content_type = JSON_LINES
    return {**options, "labels": labels, "content_type": content_type}


def _refuse_different(existing: Existing, given: JournalOptions) -> None:
    """Raise an error if a value of an existing journal differs from the given one."""
    for name, found in existing.items():
        wanted = pb.JournalSpec()
        wanted.CopyFrom(found.spec)
        apply_options(wanted, given)
        texts = differences(wanted, found.spec)
        if texts:
            raise JournalExistsError(
                f"{name} exists, and its {'; its '.join(texts)}; change it with "
                "`Journals().update` or `gazctl journals edit`, or create it with these values",
                journal=name,
            )


def _creation(name: str, base: pb.JournalSpec, given: JournalOptions) -> Change:
    change = Change(upsert=base)
    change.upsert.name = name
    apply_options(change.upsert, given)
    return change


def default_replication(brokers: int) -> int:
    """Return the default number of replicas, with which appends go on while one broker is away."""
    return min(DEFAULT_REPLICATION, max(1, brokers - 1))


async def _base_spec(
    transport: Transport, existing: Existing, given: JournalOptions, brokers: int
) -> pb.JournalSpec:
    """Return the values of new journals which the caller does not give.

    Where the number of brokers is unknown, replicas are one more than the most, and become less
    when the first route shows how many brokers took them.
    """
    if existing:
        base = pb.JournalSpec()
        base.CopyFrom(existing[min(existing)].spec)
        base.ClearField("suspend")
        return base
    stores = () if given.get("stores") is not None else await _default_stores(transport)
    most = default_replication(brokers) if brokers else DEFAULT_REPLICATION + 1
    return default_spec(stores, most)


async def _default_stores(transport: Transport) -> Sequence[str]:
    """Return the stores of the cluster's journals, or that of the brokers' files.

    Raises:
        ConfigurationError: journals have different stores, or there is none.
    """
    listing = await list_journals(transport)
    used = {tuple(each.spec.fragment.stores) for each in listing.journals} - {()}
    if len(used) > 1:
        texts = sorted(", ".join(stores) for stores in used)
        raise ConfigurationError(
            f"there is no default store: journals of this cluster use {len(used)} different ones "
            f"({'; '.join(texts[:3])}); give one with stores= (--store)"
        )
    if used:
        return used.pop()
    health = await store_health(transport, DEFAULT_STORE)
    if health.status != pb.OK:
        raise ConfigurationError(
            "there is no default store: the cluster has no journals yet, and its brokers keep no "
            f"fragments in files ({health.store_health_error}); give one such as "
            "s3://bucket/prefix/ with stores= (--store), or start the brokers with "
            "--broker.file-root"
        )
    return (DEFAULT_STORE,)


async def _limit_replication(
    transport: Transport, names: Sequence[str], brokers: int
) -> dict[str, pb.JournalSpec]:
    """Wait until brokers have taken new journals, and lower their replication to these brokers.

    Brokers of other implementations do not say how many they are. The allocator assigns a new
    journal to as many brokers as it can, in one transaction, so that its first route shows them.

    Args:
        transport: how to reach the cluster.
        names: of the journals.
        brokers: number of brokers; 0 if it is unknown.

    Returns:
        The specs of the journals.

    Raises:
        InsufficientJournalBrokersError: no broker has taken a journal in time.
    """
    waiting, attempt = names[0], 0
    try:
        async with asyncio.timeout(ASSIGNMENT_TIMEOUT_S):
            while True:
                found = await list_named(transport, names)
                missing = (n for n in names if n not in found or not found[n].route.members)
                waiting = next(missing, "")
                if not waiting and await _lower_replication(transport, found, brokers):
                    return {name: each.spec for name, each in found.items()}
                await pause(attempt)
                attempt += 1
    except TimeoutError:
        raise InsufficientJournalBrokersError(
            f"it was created, but no broker has taken it within {ASSIGNMENT_TIMEOUT_S:g} s",
            journal=waiting or names[0],
        ) from None


async def _lower_replication(transport: Transport, found: Existing, brokers: int) -> bool:
    """Lower the replication of journals with fewer brokers; return False if another did."""
    changes = list[Change]()
    for each in found.values():
        taken = len(each.route.members)
        most = taken if brokers else default_replication(taken)
        if most < each.spec.replication:
            each.spec.replication = most
            changes.append(Change(upsert=each.spec, expect_mod_revision=each.mod_revision))
    try:
        await apply_in_transactions(transport, changes)
    except EtcdTransactionFailedError:
        return False
    return True
