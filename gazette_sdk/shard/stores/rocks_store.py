"""State as keys and values in RocksDB.

Each commit is one write batch, which holds the checkpoint, too (`shard` 9.2); the files that it and
RocksDB's own threads changed are found by a scan of the directory.

A :class:`Family` has what is committed, under what a transaction put. The options of RocksDB are
those with which its files can be recorded, and played by Gazette's consumers.

:class:`RocksFiles` scans the directory for what changed since the last commit. RocksDB's own
threads write and remove files at any time, and each scan has to find files that open together
(`recovery log` 10). A scan lists the names, reads CURRENT and the manifest it names, then all other
files, then names and CURRENT again; it starts over if these are not as before. It holds because

- the write-ahead log does not change during a scan: its only writer is the caller;
- a manifest names only files that are complete, and all of them were read after it;
- RocksDB removes a file only after its manifest says so, and the names did not change.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, overload

from gazette_sdk.errors import (
    ClosedError,
    ConfigurationError,
    DecodeError,
    ShardStoreError,
    needs_extra,
)
from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.shard.recovery.hints import (
    CreateFile,
    FileChange,
    RemoveFile,
    SetProperty,
    WriteFile,
)
from gazette_sdk.shard.stores.base import (
    EXPIRY_TAG,
    UNCOMMITTED_BYTES_MAX,
    UNCOMMITTED_PUTS_MAX,
    Entry,
    SetExpiry,
    TimerRow,
    prefix_end,
    recovered_files,
    refuse_other_files,
    type_arguments,
)

with needs_extra("shards", "stores of RocksDB"):
    from rocksdict import (
        BlockBasedOptions,
        Cache,
        DBRecoveryMode,
        Options,
        Rdict,
        ReadOptions,
        WriteBatch,
        WriteOptions,
    )
from gazette_sdk.shard.stores.codec import Codec, checked, key_codec, stored_key, value_codec

Configure = Callable[[Options], None]
"""Changes the options of a database and of each family before it is opened."""

WRITE_BUFFER_BYTES = 16 << 20
"""Bounds the write-ahead log that is read again when a database is opened (0.26 s for 6 MB)."""
MANIFEST_BYTES_MAX = 128 << 10
"""A small manifest bounds what has to be recorded anew; see `recovery log` 10.2."""
BLOCK_CACHE_BYTES = 64 << 20
"""Cache of blocks of table files, shared by all databases of the process."""
_BLOOM_BITS_PER_KEY = 10
# Format 6, the default, cannot be opened by RocksDB 7, with which Gazette is built.
TABLE_FORMAT_VERSION = 5


def open_database(
    directory: Path, families: Iterable[str], configure: Configure | None = None
) -> Rdict:
    """Open or create a database.

    Args:
        directory: of the database.
        families: names of column families to create where they are missing.
        configure: changes options of the application's choice. Options on which recording depends
            are set after it.

    Raises:
        Exception: the database cannot be opened; rocksdict has no more specific class.
    """
    names = {"default", *families}
    if (directory / "CURRENT").exists():
        names.update(Rdict.list_cf(str(directory)))
    # Families which are not named here would be opened with the options of the OPTIONS file.
    return Rdict(
        str(directory),
        _options(configure),
        column_families={name: _options(configure) for name in sorted(names)},
    )


def write_options() -> WriteOptions:
    """Return options with which a write fails instead of waiting for flushes.

    A waiting write would hold the interpreter's lock, and so delay every task of the process.
    """
    options = WriteOptions()
    options.no_slowdown = True
    return options


@functools.cache
def _block_cache() -> Cache:
    return Cache(BLOCK_CACHE_BYTES)


def _options(configure: Configure | None) -> Options:
    options = Options(raw_mode=True)
    options.set_write_buffer_size(WRITE_BUFFER_BYTES)
    options.set_keep_log_file_num(1)
    options.set_stats_dump_period_sec(0)
    options.set_stats_persist_period_sec(0)
    table = BlockBasedOptions()
    table.set_format_version(TABLE_FORMAT_VERSION)
    table.set_block_cache(_block_cache())
    table.set_bloom_filter(_BLOOM_BITS_PER_KEY, False)
    options.set_block_based_table_factory(table)
    if configure is not None:
        configure(options)
    options.create_if_missing(True)
    options.create_missing_column_families(True)
    options.set_recycle_log_file_num(0)
    options.set_max_manifest_file_size(MANIFEST_BYTES_MAX)
    options.set_wal_recovery_mode(DBRecoveryMode.point_in_time())
    return options


K = TypeVar("K")
V = TypeVar("V")
D = TypeVar("D")

_MISSING: Any = object()

RESERVED = (
    b"\x00\x12checkpoint\x00\x01",
    b"\x00\x12mark\x00\x01",
    b"\x00\x12timer\x00\x01",
)
"""Keys that begin with these are the store's own."""


class FamilyView(Generic[K, V]):
    """Committed keys and values of one family; read-only, for any thread.

    Args:
        source: the database's family.
        keys: codec of keys.
        values: codec of values.
    """

    def __init__(self, source: Rdict, keys: Codec[K], values: Codec[V]) -> None:
        self._attach(source, keys, values)

    def _attach(self, source: Rdict, keys: Codec[K], values: Codec[V]) -> None:
        self._source = source
        self._keys = keys
        self._encode_key, self._decode_value = keys.encode, values.decode

    @overload
    def get(self, key: K) -> V | None: ...
    @overload
    def get(self, key: K, default: V) -> V: ...
    @overload
    def get(self, key: K, default: D) -> V | D: ...
    def get(self, key: K, default: Any = None) -> Any:
        """Return the value of a key, or ``default``.

        Raises:
            DecodeError: the stored value is not of the declared type.
            ShardStoreError: the database cannot be read.
        """
        found = self._find(self._encode_key(key))
        if found is None:
            return default
        try:
            return self._decode_value(found)
        except Exception as error:
            raise DecodeError(
                f"the value of {key!r} is not of the declared type ({error}); declare the type"
                " that wrote it"
            ) from error

    def __getitem__(self, key: K) -> V:
        found = self.get(key, _MISSING)
        if found is _MISSING:
            raise KeyError(key)
        value: V = found
        return value

    def __contains__(self, key: K) -> bool:
        return self._find(self._encode_key(key)) is not None

    def items(
        self, *, prefix: K | None = None, start: K | None = None, stop: K | None = None
    ) -> Iterator[tuple[K, V]]:
        """Yield keys and values in the order of keys, as they are when the iteration begins.

        The iteration keeps the database's files until it ends, or is dropped.

        Args:
            prefix: only keys that begin with it. Of tuples, a shorter tuple.
            start: the least key.
            stop: the first key that is left out.

        Raises:
            TypeError: keys of this type have no prefixes.
            DecodeError: a row is not of the declared types.
            ShardStoreError: the database cannot be read.
        """
        lower, upper = b"", None
        if prefix is not None:
            if self._keys.encode_prefix is None:
                raise TypeError("keys of this type have no prefixes; pass start and stop")
            lower = self._keys.encode_prefix(prefix)
            stop_at = self._keys.prefix_stop
            upper = lower + stop_at if stop_at and lower else prefix_end(lower)
        if start is not None:
            lower = max(lower, self._keys.encode(start))
        if stop is not None:
            encoded = self._keys.encode(stop)
            upper = encoded if upper is None else min(upper, encoded)
        decode_key, decode_value = self._keys.decode, self._decode_value
        for key, value in self._rows(lower, upper):
            try:
                row = decode_key(key), decode_value(value)
            except Exception as error:
                raise DecodeError(
                    f"the row of key {key!r} is not of the declared types ({error}); declare the"
                    " types that wrote it"
                ) from error
            yield row

    def _find(self, key: bytes) -> bytes | None:
        try:
            found: bytes | None = self._source.get(key)
        except Exception as error:
            raise ShardStoreError(f"the database cannot be read: {error}") from error
        return found

    def _rows(self, lower: bytes, upper: bytes | None) -> Iterator[tuple[bytes, bytes]]:
        return self._stored(lower, upper, left_out=RESERVED)

    def _stored(
        self, lower: bytes, upper: bytes | None, *, left_out: tuple[bytes, ...] = ()
    ) -> Iterator[tuple[bytes, bytes]]:
        """Yield committed rows, all of one commit: an iterator does not see later ones.

        Args:
            lower: the least key.
            upper: the first key that is left out; None for no bound.
            left_out: prefixes of keys that are passed over at once.
        """
        options = ReadOptions()
        if upper is not None:
            options.set_iterate_upper_bound(upper)
        try:
            found = self._source.iter(options)
            found.seek(lower)
            while found.valid():
                key = found.key()
                if key.startswith(left_out):
                    prefix = next(each for each in left_out if key.startswith(each))
                    after = prefix_end(prefix)
                    if after is None:
                        break
                    found.seek(after)
                    continue
                yield key, found.value()
                found.next()
            found.status()
        except Exception as error:
            raise ShardStoreError(f"the database cannot be read: {error}") from error


_NAME_END = b"\x00"


@dataclass(slots=True)
class _Expiry:
    """Times to live of the entries of a store.

    Attributes:
        set_expiry: sets that of an entry.
        is_used: an entry may have one, which its removal ends.
    """

    set_expiry: SetExpiry
    is_used: bool


class Family(FamilyView[K, V]):
    """Keys and values of one family, with the open transaction's changes over the committed ones.

    Args:
        source: the database's family.
        keys: codec of keys.
        values: codec of values.
    """

    _name = b"default"
    _expiry: _Expiry | None = None  # of all families of a store, in a shard

    def _attach(self, source: Rdict, keys: Codec[K], values: Codec[V]) -> None:
        super()._attach(source, keys, values)
        self._encode_put_key, self._encode_value = checked(keys).encode, checked(values).encode
        self.drop_puts()

    def drop_puts(self) -> None:
        """Forget the changes of the open transaction."""
        # By key: the value, or None for a removed key.
        self.puts: dict[bytes, bytes | None] = {}
        self.put_bytes = 0
        # By key: what `puts` had before the record that is consumed; None if that is not noted.
        self.former: dict[bytes, Any] | None = None

    def undo_puts(self) -> None:
        """Undo the changes of the open transaction since ``former`` was emptied."""
        for key, former in (self.former or {}).items():
            if former is _MISSING:
                del self.puts[key]
            else:
                self.puts[key] = former
        self.former = {}

    def __setitem__(self, key: K, value: V) -> None:
        """Put a value.

        Raises:
            UnreadableStateError: it would not be read again as it is.
        """
        encoded = self._checked(key)
        content = self._encode_value(value)
        if self.former is not None:
            self._keep_former(encoded)
        self.puts[encoded] = content
        self.put_bytes += len(encoded) + len(content)

    def __delitem__(self, key: K) -> None:
        if key not in self:
            raise KeyError(key)
        self.discard(key)

    def discard(self, key: K) -> None:
        """Remove a key if it is there, with its time to live.

        Faster than ``del``, which has to read.
        """
        encoded = self._checked(key)
        self.remove(encoded)
        if self._expiry is not None and self._expiry.is_used:
            self._expiry.set_expiry(self._entry(encoded), None)

    def remove(self, encoded: bytes) -> None:
        """Remove an encoded key."""
        if self.former is not None:
            self._keep_former(encoded)
        self.puts[encoded] = None
        self.put_bytes += len(encoded)

    def expire(self, key: K, after_s: float) -> None:
        """Give a key a time to live, or another one: it is removed then.

        The time is kept with the state, as that of a timer. Another value does not change it;
        removing the key ends it.

        Args:
            key: the key, with its value.
            after_s: seconds from ``txn.now``, 0 or more. The transaction in which they have passed
                removes the key.

        Raises:
            KeyError: the key is not there.
            ValidationError: the time cannot be used, or the key is too long.
            ClosedError: no transaction of a shard is open.
        """
        if self._expiry is None:
            raise ClosedError("keys expire in a shard: call `txn.store.expire` in its hooks")
        if key not in self:
            raise KeyError(key)
        self._expiry.set_expiry(self._entry(self._checked(key)), after_s)
        self._expiry.is_used = True

    def _entry(self, encoded: bytes) -> bytes:
        return self._name + _NAME_END + encoded

    def open_expiries(self, name: str, expiry: _Expiry) -> None:
        """Let keys expire.

        Args:
            name: of the family.
            expiry: of all families of the store.
        """
        self._name, self._expiry = name.encode(), expiry

    def _keep_former(self, encoded: bytes) -> None:
        assert self.former is not None, "it is noted"
        self.former.setdefault(encoded, self.puts.get(encoded, _MISSING))

    def _checked(self, key: K) -> bytes:
        encoded = self._encode_put_key(key)
        if encoded.startswith(RESERVED):
            raise ValueError(f"{key!r} is a key of the store's own; choose another one")
        return encoded

    def _find(self, key: bytes) -> bytes | None:
        found: bytes | None = self.puts.get(key, _MISSING)
        return super()._find(key) if found is _MISSING else found

    def _rows(self, lower: bytes, upper: bytes | None) -> Iterator[tuple[bytes, bytes]]:
        puts = dict(self.puts)
        inside = sorted(key for key in puts if key >= lower and (upper is None or key < upper))
        changed = ((key, puts[key]) for key in inside)
        stored: Iterator[tuple[bytes, bytes | None]] = (
            row for row in super()._rows(lower, upper) if row[0] not in puts
        )
        by_key: Callable[[tuple[bytes, bytes | None]], bytes] = lambda row: row[0]  # noqa: E731
        for key, value in heapq.merge(changed, stored, key=by_key):
            if value is not None:
                yield key, value


_CURRENT, _IDENTITY = "CURRENT", "IDENTITY"
_STAGE = ".stage"
_IGNORED = frozenset({"LOCK", "LOG", "rocksdict-config.json", _CURRENT, _IDENTITY})
SCAN_TIMEOUT_S = 60.0
"""After so long a scan gives up; it takes 0.3 ms, and finds changed names in one of three."""


@dataclass(slots=True)
class _File:
    """Part of a file that is recorded, and bytes that follow it.

    Attributes:
        inode: of the file; a file of another inode is another one.
        size: bytes recorded.
        new: bytes read from there on, not recorded yet.
    """

    inode: int
    size: int
    new: bytearray = field(default_factory=bytearray)


class RocksFiles:
    """Files of one database, and how much of each is recorded.

    Made before the database is opened: what the directory holds then is recorded.

    Args:
        directory: of the database.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._recorded: dict[str, _File] = {}
        # Of an opening that was cut short, RocksDB removes the temporary files. Other consumers may
        # stage new tables, and die before these are linked; their log would be kept for ever.
        left_over = {file.name for file in directory.glob("*.dbtmp")}
        left_over |= {f"{_STAGE}/{file.name}" for file in directory.glob(f"{_STAGE}/*")}
        for name in self._names() | left_over:
            status = (directory / name).stat()
            self._recorded[name] = _File(status.st_ino, status.st_size)
        self._current = self._read_small(_CURRENT) if (directory / _CURRENT).exists() else b""
        self._has_identity = (directory / _IDENTITY).exists()

    def changes(self) -> list[FileChange]:
        """Return the changes of files since the last call, after a write of the caller.

        Raises:
            ShardStoreError: no scan was consistent in ``SCAN_TIMEOUT_S``.
            OSError: a file cannot be read.
        """
        deadline = time.monotonic() + SCAN_TIMEOUT_S
        found: dict[str, _File] = {}
        while True:
            try:
                manifest = self._scan(found)
            except FileNotFoundError:
                manifest = None
            if manifest is not None:
                return self._record(found, manifest)
            if time.monotonic() > deadline:
                raise ShardStoreError(
                    f"the files of {self._directory} changed during every scan for"
                    f" {SCAN_TIMEOUT_S:.0f} s; raise the write buffer, or lower the rate of puts"
                )

    def rerecord(self, path: str) -> Sequence[FileChange]:
        """Return changes that record the recorded part of a file anew; nothing if it is gone."""
        recorded = self._recorded.get(path[1:])
        if recorded is None:
            return ()
        try:
            with (self._directory / path[1:]).open("rb") as file:
                if os.fstat(file.fileno()).st_ino != recorded.inode:
                    return ()
                content = file.read(recorded.size)
        except FileNotFoundError:
            return ()
        if len(content) != recorded.size:
            raise ShardStoreError(
                f"{path} has lost bytes: {len(content)} of {recorded.size}; check the disk"
            )
        return RemoveFile(path), CreateFile(path, content)

    def _scan(self, found: dict[str, _File]) -> str | None:
        """Read what is new, after what earlier scans found; return the manifest's name.

        Returns:
            None if files changed in a way that makes the scan inconsistent.
        """
        names = self._names()
        current = self._read_small(_CURRENT)
        manifest = current.decode().rstrip("\n")
        for name in found.keys() - names:
            del found[name]
        self._read(manifest, found)
        for name in names:
            if name != manifest:
                self._read(name, found)
        if self._names() != names or self._read_small(_CURRENT) != current:
            return None
        return manifest

    def _read(self, name: str, found: dict[str, _File]) -> None:
        path = self._directory / name
        status = os.stat(path)  # noqa: PTH116 - twice as fast as pathlib's, and called most
        file = found.get(name)
        if file is None or file.inode != status.st_ino:
            recorded = self._recorded.get(name)
            if recorded is None or recorded.inode != status.st_ino:
                file = _File(status.st_ino, 0)
            else:
                file = _File(recorded.inode, recorded.size)
            found[name] = file
        known = file.size + len(file.new)
        if status.st_size < known:
            raise ShardStoreError(f"{path} has become shorter: {status.st_size} of {known} bytes")
        if status.st_size == known:
            return
        with path.open("rb") as opened:
            if os.fstat(opened.fileno()).st_ino != file.inode:
                raise FileNotFoundError(path)
            opened.seek(known)
            file.new += opened.read()

    def _record(self, found: dict[str, _File], manifest: str) -> list[FileChange]:
        """Return the found changes, in the order in which RocksDB itself writes them."""
        changes: list[FileChange] = []
        for name in sorted(found, key=lambda name: _order(name, manifest)):
            file, recorded = found[name], self._recorded.get(name)
            if recorded is None or recorded.inode != file.inode:
                changes.append(CreateFile(f"/{name}", bytes(file.new)))
            elif file.new:
                changes.append(WriteFile(f"/{name}", file.size, bytes(file.new)))
        current = f"{manifest}\n".encode()
        if current != self._current:
            changes.append(CreateFile(f"/{_CURRENT}", current))
            self._current = current
        changes += [RemoveFile(f"/{name}") for name in self._recorded if name not in found]
        if not self._has_identity and (identity := self._read_small(_IDENTITY)):
            changes.append(SetProperty(f"/{_IDENTITY}", identity.decode()))
            self._has_identity = True
        self._recorded = {
            name: _File(file.inode, file.size + len(file.new)) for name, file in found.items()
        }
        return changes

    def _names(self) -> set[str]:
        with os.scandir(self._directory) as entries:
            return {
                entry.name
                for entry in entries
                if entry.name not in _IGNORED
                and not entry.name.startswith("LOG.")
                and not entry.name.endswith(".dbtmp")
                and entry.is_file()
            }

    def _read_small(self, name: str) -> bytes:
        return (self._directory / name).read_bytes()


def _order(name: str, manifest: str) -> tuple[int, str]:
    if name.endswith(".log"):
        return 0, name
    return (2, name) if name == manifest else (1, name)


CHECKPOINT_KEY, _MARK, _TIMER = RESERVED
_MARK_PREFIX = _MARK + b"\x12"
_MARK_END = b"\x00\x01"

# Each timer has two rows: its time by its key, and its time and key in order.
_TIMER_BY_KEY = _TIMER + b"k"
_TIMER_BY_TIME = _TIMER + b"t"
_TIMER_BY_TIME_END = _TIMER + b"u"
_TIME_BYTES = 8
_ROW = _TIMER + b"w"

WRITE_STALL_TIMEOUT_S = 60.0
"""Bound of the wait for RocksDB to accept a write again."""
_STALL_PAUSE_S = 0.01

_Codecs = tuple[Codec[Any], Codec[Any]]


class _OwnRows(FamilyView[K, V]):
    """Rows and timers of the store's own, in the default family."""

    def row(self, key: bytes) -> bytes | None:
        """Return a row; see :class:`~gazette_sdk.shard.stores.base.RowStore`."""
        return self._find(_ROW + key)

    def rows_of(self, prefix: bytes) -> Sequence[tuple[bytes, bytes]]:
        """Return rows; see :class:`~gazette_sdk.shard.stores.base.RowStore`."""
        lower = _ROW + prefix
        rows = self._stored(lower, prefix_end(lower))
        return [(key[len(_ROW) :], value) for key, value in rows]

    def rows_from(self, lower: bytes, limit: int) -> Sequence[tuple[bytes, bytes]]:
        """Return rows; see :class:`~gazette_sdk.shard.stores.base.ShownView`."""
        rows = itertools.islice(self._stored(_ROW + lower, prefix_end(_ROW)), limit)
        return [(key[len(_ROW) :], value) for key, value in rows]

    def timers_after(self, row: TimerRow | None, limit: int) -> Sequence[TimerRow]:
        """Return the next timers; see :class:`~gazette_sdk.shard.stores.base.TimerStore`."""
        lower = _TIMER_BY_TIME if row is None else _timer_by_time(row.due_us, row.key) + b"\x00"
        at = len(_TIMER_BY_TIME)
        return [
            TimerRow(int.from_bytes(key[at : at + _TIME_BYTES], "big"), key[at + _TIME_BYTES :])
            for key, _ in itertools.islice(self._stored(lower, _TIMER_BY_TIME_END), limit)
        ]


def _codecs(key: Any, value: Any, arguments: Sequence[Any]) -> _Codecs:
    """Return the codecs of keys and values; ``arguments`` of the class count without others."""
    if key is None and value is None:
        key, value = arguments or (str, object)
    return key_codec(str if key is None else key), value_codec(object if value is None else value)


def _codecs_of_families(families: Mapping[str, tuple[Any, Any]] | None) -> dict[str, _Codecs]:
    return {
        name: (key_codec(of_key), value_codec(of_value))
        for name, (of_key, of_value) in (families or {}).items()
    }


class RocksStore(Family[K, V], _OwnRows[K, V]):
    """Keys and values in RocksDB, as a mapping: ``get``, ``[]``, ``del``, ``in``, ``items``.

    ``RocksStore[str, int]`` declares the types. Keys are str, bytes, int, or a tuple of them; their
    order is that of Python. Values are bytes, protobuf messages, or any type of msgspec, which is
    stored as JSON. Without types, keys are str and values any JSON. Other layouts are declared by
    codecs: ``RocksStore.of(key=codec.utf8, value=codec.uvarint)``.

    Values are encoded when they are put: a value that is changed later has to be put again.

    Args:
        directory: of the shard; holds the recovered files.
        key: type of keys, or their codec.
        value: type of values, or their codec.
        families: of further column families by name: types or codecs of keys and values.
        configure: changes RocksDB's options before it opens.
    """

    overlaps_commit: ClassVar[bool] = True

    def __init__(
        self,
        directory: Path,
        *,
        key: Any = None,
        value: Any = None,
        families: Mapping[str, tuple[Any, Any]] | None = None,
        configure: Configure | None = None,
    ) -> None:
        self._directory = directory
        self._recovered = recovered_files(directory)
        self._declared = key, value
        self._further = _codecs_of_families(families)
        self._configure = configure
        self._files = RocksFiles(directory)
        self._write_options = write_options()
        self._database: Rdict | None = None
        self._families: dict[str, Family[Any, Any]] = {}
        self._sequence_number = 0
        self._timer_changes: Mapping[bytes, int | None] = {}
        self._row_changes: Mapping[bytes, bytes | None] = {}

    @classmethod
    def of(
        cls,
        *,
        key: Any = str,
        value: Any = object,
        families: Mapping[str, tuple[Any, Any]] | None = None,
        configure: Configure | None = None,
    ) -> Callable[[Path], RocksStore[Any, Any]]:
        """Return a function that makes such stores; the arguments are those of the class."""
        return functools.partial(cls, key=key, value=value, families=families, configure=configure)

    @classmethod
    def untyped(cls, directory: Path) -> RocksStore[bytes, bytes]:
        """Return a store over a database with all of its families, whose types are not known.

        Raises:
            ShardStoreError: its families cannot be listed.
        """
        try:
            names = Rdict.list_cf(str(directory))
        except Exception as error:
            raise ShardStoreError(
                f"the database in {directory} cannot be opened: {error}"
            ) from error
        further = {name: (bytes, bytes) for name in names if name != "default"}
        return RocksStore(directory, key=bytes, value=bytes, families=further)

    @classmethod
    def check_types(
        cls,
        *arguments: Any,
        key: Any = None,
        value: Any = None,
        families: Mapping[str, tuple[Any, Any]] | None = None,
        configure: Configure | None = None,
    ) -> None:
        """Refuse types that cannot be stored.

        Args:
            arguments: of the class, as of ``RocksStore[str, int]``.
            key: type of keys, or their codec.
            value: type of values, or their codec.
            families: as of the class.
            configure: as of the class.

        Raises:
            ConfigurationError: a type cannot be stored.
        """
        del configure
        _codecs(key, value, arguments)
        _codecs_of_families(families)

    @property
    def is_full(self) -> bool:
        """The transaction has ``UNCOMMITTED_PUTS_MAX`` puts, or so many bytes."""
        families = self._families.values()
        return (
            sum(len(family.puts) for family in families) >= UNCOMMITTED_PUTS_MAX
            or sum(family.put_bytes for family in families) >= UNCOMMITTED_BYTES_MAX
        )

    def family(self, name: str) -> Family[Any, Any]:
        """Return a further column family.

        Raises:
            ConfigurationError: it was not declared.
        """
        if name not in self._further:
            raise ConfigurationError(
                f"column family {name!r} was not declared; pass families={{{name!r}: (str, int)}}"
            )
        return self._families[name]

    def restore(self) -> Checkpoint:
        """Open the database, the first time; drop the open transaction.

        Returns:
            The stored checkpoint; of a database that Gazette wrote without one, its offsets.

        Raises:
            ShardStoreError: the database cannot be opened or read, its checkpoint is malformed, or
                the files are of another store.
        """
        if self._database is None:
            self._database = self._open()
        for family in self._families.values():
            family.drop_puts()
        self._timer_changes, self._row_changes = {}, {}
        stored = self._database.get(CHECKPOINT_KEY)
        try:
            if stored is not None:
                return Checkpoint.from_bytes(stored)
            marks = self._stored(_MARK_PREFIX, prefix_end(_MARK_PREFIX))
            return Checkpoint({_marked_journal(key): _marked_offset(mark) for key, mark in marks})
        except DecodeError as error:
            raise ShardStoreError(f"the stored checkpoint is malformed: {error}") from error

    def begin(self) -> None:
        """Begin a transaction: nothing is to be done."""

    def begin_record(self) -> None:
        """Begin a record, whose changes may be undone."""
        for family in self._families.values():
            family.former = {}

    def undo_record(self) -> bool:
        """Undo the changes since the last ``begin_record``."""
        for family in self._families.values():
            family.undo_puts()
        return True

    def start_commit(self, checkpoint: Checkpoint) -> Sequence[FileChange]:
        """Write the transaction's puts and the checkpoint.

        Args:
            checkpoint: the position after the transaction.

        Returns:
            The changes of files since the last commit.

        Raises:
            ShardStoreError: the write failed, or something else wrote to the database.
            OSError: the files cannot be read.
        """
        database = self._opened()
        if database.latest_sequence_number() != self._sequence_number:
            raise ShardStoreError(
                "the database was written to outside of the transaction; write by the store only"
            )
        self._write(database, checkpoint)
        self._sequence_number = database.latest_sequence_number()
        for family in self._families.values():
            family.drop_puts()
        self._timer_changes, self._row_changes = {}, {}
        return self._files.changes()

    def finish_commit(self) -> None:
        """End the commit: nothing is to be done."""

    def open_timers(self) -> None:
        """Prepare to keep timers: nothing is to be done."""

    def put_timers(self, changes: Mapping[bytes, int | None]) -> None:
        """Put timers, just before ``start_commit``; None removes one."""
        self._timer_changes = changes

    def open_expiry(self, set_expiry: SetExpiry) -> bool:
        """Let entries expire; see :class:`~gazette_sdk.shard.stores.base.ExpiringStore`."""
        lower = _TIMER_BY_KEY + EXPIRY_TAG
        is_used = next(self._stored(lower, prefix_end(lower)), None) is not None
        expiry = _Expiry(set_expiry, is_used)
        for name, family in self._families.items():
            family.open_expiries(name, expiry)
        return is_used

    def end_entry(self, entry: bytes) -> None:
        """Remove an entry whose time has come; of a family that is not declared any more, none."""
        name, _, encoded = entry.partition(_NAME_END)
        family = self._families.get(name.decode())
        if family is not None:
            family.remove(encoded)

    def open_rows(self) -> None:
        """Prepare to keep rows: nothing is to be done."""

    def put_rows(self, changes: Mapping[bytes, bytes | None]) -> None:
        """Put rows, just before ``start_commit``; None removes one."""
        self._row_changes = changes

    def rerecord(self, path: str) -> Sequence[FileChange]:
        """Return changes that record a file's recorded part anew; nothing if it is gone."""
        return self._files.rerecord(path)

    @contextlib.contextmanager
    def committed(self) -> Iterator[RocksView[K, V]]:
        """Open a view without the open transaction, for a query on another thread.

        Yields:
            The view.

        Raises:
            ClosedError: the store is closed, or not restored yet.
        """
        database = self._opened()
        further = {
            name: FamilyView(database.get_column_family(name), *codecs)
            for name, codecs in self._further.items()
        }
        yield RocksView(database, *self._codecs(), further)

    def destroy(self) -> None:
        """Close the database."""
        database, self._database = self._database, None
        self._families.clear()
        if database is not None:
            database.close()

    def _open(self) -> Rdict:
        refuse_other_files(self._recovered, "RocksStore")
        try:
            database = open_database(self._directory, self._further, self._configure)
        except Exception as error:
            raise ShardStoreError(
                f"the database in {self._directory} cannot be opened: {error}"
            ) from error
        self._sequence_number = database.latest_sequence_number()
        self._attach(database, *self._codecs())
        self._families = {
            name: Family(database.get_column_family(name), *codecs)
            for name, codecs in self._further.items()
        }
        self._families["default"] = self
        return database

    def _opened(self) -> Rdict:
        if self._database is None:
            raise ClosedError("the store is closed, or not restored yet; call restore() first")
        return self._database

    def _codecs(self) -> _Codecs:
        return _codecs(*self._declared, type_arguments(self))

    def _write(self, database: Rdict, checkpoint: Checkpoint) -> None:
        deadline = time.monotonic() + WRITE_STALL_TIMEOUT_S
        while True:
            try:
                # A refused write has consumed its batch.
                database.write(self._batch(database, checkpoint), self._write_options)
            except Exception as error:
                # rocksdict raises no more specific class.
                if "Write stall" not in str(error) or time.monotonic() > deadline:
                    raise ShardStoreError(f"the database refused the commit: {error}") from error
                time.sleep(_STALL_PAUSE_S)
            else:
                return

    def _batch(self, database: Rdict, checkpoint: Checkpoint) -> WriteBatch:
        batch = WriteBatch(raw_mode=True)
        put, delete = batch.put, batch.delete
        for name, family in self._families.items():
            handle = None if family is self else database.get_column_family_handle(name)
            for key, value in family.puts.items():
                if value is None:
                    delete(key, handle)
                else:
                    put(key, value, handle)
        self._put_timers(database, batch)
        for key, value in self._row_changes.items():
            if value is None:
                delete(_ROW + key)
            else:
                put(_ROW + key, value)
        put(CHECKPOINT_KEY, checkpoint.to_bytes())
        for journal, offset in checkpoint.offsets.items():
            put(_mark_key(journal), _mark_value(offset))
        return batch

    def _put_timers(self, database: Rdict, batch: WriteBatch) -> None:
        put, delete = batch.put, batch.delete
        for key, due_us in self._timer_changes.items():
            by_key = _TIMER_BY_KEY + key
            former = database.get(by_key)
            if former is not None:
                delete(_TIMER_BY_TIME + former + key)
            if due_us is not None:
                put(by_key, due_us.to_bytes(_TIME_BYTES, "big"))
                put(_timer_by_time(due_us, key), b"")
            elif former is not None:
                delete(by_key)


class RocksView(_OwnRows[K, V]):
    """View of the local commits of a ``RocksStore``; read-only, for any thread.

    Each ``get`` reads the last commit, and an iteration the commit at its beginning.
    """

    def __init__(
        self,
        source: Any,
        keys: Codec[K],
        values: Codec[V],
        families: Mapping[str, FamilyView[Any, Any]],
    ) -> None:
        super().__init__(source, keys, values)
        self._further = families

    def family(self, name: str) -> FamilyView[Any, Any]:
        """Return the view of a further column family; KeyError if it was not declared."""
        return self._further[name]

    def entries(self, keys: Sequence[Any] | None, limit: int) -> Sequence[Entry]:
        """Return entries; see :class:`~gazette_sdk.shard.stores.base.ShownView`."""
        return list(itertools.islice(self._entries(keys), limit))

    def _entries(self, keys: Sequence[Any] | None) -> Iterator[Entry]:
        for name, family in (("", self), *sorted(self._further.items())):
            if keys is None:
                for encoded, value in family._rows(b"", None):  # noqa: SLF001 - a view like this one
                    yield Entry(name, encoded, value)
                continue
            for encoded in map(stored_key, keys):
                found = None if encoded.startswith(RESERVED) else family._find(encoded)  # noqa: SLF001
                if found is not None:
                    yield Entry(name, encoded, found)


def _timer_by_time(due_us: int, key: bytes) -> bytes:
    return _TIMER_BY_TIME + due_us.to_bytes(_TIME_BYTES, "big") + key


def _mark_key(journal: str) -> bytes:
    return _MARK_PREFIX + journal.encode().replace(b"\x00", b"\x00\xff") + _MARK_END


def _marked_journal(key: bytes) -> str:
    name = key.removeprefix(_MARK_PREFIX).removesuffix(_MARK_END)
    return name.replace(b"\x00\xff", b"\x00").decode()


def _mark_value(offset: int) -> bytes:
    """Return an offset's ordered encoding: small ones in a byte, else a length and big-endian."""
    if offset < 110:
        return bytes([0x88 + offset])
    content = offset.to_bytes((offset.bit_length() + 7) // 8, "big")
    return bytes([0xF5 + len(content)]) + content


def _marked_offset(value: bytes) -> int:
    if len(value) == 1 and 0x88 <= value[0] <= 0xF5:
        return value[0] - 0x88
    if not value or value[0] - 0xF5 != len(value) - 1:
        raise DecodeError(f"{value!r} is no offset; restore hints of another recovery log")
    return int.from_bytes(value[1:], "big")
