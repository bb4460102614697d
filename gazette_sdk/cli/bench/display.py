"""Progress of the phases, where somebody looks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

__all__ = ["Display", "open_display"]


class Display(Protocol):
    """Told of what is done, and how far it is."""

    def begin(self, what: str, total: int | None = None) -> None:
        """Something begins, of so many messages; ``None`` where nobody knows."""

    def advance(self, done: int) -> None:
        """So many messages of it are done."""


class _Silent:
    def begin(self, what: str, total: int | None = None) -> None:
        """Say nothing."""

    def advance(self, done: int) -> None:
        """Say nothing."""


@contextmanager
def open_display() -> Iterator[Display]:
    """A line for each phase on standard error, if that is a terminal; gone at the end."""
    if not sys.stderr.isatty():
        yield _Silent()
        return
    from rich.console import Console  # noqa: PLC0415 - only terminals need it
    from rich.progress import (  # noqa: PLC0415 - as above
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TaskID,
        TextColumn,
        TimeElapsedColumn,
    )

    columns = (
        SpinnerColumn(finished_text="✓"),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    # Four times a second is enough for eyes, and costs what is measured next to nothing.
    progress = Progress(
        *columns, console=Console(stderr=True), transient=True, refresh_per_second=4
    )
    with progress:

        class _Lines:
            def __init__(self) -> None:
                self._end: int | None = None
                self._task: TaskID | None = None

            def begin(self, what: str, total: int | None = None) -> None:
                self._finish()
                self._end = total
                self._task = progress.add_task(what, total=total)

            def advance(self, done: int) -> None:
                if self._task is not None:
                    progress.update(self._task, completed=done)

            def _finish(self) -> None:
                if self._task is not None:
                    end = self._end or 1
                    progress.update(self._task, total=end, completed=end)

        yield _Lines()
