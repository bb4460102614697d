"""Programs of the documentation pass the type checkers: ``mypy --strict``, and pyright."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import pytest

from support.pages import ROOT, Block, blocks_of, page_id, pages

Files: TypeAlias = Sequence[Path]

MYPY = """
[mypy]
strict = True
allow_redefinition_new = True
local_partial_types = True
implicit_reexport = True

[mypy-pyarrow.*]
ignore_missing_imports = True
"""

UNTYPED = """
allow_untyped_defs = True
allow_incomplete_defs = True
allow_untyped_calls = True
"""

PYRIGHT = {
    "typeCheckingMode": "standard",
    "pythonVersion": "3.11",
    "reportMissingModuleSource": False,
}


def programs(page: Path) -> list[Block]:
    """The Python blocks of a page that are run."""
    return [each for each in blocks_of(page) if each.language == "python" and not each.reason]


def is_test(block: Block) -> bool:
    return re.search(r"^(?:async )?def test_", block.text, re.MULTILINE) is not None


def save(page: Path, number: int, directory: Path) -> tuple[Files, Files]:
    """Save the programs of a page: the page as one module, with its lines, and each named one.

    Returns:
        The files of programs, and those of tests.
    """
    modules = [directory / f"page_{number:02}.py"]
    tests: list[Path] = []
    lines: list[str] = []
    for block in blocks_of(page):
        if block.language == "proto" and block.file_name:
            (directory / block.file_name).write_text(block.text)
            run(directory, "grpc_tools.protoc", "-I.", "--pyi_out=.", block.file_name)
    for block in programs(page):
        text = block.text.splitlines()
        if is_test(block) or block.file_name:
            path = directory / (block.file_name or f"test_{number:02}_line_{block.line}.py")
            path.write_text("\n" * (block.line - 1) + block.text)
            (tests if is_test(block) else modules).append(path)
            text = [] if is_test(block) else [f"from {path.stem} import *"]
        lines += [""] * (block.line - 1 - len(lines)) + text
    modules[0].write_text("\n".join([*lines, ""]))
    return modules, tests


def run(directory: Path, module: str, *arguments: str) -> str:
    found = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if found.returncode == 0 else found.stdout + found.stderr


PAGES = [page for page in pages() if programs(page)]


@dataclass
class Group:
    """Pages whose files have different names: the type checkers read them together.

    Attributes:
        directory: of the files.
        pages: by page, its programs and its tests.
    """

    directory: Path
    pages: dict[Path, tuple[Files, Files]] = field(default_factory=dict)


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> list[Group]:
    """All pages, in as few groups as there are files of one name."""
    root = tmp_path_factory.mktemp("pages")
    found: list[Group] = []
    taken: list[set[str]] = []
    for number, page in enumerate(PAGES):
        names = {block.file_name for block in blocks_of(page) if block.file_name}
        at = next((at for at, others in enumerate(taken) if not names & others), len(taken))
        if at == len(taken):
            found.append(Group(root / f"group_{at}"))
            found[at].directory.mkdir()
            taken.append(set())
        found[at].pages[page] = save(page, number, found[at].directory)
        taken[at] |= names
    return found


@pytest.fixture(scope="module")
def cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of what mypy knows of unchanged modules, kept for later runs of the tests."""
    kept = getattr(request.config, "cache", None)
    return tmp_path_factory.mktemp("mypy") if kept is None else Path(kept.mkdir("mypy"))


@pytest.fixture(scope="module")
def findings(groups: list[Group], cache: Path) -> dict[Path, str]:
    """Findings of mypy by page."""
    found = {}
    for group in groups:
        modules = [path for programs, _ in group.pages.values() for path in programs]
        tests = [path for _, tests in group.pages.values() for path in tests]
        lines = mypy(group.directory, cache, modules, tests).splitlines()
        known = {path.name for path in (*modules, *tests)}
        assert all(line.split(":")[0] in known for line in lines), lines  # else mypy itself failed
        for page, (of_page, tests_of_page) in group.pages.items():
            names = {path.name for path in (*of_page, *tests_of_page)}
            found[page] = "\n".join(line for line in lines if line.split(":")[0] in names)
    return found


def mypy(directory: Path, cache: Path, modules: Files, tests: Files = ()) -> str:
    """Findings of mypy; empty if nothing. Tests need no annotations: pytest gives arguments."""
    text = MYPY
    if tests:
        text += f"\n[mypy-{','.join(path.stem for path in tests)}]\n{UNTYPED}"
    (directory / "mypy.ini").write_text(text)
    names = [path.name for path in (*modules, *tests)]
    return run(directory, "mypy", "--cache-dir", str(cache), "--no-error-summary", *names)


def pyright(root: Path, directories: Iterable[Path]) -> str:
    """Findings of pyright; empty if nothing. Each directory has modules of its own."""
    paths = [str(ROOT), str(ROOT / "contrib" / "spark")]
    environments = [{"root": each.name, "extraPaths": [each.name, *paths]} for each in directories]
    settings = {**PYRIGHT, "executionEnvironments": environments}
    (root / "pyrightconfig.json").write_text(json.dumps(settings))
    return run(root, "basedpyright", "--pythonpath", sys.executable)


@pytest.mark.timeout(300)  # the first one runs mypy, which reads all modules of Spark, too
@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_programs_of_a_page_pass_mypy(page: Path, findings: dict[Path, str]):
    assert findings[page] == ""


def test_programs_of_all_pages_pass_pyright(groups: list[Group]):
    directories = [group.directory for group in groups]
    assert pyright(directories[0].parent, directories) == ""


def test_a_mistake_is_found(cache: Path, tmp_path: Path):
    (tmp_path / "one").mkdir()
    program = tmp_path / "one" / "page.py"
    program.write_text("from gazette_sdk import Reader\nreader = Reader(dict, 5)\n")
    assert "page.py:2" in mypy(program.parent, cache, [program])
    assert "page.py:2" in pyright(tmp_path, [program.parent])
