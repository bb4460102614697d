"""What was handed out to a reader's consumer, who takes it in its own time."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

import numpy as np
import numpy.typing as npt

__all__ = ["Guard", "Plain"]


class Guard:
    """Around the work of an iterator which was handed out.

    Args:
        failed: is told the error if it fails, or is interrupted. Giving it up is neither.
    """

    __slots__ = ("_failed",)

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and not isinstance(error, GeneratorExit):
            self._failed(error)


class Plain:
    """A plain part of a run which was handed out.

    Args:
        begin: index of its first message in the run.
        stop: index behind its last message.
        visible: indices of the messages which were handed out; None for all.
    """

    __slots__ = ("_begin", "_visible", "stop")

    def __init__(self, begin: int, stop: int, visible: npt.NDArray[np.intp] | None) -> None:
        self.stop = stop
        self._begin = begin
        self._visible = visible

    def taken(self, left: int) -> int:
        """Index behind the last message that was taken, and what is hidden behind that."""
        if self._visible is None:
            return self.stop - left
        return self.stop if left == 0 else int(self._visible[len(self._visible) - left])
