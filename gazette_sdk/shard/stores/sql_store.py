"""State in a remote SQL database, fenced by a row for each shard.

The row holds a number, the fence, and the checkpoint (`shard` 9.4). A primary raises the fence when
it takes over, and commits only while it is its own. The application's statements and the row are
one transaction of the database.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeAlias

from gazette_sdk.errors import (
    ClosedError,
    DecodeError,
    FencedError,
    ShardStoreError,
    needs_extra,
)
from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.shard.recovery.hints import FileChange
from gazette_sdk.shard.stores.base import (
    TIMER_KEY_BYTES_MAX,
    StoreWithoutExpiry,
    TimerRow,
    prefix_end,
    recovered_files,
    refuse_other_files,
)
from gazette_sdk.shard.stores.sqlite_store import without_nan

with needs_extra("shards", "stores of SQL databases"):
    import sqlalchemy as sa
    import sqlalchemy.exc
    from sqlalchemy.dialects import mysql

Parameters: TypeAlias = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None

_TABLE = sa.Table(
    "gazette_checkpoints",
    sa.MetaData(),
    sa.Column("shard_fqn", sa.String(512), primary_key=True),
    sa.Column("fence", sa.Integer, nullable=False),
    sa.Column("checkpoint", sa.LargeBinary, nullable=False),
)
_TIMERS = sa.Table(
    "gazette_timers",
    sa.MetaData(),
    sa.Column("shard_fqn", sa.String(512), primary_key=True),
    sa.Column(
        "timer_key",
        sa.LargeBinary().with_variant(mysql.VARBINARY(TIMER_KEY_BYTES_MAX), "mysql", "mariadb"),
        primary_key=True,
    ),
    sa.Column("due_us", sa.BigInteger, nullable=False),
    sa.Index("gazette_timers_due", "shard_fqn", "due_us", "timer_key"),
)
_ROWS = sa.Table(
    "gazette_rows",
    sa.MetaData(),
    sa.Column("shard_fqn", sa.String(512), primary_key=True),
    sa.Column(
        "row_key",
        sa.LargeBinary().with_variant(mysql.VARBINARY(TIMER_KEY_BYTES_MAX), "mysql", "mariadb"),
        primary_key=True,
    ),
    sa.Column(
        "state",
        sa.LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb"),
        nullable=False,
    ),
)
_NO_ROW = 0

_DATABASE_FAILURES = (
    sqlalchemy.exc.OperationalError,
    sqlalchemy.exc.InterfaceError,
    sqlalchemy.exc.InternalError,
)

IDLE_CHECK_S = 10.0
"""After so long without a transaction, the connection is tried before the next one."""


class NamedShard(Protocol):
    """A shard, of which only the name matters here."""

    @property
    def full_name(self) -> str:
        """Name that is unique among all applications."""


class SqlStore(StoreWithoutExpiry):
    """State in a database that SQLAlchemy reaches; ``SqlStore.of(url)`` declares it.

    Transactions do not overlap: the next one begins when the COMMIT of this one has returned. The
    database needs transactions with row locks, of at least "read committed". The table
    ``gazette_checkpoints`` is created if it is missing, and ``gazette_timers`` for an application
    with timers.

    Args:
        url: of the database, such as ``postgresql+psycopg://user@host/name``.
        shard_fqn: full name of the shard, the key of its row.
        idle_timeout_s: after so long without a statement in an open transaction, PostgreSQL ends
            it. It frees the locks of a primary that is frozen; set it to the lease's TTL.
        directory: of the shard, in which nothing may be recovered that another store wrote.
    """

    overlaps_commit: ClassVar[bool] = False
    is_full: ClassVar[bool] = False
    is_recorded: ClassVar[bool] = False

    def __init__(
        self,
        url: str | sa.URL,
        shard_fqn: str,
        *,
        idle_timeout_s: float = 30.0,
        directory: Path | None = None,
    ) -> None:
        self._shard_fqn = shard_fqn
        self._recovered = () if directory is None else recovered_files(directory)
        options: dict[str, Any] = {"poolclass": sa.NullPool}
        if is_postgresql := sa.make_url(url).get_backend_name() == "postgresql":
            options["isolation_level"] = "READ COMMITTED"
        self._engine = sa.create_engine(url, **options)
        if self._engine.dialect.name == "sqlite":
            _refuse_nan(self._engine)
        if is_postgresql:
            _bound_idle_transactions(self._engine, idle_timeout_s)
        self._connection: sa.Connection | None = None
        self._transaction: sa.RootTransaction | None = None
        self._fence = _NO_ROW
        self._checkpoint = b""
        self._used_at = 0.0

    @classmethod
    def of(cls, url: str | sa.URL, *, idle_timeout_s: float = 30.0) -> SqlStores:
        """Return what makes the store of each shard; the arguments are those of the class."""
        return SqlStores(url, idle_timeout_s)

    @property
    def connection(self) -> sa.Connection:
        """The connection of the open transaction; do not commit or roll back.

        Raises:
            ShardStoreError: no transaction is open; an earlier failure may have ended it.
        """
        connection, transaction = self._connection, self._transaction
        if connection is None or transaction is None or not transaction.is_active:
            raise ShardStoreError(
                "no transaction is open: it was not begun, or a failure or the handler ended it;"
                " leave commits to the shard, and let errors of the database leave the handler"
            )
        return connection

    def execute(
        self, statement: str | sa.Executable, parameters: Parameters = None
    ) -> sa.CursorResult[Any]:
        """Run a statement in the open transaction.

        Args:
            statement: SQL with parameters such as ``:name``, or a statement of SQLAlchemy.
            parameters: by name; or a list of them, to run the statement once for each.

        Returns:
            The result, with the rows.

        Raises:
            ShardStoreError: no transaction is open, or the database failed.
            UnreadableStateError: a parameter is NaN, which SQLite would store as NULL.
            sqlalchemy.exc.SQLAlchemyError: the statement is wrong, or breaks a constraint.
        """
        return _execute(self.connection, statement, parameters)

    @contextlib.contextmanager
    def committed(self) -> Iterator[SqlView]:
        """Open a view with a connection of its own, for a query on another thread.

        Yields:
            The view.

        Raises:
            ShardStoreError: the database cannot be reached.
        """
        try:
            connection = self._engine.connect()
        except sqlalchemy.exc.SQLAlchemyError as error:
            raise ShardStoreError(f"the database cannot be reached: {error}") from error
        # Closing rolls back what a query may have changed.
        with connection:
            yield SqlView(connection, self._shard_fqn)

    def restore(self) -> Checkpoint:
        """Raise the fence, and return the checkpoint; an open transaction is rolled back.

        Returns:
            The stored checkpoint, or the empty one.

        Raises:
            FencedError: another process inserted the shard's row at the same time.
            ShardStoreError: the database cannot be reached or used; or it has no checkpoint of the
                shard, whose recovery log has the files of another store.
        """
        self._disconnect()
        try:
            self._connection = self._engine.connect()
            _create_table(self._connection, _TABLE)
            with self._connection.begin():
                stored = self._raise_fence(self._connection)
                # Gazette, and earlier releases, store no bytes before the first commit.
                restored = Checkpoint.from_bytes(stored) if stored else Checkpoint()
                if restored == Checkpoint():
                    refuse_other_files(self._recovered, "SqlStore")
        except sqlalchemy.exc.IntegrityError as error:
            raise FencedError(
                f"another process inserted the checkpoint of {self._shard_fqn} just now"
            ) from error
        except (sqlalchemy.exc.SQLAlchemyError, DecodeError) as error:
            raise ShardStoreError(
                f"the checkpoint of {self._shard_fqn} cannot be restored: {error}"
            ) from error
        self._used_at = time.monotonic()
        return restored

    def begin(self) -> None:
        """Begin a transaction; the database knows of it from its first statement on.

        A connection that was lost while the shard was idle is replaced.

        Raises:
            ClosedError: the store is closed, or not restored yet.
            ShardStoreError: the database cannot be reached.
        """
        connection = self._opened()
        if time.monotonic() - self._used_at > IDLE_CHECK_S and not _answers(connection):
            self._disconnect()
            try:
                connection = self._connection = self._engine.connect()
            except sqlalchemy.exc.SQLAlchemyError as error:
                raise ShardStoreError(f"the database cannot be reached: {error}") from error
        self._transaction = connection.begin()

    def start_commit(self, checkpoint: Checkpoint) -> Sequence[FileChange]:
        """Keep the checkpoint for ``finish_commit``; nothing is recorded.

        Args:
            checkpoint: the position after the transaction.

        Returns:
            Nothing: there are no files.

        Raises:
            ShardStoreError: no transaction is open; a failure or the handler ended it.
        """
        assert self.connection is not None
        self._checkpoint = checkpoint.to_bytes()
        return ()

    def finish_commit(self) -> None:
        """Store the checkpoint while the fence is this primary's, and commit.

        Raises:
            FencedError: another primary raised the fence; nothing was committed.
            ShardStoreError: the database failed. Whether it committed is for the next primary to
                find out.
        """
        connection, transaction = self.connection, self._transaction
        assert transaction is not None
        try:
            updated = connection.execute(
                sa.update(_TABLE)
                .where(_TABLE.c.shard_fqn == self._shard_fqn, _TABLE.c.fence == self._fence)
                .values(checkpoint=self._checkpoint)
            )
            if updated.rowcount != 1:
                transaction.rollback()
                raise FencedError(
                    f"checkpoint fence of {self._shard_fqn} was updated (ie, by a new primary)"
                )
            transaction.commit()
        except sqlalchemy.exc.SQLAlchemyError as error:
            raise ShardStoreError(f"the database refused the commit: {error}") from error
        self._transaction = None
        self._used_at = time.monotonic()

    def open_timers(self) -> None:
        """Create the table of timers if it is missing.

        Raises:
            ShardStoreError: the database failed.
        """
        with _failures_of(_TIMERS):
            _create_table(self._opened(), _TIMERS)

    def timers_after(self, row: TimerRow | None, limit: int) -> Sequence[TimerRow]:
        """Return the next timers; see :class:`~gazette_sdk.shard.stores.base.TimerStore`."""
        timers = _TIMERS.c
        own = timers.shard_fqn == self._shard_fqn
        if row is not None:
            is_later = (timers.due_us > row.due_us) | (
                (timers.due_us == row.due_us) & (timers.timer_key > row.key)
            )
            own &= is_later
        query = (
            sa.select(timers.due_us, timers.timer_key)
            .where(own)
            .order_by(timers.due_us, timers.timer_key)
            .limit(limit)
        )
        connection = self._opened()
        with _failures_of(_TIMERS), _transaction_of(connection):
            if row is None and not sa.inspect(connection).has_table(_TIMERS.name):
                return ()
            return [TimerRow(due_us, bytes(key)) for due_us, key in connection.execute(query)]

    def put_timers(self, changes: Mapping[bytes, int | None]) -> None:
        """Put timers, just before ``start_commit``; None removes one.

        Raises:
            ShardStoreError: no transaction is open, or the database failed.
        """
        with _failures_of(_TIMERS):
            _replace_rows(self.connection, _TIMERS, self._shard_fqn, changes)

    def open_rows(self) -> None:
        """Create the table of rows if it is missing.

        Raises:
            ShardStoreError: the database failed.
        """
        with _failures_of(_ROWS):
            _create_table(self._opened(), _ROWS)

    def row(self, key: bytes) -> bytes | None:
        """Return a row; see :class:`~gazette_sdk.shard.stores.base.RowStore`."""
        return _row(self._opened(), self._shard_fqn, key)

    def rows_of(self, prefix: bytes) -> Sequence[tuple[bytes, bytes]]:
        """Return rows; see :class:`~gazette_sdk.shard.stores.base.RowStore`."""
        return _rows_of(self._opened(), self._shard_fqn, prefix)

    def put_rows(self, changes: Mapping[bytes, bytes | None]) -> None:
        """Put rows, just before ``start_commit``; None removes one.

        Raises:
            ShardStoreError: no transaction is open, or the database failed.
        """
        with _failures_of(_ROWS):
            _replace_rows(self.connection, _ROWS, self._shard_fqn, changes)

    def rerecord(self, path: str) -> Sequence[FileChange]:  # noqa: ARG002 - there are no files
        """Return nothing: there are no files."""
        return ()

    def destroy(self) -> None:
        """Roll back an open transaction, and close the connection."""
        self._disconnect()
        self._engine.dispose()

    def _opened(self) -> sa.Connection:
        if self._connection is None:
            raise ClosedError("the store is closed, or not restored yet; call restore() first")
        return self._connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        self._transaction = None
        if connection is not None:
            # Rolls back; a connection that the server ended is dropped.
            connection.close()

    def _raise_fence(self, connection: sa.Connection) -> bytes:
        """Make the fence this primary's.

        Returns:
            The stored checkpoint.
        """
        own_row = _TABLE.c.shard_fqn == self._shard_fqn
        connection.execute(sa.update(_TABLE).where(own_row).values(fence=_TABLE.c.fence + 1))
        row = connection.execute(
            sa.select(_TABLE.c.fence, _TABLE.c.checkpoint).where(own_row)
        ).first()
        self._fence, stored = (_NO_ROW, b"") if row is None else row
        if self._fence == _NO_ROW:
            self._fence, stored = 1, Checkpoint().to_bytes()
            connection.execute(
                sa.insert(_TABLE).values(
                    shard_fqn=self._shard_fqn, fence=self._fence, checkpoint=stored
                )
            )
        return bytes(stored)


class SqlView:
    """View of the commits of a ``SqlStore``.

    Args:
        connection: connection of the query.
        shard_fqn: name of the shard.
    """

    def __init__(self, connection: sa.Connection, shard_fqn: str) -> None:
        self.connection = connection
        self._shard_fqn = shard_fqn

    def execute(
        self, statement: str | sa.Executable, parameters: Parameters = None
    ) -> sa.CursorResult[Any]:
        """Run a query; arguments and errors are those of ``SqlStore.execute``."""
        return _execute(self.connection, statement, parameters)

    def row(self, key: bytes) -> bytes | None:
        """Return a row; see :class:`~gazette_sdk.shard.stores.base.RowStore`."""
        return _row(self.connection, self._shard_fqn, key)

    def rows_of(self, prefix: bytes) -> Sequence[tuple[bytes, bytes]]:
        """Return rows; see :class:`~gazette_sdk.shard.stores.base.RowStore`."""
        return _rows_of(self.connection, self._shard_fqn, prefix)

    def interrupt(self) -> None:
        """Have a statement that runs fail, from any thread, where the database's driver can."""
        driver: Any = self.connection.connection.driver_connection
        end = getattr(driver, "interrupt", None) or getattr(driver, "cancel", None)  # of psycopg
        if end is not None:
            end()


@dataclass(frozen=True, slots=True)
class SqlStores:
    """Stores of all shards of an application, in one database.

    Attributes:
        url: of the database.
        idle_timeout_s: bound of idle transactions.
    """

    url: str | sa.URL
    idle_timeout_s: float
    is_recorded: ClassVar[bool] = False

    def for_shard(self, shard: NamedShard) -> SqlStore:
        """Return the store of a shard."""
        return SqlStore(
            self.url,
            shard.full_name,
            idle_timeout_s=self.idle_timeout_s,
            directory=getattr(shard, "directory", None),
        )


def _execute(
    connection: sa.Connection, statement: str | sa.Executable, parameters: Parameters
) -> sa.CursorResult[Any]:
    executable = sa.text(statement) if isinstance(statement, str) else statement
    try:
        result: Any = connection.execute(executable, parameters)
    except _DATABASE_FAILURES as error:
        # No record is to blame for these.
        raise ShardStoreError(f"the database failed: {error}") from error
    return result  # type: ignore[no-any-return]


def _create_table(connection: sa.Connection, table: sa.Table) -> None:
    try:
        with connection.begin():
            table.create(connection, checkfirst=True)
    except sqlalchemy.exc.DBAPIError:
        # Two shards may create it at the same time.
        with connection.begin():
            if not sa.inspect(connection).has_table(table.name):
                raise


@contextlib.contextmanager
def _failures_of(table: sa.Table) -> Iterator[None]:
    try:
        yield
    except sqlalchemy.exc.SQLAlchemyError as error:
        raise ShardStoreError(f"the table {table.name} cannot be used: {error}") from error


def _replace_rows(
    connection: sa.Connection, table: sa.Table, shard_fqn: str, changes: Mapping[bytes, object]
) -> None:
    """Replace a shard's rows of a table, whose columns are shard, key and value; None removes."""
    shard, key, value = table.c
    delete = sa.delete(table).where(shard == sa.bindparam("name"), key == sa.bindparam("changed"))
    connection.execute(delete, [{"name": shard_fqn, "changed": each} for each in changes])
    put = [
        {shard.name: shard_fqn, key.name: each, value.name: changed}
        for each, changed in changes.items()
        if changed is not None
    ]
    if put:
        connection.execute(sa.insert(table), put)


def _row(connection: sa.Connection, shard_fqn: str, key: bytes) -> bytes | None:
    columns = _ROWS.c
    query = sa.select(columns.state).where(columns.shard_fqn == shard_fqn, columns.row_key == key)
    with _failures_of(_ROWS), _transaction_of(connection):
        found = connection.execute(query).scalar()
    return None if found is None else bytes(found)


def _rows_of(
    connection: sa.Connection, shard_fqn: str, prefix: bytes
) -> Sequence[tuple[bytes, bytes]]:
    columns = _ROWS.c
    key = columns.row_key
    query = (
        sa.select(key, columns.state)
        .where(columns.shard_fqn == shard_fqn, key >= prefix, key < prefix_end(prefix))
        .order_by(key)
    )
    with _failures_of(_ROWS), _transaction_of(connection):
        return [(bytes(key), bytes(state)) for key, state in connection.execute(query)]


def _transaction_of(connection: sa.Connection) -> contextlib.AbstractContextManager[object]:
    """Return the transaction that is open, to be left as it is, or a new one."""
    return contextlib.nullcontext() if connection.in_transaction() else connection.begin()


def _answers(connection: sa.Connection) -> bool:
    try:
        with connection.begin():
            connection.execute(sa.select(1))
    except sqlalchemy.exc.DBAPIError:
        return False
    return True


def _refuse_nan(engine: sa.Engine) -> None:
    """Refuse NaN as a parameter of any statement of an engine over SQLite."""

    @sa.event.listens_for(engine, "before_cursor_execute", named=True)
    def refuse(*, parameters: Any, executemany: bool, **_: object) -> None:
        for row in parameters if executemany else (parameters,):
            without_nan(row)


def _bound_idle_transactions(engine: sa.Engine, timeout_s: float) -> None:
    """Have PostgreSQL end transactions of this engine that are idle for so long."""

    @sa.event.listens_for(engine, "connect")
    def bound(connection: Any, _: object) -> None:
        with connection.cursor() as cursor:
            cursor.execute(
                f"SET SESSION idle_in_transaction_session_timeout = {round(timeout_s * 1000)}"
            )
        connection.commit()
