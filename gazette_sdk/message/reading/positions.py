"""Offsets at which the reads of journals begin, and whether the journals have them."""

from __future__ import annotations

import asyncio
import logging
from datetime import datetime
from typing import NamedTuple

from gazette_sdk.errors import (
    CheckpointMismatchError,
    GazetteError,
    JournalNotFoundError,
    OffsetNotYetAvailableError,
    SuspendedError,
)
from gazette_sdk.message.reading.plan import Plan
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.backoff import pause
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.journal_reader import begin_mod_time_of, read_metadata

__all__ = ["HEAD_LAG_MAX_S", "Positions", "Start"]

_log = logging.getLogger(__name__)

HEAD_LAG_MAX_S = 5.0
"""Time for which an offset behind the write head is looked up again before it is missing. A broker
that just took the journal over may not have listed all its fragments."""

ATTEMPTS_MAX = 5
"""Attempts to find where a journal begins or ends. If none is answered, the read itself meets the
same failure, and has its own patience."""

ANSWER_TIMEOUT_S = 5.0
"""Time for each of them."""


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
    """

    def __init__(self, plan: Plan, transport: Transport) -> None:
        self._plan = plan
        self._transport = transport
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
            if is_other or is_new or name in self._plan.offsets or self._plan.since is None:
                return Start(0 if is_other else offset)
            return Start(await self._offset_since(name, self._plan.since))
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
        while True:
            found = await self._metadata(name, -1)
            head = 0 if found is None else max(found.write_head, found.offset)
            if found is None or head >= offset:
                return None
            if loop.time() >= ends_at:
                return OffsetNotYetAvailableError(
                    f"offset {offset} is behind the write head, which is {head}:"
                    " content was lost, or the offset is of another journal",
                    journal=name,
                    offset=offset,
                )
            await pause(1)

    async def _offset_since(self, name: str, since: datetime) -> int:
        """Return an offset before the first message since a time, by the age of fragments.

        If a broker does not answer, it is 0: decoders leave out earlier messages in any case.
        """
        found = await self._metadata(name, 0, begin_mod_time=begin_mod_time_of(since))
        return 0 if found is None else found.offset

    async def _metadata(
        self, name: str, offset: int, *, begin_mod_time: int = 0
    ) -> pb.ReadResponse | None:
        """Return metadata of a journal; None if it is suspended, or no broker answers."""
        for attempt in range(ATTEMPTS_MAX):
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    return await read_metadata(
                        self._transport, name, offset, begin_mod_time=begin_mod_time
                    )
            except (SuspendedError, JournalNotFoundError):
                break
            except (GazetteError, TimeoutError):
                await pause(attempt)
        return None


def _mismatch(name: str, offset: int) -> GazetteError:
    return CheckpointMismatchError(
        f"{name}: the checkpoint is of an earlier journal of this name, which was deleted;"
        ' Reader(on_missing="begin") reads it from its begin, and on_missing="end" from its write'
        " head; if the content is the same, give offsets=checkpoint.offsets instead",
        journal=name,
        offset=offset,
    )
