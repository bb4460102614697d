from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys
from gazette_sdk.cli import entry

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
sys.argv[1:] = ["--version"]
sys.exit(entry.{program}())
"""


@pytest.mark.parametrize("program", ["gazette", "gazctl"])
@pytest.mark.parametrize(
    ("module", "status"),
    [
        ("gazette_sdk.cli.program", 130),
        ("gazette_sdk.server.settings", 130),
        ("none", 0),
    ],
)
def test_an_interrupted_import_is_quiet(program, module, status):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(program=program, module=module)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (status, "")
    assert ("version" in done.stdout) == (status == 0)
