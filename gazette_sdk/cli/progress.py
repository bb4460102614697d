"""Progress of long reads and appends, on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

__all__ = ["Progress", "progress_bar"]


class Progress(Protocol):
    """Told of how far the work is."""

    def advance(self, done_bytes: int, total_bytes: int | None) -> None:
        """So many bytes are done, of so many; ``None`` when nobody knows."""


class _Silent:
    """Where nobody looks."""

    def advance(self, done_bytes: int, total_bytes: int | None) -> None:
        """Say nothing."""


@contextmanager
def progress_bar(what: str, *, output_is_terminal: bool = False) -> Iterator[Progress]:
    """A bar on standard error, if that is a terminal; it is gone at the end.

    Args:
        what: word before the bar.
        output_is_terminal: the command's own output goes to the terminal, too: then no bar
            gets in its way.
    """
    if output_is_terminal or not sys.stderr.isatty():
        yield _Silent()
        return
    from rich.console import Console  # noqa: PLC0415 - only terminals need it
    from rich.progress import (  # noqa: PLC0415 - as above
        BarColumn,
        DownloadColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bars  # noqa: PLC0415 - as above

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(what, total=None)

        class _Bar:
            def advance(self, done_bytes: int, total_bytes: int | None) -> None:
                bars.update(task, completed=done_bytes, total=total_bytes)

        yield _Bar()
