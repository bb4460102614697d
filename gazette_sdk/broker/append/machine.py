"""The append state machine, as tables (broker section 5).

Two small machines cover everything that can happen to an append:

* :data:`APPEND`: from its resolution to its end. The driver (`append`) performs the action of the
  current state, reports the result as one :class:`Input`, performs the effects of the table's
  entry, and goes to the next state.
* :data:`CONTENT`: the effect of each event of the client's stream while content is streamed.

The machines are pure, so that every pair of state and input can be tested. `inputs` derives inputs
from facts.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NamedTuple

__all__ = [
    "APPEND",
    "CONTENT",
    "ENDS",
    "SYNC_ROUNDS_MAX",
    "ContentEffect",
    "ContentInput",
    "ContentState",
    "ContentStep",
    "Effect",
    "Input",
    "State",
    "Step",
    "UnexpectedInputError",
    "content_step",
    "step",
]

SYNC_ROUNDS_MAX = 8
"""Synchronizations of one append before it fails. Two suffice to bring a group of replicas to
one offset; a peer with our offset but other registers would never agree (broker section 6.2)."""


class UnexpectedInputError(AssertionError):
    """The driver reported an input which cannot happen in its state: a bug of the driver."""


class State(enum.Enum):
    """State of an append. The last three are its ends."""

    __hash__ = object.__hash__  # members are singletons; hashing their names costs far more

    RESOLVE = enum.auto()
    ACQUIRE_PIPELINE = enum.auto()
    START_PIPELINE = enum.auto()
    SEND_SYNC = enum.auto()
    RECV_SYNC = enum.auto()
    UPDATE_ASSIGNMENTS = enum.auto()
    AWAIT_REPLICAS = enum.auto()
    VALIDATE_PRECONDITIONS = enum.auto()
    UPDATE_SUSPEND = enum.auto()
    STREAM_CONTENT = enum.auto()
    READ_ACKS = enum.auto()
    PROXY = enum.auto()
    FINISHED = enum.auto()
    ERROR = enum.auto()


ENDS = frozenset({State.PROXY, State.FINISHED, State.ERROR})
"""States in which an append has ended."""


class Input(enum.Enum):
    """Result of a state's action."""

    __hash__ = object.__hash__

    HELD = enum.auto()
    """Resolved to us, and the pipeline's slot is ours already."""
    REPLACED = enum.auto()
    """Resolved to us, and the slot we hold is that of a replica which was replaced."""
    LOCAL = enum.auto()
    """Resolved to us, or all replicas are there and we are the primary."""
    REMOTE = enum.auto()
    """Another broker is the primary."""
    REFUSED = enum.auto()
    """The answer is a status other than OK."""
    SUSPENSION = enum.auto()
    """The spec's suspension has to be written."""
    ACQUIRED = enum.auto()
    """The pipeline's slot is ours."""
    REUSED = enum.auto()
    """The pipeline in the slot is synchronized over our route."""
    STARTED = enum.auto()
    """A new pipeline has its streams."""
    SENT = enum.auto()
    """The proposal went to every replica."""
    AGREED = enum.auto()
    """Every replica agrees, or everything required holds."""
    ROLL = enum.auto()
    """The spools have to be rolled to an offset, and synchronized again."""
    LATER = enum.auto()
    """A peer has seen a later revision of Etcd, or we have to wait for one."""
    WRITTEN = enum.auto()
    """A transaction was sent to Etcd; resolve at the revision it led to."""
    TOO_FEW = enum.auto()
    """Fewer members than the journal requires."""
    STREAMED = enum.auto()
    """The client's stream ended, and its commit or rollback went to every replica."""
    INVALIDATED = enum.auto()
    """The resolution is old."""
    FAILED = enum.auto()
    """Something broke, or the client's stream did."""
    CANCELLED = enum.auto()
    """The caller gave up, or its time is over."""


class Effect(enum.Enum):
    """Action of the driver between two states."""

    RELEASE = enum.auto()
    """Put the pipeline, as it is, back into its slot, if we hold it."""
    TEAR_DOWN = enum.auto()
    """Roll back and release the spool, close the streams; keep the slot, which is now empty."""


class Step(NamedTuple):
    """One entry of :data:`APPEND`."""

    effects: tuple[Effect, ...]
    next: State


_RELEASE = (Effect.RELEASE,)
_DISCARD = (Effect.TEAR_DOWN, Effect.RELEASE)
_TEAR_DOWN = (Effect.TEAR_DOWN,)
_NOTHING: tuple[Effect, ...] = ()

APPEND: Mapping[tuple[State, Input], Step] = {
    # Releasing before waiting for others: the replica may be shutting down, and want the slot.
    (State.RESOLVE, Input.HELD): Step(_NOTHING, State.START_PIPELINE),
    (State.RESOLVE, Input.REPLACED): Step(_RELEASE, State.ACQUIRE_PIPELINE),
    (State.RESOLVE, Input.LOCAL): Step(_NOTHING, State.ACQUIRE_PIPELINE),
    (State.RESOLVE, Input.REMOTE): Step(_RELEASE, State.AWAIT_REPLICAS),
    (State.RESOLVE, Input.SUSPENSION): Step(_NOTHING, State.UPDATE_SUSPEND),
    (State.RESOLVE, Input.REFUSED): Step(_RELEASE, State.ERROR),
    (State.RESOLVE, Input.FAILED): Step(_RELEASE, State.ERROR),
    (State.RESOLVE, Input.CANCELLED): Step(_RELEASE, State.ERROR),
    (State.ACQUIRE_PIPELINE, Input.ACQUIRED): Step(_NOTHING, State.START_PIPELINE),
    (State.ACQUIRE_PIPELINE, Input.INVALIDATED): Step(_NOTHING, State.RESOLVE),
    (State.ACQUIRE_PIPELINE, Input.CANCELLED): Step(_NOTHING, State.ERROR),
    (State.START_PIPELINE, Input.REUSED): Step(_NOTHING, State.UPDATE_ASSIGNMENTS),
    (State.START_PIPELINE, Input.STARTED): Step(_NOTHING, State.SEND_SYNC),
    (State.START_PIPELINE, Input.INVALIDATED): Step(_NOTHING, State.RESOLVE),
    (State.START_PIPELINE, Input.FAILED): Step(_DISCARD, State.ERROR),
    (State.START_PIPELINE, Input.CANCELLED): Step(_DISCARD, State.ERROR),
    (State.SEND_SYNC, Input.SENT): Step(_NOTHING, State.RECV_SYNC),
    (State.SEND_SYNC, Input.FAILED): Step(_DISCARD, State.ERROR),
    (State.SEND_SYNC, Input.CANCELLED): Step(_DISCARD, State.ERROR),
    (State.RECV_SYNC, Input.AGREED): Step(_NOTHING, State.UPDATE_ASSIGNMENTS),
    (State.RECV_SYNC, Input.ROLL): Step(_NOTHING, State.SEND_SYNC),
    (State.RECV_SYNC, Input.LATER): Step(_TEAR_DOWN, State.RESOLVE),
    (State.RECV_SYNC, Input.FAILED): Step(_DISCARD, State.ERROR),
    (State.RECV_SYNC, Input.CANCELLED): Step(_DISCARD, State.ERROR),
    (State.UPDATE_ASSIGNMENTS, Input.AGREED): Step(_NOTHING, State.AWAIT_REPLICAS),
    (State.UPDATE_ASSIGNMENTS, Input.WRITTEN): Step(_NOTHING, State.RESOLVE),
    # Members are counted before the route is written: nothing can be appended over a short one.
    (State.UPDATE_ASSIGNMENTS, Input.TOO_FEW): Step(_RELEASE, State.ERROR),
    # Brokers that are away have bytes which these members lack, unless the operator gives them up.
    (State.UPDATE_ASSIGNMENTS, Input.REFUSED): Step(_RELEASE, State.ERROR),
    (State.UPDATE_ASSIGNMENTS, Input.INVALIDATED): Step(_NOTHING, State.RESOLVE),
    # The last broker left with all content stored: the journal goes on behind it.
    (State.UPDATE_ASSIGNMENTS, Input.ROLL): Step(_NOTHING, State.SEND_SYNC),
    (State.UPDATE_ASSIGNMENTS, Input.FAILED): Step(_RELEASE, State.ERROR),
    (State.UPDATE_ASSIGNMENTS, Input.CANCELLED): Step(_RELEASE, State.ERROR),
    # Too many members: the allocator adds before it removes. Waiting costs less than the second
    # synchronization of a route which is about to change.
    (State.AWAIT_REPLICAS, Input.LATER): Step(_NOTHING, State.RESOLVE),
    (State.AWAIT_REPLICAS, Input.TOO_FEW): Step(_RELEASE, State.ERROR),
    (State.AWAIT_REPLICAS, Input.REMOTE): Step(_NOTHING, State.PROXY),
    (State.AWAIT_REPLICAS, Input.LOCAL): Step(_NOTHING, State.VALIDATE_PRECONDITIONS),
    (State.VALIDATE_PRECONDITIONS, Input.AGREED): Step(_NOTHING, State.STREAM_CONTENT),
    (State.VALIDATE_PRECONDITIONS, Input.ROLL): Step(_NOTHING, State.SEND_SYNC),
    (State.VALIDATE_PRECONDITIONS, Input.SUSPENSION): Step(_NOTHING, State.UPDATE_SUSPEND),
    (State.VALIDATE_PRECONDITIONS, Input.INVALIDATED): Step(_NOTHING, State.RESOLVE),
    (State.VALIDATE_PRECONDITIONS, Input.REFUSED): Step(_RELEASE, State.ERROR),
    (State.VALIDATE_PRECONDITIONS, Input.FAILED): Step(_RELEASE, State.ERROR),
    (State.VALIDATE_PRECONDITIONS, Input.CANCELLED): Step(_RELEASE, State.ERROR),
    # Also if the transaction failed: the state of Etcd decides.
    (State.UPDATE_SUSPEND, Input.WRITTEN): Step(_NOTHING, State.RESOLVE),
    (State.UPDATE_SUSPEND, Input.FAILED): Step(_RELEASE, State.ERROR),
    (State.UPDATE_SUSPEND, Input.CANCELLED): Step(_RELEASE, State.ERROR),
    # The pipeline goes back before its answers are waited for: the next append may follow.
    (State.STREAM_CONTENT, Input.STREAMED): Step(_RELEASE, State.READ_ACKS),
    (State.STREAM_CONTENT, Input.FAILED): Step(_DISCARD, State.ERROR),
    (State.STREAM_CONTENT, Input.CANCELLED): Step(_DISCARD, State.ERROR),
    (State.READ_ACKS, Input.AGREED): Step(_NOTHING, State.FINISHED),
    (State.READ_ACKS, Input.REFUSED): Step(_NOTHING, State.ERROR),
    (State.READ_ACKS, Input.FAILED): Step(_NOTHING, State.ERROR),
    (State.READ_ACKS, Input.CANCELLED): Step(_NOTHING, State.ERROR),
}
"""(state, input) → (effects, next state). Other pairs cannot happen."""


def step(state: State, given: Input) -> Step:
    """Return the entry of :data:`APPEND`.

    Raises:
        UnexpectedInputError: the input cannot happen in this state.
    """
    found = APPEND.get((state, given))
    if found is None:
        raise UnexpectedInputError(f"{given.name} cannot happen to an append in {state.name}")
    return found


# ---------------------------------------------------------- the client's stream


class ContentState(enum.Enum):
    """State of the client's stream."""

    __hash__ = object.__hash__

    OPEN = enum.auto()
    """Content may follow."""
    INTENT = enum.auto()
    """The empty message was seen: only the end of the stream may follow."""
    DONE = enum.auto()
    """Decided."""


class ContentInput(enum.Enum):
    """Event of the client's stream."""

    __hash__ = object.__hash__

    CHUNK = enum.auto()
    """Content."""
    EMPTY = enum.auto()
    """The empty message, which means to commit."""
    END = enum.auto()
    """The client's half-close."""
    INVALID = enum.auto()
    """A message which is no chunk."""
    BROKEN = enum.auto()
    """The stream failed, or was too slow."""
    FORBIDDEN = enum.auto()
    """Content, where the journal's flags or the request's mode forbid it."""


class ContentEffect(enum.Enum):
    """Effect of an event of the client's stream."""

    SCATTER = enum.auto()
    """Send the chunk to every replica."""
    WAIT = enum.auto()
    """Nothing yet."""
    COMMIT = enum.auto()
    """Propose the spool's next fragment."""
    ROLL_BACK = enum.auto()
    """Propose the spool's current fragment, and fail."""
    DENY = enum.auto()
    """Propose the spool's current fragment, and answer NOT_ALLOWED."""


class ContentStep(NamedTuple):
    """One entry of :data:`CONTENT`. ``reason`` says why an append is rolled back."""

    effect: ContentEffect
    next: ContentState
    reason: str = ""


_MORE = "expected the end of the stream after the empty message"
_NO_COMMIT = "the stream ended without the empty message which commits"

CONTENT: Mapping[tuple[ContentState, ContentInput], ContentStep] = {
    (ContentState.OPEN, ContentInput.CHUNK): ContentStep(ContentEffect.SCATTER, ContentState.OPEN),
    (ContentState.OPEN, ContentInput.EMPTY): ContentStep(ContentEffect.WAIT, ContentState.INTENT),
    (ContentState.OPEN, ContentInput.END): ContentStep(
        ContentEffect.ROLL_BACK, ContentState.DONE, _NO_COMMIT
    ),
    (ContentState.OPEN, ContentInput.INVALID): ContentStep(
        ContentEffect.ROLL_BACK, ContentState.DONE, "expected a chunk of content"
    ),
    (ContentState.OPEN, ContentInput.BROKEN): ContentStep(
        ContentEffect.ROLL_BACK, ContentState.DONE, "the client's stream failed"
    ),
    (ContentState.OPEN, ContentInput.FORBIDDEN): ContentStep(ContentEffect.DENY, ContentState.DONE),
    (ContentState.INTENT, ContentInput.CHUNK): ContentStep(
        ContentEffect.ROLL_BACK, ContentState.DONE, _MORE
    ),
    (ContentState.INTENT, ContentInput.EMPTY): ContentStep(
        ContentEffect.ROLL_BACK, ContentState.DONE, _MORE
    ),
    (ContentState.INTENT, ContentInput.END): ContentStep(ContentEffect.COMMIT, ContentState.DONE),
    (ContentState.INTENT, ContentInput.INVALID): ContentStep(
        ContentEffect.ROLL_BACK, ContentState.DONE, _MORE
    ),
    (ContentState.INTENT, ContentInput.BROKEN): ContentStep(
        ContentEffect.ROLL_BACK, ContentState.DONE, "the client's stream failed"
    ),
    (ContentState.INTENT, ContentInput.FORBIDDEN): ContentStep(
        ContentEffect.ROLL_BACK, ContentState.DONE, _MORE
    ),
}
"""(state, event) → (effect, next state) while content is streamed (broker section 5.3)."""


def content_step(state: ContentState, given: ContentInput) -> ContentStep:
    """Return the entry of :data:`CONTENT`.

    Raises:
        UnexpectedInputError: the stream was decided already.
    """
    found = CONTENT.get((state, given))
    if found is None:
        raise UnexpectedInputError(f"{given.name} after the append was decided")
    return found
