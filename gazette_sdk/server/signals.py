"""Stop signals: SIGTERM and SIGINT ask a server to drain and exit, SIGQUIT to exit without a drain.

The first one wakes the waiters. Later ones of the first two do nothing: a drain continues (cli
section 3.1). SIGQUIT ends a drain, too.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from types import TracebackType
from typing import Self

__all__ = ["StopSignal"]

_log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)


class StopSignal:
    """Context that catches the stop signals. It belongs to the main thread's loop."""

    def __init__(self) -> None:
        self._caught: asyncio.Future[signal.Signals]
        self._quit: asyncio.Future[None]

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._caught = loop.create_future()
        self._quit = loop.create_future()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._catch, number)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
        self._caught.cancel()
        self._quit.cancel()

    def _catch(self, number: signal.Signals) -> None:
        if number == signal.SIGQUIT and not self._quit.done():
            self._quit.set_result(None)
        if not self._caught.done():
            _log.info("caught signal", extra={"signal": number.name})
            self._caught.set_result(number)

    @property
    def caught(self) -> bool:
        """True after the first signal."""
        return self._caught.done()

    @property
    def quits(self) -> bool:
        """True after a SIGQUIT."""
        return self._quit.done()

    async def wait_to_quit(self) -> None:
        """Wait for a SIGQUIT."""
        await asyncio.shield(self._quit)

    async def wait(self) -> signal.Signals:
        """Wait for the first signal and return it."""
        return await asyncio.shield(self._caught)
