"""State as keys and values in RocksDB.

Each commit is one write batch, which holds the checkpoint, too (`shard` 9.2); the files that it and
RocksDB's own threads changed are found by a scan of the directory.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from rocksdict import Rdict, WriteBatch

from gazette_sdk.errors import ClosedError, ConfigurationError, DecodeError, ShardStoreError
from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.shard.recovery.file_change import FileChange
from gazette_sdk.shard.stores.base import (
    UNCOMMITTED_BYTES_MAX,
    UNCOMMITTED_PUTS_MAX,
    recovered_files,
    refuse_other_files,
    type_arguments,
)
from gazette_sdk.shard.stores.codec import Codec, key_codec, value_codec
from gazette_sdk.shard.stores.rocks_family import RESERVED, Family, FamilyView, prefix_end
from gazette_sdk.shard.stores.rocks_files import RocksFiles
from gazette_sdk.shard.stores.rocks_options import Configure, open_database, write_options

__all__ = ["RocksStore", "RocksView"]

K = TypeVar("K")
V = TypeVar("V")

CHECKPOINT_KEY, _MARK = RESERVED
_MARK_PREFIX = _MARK + b"\x12"
_MARK_END = b"\x00\x01"

WRITE_STALL_TIMEOUT_S = 60.0
"""Bound of the wait for RocksDB to accept a write again."""
_STALL_PAUSE_S = 0.01

_Codecs = tuple[Codec[Any], Codec[Any]]


class RocksStore(Family[K, V]):
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
        self._further = {
            name: (key_codec(of_key), value_codec(of_value))
            for name, (of_key, of_value) in (families or {}).items()
        }
        self._configure = configure
        self._files = RocksFiles(directory)
        self._write_options = write_options()
        self._database: Rdict | None = None
        self._families: dict[str, Family[Any, Any]] = {}
        self._sequence_number = 0

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

    def start_commit(self, checkpoint: Checkpoint) -> Sequence[FileChange]:
        """Write the transaction's puts and the checkpoint.

        Args:
            checkpoint: the position behind the transaction.

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
        return self._files.changes()

    def finish_commit(self) -> None:
        """End the commit: nothing is to be done."""

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
        key, value = self._declared
        if key is None and value is None:
            key, value = type_arguments(self) or (str, object)
        return key_codec(str if key is None else key), value_codec(
            object if value is None else value
        )

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
        put(CHECKPOINT_KEY, checkpoint.to_bytes())
        for journal, offset in checkpoint.offsets.items():
            put(_mark_key(journal), _mark_value(offset))
        return batch


class RocksView(FamilyView[K, V]):
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
