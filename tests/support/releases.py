"""Trees of this project by their commits, for tests of clusters of several versions."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAST_RELEASE = ROOT / "tests" / "compatibility" / "last-release.txt"
TIMEOUT_S = 60.0


class NoHistoryError(Exception):
    """Checkout without the commit of a release. The text has the remedy."""


def last_release() -> str:
    """Return the commit of the last release."""
    [commit] = [
        line for line in LAST_RELEASE.read_text("utf-8").splitlines() if not line.startswith("#")
    ]
    return commit


def unpack(commit: str, directory: Path) -> Path:
    """Write the packages of a commit into a directory, and return it.

    Raises:
        NoHistoryError: this checkout does not have the commit.
    """
    archive = ["git", "-C", str(ROOT), "archive", "--format=tar", commit, "gazette_sdk"]
    done = subprocess.run(archive, capture_output=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise NoHistoryError(
            f"this checkout has no commit {commit}, which {LAST_RELEASE.relative_to(ROOT)} names "
            f"as the last release ({done.stderr.decode().strip()}); clone the repository with its "
            "history, or run `git fetch --unshallow`: in CI check out with depth 0"
        )
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as tar:
        tar.extractall(directory, filter="data")
    return directory


@contextlib.contextmanager
def processes_of(tree: Path) -> Iterator[None]:
    """Let Python processes that are started meanwhile import the packages of a tree."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(tree)
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def imported_from(tree: Path, directory: Path) -> Path:
    """Return the place from which a process of a tree imports the package."""
    program = "import gazette_sdk; print(gazette_sdk.__file__)"
    with processes_of(tree):
        found = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            cwd=directory,
            timeout=TIMEOUT_S,
            check=True,
        )
    return Path(found.stdout.strip()).parents[1]
