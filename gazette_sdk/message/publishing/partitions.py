"""The journals a mapping chooses among, watched, and where publishers find them.

Everything here belongs to the SDK's event loop, but for :attr:`Watches.current`, which any
thread may look at.
"""

from __future__ import annotations

import asyncio

from gazette_sdk.errors import (
    ClosedError,
    ConfigurationError,
    GazetteError,
    JournalNotFoundError,
    MappingError,
    UnauthenticatedError,
    UnavailableError,
    ValidationError,
)
from gazette_sdk.message.mapping import Partitions, SelectorMapping
from gazette_sdk.protocol.labels import CONTENT_TYPE, value_of
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.listing import WatchedList, get_journal

__all__ = ["Watches"]

_FINAL = (ClosedError, ConfigurationError)
"""After these a watch has ended: the transport will not carry any call any more."""

_HOPELESS = (UnauthenticatedError, UnavailableError, ValidationError, *_FINAL)
"""Failures of a first listing that are raised at once: waiting does not mend them, or the transport
has waited already. The next call looks again."""


class Watches:
    """Watched listings of one publisher, one for each selector.

    Args:
        transport: how to reach the cluster.
        timeout_s: bound of a wait for a first listing.

    Attributes:
        current: the last listing for each selector's text; none before the first came.
    """

    def __init__(self, transport: Transport, timeout_s: float) -> None:
        self.current: dict[str, Partitions] = {}
        self._transport = transport
        self._timeout_s = timeout_s
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._errors: dict[str, GazetteError] = {}

    async def partitions(self, mapping: SelectorMapping) -> Partitions:
        """The mapping's journals; waits for the first listing.

        Raises:
            MappingError: no listing came in time; says why.
            UnavailableError: no broker can be reached.
            GazetteError: the listing was refused.
        """
        selector = mapping.selector
        if selector not in self._tasks:
            task = asyncio.create_task(self._follow(mapping), name=f"partitions of {selector}")
            self._tasks[selector] = task
        elif isinstance(self._errors.get(selector), UnavailableError):
            del self._errors[selector]
        try:
            async with asyncio.timeout(self._timeout_s):
                while selector not in self.current:
                    error = self._errors.get(selector)
                    if isinstance(error, _HOPELESS):
                        raise error
                    await self._changed.wait()
        except TimeoutError:
            error = self._errors.get(selector)
            raise MappingError(
                f"the journals of selector {selector!r} could not be listed within "
                f"{self._timeout_s:g} s: {error or self._no_answer()}; check the address of the"
                " broker (GAZETTE_ADDRESS, or transport=)"
            ) from error
        return self.current[selector]

    async def content_type(self, journal: str) -> str:
        """The content type of a journal, by its name.

        Raises:
            MappingError: there is no such journal, or no answer in time.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                found = await get_journal(self._transport, journal)
        except JournalNotFoundError as error:
            raise MappingError(
                f"the mapping returned the journal {journal!r}, which does not exist; create it"
                " with `Journals().create`, `gazctl journals create` or `gazctl journals apply`, or"
                " correct the mapping",
                journal=journal,
            ) from error
        except TimeoutError:
            raise MappingError(
                f"the journal {journal!r} could not be looked up within {self._timeout_s:g} s: "
                f"{self._no_answer()}; check the address of the broker (GAZETTE_ADDRESS, or "
                "transport=)",
                journal=journal,
            ) from None
        return value_of(found.spec.labels, CONTENT_TYPE)

    def _no_answer(self) -> str:
        address = getattr(self._transport, "address", None)
        return f"no answer of {address}" if address else "no answer"

    async def aclose(self) -> None:
        """Stop watching."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _follow(self, mapping: SelectorMapping) -> None:
        selector = mapping.selector
        async with WatchedList(self._transport, mapping.label_selector) as watched:
            while True:
                try:
                    await watched.changed()
                except GazetteError as error:
                    self._errors[selector] = error
                    if isinstance(error, _FINAL):
                        self.current.pop(selector, None)
                        self._changed.set()
                        return
                else:
                    assert watched.snapshot is not None
                    self._errors.pop(selector, None)
                    specs = [journal.spec for journal in watched.snapshot.journals]
                    self.current[selector] = Partitions(specs)
                self._changed.set()
                self._changed = asyncio.Event()
