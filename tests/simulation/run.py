"""Program that runs seeds of the simulation.

::

    PYTHONPATH=tests python -m simulation.run [--jobs N] [--strict] [--plant NAME] 1-10000
    PYTHONPATH=tests python -m simulation.run [--plant NAME] 4711

Several seeds, or a range, print the violations with their seeds, and the rate. One seed prints the
log of its run. The exit status is 1 if a promise was broken. Each seed runs in a process of its
own, which ends without any clean-up: what a killed broker leaves must never run.
"""

from __future__ import annotations

import argparse
import gc
import os
import pickle
import resource
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from simulation.checker import Promise
from simulation.plants import PLANTS
from simulation.scenario import Outcome, run_seed

__all__ = ["main"]

HASH_SEED = "0"

REPORT_SEEDS = 500
"""Number of seeds after which progress is printed to standard error."""

REAL_TIMEOUT_S = 120
"""Bound of one run, in real seconds: a run that never ends is reported."""


@dataclass(slots=True)
class _Child:
    seed: int
    pid: int
    received: bytes = b""


def main() -> int:
    """Run the program. Return its exit status."""
    arguments = _arguments()
    seeds = [seed for text in arguments.seeds for seed in _seeds(text)]
    left_out = {Promise[name.upper()] for name in arguments.without}
    if arguments.only:
        left_out |= set(Promise) - {Promise[name.upper()] for name in arguments.only}
    if len(seeds) == 1:
        (_, outcome), *_ = _outcomes(seeds, arguments, left_out)
        print("\n".join(outcome.log))
        for violation in outcome.violations:
            print(f"VIOLATION {violation}")
        return int(bool(outcome.violations))
    began = time.monotonic()
    broken: Counter[str] = Counter()
    count, failed, acknowledged, virtual_s = 0, 0, 0, 0.0
    for seed, outcome in _outcomes(seeds, arguments, left_out):
        count += 1
        acknowledged += outcome.acknowledged
        virtual_s += outcome.virtual_s
        if count % REPORT_SEEDS == 0:
            print(f"{count} of {len(seeds)} seeds", file=sys.stderr, flush=True)
        if not outcome.violations:
            continue
        failed += 1
        broken.update({violation.promise.name for violation in outcome.violations})
        shown = outcome.violations if arguments.verbose else outcome.violations[:1]
        for violation in shown:
            print(f"seed {seed}: {violation}", flush=True)
        if arguments.stop_at and failed >= arguments.stop_at:
            break
    took_s = time.monotonic() - began
    print(
        f"{count} seeds, {failed} with violations; {acknowledged} appends acknowledged in "
        f"{virtual_s / 3600:.1f} virtual hours; {count / took_s * 60:.0f} seeds a minute"
    )
    for name, count in sorted(broken.items()):
        print(f"  {name}: {count} seeds")
    return int(bool(failed))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="simulation.run", description="Runs simulated clusters.")
    parser.add_argument("seeds", nargs="+", help="seeds, or ranges FIRST-LAST")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--plant", default="", choices=["", *PLANTS], help="bug to plant")
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        choices=[promise.name.lower() for promise in Promise],
        help="promise that is not checked; may be repeated",
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        choices=[promise.name.lower() for promise in Promise],
        help="promise that alone is checked; may be repeated",
    )
    parser.add_argument("--stop-at", type=int, default=0, help="stop at so many failing seeds")
    parser.add_argument("--verbose", action="store_true", help="print all violations of a seed")
    return parser.parse_args()


def _seeds(text: str) -> range:
    """Return the seeds of a seed or of a range."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


# ---------------------------------------------------------------------- processes


def _outcomes(
    seeds: Sequence[int], arguments: argparse.Namespace, left_out: AbstractSet[Promise]
) -> Iterator[tuple[int, Outcome]]:
    """Yield the outcomes of seeds, in the order in which their runs end."""
    gc.collect()
    gc.freeze()
    waiting = iter(seeds)
    running: dict[int, _Child] = {}
    poll = select.poll()
    keeps_log = len(seeds) == 1
    try:
        while True:
            while len(running) < arguments.jobs and (seed := next(waiting, None)) is not None:
                end, child = _start(seed, arguments.plant, left_out, keeps_log=keeps_log)
                running[end] = child
                poll.register(end, select.POLLIN | select.POLLHUP)
            if not running:
                return
            for end, _ in poll.poll():
                child = running[end]
                data = os.read(end, 1 << 20)
                child.received += data
                if data:
                    continue
                poll.unregister(end)
                os.close(end)
                del running[end]
                _, status = os.waitpid(child.pid, 0)
                yield child.seed, _received(child, status)
    finally:
        for child in running.values():
            os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)


def _start(
    seed: int, plant: str, left_out: AbstractSet[Promise], *, keeps_log: bool
) -> tuple[int, _Child]:
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write_end)
        return read_end, _Child(seed, pid)
    status = 1
    try:
        os.close(read_end)
        signal.alarm(REAL_TIMEOUT_S)
        outcome = run_seed(seed, plant=plant, left_out=left_out, keeps_log=keeps_log)
        data = memoryview(pickle.dumps(outcome))
        while data:
            data = data[os.write(write_end, data) :]
        status = 0
    finally:
        os._exit(status)


def _received(child: _Child, status: int) -> Outcome:
    if status == 0:
        outcome: Outcome = pickle.loads(child.received)
        return outcome
    raise SystemExit(f"seed {child.seed}: its process ended with status {status}")


def _with_fixed_hashes() -> None:
    """Replace this process by one in which strings have the same hashes each time."""
    if os.environ.get("PYTHONHASHSEED") != HASH_SEED:
        environment = {**os.environ, "PYTHONHASHSEED": HASH_SEED}
        os.execve(
            sys.executable, [sys.executable, "-m", "simulation.run", *sys.argv[1:]], environment
        )


if __name__ == "__main__":
    _with_fixed_hashes()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
    sys.exit(main())
