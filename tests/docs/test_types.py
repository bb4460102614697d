"""Programs of the documentation pass the type checkers: ``mypy --strict``, and pyright."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
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


def save(page: Path, directory: Path) -> tuple[Files, Files]:
    """Save the programs of a page: the page as one module, with its lines, and each named one.

    Returns:
        The files of programs, and those of tests.
    """
    modules = [directory / "page.py"]
    tests: list[Path] = []
    lines: list[str] = []
    for block in blocks_of(page):
        if block.language == "proto" and block.file_name:
            (directory / block.file_name).write_text(block.text)
            run(directory, "grpc_tools.protoc", "-I.", "--pyi_out=.", block.file_name)
    for block in programs(page):
        text = block.text.splitlines()
        if is_test(block) or block.file_name:
            path = directory / (block.file_name or f"test_line_{block.line}.py")
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


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, tuple[Path, Files, Files]]:
    """By page, its directory, its programs and its tests."""
    root = tmp_path_factory.mktemp("pages")
    found = {}
    for number, page in enumerate(PAGES):
        directory = root / f"{number:02}_{page.stem.replace('-', '_')}"
        directory.mkdir()
        found[page] = (directory, *save(page, directory))
    return found


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mypy")


def mypy(directory: Path, cache: Path, files: Files, *options: str) -> str:
    """Findings of mypy; empty if nothing."""
    (directory / "mypy.ini").write_text(MYPY)
    names = [path.name for path in files]
    return run(directory, "mypy", "--cache-dir", str(cache), *options, *names) if names else ""


def pyright(root: Path, directories: Iterable[Path]) -> str:
    """Findings of pyright; empty if nothing. Each directory has modules of its own."""
    paths = [str(ROOT), str(ROOT / "contrib" / "spark")]
    environments = [{"root": each.name, "extraPaths": [each.name, *paths]} for each in directories]
    settings = {**PYRIGHT, "executionEnvironments": environments}
    (root / "pyrightconfig.json").write_text(json.dumps(settings))
    return run(root, "basedpyright", "--pythonpath", sys.executable)


@pytest.mark.timeout(300)  # mypy reads all modules of Spark, and of the rest
@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_programs_of_a_page_pass_mypy(page: Path, saved, cache: Path):
    directory, modules, tests = saved[page]
    assert mypy(directory, cache, modules) == ""
    # Tests need no annotations: pytest gives their arguments.
    untyped = ("--allow-untyped-defs", "--allow-incomplete-defs", "--allow-untyped-calls")
    assert mypy(directory, cache, tests, *untyped) == ""


def test_programs_of_all_pages_pass_pyright(saved):
    directories = [directory for directory, _, _ in saved.values()]
    assert pyright(directories[0].parent, directories) == ""


def test_a_mistake_is_found(tmp_path: Path, cache: Path):
    (tmp_path / "one").mkdir()
    program = tmp_path / "one" / "page.py"
    program.write_text("from gazette_sdk import Reader\nreader = Reader(dict, 5)\n")
    assert "page.py:2" in mypy(program.parent, cache, [program])
    assert "page.py:2" in pyright(tmp_path, [program.parent])
