"""What the files below ``deploy/`` say, and the options that they may use."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"

TIMEOUT_S = 60.0


@cache
def help_of(*command: str) -> str:
    """Return the help of a command of ``gazette``."""
    return subprocess.run(
        [sys.executable, "-m", "gazette_sdk.cli.gazette", *command, "--help"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    ).stdout


def flags_of(*command: str) -> set[str]:
    """Return the flags of a command, with their dashes."""
    return set(re.findall(r"^  (--[a-z][a-z.-]*)", help_of(*command), re.MULTILINE))


def variables_of(*command: str) -> set[str]:
    """Return the environment variables that a command reads as options."""
    return set(re.findall(r"\[\$([A-Z_]+)\]", help_of(*command)))


def environment_of(lines: Iterable[str], *, commented: bool = False) -> dict[str, str]:
    """Return the variables of lines ``NAME=value``.

    Args:
        lines: the lines.
        commented: also those of comments, which are examples.
    """
    pattern = re.compile(r"#?([A-Z_]+)=(.*)" if commented else r"([A-Z_]+)=(.*)")
    return dict(found.groups() for line in lines if (found := pattern.fullmatch(line)))
