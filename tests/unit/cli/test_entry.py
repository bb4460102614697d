from __future__ import annotations

import subprocess
import sys

import pytest

CLOSED = "standard input or output is closed"

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


@pytest.mark.parametrize(
    ("closing", "arguments", "status", "text"),
    [
        (">&-", ["--version"], 1, CLOSED),
        (">&-", ["journals", "list", "--help"], 1, CLOSED),
        (">/dev/full", ["--version"], 1, "No space left on device"),
        ("<&-", ["journals", "apply", "--dry-run"], 1, CLOSED),
        ("<&-", ["attach-uuids"], 1, CLOSED),
        ("<&- >&- 2>&-", ["journals", "apply", "--dry-run"], 1, ""),
        ("2>&-", ["journals", "list", "--help"], 0, ""),
        ("<&- 2>&-", ["--version"], 0, ""),
    ],
)
def test_closed_streams_are_a_plain_error(closing, arguments, status, text):
    program = "import sys; from gazette_sdk.cli import entry; sys.exit(entry.gazctl())"
    command = ["/bin/sh", "-c", f'exec "$@" {closing}', "sh", sys.executable, "-c", program]
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == status
    assert text in done.stderr
    assert len(done.stderr.splitlines()) == bool(text)


@pytest.mark.parametrize("closing", ["", "<&-", "<&- >&-", "<&- >&- 2>&-"])
def test_what_is_printed_reaches_no_file_that_is_opened_later(closing, tmp_path):
    program = (
        "import sys; from gazette_sdk.cli import entry\n"
        "class Opening:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'gazette_sdk.cli.gazctl':\n"
        "            sys.opened = open(sys.argv.pop(), 'w')\n"
        "sys.meta_path.insert(0, Opening())\n"
        "sys.exit(entry.gazctl())"
    )
    command = ["/bin/sh", "-c", f'exec "$@" {closing}', "sh", sys.executable, "-c", program]
    file = tmp_path / "file"
    subprocess.run([*command, "--version", str(file)], capture_output=True, timeout=60, check=False)
    assert file.read_bytes() == b""
