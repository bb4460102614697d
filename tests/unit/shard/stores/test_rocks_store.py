from __future__ import annotations

import random
import shutil
import time

import pytest

from gazette_sdk.errors import ClosedError, ConfigurationError, DecodeError, ShardStoreError
from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.shard.recovery.hints import RemoveFile
from gazette_sdk.shard.stores import codec, rocks_store
from gazette_sdk.shard.stores.rocks_store import RocksStore
from gazette_sdk.testing import store_contract
from gazette_sdk.testing.store_contract import RecordedFiles, checkpoint_of
from support import vectors
from support.played_files import played_files
from support.rocks import tiny_buffers

Counts = RocksStore[str, int]


def opened(store):
    assert store.restore() == Checkpoint()
    store.begin()
    return store


def test_it_keeps_the_contract(tmp_path) -> None:
    def write(store, number: int) -> None:
        store[f"key-{number % 5}"] = number
        if number % 2 == 0:
            store.discard(f"key-{(number + 1) % 5}")

    store_contract.check(tmp_path, Counts, write=write, read=lambda store: dict(store.items()))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_every_cut_of_a_run_under_constant_compaction_is_a_commit(tmp_path, seed) -> None:
    rng = random.Random(seed)
    make = RocksStore.of(
        key=int, value=bytes, families={"other": (str, int)}, configure=tiny_buffers
    )
    live = tmp_path / "live"
    live.mkdir()
    store = opened(make(live))
    recorded = RecordedFiles()
    rows: dict[int, bytes] = {}
    others: dict[str, int] = {}
    for number in range(1, 121):
        for _ in range(rng.randrange(1, 300)):
            key = rng.randrange(2000)
            if rng.random() < 0.1:
                store.discard(key)
                rows.pop(key, None)
            else:
                store[key] = rows[key] = rng.randbytes(rng.randrange(200))
        store.family("other")[name := f"{number % 7}"] = number
        others[name] = number
        recorded.apply(store.start_commit(checkpoint_of(number)))
        store.finish_commit()
        for path in list(recorded.append_written)[: rng.choice((0, 0, 1))]:
            recorded.apply(store.rerecord(path))
        cut = recorded.write_to(tmp_path / "cut")
        again = make(cut)
        assert again.restore() == checkpoint_of(number)
        assert dict(again.items()) == rows
        assert dict(again.family("other").items()) == others
        again.destroy()
        del again
        if number % 40 == 0:
            store.destroy()
            live = recorded.write_to(tmp_path / f"live-{number}")
            store = make(live)
            assert store.restore() == checkpoint_of(number)
        shutil.rmtree(cut)
    store.destroy()
    assert any(path.endswith(".sst") for path in recorded.files)


def test_a_transaction_reads_its_own_changes_merged_with_committed_rows(tmp_path) -> None:
    store = opened(Counts(tmp_path))
    for number in range(2000):
        store[f"{number:04}"] = number
    store.start_commit(checkpoint_of(1))
    store.begin()
    store["0001"] = -1
    del store["0002"]
    store["00015"] = 15

    assert list(store.items(stop="0004")) == [
        ("0000", 0),
        ("0001", -1),
        ("00015", 15),
        ("0003", 3),
    ]
    assert [key for key, _ in store.items(prefix="199")] == [f"{n}" for n in range(1990, 2000)]
    assert len(list(store.items())) == 2000
    assert list(store.items(start="1998", prefix="1")) == [("1998", 1998), ("1999", 1999)]
    assert store.get("0002") is None
    assert store.get("0002", 7) == 7
    assert "0002" not in store
    assert store["0001"] == -1
    with pytest.raises(KeyError):
        store["0002"]
    with pytest.raises(KeyError):
        del store["0002"]
    with store.committed() as view:
        assert view["0002"] == 2
        assert view.get("00015") is None
        assert len(list(view.items())) == 2000
    store.restore()
    assert store["0002"] == 2
    store.destroy()


def test_an_iteration_sees_what_was_there_when_it_began(tmp_path) -> None:
    store = opened(Counts(tmp_path))
    store["a"], store["b"] = 1, 2
    for key, value in store.items():
        store[key] = value * 10
        store[key + "x"] = 0
    assert dict(store.items()) == {"a": 10, "ax": 0, "b": 20, "bx": 0}
    store.destroy()


def test_a_view_reads_commits_and_has_the_families(tmp_path) -> None:
    store = opened(RocksStore(tmp_path, families={"ids": (int, str)}))
    store.family("ids")[-5] = "minus"
    store["k"] = [1]
    store.start_commit(checkpoint_of(1))
    with store.committed() as view:
        store["k"] = [2]
        assert view["k"] == [1]
        rows = view.items()
        next(rows)
        store["l"] = [3]
        store.start_commit(checkpoint_of(2))
        assert view["k"] == [2]
        assert list(rows) == []
        assert view.family("ids")[-5] == "minus"
    with pytest.raises(ConfigurationError, match="was not declared"):
        store.family("no")
    store.destroy()
    with pytest.raises(ClosedError), store.committed():
        pass


def test_the_store_is_full_from_a_number_of_puts_and_of_bytes(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(rocks_store, "UNCOMMITTED_PUTS_MAX", 3)
    store = opened(RocksStore(tmp_path, key=int, value=bytes, families={"f": (int, bytes)}))
    store[1] = store[2] = b""
    assert not store.is_full
    store.family("f")[1] = b""
    assert store.is_full
    store.start_commit(checkpoint_of(1))
    assert not store.is_full
    monkeypatch.setattr(rocks_store, "UNCOMMITTED_BYTES_MAX", 20)
    store[1] = bytes(12)
    assert store.is_full
    store.destroy()


def test_a_write_stall_is_waited_for_with_a_batch_made_anew(tmp_path) -> None:
    def stalls(options) -> None:
        options.set_write_buffer_size(64 << 10)
        options.set_max_write_buffer_number(2)
        options.set_level_zero_slowdown_writes_trigger(2)
        options.set_level_zero_stop_writes_trigger(3)

    store = opened(RocksStore(tmp_path, key=int, value=bytes, configure=stalls))
    refused = 0
    written = store._batch

    def counted(*args):
        nonlocal refused
        refused += 1
        return written(*args)

    store._batch = counted
    commits = 0
    while refused == commits and commits < 500:
        commits += 1
        for key in range(100):
            store[key] = random.Random(key).randbytes(5000)
        store.start_commit(checkpoint_of(commits))
    assert refused > commits, "the database never stalled"
    assert store.restore() == checkpoint_of(commits)
    assert len(list(store.items())) == 100
    store.destroy()


def test_a_foreign_write_fails_the_commit(tmp_path) -> None:
    store = opened(Counts(tmp_path))
    store._database[b"foreign"] = b"1"
    with pytest.raises(ShardStoreError, match="outside of the transaction"):
        store.start_commit(checkpoint_of(1))
    store.destroy()


def test_values_of_another_type_are_refused_when_put_and_reported_when_read(tmp_path) -> None:
    store = opened(Counts(tmp_path))
    with pytest.raises(TypeError):
        store["a"] = "text"
    with pytest.raises(TypeError):
        store[1] = 1
    with pytest.raises(ValueError, match="store's own"):
        store["\x00\x12checkpoint\x00\x01"] = 1
    store["a"] = 1
    store.start_commit(checkpoint_of(1))
    store.destroy()
    lists = RocksStore(tmp_path, value=list)
    lists.restore()
    with pytest.raises(DecodeError, match="'a' is not of the declared type"):
        lists.get("a")
    with pytest.raises(DecodeError, match="row of key"):
        list(lists.items())
    lists.destroy()


def test_messages_of_protobuf_and_other_layouts_are_values(tmp_path) -> None:
    make = RocksStore.of(
        key=codec.utf8, value=codec.uvarint, families={"l": (tuple[str, int], pb.Label)}
    )
    store = opened(make(tmp_path))
    store["n"] = 300
    store.family("l")["a", 1] = pb.Label(name="x")
    store.start_commit(checkpoint_of(1))
    assert store.family("l")["a", 1] == pb.Label(name="x")
    store.family("l")["a\0", 1] = pb.Label(name="y")
    assert list(store.family("l").items(prefix=("a",))) == [(("a", 1), pb.Label(name="x"))]
    assert list(store.family("l").items(prefix=("a\0",))) == [(("a\0", 1), pb.Label(name="y"))]
    assert store["n"] == 300
    store.destroy()


def test_files_that_others_staged_and_never_linked_are_removed_from_the_log(tmp_path) -> None:
    store = opened(Counts(tmp_path))
    store["a"] = 1
    store.start_commit(checkpoint_of(1))
    store.destroy()
    (tmp_path / ".stage").mkdir()
    (tmp_path / ".stage" / "7-000012.sst").write_bytes(b"half a table")
    again = Counts(tmp_path)
    again.restore()
    removed = [
        change.path
        for change in again.start_commit(checkpoint_of(2))
        if isinstance(change, RemoveFile)
    ]
    assert "/.stage/7-000012.sst" in removed
    assert not any(
        isinstance(change, RemoveFile) for change in again.start_commit(checkpoint_of(3))
    )
    again.destroy()


def test_a_directory_that_is_no_database_is_refused(tmp_path) -> None:
    (tmp_path / "CURRENT").write_text("MANIFEST-000009\n")
    with pytest.raises(ShardStoreError, match="cannot be opened"):
        Counts(tmp_path).restore()


KEYS = vectors.group("message", "rocksdb_keys")


@pytest.mark.parametrize("case", KEYS["legacy_offset_values"], ids=lambda case: case["offset"])
def test_offsets_are_encoded_as_the_reference_does(case) -> None:
    assert rocks_store._mark_value(case["offset"]).hex() == case["value"]
    assert rocks_store._marked_offset(bytes.fromhex(case["value"])) == case["offset"]


def test_keys_are_those_of_the_reference(tmp_path) -> None:
    assert KEYS["checkpoint_key"] == rocks_store.CHECKPOINT_KEY.hex()
    legacy = KEYS["legacy_offset_key"]
    assert rocks_store._mark_key(legacy["journal"]).hex() == legacy["key"]
    store = opened(RocksStore(tmp_path, key=bytes, value=bytes))
    store.start_commit(Checkpoint({legacy["journal"]: 1234}))
    assert store._database[bytes.fromhex(legacy["key"])] == b"\xf7\x04\xd2"
    assert not list(store.items())
    del store._database[rocks_store.CHECKPOINT_KEY]
    assert store.restore() == Checkpoint({legacy["journal"]: 1234})
    store.destroy()


@pytest.mark.parametrize("value", [b"", b"\xf7\x04", b"\x10"])
def test_a_malformed_offset_is_refused(tmp_path, value) -> None:
    store = opened(RocksStore(tmp_path, key=bytes, value=bytes))
    store._database[rocks_store._mark_key("a")] = value
    with pytest.raises(ShardStoreError, match="checkpoint is malformed"):
        store.restore()
    store.destroy()


def test_a_damaged_checkpoint_is_refused(tmp_path) -> None:
    store = opened(RocksStore(tmp_path, key=bytes, value=bytes))
    store.start_commit(Checkpoint({"a": 1234}))
    stored = store._database[rocks_store.CHECKPOINT_KEY]
    for damaged in (b"", stored[:-1] + b"\x08", stored[:-1]):
        store._database[rocks_store.CHECKPOINT_KEY] = damaged
        with pytest.raises(ShardStoreError, match=r"checkpoint is malformed: .* from a copy"):
            store.restore()
    store._database[rocks_store.CHECKPOINT_KEY] = stored[10:]
    assert store.restore() == Checkpoint({"a": 1234}), "as Gazette, and earlier releases, stored it"
    store.destroy()


@pytest.mark.parametrize("name", ["rocksdb-counter-0", "rocksdb-counter-1", "rocksdb-summer"])
def test_a_database_of_the_reference_goes_on(tmp_path, name) -> None:
    golden = vectors.golden(f"consumer/recoverylog/{name}.json")
    recovered = played_files(f"consumer/recoverylog/{name}.log.bin")
    recorded = RecordedFiles()
    recorded.files = {path: bytearray(content) for path, content in recovered.items()}
    store = RocksStore(recorded.write_to(tmp_path / "live"), key=bytes, value=bytes)

    checkpoint = store.restore()

    rows = {bytes.fromhex(row["key_hex"]): row for row in golden["rocksdb"]["rows"]}
    stored = bytes.fromhex(rows.pop(rocks_store.CHECKPOINT_KEY)["value_hex"])
    assert checkpoint == Checkpoint.from_bytes(stored)
    for key, row in rows.items():
        if not key.startswith(rocks_store.RESERVED):
            assert store[key].hex() == row["value_hex"]
    store.begin()
    store[b"new"] = b"value"
    state = dict(store.items())
    recorded.apply(store.start_commit(checkpoint_of(9)))
    successor = RocksStore(recorded.write_to(tmp_path / "next"), key=bytes, value=bytes)
    assert successor.restore() == checkpoint_of(9)
    assert dict(successor.items()) == state
    store.destroy()
    successor.destroy()


def test_an_iteration_passes_over_many_timers_at_once(tmp_path):
    store = RocksStore[str, int](tmp_path)
    store.restore()
    store["\0"] = 1
    store["a"] = 2
    store.put_timers({number.to_bytes(4, "big"): number for number in range(50_000)})
    store.start_commit(Checkpoint({"a/journal": 7}))
    began = time.process_time()
    for _ in range(20):
        assert list(store.items()) == [("\0", 1), ("a", 2)]
    assert time.process_time() - began < 0.5, "50,000 timers have 100,000 rows"
    assert list(store.items(start="\0\x12", stop="\0\x13")) == []
    store.destroy()
