"""Event time of a shard: watermarks of its sources, which fire timers of the event clock. Pure.

Each message has an *event time*, which the application declares, and a *publication time*, that of
its UUID. The *watermark* of a source is the greatest of

a. the greatest event time consumed, less ``lateness_s``;
b. where the source was quiet for more than ``idle_s``: the time at which it was not any more, less
   ``idle_s`` and ``lateness_s``. That time is the publication time of the next message, or, while
   the source is read through to its write head, the present.

The watermark of a shard is the least of its sources. Watermarks never fall, and are committed with
the transaction.

A quiet source so closes what waits for its watermark, and a replay gives what the live run gave, at
whatever speed: (b) depends on publication times. The present is at most the publication time of the
message that comes next, as far as the clocks of producers agree with that of this machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

from gazette_sdk.errors import ConfigurationError, ValidationError
from gazette_sdk.message.checkpoint import SourceTimes
from gazette_sdk.user_code import call

SECOND_US = 1_000_000

TIME_END_S = 253_402_300_800.0
"""First time of the year 10,000, in Unix seconds: all times of a shard are before it."""

IDLE_S = 10.0
"""Time without a message after which a source is quiet, if nothing else is declared."""

TimeOf = Callable[[Any], Any]
"""Function that returns the event time of a message: Unix seconds, or a datetime with a zone."""


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


class EventTime:
    """Watermarks of a shard.

    Args:
        journals: names of its sources.
        time_of: returns the event time of a message; None for the time of its publication.
        lateness_s: how far out of order event times may be, in seconds.
        idle_s: time after which a source is quiet, in seconds; None for never.

    Attributes:
        watermark_us: of the shard, in microseconds since 1970; 0 before there is one.
    """

    def __init__(
        self,
        journals: Iterable[str],
        time_of: TimeOf | None = None,
        *,
        lateness_s: float = 0.0,
        idle_s: float | None = IDLE_S,
    ) -> None:
        self._time_of = time_of
        self._lateness_us = round(lateness_s * SECOND_US)
        self._idle_us = None if idle_s is None else round(idle_s * SECOND_US)
        self._times = dict.fromkeys(journals, SourceTimes())
        self.watermark_us = 0

    @property
    def times(self) -> dict[str, SourceTimes]:
        """Times of the sources, to be committed."""
        return {journal: times for journal, times in self._times.items() if any(times)}

    def restore(self, times: Mapping[str, SourceTimes]) -> None:
        """Continue at the times of a checkpoint. A journal that is no source is left out."""
        self._times = {journal: times.get(journal, SourceTimes()) for journal in self._times}
        self._raised()

    def read(self, journal: str, published_us: int) -> None:
        """Note a message that is to be consumed.

        Args:
            journal: its source.
            published_us: its publication time, in microseconds since 1970.
        """
        watermark_us, before_us = self._times[journal]
        if published_us <= before_us:
            return
        watermark_us = max(watermark_us, self._quiet_until(published_us, before_us))
        self._raise(journal, SourceTimes(watermark_us, published_us))

    def consumed(self, journal: str, event_us: int) -> None:
        """Note a message that was consumed, and its event time."""
        watermark_us, published_us = self._times[journal]
        if event_us - self._lateness_us > watermark_us:
            self._raise(journal, SourceTimes(event_us - self._lateness_us, published_us))

    def event_us(self, journal: str, message: Any) -> int:
        """Return the event time of a message that was read last of its source, in microseconds.

        Raises:
            ValidationError: it is no time.
            BaseException: that of the function which returns it.
        """
        if self._time_of is None:
            return self._times[journal].published_us
        return microseconds(call(self._time_of, message), "the event time of a message")

    def watermark_us_of(self, journal: str) -> int:
        """Return the watermark of a source, in microseconds since 1970; 0 before there is one."""
        return self._times[journal].watermark_us

    def present(self, journal: str, now_us: int) -> None:
        """Note that a source was read through to its write head, without an open transaction.

        Args:
            journal: the source.
            now_us: a time before which its write head was asked for, in microseconds since 1970.
        """
        watermark_us, published_us = self._times[journal]
        until_us = self._quiet_until(now_us, published_us)
        if until_us > watermark_us:
            self._raise(journal, SourceTimes(until_us, published_us))

    def quiet_sources(self, due_us: int) -> list[str]:
        """Return the sources whose watermarks are before a time."""
        return [journal for journal, times in self._times.items() if times.watermark_us < due_us]

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
        quiet = [self._times[journal].published_us for journal in self.quiet_sources(due_us)]
        return max(latest, max(quiet, default=0) + self._idle_us + 1)

    def _quiet_until(self, now_us: int, before_us: int) -> int:
        """Return the watermark of a source that was quiet from one time to another."""
        if self._idle_us is None or now_us - before_us <= self._idle_us:
            return 0
        return now_us - self._idle_us - self._lateness_us

    def _raise(self, journal: str, times: SourceTimes) -> None:
        self._times[journal] = times
        self._raised()

    def _raised(self) -> None:
        self.watermark_us = min((times.watermark_us for times in self._times.values()), default=0)


def check_event_time(name: str, lateness_s: Any, idle_s: Any) -> None:
    """Refuse declared durations that are none.

    Raises:
        ConfigurationError: one is negative, or no number.
    """
    for option, value in (("lateness_s", lateness_s), ("idle_s", idle_s)):
        if value is None and option == "idle_s":
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value < math.inf:
            raise ConfigurationError(
                f"{name}: {option}={value!r}; use a number of seconds, 0 or more"
                + (", or None for never" if option == "idle_s" else "")
            )
