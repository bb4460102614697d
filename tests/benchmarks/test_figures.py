"""Programs whose figures are collected: what they print, and what a failure leaves."""

import json
import subprocess
import sys
from pathlib import Path

import figures
import pytest
import spark_read

BENCHMARKS = Path(figures.__file__).parent


def test_a_program_prints_json_and_nothing_else():
    command = ["recovery.py", "--commits", "20", "--puts", "50", "--keys", "1000", "--json"]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=BENCHMARKS,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    names = [row["name"] for row in json.loads(done.stdout)]
    assert names[0] == "rocks: commit, p99"
    assert "sqlite: read at worst" in names


def test_the_planning_of_a_spark_read_is_timed(tmp_path):
    assert 0 < spark_read.planning_s(tmp_path, 20) < 30


def test_figures_are_kept_though_a_program_fails(tmp_path, monkeypatch):
    def measured(command):
        if "benchmarks/wire.py" in command:
            raise figures.ProgramError("wire.py failed:\nno room")
        return [{"name": command[1]}]

    out = tmp_path / "figures.json"
    monkeypatch.setattr(figures, "measured", measured)
    monkeypatch.setattr(sys, "argv", ["figures.py", "--only", "wire,idle", "--out", str(out)])
    with pytest.raises(SystemExit, match=r"wire: wire\.py failed:\nno room"):
        figures.main()
    found = json.loads(out.read_text())
    assert found["idle"] == [{"name": "benchmarks/idle.py"}]
    assert found["machine"]["cores"]
