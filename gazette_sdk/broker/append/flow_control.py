"""Greatest and least rate of appends to one journal (broker section 8).

Pure integer arithmetic over milliseconds: the caller reports chunks and ticks, and gets a verdict.
The state belongs to the replica, so that the next append can use the credit left by the last.
"""

from __future__ import annotations

import enum
from typing import Final

TICK_MS: Final = 50
"""Milliseconds between ticks while content streams."""

_MS: Final = 1000
_BALANCE_CAP_S: Final = 10


class Credit(enum.Enum):
    """Credit for a chunk, or at a tick."""

    GO = enum.auto()
    """There is credit for the current chunk, or no chunk."""
    HOLD = enum.auto()
    """The current chunk has to wait for credit."""
    UNDERFLOW = enum.auto()
    """The client sends less than the minimum rate: abort its append."""


class FlowControl:
    """Flow control of one journal's appends.

    Args:
        min_rate: bytes per second which a client must send at least; 0 for no minimum.
        global_max_rate: bound of the process on every journal's rate; 0 for none.

    Attributes:
        max_rate: bytes per second which the current append may send; 0 for no bound.
        balance: credit, in bytes.
        spent: bytes the client is ahead of the minimum rate.
        charge: bytes of the current chunk for which there is no credit yet.
        total_chunks: chunks of this append.
        delayed_chunks: chunks of this append which had to wait.
    """

    def __init__(self, *, min_rate: int, global_max_rate: int = 0) -> None:
        self.min_rate = min_rate
        self._global_max_rate = global_max_rate
        self.max_rate = 0
        self.balance = 0
        self.spent = 0
        self.charge = 0
        self.total_chunks = 0
        self.delayed_chunks = 0
        self._last_ms: int | None = None
        self._is_used = False

    def reset(self, max_append_rate: int, now_ms: int) -> None:
        """Begin an append.

        Args:
            max_append_rate: the journal's, in bytes per second; 0 for no bound, in which case the
                process's bound does not count either.
            now_ms: of any clock that does not go back, in milliseconds.
        """
        self.max_rate = max_append_rate
        if 0 < self._global_max_rate < max_append_rate:
            self.max_rate = self._global_max_rate
        self.spent = self.min_rate
        self.charge = self.total_chunks = self.delayed_chunks = 0
        if self._is_used:
            self._accrue(now_ms)  # credit of the pause between appends; it costs no spent
        else:
            # Appends of no bytes, such as pulses, are no use: a new journal saves up nothing.
            self.balance = self.max_rate
            self._last_ms = now_ms

    def chunk(self, length_bytes: int, messages: int = 1) -> Credit:
        """Account for a chunk. No other may follow before there is credit for it.

        Args:
            length_bytes: of its content.
            messages: as how many it counts: empty ones may be charged with one that is not.

        Returns:
            GO, or HOLD: ask :meth:`tick` until it says GO.
        """
        assert self.charge == 0, "the chunk before is held"
        self._is_used = self._is_used or length_bytes > 0
        self.total_chunks += messages
        if not self.max_rate and not self.balance:
            self.spent = min(self.spent + length_bytes, self.min_rate)
            return Credit.GO
        self.charge = length_bytes
        self._debit()
        if self.charge:
            self.delayed_chunks += 1
            return Credit.HOLD
        return Credit.GO

    def tick(self, now_ms: int) -> Credit:
        """Account for the time since the last tick.

        Credit accrues before the minimum rate is checked: a late tick does not end an append
        which was itself held back.
        """
        elapsed_ms = self._accrue(now_ms)
        if elapsed_ms < 0:
            return Credit.HOLD if self.charge else Credit.GO
        if self.min_rate:
            self.spent = max(0, self.spent - self.min_rate * elapsed_ms // _MS)
        self._debit()
        if self.min_rate and self.spent <= 0:
            return Credit.UNDERFLOW
        return Credit.HOLD if self.charge else Credit.GO

    def excuse(self, now_ms: int) -> None:
        """Account for time in which the client waited for us. The minimum rate ignores it."""
        self._accrue(now_ms)
        self._debit()

    def invalidate(self) -> None:
        """Lift the maximum rate for the rest of this append: its route has changed."""
        self.max_rate = 0
        self._debit()

    def _accrue(self, now_ms: int) -> int:
        """Add credit since the last tick. Returns the milliseconds since, negative for none."""
        assert self._last_ms is not None, "ticks come between reset and the append's end"
        elapsed_ms = now_ms - self._last_ms
        if elapsed_ms < 0:
            return elapsed_ms
        self._last_ms = now_ms
        if self.max_rate:
            self.balance = min(
                self.balance + self.max_rate * elapsed_ms // _MS, self.max_rate * _BALANCE_CAP_S
            )
        return elapsed_ms

    def _debit(self) -> None:
        credit = min(self.balance, self.charge)
        paid = credit if self.max_rate else self.charge
        self.balance -= credit
        self.charge -= paid
        self.spent = min(self.spent + paid, self.min_rate)
