"""``gazette spark NAME`` around ``spark-submit``, which a program of the test stands for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SUBMIT = """#!{python}
import json, os, pathlib, sys, time
name, output, options, directory = json.loads(sys.argv[-1])
print("batch 0: 9 messages", flush=True)
{work}
"""

WAIT_S = 30.0


@pytest.fixture
def start(tmp_path: Path):
    """Return a function that starts ``gazette spark compact`` over a program in Python."""
    started: list[subprocess.Popen[str]] = []

    def start(work: str) -> subprocess.Popen[str]:
        program = tmp_path / "bin" / "spark-submit"
        program.parent.mkdir(exist_ok=True)
        program.write_text(SUBMIT.format(python=sys.executable, work=work))
        program.chmod(0o755)
        command = [sys.executable, "-m", "gazette_sdk.cli.gazette", "spark", "compact"]
        started.append(
            subprocess.Popen(
                [*command, "--lake", str(tmp_path), "-o", "json"],
                env={**os.environ, "SPARK_HOME": str(tmp_path), "JAVA_HOME": str(tmp_path)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.communicate()


def test_standard_output_has_the_summary_alone(start):
    summary = json.dumps({"hour": "17"})
    run = start(f"pathlib.Path(directory, 'summary').write_text({summary!r})")
    output, errors = run.communicate(timeout=WAIT_S)
    assert run.returncode == 0, errors
    assert json.loads(output) == {"hour": "17"}
    assert "batch 0: 9 messages" in errors


def test_the_outcome_of_a_driver_in_the_cluster_is_in_its_log(start):
    run = start("pass")
    output, errors = run.communicate(timeout=WAIT_S)
    assert (run.returncode, output) == (0, "")
    assert errors.splitlines()[-1] == (
        "compact: its driver ran in the cluster, with the summary in its log"
    )


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        (
            "pathlib.Path(directory, 'failure').write_text('no such lake'); sys.exit(1)",
            "no such lake",
        ),
        ("sys.exit(1)", "see above"),
    ],
)
def test_the_last_line_is_the_reason(start, work: str, reason: str):
    run = start(work)
    output, errors = run.communicate(timeout=WAIT_S)
    assert (run.returncode, output) == (1, "")
    assert errors.splitlines()[-1] == f"gazette: compact: {reason} (spark-submit: status 1)"


def test_a_command_that_is_terminated_leaves_nothing_at_work(start, tmp_path: Path):
    mark = tmp_path / "pid"
    run = start(f"pathlib.Path({str(mark)!r}).write_text(str(os.getpid())); time.sleep(600)")
    deadline = time.monotonic() + WAIT_S
    while not (mark.exists() and mark.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    run.send_signal(signal.SIGTERM)
    assert run.wait(WAIT_S) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)
