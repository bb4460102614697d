"""Changes of journals against what exists: outcomes, transactions and conflicts.

:func:`create_journals` creates the partitions of a topic, with defaults that depend on the cluster.

:func:`begin_journals` sets write heads. A journal that was deleted leaves its stored fragments. A
new one of the same name has them, and its brokers refuse appends before their end, until the write
head is reset after them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, TypeVar

from gazette_sdk.errors import (
    CallError,
    ConfigurationError,
    EtcdTransactionFailedError,
    FragmentStoreUnhealthyError,
    IndexHasGreaterOffsetError,
    InsufficientJournalBrokersError,
    JournalExistsError,
    NotAllowedError,
    StatusError,
    UnauthenticatedError,
    ValidationError,
    WrongAppendOffsetError,
    for_status,
)
from gazette_sdk.journals.journal import (
    JSON_LINES,
    JournalOptions,
    apply_options,
    check_options,
    default_spec,
    differences,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.journal_spec import REPLICATION, validate_journal_spec
from gazette_sdk.protocol.journalspace import shared_prefix
from gazette_sdk.protocol.labels import CONTENT_TYPE, NAME, PREFIX, add, journal_selector
from gazette_sdk.protocol.names import validate_journal
from gazette_sdk.protocol.rules import ANY_REVISION, complete
from gazette_sdk.retries import pause
from gazette_sdk.transport.append.append import append
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.journal_reader import read_metadata
from gazette_sdk.transport.listing import (
    apply_in_batches,
    apply_journals,
    list_journals,
    store_health,
)
from gazette_sdk.transport.loop import for_each

T = TypeVar("T")

ATTEMPTS_MAX = 5
"""Attempts of a change while other processes change the same journals."""

TXN_CHANGES_MAX = 128
"""Changes in one transaction of Etcd, by its default limit of operations."""

SELECTED_NAMES_MAX = 100
"""A broker compares every journal with every name of a selector. More names are listed by their
common directory."""

ChangeOutcome: TypeAlias = Literal["created", "updated", "unchanged", "deleted", "applied"]
"""Outcome of a change; ``applied`` if the caller may not list, and the others are unknown."""

Existing: TypeAlias = Mapping[str, pb.ListResponse.Journal]
"""Listed journals by name."""

Change: TypeAlias = pb.ApplyRequest.Change

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AppliedChange:
    """Outcome of a change of one journal.

    Attributes:
        outcome: what the change did.
        spec: spec of the journal; for a deletion the former one, or its name alone.
    """

    outcome: ChangeOutcome
    spec: pb.JournalSpec

    @property
    def name(self) -> str:
        """Name of the journal."""
        return self.spec.name


async def list_named(transport: Transport, names: Sequence[str]) -> Existing:
    """Return those of the named journals that exist.

    Raises:
        GazetteError: the listing failed.
    """
    if not names:
        return {}
    selector = pb.LabelSelector()
    if len(names) <= SELECTED_NAMES_MAX:
        for name in names:
            add(selector.include, NAME, name)
    elif length := shared_prefix(min(names), max(names)):
        add(selector.include, PREFIX, names[0][:length])
    wanted = set(names)
    listing = await list_journals(transport, selector)
    return {each.spec.name: each for each in listing.journals if each.spec.name in wanted}


async def count_brokers(transport: Transport, name: str) -> int:
    """Return the number of brokers that take journals; 0 if the cluster does not say.

    Args:
        transport: how to reach the cluster.
        name: of any journal, which need not exist.

    Raises:
        GazetteError: the call failed.
    """
    selector = journal_selector(name)
    return (await list_journals(transport, selector, count_brokers=True)).brokers


def warn_without_spare(specs: Iterable[pb.JournalSpec], brokers: int) -> None:
    """Log a warning that names journals whose replication leaves no broker to spare.

    A journal of one replica is no case of it: no replication keeps it going.

    Args:
        specs: of the journals.
        brokers: number of brokers that take journals; 0 if it is unknown.
    """
    found = [spec for spec in specs if spec.replication > 1 and spec.replication >= brokers > 0]
    if not found:
        return
    least = min(spec.replication for spec in found)
    named = found[0].name + (f" and {len(found) - 1} more" if len(found) > 1 else "")
    many = "brokers" if brokers > 1 else "broker"
    if least > brokers:
        effect = "their appends are refused"
    else:
        effect = "while one of these is away, their appends wait for it"
    _log.warning(
        "replication of %s leaves no broker to spare: it is %d, and the cluster has %d %s, so that "
        "%s; start another broker, or lower it with `gazctl journals edit` or `Journals().update`",
        named, least, brokers, many, effect,
    )  # fmt: skip


async def apply_changes(
    transport: Transport, changes: Sequence[Change], size: int = TXN_CHANGES_MAX
) -> AsyncIterator[list[AppliedChange]]:
    """Apply changes, and yield the outcomes of each transaction when it is committed.

    Journals that are as wanted already are yielded first, and are in no transaction.

    Args:
        transport: how to reach the cluster.
        changes: valid changes.
        size: changes in each transaction.

    Raises:
        EtcdTransactionFailedError: a journal has another revision than its change expects. The
            transaction and those after it were not applied.
        GazetteError: a call failed.
    """
    names = [name_of(change) for change in changes]
    existing: Existing | None = None
    try:
        existing = await list_named(transport, names)
    except UnauthenticatedError:  # the token may apply, but not list
        left = list(changes)
    else:
        unchanged, left = _without_unchanged(changes, existing)
        if unchanged:
            yield unchanged
        _refuse_conflicts(left, existing)
    for begin in range(0, len(left), size):
        batch = left[begin : begin + size]
        try:
            await apply_journals(transport, pb.ApplyRequest(changes=batch))
        except EtcdTransactionFailedError:
            if existing is not None:  # changed since the listing
                _refuse_conflicts(batch, await list_named(transport, names))
            raise
        yield [_applied(change, existing) for change in batch]


def _without_unchanged(
    changes: Sequence[Change], existing: Existing
) -> tuple[list[AppliedChange], list[Change]]:
    """Return the outcomes of changes that change nothing, and the other changes."""
    unchanged, left = list[AppliedChange](), list[Change]()
    for change in changes:
        found = existing.get(name_of(change))
        if change.delete and found is None:
            unchanged.append(AppliedChange("unchanged", pb.JournalSpec(name=change.delete)))
        elif found is not None and not change.delete and _is_same(change.upsert, found.spec):
            unchanged.append(AppliedChange("unchanged", found.spec))
        else:
            left.append(change)
    return unchanged, left


async def apply_in_transactions(transport: Transport, changes: Sequence[Change]) -> None:
    """Apply changes whose callers have read the journals before.

    Raises:
        ValidationError: a change breaks a rule; nothing was applied.
        EtcdTransactionFailedError: another process changed one of the journals since.
        GazetteError: a call failed.
    """
    for change in changes:
        if not change.delete:
            validate_journal_spec(change.upsert, change.upsert.name)
    if changes:
        await apply_in_batches(transport, pb.ApplyRequest(changes=changes), TXN_CHANGES_MAX)


def name_of(change: Change) -> str:
    """Return the name of a changed journal."""
    return change.delete or change.upsert.name


def _is_same(wanted: pb.JournalSpec, found: pb.JournalSpec) -> bool:
    """Return True if a journal has a spec.

    Brokers suspend and resume journals themselves. So a spec without ``suspend`` equals one with.
    """
    one, other = pb.JournalSpec(), pb.JournalSpec()
    one.CopyFrom(wanted)
    other.CopyFrom(found)
    if not wanted.HasField("suspend"):
        other.ClearField("suspend")
    return complete(one) == complete(other)


def _applied(change: Change, existing: Existing | None) -> AppliedChange:
    found = existing.get(name_of(change)) if existing is not None else None
    if change.delete:
        return AppliedChange(
            "deleted", found.spec if found is not None else pb.JournalSpec(name=change.delete)
        )
    if existing is None and change.expect_mod_revision == ANY_REVISION:
        return AppliedChange("applied", change.upsert)
    is_new = change.expect_mod_revision == 0 or (existing is not None and found is None)
    return AppliedChange("created" if is_new else "updated", change.upsert)


async def retried(attempt: Callable[[], Awaitable[T]]) -> T:
    """Make a change again while other processes change the same journals.

    Args:
        attempt: reads the journals, and applies the change.

    Returns:
        The result of the first attempt that succeeds.

    Raises:
        EtcdTransactionFailedError: the last of :data:`ATTEMPTS_MAX` attempts failed, too.
    """
    for number in range(ATTEMPTS_MAX - 1):
        try:
            return await attempt()
        except EtcdTransactionFailedError:
            await pause(number)  # brokers list changes of others after some milliseconds
    return await attempt()


def _refuse_conflicts(changes: Sequence[Change], existing: Existing) -> None:
    """Raise an error if journals have other revisions than their changes expect."""
    conflicts = [
        change
        for change in changes
        if change.expect_mod_revision != ANY_REVISION
        and change.expect_mod_revision != _revision(existing, name_of(change))
    ]
    if not conflicts:
        return
    first = conflicts[0]
    name, expected = name_of(first), first.expect_mod_revision
    found = existing.get(name)
    wanted = f"revision {expected}" if expected else "revision 0, which creates it,"
    if found is None:
        text = f"the change expects {wanted} but the journal does not exist (revision 0)"
    else:
        text = f"the change expects {wanted} but the journal has revision {found.mod_revision}"
        if first.upsert.name:
            text += f": {'; '.join(differences(first.upsert, found.spec)[:3])}"
    if len(conflicts) > 1:
        text += f"; {len(conflicts) - 1} more journals have such a conflict"
    raise EtcdTransactionFailedError(text, journal=name)


def _revision(existing: Existing, name: str) -> int:
    found = existing.get(name)
    return found.mod_revision if found is not None else 0


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
        ValidationError: the name is not that of a journal, or the number is none.
    """
    if not isinstance(partitions, int):
        raise ValidationError(
            f"{name}: partitions={partitions!r} is no whole number", kind="type", path="partitions"
        )
    if not 0 <= partitions <= PARTITIONS_MAX:
        raise ConfigurationError(
            f"{name}: {partitions} partitions; use 1 to {PARTITIONS_MAX}, or 0 for one journal of "
            "exactly this name"
        )
    if not isinstance(name, str):
        raise ValidationError(f"the name of a topic is a text, such as 'rides', and not {name!r}")
    names = [f"{name}/part-{index:03}" for index in range(partitions)] or [name]
    validate_journal(names[-1], "Name")  # the longest
    return names


SEEN_S: Final = 1.0
"""Time in which brokers that have just started are seen by the others, at least."""


async def create_journals(
    transport: Transport,
    name: str,
    partitions: int,
    options: JournalOptions,
    *,
    continues: bool = False,
    force: bool = False,
) -> list[AppliedChange]:
    """Create the partitions of a topic that do not exist, and wait until they are served.

    Args:
        transport: how to reach the cluster.
        name: name of the topic.
        partitions: number of partitions; 0 for one journal of exactly this name.
        options: values of the journals. New partitions of an existing topic take the others from
            its first partition.
        continues: True to let them continue after fragments of earlier journals of their names.
        force: True to create them with more replicas than there are brokers.

    Returns:
        The outcome of each partition, in order.

    Raises:
        JournalExistsError: a partition exists, and a given value differs; or the store has
            fragments of an earlier one.
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
            wanted = 0 if force else given.get("replication") or 0
            brokers = await _brokers(transport, names[0], wanted)
            base = await _base_spec(transport, existing, given, brokers)
            changes = [_creation(each, base, given) for each in names if each not in existing]
            if not force:
                _refuse_replication(given.get("replication"), brokers)
            await apply_in_transactions(transport, changes)
            specs |= {change.upsert.name: change.upsert for change in changes}
            if not existing and given.get("replication") is None:
                specs |= await _limit_replication(transport, names, brokers)
            warn_without_spare((specs[each] for each in names if each not in existing), brokers)
        return [
            AppliedChange("unchanged" if each in existing else "created", specs[each])
            for each in names
        ]

    made = await retried(create)
    journals = [change.name for change in made if continues or change.outcome == "created"]
    await begin_journals(transport, journals, continues=continues)
    return made


async def _brokers(transport: Transport, journal: str, wanted: int) -> int:
    """Return the number of brokers that take journals, once there are enough, or soon.

    Args:
        transport: how to reach the cluster.
        journal: a journal, of which the cluster is asked for its brokers.
        wanted: number that is enough.
    """
    ends_at = time.monotonic() + SEEN_S
    attempt = 0
    while 0 < (brokers := await count_brokers(transport, journal)) < wanted <= REPLICATION[1]:
        if time.monotonic() >= ends_at:
            break
        await pause(attempt)
        attempt += 1
    return brokers


def _refuse_replication(replication: int | None, brokers: int) -> None:
    """Refuse more replicas than there are brokers, of a number that may be.

    Args:
        replication: as given; ``None`` for the default.
        brokers: number of brokers that take journals; 0 if it is unknown.

    Raises:
        ConfigurationError: it is more.
    """
    if replication is not None and REPLICATION[1] >= replication > brokers > 0:
        many = "brokers take" if brokers > 1 else "broker takes"
        raise ConfigurationError(
            f"replication={replication}, and {brokers} {many} journals: appends would be refused; "
            "start more brokers, lower it, or create the journals nevertheless with force=True "
            "(--force)"
        )


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
    """Return the default number of replicas, so that appends continue while a broker is away."""
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
            f"it was created, but no broker has taken it within {ASSIGNMENT_TIMEOUT_S:g} s: see"
            " with `gazctl brokers list` if one runs, and if each has as many replicas as it takes"
            " (--broker.limit)",
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


READY_TIMEOUT_S: Final = 5.0
"""Longest wait until a new journal is served: then it is left to its brokers."""

_CONCURRENT_MAX: Final = 32
_NAMED_MAX: Final = 3


async def stored_end(transport: Transport, journal: str) -> int:
    """Return the offset after all content of a journal that its brokers know of.

    Raises:
        GazetteError: they could not be asked.
    """
    return (await read_metadata(transport, journal, -1)).offset


async def reset_head(transport: Transport, journal: str, head: int) -> None:
    """Let a journal continue at an offset after all of its content.

    Args:
        transport: how to reach the cluster.
        journal: name of the journal.
        head: the offset, of :func:`stored_end`.

    Raises:
        WrongAppendOffsetError: others write to the journal, which needs no reset.
        GazetteError: the append failed.
    """
    request = pb.AppendRequest(journal=journal, offset=head, suspend=pb.AppendRequest.SUSPEND_KEEP)
    await append(transport, request, [])


async def begin_journals(transport: Transport, journals: Sequence[str], *, continues: bool) -> None:
    """Wait until brokers serve new journals, and look for fragments of earlier ones.

    Args:
        transport: how to reach the cluster.
        journals: their names.
        continues: True to let them continue after such fragments.

    Raises:
        JournalExistsError: they have such fragments.
    """

    async def begins(journal: str) -> bool:
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                return await _begins(transport, journal, continues=continues)
        except TimeoutError:
            _log.info("%s is not served yet", journal)
            return True

    begun = await for_each(journals, begins, _CONCURRENT_MAX)
    refused = [journal for journal, is_begun in zip(journals, begun, strict=True) if not is_begun]
    if refused:
        names = ", ".join(refused[:_NAMED_MAX]) + (", …" if len(refused) > _NAMED_MAX else "")
        raise JournalExistsError(
            f"{names}: an earlier journal of this name has left fragments in the store, so that "
            "appends are refused; give continues=True (`gazctl journals create --continue`) to "
            "continue after them, or remove both with `gazctl journals delete --with-fragments`",
            journal=refused[0],
        )


async def _begins(transport: Transport, journal: str, *, continues: bool) -> bool:
    """Wait until a journal is served. Return False if earlier fragments are in the way.

    Only where there are fragments, it is tried whether the journal takes appends.
    """
    attempt = 0
    while True:
        try:
            if not await _has_fragments(transport, journal):
                return True
            await append(transport, pb.AppendRequest(journal=journal), [])
        except IndexHasGreaterOffsetError:
            if not continues:
                return False
            with contextlib.suppress(WrongAppendOffsetError):  # others have reset it
                await reset_head(transport, journal, await stored_end(transport, journal))
        except (UnauthenticatedError, NotAllowedError):
            return True  # the creator of journals need not append to them
        except FragmentStoreUnhealthyError as error:
            _log.warning("%s takes no appends yet: %s", journal, error)
            return True
        except (CallError, StatusError) as error:
            _log.debug("%s takes no appends yet: %s", journal, error)
        else:
            return True
        await pause(attempt)
        attempt += 1


async def _has_fragments(transport: Transport, journal: str) -> bool:
    """Return True if the stores of a journal have fragments of it, or objects that are torn.

    Raises:
        GazetteError: no broker serves the journal yet, or the call failed.
    """
    for torn_only in (False, True):
        request = pb.FragmentsRequest(journal=journal, page_limit=1, torn_only=torn_only)
        response = await transport.list_fragments(request)
        if response.status != pb.OK:
            raise for_status(response.status, journal=journal)
        if response.fragments:
            return True
    return False
