"""The protocol of stores, and what they share."""

from __future__ import annotations

import functools
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn, Protocol, TypeAlias, runtime_checkable

from gazette_sdk.errors import ConfigurationError, ShardStoreError
from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.shard.recovery.hints import FileChange

UNCOMMITTED_PUTS_MAX = 65_536
"""Changes of one transaction, from which on its store is full."""
UNCOMMITTED_BYTES_MAX = 16 << 20
"""Bytes of one transaction's changes, from which on its store is full."""

TIMER_KEY_BYTES_MAX = 512
"""Bound of a timer's encoded key, so that all databases can index it."""

EXPIRY_TAG = b"\x08"
"""First byte of keys of timers that end the time to live of an entry; others have none such."""

FILES_SHOWN_MAX = 5
"""Names of files that an error shows."""

_LAYOUTS = {
    "RocksStore": re.compile(
        r"CURRENT|IDENTITY|LOCK|LOG(\..*)?|(MANIFEST|OPTIONS)-\d+|\d+\.(log|sst|ldb|blob)"
        r"|[^/]+\.dbtmp|\.stage/.*|rocksdict-config\.json"
    ),
    "SqliteStore": re.compile(r"pages/\d+|database\.sqlite(-wal|-shm|-journal)?"),
    "JsonStore": re.compile(r"(state|next)\.json"),
    "Gazette's own SQLite store": re.compile(r"pageDB/.*|[^/]+\.db(-wal|-shm|-journal)?"),
}
"""Files of each store, as paths below the shard's directory."""


class Store(Protocol):
    """Durable state of one shard.

    A store with local files is made with a directory, in which a player has restored the files of
    the recovery log; all files in it count as recorded. The store alone changes the directory from
    then on. Calls come one at a time, from any thread::

        restore (begin … start_commit finish_commit)* destroy

    ``restore`` may come again at any time that no commit is under way. `shard` 9 has the formats
    that consumers of Gazette read, too.

    Attributes:
        overlaps_commit: the next transaction may read this one's state before it is durable.
    """

    overlaps_commit: ClassVar[bool]

    @property
    def is_full(self) -> bool:
        """The open transaction is to be committed before it reads another message."""

    def restore(self) -> Checkpoint:
        """Return the checkpoint of the last commit, and drop every change made since.

        Returns:
            The checkpoint; the empty one if nothing was ever committed.

        Raises:
            ShardStoreError: the state cannot be read.
            FencedError: another primary took the shard over.
        """

    def begin(self) -> None:
        """Begin a transaction, before its first message."""

    def start_commit(self, checkpoint: Checkpoint) -> Sequence[FileChange]:
        """Commit changes and checkpoint to the local files, both or neither.

        Args:
            checkpoint: the position after the transaction, with its intents.

        Returns:
            The changes of files since the last commit, to be recorded by one append.

        Raises:
            ShardStoreError: the commit failed; the shard has to be recovered.
        """

    def finish_commit(self) -> None:
        """End the commit, after its outputs and its file changes are durable.

        Remote stores commit here.

        Raises:
            FencedError: another primary took the shard over; nothing was committed.
        """

    def rerecord(self, path: str) -> Sequence[FileChange]:
        """Return changes that record a file anew, with the content it has in the log by now.

        They follow those of the last commit, before the next ``start_commit``. They let a reader
        skip the earlier operations of the file.

        Args:
            path: of a file in the log.

        Returns:
            Its removal and creation; nothing where the file is not the store's any more.
        """

    def destroy(self) -> None:
        """Close the store; the caller removes its directory. May be called twice."""


class QueryableStore(Store, Protocol):
    """Store that queries may read while its shard continues."""

    def committed(self) -> AbstractContextManager[Any]:
        """Open a view of what is committed locally, without the open transaction.

        Any thread may call it and use the view, for no longer than a query takes.

        Returns:
            A context manager of the view, which has the reading methods of the store.

        Raises:
            ClosedError: the store is closed, or not restored yet.
        """


@runtime_checkable
class ValidatingStore(Protocol):
    """Store that learns only at the end of a transaction that its state cannot be committed."""

    def validate_state(self) -> None:
        """Check the open transaction's state, after the last hook that may change it.

        Where the application leaves out records that fail, a transaction that is refused is run
        again, with a check after each record.

        Raises:
            UnreadableStateError: the state would not be read again as it is.
        """


@runtime_checkable
class UndoingStore(Protocol):
    """Store that undoes what a single record has changed.

    Where the application leaves out records that fail, the rest of their transaction stays.
    """

    def begin_record(self) -> None:
        """Begin a record, whose changes may be undone."""

    def undo_record(self) -> bool:
        """Undo the changes since the last ``begin_record``.

        Returns:
            False if they cannot be undone: the transaction is aborted then, and run again.
        """


class TimerRow(NamedTuple):
    """Timer as a store keeps it. Rows are ordered by time, then key.

    Attributes:
        due_us: its time, in microseconds since 1970.
        key: its key, encoded.
    """

    due_us: int
    key: bytes


@runtime_checkable
class TimerStore(Protocol):
    """Store that keeps timers, and commits their changes with the rest of its state."""

    def open_timers(self) -> None:
        """Prepare to keep timers, after ``restore``: an application without them calls it not.

        Raises:
            ShardStoreError: the store failed.
        """

    def timers_after(self, row: TimerRow | None, limit: int) -> Sequence[TimerRow]:
        """Return the next timers that are committed locally, in order.

        Args:
            row: the row after which they begin; None for the first.
            limit: the number of timers.

        Raises:
            ShardStoreError: the store failed.
        """

    def put_timers(self, changes: Mapping[bytes, int | None]) -> None:
        """Put timers in the open transaction, just before its ``start_commit``.

        Args:
            changes: by key, the time in microseconds since 1970; None to remove the timer.

        Raises:
            ShardStoreError: the store failed.
        """


SetExpiry: TypeAlias = Callable[[bytes, float | None], None]
"""Function that sets the time to live of an entry, in seconds; None removes it."""


@runtime_checkable
class ExpiringStore(TimerStore, Protocol):
    """Store whose entries may have a time to live, which is a timer of the shard."""

    def open_expiry(self, set_expiry: SetExpiry) -> bool:
        """Prepare to let entries expire, after ``restore``.

        Args:
            set_expiry: sets the timer of an entry, in the open transaction.

        Returns:
            True if an entry has a time to live.

        Raises:
            ShardStoreError: the store failed.
        """

    def end_entry(self, entry: bytes) -> None:
        """Remove an entry whose time has come, in the open transaction."""


class StoreWithoutExpiry:
    """Store whose entries have no time to live."""

    __slots__ = ()

    def expire(self, key: object, after_s: float) -> NoReturn:
        """Refuse: entries of this store have no time to live.

        Raises:
            ConfigurationError: always.
        """
        del key, after_s
        raise ConfigurationError(
            f"entries of a {type(self).__name__} have no time to live: use a RocksStore, or set a"
            " timer and remove them in its function"
        )


@runtime_checkable
class RowStore(TimerStore, Protocol):
    """Store that keeps rows of the SDK, of windows and of tables, and commits them with its state.

    Keys are shorter than ``TIMER_KEY_BYTES_MAX``.
    """

    def open_rows(self) -> None:
        """Prepare to keep rows, after ``restore``: an application without them calls it not.

        Raises:
            ShardStoreError: the store failed.
        """

    def row(self, key: bytes) -> bytes | None:
        """Return a row that is committed locally; None if there is none of the key.

        Raises:
            ShardStoreError: the store failed.
        """

    def rows_of(self, prefix: bytes) -> Sequence[tuple[bytes, bytes]]:
        """Return the rows that are committed locally whose keys have a prefix, in their order.

        The view of a ``QueryableStore`` has this method, too.

        Args:
            prefix: the prefix; not empty, and not of FF alone.

        Returns:
            Pairs of key and value.

        Raises:
            ShardStoreError: the store failed.
        """

    def put_rows(self, changes: Mapping[bytes, bytes | None]) -> None:
        """Put rows in the open transaction, just before its ``start_commit``.

        Args:
            changes: by key, the value; None to remove the row.

        Raises:
            ShardStoreError: the store failed.
        """


class Entry(NamedTuple):
    """Part of an application's state, as it is shown.

    Attributes:
        place: column family, or table of SQL; may be empty.
        key: its key: bytes as they are stored, or a value; None if it has none.
        value: its value, likewise.
    """

    place: str
    key: Any
    value: Any


@runtime_checkable
class ShownView(Protocol):
    """View of a store whose state is shown without the types that the application declares."""

    def entries(self, keys: Sequence[Any] | None, limit: int) -> Sequence[Entry]:
        """Return the first entries of the application's state.

        Args:
            keys: those of these keys: str, bytes, int, or tuples of them; None for all.
            limit: the number of entries.

        Raises:
            ShardStoreError: the store failed.
        """

    def rows_from(self, lower: bytes, limit: int) -> Sequence[tuple[bytes, bytes]]:
        """Return the first rows of the SDK from a key on, as those of a :class:`RowStore`.

        Raises:
            ShardStoreError: the store failed.
        """

    def timers_after(self, row: TimerRow | None, limit: int) -> Sequence[TimerRow]:
        """Return timers, as those of a :class:`TimerStore`."""


def prefix_end(prefix: bytes) -> bytes | None:
    """Return the least bytes above all that begin with a prefix; None if there are none."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1]) if stripped else None


def recovered_files(directory: Path) -> Sequence[str]:
    """Return the files of a shard's directory, as paths below it, when its store is made."""
    return sorted(
        path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()
    )


def stores_of(files: Sequence[str]) -> list[str]:
    """Return the names of the stores that have such files; of well-formed logs one at most."""
    return [name for name, layout in _LAYOUTS.items() if any(map(layout.fullmatch, files))]


def refuse_other_files(files: Sequence[str], store: str) -> None:
    """Refuse to begin from nothing on the recovered files of another store.

    Args:
        files: that were recovered.
        store: class of the store that is to be restored.

    Raises:
        ShardStoreError: files were recovered, and none of them is the store's.
    """
    own = _LAYOUTS.get(store)
    if not files or (own is not None and any(map(own.fullmatch, files))):
        return
    found = stores_of(files) or ["a store that is not known here"]
    shown = ", ".join(files[:FILES_SHOWN_MAX]) + (", …" if len(files) > FILES_SHOWN_MAX else "")
    raise ShardStoreError(
        f"the recovery log has files of {' and '.join(found)} ({shown}), and none of {store}, which"
        f" would begin from nothing and consume its sources again. Use {found[0]} again, for which"
        f" the shard's label or the application's `store=` may have been changed; or, to begin from"
        " nothing, give the shard a new recovery log"
    )


def type_arguments(store: object) -> tuple[Any, ...]:
    """Return the arguments that a generic store class was made with; none if it had none.

    They are those of ``RocksStore[str, int](directory)``, or of ``class Totals(RocksStore[str,
    int])``. The former are set after ``__init__`` returns.

    Args:
        store: the store, or its declaration: the class, with its arguments or without.
    """
    is_declared = isinstance(store, type) or typing.get_origin(store) is not None
    declared = store if is_declared else getattr(store, "__orig_class__", type(store))
    cls = typing.get_origin(declared) or declared
    for base in (declared, *getattr(cls, "__orig_bases__", ())):
        found = typing.get_args(base)
        if found and not any(isinstance(argument, typing.TypeVar) for argument in found):
            return found
    return ()


def check_types(store: object) -> None:
    """Refuse declared types whose values cannot be kept, as far as the store's class checks them.

    A class does by a class method ``check_types``, which gets the arguments of its declaration.

    Args:
        store: declaration: a class, with its arguments or without, or a partial of it.

    Raises:
        ConfigurationError: of the class.
    """
    given = store.keywords if isinstance(store, functools.partial) else {}
    declared: Any = store.func if isinstance(store, functools.partial) else store
    check = getattr(declared, "check_types", None)
    if check is not None:
        check(*type_arguments(declared), **given)
