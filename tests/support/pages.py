"""Pages of the documentation as programs: their fenced blocks, and how each kind is run.

=========== ======================================================================================
block       what is done with it
=========== ======================================================================================
``python``  executed, in one module for all blocks of the page; those that define ``test_…``
            functions are given to pytest in a process of its own, when the page ends
``console`` run by bash. Lines that begin with ``$ `` are the commands, where there are any:
            the other lines then show what is printed. Otherwise every line is a command
``yaml``    read as specs of journals
``proto``   only saved, see below
=========== ======================================================================================

A block whose first line is a comment that holds nothing but a file's name is also saved under
that name, in the directory where the page's commands run. ``http://localhost:8080`` stands for the
broker of the test, ``http://localhost:2379`` for its Etcd, and 8090 for a free port.

An HTML comment on the line before a block changes what is done:

- ``<!-- not run: reason -->``: nothing
- ``<!-- runs until interrupted -->``: the command prints something, and goes on until Ctrl-C
- ``<!-- runs until the page ends -->``: the command prints something, and goes on beside the
  rest of the page; it ends by Ctrl-C
- ``<!-- fails -->``: the command ends with a status other than zero
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import subprocess
import sys
import textwrap
import time
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from gazette_sdk.cluster.child_process import reserve_port
from gazette_sdk.protocol import journalspace

ROOT = Path(__file__).parents[2]
DOCUMENTED_ADDRESS = "http://localhost:8080"
DOCUMENTED_ETCD = "http://localhost:2379"
DOCUMENTED_FREE_PORT = "8090"
COMMAND_TIMEOUT_S = 240.0
LANGUAGES = frozenset({"python", "console", "yaml", "proto", "ini", "json", "text", "mermaid"})

_FENCE = re.compile(r"^(?P<indent>[ ]*)```(?P<language>\w*)[^\n]*$")
_MARKER = re.compile(
    r"<!--\s*(?P<kind>not run|fails|runs until interrupted|runs until the page ends)"
    r"(?::\s*(?P<reason>.+?))?\s*-->"
)
_FILE_NAME = re.compile(r"^(?:#|//|;)\s*(?P<name>[\w\-]+(?:\.[\w\-]+)+)\s*$")


@dataclass(frozen=True)
class Block:
    """A fenced block: where it stands, what it is, and what the comment before it says."""

    page: Path
    line: int
    language: str
    text: str
    marker: str = ""
    reason: str = ""

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def file_name(self) -> str:
        """The name under which it is saved, where it says one."""
        found = _FILE_NAME.match(self.text.partition("\n")[0])
        return found["name"] if found else ""


def pages() -> list[Path]:
    return [
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "examples").glob("*/README.md")),
    ]


def page_id(page: Path) -> str:
    """The name of a page in the names of tests."""
    return page.name if page.parent.name == "docs" else str(page.relative_to(ROOT))


def blocks_of(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    blocks: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    marker = None
    index = 0
    while index < len(lines):
        opening = _FENCE.match(lines[index])
        if opening is None:
            if lines[index].strip():
                marker = _MARKER.search(lines[index])
            index += 1
            continue
        begin = index + 1
        index = begin
        while lines[index].strip() != "```":
            index += 1
        text = textwrap.dedent("\n".join(lines[begin:index]) + "\n")
        found = marker.groupdict(default="") if marker else {"kind": "", "reason": ""}
        blocks.append(
            Block(page, begin + 1, opening["language"], text, found["kind"], found["reason"])
        )
        marker = None
        index += 1
    return blocks


@dataclass
class PageRun:
    """Runs the blocks of one page, one after the other.

    Args:
        page: the page.
        address: URL of the broker that its examples reach.
        etcd: URL of the Etcd that its examples reach.
        directory: where its commands run and its files are.
    """

    page: Path
    address: str
    etcd: str
    directory: Path
    _module: types.ModuleType = field(init=False)
    _tests: list[str] = field(default_factory=list, init=False)
    _free_port: str = field(init=False)
    _started: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, init=False)

    def __post_init__(self) -> None:
        # Dataclasses and annotations look their module up by its name.
        self._module = types.ModuleType(f"page_{self.page.stem.replace('-', '_')}")
        sys.modules[self._module.__name__] = self._module
        (self.directory / "examples").symlink_to(ROOT / "examples")
        self._free_port = str(reserve_port())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._started.close()

    def run(self, block: Block) -> None:
        """Run a block.

        Raises:
            AssertionError: it does not do what its page says.
        """
        assert block.language in LANGUAGES, f"{block.where}: unknown language {block.language!r}"
        if block.file_name:
            (self.directory / block.file_name).write_text(self._here(block.text), encoding="utf-8")
        if block.marker == "not run":
            assert block.reason, f"{block.where} is not run, but does not say why"
        elif block.language == "console":
            self._run_commands(block)
        elif block.language == "python":
            if re.search(r"^(?:async )?def test_", block.text, re.MULTILINE):
                self._save_tests(block)
            else:
                self._execute(block)
        elif block.language == "yaml":
            root = journalspace.parse(block.text)
            root.validate()

    def _here(self, text: str) -> str:
        text = text.replace(DOCUMENTED_ADDRESS, self.address).replace(DOCUMENTED_ETCD, self.etcd)
        return re.sub(rf"\b{DOCUMENTED_FREE_PORT}\b", self._free_port, text)

    # --------------------------------------------------------------- python

    def _execute(self, block: Block) -> None:
        # Tracebacks name the line of the page.
        source = "\n" * (block.line - 1) + self._here(block.text)
        exec(compile(source, str(block.page), "exec"), vars(self._module))

    def _save_tests(self, block: Block) -> None:
        name = block.file_name or f"test_line_{block.line}.py"
        (self.directory / name).write_text(block.text, encoding="utf-8")
        self._tests.append(name)

    def finish(self) -> None:
        """Run the tests that the page shows, all at once: a process takes seconds to start.

        Raises:
            AssertionError: one of them fails.
        """
        if self._tests:
            command = f"{sys.executable} -m pytest -q -W error -p no:cacheprovider --rootdir ."
            self._bash(str(self.page), f"{command} {' '.join(self._tests)}")

    # -------------------------------------------------------------- console

    def _run_commands(self, block: Block) -> None:
        script = self._here(commands_of(block.text))
        if block.marker == "runs until interrupted":
            with self._interrupted(block, script):
                pass
        elif block.marker == "runs until the page ends":
            self._started.enter_context(self._interrupted(block, script))
        else:
            self._bash(block.where, script, fails=block.marker == "fails")

    def _bash(self, where: str, script: str, *, fails: bool = False) -> None:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=self.directory,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
        print(f"--- {where}\n{done.stdout}{done.stderr}")
        assert (done.returncode != 0) == fails, (
            f"{where}: status {done.returncode} of\n{script}\n{done.stdout}{done.stderr}"
        )

    @contextlib.contextmanager
    def _interrupted(self, block: Block, script: str) -> Iterator[None]:
        """Start commands, wait until they print something, and interrupt them in the end."""
        with subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=self.directory,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
        ) as process:
            try:
                printed = _first_output(process, COMMAND_TIMEOUT_S)
                print(f"--- {block.where}\n{printed!r}")
                assert printed, f"{block.where}: nothing was printed by\n{script}"
                yield
                os.killpg(process.pid, signal.SIGINT)
                process.wait(COMMAND_TIMEOUT_S)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)

    def _environment(self) -> dict[str, str]:
        scripts = Path(sys.executable).parent
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("BROKER_", "ETCD_", "LOG_", "COVERAGE", "COV_"))
        }
        return inherited | {
            "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(self.directory),
            "GAZETTE_ADDRESS": self.address,
            "ETCD_ADDRESS": self.etcd,  # the broker of `gazette dev` would tell it
        }


def commands_of(text: str) -> str:
    """The commands of a console block, without prompts and what they print."""
    if not re.search(r"^\$ ", text, re.MULTILINE):
        return text
    commands: list[str] = []
    continues = False
    for line in text.splitlines():
        if continues or line.startswith("$ "):
            commands.append(line if continues else line[2:])
            continues = line.endswith("\\")
    return "\n".join(commands) + "\n"


def _first_output(process: subprocess.Popen[bytes], timeout_s: float) -> bytes:
    assert process.stdout is not None
    deadline = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            if selector.select(left):
                return os.read(process.stdout.fileno(), 1 << 16)
    return b""
