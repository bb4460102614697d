"""Progress bars on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # only terminals need rich
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

__all__ = ["Progress", "open_progress"]


class Progress:
    """Steps of a command, each with a bar.

    Args:
        bars: where the bars are drawn; ``None`` shows nothing.
    """

    def __init__(self, bars: Bars | None = None) -> None:
        self._bars = bars
        self._task: TaskID | None = None
        self._total: int | None = None

    def begin(self, step: str, total: int | None = None) -> None:
        """Show the next step, and the one before as complete.

        Args:
            step: short description.
            total: number of units; ``None`` if it is unknown.
        """
        if self._bars is None:
            return
        if self._task is not None:
            end = self._total or 1
            self._bars.update(self._task, total=end, completed=end)
        self._task, self._total = self._bars.add_task(step, total=total), total

    def advance(self, done: int, total: int | None = None) -> None:
        """Show that ``done`` units of the step are complete; ``total`` replaces its total."""
        if self._bars is not None and self._task is not None:
            self._bars.update(self._task, completed=done, total=total)


@contextmanager
def open_progress(
    unit: Literal["bytes", "messages"], *, is_shown: bool = True
) -> Iterator[Progress]:
    """Draw bars on standard error until the context ends, if that is a terminal.

    Args:
        unit: unit of the bars.
        is_shown: False if the command's own output goes to the same terminal.
    """
    if not is_shown or not sys.stderr.isatty():
        yield Progress()
        return
    from rich import progress as rich  # noqa: PLC0415 - only terminals need it
    from rich.console import Console  # noqa: PLC0415 - as above

    description = rich.TextColumn("{task.description}")
    columns: tuple[rich.ProgressColumn, ...] = (
        *(rich.SpinnerColumn(finished_text="✓"), description, rich.BarColumn()),
        *(rich.MofNCompleteColumn(), rich.TimeElapsedColumn()),
    )
    if unit == "bytes":
        columns = (
            *(description, rich.BarColumn(), rich.DownloadColumn(binary_units=True)),
            *(rich.TransferSpeedColumn(), rich.TimeRemainingColumn()),
        )
    # More than four refreshes per second would disturb what `gazette bench` measures.
    console = Console(stderr=True)
    with rich.Progress(*columns, console=console, transient=True, refresh_per_second=4) as bars:
        yield Progress(bars)
