"""Event time of a shard: watermarks of its sources, which fire timers of the event clock. Pure.

Each message has an *event time*, which the application declares, and a *publication time*, that of
its UUID. The *watermark* of a source is the greatest of

a. the greatest event time consumed, less ``lateness_s``;
b. where the source was quiet for more than ``idle_s``: the time at which it was not any more, less
   ``idle_s`` and ``lateness_s``. That time is the publication time of the next message, or, while
   the source is read through to its write head, the present.

The watermark of a shard is the least of its sources. Watermarks never fall, and are committed with
the transaction. A source that the shard begins to read while it has others begins at the watermark
of the shard.

A quiet source so closes what waits for its watermark, and a replay gives what the live run gave, at
whatever speed: (b) depends on publication times. The present is at most the publication time of the
message that comes next, as far as the clocks of producers agree with that of this machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, Literal, TypeAlias

from gazette_sdk.errors import ConfigurationError, ValidationError
from gazette_sdk.message.checkpoint import Checkpoint, SourceTimes
from gazette_sdk.user_code import call

SECOND_US = 1_000_000

TIME_END_S = 253_402_300_800.0
"""First time of the year 10,000, in Unix seconds: all times of a shard are before it."""

IDLE_S = 10.0
"""Time without a message after which a source is quiet, if nothing else is declared."""

TimeOf: TypeAlias = Callable[[Any], Any]
"""Function that returns the event time of a message: Unix seconds, or a datetime with a zone."""

DeclaredTime: TypeAlias = TimeOf | Literal["published"]
"""Declaration of event time: a function, or that of the publication."""


def microseconds(seconds: object, what: str) -> int:
    """Return seconds, or those of a datetime since 1970, in microseconds.

    Args:
        seconds: the seconds, 0 or more, before the year 10,000.
        what: what they are, for errors.

    Raises:
        ValidationError: they are no such time.
    """
    if isinstance(seconds, datetime) and seconds.tzinfo is not None:
        seconds = seconds.timestamp()
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise ValidationError(f"{what} is {seconds!r}; use seconds, or a datetime with a time zone")
    if not 0 <= seconds < TIME_END_S:  # NaN, too
        raise ValidationError(
            f"{what} is {seconds!r} seconds; use 0 or more, and a time before the year 10,000"
        )
    return round(seconds * SECOND_US)


def is_seconds(value: Any) -> bool:
    """Return True if a declared duration is a finite number of seconds, 0 or more."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value < math.inf


class _Source:
    """Times of one source, as of :class:`SourceTimes`."""

    __slots__ = ("published_us", "watermark_us")

    def __init__(self) -> None:
        self.watermark_us = self.published_us = 0


class EventTime:
    """Watermarks of a shard.

    Args:
        journals: names of its sources.
        declared: event time of messages; None for that of their publication.
        lateness_s: how far out of order event times may be, in seconds.
        idle_s: time after which a source is quiet, in seconds; None for never.

    Attributes:
        watermark_us: of the shard, in microseconds since 1970; 0 before there is one.
    """

    def __init__(
        self,
        journals: Iterable[str],
        declared: DeclaredTime | None = None,
        *,
        lateness_s: float = 0.0,
        idle_s: float | None = IDLE_S,
    ) -> None:
        self._time_of = None if isinstance(declared, str) else declared
        self._lateness_us = round(lateness_s * SECOND_US)
        self._idle_us = None if idle_s is None else round(idle_s * SECOND_US)
        self._sources = {journal: _Source() for journal in journals}
        self.watermark_us = 0

    @property
    def times(self) -> dict[str, SourceTimes]:
        """Times of the sources, to be committed."""
        times = {
            journal: SourceTimes(source.watermark_us, source.published_us)
            for journal, source in self._sources.items()
        }
        return {journal: each for journal, each in times.items() if any(each)}

    def restore(self, journals: Iterable[str], checkpoint: Checkpoint) -> None:
        """Continue at the times of a checkpoint.

        Args:
            journals: names of the sources from now on.
            checkpoint: has the times, and the offsets of the sources that were read before.
        """
        self._sources = {journal: _Source() for journal in journals}
        for journal, source in self._sources.items():
            times = checkpoint.times.get(journal, SourceTimes())
            source.watermark_us, source.published_us = times
        read = self._sources.keys() & (checkpoint.offsets.keys() | checkpoint.times.keys())
        least_us = min((self._sources[journal].watermark_us for journal in read), default=0)
        for journal in self._sources.keys() - read:
            self._sources[journal].watermark_us = least_us
        self.watermark_us = self._least_us()

    def read(self, journal: str, published_us: int) -> None:
        """Note a message that is to be consumed.

        Args:
            journal: its source.
            published_us: its publication time, in microseconds since 1970.
        """
        source = self._sources[journal]
        before_us = source.published_us
        if published_us > before_us:
            source.published_us = published_us
            self._raise_quiet(source, published_us, before_us)

    def consumed(self, journal: str, event_us: int) -> None:
        """Note a message that was consumed, and its event time."""
        self._raise(self._sources[journal], event_us - self._lateness_us)

    def event_us(self, journal: str, message: Any) -> int:
        """Return the event time of a message that was read last of its source, in microseconds.

        Raises:
            ValidationError: it is no time.
            BaseException: that of the function which returns it.
        """
        if self._time_of is None:
            return self._sources[journal].published_us
        return microseconds(call(self._time_of, message), "the event time of a message")

    def watermark_us_of(self, journal: str) -> int:
        """Return the watermark of a source, in microseconds since 1970; 0 before there is one."""
        return self._sources[journal].watermark_us

    def present(self, journal: str, now_us: int) -> None:
        """Note that a source was read through to its write head, without an open transaction.

        Args:
            journal: the source.
            now_us: a time before which its write head was asked for, in microseconds since 1970.
        """
        source = self._sources[journal]
        self._raise_quiet(source, now_us, source.published_us)

    def quiet_sources(self, due_us: int) -> list[str]:
        """Return the sources whose watermarks are before a time."""
        sources = self._sources.items()
        return [journal for journal, source in sources if source.watermark_us < due_us]

    def quiet_at_us(self, due_us: int) -> float:
        """Return the time at which the watermark reaches another one if all sources are quiet.

        Args:
            due_us: the other time, in microseconds since 1970.

        Returns:
            Microseconds since 1970; infinity for never.
        """
        if self._idle_us is None:
            return math.inf
        latest = due_us + self._idle_us + self._lateness_us
        quiet = [self._sources[journal].published_us for journal in self.quiet_sources(due_us)]
        return max(latest, max(quiet, default=0) + self._idle_us + 1)

    def _raise_quiet(self, source: _Source, now_us: int, before_us: int) -> None:
        """Raise the watermark of a source that was quiet from one time to another."""
        idle_us = self._idle_us
        if idle_us is not None and now_us - before_us > idle_us:
            self._raise(source, now_us - idle_us - self._lateness_us)

    def _raise(self, source: _Source, watermark_us: int) -> None:
        """Raise the watermark of a source, if it is higher."""
        before_us = source.watermark_us
        if watermark_us > before_us:
            source.watermark_us = watermark_us
            if before_us == self.watermark_us:  # it was the least one
                self.watermark_us = self._least_us()

    def _least_us(self) -> int:
        return min([source.watermark_us for source in self._sources.values()], default=0)


def check_event_time(name: str, declared: Any, lateness_s: Any, idle_s: Any) -> None:
    """Refuse a declared event time that is none, and declared durations.

    Raises:
        ConfigurationError: it is no function; or a duration is negative, or no number.
    """
    if not (declared is None or declared == "published" or callable(declared)):
        raise ConfigurationError(
            f"{name}: event_time={declared!r}; use a function of the message, as"
            " attrgetter('at'), or 'published'"
        )
    for option, value in (("lateness_s", lateness_s), ("idle_s", idle_s)):
        if value is None and option == "idle_s":
            continue
        if not is_seconds(value):
            raise ConfigurationError(
                f"{name}: {option}={value!r}; use a number of seconds, 0 or more"
                + (", or None for never" if option == "idle_s" else "")
            )
