"""``gazette monitoring write``: alerts, recording rules and dashboards of a cluster, as files.

They are of this version of the package: names of metrics and what alerts say belong to it.
``scripts/dashboards.py`` makes the dashboards.
"""

from __future__ import annotations

import sys
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from gazette_sdk.cli.program import Invocation
from gazette_sdk.cli.settings import MONITORING
from gazette_sdk.errors import ConfigurationError

RUNBOOKS = "docs/runbooks.md#"
"""Begin of the links of alerts, before the alert's name in lower case."""


def written_files(runbooks: str = "") -> dict[str, str]:
    """Return the texts of all files, by their names below the directory.

    Args:
        runbooks: URL of the page of runbooks; empty for the page in the repository.
    """
    found: dict[str, str] = {}
    _read(files(__name__) / "files", "", found)
    if runbooks:
        base = runbooks.rstrip("#") + "#"
        found = {name: text.replace(RUNBOOKS, base) for name, text in found.items()}
    return found


def _read(folder: Traversable, prefix: str, found: dict[str, str]) -> None:
    for each in sorted(folder.iterdir(), key=lambda each: each.name):
        if each.is_dir():
            _read(each, f"{prefix}{each.name}/", found)
        else:
            found[prefix + each.name] = each.read_text(encoding="utf-8")


def write(invocation: Invocation) -> None:
    """Write the files into a directory. Files with the same content are left as they are.

    Raises:
        ConfigurationError: the directory cannot be written.
    """
    target = Path(invocation.arguments[0])
    for name, text in written_files(invocation.settings(MONITORING).runbooks).items():
        path = target / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            is_same = path.is_file() and path.read_text(encoding="utf-8") == text
            if not is_same:
                path.write_text(text, encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{path} cannot be written: {error}") from error
        sys.stdout.write(f"{path}: {'unchanged' if is_same else 'written'}\n")
