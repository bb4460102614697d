"""Entry points of the programs, which Ctrl-C ends quietly also while they are imported.

That takes some tenths of a second, before their own handling of Ctrl-C begins.
"""

from __future__ import annotations

import importlib

INTERRUPTED = 130
"""Exit status of a command that Ctrl-C ended, as in shells."""


def gazette() -> int:
    """Run ``gazette`` with this process's arguments; return the exit status."""
    return _run("gazette_sdk.cli.gazette")


def gazctl() -> int:
    """Run ``gazctl`` with this process's arguments; return the exit status."""
    return _run("gazette_sdk.cli.gazctl")


def _run(program: str) -> int:
    try:
        status: int = importlib.import_module(program).main()
    except KeyboardInterrupt:
        return INTERRUPTED
    return status
