"""Base classes of context managers, and the context of tasks.

A block of ``with`` or ``async with`` ends by closing. Log records of a task have the fields that
its context gives them (:func:`logged_context`), such as the journal that it works for.
"""

from __future__ import annotations

import abc
import asyncio
import contextvars
from collections.abc import Mapping
from types import MappingProxyType, TracebackType
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


LOG_FIELDS: contextvars.ContextVar[Mapping[str, str]] = contextvars.ContextVar(
    "LOG_FIELDS", default=MappingProxyType({})
)
"""Fields of the log records of this context, beside their own."""


def logged_context(**fields: str) -> contextvars.Context:
    """Return a copy of the present context whose log records have further fields."""
    context = contextvars.copy_context()
    context.run(LOG_FIELDS.set, {**LOG_FIELDS.get(), **fields})
    return context
