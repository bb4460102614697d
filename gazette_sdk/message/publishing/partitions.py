"""The journals a mapping chooses among, watched, and where publishers find them.

Everything here belongs to the SDK's event loop, but for :attr:`Watches.current`, which any
thread may look at.
"""

from __future__ import annotations

import asyncio
import logging

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
from gazette_sdk.outage import Outage
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.labels import CONTENT_TYPE, value_of
from gazette_sdk.transport.backoff import pause
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.listing import NO_ANSWER, WatchedList, get_journal

__all__ = ["Watches"]

_FINAL = (ClosedError, ConfigurationError)
"""After these a watch has ended: the transport will not carry any call any more."""

_HOPELESS = (UnauthenticatedError, UnavailableError, ValidationError, *_FINAL)
"""Failures of a first listing that are raised at once: waiting does not mend them, or the transport
has waited already. The next call looks again."""

ATTEMPT_S = 5.0
"""Bound of one look-up of a journal, where they are repeated without end."""

_log = logging.getLogger(__name__)


class Watches:
    """Watched listings of one publisher, one for each selector.

    Args:
        transport: how to reach the cluster.
        timeout_s: bound of a wait for a first listing; None to wait without end, also while no
            broker can be reached.

    Attributes:
        current: the last listing for each selector's text; none before the first came.
    """

    def __init__(self, transport: Transport, timeout_s: float | None) -> None:
        self.current: dict[str, Partitions] = {}
        self._transport = transport
        self._timeout_s = timeout_s
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._errors: dict[str, GazetteError] = {}
        self._is_ended = False

    async def partitions(self, mapping: SelectorMapping) -> Partitions:
        """The mapping's journals; waits for the first listing.

        Raises:
            MappingError: no listing came in time; says why.
            UnavailableError: no broker can be reached, and the wait has a bound.
            ClosedError: :meth:`end` was called.
            GazetteError: the listing was refused.
        """
        selector = mapping.selector
        if selector not in self._tasks and not self._is_ended:
            task = asyncio.create_task(self._follow(mapping), name=f"partitions of {selector}")
            self._tasks[selector] = task
        elif isinstance(self._errors.get(selector), UnavailableError):
            del self._errors[selector]
        try:
            async with asyncio.timeout(self._timeout_s):
                while selector not in self.current:
                    self._check_open()
                    error = self._errors.get(selector)
                    if isinstance(error, _HOPELESS) and not self._outlasts(error):
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
            UnavailableError: no broker can be reached, and the wait has a bound.
            ClosedError: :meth:`end` was called.
        """
        try:
            found = await (
                self._look_up_patiently(journal)
                if self._timeout_s is None
                else self._look_up(journal, self._timeout_s)
            )
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

    async def _look_up(self, journal: str, timeout_s: float) -> pb.ListResponse.Journal:
        async with asyncio.timeout(timeout_s):
            return await get_journal(self._transport, journal)

    async def _look_up_patiently(self, journal: str) -> pb.ListResponse.Journal:
        """Look a journal up, again and again while no broker answers."""
        outage = Outage(_log, f"look-up of {journal}")
        attempt = 0
        while True:
            self._check_open()
            try:
                found = await self._look_up(journal, ATTEMPT_S)
            except (*NO_ANSWER, TimeoutError) as error:
                outage.failed(str(error) or self._no_answer())
            else:
                outage.ended()
                return found
            await pause(attempt)
            attempt += 1

    def _outlasts(self, error: GazetteError) -> bool:
        """Return True if the wait goes on after a failure of the watch, which tries again."""
        return self._timeout_s is None and isinstance(error, UnavailableError)

    def _check_open(self) -> None:
        if self._is_ended:
            raise ClosedError(
                "the publisher is closed while it waits for a listing of journals; use another one"
            )

    def _no_answer(self) -> str:
        address = getattr(self._transport, "address", None)
        return f"no answer of {address}" if address else "no answer"

    def end(self) -> None:
        """End all waits with an error."""
        self._is_ended = True
        self._changed.set()

    async def aclose(self) -> None:
        """Stop watching."""
        self.end()
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
