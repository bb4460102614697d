"""Entry points of the programs, which Ctrl-C ends quietly also while they are imported.

That takes some tenths of a second, before their own handling of Ctrl-C begins.

A program may be started with closed standard streams, as by ``<&-``. They are opened first, so that
no file or connection gets their numbers, and with them what is printed.
"""

from __future__ import annotations

import importlib
import os
import sys

INTERRUPTED = 130
"""Exit status of a command that Ctrl-C ended, as in shells."""


def gazette() -> int:
    """Run ``gazette`` with this process's arguments; return the exit status."""
    return _run("gazette_sdk.cli.gazette")


def gazctl() -> int:
    """Run ``gazctl`` with this process's arguments; return the exit status."""
    return _run("gazette_sdk.cli.gazctl")


def _run(program: str) -> int:
    _open_closed_streams()
    try:
        status: int = importlib.import_module(program).main()
    except KeyboardInterrupt:
        return INTERRUPTED
    return status


def _open_closed_streams() -> None:
    """Open standard streams that are closed: their use fails, except that of standard error."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is taken, which is this one.
            os.open(os.devnull, os.O_RDONLY if name == "stdout" else os.O_WRONLY)
            stream = open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115 - it stays
            setattr(sys, name, stream)
