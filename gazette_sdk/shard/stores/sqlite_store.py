"""State in an SQLite database, with SQL in the handler.

The checkpoint is a row of the database. The recovery log holds the database's pages
(``sqlite_pages``); Gazette's own consumers record SQLite in another way, and cannot play it.
"""

from __future__ import annotations

import contextlib
import functools
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from gazette_sdk.errors import ClosedError, DecodeError, ShardStoreError, UnreadableStateError
from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.shard.recovery.file_change import FileChange
from gazette_sdk.shard.stores.base import (
    UNCOMMITTED_PUTS_MAX,
    recovered_files,
    refuse_other_files,
)
from gazette_sdk.shard.stores.sqlite_pages import PAGE_BYTES, SqlitePages, restore_database

__all__ = ["SqliteStore", "SqliteView", "without_nan"]

Parameters: TypeAlias = Sequence[Any] | Mapping[str, Any]

WAL_BYTES_MAX = 16 << 20
"""Length of SQLite's write-ahead log from which on it is copied to the database file."""

# The comment keeps these apart from an application's statements in the cache of statements, which
# the authorizer has let pass.
_BEGIN = "BEGIN IMMEDIATE /* store */"
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


class SqliteStore:
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
            return self._in_transaction().execute(sql, without_nan(parameters))

    def executemany(self, sql: str, parameters: Iterable[Parameters]) -> sqlite3.Cursor:
        """Run a statement once for each set of parameters; else as ``execute``."""
        with _failures_of_the_machine():
            # A generator: of a function in map(), StopIteration would end the rows early.
            rows = (without_nan(row) for row in parameters)
            return self._in_transaction().executemany(sql, rows)

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

    def start_commit(self, checkpoint: Checkpoint) -> Sequence[FileChange]:
        """Store the checkpoint, and commit.

        Args:
            checkpoint: the position behind the transaction.

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

    def rerecord(self, path: str) -> Sequence[FileChange]:
        """Return changes that record a file of pages anew; nothing if it is not recorded."""
        return self._pages.rerecord(path)

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
