"""SqlStore on a real PostgreSQL."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import sqlalchemy as sa

from gazette_sdk.errors import ClosedError, FencedError, ShardStoreError
from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.shard.stores import sql_store
from gazette_sdk.shard.stores.sql_store import SqlStore
from gazette_sdk.testing import store_contract
from gazette_sdk.testing.store_contract import checkpoint_of
from support import vectors
from support.postgres import running_postgres

SHARD = "/gazette/consumers/totals/items/one"
PUT = (
    "INSERT INTO totals VALUES (:name, :cents)"
    " ON CONFLICT (name) DO UPDATE SET cents = excluded.cents"
)
PRIMARY = """
import sys
from gazette_sdk.errors import GazetteError
from gazette_sdk.shard.stores.sql_store import SqlStore
from gazette_sdk.testing.store_contract import checkpoint_of

url, shard, idle_timeout_s, name = sys.argv[1:]
store = SqlStore(url, shard, idle_timeout_s=float(idle_timeout_s))
store.restore()
store.begin()
store.execute("INSERT INTO totals VALUES (:name, -1)"
    " ON CONFLICT (name) DO UPDATE SET cents = -1", {"name": name})
store.start_commit(checkpoint_of(9))
print("open", flush=True)
sys.stdin.readline()
try:
    store.finish_commit()
except GazetteError as error:
    print(type(error).__name__, flush=True)
else:
    print("committed", flush=True)
"""


@pytest.fixture(scope="module")
def server():
    with running_postgres() as url:
        yield url


@pytest.fixture
def url(server):
    engine = sa.create_engine(server, poolclass=sa.NullPool)
    with engine.begin() as connection:
        connection.execute(sa.text("DROP TABLE IF EXISTS totals, gazette_checkpoints"))
        connection.execute(sa.text("CREATE TABLE totals (name TEXT PRIMARY KEY, cents BIGINT)"))
    return server


def put(store, name: str, cents: int) -> None:
    store.execute(PUT, {"name": name, "cents": cents})


def rows(url: str, sql: str = "SELECT name, cents FROM totals ORDER BY name") -> list[tuple]:
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(sa.text(sql))]


def change(url: str, sql: str) -> None:
    with sa.create_engine(url, poolclass=sa.NullPool).begin() as connection:
        connection.execute(sa.text(sql))


def commit(store, number: int, name: str = "a") -> None:
    store.begin()
    put(store, name, number)
    assert store.start_commit(checkpoint_of(number)) == ()
    store.finish_commit()


def test_it_keeps_the_contract(url, tmp_path) -> None:
    def read(store) -> list[tuple]:
        if store._transaction is None:
            return rows(url)
        found = store.execute("SELECT name, cents FROM totals ORDER BY name")
        return [tuple(row) for row in found]

    store_contract.check(
        tmp_path,
        lambda _: SqlStore(url, SHARD),
        write=lambda store, number: put(store, f"key-{number % 5}", number),
        read=read,
    )


def test_a_damaged_checkpoint_is_refused(url) -> None:
    store = SqlStore(url, SHARD)
    store.restore()
    commit(store, 1)
    [(stored,)] = rows(url, "SELECT checkpoint FROM gazette_checkpoints")
    table = sa.table("gazette_checkpoints", sa.column("checkpoint", sa.LargeBinary))

    def put_checkpoint(content: bytes) -> None:
        with sa.create_engine(url, poolclass=sa.NullPool).begin() as connection:
            connection.execute(sa.update(table).values(checkpoint=content))

    for damaged in (bytes(stored)[:-1] + b"\x08", bytes(stored)[:-1]):
        put_checkpoint(damaged)
        with pytest.raises(ShardStoreError, match=r"cannot be restored: .* from a copy"):
            store.restore()
    put_checkpoint(bytes(stored)[10:])
    assert store.restore() == checkpoint_of(1), "as Gazette, and earlier releases, stored it"
    store.destroy()


def test_a_primary_of_an_older_fence_cannot_commit(url) -> None:
    assert [case["source"].split(":")[1] for case in vectors.group("message", "sql_store")] == [
        "TestSQLCheckpointPersistAndRestore",
        "TestSQLCheckpointInsertRace",
    ]
    fences = "SELECT shard_fqn, fence FROM gazette_checkpoints"
    first = SqlStore(url, SHARD)
    assert first.restore() == Checkpoint()
    assert rows(url, fences) == [(SHARD, 1)]
    commit(first, 1)
    second = SqlStore(url, SHARD)
    assert second.restore() == checkpoint_of(1)
    assert rows(url, fences) == [(SHARD, 2)]
    change(url, "UPDATE gazette_checkpoints SET fence = 3")
    for fenced in (first, second):
        fenced.begin()
        put(fenced, "a", 5)
        fenced.start_commit(checkpoint_of(5))
        with pytest.raises(FencedError, match=r"fence of .* was updated \(ie, by a new primary\)"):
            fenced.finish_commit()
        fenced.destroy()
    assert rows(url) == [("a", 1)]


def test_a_row_that_another_inserts_at_the_same_time_is_not_overwritten(url) -> None:
    SqlStore(url, SHARD).restore()
    change(url, "UPDATE gazette_checkpoints SET fence = -1")
    with pytest.raises(FencedError, match="inserted the checkpoint"):
        SqlStore(url, SHARD).restore()
    assert rows(url, "SELECT fence FROM gazette_checkpoints") == [(-1,)]


def test_shards_have_rows_of_their_own(url) -> None:
    stores = SqlStore.of(url)
    one = stores.for_shard(SimpleNamespace(full_name=SHARD))
    other = stores.for_shard(SimpleNamespace(full_name=f"{SHARD}-other"))
    one.restore()
    other.restore()
    commit(one, 1)
    other.begin()
    put(other, "b", 2)
    with one.committed() as view:
        assert view.execute("SELECT name FROM totals").all() == [("a",)]
    other.start_commit(checkpoint_of(2))
    other.finish_commit()
    assert one.restore() == checkpoint_of(1)
    assert other.restore() == checkpoint_of(2)
    one.destroy()
    other.destroy()


def frozen_primary(url: str, *, idle_timeout_s: float, name: str) -> subprocess.Popen[str]:
    """Start a primary, and freeze it in an open transaction that changed the row of that name."""
    process = subprocess.Popen(
        [sys.executable, "-c", PRIMARY, url, SHARD, str(idle_timeout_s), name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "open\n"
    process.send_signal(signal.SIGSTOP)
    return process


def thawed(process: subprocess.Popen[str]) -> str:
    process.send_signal(signal.SIGCONT)
    output, _ = process.communicate("\n", 60)
    return output.strip()


def test_a_frozen_loser_finds_out_that_it_is_fenced(url) -> None:
    loser = frozen_primary(url, idle_timeout_s=600, name="loser")
    try:
        winner = SqlStore(url, SHARD)
        assert winner.restore() == Checkpoint()
        commit(winner, 1, "winner")
        assert thawed(loser) == "FencedError"
    finally:
        loser.kill()
        loser.wait()
        loser.stdout.close()
    commit(winner, 2, "winner")
    winner.destroy()
    assert rows(url) == [("winner", 2)]


def test_the_locks_of_a_frozen_loser_are_freed(url) -> None:
    loser = frozen_primary(url, idle_timeout_s=1, name="contended")
    try:
        winner = SqlStore(url, SHARD)
        assert winner.restore() == Checkpoint()
        # Waits for the row's lock, until the server ends the loser's transaction.
        commit(winner, 1, "contended")
        assert thawed(loser) == "ShardStoreError"
    finally:
        loser.kill()
        loser.wait()
        loser.stdout.close()
    assert winner.restore() == checkpoint_of(1)
    winner.destroy()
    assert rows(url) == [("contended", 1)]


def test_a_transaction_that_the_handler_or_an_error_ended_cannot_be_committed(url) -> None:
    store = SqlStore(url, SHARD)
    with pytest.raises(ClosedError):
        store.begin()
    store.restore()
    with pytest.raises(ShardStoreError, match="no transaction is open"):
        store.execute("SELECT 1")
    store.begin()
    store.connection.commit()
    with pytest.raises(ShardStoreError, match="no transaction is open"):
        store.start_commit(checkpoint_of(1))
    store.restore()
    store.begin()
    put(store, "a", 1)
    with pytest.raises(sa.exc.ProgrammingError):
        store.execute("SELECT no FROM totals")
    store.start_commit(checkpoint_of(1))
    with pytest.raises(ShardStoreError, match="refused the commit"):
        store.finish_commit()
    assert store.restore() == Checkpoint()
    commit(store, 2)
    store.destroy()
    store.destroy()
    assert rows(url) == [("a", 2)]


def test_a_lost_connection_fails_the_shard_and_not_the_record(url) -> None:
    store = SqlStore(url, SHARD, idle_timeout_s=0.2)
    store.restore()
    store.begin()
    put(store, "a", 1)
    deadline = time.monotonic() + 30
    while rows(url, "SELECT 1 FROM pg_stat_activity WHERE state = 'idle in transaction'"):
        assert time.monotonic() < deadline, "the server does not end idle transactions"
    with pytest.raises(ShardStoreError, match="database failed"):
        put(store, "a", 2)
    assert store.restore() == Checkpoint()
    commit(store, 3)
    store.destroy()


def test_a_connection_that_was_lost_while_idle_is_replaced(url, monkeypatch) -> None:
    monkeypatch.setattr(sql_store, "IDLE_CHECK_S", 0)
    store = SqlStore(url, SHARD)
    store.restore()
    change(
        url,
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()",
    )
    commit(store, 1)
    assert store.restore() == checkpoint_of(1)
    store.destroy()


def test_a_database_that_cannot_be_reached_is_reported() -> None:
    store = SqlStore("postgresql+psycopg://nobody@127.0.0.1:1/none", SHARD)
    with pytest.raises(ShardStoreError, match="cannot be restored"):
        store.restore()
    store.destroy()
