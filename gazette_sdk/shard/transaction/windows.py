"""Windows of event time: messages gathered by key and time, until the watermark closes them.

An application declares one kind: :class:`Tumbling`, :class:`Hopping` or :class:`Session`. Its
handler gets the open windows of a message, ``txn.windows(message)``, and changes their states. A
window is kept by the store, and closed by a timer of event time: once the shard's watermark has
passed its end and ``grace_s``.

A message is *late* for a window which the watermark of its own source has passed: the same messages
are late in a replay, however several sources are interleaved. Such a window may be open still. And
a window is closed only when no message can be in it that is not late.
"""

from __future__ import annotations

import itertools
import operator
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from gazette_sdk.errors import (
    ConfigurationError,
    DecodeError,
    ShardStoreError,
    UnreadableStateError,
    ValidationError,
)
from gazette_sdk.shard.stores.base import (
    TIMER_KEY_BYTES_MAX,
    UNCOMMITTED_BYTES_MAX,
    UNCOMMITTED_PUTS_MAX,
    RowStore,
)
from gazette_sdk.shard.stores.codec import Codec, any_key, checked, raw, value_codec
from gazette_sdk.shard.transaction.timers import (
    SECOND_US,
    EventTime,
    Timers,
    WindowTimer,
    is_seconds,
)
from gazette_sdk.user_code import call

V = TypeVar("V")

KeyOf: TypeAlias = Callable[[Any], Any]
"""Function that returns the key of a message: str, bytes, int, or a tuple of them."""

HOPS_MAX = 1000
"""Bound of the hopping windows that one message belongs to."""

CACHED_BYTES = 16 << 20
"""Size of the windows that are kept decoded between transactions, at most: that of their encoded
forms, and of the objects."""

_OBJECT_BYTES = 200
_END = b"\x00"
_SIGN = 1 << 63
_ROW = struct.Struct(">QQ")
_NO_END = (1 << 64) - 1
_HEADER = struct.Struct(">QQB")
_HAS_STATE, _HAS_UPDATE = 1, 2
_SCALARS = int, float, str, bool


# ------------------------------------------------------------------ declarations


@dataclass(frozen=True, slots=True)
class Tumbling:
    """Windows of one size, each of which begins where the one before it ends.

    They begin at multiples of the size since 1970, in UTC.

    Attributes:
        size_s: their size, in seconds.
        grace_s: time after its end, in event time, for which a window stays open for late messages.
        by: returns the key of a message; None for windows of all messages.
        state: type of their states, or its codec; as the values of a
            :class:`~gazette_sdk.shard.stores.rocks_store.RocksStore`.

    Raises:
        ConfigurationError: a value cannot be used.
    """

    size_s: float
    _: KW_ONLY
    grace_s: float = 0.0
    by: KeyOf | None = None
    state: Any = object

    def __post_init__(self) -> None:
        _check(self, "size_s", self.size_s)

    @property
    def step_s(self) -> float:
        """Time from the begin of one window to that of the next, in seconds."""
        return self.size_s


@dataclass(frozen=True, slots=True)
class Hopping:
    """Windows of one size that overlap: one begins every ``step_s``.

    Attributes:
        size_s: their size, in seconds.
        step_s: time from the begin of one to that of the next, in seconds; at most the size.
        grace_s: as of :class:`Tumbling`, and ``by`` and ``state``, too.

    Raises:
        ConfigurationError: a value cannot be used.
    """

    size_s: float
    step_s: float
    _: KW_ONLY
    grace_s: float = 0.0
    by: KeyOf | None = None
    state: Any = object

    def __post_init__(self) -> None:
        _check(self, "size_s", self.size_s)
        _check(self, "step_s", self.step_s)
        if not self.size_s / HOPS_MAX <= self.step_s <= self.size_s:
            raise ConfigurationError(
                f"Hopping: step_s={self.step_s!r} with size_s={self.size_s!r}; use at most the"
                f" size, and so much that a message is in at most {HOPS_MAX} windows"
            )


@dataclass(frozen=True, slots=True)
class Session:
    """Windows of activity: a message that comes within ``gap_s`` of another one is in its window.

    A window ends ``gap_s`` after its last message. One message may join two windows, whose states
    are merged. It is closed ``gap_s`` later: until then a message may come that joins it, and that
    is not late, as it would not be for a window of its own.

    Attributes:
        gap_s: time without a message that ends a window, in seconds.
        merge: returns the state of two windows that become one, of the earlier and the later state;
            neither is None. By default their sum.
        grace_s: as of :class:`Tumbling`, and ``by`` and ``state``, too.

    Raises:
        ConfigurationError: a value cannot be used.
    """

    gap_s: float
    _: KW_ONLY
    grace_s: float = 0.0
    by: KeyOf | None = None
    state: Any = object
    merge: Callable[[Any, Any], Any] = operator.add

    def __post_init__(self) -> None:
        _check(self, "gap_s", self.gap_s)
        if not callable(self.merge):
            raise ConfigurationError(f"Session: merge={self.merge!r} is no function of two states")


Declared: TypeAlias = Tumbling | Hopping | Session
"""Declaration of an application's windows."""


def _check(declared: Any, option: str, value: Any) -> None:
    kind = type(declared).__name__
    for name, seconds, least_us in ((option, value, 1), ("grace_s", declared.grace_s, 0)):
        if not (is_seconds(seconds) and round(seconds * SECOND_US) >= least_us):
            raise ConfigurationError(
                f"{kind}: {name}={seconds!r}; use a number of seconds"
                + (", 0 or more" if least_us == 0 else ", more than 0")
            )
    if declared.by is not None and not callable(declared.by):
        raise ConfigurationError(
            f"{kind}: by={declared.by!r} is no function; use one of the message, as"
            " attrgetter('zone')"
        )
    value_codec(declared.state)


# ----------------------------------------------------------------------- windows


class Window(Generic[V]):
    """Messages of one key within a span of event time.

    Attributes:
        key: the key of its messages; None of windows of all messages.
        count: number of its messages.
        state: the application's value of it, of the declared type, to be assigned or changed; None
            at first.
        begin_us: its begin, in microseconds since 1970.
        end_us: its end, likewise.
        row: its key in the store.
        size: bytes of its last encoded form, and of the object.
        has_update: a timer is set that shows it.
    """

    __slots__ = ("begin_us", "count", "end_us", "has_update", "key", "row", "size", "state")

    def __init__(self, key: Any, begin_us: int, end_us: int, row: bytes = b"") -> None:
        self.key = key
        self.count = 0
        self.state: V | None = None
        self.begin_us = begin_us
        self.end_us = end_us
        self.row = row
        self.size = _OBJECT_BYTES
        self.has_update = False

    @property
    def begin(self) -> float:
        """Its begin, in Unix seconds; of a session the event time of its first message."""
        return self.begin_us / SECOND_US

    @property
    def end(self) -> float:
        """Its end, which is no more in it, in Unix seconds."""
        return self.end_us / SECOND_US

    def __repr__(self) -> str:
        return f"<window of {self.key!r} from {self.begin} to {self.end}, count={self.count}>"


class RowReader(Protocol):
    """View of a store, as far as windows are read from it."""

    def rows_of(self, prefix: bytes) -> Sequence[tuple[bytes, bytes]]:
        """Return the windows whose keys have a prefix, in their order."""


def windows_of_key(view: RowReader, key: Any, codec: Codec[Any]) -> list[Window[Any]]:
    """Return the open windows of a key, in their order.

    Args:
        view: where they are read.
        key: the key; None for windows of all messages.
        codec: of their states.

    Raises:
        ValidationError: it cannot be the key of a window.
        ShardStoreError: the store failed, or a state is not of the declared type.
    """
    return [_decode(key, row, encoded, codec) for row, encoded in view.rows_of(_encode_key(key))]


def window_of_row(row: bytes, encoded: bytes) -> Window[bytes]:
    """Return the window of a row, with its state as it is stored.

    Raises:
        ShardStoreError: the row is of no window.
    """
    try:
        key, _ = _parse_row(row)
        return _decode(key, row, encoded, raw)
    except (DecodeError, ValueError, struct.error) as error:
        raise ShardStoreError(f"the row {row!r} is of no window: {error}") from error


def window_rows(key: Any) -> bytes:
    """Return the prefix of the rows of a key's windows.

    Raises:
        ValidationError: it cannot be the key of a window.
    """
    return _encode_key(key)


def state_codec(declared: Declared) -> Codec[Any]:
    """Return the codec of the states of windows.

    States are kept decoded, so one that would be read as another value is refused even if that has
    all of it, as a dict has of an object.
    """
    codec = checked(value_codec(declared.state))
    if declared.state is not object:
        return codec

    def encode(state: Any) -> bytes:
        encoded = codec.encode(state)
        if type(state) not in _SCALARS and codec.decode(encoded) != state:
            raise UnreadableStateError(
                f"a window's state of {type(state).__name__} would be read as another value;"
                " declare its type, as Tumbling(…, state=Stats)"
            )
        return encoded

    return replace(codec, encode=encode)


class Windows(ABC):
    """Open windows of one shard. Its kinds are :class:`FixedWindows` and :class:`SessionWindows`.

    Args:
        declared: the declaration.
        store: the shard's store.
        timers: of the shard; they close the windows.
        times: watermarks of its sources.
        updates_s: time after which a window that has changed is shown to ``on_updated``, in
            seconds; None for never.

    Attributes:
        late: windows for which the message that is consumed was late. Their states are not known.
        is_touched: the record that is consumed was given windows.
    """

    def __init__(
        self,
        declared: Declared,
        store: object,
        timers: Timers,
        times: EventTime,
        *,
        updates_s: float | None = None,
    ) -> None:
        self._by = declared.by
        self._codec = state_codec(declared)
        self._grace_us = self._closing_us = round(declared.grace_s * SECOND_US)
        self._updates_s = updates_s
        self._given_store = store
        self._timers = timers
        self._times = times
        self._store: RowStore
        self._at_us = -1
        self._passed_us = 0
        # Changes of the open transaction by row; None removes one.
        self._changes: dict[bytes, Window[Any] | None] = {}
        self._changed_bytes = self._cached_bytes = 0
        self._encoded: dict[bytes, bytes | None] | None = None
        self.late: list[Window[Any]] = []
        self.is_touched = False

    # ------------------------------------------------------------------- hooks

    def of(self, message: Any) -> list[Window[Any]]:
        """Return the open windows of the message that is consumed, the earliest first.

        Args:
            message: it, or another one for the key: its event time counts in any case.

        Raises:
            ValidationError: no message is consumed; or its key cannot be the key of a window.
            ShardStoreError: the store failed.
            BaseException: that of the application's function of the key, or of its ``merge``.
        """
        if self._at_us < 0:
            raise ValidationError("txn.windows is for `consume`: other hooks have no event time")
        key = None if self._by is None else call(self._by, message)
        self.is_touched = True
        try:
            hash(key)
        except TypeError as error:
            raise ValidationError(f"{key!r} cannot be the key of a window: {error}") from error
        found = self._find(key, self._at_us, self._passed_us)
        changes = self._changes
        for window in found:
            window.count += 1
            row = window.row
            if row not in changes:
                self._changed_bytes += window.size
            changes[row] = window
            if self._updates_s is not None and not window.has_update:
                window.has_update = True
                self._timers.set_update(row, self._updates_s)
        return found

    @abstractmethod
    def _find(self, key: Any, at_us: int, passed_us: int) -> list[Window[Any]]:
        """Return the open windows of a key and an event time, and add others to ``late``.

        Args:
            key: the key.
            at_us: the event time, in microseconds since 1970.
            passed_us: windows that end by then are closed.
        """

    @abstractmethod
    def _known(self, row: bytes) -> Window[Any] | None:
        """Return a window that is known already; None if it is not."""

    @abstractmethod
    def _forget(self, window: Window[Any]) -> None:
        """Forget a window, which is closed."""

    @abstractmethod
    def _forget_all(self) -> None:
        """Forget all windows."""

    @abstractmethod
    def _forget_half(self) -> None:
        """Forget half of the windows, those that were known first; correct the size of the rest."""

    # ---------------------------------------------------------------- consumer

    @property
    def is_full(self) -> bool:
        """The open transaction has changed ``UNCOMMITTED_PUTS_MAX`` windows, or so many bytes."""
        return (
            len(self._changes) >= UNCOMMITTED_PUTS_MAX
            or self._changed_bytes >= UNCOMMITTED_BYTES_MAX
        )

    def restore(self) -> None:
        """Begin with the windows of the store, which was just restored.

        Raises:
            ConfigurationError: the store keeps no windows.
            ShardStoreError: the store failed.
        """
        store = self._given_store
        if not isinstance(store, RowStore):
            raise ConfigurationError(
                f"{type(store).__name__} keeps no windows; use shard.RocksStore, shard.SqliteStore,"
                " shard.JsonStore or shard.SqlStore, or define the methods of `RowStore`"
            )
        store.open_rows()
        self._store = store
        self._forget_all()
        self._cached_bytes = 0
        self._end_changes()
        self.end_message()

    def begin_message(self, journal: str, event_us: int) -> None:
        """Begin a message.

        Args:
            journal: its source.
            event_us: its event time, in microseconds since 1970.
        """
        self._at_us = event_us
        self._passed_us = self._times.watermark_us_of(journal) - self._grace_us
        self.is_touched = False
        if self.late:
            self.late = []

    def end_message(self) -> None:
        """End a message: other hooks have no event time."""
        self._at_us = -1

    def take(self, timer: WindowTimer) -> Window[Any] | None:
        """Return the window of a timer that fires; None if nothing is to be done.

        A window that is closed is removed.

        Raises:
            ShardStoreError: the store failed.
        """
        row = timer.row
        window = self._known(row)
        if window is None:
            return None
        if timer.closes:
            closes_us = window.end_us + self._closing_us
            if closes_us > timer.due_us:  # a session that has grown closes in its turn
                self._timers.set_closing(row, closes_us)
                return None
            self._remove(window)
            self._forget(window)
            self._cached_bytes -= window.size
            return window
        window.has_update = False
        self._changes[row] = window
        return window

    def encode(self) -> None:
        """Encode the windows that have changed, at the end of the open transaction.

        Raises:
            UnreadableStateError: a state would not be read again as it is.
        """
        encode = self._codec.encode
        encoded: dict[bytes, bytes | None] = {}
        for row, window in self._changes.items():
            if window is None:
                encoded[row] = None
                continue
            state = window.state
            flags = (state is not None) * _HAS_STATE + window.has_update * _HAS_UPDATE
            header = _HEADER.pack(window.end_us, window.count, flags)
            encoded[row] = packed = header if state is None else header + encode(state)
            size = len(packed) + _OBJECT_BYTES
            self._cached_bytes += size - window.size
            window.size = size
        self._encoded = encoded

    @property
    def changes(self) -> Mapping[bytes, bytes | None]:
        """Rows that the open transaction has changed, encoded; None removes one."""
        assert self._encoded is not None, "windows are encoded first"
        return self._encoded

    def committed(self) -> None:
        """Note that the store has committed the changes."""
        self._end_changes()
        if self._cached_bytes > CACHED_BYTES:
            self._forget_half()

    def _end_changes(self) -> None:
        self._changes.clear()
        self._changed_bytes = 0
        self._encoded = None

    # --------------------------------------------------------------------- rows

    def _new(self, key: Any, begin_us: int, end_us: int, row: bytes) -> Window[Any]:
        """Return a new window, which a timer closes."""
        self._cached_bytes += _OBJECT_BYTES
        if len(row) >= TIMER_KEY_BYTES_MAX - 1:
            raise ValidationError(
                f"the key of a window, {str(key)[:40]!r}…, has {len(row)} bytes; use one of less"
                f" than {TIMER_KEY_BYTES_MAX - 2 - _ROW.size} bytes"
            )
        self._timers.set_closing(row, end_us + self._closing_us)
        return Window(key, begin_us, end_us, row)

    def _remove(self, window: Window[Any]) -> None:
        row = window.row
        self._changes[row] = None
        if window.has_update:
            self._timers.set_update(row, None)

    def _changed_or_stored(self, key: Any, row: bytes) -> Window[Any] | None:
        """Return a window as the transaction has changed it, or as the store has it."""
        if row in self._changes:
            return self._changes[row]
        encoded = self._store.row(row)
        if encoded is None:
            return None
        window = _decode(key, row, encoded, self._codec)
        self._cached_bytes += window.size
        return window


class FixedWindows(Windows):
    """Tumbling or hopping windows.

    Args:
        declared: the declaration.
        store: the shard's store.
        timers: of the shard.
        times: watermarks of its sources.
        updates_s: see :class:`Windows`.
    """

    def __init__(
        self,
        declared: Tumbling | Hopping,
        store: object,
        timers: Timers,
        times: EventTime,
        *,
        updates_s: float | None = None,
    ) -> None:
        super().__init__(declared, store, timers, times, updates_s=updates_s)
        self._size_us = round(declared.size_s * SECOND_US)
        self._step_us = round(declared.step_s * SECOND_US)
        self._cache: dict[tuple[Any, int], Window[Any]] = {}  # by key and begin

    def _find(self, key: Any, at_us: int, passed_us: int) -> list[Window[Any]]:
        size_us, cache = self._size_us, self._cache
        begin_us = at_us - at_us % self._step_us
        found = []
        while begin_us + size_us > at_us:
            end_us = begin_us + size_us
            if end_us <= passed_us:
                self.late.append(Window(key, begin_us, end_us))
            else:
                window = cache.get((key, begin_us))
                found.append(self._load(key, begin_us, end_us) if window is None else window)
            begin_us -= self._step_us
        if len(found) > 1:
            found.reverse()
        return found

    def _load(self, key: Any, begin_us: int, end_us: int) -> Window[Any]:
        row = _row_of(key, begin_us, end_us)
        window = self._changed_or_stored(key, row)
        if window is None:
            window = self._new(key, begin_us, end_us, row)
        self._cache[key, begin_us] = window
        return window

    def _known(self, row: bytes) -> Window[Any] | None:
        key, begin_us = _parse_row(row)
        known = self._cache.get((key, begin_us))
        if known is not None and known.row == row:
            return known
        return self._changed_or_stored(key, row)

    def _forget(self, window: Window[Any]) -> None:
        place = window.key, window.begin_us
        if self._cache.get(place) is window:  # else it is of another size, which was declared
            del self._cache[place]

    def _forget_all(self) -> None:
        self._cache.clear()

    def _forget_half(self) -> None:
        self._cache = dict(itertools.islice(self._cache.items(), len(self._cache) // 2, None))
        self._cached_bytes = sum(window.size for window in self._cache.values())


class SessionWindows(Windows):
    """Sessions.

    Args:
        declared: the declaration.
        store: the shard's store.
        timers: of the shard.
        times: watermarks of its sources.
        updates_s: see :class:`Windows`.
    """

    def __init__(
        self,
        declared: Session,
        store: object,
        timers: Timers,
        times: EventTime,
        *,
        updates_s: float | None = None,
    ) -> None:
        super().__init__(declared, store, timers, times, updates_s=updates_s)
        self._gap_us = round(declared.gap_s * SECOND_US)
        # A message that is not late for a session of its own may join one that ends so much before.
        self._closing_us += self._gap_us
        self._merge = declared.merge
        self._sessions: dict[Any, list[Window[Any]]] = {}  # all open ones of a key, in order

    def _find(self, key: Any, at_us: int, passed_us: int) -> list[Window[Any]]:
        end_us = at_us + self._gap_us
        if end_us <= passed_us:
            self.late.append(Window(key, at_us, end_us))
            return []
        sessions = self._load(key)
        joined = [each for each in sessions if each.begin_us < end_us and at_us < each.end_us]
        if not joined:
            window = self._new(key, at_us, end_us, _row_of(key, at_us, _NO_END))
        else:
            window = self._join(joined, at_us, end_us)
            if window is joined[0] and len(joined) == 1:
                return [window]
        sessions[:] = [each for each in sessions if each not in joined]
        sessions.append(window)
        sessions.sort(key=_begin_us)
        return [window]

    def _join(self, joined: Sequence[Window[Any]], at_us: int, end_us: int) -> Window[Any]:
        """Return the window that sessions and a message become."""
        window = first = joined[0]
        if at_us < first.begin_us:
            window = self._new(first.key, at_us, end_us, _row_of(first.key, at_us, _NO_END))
            joined = [window, *joined]
        for other in joined[1:]:
            window.end_us = max(window.end_us, other.end_us)
            window.count += other.count
            if window.state is None or other.state is None:
                window.state = other.state if window.state is None else window.state
            else:
                window.state = call(self._merge, window.state, other.state)
            self._remove(other)
            self._cached_bytes -= other.size
            self._timers.set_closing(other.row, None)
        window.end_us = max(window.end_us, end_us)
        return window

    def _load(self, key: Any) -> list[Window[Any]]:
        sessions = self._sessions.get(key)
        if sessions is None:
            found = windows_of_key(self._store, key, self._codec)
            sessions = [each for each in found if each.row not in self._changes]
            self._sessions[key] = sessions
            self._cached_bytes += sum(window.size for window in sessions)
        return sessions

    def _known(self, row: bytes) -> Window[Any] | None:
        key, _ = _parse_row(row)
        return next((each for each in self._load(key) if each.row == row), None)

    def _forget(self, window: Window[Any]) -> None:
        sessions = self._sessions[window.key]
        sessions.remove(window)
        if not sessions:
            del self._sessions[window.key]

    def _forget_all(self) -> None:
        self._sessions.clear()

    def _forget_half(self) -> None:
        kept = itertools.islice(self._sessions.items(), len(self._sessions) // 2, None)
        self._sessions = dict(kept)
        windows = itertools.chain.from_iterable(self._sessions.values())
        self._cached_bytes = sum(window.size for window in windows)


def _begin_us(window: Window[Any]) -> int:
    return window.begin_us


def no_windows() -> ConfigurationError:
    """Return the error of an application without windows."""
    return ConfigurationError(
        "the application has no windows; declare them, as windows=shard.windows.Tumbling(size_s=60)"
    )


def new_windows(
    declared: Declared,
    store: object,
    timers: Timers,
    times: EventTime,
    *,
    updates_s: float | None = None,
) -> Windows:
    """Return the windows of a declaration; arguments are those of :class:`Windows`."""
    if isinstance(declared, Session):
        return SessionWindows(declared, store, timers, times, updates_s=updates_s)
    return FixedWindows(declared, store, timers, times, updates_s=updates_s)


def _row_of(key: Any, begin_us: int, end_us: int) -> bytes:
    """Return the key of a window in the store. Those of one key are in the order of their begins.

    Raises:
        ValidationError: it cannot be the key of a window.
    """
    return _encode_key(key) + _ROW.pack(begin_us + _SIGN, end_us)


def _encode_key(key: Any) -> bytes:
    if key is None:
        return _END
    try:
        return any_key.encode(key) + _END
    except (TypeError, OverflowError, UnicodeError) as error:
        raise ValidationError(f"{key!r} cannot be the key of a window: {error}") from error


def _parse_row(row: bytes) -> tuple[Any, int]:
    """Return the key of a window, and its begin in microseconds since 1970."""
    begin_us, _ = _ROW.unpack(row[-_ROW.size :])
    encoded = row[: -_ROW.size - 1]
    return any_key.decode(encoded) if encoded else None, begin_us - _SIGN


def _decode(key: Any, row: bytes, encoded: bytes, codec: Codec[Any]) -> Window[Any]:
    _, begin_us = _parse_row(row)
    end_us, count, flags = _HEADER.unpack_from(encoded)
    window = Window[Any](key, begin_us, end_us, row)
    window.count, window.has_update = count, bool(flags & _HAS_UPDATE)
    window.size = len(encoded) + _OBJECT_BYTES
    if flags & _HAS_STATE:
        try:
            window.state = codec.decode(encoded[_HEADER.size :])
        except Exception as error:
            raise ShardStoreError(
                f"the state of {window!r} is not of the declared type ({error}); declare the type"
                " that wrote it"
            ) from error
    return window
