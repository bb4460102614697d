"""Changes of journals against what exists: outcomes, transactions and conflicts."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

from gazette_sdk.errors import EtcdTransactionFailedError, UnauthenticatedError
from gazette_sdk.journals.options import differences
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.journal_spec import validate_journal_spec
from gazette_sdk.protocol.journalspace import shared_prefix
from gazette_sdk.protocol.labels import NAME, PREFIX, add, journal_selector
from gazette_sdk.protocol.rules import ANY_REVISION, complete
from gazette_sdk.transport.backoff import pause
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.listing import apply_in_batches, apply_journals, list_journals

__all__ = [
    "TXN_CHANGES_MAX",
    "AppliedChange",
    "Existing",
    "apply_changes",
    "apply_in_transactions",
    "count_brokers",
    "list_named",
    "retried",
    "warn_without_spare",
]

T = TypeVar("T")

ATTEMPTS_MAX = 5
"""Attempts of a change while other processes change the same journals."""

TXN_CHANGES_MAX = 128
"""Changes in one transaction of Etcd, by its default limit of operations."""

SELECTED_NAMES_MAX = 100
"""A broker compares every journal with every name of a selector. More names are listed by their
common directory."""

Outcome: TypeAlias = Literal["created", "updated", "unchanged", "deleted", "applied"]
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

    outcome: Outcome
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
