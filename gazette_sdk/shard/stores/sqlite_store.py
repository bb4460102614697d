"""State in an SQLite database, with SQL in the handler.

The checkpoint is a row of the database. The recovery log holds the database's pages; Gazette's own
consumers record SQLite in another way, and cannot play it.

The log holds neither the database file nor its write-ahead log, but the pages: file ``/pages/N``
holds 1,024 of them, in order. After a COMMIT, the frames after the last recorded one are read from
the write-ahead log, and the newest image of each page is written to its place. A checkpoint of
SQLite, which copies pages from there to the database file, records nothing.

Format of the write-ahead log: https://www.sqlite.org/fileformat2.html#walformat
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sqlite3
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, TypeAlias

from gazette_sdk.errors import ClosedError, DecodeError, ShardStoreError, UnreadableStateError
from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.shard.recovery.fsm import HOLES_BYTES_MAX
from gazette_sdk.shard.recovery.hints import CreateFile, FileChange, RemoveFile, WriteFile
from gazette_sdk.shard.stores.base import (
    UNCOMMITTED_PUTS_MAX,
    Entry,
    StoreWithoutExpiry,
    TimerRow,
    prefix_end,
    recovered_files,
    refuse_other_files,
)

PAGE_BYTES = 4096
EXTENT_PAGES = 1024
EXTENT_BYTES = PAGE_BYTES * EXTENT_PAGES
"""Size of a file of pages, which is what a player reads again when one is recorded anew."""

_WAL_HEADER = struct.Struct(">IIIIII")
_WAL_HEADER_BYTES = 32
_WAL_MAGIC = (0x377F0682, 0x377F0683)
_FRAME_HEADER = struct.Struct(">IIII")
_FRAME_HEADER_BYTES = 24
_FRAME_BYTES = _FRAME_HEADER_BYTES + PAGE_BYTES
_READ_FRAMES = 256

# Of page 1: the number of the database's pages.
_PAGE_COUNT = struct.Struct(">I")
_PAGE_COUNT_AT = 28


class SqlitePages:
    """Recorded pages of one database, of which the caller has the only writing connection.

    Args:
        database: the file; its write-ahead log stands beside it.
        extents: numbers of the files of pages that are recorded.
    """

    def __init__(self, database: Path, extents: Sequence[int]) -> None:
        self._database = database
        self._wal = database.with_name(f"{database.name}-wal")
        self._extents = set(extents)
        # Of the write-ahead log's present run: its salts, the end of the last recorded frame, and
        # the position of the newest recorded image of each page.
        self._salts: tuple[int, int] | None = None
        self._position = _WAL_HEADER_BYTES
        self._images: dict[int, int] = {}

    @property
    def wal_bytes(self) -> int:
        """Length of the write-ahead log, as far as it is recorded."""
        return self._position

    def changes(self) -> list[FileChange]:
        """Return the changes since the last call, after a COMMIT.

        Raises:
            ShardStoreError: the write-ahead log cannot be understood.
            OSError: it cannot be read.
        """
        if not self._extents:
            # Page 1 of a new database never stood in the write-ahead log.
            self._advance()
            return self._record(self._all_pages())
        return self._record(self._advance())

    def rerecord(self, path: str) -> Sequence[FileChange]:
        """Return changes that record a file of pages anew; nothing if it is not recorded."""
        extent = _extent_of(path)
        if extent is None or extent not in self._extents:
            return ()
        first = extent * EXTENT_PAGES + 1
        with self._database.open("rb") as file:
            file.seek(extent * EXTENT_BYTES)
            content = bytearray(file.read(EXTENT_BYTES))
        for page, image in self._read_images(range(first, first + EXTENT_PAGES)):
            at = (page - first) * PAGE_BYTES
            content.extend(bytes(max(0, at - len(content))))
            content[at : at + PAGE_BYTES] = image
        return RemoveFile(path), CreateFile(path, bytes(content))

    def _all_pages(self) -> dict[int, bytes]:
        content = self._database.read_bytes()
        pages = {
            number: content[(number - 1) * PAGE_BYTES : number * PAGE_BYTES]
            for number in range(1, len(content) // PAGE_BYTES + 1)
        }
        pages.update(self._read_images(self._images))
        return pages

    def _advance(self) -> dict[int, bytes]:
        """Read frames up to the last one that ends a transaction.

        Returns:
            The newest image of each page in them.
        """
        found: dict[int, bytes] = {}
        try:
            wal = self._wal.open("rb")
        except FileNotFoundError:
            return found
        with wal:
            salts = _read_salts(wal)
            if salts is None:
                return found
            if salts != self._salts:
                # A new run: all frames of the last one stand in the database file.
                self._salts, self._position = salts, _WAL_HEADER_BYTES
                self._images.clear()
            pending: dict[int, tuple[int, bytes]] = {}
            for at, page, pages_after, image in _frames(wal, self._position, salts):
                pending[page] = at, image
                if pages_after:
                    self._position = at + _FRAME_BYTES
                    for number, (position, content) in pending.items():
                        self._images[number] = position
                        found[number] = content
                    pending.clear()
        return found

    def _read_images(self, pages: Iterable[int]) -> Iterator[tuple[int, bytes]]:
        """Yield those pages whose recorded images stand in the write-ahead log.

        After a checkpoint, all stand in the database file. The log is then empty, or begun anew.
        """
        positions = {page: self._images[page] for page in pages if page in self._images}
        if not positions:
            return
        with self._wal.open("rb") as wal:
            if _read_salts(wal) != self._salts:
                return
            for page, at in positions.items():
                wal.seek(at + _FRAME_HEADER_BYTES)
                image = wal.read(PAGE_BYTES)
                if len(image) != PAGE_BYTES:
                    raise ShardStoreError(f"{self._wal} has lost page {page}; check the disk")
                yield page, image

    def _record(self, pages: Mapping[int, bytes]) -> list[FileChange]:
        """Return pages as changes: new files, runs of pages, and files after a smaller end."""
        changes: list[FileChange] = []
        numbered = sorted(pages)
        for extent, of_extent in itertools.groupby(numbered, lambda n: (n - 1) // EXTENT_PAGES):
            path = f"/pages/{extent}"
            if extent not in self._extents:
                self._extents.add(extent)
                changes.append(CreateFile(path))
            for _, run in itertools.groupby(
                enumerate(of_extent), lambda counted: counted[1] - counted[0]
            ):
                numbers = [number for _, number in run]
                offset = (numbers[0] - 1 - extent * EXTENT_PAGES) * PAGE_BYTES
                content = b"".join(pages[number] for number in numbers)
                changes.append(WriteFile(path, offset, content))
        if 1 in pages:
            extents = -(-_page_count(pages[1]) // EXTENT_PAGES)
            behind = sorted(extent for extent in self._extents if extent >= extents)
            changes += [RemoveFile(f"/pages/{extent}") for extent in behind]
            self._extents.difference_update(behind)
        return changes


def restore_database(directory: Path, database: Path) -> list[int]:
    """Join recovered files of pages to a database file, and remove them.

    Args:
        directory: in which a player restored ``pages/N``.
        database: to create; left alone if there are no such files.

    Returns:
        The numbers of the files of pages that are recorded.

    Raises:
        ShardStoreError: the files are no database.
    """
    files: dict[int, Path] = {}
    for file in (directory / "pages").glob("*"):
        extent = _extent_of(f"/pages/{file.name}")
        if extent is None or file.stat().st_size > EXTENT_BYTES:
            raise ShardStoreError(
                f"{file} is no file of pages: their names are numbers, and they have"
                f" {EXTENT_BYTES} bytes at most; restore hints of another time"
            )
        files[extent] = file
    if not files:
        return []
    if 0 not in files or files[0].stat().st_size < PAGE_BYTES:
        raise ShardStoreError(f"{directory}/pages lacks page 1; restore hints of another time")
    with files[0].open("rb") as first:
        size = _page_count(first.read(PAGE_BYTES)) * PAGE_BYTES
    if size < PAGE_BYTES or size > len(files) * EXTENT_BYTES + HOLES_BYTES_MAX:
        raise ShardStoreError(
            f"{database} cannot be restored: its pages are of {size} bytes, in {len(files)} files"
            f" of {EXTENT_BYTES} bytes; restore hints of another time"
        )
    with database.open("wb") as joined:
        for extent, file in sorted(files.items()):
            # After the end are pages of a time at which the database was larger.
            if extent * EXTENT_BYTES < size:
                joined.seek(extent * EXTENT_BYTES)
                joined.write(file.read_bytes())
        joined.truncate(size)
    for file in files.values():
        file.unlink()
    return sorted(files)


def _extent_of(path: str) -> int | None:
    number = path.removeprefix("/pages/")
    return int(number) if number.isdecimal() and number != path else None


def _page_count(first_page: bytes) -> int:
    (count,) = _PAGE_COUNT.unpack_from(first_page, _PAGE_COUNT_AT)
    return int(count)


def _read_salts(wal: BinaryIO) -> tuple[int, int] | None:
    """Return the salts of the header; None if the file is empty."""
    header = wal.read(_WAL_HEADER_BYTES)
    if not header:
        return None
    if len(header) < _WAL_HEADER_BYTES:
        raise ShardStoreError("the write-ahead log has no whole header; check the disk")
    magic, _, page_bytes, _, salt, other_salt = _WAL_HEADER.unpack_from(header)
    if magic not in _WAL_MAGIC or page_bytes != PAGE_BYTES:
        raise ShardStoreError(
            f"the write-ahead log has pages of {page_bytes} bytes; do not change the page size"
        )
    return salt, other_salt


def _frames(
    wal: BinaryIO, position: int, salts: tuple[int, int]
) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield position, page number, pages after the transaction (if it ends here), and image."""
    wal.seek(position)
    while content := wal.read(_READ_FRAMES * _FRAME_BYTES):
        for at in range(0, len(content) - _FRAME_BYTES + 1, _FRAME_BYTES):
            page, pages_after, *frame_salts = _FRAME_HEADER.unpack_from(content, at)
            if tuple(frame_salts) != salts:
                # A frame of an earlier run of the log, which is longer than this one.
                return
            image = content[at + _FRAME_HEADER_BYTES : at + _FRAME_BYTES]
            yield position + at, page, pages_after, image
        position += len(content)


Parameters: TypeAlias = Sequence[Any] | Mapping[str, Any]

WAL_BYTES_MAX = 16 << 20
"""Length of SQLite's write-ahead log from which on it is copied to the database file."""

# The comment keeps these apart from an application's statements in the cache of statements, which
# the authorizer has let pass.
_BEGIN = "BEGIN IMMEDIATE /* store */"
_BEGIN_RECORD = "SAVEPOINT record /* store */"
_UNDO_RECORD = "ROLLBACK TO record /* store */"
_END_RECORD = "RELEASE record /* store */"
_COMMIT = "COMMIT /* store */"
_ROLLBACK = "ROLLBACK /* store */"
_REFUSED = frozenset(
    {
        sqlite3.SQLITE_TRANSACTION,
        sqlite3.SQLITE_SAVEPOINT,
        sqlite3.SQLITE_PRAGMA,
        sqlite3.SQLITE_ATTACH,
        sqlite3.SQLITE_DETACH,
    }
)
_MACHINE_CODES = frozenset(
    {
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
    }
)
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS gazette_checkpoint"
    " (rowid INTEGER PRIMARY KEY DEFAULT 0 CHECK (rowid = 0), checkpoint BLOB)"
)

_TIMERS_SCHEMA = """
    CREATE TABLE IF NOT EXISTS gazette_timers (key BLOB PRIMARY KEY, due_us INTEGER NOT NULL)
        WITHOUT ROWID;
    CREATE INDEX IF NOT EXISTS gazette_timers_due ON gazette_timers (due_us, key)
"""
_HAS_TIMERS = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'gazette_timers'"
_TIMERS_AFTER = (
    "SELECT due_us, key FROM gazette_timers WHERE (due_us, key) > (?, ?)"
    " ORDER BY due_us, key LIMIT ?"
)
_PUT_TIMER = (
    "INSERT INTO gazette_timers (key, due_us) VALUES (?, ?)"
    " ON CONFLICT (key) DO UPDATE SET due_us = excluded.due_us"
)
_REMOVE_TIMER = "DELETE FROM gazette_timers WHERE key = ?"

_ROWS_SCHEMA = """
    CREATE TABLE IF NOT EXISTS gazette_rows (key BLOB PRIMARY KEY, state BLOB NOT NULL)
        WITHOUT ROWID
"""
_ROW = "SELECT state FROM gazette_rows WHERE key = ?"
_ROWS_OF = "SELECT key, state FROM gazette_rows WHERE key >= ? AND key < ? ORDER BY key"
_ROWS_FROM = "SELECT key, state FROM gazette_rows WHERE key >= ? ORDER BY key LIMIT ?"
_TABLES = (
    "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'"
    " ORDER BY name"
)
_PUT_ROW = "INSERT OR REPLACE INTO gazette_rows (key, state) VALUES (?, ?)"
_REMOVE_ROW = "DELETE FROM gazette_rows WHERE key = ?"


class SqliteStore(StoreWithoutExpiry):
    """State in an SQLite database of the shard's own.

    Args:
        directory: of the shard; holds the recovered files.
        schema: statements that are run at each start, such as ``CREATE TABLE IF NOT EXISTS …``.
    """

    overlaps_commit: ClassVar[bool] = True

    def __init__(self, directory: Path, *, schema: str = "") -> None:
        self._database = directory / "database.sqlite"
        self._directory = directory
        self._recovered = recovered_files(directory)
        self._schema = schema
        self._connection: sqlite3.Connection | None = None
        self._pages: SqlitePages
        self._is_own = False
        self._changes_before = 0
        # Of the record that is consumed: whether it can be undone, and has a savepoint; and the
        # number of changes before it.
        self._undoes = self._has_savepoint = False
        self._changes_before_record = 0

    @classmethod
    def of(cls, *, schema: str) -> Callable[[Path], SqliteStore]:
        """Return a function that makes such stores; the arguments are those of the class."""
        return functools.partial(cls, schema=schema)

    @property
    def is_full(self) -> bool:
        """The transaction changed ``UNCOMMITTED_PUTS_MAX`` rows."""
        connection = self._connection
        return (
            connection is not None
            and connection.total_changes - self._changes_before >= UNCOMMITTED_PUTS_MAX
        )

    def execute(self, sql: str, parameters: Parameters = ()) -> sqlite3.Cursor:
        """Run a statement in the open transaction.

        Args:
            sql: one statement. BEGIN, COMMIT, ROLLBACK, SAVEPOINT, PRAGMA and ATTACH are refused.
            parameters: of its placeholders.

        Returns:
            The cursor, with the rows.

        Raises:
            UnreadableStateError: a parameter is NaN, which SQLite stores as NULL.
            sqlite3.Error: the statement is wrong, breaks a constraint, or is refused ("not
                authorized").
            ShardStoreError: the disk or the database failed; or no transaction is open, as an
                earlier failure ended it.
        """
        with _failures_of_the_machine():
            return self._for_record().execute(sql, without_nan(parameters))

    def executemany(self, sql: str, parameters: Iterable[Parameters]) -> sqlite3.Cursor:
        """Run a statement once for each set of parameters; else as ``execute``."""
        with _failures_of_the_machine():
            # A generator: of a function in map(), StopIteration would end the rows early.
            rows = (without_nan(row) for row in parameters)
            return self._for_record().executemany(sql, rows)

    @contextlib.contextmanager
    def committed(self) -> Iterator[SqliteView]:
        """Open a view of the last local commit, for a query on another thread.

        While a view reads, SQLite's write-ahead log is not cut.

        Yields:
            The view.

        Raises:
            ClosedError: the store is closed, or not restored yet.
        """
        self._opened()
        reader = sqlite3.connect(f"{self._database.absolute().as_uri()}?mode=ro", uri=True)
        try:
            yield SqliteView(reader)
        finally:
            reader.close()

    def restore(self) -> Checkpoint:
        """Open the database, the first time; roll back the open transaction.

        Returns:
            The stored checkpoint, or the empty one.

        Raises:
            ShardStoreError: the database cannot be opened or read, or the files are of another
                store.
        """
        try:
            connection = self._connection or self._open()
            if connection.in_transaction:
                self._control(_ROLLBACK)
            row = connection.execute("SELECT checkpoint FROM gazette_checkpoint").fetchone()
            return Checkpoint.from_bytes(row[0]) if row is not None else Checkpoint()
        except (sqlite3.Error, OSError, DecodeError) as error:
            raise ShardStoreError(f"{self._database} cannot be restored: {error}") from error

    def begin(self) -> None:
        """Begin a transaction.

        Raises:
            ClosedError: the store is closed, or not restored yet.
            sqlite3.Error: SQLite failed.
        """
        self._changes_before = self._opened().total_changes
        self._control(_BEGIN)
        self._undoes = self._has_savepoint = False

    def begin_record(self) -> None:
        """Begin a record, whose changes may be undone: by a savepoint, before its first statement.

        Raises:
            sqlite3.Error: SQLite failed.
        """
        if self._has_savepoint:
            self._control(_END_RECORD)
        self._undoes, self._has_savepoint = True, False
        self._changes_before_record = self._opened().total_changes

    def undo_record(self) -> bool:
        """Undo the changes since the last ``begin_record``.

        Returns:
            False if SQLite ended the transaction, or a cursor of an earlier record was used.

        Raises:
            sqlite3.Error: SQLite failed.
        """
        connection = self._opened()
        if not connection.in_transaction:
            return False
        if not self._has_savepoint:
            return connection.total_changes == self._changes_before_record
        self._control(_UNDO_RECORD)
        return True

    def _for_record(self) -> sqlite3.Connection:
        """Return the connection, with a savepoint before the first statement of a record."""
        connection = self._in_transaction()
        if self._undoes and not self._has_savepoint:
            self._control(_BEGIN_RECORD)
            self._has_savepoint = True
        return connection

    def start_commit(self, checkpoint: Checkpoint) -> Sequence[FileChange]:
        """Store the checkpoint, and commit.

        Args:
            checkpoint: the position after the transaction.

        Returns:
            Writes of the pages that changed since the last commit.

        Raises:
            ShardStoreError: a failure ended the transaction, or SQLite failed.
            OSError: the files cannot be read.
        """
        connection = self._in_transaction()
        try:
            connection.execute(
                "INSERT OR REPLACE INTO gazette_checkpoint (rowid, checkpoint) VALUES (0, ?)",
                (checkpoint.to_bytes(),),
            )
            self._control(_COMMIT)
            changes = self._pages.changes()
            if self._pages.wal_bytes >= WAL_BYTES_MAX:
                # Does nothing while a query reads.
                self._control("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.Error as error:
            raise ShardStoreError(f"SQLite refused the commit: {error}") from error
        return changes

    def finish_commit(self) -> None:
        """End the commit: nothing is to be done."""

    def open_timers(self) -> None:
        """Create the table of timers if it is missing.

        Raises:
            ShardStoreError: SQLite failed.
        """
        self._create(_TIMERS_SCHEMA)

    def timers_after(self, row: TimerRow | None, limit: int) -> Sequence[TimerRow]:
        """Return the next timers; see :class:`~gazette_sdk.shard.stores.base.TimerStore`."""
        return _timers_after(self._opened(), row, limit)

    def put_timers(self, changes: Mapping[bytes, int | None]) -> None:
        """Put timers, just before ``start_commit``; None removes one.

        Raises:
            ShardStoreError: a failure ended the transaction, or SQLite failed.
        """
        connection = self._in_transaction()
        put = [(key, due_us) for key, due_us in changes.items() if due_us is not None]
        removed = [(key,) for key, due_us in changes.items() if due_us is None]
        with _failures_of_tables():
            connection.executemany(_REMOVE_TIMER, removed)
            connection.executemany(_PUT_TIMER, put)

    def open_rows(self) -> None:
        """Create the table of rows if it is missing.

        Raises:
            ShardStoreError: SQLite failed.
        """
        self._create(_ROWS_SCHEMA)

    def row(self, key: bytes) -> bytes | None:
        """Return a row; see :class:`~gazette_sdk.shard.stores.base.RowStore`."""
        return _row(self._opened(), key)

    def rows_of(self, prefix: bytes) -> Sequence[tuple[bytes, bytes]]:
        """Return rows; see :class:`~gazette_sdk.shard.stores.base.RowStore`."""
        return _rows_of(self._opened(), prefix)

    def put_rows(self, changes: Mapping[bytes, bytes | None]) -> None:
        """Put rows, just before ``start_commit``; None removes one.

        Raises:
            ShardStoreError: a failure ended the transaction, or SQLite failed.
        """
        connection = self._in_transaction()
        put = [(key, state) for key, state in changes.items() if state is not None]
        removed = [(key,) for key, state in changes.items() if state is None]
        with _failures_of_tables():
            connection.executemany(_REMOVE_ROW, removed)
            connection.executemany(_PUT_ROW, put)

    def rerecord(self, path: str) -> Sequence[FileChange]:
        """Return changes that record a file of pages anew; nothing if it is not recorded."""
        return self._pages.rerecord(path)

    def _create(self, schema: str) -> None:
        connection = self._opened()
        with _failures_of_tables():
            self._control(_BEGIN)
            for statement in _statements(schema):
                connection.execute(statement)
            self._control(_COMMIT)

    def destroy(self) -> None:
        """Close the database."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _open(self) -> sqlite3.Connection:
        refuse_other_files(self._recovered, "SqliteStore")
        extents = restore_database(self._directory, self._database)
        self._pages = SqlitePages(self._database, extents)
        # Calls come one at a time, but from any thread. No time-out: a checkpoint does not wait for
        # queries, and there is no other writer.
        connection = sqlite3.connect(
            self._database, isolation_level=None, check_same_thread=False, timeout=0
        )
        self._connection = connection
        for pragma in (
            f"page_size = {PAGE_BYTES}",
            "journal_mode = WAL",
            "wal_autocheckpoint = 0",
            # The recovery log is what is durable.
            "synchronous = OFF",
        ):
            connection.execute(f"PRAGMA {pragma}").fetchall()
        connection.set_authorizer(self._authorize)
        self._control(_BEGIN)
        connection.execute(_SCHEMA)
        for statement in _statements(self._schema):
            connection.execute(statement)
        self._control(_COMMIT)
        return connection

    def _authorize(self, action: int, *_: str | None) -> int:
        refused = action in _REFUSED and not self._is_own
        return sqlite3.SQLITE_DENY if refused else sqlite3.SQLITE_OK

    def _control(self, sql: str) -> None:
        self._is_own = True
        try:
            self._opened().execute(sql).fetchall()
        finally:
            self._is_own = False

    def _opened(self) -> sqlite3.Connection:
        if self._connection is None:
            raise ClosedError("the store is closed, or not restored yet; call restore() first")
        return self._connection

    def _in_transaction(self) -> sqlite3.Connection:
        connection = self._opened()
        if not connection.in_transaction:
            raise ShardStoreError(
                "no transaction is open; an earlier failure ended it: let errors of SQLite leave"
                " the handler"
            )
        return connection


class SqliteView:
    """View of the local commits of a ``SqliteStore``; read-only.

    Args:
        connection: read-only connection.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def execute(self, sql: str, parameters: Parameters = ()) -> sqlite3.Cursor:
        """Run a query.

        Raises:
            sqlite3.Error: it failed, or would change something.
        """
        return self._connection.execute(sql, parameters)

    def row(self, key: bytes) -> bytes | None:
        """Return a row; see :class:`~gazette_sdk.shard.stores.base.RowStore`."""
        return _row(self._connection, key)

    def rows_of(self, prefix: bytes) -> Sequence[tuple[bytes, bytes]]:
        """Return rows; see :class:`~gazette_sdk.shard.stores.base.RowStore`."""
        return _rows_of(self._connection, prefix)

    def rows_from(self, lower: bytes, limit: int) -> Sequence[tuple[bytes, bytes]]:
        """Return rows; see :class:`~gazette_sdk.shard.stores.base.ShownView`."""
        with _failures_of_tables():
            if "gazette_rows" not in self._tables():
                return ()
            return self._connection.execute(_ROWS_FROM, (lower, limit)).fetchall()

    def timers_after(self, row: TimerRow | None, limit: int) -> Sequence[TimerRow]:
        """Return the next timers; see :class:`~gazette_sdk.shard.stores.base.TimerStore`."""
        return _timers_after(self._connection, row, limit)

    def entries(self, keys: Sequence[Any] | None, limit: int) -> Sequence[Entry]:
        """Return rows of the application's tables, whose names are the keys.

        See :class:`~gazette_sdk.shard.stores.base.ShownView`.
        """
        found: list[Entry] = []
        with _failures_of_the_machine():
            for table in self._tables():
                if table.startswith("gazette_") or not (keys is None or table in keys):
                    continue
                name = table.replace('"', '""')
                rows = self._connection.execute(
                    f'SELECT * FROM "{name}" LIMIT ?',  # noqa: S608 - it is quoted
                    (limit - len(found),),
                )
                columns = [column[0] for column in rows.description]
                found += [Entry(table, None, dict(zip(columns, row, strict=True))) for row in rows]
        return found

    def _tables(self) -> list[str]:
        """Return the names of the tables, without those of SQLite's own."""
        return [name for (name,) in self._connection.execute(_TABLES)]

    def interrupt(self) -> None:
        """Have a statement that runs fail with ``sqlite3.OperationalError``, from any thread."""
        self._connection.interrupt()


def without_nan(parameters: Parameters) -> Parameters:
    """Return the parameters of a statement as they are.

    Raises:
        UnreadableStateError: one is NaN, which SQLite stores as NULL.
    """
    # The first test spares most calls the slower second one.
    if isinstance(parameters, tuple | list) or not isinstance(parameters, Mapping):
        values: Iterable[Any] = parameters
    else:
        values = parameters.values()
    for value in values:
        if isinstance(value, float) and value != value:  # noqa: PLR0124 - true of NaN only
            raise UnreadableStateError(
                "a parameter is NaN, which SQLite stores as NULL; put None, or another number"
            )
    return parameters


@contextlib.contextmanager
def _failures_of_tables() -> Iterator[None]:
    """Raise ShardStoreError for failures of the tables of timers and rows."""
    try:
        yield
    except sqlite3.Error as error:
        raise ShardStoreError(
            f"the tables of timers and rows, gazette_*, cannot be used: {error}"
        ) from error


def _timers_after(
    connection: sqlite3.Connection, row: TimerRow | None, limit: int
) -> Sequence[TimerRow]:
    due_us, key = row or (-1, b"")
    with _failures_of_tables():
        if row is None and connection.execute(_HAS_TIMERS).fetchone() is None:
            return ()
        return list(
            itertools.starmap(TimerRow, connection.execute(_TIMERS_AFTER, (due_us, key, limit)))
        )


def _row(connection: sqlite3.Connection, key: bytes) -> bytes | None:
    with _failures_of_tables():
        found = connection.execute(_ROW, (key,)).fetchone()
    return None if found is None else found[0]


def _rows_of(connection: sqlite3.Connection, prefix: bytes) -> Sequence[tuple[bytes, bytes]]:
    with _failures_of_tables():
        return connection.execute(_ROWS_OF, (prefix, prefix_end(prefix))).fetchall()


@contextlib.contextmanager
def _failures_of_the_machine() -> Iterator[None]:
    """Raise ShardStoreError for failures that no record is to blame for."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        # Errors that Python's module raises itself have no code.
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in _MACHINE_CODES:
            raise ShardStoreError(f"SQLite failed: {error}; check the disk") from error
        raise


def _statements(script: str) -> Iterator[str]:
    """Yield the statements of a script, cut at the semicolons that end one."""
    statement = ""
    for part in script.split(";"):
        statement += f"{part};"
        if sqlite3.complete_statement(statement):
            if statement.strip(" \t\r\n;"):
                yield statement
            statement = ""
    if statement.strip(" \t\r\n;"):
        yield statement
