"""Base classes of context managers: a block of ``with`` or ``async with`` ends by closing."""

from __future__ import annotations

import abc
import asyncio
from types import TracebackType
from typing import Self


class Closable(abc.ABC):
    """Context manager whose block ends with :meth:`close`."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close it. Closing twice is closing once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class AsyncClosable(abc.ABC):
    """Asynchronous context manager whose block ends with :meth:`aclose`."""

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Close it. Closing twice is closing once."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()


class Startable(abc.ABC):
    """Context manager, plain or asynchronous, that starts before its block and stops after it.

    ``async with`` runs the plain form in a thread, for methods that block.
    """

    @abc.abstractmethod
    def start(self) -> Self:
        """Start it, and return it."""

    @abc.abstractmethod
    def stop(self) -> None:
        """Stop it."""

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.__enter__)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.__exit__, kind, error, traceback)
