from __future__ import annotations

import random
import shutil
import sqlite3

import pytest

from gazette_sdk.errors import ClosedError, ShardStoreError
from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.shard.recovery.hints import RemoveFile, WriteFile
from gazette_sdk.shard.stores import sqlite_store
from gazette_sdk.shard.stores import sqlite_store as sqlite_pages
from gazette_sdk.shard.stores.sqlite_store import SqliteStore
from gazette_sdk.testing import store_contract
from gazette_sdk.testing.store_contract import RecordedFiles, checkpoint_of

SCHEMA = """
CREATE TABLE IF NOT EXISTS rows (id INTEGER PRIMARY KEY, content BLOB);
CREATE INDEX IF NOT EXISTS by_content ON rows (content);
CREATE TABLE IF NOT EXISTS notes (text TEXT DEFAULT 'a;b');
"""
make = SqliteStore.of(schema=SCHEMA)


def rows_of(store) -> list[tuple]:
    connection = store._connection
    return connection.execute("SELECT id, content FROM rows ORDER BY id").fetchall()


def put(store, number: int, content: bytes) -> None:
    store.execute("INSERT OR REPLACE INTO rows VALUES (?, ?)", (number, content))


def test_it_keeps_the_contract(tmp_path) -> None:
    def write(store, number: int) -> None:
        put(store, number % 5, b"%d" % number)

    store_contract.check(tmp_path, make, write=write, read=rows_of)


@pytest.mark.slow
def test_every_cut_of_a_run_with_roll_backs_checkpoints_and_vacuums_is_a_commit(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(sqlite_store, "WAL_BYTES_MAX", 400_000)
    monkeypatch.setattr(sqlite_pages, "EXTENT_PAGES", 64)
    monkeypatch.setattr(sqlite_pages, "EXTENT_BYTES", 64 * 4096)
    rng = random.Random(7)
    (live := tmp_path / "live").mkdir()
    store = make(live)
    assert store.restore() == Checkpoint()
    recorded = RecordedFiles()
    checkpoints = removed = 0
    for number in range(1, 341):
        # Transactions spill to the write-ahead log before they end.
        store._control("PRAGMA cache_size = 20")
        if rng.random() < 0.2:
            store.begin()
            for _ in range(rng.randrange(400)):
                put(store, rng.randrange(3000), rng.randbytes(rng.randrange(1500)))
            assert store.restore() == (checkpoint_of(number - 1) if number > 1 else Checkpoint())
        if number % 40 == 0:
            store._control("VACUUM")
        store.begin()
        if number % 39 == 0:
            store.execute("DELETE FROM rows WHERE id % 10 > 0")
        for _ in range(rng.randrange(60)):
            put(store, rng.randrange(3000), rng.randbytes(rng.randrange(1500)))
        rows = rows_of(store)
        changes = store.start_commit(checkpoint_of(number))
        store.finish_commit()
        recorded.apply(changes)
        removed += any(isinstance(change, RemoveFile) for change in changes)
        wal = live / "database.sqlite-wal"
        checkpoints += wal.stat().st_size == 0
        for path in rng.sample(sorted(recorded.files), rng.choice((0, 0, 1))):
            recorded.apply(store.rerecord(path))

        again = make(recorded.write_to(tmp_path / "cut"))
        assert again.restore() == checkpoint_of(number)
        assert rows_of(again) == rows
        connection = again._connection
        connection.set_authorizer(None)
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        again.destroy()
        shutil.rmtree(tmp_path / "cut")
        if number % 50 == 0:
            store.destroy()
            live = recorded.write_to(tmp_path / f"live-{number}")
            store = make(live)
            assert store.restore() == checkpoint_of(number)
    store.destroy()
    assert checkpoints > 5
    assert removed > 0, "VACUUM never made the database smaller"
    assert len(recorded.files) > 3


def test_a_query_reads_the_last_commit_and_may_hold_up_the_checkpoint(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(sqlite_store, "WAL_BYTES_MAX", 1)
    store = make(tmp_path)
    store.restore()
    recorded = RecordedFiles()
    with store.committed() as query:
        query.execute("BEGIN")
        for number in range(1, 6):
            assert query.execute("SELECT count(*) FROM rows").fetchone() == (0,)
            store.begin()
            put(store, number, bytes(5000))
            recorded.apply(store.start_commit(checkpoint_of(number)))
            recorded.apply(store.rerecord("/pages/0"))
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            query.execute("DELETE FROM rows")
    for number in range(6, 9):
        store.begin()
        put(store, number, bytes(5000))
        recorded.apply(store.start_commit(checkpoint_of(number)))
    again = make(recorded.write_to(tmp_path / "cut"))
    assert again.restore() == checkpoint_of(8)
    assert [number for number, _ in rows_of(again)] == list(range(1, 9))
    again.destroy()
    store.destroy()


def test_a_full_disk_fails_the_shard_and_not_the_record(tmp_path) -> None:
    store = make(tmp_path)
    store.restore()
    store._control("PRAGMA max_page_count = 20")
    store.begin()
    with pytest.raises(ShardStoreError, match="full"):
        store.executemany("INSERT INTO rows VALUES (?, ?)", ((n, bytes(4000)) for n in range(100)))
    assert store.restore() == Checkpoint()
    assert rows_of(store) == []
    store.destroy()


@pytest.mark.parametrize(
    "statement",
    [
        "BEGIN",
        "COMMIT",
        "END",
        "ROLLBACK",
        "SAVEPOINT a",
        "PRAGMA cache_size",
        "ATTACH ':memory:' AS x",
    ],
)
def test_statements_that_end_or_leave_the_transaction_are_refused(tmp_path, statement) -> None:
    store = make(tmp_path)
    store.restore()
    store.begin()
    put(store, 1, b"")
    with pytest.raises(sqlite3.DatabaseError, match="not authorized"):
        store.execute(statement)
    store.start_commit(checkpoint_of(1))
    store.begin()
    with pytest.raises(sqlite3.DatabaseError, match="not authorized"):
        store.execute(statement)
    assert rows_of(store) == [(1, b"")]
    store.destroy()


def test_a_transaction_that_an_error_ended_cannot_be_committed(tmp_path) -> None:
    store = make(tmp_path)
    store.restore()
    store.begin()
    put(store, 1, b"")
    with pytest.raises(sqlite3.IntegrityError):
        store.execute("INSERT OR ROLLBACK INTO rows VALUES (1, x'')")
    with pytest.raises(ShardStoreError, match="no transaction is open"):
        put(store, 2, b"")
    with pytest.raises(ShardStoreError, match="no transaction is open"):
        store.start_commit(checkpoint_of(1))
    assert store.restore() == Checkpoint()
    assert rows_of(store) == []
    store.destroy()


def test_only_changed_pages_are_recorded(tmp_path) -> None:
    store = make(tmp_path)
    store.restore()
    store.begin()
    store.executemany(
        "INSERT INTO rows VALUES (?, ?)", ((number, bytes(3000)) for number in range(3000))
    )
    changes = store.start_commit(checkpoint_of(1))
    assert {change.path for change in changes} >= {"/pages/0", "/pages/1", "/pages/2"}
    store.begin()
    store.execute("UPDATE rows SET content = ? WHERE id = 2500", (b"\1" * 3000,))
    changes = store.start_commit(checkpoint_of(2))
    assert all(isinstance(change, WriteFile) for change in changes)
    assert sum(len(change.content) for change in changes) < 12 * 4096
    assert all(change.offset < sqlite_pages.EXTENT_BYTES for change in changes)
    store.destroy()


def test_the_store_is_full_from_a_number_of_changes(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sqlite_store, "UNCOMMITTED_PUTS_MAX", 3)
    store = make(tmp_path)
    assert not store.is_full
    store.restore()
    store.begin()
    put(store, 1, b"")
    put(store, 2, b"")
    assert not store.is_full
    put(store, 3, b"")
    assert store.is_full
    store.start_commit(checkpoint_of(1))
    store.begin()
    assert not store.is_full
    store.destroy()


def test_a_closed_store_and_malformed_files_are_refused(tmp_path) -> None:
    store = make(tmp_path)
    with pytest.raises(ClosedError):
        store.begin()
    with pytest.raises(ClosedError), store.committed():
        pass
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "1").write_bytes(bytes(4096))
    with pytest.raises(ShardStoreError, match="lacks page 1"):
        store.restore()
    (tmp_path / "pages" / "0").write_bytes(b"\1" * 8192)
    with pytest.raises(ShardStoreError, match="cannot be restored"):
        store.restore()
    store.destroy()


def test_a_damaged_checkpoint_is_refused(tmp_path) -> None:
    store = make(tmp_path)
    store.restore()
    store.begin()
    put(store, 1, b"")
    store.start_commit(checkpoint_of(1))
    stored = checkpoint_of(1).to_bytes()
    for damaged in (b"", stored[:-1] + b"\x08", stored[:-1]):
        store._connection.execute("UPDATE gazette_checkpoint SET checkpoint = ?", (damaged,))
        with pytest.raises(ShardStoreError, match=r"cannot be restored: .* from a copy"):
            store.restore()
    store._connection.execute("UPDATE gazette_checkpoint SET checkpoint = ?", (stored[10:],))
    assert store.restore() == checkpoint_of(1), "as Gazette, and earlier releases, stored it"
    store.destroy()


@pytest.mark.parametrize("name", ["0", "7", "first"])
def test_pages_that_would_make_a_huge_database_are_refused(tmp_path, name) -> None:
    (tmp_path / "pages").mkdir()
    page = bytearray(4096)
    if name == "0":
        page[28:32] = (1 << 31).to_bytes(4, "big")  # of 8 TiB
    (tmp_path / "pages" / "0").write_bytes(page)
    with (tmp_path / "pages" / name).open("r+b" if name == "0" else "wb") as file:
        file.truncate(4096 if name != "7" else 8 << 20)
    store = SqliteStore(tmp_path)
    with pytest.raises(ShardStoreError, match="restore hints of another time"):
        store.restore()
    assert not (tmp_path / "database.sqlite").exists()
    store.destroy()


def test_a_first_page_of_zeros_is_no_empty_database(tmp_path) -> None:
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "0").write_bytes(bytes(8192))
    store = SqliteStore(tmp_path)
    with pytest.raises(ShardStoreError, match="of 0 bytes"):
        store.restore()
    store.destroy()
