"""Audit journal of a broker (``--broker.audit-journal``).

The records of the broker's audit logs become CloudEvents in a journal, beside the log. A record
waits in a bounded queue, so that no call waits for the journal, or fails by it. Appends are made
through the broker's own service, past its audit log. A record of an append to the audit journal by
others stays in the log: brokers that proxy appends of theirs would cause records without end.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from gazette_sdk.broker.metrics import AUDIT_DROPPED, AUDIT_FAILING_SECONDS
from gazette_sdk.errors import GazetteError, JournalNotFoundError, MappingError
from gazette_sdk.framing.base import JsonLines
from gazette_sdk.message.mapping import direct
from gazette_sdk.message.publisher import Publisher
from gazette_sdk.message.receipt import Receipt
from gazette_sdk.protocol.labels import CONTENT_TYPE, value_of
from gazette_sdk.retries import Outage, Pause, pause
from gazette_sdk.server.authorization import AuditEvent
from gazette_sdk.server.health import Check
from gazette_sdk.transport.base import Transport
from gazette_sdk.transport.listing import get_journal

RECORDS_MAX = 10_000
"""Records that wait for the journal. Those of an audit log come at 50 in a second at most."""

BATCH_RECORDS = 100
"""Records that are sent at a time."""

LATE_S = 10.0
"""An append that takes longer is reported as a failure, and is waited for nevertheless."""

LOOK_UP_TIMEOUT_S = 5.0
"""Bound of a look-up of the journal."""

CLOSE_TIMEOUT_S = 5.0
"""Bound of the appends of the end."""

EVENT_TYPES = "dev.gazette.audit"
"""Begin of the types of events: ``.answered``, ``.refused``, and ``.left-out`` for a number."""

_log = logging.getLogger(__name__)


class AuditJournal:
    """Second output of a broker's audit logs: a journal of CloudEvents.

    Args:
        journal: its name.
        source: the broker, as a reference of URIs.
        records_max: greatest number of records that wait.
        now: Unix time in seconds.
        pause: waits between attempts.

    Attributes:
        dropped: number of records that are in the log only.
    """

    def __init__(
        self,
        journal: str,
        source: str,
        *,
        records_max: int = RECORDS_MAX,
        now: Callable[[], float] = time.time,
        pause: Pause = pause,
    ) -> None:
        self.dropped = 0
        self._journal = journal
        self._source = source
        self._records_max = records_max
        self._now = now
        self._pause = pause
        self._begun_us = int(now() * 1e6)
        self._numbers = itertools.count(1)
        self._waiting: deque[dict[str, Any]] = deque()  # those in flight are the first of them
        self._woken = asyncio.Event()
        self._is_full = False
        self._is_closing = False
        self._problem = ""
        self._failing_since_s: float | None = None
        self._shown: Callable[[], None] | None = None
        self._attempts = 0  # failures in a row
        self._outage = Outage(_log, f"write of audit records to the journal {journal}")
        self._transport: Transport | None = None
        self._task: asyncio.Task[None] | None = None

    def begin(self, transport: Transport) -> None:
        """Begin to write records; see :class:`~gazette_sdk.broker.api.served.AuditOutput`."""
        self._transport = transport
        self._shown = AUDIT_FAILING_SECONDS.add(lambda: {(): self._failing_s()})
        self._task = asyncio.create_task(self._run(transport), name="audit journal")

    def put(self, event: AuditEvent | None, count: int) -> None:
        """Add a record to the queue, or count it if the queue is full.

        Args:
            event: the event; None for events that were left out of the log.
            count: repetitions of the event, or the number of those left out.
        """
        if event is not None and self._is_own(event):
            return
        if self._is_closing or len(self._waiting) >= self._records_max:
            self._drop(1)
            if not self._is_full and not self._is_closing:
                self._is_full = True
                _log.warning(
                    "%d audit records wait for the journal %s: further ones are in the log only",
                    len(self._waiting),
                    self._journal,
                )
            return
        self._is_full = False
        self._waiting.append(self._cloud_event(event, count))
        self._woken.set()

    async def checks(self, authorization: str | None) -> Iterable[Check]:  # noqa: ARG002 - see AuditOutput
        """Return the outcome of a check of the journal, which is looked up."""
        problem = await self._fault() or (self._problem if self._waiting else "")
        detail = problem or f"{self._journal} takes records"
        if self._waiting:
            detail += f"; {len(self._waiting)} records wait"
        if self.dropped:
            detail += f"; {self.dropped} records are in the log only"
        return [Check("audit-journal", not problem, detail)]

    async def aclose(self) -> None:
        """Write what is left, and end. Bounded: what cannot be written is in the log only."""
        self._is_closing = True
        self._woken.set()
        if self._task is not None:
            timeout_s = 0.0 if self._outage.is_open else CLOSE_TIMEOUT_S
            await asyncio.wait([self._task], timeout=timeout_s)
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._shown is not None:
            self._shown()
        if self._transport is not None:
            await self._transport.aclose()
        if self._waiting:
            _log.warning(
                "%d audit records are in the log, and may not be in the journal %s",
                len(self._waiting),
                self._journal,
            )
            self._drop(len(self._waiting))
            self._waiting.clear()

    # --------------------------------------------------------------- inside

    def _is_own(self, event: AuditEvent) -> bool:
        """Return True for an append to the journal itself."""
        return event.method == "Append" and event.journal == self._journal and not event.is_refusal

    def _drop(self, count: int) -> None:
        self.dropped += count
        AUDIT_DROPPED.value += count

    def _cloud_event(self, event: AuditEvent | None, count: int) -> dict[str, Any]:
        kind = "left-out" if event is None else "refused" if event.is_refusal else "answered"
        fields = {"left_out": count} if event is None else event.fields(count)
        subject = "" if event is None else str(fields.get("journal") or fields.get("shard") or "")
        at = datetime.fromtimestamp(self._now(), UTC).isoformat(timespec="microseconds")
        return {
            "specversion": "1.0",
            "id": f"{self._begun_us}-{next(self._numbers)}",
            "source": self._source,
            "type": f"{EVENT_TYPES}.{kind}",
            "time": at.replace("+00:00", "Z"),
            **({"subject": _encodable(subject)} if subject else {}),
            "datacontenttype": "application/json",
            "data": {name: _encodable(value) for name, value in fields.items()},
        }

    async def _run(self, transport: Transport) -> None:
        """Write records, until there are none at the end, or they cannot be written then."""
        try:
            while True:
                if fault := await self._fault():
                    self._failed(fault)
                elif await self._write(transport):
                    return
                if self._is_closing:
                    return
                await self._pause(self._attempts)
                self._attempts += 1
        except Exception:  # noqa: BLE001 - the outermost boundary of a task
            self._problem = "an unexpected error is in the log of the broker; start it again"
            self._failing_since_s = self._failing_since_s or time.monotonic()
            _log.exception("audit records are in the log only, and not in %s", self._journal)

    async def _write(self, transport: Transport) -> bool:
        """Write records by one publisher. Return False after a failure, True at the end."""
        publisher = Publisher(
            mapping=direct(self._journal), transport=transport, delivery_timeout_s=None
        )
        try:
            while self._waiting or not self._is_closing:
                self._woken.clear()
                records = list(itertools.islice(self._waiting, BATCH_RECORDS))
                failed = await self._send(publisher, records)
                for _ in records:
                    self._waiting.popleft()
                self._waiting.extendleft(reversed(failed))
                if failed:
                    return False
                if records:
                    self._problem, self._attempts, self._failing_since_s = "", 0, None
                    self._outage.ended()
                if not self._waiting and not self._is_closing:
                    await self._woken.wait()
            return True
        finally:
            with contextlib.suppress(GazetteError):  # of records that wait nevertheless
                await publisher.aclose(0)

    async def _send(
        self, publisher: Publisher, records: Sequence[dict[str, Any]]
    ) -> Sequence[dict[str, Any]]:
        """Publish records; return those that the journal has refused."""
        if not records:
            return []

        async def acknowledged(record: dict[str, Any]) -> Receipt:
            return await (await publisher.apublish(record))

        sending = [asyncio.ensure_future(acknowledged(record)) for record in records]
        try:
            _, late = await asyncio.wait(sending, timeout=LATE_S)
            if late:
                self._failed(f"no acknowledgement within {LATE_S:g} s")
                await asyncio.wait(late)
        finally:
            for each in sending:
                each.cancel()
        failed = []
        for record, outcome in zip(records, sending, strict=True):
            error = outcome.exception()
            if isinstance(error, GazetteError):
                failed.append(record)
                self._failed(_reason(error, self._journal))
            elif error is not None:
                raise error
        return failed

    def _failing_s(self) -> float:
        since_s = self._failing_since_s
        return 0.0 if since_s is None or not self._waiting else time.monotonic() - since_s

    def _failed(self, problem: str) -> None:
        self._problem = problem
        self._failing_since_s = self._failing_since_s or time.monotonic()
        self._outage.failed(f"{problem}; the log has the records")

    async def _fault(self) -> str:
        """Return why the journal cannot take records; empty if nothing is known against it."""
        if self._transport is None:
            return ""
        try:
            async with asyncio.timeout(LOOK_UP_TIMEOUT_S):
                found = await get_journal(self._transport, self._journal)
        except GazetteError as error:
            return _reason(error, self._journal)
        except TimeoutError:
            return f"the journal could not be looked up within {LOOK_UP_TIMEOUT_S:g} s"
        content_type = value_of(found.spec.labels, CONTENT_TYPE)
        if content_type != JsonLines.content_type:
            return (
                f"the journal {self._journal} has the content type {content_type or '(none)'}: "
                f"name one with {JsonLines.content_type}"
            )
        return ""


def _reason(error: GazetteError, journal: str) -> str:
    """Return why a journal takes no records, with the remedy if it does not exist."""
    cause = error.__cause__ if isinstance(error, MappingError) else error
    if isinstance(cause, JournalNotFoundError):
        return (
            f"the journal {journal} does not exist; create it by `gazctl journals apply`, with "
            f"the label {CONTENT_TYPE} {JsonLines.content_type}"
        )
    return str(error)


def _encodable(value: object) -> object:
    """Return a value without lone surrogates, which JSON cannot hold: names are of clients."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    return value
