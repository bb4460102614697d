"""Authorization of calls, and its expiry (protocol section 12)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
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
        authority: verifies tokens, or admits everybody.
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
        """Return the seconds to the end of the token or of the caller's patience, if any ends."""
        ends = []
        if claims.expires_at != float("inf"):
            ends.append(claims.expires_at - self.now())
        if call is not None and call.timeout_s is not None:
            ends.append(call.timeout_s)
        return max(0.0, min(ends)) if ends else None

    @asynccontextmanager
    async def bound(self, claims: Claims, call: Call) -> AsyncIterator[None]:
        """Bound what runs inside by the token's expiry and the caller's patience.

        Raises:
            DeadlineExceededError: the time is over.
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
            raise DeadlineExceededError("the call's time, or its token's, is over") from None


def admit_change(claims: Claims, change: pb.ApplyRequest.Change) -> None:
    """Refuse a change of a journal outside the caller's claims.

    An upsert is checked by the new spec's labels and name, a deletion by the name alone.

    Raises:
        UnauthenticatedError: it is outside.
    """
    if change.delete:
        name = change.delete
        admitted = matches(claims.selector, label_set(name=name))
    else:
        name = change.upsert.name
        admitted = matches_journal(claims.selector, change.upsert)
    if not admitted:
        raise UnauthenticatedError(f"the token's selector does not allow to change {name}")
