import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).parents[1] / "conftest.py"
LOGS_SURROGATES = """
import logging

def test_that_passes():
    logging.getLogger("a").error("file \\udcff")

def test_that_fails():
    raise ValueError("file \\udcff")
"""


def test_lone_surrogates_in_reports_do_not_end_a_run_of_several_processes(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    (tmp_path / "test_logs.py").write_text(LOGS_SURROGATES)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--numprocesses=1", "-rP"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 1, run.stdout
    assert "1 failed, 1 passed" in run.stdout
    assert "INTERNALERROR" not in run.stdout
    assert r"file \udcff" in run.stdout
