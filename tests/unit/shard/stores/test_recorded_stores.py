"""Stores, their recorder and the player: every append of the log, cut and played."""

from __future__ import annotations

import random
import shutil

import pytest

from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.protocol import recoverylog_pb2 as pb
from gazette_sdk.shard.recovery import recorder as recorder_module
from gazette_sdk.shard.recovery import recorder as rerecord
from gazette_sdk.shard.recovery.fsm import FSM
from gazette_sdk.shard.recovery.recorder import Recorder
from gazette_sdk.shard.stores.json_store import JsonStore
from gazette_sdk.shard.stores.rocks_store import RocksStore
from gazette_sdk.shard.stores.sqlite_store import SqliteStore
from gazette_sdk.testing.store_contract import checkpoint_of
from support import recovery_logs
from support.rocks import tiny_buffers

LOG = "recovery/one"
COMMITS = 60


def json_store(directory):
    return JsonStore[dict[str, str]](directory)


def put_json(store, key: int, content: bytes) -> None:
    store.state[str(key % 50)] = content.hex()


def put_row(store, key: int, content: bytes) -> None:
    store.execute("INSERT OR REPLACE INTO rows VALUES (?, ?)", (key, content))


def rows_of(store) -> dict:
    return dict(store._connection.execute("SELECT * FROM rows"))


ROCKS = RocksStore.of(key=int, value=bytes, configure=tiny_buffers)
SQLITE = SqliteStore.of(schema="CREATE TABLE IF NOT EXISTS rows (id INTEGER PRIMARY KEY, b BLOB)")
STORES = {
    "json": (json_store, put_json, lambda store: dict(store.state)),
    "rocks": (ROCKS, RocksStore.__setitem__, lambda store: dict(store.items())),
    "sqlite": (SQLITE, put_row, rows_of),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", STORES)
def test_the_log_cut_behind_any_append_plays_to_a_commit(tmp_path, kind, monkeypatch) -> None:
    monkeypatch.setattr(rerecord, "READ_SLACK_BYTES", 64 << 10)
    monkeypatch.setattr(recorder_module, "LARGE_FILE_BYTES", 16 << 10)
    make, put, read = STORES[kind]
    rng = random.Random(kind)
    hints = pb.FSMHints(log=LOG)
    recorder = Recorder(FSM(hints), log=LOG, author=11, write_head=0)
    (live := tmp_path / "live").mkdir()
    store = make(live)
    checkpoint = store.restore()
    assert checkpoint == Checkpoint()
    state = read(store)
    log = b""
    cuts = early = rerecorded = 0

    def plays_to(state, checkpoint) -> None:
        nonlocal cuts
        cuts += 1
        played = recovery_logs.play({LOG: log}, hints, cut := tmp_path / f"cut-{cuts}")
        again = make(cut)
        assert again.restore() == checkpoint
        assert read(again) == state
        again.destroy()
        assert played.fsm.next_seq_no <= recorder.fsm.next_seq_no
        shutil.rmtree(cut)

    for number in range(1, COMMITS + 1):
        before = state, checkpoint
        store.begin()
        for _ in range(rng.randrange(200)):
            put(store, rng.randrange(1000), rng.randbytes(rng.randrange(300)))
        state, checkpoint = read(store), checkpoint_of(number)
        *large, last = recorder.record(store.start_commit(checkpoint))
        anew = b""
        while (due := recorder.rerecord_due()) is not None and (again := store.rerecord(due)):
            rerecorded += 1
            anew += b"".join(recorder.record(again, continues=True))
        store.finish_commit()
        for content in large:
            early += 1
            log += content
            if number > 1:
                plays_to(*before)
        log += last
        plays_to(state, checkpoint)
        if anew:
            log += anew
            plays_to(state, checkpoint)
        recorder.appended(len(log))
        if number % 10 == 0:
            hints = recorder.hints()
        if number % 20 == 0:
            store.destroy()
            played = recovery_logs.play({LOG: log}, hints, live := tmp_path / f"live-{number}")
            store = make(live)
            assert store.restore() == checkpoint
            recorder = Recorder(played.fsm, log=LOG, author=number, write_head=len(log))
    store.destroy()
    assert cuts >= COMMITS
    if kind != "json":
        assert rerecorded > 0
    if kind == "rocks":
        assert early > 0
