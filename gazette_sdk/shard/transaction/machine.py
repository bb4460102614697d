"""Machine of a shard's transactions: when to consume, to wait and to commit. Pure.

One transaction is open while the one before it, the *prior*, commits and is acknowledged. The first
condition that holds decides:

==  =================================================================  ============================
#   condition                                                          decision
==  =================================================================  ============================
1   a failure was reported                                             FAIL; ABORT once prior is
                                                                       NONE, and WAIT before
2   input is available or a timer is due, not CLOSED, EMPTY or         CONSUME
    now < began + max, and the store overlaps commits or prior is
    not COMMITTING
3   the input has ended, EMPTY, prior NONE                             END
4   prior is not NONE                                                  WAIT for prior, input, max
5   EMPTY                                                              WAIT for input; IDLE
6   now < began + min                                                  WAIT for min, input
7   OPEN, waits for acknowledgements, a sequence is pending            WAIT for input, max
8   else                                                               START_COMMIT
==  =================================================================  ============================

Input, and the next timer's time, are waited for only where they would be consumed. A transaction
whose time is over, or whose input has ended, is CLOSED. The least time of a transaction may exceed
its greatest; it then runs for the least time (shard section 7).
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass


class CommitStep(enum.Enum):
    """Step of a commit that has just been done."""

    CONSUMED = "its messages were consumed; `finalize` was not called"
    FINALIZED = "`finalize` has returned"
    CHECKPOINTED = "checkpoint and acknowledgements are built"
    LOCALLY_COMMITTED = "the store's files hold state and checkpoint"
    LOG_SENT = "the append to the recovery log, and the acknowledgements after it, are queued"
    COMMITTED = "state and checkpoint are durable"
    FIRST_ACK = "the first acknowledgement is appended"
    ACKNOWLEDGED = "all acknowledgements are appended"


SLICE_S = 0.02
"""Time for which messages are consumed at a stretch, in seconds."""


class Current(enum.Enum):
    """State of the transaction that consumes."""

    EMPTY = "nothing was consumed"
    OPEN = "it consumes"
    CLOSED = "it consumes nothing more"


class Prior(enum.Enum):
    """State of the transaction before it."""

    NONE = "there is none, or it is acknowledged"
    COMMITTING = "its commit has started"
    ACKNOWLEDGING = "it is committed; its acknowledgements are not all appended"


class Action(enum.Enum):
    """Next action of the caller."""

    CONSUME = "consume until a time"
    WAIT = "wait for what the decision names"
    START_COMMIT = "start to commit the current transaction"
    ABORT = "roll the current transaction back, and restore the checkpoint"
    END = "restore the checkpoint, and read on from there"
    FAIL = "end with the failure"


@dataclass(frozen=True, slots=True)
class Decision:
    """Decision of the machine.

    Attributes:
        action: what to do next.
        until: end of consuming or waiting, in monotonic seconds; None for a wait without end.
        waits_for_prior: the wait ends when the prior transaction proceeds.
        waits_for_input: the wait ends when input arrives.
        is_idle: no transaction is open or prior: offsets that were passed may be published.
    """

    action: Action
    until: float | None = None
    waits_for_prior: bool = False
    waits_for_input: bool = False
    is_idle: bool = False


class TransactionMachine:
    """State of a shard's current and prior transaction.

    Args:
        min_s: least duration of a transaction, in seconds.
        max_s: duration after which it consumes nothing more, in seconds.
        waits_for_acks: keep a transaction open while sequences that it read are pending.
        overlaps_commit: consume while the prior transaction commits.

    Attributes:
        current: state of the transaction that consumes.
        prior: state of the transaction before it.
        began: time of its first message, in monotonic seconds; of no meaning while EMPTY.
        available: input has arrived that was not consumed.
        timer_at: when the next timer is due, in monotonic seconds; infinity for none. While a
            transaction is open, only if it has timers to fire.
        has_pending: a sequence was read whose acknowledgement was not.
        ended: the input has ended, and all of it was consumed.
        failure: the failure that was reported.
    """

    __slots__ = (
        "_aborts",
        "_limits",
        "_max_s",
        "_min_s",
        "_overlaps_commit",
        "_waits_for_acks",
        "available",
        "began",
        "current",
        "ended",
        "failure",
        "has_pending",
        "prior",
        "timer_at",
    )

    def __init__(
        self, *, min_s: float, max_s: float, waits_for_acks: bool, overlaps_commit: bool
    ) -> None:
        self._limits = self._min_s, self._max_s, self._waits_for_acks = (
            min_s,
            max_s,
            waits_for_acks,
        )
        self._overlaps_commit = overlaps_commit
        self._aborts = False
        self.current = Current.EMPTY
        self.prior = Prior.NONE
        self.began = 0.0
        self.available = False
        self.timer_at = math.inf
        self.has_pending = False
        self.ended = False
        self.failure: BaseException | None = None

    # ---------------------------------------------------------------- decision

    def decide(self, now: float) -> Decision:
        """Return what to do next.

        Args:
            now: monotonic seconds; never less than before.
        """
        if self.failure is not None:
            return self._after_failure()
        if self.current is Current.OPEN and (
            now >= self.max_at or (self.ended and not self.available)
        ):
            self.close()
        if (self.available or self.timer_at <= now) and self._may_consume():
            return Decision(Action.CONSUME, self._until(now))
        if self.ended and self.current is Current.EMPTY and self.prior is Prior.NONE:
            return Decision(Action.END)
        return self._wait_to_commit(now) or Decision(Action.START_COMMIT)

    def _wait_to_commit(self, now: float) -> Decision | None:
        """Return what is waited for before the current transaction commits; None for nothing."""
        if self.prior is not Prior.NONE:
            until = self.max_at if self.current is Current.OPEN else None
            return self._wait(until, waits_for_prior=True)
        if self.current is Current.EMPTY:
            return self._wait(None, is_idle=True)
        min_at = self.began + self._min_s
        if now < min_at:
            return self._wait(min_at)
        if self._waits_for_acks and self.current is Current.OPEN and self.has_pending:
            return self._wait(self.max_at)
        return None

    def _after_failure(self) -> Decision:
        if not self._aborts:
            return Decision(Action.FAIL)
        if self.prior is not Prior.NONE:
            return Decision(Action.WAIT, waits_for_prior=True)
        return Decision(Action.ABORT)

    def _may_consume(self) -> bool:
        """Return True if input and timers would be consumed, as of the last `decide`."""
        overlaps = self._overlaps_commit or self.prior is not Prior.COMMITTING
        return self.current is not Current.CLOSED and overlaps

    def _until(self, now: float) -> float:
        return now + SLICE_S if self.current is Current.EMPTY else min(now + SLICE_S, self.max_at)

    @property
    def max_at(self) -> float:
        """Time after which the current transaction consumes nothing more, in monotonic seconds."""
        return self.began + self._max_s

    def _wait(
        self, until: float | None, *, waits_for_prior: bool = False, is_idle: bool = False
    ) -> Decision:
        may_consume = self._may_consume()
        if may_consume and self.timer_at < math.inf:
            until = self.timer_at if until is None else min(until, self.timer_at)
        waits_for_input = not self.ended and not self.available and may_consume
        return Decision(Action.WAIT, until, waits_for_prior, waits_for_input, is_idle)

    # ------------------------------------------------------------------ inputs

    def change_limits(self, *, min_s: float, max_s: float, waits_for_acks: bool) -> None:
        """Change limits from the next transaction on. Any thread. See the class for them."""
        self._limits = min_s, max_s, waits_for_acks

    def consumed(self, now: float) -> None:
        """Note the first message or timer of a transaction, which is about to be consumed.

        Args:
            now: monotonic seconds, after the hook ``begin``.
        """
        assert self.current is Current.EMPTY, "a transaction begins once"
        assert self.failure is None, "nothing is consumed after a failure"
        assert self._overlaps_commit or self.prior is not Prior.COMMITTING, "the store overlaps not"
        self.current = Current.OPEN
        self.began = now
        self._min_s, self._max_s, self._waits_for_acks = self._limits

    def close(self) -> None:
        """Consume nothing more: the store is full, a message was deferred, or the time is over."""
        assert self.current is not Current.EMPTY, "an empty transaction is not closed"
        self.current = Current.CLOSED

    def commit_started(self) -> None:
        """Note that the current transaction commits: the next one begins."""
        assert self.current is not Current.EMPTY, "an empty transaction does not commit"
        assert self.prior is Prior.NONE, "one transaction commits at a time"
        assert self.failure is None, "nothing commits after a failure"
        self.prior = Prior.COMMITTING
        self.current = Current.EMPTY

    def abandoned(self) -> None:
        """Note that the current transaction has ended, and does not commit."""
        self.current = Current.EMPTY

    def committed(self) -> None:
        """Note that the prior transaction is committed."""
        assert self.prior is Prior.COMMITTING, "a transaction is committed once"
        self.prior = Prior.ACKNOWLEDGING

    def recovered(self) -> None:
        """Note that acknowledgements of an earlier run are being appended again."""
        assert self.prior is Prior.NONE, "acknowledgements are recovered first"
        assert self.current is Current.EMPTY, "acknowledgements are recovered first"
        self.prior = Prior.ACKNOWLEDGING

    def acknowledged(self) -> None:
        """Note that all acknowledgements of the prior transaction are appended."""
        assert self.prior is Prior.ACKNOWLEDGING, "a transaction is acknowledged once committed"
        self.prior = Prior.NONE

    def failed(self, error: BaseException, *, aborts: bool = False) -> None:
        """Report a failure. One that ends the shard takes the place of one that aborts.

        Args:
            error: the failure.
            aborts: the current transaction is run again, instead of ending the shard.
        """
        if self.failure is None or (self._aborts and not aborts):
            self.failure = error
            self._aborts = aborts

    def restarted(self) -> None:
        """Note that the checkpoint was restored: nothing is open, and the input is a new one."""
        assert self.prior is Prior.NONE, "a prior transaction is waited for"
        assert self.failure is None or self._aborts, "a failed shard does not go on"
        self.current = Current.EMPTY
        self.failure = None
        self._aborts = False
        self.available = self.has_pending = self.ended = False
        self.timer_at = math.inf
