"""Back-off between attempts (client section 1).

Most waits are for topology to converge, which takes some tens of milliseconds; so the first
waits are short, and the schedule soon rises to what is polite toward a cluster in trouble.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias

__all__ = ["Pause", "delay_s", "pause"]

Pause: TypeAlias = Callable[[int], Awaitable[None]]
"""Function that waits before the attempt after attempt number N; tests put virtual time here."""

_DELAYS_S = (0.05, 0.05, 0.1, 0.1, 1.0, 1.0)
DELAY_S_MAX = 5.0
"""Every further attempt."""


def delay_s(attempt: int) -> float:
    """Return the seconds to wait after attempt number ``attempt`` failed; -1 means at once."""
    if attempt < 0:
        return 0.0
    return _DELAYS_S[attempt] if attempt < len(_DELAYS_S) else DELAY_S_MAX


async def pause(attempt: int) -> None:
    """Wait as the schedule says. Cancellable."""
    await asyncio.sleep(delay_s(attempt))
