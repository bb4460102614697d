"""Simulated seeds: no promise is broken, planted bugs are found, and a seed is always the same run.

Each run is a process of the program: a simulation changes its process for good.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from simulation.checker import Promise
from simulation.plants import PLANTS
from simulation.run import HASH_SEED

TESTS = Path(__file__).parents[1]

SEEDS = ["1-75", pytest.param("76-1000", marks=pytest.mark.long)]
"""Seeds of a run of the suite. The program itself runs any number."""

LOSS = (Promise.OFFSETS, Promise.ORDER, Promise.READABLE, Promise.STORED)

BROKEN_BY = {
    "early-acknowledgements": LOSS,
    "offsets-again": LOSS,
    "no-sync": LOSS,
    "early-reads": (Promise.COMMITTED,),
    "names-of-objects": LOSS,
    "late-listings": LOSS,
    "any-etcd": LOSS,
    "older-routes": (*LOSS, Promise.PROGRESS),
    "leases-behind-proxies": (Promise.FAIL_OVER,),
    "kept-places": (Promise.FAIL_OVER,),
    "unasked-deposals": (Promise.FAIL_OVER,),
    "trusted-clocks": LOSS,
    "suspensions-unnoticed": (Promise.MEMBER,),
}
"""Promises that each planted bug breaks."""


FIRST = {
    "any-etcd": 147,
    "early-acknowledgements": 14,
    "early-reads": 34,
    "kept-places": 17,
    "late-listings": 260,
    "names-of-objects": 30,
    "no-sync": 112,
    "older-routes": 496,
    "suspensions-unnoticed": 99,
    "trusted-clocks": 431,
    "unasked-deposals": 18,
}
"""First seed for a bug: before it no seed of the thousand finds it."""


def simulate(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the program."""
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "simulation.run", *arguments],
        # With the program's own hash seed, it does not begin once more.
        env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": HASH_SEED, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def failing_seeds(output: str) -> list[int]:
    """Return the seeds of which the program reports violations."""
    return sorted({int(found) for found in re.findall(r"^seed (\d+):", output, re.MULTILINE)})


@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.parametrize("seeds", SEEDS)
def test_no_promise_is_broken(seeds: str) -> None:
    run = simulate("--jobs", "2", seeds)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_bug_is_found(plant: str) -> None:
    only = [word for kind in BROKEN_BY[plant] for word in ("--only", kind.name.lower())]
    run = simulate(
        "--jobs", "2", "--plant", plant, "--stop-at", "1", *only, f"{FIRST.get(plant, 1)}-1000"
    )
    # Without the bug the seed breaks nothing.
    found = [seed for seed in failing_seeds(run.stdout) if simulate(str(seed)).returncode == 0]
    assert found, run.stdout + run.stderr


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", ["2", "7"])
def test_a_seed_is_always_the_same_run(seed: str) -> None:
    logs = [simulate(seed, PYTHONHASHSEED=hashes, SOMETHING=hashes * 9).stdout for hashes in "17"]
    assert "acknowledged" in logs[0]
    assert logs[0] == logs[1]
