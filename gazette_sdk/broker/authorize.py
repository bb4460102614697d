"""Authorization of callers, and its end in time (protocol section 12)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from gazette_sdk.errors import DeadlineExceededError, UnauthenticatedError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import AllowAll, Authority, Capability, Claims
from gazette_sdk.protocol.labels import label_set
from gazette_sdk.protocol.selectors import matches, matches_journal
from gazette_sdk.server.call import Call

__all__ = ["Authorization", "admit_change"]


@dataclass(frozen=True, slots=True)
class Authorization:
    """Verifier of callers.

    Attributes:
        authority: verifies tokens, or admits every caller.
        now: Unix time, in seconds.
    """

    authority: Authority | AllowAll
    now: Callable[[], float] = field(default=time.time)

    def verify(self, call: Call, required: Capability) -> Claims:
        """Return the claims of a call.

        Raises:
            UnauthenticatedError: the token is missing or bad, or lacks ``required``.
        """
        return self.authority.verify(call.authorization, required, self.now())

    def remaining_s(self, claims: Claims, call: Call | None = None) -> float | None:
        """Return the seconds until the token or the call expires; ``None`` for no end."""
        ends = []
        if claims.expires_at != float("inf"):
            ends.append(claims.expires_at - self.now())
        if call is not None and call.timeout_s is not None:
            ends.append(call.timeout_s)
        return max(0.0, min(ends)) if ends else None

    @asynccontextmanager
    async def bound(self, claims: Claims, call: Call) -> AsyncIterator[None]:
        """Bound the body of the context by the token's expiry and the call's deadline.

        Raises:
            DeadlineExceededError: one of them is reached.
        """
        remaining_s = self.remaining_s(claims, call)
        if remaining_s is None:
            yield
            return
        try:
            async with asyncio.timeout(remaining_s) as scope:
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            raise DeadlineExceededError(
                "the time of the call, or of its token, is over: call again with a later"
                " deadline, or with a new token"
            ) from None


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
