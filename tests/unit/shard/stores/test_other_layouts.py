"""Stores on the recovered files of another store: they refuse to begin from nothing."""

from __future__ import annotations

import shutil
from types import SimpleNamespace
from typing import Any

import pytest

from gazette_sdk import shard
from gazette_sdk.errors import ShardStoreError
from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.testing.store_contract import RecordedFiles, checkpoint_of
from support.played_files import played_files

SCHEMA = "CREATE TABLE IF NOT EXISTS t (k TEXT PRIMARY KEY, v INTEGER)"


def sql_store(directory):
    stores = shard.SqlStore.of(f"sqlite:///{directory.parent}/remote.sqlite")
    return stores.for_shard(SimpleNamespace(full_name="/a/shard", directory=directory))


STORES: dict[str, Any] = {
    "RocksStore": shard.RocksStore[str, int],
    "SqliteStore": shard.SqliteStore.of(schema=SCHEMA),
    "JsonStore": shard.JsonStore[dict[str, int]],
    "SqlStore": sql_store,
}
RECORDED = [name for name in STORES if name != "SqlStore"]
GOLDEN = {
    "json-store": "JsonStore",
    "rocksdb-counter-0": "RocksStore",
    "rocksdb-counter-1": "RocksStore",
    "rocksdb-summer": "RocksStore",
    "sqlite-bike-share": "Gazette's own SQLite store",
    "sqlite-summer": "Gazette's own SQLite store",
}


def put(store, number: int) -> None:
    if isinstance(store, shard.JsonStore):
        store.state["k"] = number
    elif isinstance(store, shard.RocksStore):
        store["k"] = number
    else:
        store.execute("INSERT OR REPLACE INTO t VALUES ('k', :v)", {"v": number})


def written_by(name: str, directory) -> dict[str, bytes]:
    """The files of a recovery log after two commits of a store."""
    directory.mkdir()
    store = STORES[name](directory)
    assert store.restore() == Checkpoint(), "an empty log begins from nothing"
    recorded = RecordedFiles()
    for number in (1, 2):
        store.begin()
        put(store, number)
        recorded.apply(store.start_commit(checkpoint_of(number)))
        store.finish_commit()
    store.destroy()
    recovered = recorded.write_to(directory.parent / "recorded")
    files = {
        path.relative_to(recovered).as_posix(): path.read_bytes()
        for path in recovered.rglob("*")
        if path.is_file()
    }
    shutil.rmtree(recovered)
    return files


def recover(files, directory):
    for path, content in files.items():
        target = directory / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    return directory


@pytest.mark.parametrize("expected", STORES)
@pytest.mark.parametrize("found", RECORDED)
def test_a_store_begins_on_its_own_files_only(tmp_path, found, expected) -> None:
    files = written_by(found, tmp_path / "live")
    directory = recover(files, tmp_path / "recovered")
    store = STORES[expected](directory)
    if found == expected:
        assert store.restore() == checkpoint_of(2)
    else:
        for _ in range(2):  # nothing is left by the first time that makes a second one pass
            with pytest.raises(ShardStoreError, match=f"files of {found} .* none of {expected}"):
                store.restore()
        assert {path.name for path in directory.rglob("*") if path.is_file()} == {
            path.rpartition("/")[2] for path in files
        }, "nothing was changed"
    store.destroy()


@pytest.mark.parametrize("expected", STORES)
@pytest.mark.parametrize("name", GOLDEN)
def test_of_logs_of_the_reference_a_store_begins_on_its_own_layout(
    tmp_path, name, expected
) -> None:
    files = played_files(f"consumer/recoverylog/{name}.log.bin")
    directory = recover(files, tmp_path / "recovered")
    found = GOLDEN[name]
    store = STORES[expected](directory)
    if found == expected:
        assert store.restore() != Checkpoint()
    else:
        with pytest.raises(ShardStoreError, match=f"files of {found} .* none of {expected}"):
            store.restore()
    store.destroy()


@pytest.mark.parametrize("expected", STORES)
def test_files_of_an_unknown_store_are_refused(tmp_path, expected) -> None:
    store = STORES[expected](recover({"mine.bin": b"content"}, tmp_path / "recovered"))
    with pytest.raises(ShardStoreError, match=r"not known here \(mine.bin\)"):
        store.restore()
    store.destroy()


def test_a_remote_database_with_a_checkpoint_goes_on_over_files_of_before(tmp_path) -> None:
    (tmp_path / "a").mkdir()
    store = sql_store(tmp_path / "a")
    store.restore()
    store.begin()
    store.execute(SCHEMA)
    store.start_commit(checkpoint_of(1))
    store.finish_commit()
    store.destroy()
    again = sql_store(recover({"state.json": b"{}\n{}\n{}\n"}, tmp_path / "b"))
    assert again.restore() == checkpoint_of(1)
    again.destroy()


def test_files_that_the_application_makes_beside_its_store_are_no_recovered_ones(tmp_path) -> None:
    store = shard.JsonStore[dict[str, int]](tmp_path)
    (tmp_path / "scratch").write_bytes(b"of this run")
    assert store.restore() == Checkpoint()
