"""Lag of shards: what they have not read of their sources, in bytes and in time.

The lag in time is the age of the first message that is not read: its UUID has its publication time.
:func:`head_of` and :func:`published_at` ask brokers for one source. :class:`ShardLags` measures the
shards of a process, while somebody asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from gazette_sdk.errors import DeadlineExceededError, GazetteError, JournalNotFoundError
from gazette_sdk.journals.changes import list_named
from gazette_sdk.message.message_cutter import MessageCutter, records_of
from gazette_sdk.protocol.names import strip_meta
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.journal_reader import read_metadata
from gazette_sdk.transport.loop import LoopSlices, for_each

ANSWER_TIMEOUT_S = 8.0
"""The lag is unknown if a primary or a broker does not answer for this long: a primary that is
still recovering answers when it is done."""

PERIOD_S = 2.0
"""Time for which what was measured is used again."""

MEASURE_S = 0.8
"""Bound of a measurement. Other processes wait a second for its result."""

SOURCES_MAX = 256
"""Sources of which brokers are asked in one measurement, those of the oldest knowledge first."""

_log = logging.getLogger(__name__)


async def head_of(transport: Transport, journal: str) -> int:
    """Return the write head of a journal.

    Raises:
        GazetteError: no broker has answered, in time or at all.
    """
    with _in_time():
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            return (await read_metadata(transport, journal, -1)).write_head


async def published_at(transport: Transport, journal: str, offset: int) -> float | None:
    """Return the publication time of the message at an offset, in Unix seconds.

    Args:
        transport: how to reach the journal.
        journal: its name, without metadata.
        offset: where the message begins.

    Returns:
        None if there is no message, or it has no UUID that can be found without its class.

    Raises:
        GazetteError: no broker has answered, in time or at all; or the journal does not exist.
    """
    with _in_time():
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            listed = await list_named(transport, [journal])
            if journal not in listed:
                raise JournalNotFoundError("the journal does not exist any more", journal=journal)
            spec = listed[journal].spec
            message, _, found = await records_of(transport, spec, offset, 1)
            return MessageCutter(spec, offset).published_at(message) if found else None


@contextmanager
def _in_time() -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise DeadlineExceededError(
            f"no answer within {ANSWER_TIMEOUT_S:g} s: check the brokers of the journal"
        ) from None


def unread_bytes(head: int | None, offset: int) -> int | None:
    """Return the bytes between an offset and a write head; None if that is unknown."""
    return None if head is None else max(head - offset, 0)


def total(values: Collection[Any], of: Callable[[Collection[Any]], Any]) -> Any:
    """Return the sum or the maximum of values; None if there are none, or one is unknown."""
    return None if not values or None in values else of(values)


@dataclass(frozen=True, slots=True)
class ShardLag:
    """Lag of a shard over all of its sources.

    Attributes:
        bytes: bytes that are not read; None if that is unknown.
        seconds: greatest age of a first unread message, 0 if there is none; None if unknown. While
            the shard reads on, it may be the age of a message that it has read since.
    """

    bytes: int | None
    seconds: float | None


class LedShard(Protocol):
    """Shard that this process leads."""

    @property
    def read_through(self) -> Mapping[str, int]:
        """By source journal, the offset through which committed transactions have read."""

    @property
    def write_heads(self) -> Mapping[str, int] | None:
        """By source, the last write head that a broker reported; None while none is read."""


@dataclass(frozen=True, slots=True)
class _Look:
    """Answer of brokers about one source.

    Attributes:
        offset: offset through which it was read.
        head: its write head; None if there was no answer.
        published_at: publication time of the message at the offset; None if unknown.
        at: when they were asked, in monotonic seconds.
    """

    offset: int
    head: int | None
    published_at: float | None
    at: float

    @property
    def has_unread(self) -> bool:
        """True unless the source was read through."""
        return self.head is None or self.head > self.offset

    def lag(self, offset: int, now: float) -> ShardLag:
        """Return the lag at the offset of today.

        A message after the first unread one of an earlier look is not older.
        """
        left = unread_bytes(self.head, offset)
        if left == 0:
            return ShardLag(0, 0.0)
        if self.published_at is None:
            return ShardLag(left, None)
        return ShardLag(left, max(now - self.published_at, 0.0))


_Place = tuple[str, str]
"""Id of a shard, and name of a source."""


class ShardLags:
    """Lags of the shards that a process leads.

    A reader that waits at a write head learns at once of new content. So brokers are asked only
    about sources that have unread content, and about those of shards that do not read.

    Args:
        transport: how to reach the brokers.
        led: returns the shards that the process leads, by id.
    """

    def __init__(
        self, transport: Transport, led: Callable[[], Awaitable[Mapping[str, LedShard]]]
    ) -> None:
        self._transport = transport
        self._led = led
        self._lock = asyncio.Lock()
        self._measured_at = -math.inf
        self._lags: Mapping[str, ShardLag] = {}
        self._looks: dict[_Place, _Look] = {}

    async def measured(self) -> Mapping[str, ShardLag]:
        """Return the lags by shard, as they were within the last two seconds.

        Shards whose offsets are not known, such as those that recover, have none.
        """
        async with self._lock:
            if time.monotonic() - self._measured_at >= PERIOD_S:
                self._lags = await self._measure()
                self._measured_at = time.monotonic()
            return self._lags

    async def _measure(self) -> Mapping[str, ShardLag]:
        slices, led = LoopSlices(), await self._led()
        looks: dict[_Place, _Look] = {}
        unread: dict[_Place, int] = {}
        for shard, local in led.items():
            heads = local.write_heads
            for journal, offset in local.read_through.items():
                place = shard, journal
                known = self._looks.get(place)
                if not _is_read_through(offset, journal, heads, known):
                    unread[place] = offset
                if known is not None:
                    looks[place] = known
            await slices.rest()
        self._looks = looks
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MEASURE_S):
                await for_each(
                    sorted(unread, key=self._looked_at)[:SOURCES_MAX],
                    lambda place: self._look(place, unread[place]),
                )
        lags: dict[str, ShardLag] = {}
        now = time.time()
        for shard, local in led.items():
            if local.read_through:
                lags[shard] = self._lag(shard, local.read_through, unread, now)
            await slices.rest()
        return lags

    def _looked_at(self, place: _Place) -> float:
        known = self._looks.get(place)
        return -math.inf if known is None else known.at

    async def _look(self, place: _Place, offset: int) -> None:
        """Ask brokers about one source."""
        _, journal = place
        head = published = None
        try:
            head = await head_of(self._transport, journal)
            if head > offset:
                published = await published_at(self._transport, strip_meta(journal), offset)
        except GazetteError as error:
            _log.debug("the lag is unknown", extra={"journal": journal, "err": str(error)})
        self._looks[place] = _Look(offset, head, published, time.monotonic())

    def _lag(
        self, shard: str, read_through: Mapping[str, int], unread: Mapping[_Place, int], now: float
    ) -> ShardLag:
        lags = []
        for journal, offset in read_through.items():
            if (place := (shard, journal)) not in unread:
                lags.append(ShardLag(0, 0.0))
            elif (known := self._looks.get(place)) is None:
                lags.append(ShardLag(None, None))
            else:
                lags.append(known.lag(offset, now))
        return ShardLag(
            total([each.bytes for each in lags], sum), total([each.seconds for each in lags], max)
        )


def _is_read_through(
    offset: int, journal: str, heads: Mapping[str, int] | None, known: _Look | None
) -> bool:
    """Return True if a source has nothing unread, as far as can be said without a call."""
    if heads is None:
        return False
    if journal in heads:
        return heads[journal] <= offset
    return known is not None and known.offset == offset and not known.has_unread
