"""Timers of a shard: each calls the application's ``on_timer`` once, when its time has come.

A timer is state. It is set, moved, cancelled and fired within transactions, and is committed and
recovered with the store, so that what it changes is committed exactly once. Those that are overdue
after a fail-over fire at once, in the order of their times, then of their keys.

A transaction fires the timers that were due when it began, before its messages. A timer that it
sets fires in a later transaction. So each transaction ends, also where a timer always sets itself.

Of a store's timers only the nearest are in memory, all up to a time: the *window*. What the open
transaction changes is beside it, and joins it when the transaction has been committed locally.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from datetime import datetime
from typing import Any, NamedTuple, TypeAlias

from gazette_sdk.errors import ConfigurationError, ValidationError
from gazette_sdk.shard.stores.base import (
    TIMER_KEY_BYTES_MAX,
    UNCOMMITTED_PUTS_MAX,
    TimerRow,
    TimerStore,
)
from gazette_sdk.shard.stores.codec import any_key

WINDOW_COUNT = 1024
"""Timers that are read from the store at once; twice as many are in memory at most."""

CLOCK_CHECK_S = 60.0
"""Bound of a wait for a timer: after it, a wall clock that was set is noticed."""

TIME_END_S = 253_402_300_800.0
"""First time of the year 10,000, in Unix seconds: timers are before it."""

SECOND_US = 1_000_000

_MISSING: Any = object()

TimerKey: TypeAlias = str | bytes | int | tuple[str | bytes | int, ...]
"""Key of a timer: there is one timer for each."""


class Timer(NamedTuple):
    """Timer that fires.

    Attributes:
        key: its key, as it was set.
        at: the time for which it was set, in Unix seconds, exact to a microsecond.
    """

    key: Any
    at: float


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
        self._now_us = 0
        self._changes: dict[bytes, int | None] = {}
        # By key: what the changes and the window had before the record that is consumed; None if
        # that is not noted.
        self._former: dict[bytes, tuple[Any, int | None]] | None = None
        # The window: all timers of the store up to `_end` (None: all there are) that the open
        # transaction has not changed. The heap may have rows that are no more in it.
        self._window: dict[bytes, int] = {}
        self._heap: list[TimerRow] = []
        self._end: TimerRow | None = None

    # ------------------------------------------------------------------- hooks

    def set(
        self, key: TimerKey, *, after_s: float | None = None, at: float | datetime | None = None
    ) -> None:
        """Set a timer, or move the one of this key.

        Args:
            key: str, bytes, int, or a tuple of them; ``on_timer`` gets it.
            after_s: seconds from ``txn.now``, 0 or more.
            at: instead, the time: in Unix seconds, or with a time zone. A time that has passed is
                due at once, in the next transaction.

        Raises:
            ValidationError: the key or the time cannot be used.
            ConfigurationError: the application has no function for timers.
            ClosedError: no transaction is open.
        """
        if (after_s is None) == (at is None):
            raise ValidationError("a timer has one time; pass after_s=, or at=")
        due_us = self._now_us + _microseconds(after_s) if at is None else _microseconds(at)
        if due_us >= TIME_END_S * SECOND_US:
            raise ValidationError("a timer is set for the year 10,000 or later; use seconds")
        self._change(key, due_us)

    def cancel(self, key: TimerKey) -> None:
        """Remove the timer of a key, if there is one.

        Raises:
            ValidationError: the key cannot be used.
            ConfigurationError: the application has no function for timers.
            ClosedError: no transaction is open.
        """
        self._change(key, None)

    def _change(self, key: TimerKey, due_us: int | None) -> None:
        self._check_open()
        if self._rows is None:
            raise ConfigurationError(
                "the application has no function for timers; decorate one with"
                " `@APPLICATION.timer`, or define `on_timer`"
            )
        try:
            encoded = any_key.encode(key)
        except (TypeError, OverflowError, UnicodeError) as error:
            raise ValidationError(f"{key!r} cannot be the key of a timer: {error}") from error
        if len(encoded) > TIMER_KEY_BYTES_MAX:
            raise ValidationError(
                f"the key of a timer has {len(encoded)} bytes; use one of at most"
                f" {TIMER_KEY_BYTES_MAX} bytes"
            )
        if self._former is not None:
            former = self._changes.get(encoded, _MISSING), self._window.get(encoded)
            self._former.setdefault(encoded, former)
        self._window.pop(encoded, None)
        self._changes[encoded] = due_us

    # ---------------------------------------------------------------- consumer

    @property
    def is_full(self) -> bool:
        """The open transaction has changed ``UNCOMMITTED_PUTS_MAX`` timers."""
        return len(self._changes) >= UNCOMMITTED_PUTS_MAX

    def restore(self) -> None:
        """Read the nearest timers of the store, which was just restored.

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
        self._rows = store
        self._changes.clear()
        self._former = None
        self._read(None)

    def begin(self, now: float) -> None:
        """Begin a transaction, which fires what is due by now.

        Args:
            now: Unix seconds.
        """
        self._now_us = round(now * SECOND_US)

    def next_due(self) -> Timer | None:
        """Return the next timer that was due when the transaction began, and remove it.

        Raises:
            ShardStoreError: the store failed.
        """
        row = self._nearest()
        if row is None or row.due_us > self._now_us:
            return None
        heapq.heappop(self._heap)
        del self._window[row.key]
        self._changes[row.key] = None
        return Timer(any_key.decode(row.key), row.due_us / SECOND_US)

    def begin_record(self) -> None:
        """Begin a record, whose changes may be undone."""
        self._former = {}

    def undo_record(self) -> None:
        """Undo the changes since the last ``begin_record``."""
        for key, (change, due_us) in (self._former or {}).items():
            if change is _MISSING:
                del self._changes[key]
            else:
                self._changes[key] = change
            if due_us is not None:
                self._window[key] = due_us
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
        changes, self._changes = self._changes, {}
        self._former = None
        window, heap, end = self._window, self._heap, self._end
        for key, due_us in changes.items():
            if due_us is not None and (end is None or (due_us, key) <= end):
                window[key] = due_us
                heapq.heappush(heap, TimerRow(due_us, key))
        if len(window) > 2 * WINDOW_COUNT:
            rows = (TimerRow(due_us, key) for key, due_us in window.items())
            self._heap = heapq.nsmallest(WINDOW_COUNT, rows)
            self._end = self._heap[-1]
            self._window = {key: due_us for due_us, key in self._heap}
        elif len(heap) > 4 * WINDOW_COUNT:
            self._heap = sorted(TimerRow(due_us, key) for key, due_us in window.items())

    @property
    def next_at(self) -> float:
        """Time of the next timer, in Unix seconds; infinity if there is none.

        Only while no transaction is open.

        Raises:
            ShardStoreError: the store failed.
        """
        row = self._nearest()
        return math.inf if row is None else row.due_us / SECOND_US

    def wait_s(self, now: float) -> float:
        """Return the seconds until the next timer is due: 0 if one is, infinity if there is none.

        It is at most :data:`CLOCK_CHECK_S` otherwise. Only while no transaction is open.

        Args:
            now: Unix seconds.

        Raises:
            ShardStoreError: the store failed.
        """
        row = self._nearest()
        if row is None:
            return math.inf
        wait_us = row.due_us - round(now * SECOND_US)
        return min(max(0.0, wait_us / SECOND_US), CLOCK_CHECK_S)

    def _nearest(self) -> TimerRow | None:
        """Return the nearest timer that the open transaction has not changed."""
        while True:
            while self._heap:
                row = self._heap[0]
                if self._window.get(row.key) == row.due_us:
                    return row
                heapq.heappop(self._heap)  # it was changed
            if self._end is None:
                return None
            self._read(self._end)

    def _read(self, after: TimerRow | None) -> None:
        """Read the next timers of the store as the window."""
        if self._rows is None:
            return
        rows = self._rows.timers_after(after, WINDOW_COUNT)
        self._end = rows[-1] if len(rows) == WINDOW_COUNT else None
        self._heap = [row for row in rows if row.key not in self._changes]
        self._window = {key: due_us for due_us, key in self._heap}


def _microseconds(seconds: object) -> int:
    """Return seconds, or those of a datetime since 1970, in microseconds.

    Raises:
        ValidationError: they are no time, or no time of a timer.
    """
    if isinstance(seconds, datetime) and seconds.tzinfo is not None:
        seconds = seconds.timestamp()
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise ValidationError(
            f"a timer's time is {seconds!r}; use seconds, or a datetime with a time zone"
        )
    if not 0 <= seconds < TIME_END_S:  # NaN, too
        raise ValidationError(
            f"a timer's time is {seconds!r} seconds; use 0 or more, and a time before the year"
            " 10,000"
        )
    return round(seconds * SECOND_US)
