"""Streaming queries, killed at random and started again from their checkpoints.

``python -m crash.spark_kills --kills 50``: a run of a driver has several queries. Processes of
theirs are killed, of tasks and of commits, which ends a query each; then the driver is killed with
all of them, wherever they are. In the end what committed readers see is compared with the input,
row by row.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from gazette_sdk import Journals, Reader
from gazette_sdk.embedded import EmbeddedCluster

READY_TIMEOUT_S = 400.0
"""A session starts in some ten seconds; on a machine that is busy with other tests, in minutes."""

FAIL_TIMEOUT_S = 10.0
"""The death of a process that a query uses is noticed within this time; others do no harm."""

ATTEMPTS_MAX = 100
"""Processes of a driver that are killed at most."""

FILES_AT_ONCE = 3
ROWS_PER_FILE = 10


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run.

    Attributes:
        kills: number of queries that were killed.
        rows: rows of the input, each of which was found once.
        messages: messages that stand in the journals, visible or not.
        batches: transactions that were decided.
        completed: transactions that another driver completed than that which decided them.
    """

    kills: int
    rows: int
    messages: int
    batches: int
    completed: int


class Queries:
    """Queries of one driver, with their files and checkpoints."""

    def __init__(self, cluster: EmbeddedCluster, directory: Path, count: int) -> None:
        self.directories = [directory / f"query-{number}" for number in range(count)]
        self.rows = 0
        self._cluster = cluster
        for each in self.directories:
            (each / "files").mkdir(parents=True)

    def add_files(self) -> None:
        for _ in range(FILES_AT_ONCE):
            for directory in self.directories:
                lines = [
                    json.dumps({"query": directory.name, "n": n, "key": str(n % 7)})
                    for n in range(self.rows, self.rows + ROWS_PER_FILE)
                ]
                made = directory / "new.json"
                made.write_text("\n".join(lines))
                made.rename(directory / "files" / f"{self.rows:06}.json")
            self.rows += ROWS_PER_FILE

    def start(self, *, ends: bool) -> subprocess.Popen[bytes]:
        options = {
            "address": self._cluster.address,
            "directories": [str(each) for each in self.directories],
            "ends": ends,
        }
        return subprocess.Popen(
            [sys.executable, "-m", "crash.spark_program", json.dumps(options)],
            cwd=Path(__file__).parents[1],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def kill(self, chance: random.Random, *, processes: int) -> int:
        """Run the queries, and kill their processes and their driver at moments nobody knows.

        Args:
            chance: chooses the processes, and the moments.
            processes: number of queries which die by the death of a process of theirs.

        Returns:
            The number of queries that were killed.
        """
        killed = 0
        with self.start(ends=False) as driver:
            try:
                assert driver.stdout is not None
                lines = Lines(driver.stdout)
                assert lines.wait_for(b"ready\n", READY_TIMEOUT_S), "the driver is not ready"
                for _ in range(ATTEMPTS_MAX):
                    if killed == processes:
                        break
                    self.add_files()
                    time.sleep(chance.uniform(0, 2))  # the moment is random, and waits for nothing
                    kill_one(driver.pid, chance)
                    killed += lines.wait_for(b"failed\n", FAIL_TIMEOUT_S)
                self.add_files()
                time.sleep(chance.uniform(0, 6))
            finally:
                os.killpg(driver.pid, signal.SIGKILL)
        return killed + len(self.directories)

    def end(self) -> None:
        """Run the queries until they have read all files."""
        driver = self.start(ends=True)
        try:
            driver.communicate(timeout=READY_TIMEOUT_S)
        finally:
            if driver.poll() is None:
                os.killpg(driver.pid, signal.SIGKILL)
                driver.wait()
        assert driver.returncode == 0, f"the queries failed with status {driver.returncode}"

    def check(self, kills: int) -> Outcome:
        """Compare what committed readers see with the files.

        Raises:
            AssertionError: a row is missing, or there twice.
        """
        transport = self._cluster.transport
        found = Counter(
            (e.message["query"], e.message["n"])
            for e in Reader(dict, "topic=copies", transport=transport)
        )
        wanted = Counter((each.name, n) for each in self.directories for n in range(self.rows))
        assert not wanted - found, f"{len(wanted - found)} rows are lost: {sample(wanted - found)}"
        assert not found - wanted, f"{len(found - wanted)} rows too many: {sample(found - wanted)}"
        every = Reader(dict, "topic=copies", transport=transport, isolation="uncommitted")
        logs = [
            each.name
            for each in Journals(transport).list()
            if each.name.startswith("gazette-spark/transactions/")
        ]
        lines = [e.message for name in logs for e in Reader(dict, name=name, transport=transport)]
        return Outcome(
            kills,
            wanted.total(),
            sum("n" in envelope.message for envelope in every),
            sum("decided" in line for line in lines),
            sum("completing" in line for line in lines),
        )


def sample(rows: Counter[tuple[str, int]]) -> list[tuple[str, int]]:
    return sorted(rows)[:5]


class Lines:
    """Lines that a process prints."""

    def __init__(self, stream: IO[bytes]) -> None:
        os.set_blocking(stream.fileno(), False)
        self._stream = stream
        self._read = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(stream, selectors.EVENT_READ)

    def wait_for(self, line: bytes, timeout_s: float) -> bool:
        """Take the next such line; return False if there is none in time."""
        deadline = time.monotonic() + timeout_s
        while line not in self._read:
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                return False
            more = self._stream.read()
            assert more, "the driver has ended by itself"
            self._read += more
        self._read = self._read.replace(line, b"", 1)
        return True


def kill_one(driver: int, chance: random.Random) -> None:
    """Kill one Python process of a driver's tasks, planners or commits."""
    listed = subprocess.run(
        ["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True
    )
    parents: dict[int, int] = {}
    daemons: set[int] = set()
    for line in listed.stdout.splitlines():
        pid, parent, args = line.split(maxsplit=2)
        parents[int(pid)] = int(parent)
        if "pyspark.daemon" in args:
            daemons.add(int(pid))

    def is_ours(pid: int) -> bool:
        while pid > 1 and pid != driver:
            pid = parents.get(pid, 0)
        return pid == driver

    # Each daemon forks the processes that do the work.
    workers = sorted(pid for pid in daemons if parents[pid] in daemons and is_ours(pid))
    if workers:
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(chance.choice(workers), signal.SIGKILL)


def run(directory: Path, *, kills: int, queries: int, processes: int, seed: int) -> Outcome:
    """Kill queries at random until so many were killed, then let them end.

    Args:
        directory: where the cluster, the files and the checkpoints are.
        kills: number of queries to kill.
        queries: number of queries of one driver, which are killed at the same time.
        processes: number of queries which die before, each by the death of a process.
        seed: of all random choices.
    """
    chance = random.Random(seed)
    with EmbeddedCluster(directory / "cluster") as cluster:
        Journals(cluster.transport).create("copies", partitions=3, replication=1)
        copies = Queries(cluster, directory, queries)
        killed = 0
        while killed < kills:
            copies.add_files()
            left = max(0, kills - killed - queries)
            killed += copies.kill(chance, processes=min(processes, left))
            print(f"{killed} queries killed", flush=True)
        copies.add_files()
        copies.end()
        return copies.check(killed)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m crash.spark_kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=50, help="queries to kill (default: 50)")
    parser.add_argument("--queries", type=int, default=5, help="queries of a driver (default: 5)")
    parser.add_argument(
        "--processes", type=int, default=5, help="queries killed before their driver (default: 5)"
    )
    parser.add_argument("--seed", type=int, help="of all random choices (default: another one)")
    options = parser.parse_args(arguments)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        outcome = run(
            Path(directory),
            kills=options.kills,
            queries=options.queries,
            processes=options.processes,
            seed=seed,
        )
    print(outcome)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
