"""Parts of the latency of one acknowledged publish.

    python benchmarks/latency_profile.py [--rounds 5] [--singles 1000] [--json]

Two tables. **Steps** are round trips to another process. Each adds one thing to the one it is
compared with: from an echo of bytes, over a PING of a broker, to
``publisher.publish(message).result()``. The difference is the cost of that thing, including waits.
Steps take turns; figures are medians over rounds of the medians of each round. The table also has
the processor time of both processes.

**Modules** are the shares of the broker's processor time in the step "append of 200 bytes", by a
profile of its event loop. The profiler overstates calls of small functions a little.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from latency_steps import PROFILED, Step, steps
from measure import Spent, rounds_of

WARM_UP = 200
NS_PER_S = 1e9

WAITING = "'poll' of 'select.epoll'"
MODULES_MAX = 20


@dataclass(frozen=True)
class Cost:
    """Cost of a step, in microseconds.

    Attributes:
        p50: median of the round trip.
        added: difference to the step it is compared with.
        here: processor time of this process.
        there: processor time of the other process.
    """

    name: str
    adds: str
    p50: float
    added: float
    here: float
    there: float


@dataclass(frozen=True)
class Module:
    """Processor time of the broker in one module, or in one function not written in Python.

    Attributes:
        name: name of the module or function.
        calls: calls per append.
        us: microseconds per append.
    """

    name: str
    calls: float
    us: float


def processor_s(pid: int) -> float:
    """Return the processor time of a process's threads, finer than clock ticks."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            total += int((task / "schedstat").read_text().split()[0])
    return total / NS_PER_S


def costs(found: Sequence[Step], rounds: int, count: int) -> list[Cost]:
    """Measure all steps in turn."""

    def observed(step: Step) -> Callable[[], tuple[float, float, float]]:
        def run() -> tuple[float, float, float]:
            step.run(min(WARM_UP, count))
            here, there = time.process_time(), processor_s(step.pid)
            taken = step.run(count)
            here, there = time.process_time() - here, processor_s(step.pid) - there
            return statistics.median(taken) * 1e6, here / count * 1e6, there / count * 1e6

        return run

    samples = rounds_of(rounds, {step.name: observed(step) for step in found})
    medians = {
        name: [statistics.median(column) for column in zip(*taken, strict=True)]
        for name, taken in samples.items()
    }
    return [
        Cost(
            step.name,
            step.adds,
            medians[step.name][0],
            medians[step.name][0] - (medians[step.over][0] if step.over else 0.0),
            medians[step.name][1],
            medians[step.name][2],
        )
        for step in found
    ]


def modules_of(spent: Sequence[Spent], whole_us: float, count: int) -> list[Module]:
    """Return the modules with the most processor time, and the sum of the others.

    Args:
        spent: profile of the appends.
        whole_us: processor time of one append, without the profiler.
        count: number of appends.
    """
    seconds: dict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    for each in spent:
        if WAITING not in each.function:
            name = _module_of(each)
            seconds[name] += each.seconds
            calls[name] += each.calls
    scale = whole_us / sum(seconds.values())
    most = sorted(seconds.items(), key=lambda item: -item[1])[:MODULES_MAX]
    found = [Module(name, calls[name] / count, taken * scale) for name, taken in most]
    rest = [name for name in seconds if name not in dict(most)]
    others = sum(calls[name] for name in rest) / count
    return [*found, Module("all others", others, sum(seconds[name] for name in rest) * scale)]


def _module_of(spent: Spent) -> str:
    if not spent.file:
        return spent.function.strip("<>")
    path = Path(spent.file)
    return f"{path.parent.name}/{path.name}"


def markdown(found: Sequence[Cost], modules: Sequence[Module]) -> str:
    """Return both tables as Markdown."""
    lines = [
        "| round trip | µs | adds | µs | client's processor | server's processor |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {each.name} | {each.p50:.0f} | {each.adds} | {each.added:+.0f} | {each.here:.0f} "
        f"| {each.there:.0f} |"
        for each in found
    ]
    lines += ["", "| module or function | calls for an append | µs of the broker's processor |"]
    lines += ["|---|---|---|"]
    lines += [f"| `{each.name}` | {each.calls:.1f} | {each.us:.1f} |" for each in modules]
    return "\n".join(lines)


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--singles", type=int, default=1000, help="calls of a step in a round")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args()
    with steps() as (found, running):
        measured = costs(found, options.rounds, options.singles)
        append = next(step for step in found if step.name == PROFILED)
        spent = running.profile(lambda: append.run(options.singles))
        whole_us = next(cost.there for cost in measured if cost.name == PROFILED)
    modules = modules_of(spent, whole_us, options.singles)
    if options.json:
        every: dict[str, list[Any]] = {"steps": measured, "modules": modules}
        json.dump({name: [asdict(row) for row in rows] for name, rows in every.items()}, sys.stdout)
        print()
    else:
        print(markdown(measured, modules))


if __name__ == "__main__":
    main()
