"""Errors as users see them: one line on standard error, and an exit status."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from gazette_sdk.errors import GazetteError
from gazette_sdk.protocol.durations import SECOND_NS, format_duration

__all__ = ["TERMINATION_LOG", "CommandFailedError", "TimedOutError", "explain", "report"]

TERMINATION_LOG = Path("/dev/termination-log")
"""If this file exists, a supervisor (Kubernetes) reads from it why a process ended."""

_log = logging.getLogger("gazette_sdk.cli")


class CommandFailedError(GazetteError):
    """Failure of a command, which ends with a status other than zero."""


class TimedOutError(CommandFailedError):
    """End of a command by ``--timeout``.

    Args:
        command: the command's name.
        timeout_s: its longest time.
        detail: what is known about its work; empty for nothing.
    """

    def __init__(self, command: str, timeout_s: float, detail: str = "") -> None:
        limit = format_duration(round(timeout_s * SECOND_NS))
        text = f"`{command}` did not end within {limit} (--timeout)"
        super().__init__(f"{text}; {detail}" if detail else text)


def explain(error: BaseException) -> str:
    """Return the text of an error in one line."""
    if isinstance(error, BaseExceptionGroup):
        return explain(error.exceptions[0])
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror
        if error.filename is not None:
            text = f"{error.filename}: {text}"
    return "; ".join(line.strip() for line in text.splitlines() if line.strip()) or repr(error)


def report(program: str, error: BaseException, *, in_log: bool) -> None:
    """Report the error that ends a process.

    Args:
        program: name of the program.
        error: the error.
        in_log: write a log record of level fatal instead of a plain line.
    """
    text = explain(error)
    if TERMINATION_LOG.exists():
        try:
            TERMINATION_LOG.write_text(text + "\n", encoding="utf-8")
        except OSError as unwritable:
            _log.warning("cannot write to %s: %s", TERMINATION_LOG, unwritable)
    if not in_log:
        sys.stderr.write(f"{program}: {text}\n")
        return
    fields = {
        name: value
        for name in ("journal", "offset")
        if (value := getattr(error, name, None)) is not None
    }
    _log.critical("%s", text, extra=fields)
