"""What the benchmark programs share: a cluster, several runs, and a table of ratios.

Machines are noisy. So everything that is compared is run in turn within one process, several
times, and the figure is the median; what counts is the ratio.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from gazette_sdk.embedded import EmbeddedCluster


@dataclass(frozen=True)
class Figure:
    """One measured figure, beside what it is compared with."""

    name: str
    ours: float
    baseline: float
    unit: str
    bar: float
    more_is_better: bool = True

    @property
    def ratio(self) -> float:
        """Ours by the baseline's."""
        return self.ours / self.baseline

    @property
    def holds(self) -> bool:
        """Whether the bar is met."""
        return self.ratio >= self.bar if self.more_is_better else self.ratio <= self.bar


def arguments(description: str, **defaults: int) -> argparse.Namespace:
    """Arguments of a benchmark: its sizes, how many rounds, and JSON output."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=defaults.pop("rounds", 5))
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    return parser.parse_args()


def in_turn(rounds: int, **runs: Callable[[], float]) -> dict[str, float]:
    """Medians of several runs, which take turns; the first round is not counted."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for round_number in range(rounds + 1):
        for name, run in runs.items():
            value = run()
            if round_number:
                samples[name].append(value)
    return {name: statistics.median(values) for name, values in samples.items()}


def report(figures: list[Figure], *, as_json: bool) -> None:
    """Print figures."""
    if as_json:
        rows = [{**asdict(f), "ratio": round(f.ratio, 3), "holds": f.holds} for f in figures]
        json.dump(rows, sys.stdout, indent=2)
        print()
        return
    width = max(len(figure.name) for figure in figures)
    print(f"{'':{width}}  {'ours':>12}  {'baseline':>12}  {'ratio':>6}  bar")
    for f in figures:
        sign = "≥" if f.more_is_better else "≤"
        verdict = "holds" if f.holds else "DOES NOT HOLD"
        print(
            f"{f.name:{width}}  {f.ours:>12,.1f}  {f.baseline:>12,.1f}  {f.ratio:>6.2f}"
            f"  {sign} {f.bar} {verdict}  ({f.unit})"
        )


@dataclass(frozen=True)
class ClusterProcess:
    """A cluster in a process of its own, as users have it."""

    address: str
    data: Path
    process: BaseProcess
    pipe: Connection

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self.process.pid is not None
        return self.process.pid

    def stop(self) -> None:
        """Stop it cleanly. Twice is once."""
        if self.process.is_alive():
            self.pipe.send("stop")
            self.process.join(60)


@contextmanager
def cluster(specs: str) -> Iterator[ClusterProcess]:
    """A cluster with journals, over a directory which is gone afterwards."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with tempfile.TemporaryDirectory(prefix="gazette-bench-") as data:
        process = context.Process(target=_serve, args=(data, specs, there), daemon=True)
        process.start()
        try:
            running = ClusterProcess(here.recv(), Path(data), process, here)
            yield running
            running.stop()
        finally:
            process.kill()


def _serve(data: str, specs: str, pipe: Connection) -> None:
    with EmbeddedCluster(data, sync_etcd=False) as running:
        running.apply(specs)
        pipe.send(running.address)
        pipe.recv()
