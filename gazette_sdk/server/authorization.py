"""Authorization of callers, and its end in time (protocol section 12)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from gazette_sdk.errors import DeadlineExceededError
from gazette_sdk.protocol.authorization import AllowAll, Authority, Capability, Claims
from gazette_sdk.server.call import Call

__all__ = ["Authorization"]


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
