"""Calls as their fronts received them, and the authorization of callers (protocol section 12).

The :class:`AuditLog` names callers that wrote or were refused, in records of the logger
``gazette.audit``. Equal events of one minute are one record. Its repetitions are counted, and are
logged with the next one or at the end of the minute. So a loop of refused calls does not fill a
disk. Different events are bounded in number, too: unknown clients choose the names in them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from gazette_sdk.errors import CallError, DeadlineExceededError, GazetteError
from gazette_sdk.protocol.authorization import AllowAll, Authority, Capability, Claims
from gazette_sdk.server.logging import AUDIT
from gazette_sdk.tracing import PARENT_KEY, is_sampled

CHUNK_BYTES_METADATA = "gazette-chunk-bytes"
"""Metadata with which a client of ours asks for bigger read messages."""

PROXY_HEADER_METADATA = "x-proxyheader"
"""Metadata, or HTTP header, of an application's call that another process forwards: the header of
its resolution, as JSON."""

FOREIGN_CHUNK_BYTES = 32736
"""Greatest content of one read message toward clients that did not ask for more: with its
envelope such a message stays below 32 KiB, which is what other implementations' readers hold."""

MAX_CHUNK_BYTES = 1 << 20
"""Greatest content of one read message toward clients that ask for more."""


@dataclass(frozen=True, slots=True)
class Call:
    """Metadata of one call, which a front (gRPC, HTTP, in-process) gives to the service.

    Attributes:
        authorization: value of the caller's ``authorization`` metadata or header.
        timeout_s: seconds which the caller is ready to wait; ``None`` for no limit.
        chunk_bytes: greatest content of one read message.
        peer: IP address of the caller; empty if it is unknown.
        proxy_header: header of the process that forwards the call, as JSON; None if none does.
        traceparent: context of the caller's span, if it is sampled; else empty.
    """

    authorization: str | None = None
    timeout_s: float | None = None
    chunk_bytes: int = FOREIGN_CHUNK_BYTES
    peer: str = ""
    proxy_header: str | None = None
    traceparent: str = ""


def call_of(
    metadata: Iterable[tuple[str, str]],
    *,
    timeout_s: float | None,
    chunk_bytes: int,
    peer: str = "",
) -> Call:
    """Return the call that metadata describe.

    Args:
        metadata: names, in lower case, and values.
        timeout_s: seconds which the caller is ready to wait.
        chunk_bytes: greatest content of a read message where the caller does not say.
        peer: IP address of the caller.

    Raises:
        CallError: a size is no number.
    """
    authorization = proxy_header = None
    traceparent = ""
    for key, value in metadata:
        if key == "authorization":
            authorization = value
        elif key == PROXY_HEADER_METADATA:
            proxy_header = value
        elif key == PARENT_KEY:
            traceparent = value if is_sampled(value) else ""
        elif key == CHUNK_BYTES_METADATA:
            if not value.isascii() or not value.isdigit():
                raise CallError(
                    f"metadata {CHUNK_BYTES_METADATA} must be a number of bytes, not {value!r}",
                    code="INVALID_ARGUMENT",
                )
            chunk_bytes = min(max(int(value[:20]), FOREIGN_CHUNK_BYTES), MAX_CHUNK_BYTES)
    return Call(authorization, timeout_s, chunk_bytes, peer, proxy_header, traceparent)


REPEAT_S = 60.0
"""Time in which equal events are one record."""

RECORDS_PER_SECOND_MAX = 50
"""Greatest number of records in one second. Further events are counted."""

TEXT_MAX = 256
"""Greatest length of a text in a record."""


class AuditEvent(NamedTuple):
    """A write, or a call that was refused.

    Attributes:
        method: name of the RPC.
        outcome: status of the call, or the reason of the refusal.
        peer: address of the caller, without its port; empty if it is unknown.
        journal: name of the journal, or names; empty if the call was refused before it was read.
        subject: claim ``sub`` of the token; empty if there is none, or it was not verified.
        token_id: claim ``jti`` of the token, or else the id of the key that signed it.
        is_refusal: True for a refused call.
        shard: id of the shard, or ids.
    """

    method: str
    outcome: str
    peer: str
    journal: str = ""
    subject: str = ""
    token_id: str = ""
    is_refusal: bool = False
    shard: str = ""

    def fields(self, repeated: int) -> dict[str, object]:
        """Return the fields of a record of the event: those that are known, bounded in length.

        Args:
            repeated: number of equal events since the last record; 0 for the first record.
        """
        found: dict[str, object] = {
            name: value[:TEXT_MAX]
            for name, value in self._asdict().items()
            if isinstance(value, str) and value
        }
        if repeated:
            found["repeated"] = repeated
        return found


PutRecord = Callable[[AuditEvent | None, int], None]
"""Takes a record of an audit log: its event and the number of its repetitions. Without an event
that is the number of events which were left out. It neither waits nor fails."""

NoteRefusal = Callable[[str, Call, GazetteError], None]
"""Records a call that a gateway has refused, given the name of the RPC. Calls that reach a service
are recorded by that."""


@dataclass(slots=True)
class _Repeated:
    until_s: float
    count: int = 0


class AuditLog:
    """Log of writes and refusals, rate-limited.

    Args:
        now: the time in seconds, for tests.

    Attributes:
        put: takes each record, too, once it is logged; None for nothing.
    """

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self.put: PutRecord | None = None
        self._now = now
        self._repeated: dict[AuditEvent, _Repeated] = {}  # oldest first
        self._second = 0
        self._records = 0
        self._left_out = 0

    def record(self, event: AuditEvent) -> None:
        """Log an event, or count it."""
        now = self._now()
        self._expire(now)
        known = self._repeated.get(event)
        if known is not None:
            known.count += 1
        elif self._has_room(now):
            self._repeated[event] = _Repeated(now + REPEAT_S)
            self._log(event, 0)
        else:
            self._left_out += 1

    def close(self) -> None:
        """Log what was counted, and not logged yet."""
        self._expire(float("inf"))
        self._log_left_out()

    def _has_room(self, now: float) -> bool:
        if int(now) != self._second:
            self._second, self._records = int(now), 0
            self._log_left_out()
        self._records += 1
        return self._records <= RECORDS_PER_SECOND_MAX

    def _expire(self, now: float) -> None:
        while self._repeated:
            event = next(iter(self._repeated))
            if self._repeated[event].until_s > now:
                return
            count = self._repeated.pop(event).count
            if count:
                self._log(event, count)

    def _log_left_out(self) -> None:
        if self._left_out:
            AUDIT.warning("%d events were left out: there were too many", self._left_out)
            if self.put is not None:
                self.put(None, self._left_out)
            self._left_out = 0

    def _log(self, event: AuditEvent, repeated: int) -> None:
        fields = event.fields(repeated)
        if event.is_refusal:
            AUDIT.warning("%s refused", event.method, extra=fields)
        else:
            AUDIT.info("%s answered", event.method, extra=fields)
        if self.put is not None:
            self.put(event, repeated)


@dataclass(frozen=True, slots=True)
class Authorization:
    """Verifier of callers.

    Attributes:
        authority: verifies tokens, or admits every caller.
        now: Unix time, in seconds.
    """

    authority: Authority | AllowAll
    now: Callable[[], float] = field(default=time.time)

    def verify(self, call: Call, required: Capability) -> Claims:
        """Return the claims of a call.

        Raises:
            UnauthenticatedError: the token is missing or bad, or lacks ``required``.
        """
        return self.authority.verify(call.authorization, required, self.now())

    def remaining_s(self, claims: Claims, call: Call | None = None) -> float | None:
        """Return the seconds until the token or the call expires; ``None`` for no end."""
        ends = []
        if claims.expires_at != float("inf"):
            ends.append(claims.expires_at - self.now())
        if call is not None and call.timeout_s is not None:
            ends.append(call.timeout_s)
        return max(0.0, min(ends)) if ends else None

    @asynccontextmanager
    async def bound(self, claims: Claims, call: Call) -> AsyncIterator[None]:
        """Bound the body of the context by the token's expiry and the call's deadline.

        Raises:
            DeadlineExceededError: one of them is reached.
        """
        remaining_s = self.remaining_s(claims, call)
        if remaining_s is None:
            yield
            return
        try:
            async with asyncio.timeout(remaining_s) as scope:
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            raise DeadlineExceededError(
                "the time of the call, or of its token, is over: call again with a later"
                " deadline, or with a new token"
            ) from None
