"""Offsets at which the reads of journals begin, and whether the journals have them."""

from __future__ import annotations

import asyncio
import logging
from typing import NamedTuple

from gazette_sdk.errors import (
    CheckpointMismatchError,
    GazetteError,
    OffsetNotYetAvailableError,
)
from gazette_sdk.message.reading.plan import Plan
from gazette_sdk.transport.backoff import pause
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.read.retry_reader import write_head

__all__ = ["HEAD_LAG_MAX_S", "Positions", "Start"]

_log = logging.getLogger(__name__)

HEAD_LAG_MAX_S = 5.0
"""Time for which an offset behind the write head is looked up again before it is missing. A broker
that just took the journal over may not have listed all its fragments."""

ON_MISSING = (
    'Reader(on_missing="begin") reads it from its begin, and on_missing="end" from its write head'
)


class Start(NamedTuple):
    """Begin of the read of a journal.

    Attributes:
        offset: offset at which it begins; -1 for the write head.
        continues: an earlier read of this reader ended there.
        is_new: the position that was given is not of this journal.
    """

    offset: int
    continues: bool = False
    is_new: bool = False


class Positions:
    """Positions of the journals of one reader.

    Args:
        plan: what to read.
        transport: how to reach the journals.
        patience_s: time for which attempts to find a write head may fail, in seconds.
    """

    def __init__(self, plan: Plan, transport: Transport, patience_s: float) -> None:
        self._plan = plan
        self._transport = transport
        self._patience_s = patience_s
        # By name and create revision: where the read of a journal that left the listing ended.
        self._ended_at: dict[tuple[str, int], int] = {}
        self._revisions = dict(plan.revisions)
        # Positions that the user gave, and that were not verified yet.
        self._unverified = set() if plan.is_verified else {*plan.offsets, *plan.revisions}

    def ended(self, name: str, revision: int, offset: int) -> None:
        """Note where a read of a journal ended."""
        self._ended_at[name, revision] = offset

    async def start(self, name: str, revision: int, *, is_new: bool) -> Start:
        """Return where the read of a journal begins.

        Args:
            name: name of the journal.
            revision: its create revision; 0 if it is not known.
            is_new: True if it was created after reading began: it is read from its begin.

        Raises:
            CheckpointMismatchError: the position is of an earlier journal of that name.
            OffsetNotYetAvailableError: the position is behind the write head.
            GazetteError: the write head could not be found.
        """
        before = self._revisions.get(name, 0)
        self._revisions[name] = revision or before
        is_other = bool(before and revision) and before != revision
        ended_at = self._ended_at.get((name, revision))
        if ended_at is not None:
            return Start(ended_at, continues=True)
        offset = self._plan.offsets.get(name, 0 if is_new else self._plan.begin)
        if name not in self._unverified:
            return Start(0 if is_other else offset)
        self._unverified.discard(name)
        missing = (
            _mismatch(name, offset) if is_other else await self._behind_write_head(name, offset)
        )
        if missing is None:
            return Start(offset)
        if self._plan.on_missing == "raise":
            raise missing
        _log.warning("%s; reading begins at its %s", missing, self._plan.on_missing)
        return Start(0 if self._plan.on_missing == "begin" else -1, is_new=True)

    async def _behind_write_head(self, name: str, offset: int) -> GazetteError | None:
        """Return an error if an offset is behind the write head of its journal."""
        if offset <= 0:
            return None
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + HEAD_LAG_MAX_S
        attempt = 0
        while (head := await write_head(self._transport, name, self._patience_s)) < offset:
            if loop.time() >= ends_at:
                return OffsetNotYetAvailableError(
                    f"offset {offset} is behind the write head, which is {head}: content was lost,"
                    f" or the offset is of another journal; {ON_MISSING}",
                    journal=name,
                    offset=offset,
                )
            await pause(attempt)
            attempt += 1
        return None


def _mismatch(name: str, offset: int) -> GazetteError:
    return CheckpointMismatchError(
        f"{name}: the checkpoint is of an earlier journal of this name, which was deleted;"
        f" {ON_MISSING}; if the content is the same, give offsets=checkpoint.offsets instead",
        journal=name,
        offset=offset,
    )
