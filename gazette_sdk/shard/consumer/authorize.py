"""Admission of changes of shards by their caller's claims (shard section 11).

A caller with a selector changes the shards that it matches, and nothing else by them. The id and
the prefixes of a shard name its recovery log and the Etcd keys of its hints, and ids have slashes:
a free choice would lead to the log of any shard, and to any key. Its sources are read with the
rights of the process. So they are those that the shard has, or those that the application gives it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping

from gazette_sdk.errors import UnauthenticatedError
from gazette_sdk.protocol import consumer_pb2 as cpb
from gazette_sdk.protocol.authorization import Claims
from gazette_sdk.protocol.labels import Matcher, label_set, matches
from gazette_sdk.protocol.shard_spec import (
    ID,
    matches_shard,
    primary_hint_key,
    recovery_log,
    source_journals,
)

__all__ = ["Templates", "admit_change", "admit_id", "admit_upsert", "is_unchanged", "no_templates"]

Templates = Callable[[Collection[str]], Awaitable[Mapping[str, cpb.ShardSpec]]]
"""Function that returns, by journal, the shards which the application gives to journals."""


async def no_templates(_: Collection[str]) -> Mapping[str, cpb.ShardSpec]:
    """Return nothing: templates of an application without sources."""
    return {}


def admit_id(claims: Claims, shard: str, known: cpb.ShardSpec | None) -> None:
    """Check that claims allow to delete or unassign a shard: by its id, and by what it is.

    Args:
        claims: the caller's, with a selector.
        shard: id of the shard.
        known: its spec, if it exists.

    Raises:
        UnauthenticatedError: they do not.
    """
    if not matches(claims.selector, label_set(((ID, shard),))) or (
        known is not None and not matches_shard(Matcher(claims.selector), known)
    ):
        raise _not_authorized(shard)


def admit_change(
    claims: Claims, change: cpb.ApplyRequest.Change, known: cpb.ShardSpec | None
) -> None:
    """Check that claims allow to change a shard, by its id and labels.

    An upsert must match by the new labels, and the shard that exists by its own: else a caller
    could put its label on any shard. Hints must not name logs of other shards: a recovery would
    play them.

    Args:
        claims: the caller's, with a selector.
        change: the change.
        known: current spec of the shard, if it exists.

    Raises:
        UnauthenticatedError: they do not.
    """
    if change.delete:
        admit_id(claims, change.delete, known)
        return
    matcher, shard = Matcher(claims.selector), change.upsert.id
    if not matches_shard(matcher, change.upsert) or (
        known is not None and not matches_shard(matcher, known)
    ):
        raise _not_authorized(shard)
    nodes = change.primary_hints.live_nodes
    if other := next((part.log for node in nodes for part in node.segments if part.log), ""):
        raise _beyond(shard, "hints of the log", other)


def is_unchanged(upsert: cpb.ShardSpec, known: cpb.ShardSpec | None) -> bool:
    """Return True if an upsert leaves the log and hints of a shard, and adds no source."""
    return known is not None and _first_beyond(upsert, [known]) is None


def admit_upsert(
    upsert: cpb.ShardSpec,
    known: cpb.ShardSpec | None,
    templates: Mapping[str, cpb.ShardSpec],
    others: Iterable[cpb.ShardSpec],
) -> None:
    """Check that log, hints and sources are those of the shard, or the application's for its id.

    Args:
        upsert: the new spec.
        known: current spec of the shard, if it exists.
        templates: by journal, the shards that the application gives to the journals of the upsert.
        others: all other shards. None of their logs, hints and sources is given away.

    Raises:
        UnauthenticatedError: they are not.
    """
    own = [spec for spec in templates.values() if spec.id == upsert.id]
    if known is not None:
        own.append(known)
    if beyond := _first_beyond(upsert, own):
        raise _beyond(upsert.id, *beyond)
    journals = _sources(upsert) - (set() if known is None else _sources(known))
    log, hints = recovery_log(upsert), primary_hint_key(upsert)
    for other in others:
        if log and log == recovery_log(other):
            raise _beyond(upsert.id, f"the log of {other.id},", log)
        if log and hints == primary_hint_key(other):
            raise _beyond(upsert.id, f"the hints of {other.id},", hints)
        if shared := journals & _sources(other):
            raise _beyond(upsert.id, f"the source of {other.id},", min(shared))


def _first_beyond(upsert: cpb.ShardSpec, own: Collection[cpb.ShardSpec]) -> tuple[str, str] | None:
    """Return the first field of an upsert, and its value, that none of a shard's specs has."""
    if not own:
        return "the new sources", ", ".join(sorted(_sources(upsert)))
    for name in ("recovery_log_prefix", "hint_prefix"):
        if getattr(upsert, name) not in {getattr(spec, name) for spec in own}:
            return name, getattr(upsert, name)
    if upsert.hint_backups > max(spec.hint_backups for spec in own):
        return "hint_backups", str(upsert.hint_backups)
    journals = _sources(upsert).difference(*map(_sources, own))
    return ("the source", min(journals)) if journals else None


def _sources(spec: cpb.ShardSpec) -> set[str]:
    return set(source_journals(spec))


def _not_authorized(shard: str) -> UnauthenticatedError:
    return UnauthenticatedError(
        f"not authorized to {shard}; use a token whose selector matches the shard's id and labels,"
        " before and after the change"
    )


def _beyond(shard: str, name: str, value: str) -> UnauthenticatedError:
    return UnauthenticatedError(
        f"a token with a selector does not allow {name} {value!r} for {shard}: log, hints and"
        " sources are those that the shard has, or that the application gives it for one of its"
        " sources; use a token without a selector"
    )
