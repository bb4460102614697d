"""Timers of a shard, each of which fires once, and the event time that fires those of its clock.

A timer is state. It is set, moved, cancelled and fired within transactions, and is committed and
recovered with the store, so that what it changes is committed exactly once. Those that are overdue
after a fail-over fire at once, in the order of their times, then of their keys.

Timers of *processing time* fire by the wall clock: a transaction fires those that were due when it
began, before its messages, and one that it sets fires in a later transaction. So each transaction
ends, also where a timer always sets itself. Timers of *event time* fire by the watermark,
before the next message, wherever transactions end.

Of a store's timers only the nearest of each clock are in memory, all up to a time: the *window*.

Each message has an *event time*, which the application declares, and a *publication time*, that of
its UUID. The *watermark* of a source (:class:`EventTime`) is the greatest of

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

import heapq
import math
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, Literal, NamedTuple, TypeAlias

from gazette_sdk.errors import ConfigurationError, DecodeError, ShardStoreError, ValidationError
from gazette_sdk.message.checkpoint import Checkpoint, SourceTimes
from gazette_sdk.shard.stores.base import (
    EXPIRY_TAG,
    TIMER_KEY_BYTES_MAX,
    UNCOMMITTED_PUTS_MAX,
    TimerRow,
    TimerStore,
)
from gazette_sdk.shard.stores.codec import any_key
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


WINDOW_COUNT = 1024
"""Timers that are read from the store at once; twice as many of a clock are in memory at most."""

CLOCK_CHECK_S = 60.0
"""Bound of a wait for a timer: after it, a wall clock that was set is noticed."""

EVENT_US = 1 << 62
"""Added to times of the event clock in a store, which so keeps them after all other ones."""

_EVENT_TAG, _CLOSING_TAG, _UPDATE_TAG = b"\x05", b"\x06", b"\x07"
"""First bytes of keys of the event clock, and of timers of windows; other keys have none such."""

_EVENT_TAGS = _EVENT_TAG, _CLOSING_TAG
_TAGS_OF_HOOKS = b"\x01", b"\x02", b"\x03", b"\x04", _EVENT_TAG
_WINDOW_TAGS = _CLOSING_TAG, _UPDATE_TAG

_MISSING: Any = object()

TimerKey: TypeAlias = str | bytes | int | tuple[str | bytes | int, ...]
"""Key of a timer: there is one timer for each."""

ClockName: TypeAlias = Literal["processing", "event"]


class Timer(NamedTuple):
    """Timer that fires.

    Attributes:
        key: its key, as it was set.
        at: the time for which it was set, in Unix seconds, exact to a microsecond.
        clock: ``"processing"``, or ``"event"``.
    """

    key: Any
    at: float
    clock: ClockName = "processing"


class WindowTimer(NamedTuple):
    """Timer of a window (`windows`) that fires.

    Attributes:
        row: key of the window in the store.
        closes: the watermark has passed its end; else it is shown as it is.
        due_us: the time for which it was set, in microseconds since 1970.
    """

    row: bytes
    closes: bool
    due_us: int


class ExpiryTimer(NamedTuple):
    """Timer that ends the time to live of an entry of the store.

    Attributes:
        entry: the entry, as the store has named it.
    """

    entry: bytes


class _Window:
    """Nearest timers of one clock: all up to a time.

    Args:
        first: least time of the clock in the store.
        changes: changes of the open transaction, of all clocks. Timers that it has set are added
            by :meth:`put`, when they may fire.
        has_open: the timers that the open transaction has set may fire in it.
    """

    def __init__(self, first: int, changes: Mapping[bytes, int | None], *, has_open: bool) -> None:
        self._first = first
        self._changes = changes
        self._has_open = has_open
        self._store: TimerStore | None = None
        # Rows by key, and in order; the latter may have rows that are no more in the window.
        self._rows: dict[bytes, int] = {}
        self._heap: list[TimerRow] = []
        self._end: TimerRow | None = None  # the window has all rows up to it; None: all there are
        self._left_out: tuple[bytes, ...] = ()
        self.has_left_out = False

    def open(self, store: TimerStore, left_out: tuple[bytes, ...]) -> None:
        """Read the nearest timers of a store that was just restored.

        Args:
            store: the store.
            left_out: first bytes of keys whose timers wait.
        """
        self._store, self._left_out = store, left_out
        self._read(TimerRow(self._first, b""))

    @property
    def is_empty(self) -> bool:
        """There are no timers of the clock, as far as is known."""
        return not self._heap and self._end is None

    def put(self, key: bytes, due_us: int) -> None:
        """Add a timer, if it is near."""
        row = TimerRow(due_us, key)
        if self._end is not None and row > self._end:
            return
        self._rows[key] = due_us
        heapq.heappush(self._heap, row)
        if len(self._rows) > 2 * WINDOW_COUNT:
            self._heap = heapq.nsmallest(WINDOW_COUNT, map(_row, self._rows.items()))
            self._end = self._heap[-1]
            self._rows = {key: due_us for due_us, key in self._heap}
        elif len(self._heap) > 4 * WINDOW_COUNT:
            self._heap = sorted(map(_row, self._rows.items()))

    def remove(self, key: bytes) -> int | None:
        """Remove a timer, and return its time; None if it is not in the window."""
        return self._rows.pop(key, None)

    def nearest(self) -> TimerRow | None:
        """Return the nearest timer; None if there is none.

        Raises:
            ShardStoreError: the store failed.
        """
        while True:
            while self._heap:
                row = self._heap[0]
                if self._rows.get(row.key) == row.due_us:
                    return row
                heapq.heappop(self._heap)  # it was changed
            if self._end is None:
                return None
            self._read(self._end)

    def _read(self, after: TimerRow) -> None:
        """Read the timers after a row as the window."""
        if self._store is None:
            return
        found = self._store.timers_after(after, WINDOW_COUNT)
        found = [row for row in found if row.due_us - self._first < EVENT_US]
        self._end = end = found[-1] if len(found) == WINDOW_COUNT else None
        changes, left_out = self._changes, self._left_out
        if left_out:
            count = len(found)
            found = [row for row in found if not row.key.startswith(left_out)]
            self.has_left_out |= len(found) < count
        rows = [row for row in found if row.key not in changes]
        if self._has_open:
            rows += [
                row
                for row in map(_row, self._changes.items())
                if after < row and (end is None or row <= end)
            ]
        self._rows = {key: due_us for due_us, key in rows}
        self._heap = sorted(rows)


class Timers:
    """Timers of one shard, as its hooks see them in ``txn.timers``.

    The hooks set and cancel timers. The other methods are for the shard's consumer.

    Args:
        store: the shard's store.
        check_open: raises if no transaction is open.
    """

    def __init__(self, store: object, check_open: Callable[[], None]) -> None:
        self._store = store
        self._check_open = check_open
        self._rows: TimerStore | None = None
        self._is_settable = self._has_event_time = False
        self._now_us = 0
        self._changes: dict[bytes, int | None] = {}
        # By key: what the changes and the window had before the record that is consumed; None if
        # that is not noted.
        self._former: dict[bytes, tuple[Any, int | None]] | None = None
        self._processing = _Window(0, self._changes, has_open=False)
        self._event = _Window(EVENT_US, self._changes, has_open=True)

    # ------------------------------------------------------------------- hooks

    def set(
        self,
        key: TimerKey,
        *,
        after_s: float | None = None,
        at: float | datetime | None = None,
        clock: ClockName = "processing",
    ) -> None:
        """Set a timer, or move the one of this key and clock.

        Args:
            key: str, bytes, int, or a tuple of them; ``on_timer`` gets it.
            after_s: seconds from ``txn.now``, 0 or more; of processing time only.
            at: instead, the time: in Unix seconds, or with a time zone. A time that has passed is
                due at once: in the next transaction, or, of event time, before the next message.
            clock: ``"processing"``, or ``"event"``.

        Raises:
            ValidationError: the key, the time or the clock cannot be used.
            ConfigurationError: the application has no function for timers, or no event time.
            ClosedError: no transaction is open.
        """
        if (after_s is None) == (at is None):
            raise ValidationError("a timer has one time; pass after_s=, or at=")
        if at is not None:
            due_us = microseconds(at, _TIME)
        elif clock == "event":
            raise ValidationError("a timer of event time has no after_s=; pass at=")
        else:
            due_us = self._now_us + microseconds(after_s, _TIME)
        self._change(key, clock, _checked(due_us))

    def cancel(self, key: TimerKey, *, clock: ClockName = "processing") -> None:
        """Remove the timer of a key and clock, if there is one.

        Raises:
            ValidationError: the key or the clock cannot be used.
            ConfigurationError: the application has no function for timers, or no event time.
            ClosedError: no transaction is open.
        """
        self._change(key, clock, None)

    def _change(self, key: TimerKey, clock: ClockName, due_us: int | None) -> None:
        self._check_open()
        if not self._is_settable:
            raise ConfigurationError(
                "the application has no function for timers; decorate one with"
                " `@APPLICATION.timer`, or define `on_timer`"
            )
        encoded = _encode(key)
        if clock == "event":
            if not self._has_event_time:
                raise ConfigurationError(
                    "the application has no event time; declare it, as"
                    " event_time=attrgetter('at'), or event_time='published'"
                )
            encoded = _EVENT_TAG + encoded
            due_us = None if due_us is None else due_us + EVENT_US
        elif clock != "processing":
            raise ValidationError(f"clock={clock!r} of a timer; use 'processing' or 'event'")
        self._put(encoded, due_us)

    def _put(self, encoded: bytes, due_us: int | None) -> None:
        window = self._window_of(encoded)
        if self._former is not None:
            former = self._changes.get(encoded, _MISSING), window.remove(encoded)
            self._former.setdefault(encoded, former)
        else:
            window.remove(encoded)
        self._changes[encoded] = due_us
        if window is self._event and due_us is not None:
            window.put(encoded, due_us)

    # ---------------------------------------------------------------- consumer

    @property
    def has_event_timers(self) -> bool:
        """There may be timers of event time; False if there is none."""
        return not self._event.is_empty

    @property
    def has_left_out(self) -> bool:
        """Timers wait, as the application has nothing any more that they call."""
        return self._processing.has_left_out or self._event.has_left_out

    @property
    def is_full(self) -> bool:
        """The open transaction has changed ``UNCOMMITTED_PUTS_MAX`` timers."""
        return len(self._changes) >= UNCOMMITTED_PUTS_MAX

    def set_expiry(self, entry: bytes, after_s: float | None) -> None:
        """Set the timer that ends the time to live of an entry of the store.

        Args:
            entry: the entry, as the store names it.
            after_s: seconds from the begin of the transaction; None to remove it.

        Raises:
            ValidationError: the time cannot be used, or the entry's key is too long.
            ClosedError: no transaction is open.
        """
        self._check_open()
        encoded = EXPIRY_TAG + entry
        is_too_long = len(encoded) >= TIMER_KEY_BYTES_MAX
        if after_s is None:
            if not is_too_long:
                self._put(encoded, None)
            return
        due_us = _checked(self._now_us + microseconds(after_s, "a time to live"))
        if is_too_long:
            raise ValidationError(
                f"a key of {len(entry)} bytes cannot expire, with the name of its family; use one"
                f" of less than {TIMER_KEY_BYTES_MAX - 1} bytes"
            )
        self._put(encoded, due_us)

    def set_closing(self, row: bytes, due_us: int | None) -> None:
        """Set the timer that closes a window.

        Args:
            row: key of the window in the store.
            due_us: event time, in microseconds since 1970; None to remove it.
        """
        self._put(_CLOSING_TAG + row, None if due_us is None else due_us + EVENT_US)

    def set_update(self, row: bytes, after_s: float | None) -> None:
        """Set the timer that shows a window as it is.

        Args:
            row: key of the window in the store.
            after_s: seconds from the begin of the transaction; None to remove it.
        """
        due_us = None if after_s is None else self._now_us + round(after_s * SECOND_US)
        self._put(_UPDATE_TAG + row, due_us)

    def restore(
        self,
        *,
        is_settable: bool = True,
        has_event_time: bool = False,
        has_windows: bool = False,
    ) -> None:
        """Read the nearest timers of the store, which was just restored.

        Args:
            is_settable: the application has a function for the timers that its hooks set. These
                wait else.
            has_event_time: it has event time. Timers of that clock wait else.
            has_windows: it has windows, whose timers wait else.

        Raises:
            ConfigurationError: the store keeps no timers.
            ShardStoreError: the store failed.
        """
        store = self._store
        if not isinstance(store, TimerStore):
            raise ConfigurationError(
                f"{type(store).__name__} keeps no timers; use shard.RocksStore, shard.SqliteStore,"
                " shard.JsonStore or shard.SqlStore, or define the methods of `TimerStore`"
            )
        store.open_timers()
        self._rows, self._is_settable = store, is_settable
        self._has_event_time = has_event_time
        self._changes.clear()
        self._former = None
        left_out: tuple[bytes, ...] = () if has_windows else _WINDOW_TAGS
        left_out += () if has_event_time else (_EVENT_TAG,)
        left_out += () if is_settable else _TAGS_OF_HOOKS
        for window in (self._processing, self._event):
            window.open(store, left_out)

    def begin(self, now: float) -> None:
        """Begin a transaction, which fires what is due by now.

        Args:
            now: Unix seconds.
        """
        self._now_us = round(now * SECOND_US)

    def next_due(self) -> Timer | WindowTimer | ExpiryTimer | None:
        """Return the next timer that was due when the transaction began, and remove it.

        Raises:
            ShardStoreError: the store failed.
        """
        return self._take(self._processing, self._now_us)

    def next_of_event_time(self, watermark_us: int) -> Timer | WindowTimer | ExpiryTimer | None:
        """Return the next timer of event time that is due, and remove it.

        Args:
            watermark_us: the shard's watermark, in microseconds since 1970.

        Raises:
            ShardStoreError: the store failed.
        """
        return self._take(self._event, watermark_us + EVENT_US)

    def _take(self, window: _Window, now_us: int) -> Timer | WindowTimer | ExpiryTimer | None:
        row = window.nearest()
        if row is None or row.due_us > now_us:
            return None
        window.remove(row.key)
        self._changes[row.key] = None
        return timer_of_row(row)

    def begin_record(self) -> None:
        """Begin a record, whose changes may be undone."""
        self._former = {}

    def undo_record(self) -> None:
        """Undo the changes since the last ``begin_record``."""
        for key, (change, due_us) in (self._former or {}).items():
            window = self._window_of(key)
            window.remove(key)
            if due_us is not None:
                window.put(key, due_us)
            if change is _MISSING:
                del self._changes[key]
            else:
                self._changes[key] = change
        self._former = {}

    def put(self) -> None:
        """Put the changes of the open transaction, just before the store commits.

        Raises:
            ShardStoreError: the store failed.
        """
        if self._changes:
            assert self._rows is not None, "timers are changed after they are restored"
            self._rows.put_timers(self._changes)

    def committed(self) -> None:
        """Note that the store has committed the changes."""
        self._former = None
        for key, due_us in self._changes.items():
            if due_us is not None and due_us < EVENT_US:
                self._processing.put(key, due_us)
        self._changes.clear()

    @property
    def next_at(self) -> float:
        """Time of the next timer, in Unix seconds; infinity if there is none.

        Only while no transaction is open.

        Raises:
            ShardStoreError: the store failed.
        """
        row = self._processing.nearest()
        return math.inf if row is None else row.due_us / SECOND_US

    @property
    def next_event_us(self) -> int | None:
        """Time of the next timer of event time, in microseconds since 1970; None for none.

        Raises:
            ShardStoreError: the store failed.
        """
        row = self._event.nearest()
        return None if row is None else row.due_us - EVENT_US

    def wait_s(self, now: float) -> float:
        """Return the seconds until the next timer is due: 0 if one is, infinity if there is none.

        It is at most :data:`CLOCK_CHECK_S` otherwise. Only while no transaction is open.

        Args:
            now: Unix seconds.

        Raises:
            ShardStoreError: the store failed.
        """
        row = self._processing.nearest()
        if row is None:
            return math.inf
        wait_us = row.due_us - round(now * SECOND_US)
        return min(max(0.0, wait_us / SECOND_US), CLOCK_CHECK_S)

    def _window_of(self, key: bytes) -> _Window:
        return self._event if key.startswith(_EVENT_TAGS) else self._processing


_TIME = "a timer's time"


def _checked(due_us: int) -> int:
    """Return a time, which is to be before the year 10,000.

    Raises:
        ValidationError: it is not.
    """
    if due_us >= TIME_END_S * SECOND_US:
        raise ValidationError("a timer is set for the year 10,000 or later; use seconds")
    return due_us


def _row(item: tuple[bytes, int | None]) -> TimerRow:
    key, due_us = item
    return TimerRow(-1 if due_us is None else due_us, key)


def _encode(key: TimerKey) -> bytes:
    """Return a key as bytes.

    Raises:
        ValidationError: it cannot be the key of a timer.
    """
    try:
        encoded = any_key.encode(key)
    except (TypeError, OverflowError, UnicodeError) as error:
        raise ValidationError(f"{key!r} cannot be the key of a timer: {error}") from error
    if len(encoded) >= TIMER_KEY_BYTES_MAX:
        raise ValidationError(
            f"the key of a timer has {len(encoded)} bytes; use one of less than"
            f" {TIMER_KEY_BYTES_MAX} bytes"
        )
    return encoded


def timer_of_row(row: TimerRow) -> Timer | WindowTimer | ExpiryTimer:
    """Return the timer of a row of a store.

    Raises:
        ShardStoreError: the row is of no timer.
    """
    due_us, key = row
    is_event = due_us >= EVENT_US
    due_us -= EVENT_US * is_event
    if key.startswith(EXPIRY_TAG):
        return ExpiryTimer(key[1:])
    if key.startswith(_WINDOW_TAGS):
        return WindowTimer(key[1:], key.startswith(_CLOSING_TAG), due_us)
    try:
        decoded = any_key.decode(key.removeprefix(_EVENT_TAG))
    except (DecodeError, ValueError) as error:
        raise ShardStoreError(f"the row {key!r} is of no timer: {error}") from error
    return Timer(decoded, due_us / SECOND_US, "event" if is_event else "processing")
