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

TESTS = Path(__file__).parents[1]

SEEDS = "1-200"
"""Seeds of a run of the suite. `scripts/soak` and the program itself run more."""

NOT_KEPT_YET: frozenset[Promise] = frozenset()
"""Promises that the product is known to break under these faults, and that are not checked here."""


def simulate(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the program."""
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "simulation.run", *arguments],
        env={**os.environ, "PYTHONPATH": path, **environment},
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
def test_no_promise_is_broken() -> None:
    left_out = [argument for kind in NOT_KEPT_YET for argument in ("--without", kind.name.lower())]
    run = simulate("--jobs", "2", *left_out, SEEDS)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_bug_is_found(plant: str) -> None:
    run = simulate("--jobs", "2", "--plant", plant, "--stop-at", "12", "1-1000")
    for seed in failing_seeds(run.stdout):
        if simulate(str(seed)).returncode == 0:
            return  # found: without the bug this seed breaks nothing
    pytest.fail(run.stdout + run.stderr)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", ["2", "7"])
def test_a_seed_is_always_the_same_run(seed: str) -> None:
    logs = [simulate(seed, PYTHONHASHSEED=hashes, SOMETHING=hashes * 9).stdout for hashes in "17"]
    assert "acknowledged" in logs[0]
    assert logs[0] == logs[1]
