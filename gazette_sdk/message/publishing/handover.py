"""Who appends what waits in an outbox: a pure machine.

Messages of a journal are appended by one at a time, so that they keep their order. Mostly that
is a task on the event loop. A caller who waits for each message is faster without it: for such
a one a message is *held* until the caller asks for its receipt, and then appends it itself; but
for some milliseconds at most, the more the longer that has been the caller's habit. Whoever has
the right keeps it until nothing waits, or hands it on, with what it did not get done.

=============  ==============================================================================
input          what happened
=============  ==============================================================================
ADDED          a message was added
ADDED_TO_HOLD  a message was added by a caller who will likely wait for it at once
CLAIMED        a caller asks for the receipt of a message that is held
CALLED_IN      nobody claims what is held, or somebody waits for it who cannot append it
EMPTIED        whoever appends is done, and nothing waits
LEFT           a caller is done, and something was added meanwhile
FAILED         a caller could not append what it took, or not in its time
=============  ==============================================================================
"""

from __future__ import annotations

import enum

__all__ = ["TABLE", "Effect", "Habit", "Holder", "Input"]


class Holder(enum.IntEnum):
    """Who has the right to append."""

    NOBODY = 0
    """Nothing waits."""
    HELD = 1
    """A message waits for its caller to claim it, or the event loop to call it in."""
    LOOP = 2
    """A task on the event loop; or it was asked for."""
    CALLER = 3
    """A thread that waits for a receipt."""


class Input(enum.IntEnum):
    """What happens."""

    ADDED = 0
    ADDED_TO_HOLD = 1
    CLAIMED = 2
    CALLED_IN = 3
    EMPTIED = 4
    LEFT = 5
    FAILED = 6


class Effect(enum.IntEnum):
    """What is to be done."""

    NOTHING = 0
    WAKE = 1
    """Ask for the task on the event loop."""
    HOLD = 2
    """See to it that the event loop looks after it in time."""
    APPEND = 3
    """The caller takes what waits, and appends it."""
    IMPOSSIBLE = 4
    """A mistake of ours."""


_H, _I, _E = Holder, Input, Effect

_RULES: dict[tuple[Holder, Input], tuple[Effect, Holder]] = {
    (_H.NOBODY, _I.ADDED): (_E.WAKE, _H.LOOP),
    (_H.NOBODY, _I.ADDED_TO_HOLD): (_E.HOLD, _H.HELD),
    (_H.NOBODY, _I.CLAIMED): (_E.NOTHING, _H.NOBODY),  # it is acknowledged already
    (_H.NOBODY, _I.CALLED_IN): (_E.NOTHING, _H.NOBODY),
    # A second message before the first is claimed: its caller does not wait for each, after all.
    (_H.HELD, _I.ADDED): (_E.WAKE, _H.LOOP),
    (_H.HELD, _I.ADDED_TO_HOLD): (_E.WAKE, _H.LOOP),
    (_H.HELD, _I.CLAIMED): (_E.APPEND, _H.CALLER),
    (_H.HELD, _I.CALLED_IN): (_E.WAKE, _H.LOOP),
    (_H.LOOP, _I.ADDED): (_E.NOTHING, _H.LOOP),
    (_H.LOOP, _I.ADDED_TO_HOLD): (_E.NOTHING, _H.LOOP),
    (_H.LOOP, _I.CLAIMED): (_E.NOTHING, _H.LOOP),
    (_H.LOOP, _I.CALLED_IN): (_E.NOTHING, _H.LOOP),
    (_H.LOOP, _I.EMPTIED): (_E.NOTHING, _H.NOBODY),
    (_H.CALLER, _I.ADDED): (_E.NOTHING, _H.CALLER),
    (_H.CALLER, _I.ADDED_TO_HOLD): (_E.NOTHING, _H.CALLER),
    (_H.CALLER, _I.CLAIMED): (_E.NOTHING, _H.CALLER),
    (_H.CALLER, _I.CALLED_IN): (_E.NOTHING, _H.CALLER),
    (_H.CALLER, _I.EMPTIED): (_E.NOTHING, _H.NOBODY),
    (_H.CALLER, _I.LEFT): (_E.WAKE, _H.LOOP),
    (_H.CALLER, _I.FAILED): (_E.WAKE, _H.LOOP),
}

TABLE = tuple(
    tuple(_RULES.get((holder, each), (_E.IMPOSSIBLE, holder)) for each in Input)
    for holder in Holder
)
"""``TABLE[holder][input]`` is what is to be done, and who has the right after it."""


class Habit:
    """Whether the messages of an outbox are each waited for before the next is published. Pure.

    Attributes:
        is_formed: so it has been lately.
        trust: how many times longer than at first a message may be held for its caller.
    """

    FORMED_COUNT = 3
    """So many in a row make it a habit."""

    COUNT_MAX = 8
    """More say no more: when it ends, that should be noticed."""

    TRUST_MAX = 12
    """When it ends, one message is late by that."""

    __slots__ = ("_count", "is_formed", "trust")

    def __init__(self) -> None:
        self.is_formed = False
        self.trust = 1
        self._count = 0

    def kept(self) -> None:
        """A message was waited for at once, and alone."""
        if self._count < self.COUNT_MAX:
            self._count += 1
            self.is_formed = self._count >= self.FORMED_COUNT

    def strained(self) -> None:
        """It was waited for, but only after a while. Twice is once too often."""
        self._count //= 2
        self.is_formed = self._count >= self.FORMED_COUNT
        self.trust = 1

    def broken(self) -> None:
        """It was not waited for, or not alone."""
        self._count = 0
        self.is_formed = False
        self.trust = 1

    def lasts(self) -> None:
        """Whoever looks after what is held found that it was kept."""
        if self.is_formed:
            self.trust = min(2 * self.trust, self.TRUST_MAX)
