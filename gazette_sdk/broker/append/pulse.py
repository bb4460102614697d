"""Pulses: empty appends which a broker makes to its own journals (broker section 9).

A pulse establishes consistency without any client, finds half-dead peers, closes a journal's
first fragment, honours flush intervals; and suspends idle journals where that is wished.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from gazette_sdk.broker.replica import Replica
from gazette_sdk.broker.replication.pipeline import Signal
from gazette_sdk.broker.resolver import StoppingError
from gazette_sdk.errors import GazetteError, for_status
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Capability, Claims
from gazette_sdk.protocol.labels import journal_selector
from gazette_sdk.retries import Waits
from gazette_sdk.transport.wire import AppendItem

PULSE_PERIOD_S = 60.0
"""Time between pulses of a journal, give or take a tenth: so that journals do not pulse at once."""

PULSE_RETRY_S = 0.5
"""Time from a pulse that failed to the next one; it doubles with each further failure."""

PULSE_RETRY_MAX_S = 8.0
"""Bound of this time: the allocator waits for it, and with it a broker that is to leave."""

PULSE_TIMEOUT_S = 60.0
"""Bound of one pulse."""

SUSPEND_AFTER_PULSES = 15
"""Undisturbed pulses in a row after which an idle journal is suspended, where that is wished."""

AppendCall: TypeAlias = Callable[
    [pb.AppendRequest, AsyncIterator[AppendItem], Claims], Awaitable[pb.AppendResponse]
]

_EXPECTED = frozenset(
    {
        pb.OK,
        pb.JOURNAL_NOT_FOUND,
        pb.NO_JOURNAL_PRIMARY_BROKER,
        pb.NOT_JOURNAL_PRIMARY_BROKER,
        pb.SUSPENDED,
    }
)
"""Outcomes that are part of a journal's normal life."""

_FAILED = "a pulse of %s failed: %s"

_log = logging.getLogger(__name__)


def pulse_mode(undisturbed: int, *, auto_suspend: bool) -> int:
    """Return the ``AppendRequest.Suspend`` of a pulse, given the undisturbed ones before."""
    if auto_suspend and undisturbed >= SUSPEND_AFTER_PULSES:
        return pb.AppendRequest.SUSPEND_IF_FLUSHED
    return pb.AppendRequest.SUSPEND_NO_RESUME


@dataclass(frozen=True, slots=True)
class Pulses:
    """Maker of the pulses of a broker's replicas.

    Attributes:
        append: appends to a journal.
        auto_suspend: True if idle journals are suspended.
        waits: waits of many journals.
        is_at_rest: returns True if a pulse of a mode would do nothing: then none is made.
        jitter: a random number of [0, 1).
    """

    append: AppendCall
    auto_suspend: bool
    waits: Waits = field(default_factory=Waits)
    is_at_rest: Callable[[Replica, int], bool] = field(default=lambda *_: False)
    jitter: Callable[[], float] = field(default=random.random)

    async def run(self, replica: Replica) -> None:
        """Pulse at once, at each change of the journal's assignments, and every minute.

        A pulse that failed is tried again soon: no one else may synchronize the replicas. Another
        one follows a pipeline that ended before it could tell the others what all of them have.
        """
        undisturbed = failures = 0

        def rest_s() -> float:
            """Return the time for which a journal needs no pulse; 0 if it needs one now."""
            nonlocal undisturbed
            mode = pulse_mode(undisturbed + 1, auto_suspend=self.auto_suspend)
            if failures or replica.pulse_wanted:
                return 0.0
            if replica.is_primary and not self.is_at_rest(replica, mode):
                return 0.0
            undisturbed += 1
            return self._period_s()

        # A signal which fired and was not replaced is the last one: the replica shuts down.
        while not (signal := replica.signal).fired:
            period_s = self._period_s()
            replica.pulse_wanted = False
            if replica.is_primary:
                mode = pulse_mode(undisturbed, auto_suspend=self.auto_suspend)
                is_settled = undisturbed > 0
                if self.is_at_rest(replica, mode) or await self._pulse(
                    replica.journal, mode, is_settled=is_settled
                ):
                    failures = 0
                else:
                    failures += 1
                    period_s = min(PULSE_RETRY_MAX_S, PULSE_RETRY_S * 2.0 ** min(failures - 1, 10))
            if replica.pulse_wanted and not failures:
                undisturbed = 0  # a pipeline ended meanwhile
            else:
                is_woken = await _is_woken(replica, signal, period_s, self.waits, rest_s)
                undisturbed = 0 if is_woken else undisturbed + 1

    def _period_s(self) -> float:
        return PULSE_PERIOD_S * (0.9 + 0.2 * self.jitter())

    async def _pulse(self, journal: str, mode: int, *, is_settled: bool) -> bool:
        """Make one pulse. Return False if it failed without a response.

        Too few replicas are worth a warning only of a journal whose assignments are settled: each
        new journal gets its replicas one by one.
        """
        request = pb.AppendRequest(
            journal=journal,
            do_not_proxy=True,
            suspend=mode,  # type: ignore[arg-type]  # an int is what its enums are
        )
        claims = Claims(int(Capability.APPEND), journal_selector(journal), math.inf)
        try:
            async with asyncio.timeout(PULSE_TIMEOUT_S):
                response = await self.append(request, _nothing(), claims)
        except StoppingError:
            return True
        except TimeoutError:
            _log.warning(_FAILED, journal, f"it did not end within {PULSE_TIMEOUT_S:g} s")
            return False
        except GazetteError as error:
            _log.warning(_FAILED, journal, str(error).removeprefix(f"{journal}: "))
            return False
        if response.status not in _EXPECTED:
            reason = str(for_status(response.status, response.store_health_error))
            if response.status == pb.INSUFFICIENT_JOURNAL_BROKERS and not is_settled:
                _log.debug(_FAILED, journal, reason)
            else:
                _log.warning(_FAILED, journal, reason)
        return True


async def _nothing() -> AsyncIterator[AppendItem]:
    """Yield the messages of an append without content."""
    yield pb.AppendRequest()


async def _is_woken(
    replica: Replica, signal: Signal, timeout_s: float, waits: Waits, rest_s: Callable[[], float]
) -> bool:
    """Wait until the replica wants a pulse, or its signal fires. Return False after the timeout.

    It costs no task and no timer, as there is one wait per journal. While ``rest_s`` returns a time
    at the end of the timeout, it waits for that, too.
    """
    woken: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def wake() -> None:
        if not woken.done():
            woken.set_result(True)

    ending = waits.add(woken, timeout_s, rest_s)
    handle = signal.on_fire(wake)
    replica.wake_pulse = wake
    try:
        return await woken
    finally:
        ending.discard()
        signal.forget(handle)
        replica.wake_pulse = None
