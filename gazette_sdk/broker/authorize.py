"""Admission of changes of journals by their caller's claims (protocol section 12)."""

from __future__ import annotations

from collections.abc import Collection

from gazette_sdk.errors import UnauthenticatedError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Claims
from gazette_sdk.protocol.labels import label_set, matches, matches_journal


def admit_change(
    claims: Claims,
    change: pb.ApplyRequest.Change,
    existing: pb.JournalSpec | None = None,
    *,
    allowed_stores: Collection[str] = (),
) -> None:
    """Check that the caller's claims allow to change a journal.

    An upsert must match by the new spec's labels and name, a deletion by the name alone. A journal
    that exists must match, too: otherwise a caller could put its own label on any journal. A caller
    with a selector must not change where content is stored, because stores rewrite paths
    (``find`` and ``replace``) and postfixes extend them, so that one journal could read and write
    the fragments of another.

    Args:
        claims: the caller's.
        change: the change.
        existing: current spec of the journal, if it exists. Claims without a selector need none.
        allowed_stores: URLs of stores that any caller may give to its journals.

    Raises:
        UnauthenticatedError: they do not allow it.
    """
    if claims.allows_every_journal:
        return
    name = change.delete or change.upsert.name
    if change.delete:
        is_admitted = matches(claims.selector, label_set(name=name))
    else:
        is_admitted = matches_journal(claims.selector, change.upsert)
    if existing is not None:
        is_admitted = is_admitted and matches_journal(claims.selector, existing)
    if not is_admitted:
        raise UnauthenticatedError(
            f"the token's selector does not allow to change {name}; use a token whose selector "
            "matches the journal's name and labels, before and after the change"
        )
    if not change.delete:
        _admit_storage(change.upsert.fragment, existing, allowed_stores, name)


def _admit_storage(
    fragment: pb.JournalSpec.Fragment,
    existing: pb.JournalSpec | None,
    allowed_stores: Collection[str],
    name: str,
) -> None:
    """Check that a caller with a selector does not change where content is stored.

    Raises:
        UnauthenticatedError: it does.
    """
    current = existing.fragment if existing is not None else pb.JournalSpec.Fragment()
    for store in fragment.stores:
        if store not in current.stores and store not in allowed_stores:
            raise UnauthenticatedError(
                f"a token with a selector does not allow to store {name} in {store!r}; use a token "
                "without a selector, or add the store to the brokers' --broker.allow-store"
            )
    if fragment.path_postfix_template not in {"", current.path_postfix_template}:
        raise UnauthenticatedError(
            f"a token with a selector does not allow to change the path postfix of {name}; use a "
            "token without a selector"
        )
