r"""Life of a shard in one process, as a table (shard section 5).

::

    IDLE -> BACKFILL -> STANDBY -> TAKING_OVER -> OPENING -> PRIMARY
                \__________________/

Every state before STOPPED can fail, and every state can stop. A failed shard stays failed until
its assignment is removed: recovering it at once, at the same place, would most likely fail again.
The table does nothing itself: its owner performs the effects.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

__all__ = ["Effect", "Input", "Lifecycle", "State", "Transition", "transition"]


class State(Enum):
    """State of a shard in this process."""

    IDLE = auto()
    """Made, and not started."""
    BACKFILL = auto()
    """The log is played, and its write head is not reached yet."""
    STANDBY = auto()
    """The log is played as it grows; or there is no log."""
    TAKING_OVER = auto()
    """Primary: the fence is written to the log, and playback completes."""
    OPENING = auto()
    """Primary: the store is opened and its checkpoint restored."""
    PRIMARY = auto()
    """Primary: transactions run."""
    FAILED = auto()
    """An error ended it. A store that was ready stays readable."""
    STOPPED = auto()
    """Cancelled: the assignment was removed, or the process ends."""


class Input(Enum):
    """Event of a shard's life."""

    STARTED = auto()
    """The shard was assigned, and has a recovery log."""
    STARTED_WITHOUT_LOG = auto()
    """The shard was assigned, and has no recovery log."""
    TAILING = auto()
    """Playback has reached the write head for the first time."""
    PROMOTED = auto()
    """This process has slot 0."""
    RECOVERED = auto()
    """Playback has completed behind our fence; or there is no log to play."""
    RESTORED = auto()
    """The store is open, and its checkpoint was restored."""
    INPUT_ENDED = auto()
    """The sources ended, or a transaction was aborted: begin at the checkpoint again."""
    ERROR = auto()
    """Playback, the store or a transaction raised."""
    CANCELLED = auto()
    """The assignment was removed or made anew, or the process ends."""


class Effect(Enum):
    """Action of a shard's owner on a transition."""

    NONE = auto()
    PLAY = auto()
    """Report BACKFILL, load hints, play the log."""
    REPORT_STANDBY = auto()
    """Report STANDBY."""
    TAKE_OVER = auto()
    """Draw an author and hand the log off to it; without a log, RECOVERED follows at once."""
    OPEN_STORE = auto()
    """Open the store and restore its checkpoint."""
    SERVE = auto()
    """Store recovered hints, send stored intents, report PRIMARY, run transactions."""
    RESTORE = auto()
    """Restore the checkpoint again, and go on from it."""
    REPORT_FAILURE = auto()
    """Report FAILED with the error's text; end both tasks, keep a store that was ready."""
    SHUT_DOWN = auto()
    """Cancel all tasks, wait for them and for open resolutions, destroy the store."""


class Transition(NamedTuple):
    """Result of an input."""

    effect: Effect
    state: State


_TABLE: dict[tuple[State, Input], Transition] = {
    (State.IDLE, Input.STARTED): Transition(Effect.PLAY, State.BACKFILL),
    (State.IDLE, Input.STARTED_WITHOUT_LOG): Transition(Effect.REPORT_STANDBY, State.STANDBY),
    (State.BACKFILL, Input.TAILING): Transition(Effect.REPORT_STANDBY, State.STANDBY),
    # A hand-off does not wait for the write head: playback itself orders the fence behind it.
    (State.BACKFILL, Input.PROMOTED): Transition(Effect.TAKE_OVER, State.TAKING_OVER),
    (State.STANDBY, Input.PROMOTED): Transition(Effect.TAKE_OVER, State.TAKING_OVER),
    # A late report would take nothing back, because codes in Etcd never go down.
    (State.TAKING_OVER, Input.TAILING): Transition(Effect.NONE, State.TAKING_OVER),
    (State.TAKING_OVER, Input.RECOVERED): Transition(Effect.OPEN_STORE, State.OPENING),
    (State.OPENING, Input.RESTORED): Transition(Effect.SERVE, State.PRIMARY),
    (State.PRIMARY, Input.INPUT_ENDED): Transition(Effect.RESTORE, State.PRIMARY),
}
_ENDED = frozenset({State.FAILED, State.STOPPED})


def transition(state: State, event: Input) -> Transition:
    """Return the effect of an input, and the state behind it.

    Raises:
        ValueError: the input cannot happen in this state.
    """
    if event is Input.CANCELLED:
        if state is State.STOPPED:
            return Transition(Effect.NONE, State.STOPPED)
        return Transition(Effect.SHUT_DOWN, State.STOPPED)
    if state in _ENDED:
        return Transition(Effect.NONE, state)  # tasks that are ending may report what they did
    if event is Input.ERROR:
        return Transition(Effect.REPORT_FAILURE, State.FAILED)
    found = _TABLE.get((state, event))
    if found is None:
        raise ValueError(f"a shard in state {state.name} cannot have the input {event.name}")
    return found


class Lifecycle:
    """State of one shard.

    Attributes:
        state: the state.
    """

    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state = State.IDLE

    def advance(self, event: Input) -> Effect:
        """Take an input, and return the effect to perform.

        Raises:
            ValueError: the input cannot happen in this state.
        """
        effect, self.state = transition(self.state, event)
        return effect

    @property
    def is_ended(self) -> bool:
        """True if the shard failed or was stopped."""
        return self.state in _ENDED
