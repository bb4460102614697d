"""The command-line tools in tests: called within this process, against a cluster outside of it."""

from __future__ import annotations

import logging
import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from gazette_sdk.cli.gazctl import GAZCTL
from gazette_sdk.cli.gazette import GAZETTE
from gazette_sdk.cli.program import Program

__all__ = [
    "Cluster",
    "Outcome",
    "Tool",
    "cluster",
    "gazctl",
    "gazette",
    "on_a_terminal",
    "read_until",
    "start_tool",
]

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Outcome:
    """How a tool ended."""

    status: int
    stdout: bytes
    stderr: str

    @property
    def text(self) -> str:
        """What it wrote to standard output."""
        return self.stdout.decode()


class Tool:
    """Calls a program in a directory of its own, with nothing in its environment."""

    def __init__(
        self, program: Program, directory: Path, capture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.directory = directory
        self.environ: dict[str, str] = {}
        self._program = program
        self._capture = capture
        self._monkeypatch = monkeypatch

    def __call__(
        self, *arguments: str, stdin: bytes = b"", environ: Mapping[str, str] | None = None
    ) -> Outcome:
        """Call it, and wait for its end."""
        given = self.directory / ".stdin"
        given.write_bytes(stdin)
        root, of_loops = logging.getLogger(), logging.getLogger("asyncio")
        of_loops.addFilter(_is_no_stray_wakeup)
        handlers, level = root.handlers[:], root.level
        package = logging.getLogger("gazette_sdk")
        package_level = package.level
        package.setLevel(logging.NOTSET)  # as in a process of its own, whatever others have set
        self._capture.readouterr()
        with self._monkeypatch.context() as patch, given.open() as file:
            patch.setattr(sys, "stdin", file)
            patch.chdir(self.directory)
            for name in list(os.environ):
                if name.startswith(("BROKER_", "GAZETTE_", "LOG_", "ETCD_", "DEBUG_", "ZONE")):
                    patch.delenv(name)
            patch.setenv("HOME", str(self.directory))
            for name, value in {**self.environ, **(environ or {})}.items():
                patch.setenv(name, value)
            try:
                status = self._program.main(arguments)
            finally:
                of_loops.removeFilter(_is_no_stray_wakeup)
                for handler in set(root.handlers) - set(handlers):
                    handler.close()
                root.handlers[:] = handlers
                root.setLevel(level)
                package.setLevel(package_level)
        captured = self._capture.readouterr()
        return Outcome(status, captured.out, captured.err.decode())

    def ok(self, *arguments: str, stdin: bytes = b"") -> Outcome:
        """Call it; it must succeed."""
        outcome = self(*arguments, stdin=stdin)
        assert outcome.status == 0, outcome.stderr
        return outcome


def _is_no_stray_wakeup(record: logging.LogRecord) -> bool:
    """gRPC wakes up loops of earlier calls, too; a tool of its own process has one loop only."""
    return "PollerCompletionQueue._handle_events" not in record.getMessage()


@pytest.fixture
def gazette(tmp_path, capfdbinary, monkeypatch) -> Tool:
    """``gazette``, in an empty directory."""
    return Tool(GAZETTE, tmp_path, capfdbinary, monkeypatch)


@pytest.fixture
def gazctl(tmp_path, capfdbinary, monkeypatch) -> Tool:
    """``gazctl``, in an empty directory, which knows no broker."""
    return Tool(GAZCTL, tmp_path, capfdbinary, monkeypatch)


def start_tool(
    module: str,
    arguments: Sequence[str],
    directory: Path,
    environ: Mapping[str, str] | None = None,
    **options,
) -> subprocess.Popen[bytes]:
    """A tool as a process of its own, with pipes."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    options = {"stdin": subprocess.DEVNULL, **pipes, **options}
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=directory,
        env={**os.environ, "HOME": str(directory), **(environ or {})},
        bufsize=0,
        **options,
    )


def read_until(process: subprocess.Popen[bytes], text: bytes) -> bytes:
    """What a process writes, until ``text`` is in it."""
    found = b""
    while text not in found:
        ready, _, _ = select.select([process.stdout], [], [], START_TIMEOUT_S)
        assert ready, f"nothing more came behind {found!r}"
        more = os.read(process.stdout.fileno(), 1 << 16)
        if not more:
            error = process.stderr.read().decode()
            raise AssertionError(f"it ended behind {found!r}: {error}")
        found += more
    return found


@dataclass(frozen=True)
class Cluster:
    """A cluster of ``gazette dev``."""

    address: str
    file_root: Path


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    """A cluster of one broker, in a process of its own, for all tests of a module."""
    directory = tmp_path_factory.mktemp("cluster")
    process = start_tool(
        "gazette_sdk.cli.gazette", ["dev", "--data", "data", "--port", "0"], directory
    )
    try:
        text = read_until(process, b"stops it").decode()
        address = re.search(r"http://\S+", text)
        assert address is not None
        yield Cluster(address[0], directory / "data" / "fragments")
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=STOP_TIMEOUT_S)
        assert process.returncode == 0, errors.decode()
    finally:
        process.kill()
        process.communicate()


def on_a_terminal(
    module: str, arguments: Sequence[str], directory: Path, environ: Mapping[str, str], stream: str
) -> str:
    """Return the output of a tool on a terminal, its ``stdout`` or ``stderr``. It must succeed."""
    leader, follower = pty.openpty()
    streams = {stream: follower}
    with start_tool(module, arguments, directory, {"TERM": "xterm", **environ}, **streams) as tool:
        os.close(follower)
        shown = b""
        while select.select([leader], [], [], STOP_TIMEOUT_S)[0]:
            try:
                shown += os.read(leader, 1 << 16)
            except OSError:  # the terminal's other side is closed
                break
        assert tool.wait(STOP_TIMEOUT_S) == 0
    os.close(leader)
    return shown.decode()
