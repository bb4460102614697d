"""Who appends what waits in an outbox: a pure machine.

Messages of a journal are appended by one at a time, so that they keep their order. Mostly that
is a task on the event loop. Where messages come one by one, the very thread that publishes one is
quicker: it sends the append itself, and goes its way. The append is *away* then, until somebody
looks for its answer: whoever waits for the receipt, or whoever publishes next; and the event loop
if nobody does so within some milliseconds, the more the longer others have done so. Whoever has
the right to append keeps it until nothing waits, or hands it on, with what was not done.

=============  ==============================================================================
input          what happened
=============  ==============================================================================
ADDED          a message was added
ADDED_TO_SEND  a message was added by a caller who may send it
CLAIMED        a caller waits for the receipt of a message that is away
CALLED_IN      nobody looks for the answer, or somebody waits for it who cannot
SENT           a caller sent what it took, and nothing else waits
EMPTIED        whoever appends is done, and nothing waits
HANDED_ON      a caller leaves what it took to the event loop, or what was added meanwhile
=============  ==============================================================================
"""

from __future__ import annotations

import enum

__all__ = ["TABLE", "Effect", "Habit", "Holder", "Input"]


class Holder(enum.IntEnum):
    """Who has the right to append."""

    NOBODY = 0
    """Nothing waits."""
    AWAY = 1
    """An append was sent, and its answer waits for somebody to look for it."""
    LOOP = 2
    """A task on the event loop; or it was asked for."""
    CALLER = 3
    """A thread that sends a message, or looks for an answer."""


class Input(enum.IntEnum):
    """What happens."""

    ADDED = 0
    ADDED_TO_SEND = 1
    CLAIMED = 2
    CALLED_IN = 3
    SENT = 4
    EMPTIED = 5
    HANDED_ON = 6


class Effect(enum.IntEnum):
    """What is to be done."""

    NOTHING = 0
    WAKE = 1
    """Ask for the task on the event loop."""
    SEND = 2
    """The caller takes what waits, and sends it."""
    RECEIVE = 3
    """The caller looks for the answer of what is away, before it does anything else."""
    IMPOSSIBLE = 4
    """A mistake of ours."""


_H, _I, _E = Holder, Input, Effect

_RULES: dict[tuple[Holder, Input], tuple[Effect, Holder]] = {
    (_H.NOBODY, _I.ADDED): (_E.WAKE, _H.LOOP),
    (_H.NOBODY, _I.ADDED_TO_SEND): (_E.SEND, _H.CALLER),
    (_H.NOBODY, _I.CLAIMED): (_E.NOTHING, _H.NOBODY),  # it is acknowledged already
    (_H.NOBODY, _I.CALLED_IN): (_E.NOTHING, _H.NOBODY),
    (_H.AWAY, _I.ADDED): (_E.WAKE, _H.LOOP),
    (_H.AWAY, _I.ADDED_TO_SEND): (_E.RECEIVE, _H.CALLER),
    (_H.AWAY, _I.CLAIMED): (_E.RECEIVE, _H.CALLER),
    (_H.AWAY, _I.CALLED_IN): (_E.WAKE, _H.LOOP),
    (_H.LOOP, _I.ADDED): (_E.NOTHING, _H.LOOP),
    (_H.LOOP, _I.ADDED_TO_SEND): (_E.NOTHING, _H.LOOP),
    (_H.LOOP, _I.CLAIMED): (_E.NOTHING, _H.LOOP),
    (_H.LOOP, _I.CALLED_IN): (_E.NOTHING, _H.LOOP),
    (_H.LOOP, _I.EMPTIED): (_E.NOTHING, _H.NOBODY),
    (_H.CALLER, _I.ADDED): (_E.NOTHING, _H.CALLER),
    (_H.CALLER, _I.ADDED_TO_SEND): (_E.NOTHING, _H.CALLER),
    (_H.CALLER, _I.CLAIMED): (_E.NOTHING, _H.CALLER),
    (_H.CALLER, _I.CALLED_IN): (_E.NOTHING, _H.CALLER),
    (_H.CALLER, _I.SENT): (_E.NOTHING, _H.AWAY),
    (_H.CALLER, _I.EMPTIED): (_E.NOTHING, _H.NOBODY),
    (_H.CALLER, _I.HANDED_ON): (_E.WAKE, _H.LOOP),
}

TABLE = tuple(
    tuple(_RULES.get((holder, each), (_E.IMPOSSIBLE, holder)) for each in Input)
    for holder in Holder
)
"""``TABLE[holder][input]`` is what is to be done, and who has the right after it."""


class Habit:
    """Whether messages come to an outbox one by one, each when the one before has ended. Pure.

    Attributes:
        is_formed: so it has been lately.
        trust: how many times longer than at first an answer may wait for somebody to look for it.
    """

    FORMED_COUNT = 3
    """So many in a row make it a habit."""

    COUNT_MAX = 8
    """More say no more: when it ends, that should be noticed."""

    TRUST_MAX = 12
    """When it ends, one answer is seen late by that."""

    __slots__ = ("_count", "is_formed", "trust")

    def __init__(self) -> None:
        self.is_formed = False
        self.trust = 1
        self._count = 0

    def kept(self) -> None:
        """A message was appended alone, and nothing came before it was acknowledged."""
        if self._count < self.COUNT_MAX:
            self._count += 1
            self.is_formed = self._count >= self.FORMED_COUNT

    def strained(self) -> None:
        """The next one came before it was. Twice is once too often."""
        self._count //= 2
        self.is_formed = self._count >= self.FORMED_COUNT
        self.trust = 1

    def broken(self) -> None:
        """Several came together, or a caller's append failed."""
        self._count = 0
        self.is_formed = False
        self.trust = 1

    def lasts(self) -> None:
        """Whoever looks after what is away found that somebody else did."""
        if self.is_formed:
            self.trust = min(2 * self.trust, self.TRUST_MAX)

    def slackened(self) -> None:
        """Nobody else did, for once."""
        self.trust = 1
