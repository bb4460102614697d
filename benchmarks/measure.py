"""Common parts of the benchmark programs: a cluster, several rounds, and a table of ratios.

Machines are noisy. So the compared runs take turns in one process, several times. Figures are
medians, and their ratio counts. A figure can have a bar. With ``--check`` the exit status is 1 if
a bar is not met.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

from gazette_sdk.adaptive_spin import new_loop
from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.transport.loop import adopt_running_loop

T = TypeVar("T")


@dataclass(frozen=True)
class Figure:
    """Measured figure and its baseline. Without a bar it is only printed."""

    name: str
    ours: float
    baseline: float
    unit: str
    bar: float | None
    more_is_better: bool = True

    @property
    def ratio(self) -> float:
        """Ratio of our figure to the baseline."""
        return self.ours / self.baseline

    @property
    def holds(self) -> bool:
        """True if the bar is met, or if there is none."""
        if self.bar is None:
            return True
        return self.ratio >= self.bar if self.more_is_better else self.ratio <= self.bar

    @property
    def verdict(self) -> str:
        """Text that says if the bar is met, and by how many percent."""
        if self.bar is None:
            return "none"
        sign = "≥" if self.more_is_better else "≤"
        by_percent = abs(self.ratio / self.bar - 1) * 100
        return f"{sign} {self.bar:g} {'met' if self.holds else 'NOT MET'} by {by_percent:.0f} %"


def arguments(description: str, **defaults: int) -> argparse.Namespace:
    """Parse the arguments of a benchmark: sizes, number of rounds, and outputs."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=defaults.pop("rounds", 5))
    add_outputs(parser)
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    return parser.parse_args()


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of :func:`report`."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--check", action="store_true", help="end with 1 if a bar is not met")


def in_turn(rounds: int, **runs: Callable[[], float]) -> dict[str, float]:
    """Return medians of several runs, which take turns; the first round is not counted."""
    return {name: statistics.median(found) for name, found in rounds_of(rounds, runs).items()}


def percentiles_in_turn(
    rounds: int, percents: Sequence[int], **runs: Callable[[], Sequence[float]]
) -> dict[str, dict[int, float]]:
    """Return percentiles of several runs, which take turns; each is the median over rounds."""
    return {
        name: {
            percent: statistics.median(percentile(taken, percent) for taken in found)
            for percent in percents
        }
        for name, found in rounds_of(rounds, runs).items()
    }


def rounds_of(rounds: int, runs: Mapping[str, Callable[[], T]]) -> dict[str, list[T]]:
    """Return the results of runs, which take turns, by round; without the first round."""
    samples: dict[str, list[T]] = {name: [] for name in runs}
    for round_number in range(rounds + 1):
        for name, run in runs.items():
            value = run()
            if round_number:
                samples[name].append(value)
    return samples


def report(figures: list[Figure], options: argparse.Namespace) -> None:
    """Print figures, and check them with ``--check``."""
    if options.json:
        json.dump(rows(figures), sys.stdout, indent=2)
        print()
    else:
        print(table(figures))
    check(figures, options)


def rows(figures: list[Figure]) -> list[dict[str, Any]]:
    """Return figures as rows for JSON."""
    return [{**asdict(f), "ratio": round(f.ratio, 3), "holds": f.holds} for f in figures]


def table(figures: list[Figure]) -> str:
    """Return figures with their bars as a table."""
    width = max(len(figure.name) for figure in figures)
    lines = [f"{'':{width}}  {'ours':>12}  {'baseline':>12}  {'ratio':>6}  bar"]
    lines += [
        f"{f.name:{width}}  {f.ours:>12,.1f}  {f.baseline:>12,.1f}  {f.ratio:>6.2f}"
        f"  {f.verdict}  ({f.unit})"
        for f in figures
    ]
    return "\n".join(lines)


def check(figures: list[Figure], options: argparse.Namespace) -> None:
    """Exit with status 1 if a bar is not met and ``--check`` is given."""
    missed = [figure.name for figure in figures if not figure.holds]
    if missed and options.check:
        raise SystemExit(f"not met: {'; '.join(missed)}")


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the value that ``percent`` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


@dataclass(frozen=True)
class Spent:
    """Time of one function in a profile.

    Attributes:
        function: its name.
        file: its file; empty if it is not written in Python.
        calls: number of calls.
        seconds: time in it, without the functions that it calls.
    """

    function: str
    file: str
    calls: int
    seconds: float


@dataclass(frozen=True)
class ClusterProcess:
    """Cluster in another process."""

    address: str
    data: Path
    process: BaseProcess
    pipe: Connection

    @property
    def pid(self) -> int:
        """Process id."""
        assert self.process.pid is not None
        return self.process.pid

    def profile(self, work: Callable[[], object]) -> list[Spent]:
        """Profile its event loop while ``work`` runs; return time by function, most first.

        The profiler overstates calls of small functions.
        """
        self.pipe.send("profile")
        self.pipe.recv()
        work()
        self.pipe.send("profiled")
        spent: list[Spent] = self.pipe.recv()
        return spent

    def stop(self) -> None:
        """Stop it. A second call does nothing."""
        if self.process.is_alive():
            self.pipe.send("stop")
            self.process.join(60)


@contextmanager
def cluster(specs: str = "", **config: Any) -> Iterator[ClusterProcess]:
    """Run a cluster with journals, over a temporary directory.

    Args:
        specs: of the journals.
        config: of the :class:`~gazette_sdk.embedded.EmbeddedCluster`.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with tempfile.TemporaryDirectory(prefix="gazette-bench-") as data:
        process = context.Process(target=_serve, args=(data, specs, config, there), daemon=True)
        process.start()
        there.close()  # so that its death is noticed here
        try:
            running = ClusterProcess(here.recv(), Path(data), process, here)
            yield running
            running.stop()
        finally:
            process.kill()


def _serve(data: str, specs: str, config: dict[str, Any], pipe: Connection) -> None:
    # As `gazette dev` does it, on the loop that it has.
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(_serve_here(data, specs, config, pipe))


async def _serve_here(data: str, specs: str, config: dict[str, Any], pipe: Connection) -> None:
    adopt_running_loop()
    async with EmbeddedCluster(data, sync_etcd=False, **config) as running:
        if specs:
            await running.aapply(specs)
        pipe.send(running.address)
        profile = cProfile.Profile()
        while (told := await asyncio.to_thread(pipe.recv)) != "stop":
            if told == "profile":
                profile.enable()
                pipe.send(None)
            else:
                profile.disable()
                pipe.send(_spent(profile))


def _spent(profile: cProfile.Profile) -> list[Spent]:
    found = [
        Spent(
            entry.code if isinstance(entry.code, str) else entry.code.co_qualname,
            "" if isinstance(entry.code, str) else entry.code.co_filename,
            entry.callcount,
            entry.inlinetime,
        )
        for entry in profile.getstats()
    ]
    return sorted(found, key=lambda spent: -spent.seconds)
