"""Modules that one message enters on its way: they may become fewer, not more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

MODULES_MAX = {
    "publish": 16,
    "await_publish": 16,
    "tail": 18,
    "read": 29,
    "consume": 42,
    "spark": 35,
    "allocate": 13,
    "append": 16,
    "deliver": 18,
    "put": 16,
    "get": 17,
}
"""Modules of each walk at most. The walks are told file by file in docs/architecture.md."""


@pytest.mark.parametrize("walk", MODULES_MAX)
def test_a_walk_enters_few_modules(walk):
    path = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "contrib" / "spark")])
    run = subprocess.run(
        [sys.executable, "-m", "support.walks", walk],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    calls = json.loads(run.stdout.splitlines()[-1])
    assert 0 < len(calls) <= MODULES_MAX[walk], calls
