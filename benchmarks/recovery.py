"""Recovery logs of stores: commits with overwrites, what the log grows by, and its playback.

    python benchmarks/recovery.py [--commits 500] [--puts 1000] [--keys 300000] [--json]

Each store commits transactions that overwrite values of 100 bytes at random. Changes of its files
are recorded as a shard does, into a log in memory. The log is then played from hints of the end,
compared with a copy of the same files, and the store is opened. The time to the first message is
that of playing, of opening, and of a first put.

What a player reads is compared with the live bytes after each commit, once those are 1 MiB.
"""

from __future__ import annotations

import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import Figure, arguments, percentile, report

from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.protocol import recoverylog_pb2 as pb
from gazette_sdk.shard.recovery.fsm import FSM
from gazette_sdk.shard.recovery.player import Player, StagedFiles
from gazette_sdk.shard.recovery.recorder import READ_SLACK_BYTES, Recorder
from gazette_sdk.shard.stores.rocks_store import RocksStore
from gazette_sdk.shard.stores.sqlite_store import SqliteStore

LOG = "recovery/bench"
VALUE_BYTES = 100
PIECE_BYTES = 1 << 20
READ_PER_LIVE_MAX = 2.5
COMMIT_P99_MS = 100.0
SCHEMA = "CREATE TABLE IF NOT EXISTS rows (id INTEGER PRIMARY KEY, content BLOB)"


@dataclass(frozen=True)
class Kind:
    """A store, how it is written to and counted, and by what its puts are fewer."""

    name: str
    new: Callable[[Path], Any]
    put: Callable[[Any, list[int], bytes], object]
    count: Callable[[Any], int]
    fewer: int


def put_keys(store: Any, keys: list[int], value: bytes) -> None:
    """Put the value of each key."""
    for key in keys:
        store[key] = value


def put_rows(store: Any, keys: list[int], value: bytes) -> None:
    """Put the row of each key."""
    store.executemany("INSERT OR REPLACE INTO rows VALUES (?, ?)", ((key, value) for key in keys))


def count_keys(store: Any) -> int:
    """Return the number of keys."""
    return sum(1 for _ in store.items())


def count_rows(store: Any) -> int:
    """Return the number of rows."""
    with store.committed() as view:
        return int(view.execute("SELECT count(*) FROM rows").fetchone()[0])


KINDS = (
    Kind("rocks", RocksStore.of(key=int, value=bytes), put_keys, count_keys, 1),
    # A commit of SQLite writes a page for each random row.
    Kind("sqlite", SqliteStore.of(schema=SCHEMA), put_rows, count_rows, 10),
)


def play(log: bytes, hints: pb.FSMHints, directory: Path) -> None:
    """Restore the files of a log."""
    player = Player(hints, {LOG: len(log)})
    files = StagedFiles(directory)
    files.begin()
    while not player.is_done:
        at = player.next_offset
        if piece := log[at : at + PIECE_BYTES]:
            files.apply(player.feed(piece))
        else:
            player.head()
            player.finish()
    files.make_live(player.fsm)
    files.close()


def seconds(run: Callable[[], object]) -> float:
    """Return the duration of a call."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def measure(kind: Kind, directory: Path, commits: int, puts: int, keys: int) -> list[Figure]:
    """Run one store, and return its figures."""
    chosen = random.Random(1)
    recorder = Recorder(FSM(pb.FSMHints(log=LOG)), log=LOG, author=1, write_head=0)
    (live := directory / "live").mkdir()
    store = kind.new(live)
    store.restore()
    log = bytearray()
    steps: list[float] = []
    put_s = worst = 0.0
    for number in range(commits):
        store.begin()
        batch = [chosen.randrange(keys) for _ in range(puts)]
        value = chosen.randbytes(VALUE_BYTES)
        put_s += seconds(lambda batch=batch, value=value: kind.put(store, batch, value))
        began = time.perf_counter()
        contents = recorder.record(store.start_commit(Checkpoint({"source": number + 1})))
        while (due := recorder.rerecord_due()) is not None and (anew := store.rerecord(due)):
            contents += recorder.record(anew, continues=True)
        steps.append(1e3 * (time.perf_counter() - began))
        store.finish_commit()
        log += b"".join(contents)
        recorder.appended(len(log))
        if recorder.bytes_live > READ_SLACK_BYTES:
            worst = max(worst, recorder.bytes_read / recorder.bytes_live)
    rows = kind.count(store)
    store.destroy()
    content, hints = bytes(log), recorder.hints()
    play_s = seconds(lambda: play(content, hints, directory / "played"))
    copy_s = seconds(lambda: shutil.copytree(directory / "played", directory / "copied"))
    again = kind.new(directory / "played")
    open_s = seconds(again.restore)
    again.begin()
    first_s = seconds(lambda: kind.put(again, [0], b"first"))
    assert kind.count(again) == rows, "the played store differs"
    again.destroy()
    live_mb = recorder.bytes_live / 1e6
    ready_s = play_s + open_s + first_s
    per_s = commits * puts / (put_s + sum(steps) / 1e3)
    recorded = len(log) / (commits * puts * (VALUE_BYTES + 8))
    print(
        f"{kind.name}: {per_s:,.0f} puts/s; commit median {statistics.median(steps):.2f} ms;"
        f" {recorded:.2f} bytes recorded per byte put; {live_mb:.1f} MB live",
        file=sys.stderr,
    )
    p99_ms = percentile(steps, 99)
    return [
        Figure(f"{kind.name}: commit, p99", p99_ms, COMMIT_P99_MS, "ms", 1, more_is_better=False),
        Figure(f"{kind.name}: read at worst", worst, READ_PER_LIVE_MAX, "/live", 1, False),
        Figure(f"{kind.name}: restored, copied", live_mb / play_s, live_mb / copy_s, "MB/s", None),
        Figure(f"{kind.name}: first message, copied", ready_s, copy_s, "s", None, False),
    ]


def main() -> None:
    """Measure, and print the figures."""
    options = arguments(__doc__ or "", commits=500, puts=1000, keys=300_000)
    figures = []
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as directory:
            puts = options.puts // kind.fewer
            figures += measure(kind, Path(directory), options.commits, puts, options.keys)
    report(figures, options)


if __name__ == "__main__":
    main()
