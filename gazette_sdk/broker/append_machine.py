"""The append state machine, as tables (broker section 5).

Two small machines say everything that can happen to an append:

* :data:`APPEND` — from its resolution to its end. The shell (`append`) performs the action of
  the state it is in, reports what came of it as one :class:`Input`, performs the effects which
  the table names, and goes to the next state.
* :data:`CONTENT` — what one event of the client's stream means while content is streamed.

Beside them stand the judgements which make an input of facts: they look at values only. Nothing
here awaits, reads a clock, or touches a stream, so every pair of state and input can be tested.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from gazette_sdk.broker.suspend import judge_suspension
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.journal_spec import may_write
from gazette_sdk.protocol.selectors import matches

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
    "Facts",
    "Input",
    "State",
    "Step",
    "UnexpectedInputError",
    "Verdict",
    "content_step",
    "judge_preconditions",
    "judge_replicas",
    "judge_resolution",
    "next_proposal",
    "step",
]

SYNC_ROUNDS_MAX = 8
"""Synchronizations of one append before it fails. Two suffice to bring a group of replicas to
one offset; a peer with our offset but other registers would never agree (broker section 6.2)."""


class UnexpectedInputError(AssertionError):
    """The shell reported an input which cannot happen in its state: a bug of the shell."""


class State(enum.Enum):
    """Where an append stands. The last three are its ends."""

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
    """What came of a state's action."""

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
    """The pipeline which stands there is synchronized over our very route."""
    STARTED = enum.auto()
    """A new pipeline has its streams."""
    SENT = enum.auto()
    """The proposal went to every replica."""
    AGREED = enum.auto()
    """Every replica agrees, or everything required holds."""
    ROLL = enum.auto()
    """The spools have to be rolled to an offset, and synchronized again."""
    LATER = enum.auto()
    """Somebody knows a later revision of Etcd, or must be waited for at one."""
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
    """What the shell does on its way to the next state."""

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
    # Win or lose: what matters is what stands in Etcd then.
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
"""(state, input) → (effects, next state). What is not here cannot happen."""


def step(state: State, given: Input) -> Step:
    """The entry of :data:`APPEND`.

    Raises:
        UnexpectedInputError: the input cannot happen in this state.
    """
    found = APPEND.get((state, given))
    if found is None:
        raise UnexpectedInputError(f"{given.name} cannot happen to an append in {state.name}")
    return found


# ----------------------------------------------------------------- judgements


def judge_resolution(status: int, suspend: int, *, is_local: bool, holds_pipeline: bool) -> Input:
    """What a resolution means.

    Args:
        status: the resolution's status.
        suspend: the request's ``AppendRequest.Suspend``.
        is_local: whether we are the process responsible.
        holds_pipeline: whether the append holds the pipeline's slot.
    """
    if status == pb.SUSPENDED and suspend == pb.AppendRequest.SUSPEND_RESUME:
        return Input.SUSPENSION
    if status != pb.OK:
        return Input.REFUSED
    if not is_local:
        return Input.REMOTE
    return Input.HELD if holds_pipeline else Input.LOCAL


def judge_replicas(members: int, desired: int, *, is_local: bool) -> Input:
    """Whether the route has as many members as the journal requires now."""
    if members > desired:
        return Input.LATER
    if members < desired:
        return Input.TOO_FEW
    return Input.LOCAL if is_local else Input.REMOTE


@dataclass(frozen=True, slots=True)
class Facts:
    """What preconditions are judged by.

    Attributes:
        request: the append's opening request.
        spec: the journal's spec.
        registers: the journal's registers.
        spool_begin: begin of the spool's fragment.
        head: end of the spool's fragment: the next byte's offset, if the index agrees.
        index_begin: first offset of the fragment index, 0 if it is empty.
        index_end: last offset of the fragment index, 0 if it is empty.
        index_mod_time: modification time of the index's last fragment, 0 if it is not stored.
        now: Unix time, in seconds.
    """

    request: pb.AppendRequest
    spec: pb.JournalSpec
    registers: pb.LabelSet
    spool_begin: int
    head: int
    index_begin: int
    index_end: int
    index_mod_time: int
    now: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """What preconditions come to.

    Attributes:
        input: AGREED, ROLL, SUSPENSION or REFUSED.
        status: of the answer. SUSPENDED with AGREED: an append without content which goes on,
            to prove that all replicas are in sync, and then answers so.
        roll_to: offset at which spools should begin, 0 for no roll.
        suspend: what to write into the spec, with SUSPENSION.
    """

    input: Input
    status: pb.Status = pb.OK
    roll_to: int = 0
    suspend: pb.JournalSpec.Suspend | None = None


def judge_preconditions(facts: Facts) -> Verdict:  # noqa: PLR0911 - one per precondition
    """Preconditions 2 to 9 of broker section 5.1, in their order.

    The first, a refreshed index and a healthy store, is a wait and stands in the shell.
    """
    request, head = facts.request, facts.head
    head_max = max(head, facts.index_end)

    if (
        request.HasField("check_registers")
        and facts.registers.labels
        and not matches(request.check_registers, facts.registers)
    ):
        return Verdict(Input.REFUSED, pb.REGISTER_MISMATCH)
    if head < facts.spec.suspend.offset:
        return Verdict(Input.ROLL, roll_to=facts.spec.suspend.offset)
    if head != head_max and request.offset == 0 and may_write(facts.spec):
        return Verdict(Input.REFUSED, pb.INDEX_HAS_GREATER_OFFSET)
    if request.offset not in (0, head_max):
        return Verdict(Input.REFUSED, pb.WRONG_APPEND_OFFSET)
    if request.offset != 0 and head != head_max:
        # The explicit offset is the operator's word that nobody holds unstored content.
        return Verdict(Input.ROLL, roll_to=head_max)

    suspension = judge_suspension(
        facts.spec,
        request.suspend,
        head=head,
        index_is_empty=facts.index_begin == facts.index_end,
        index_mod_time=facts.index_mod_time,
        now=facts.now,
    )
    if suspension.write is not None:
        roll_to = head if suspension.close_fragment else 0
        return Verdict(Input.SUSPENSION, roll_to=roll_to, suspend=suspension.write)
    if suspension.refused:
        return Verdict(Input.REFUSED, pb.SUSPENDED)

    # The journal's first fragment is closed early, so that its store soon is visibly not empty:
    # the loss of every broker must not look like a journal that is new.
    roll_to = head if facts.spool_begin == facts.index_begin else 0
    status = pb.SUSPENDED if suspension.is_suspended else pb.OK
    return Verdict(Input.AGREED, status, roll_to=roll_to)


def next_proposal(
    spool: pb.Fragment,
    first_append_s: float | None,
    spec: pb.JournalSpec.Fragment,
    *,
    roll_to: int,
    now: float,
) -> pb.Fragment:
    """The roll decision (broker section 5.2): what to propose for the spool.

    Args:
        spool: the spool's fragment.
        first_append_s: when it got its first content, in seconds of any epoch that is aligned
            with the flush interval; ``None`` where it has none.
        spec: how the journal's fragments should be.
        roll_to: offset at which the fragment should begin; 0 for wherever it is.
        now: in seconds of the same epoch.

    Returns:
        the fragment itself, or an empty one which begins at ``roll_to`` or at its end.
    """
    length = spool.end - spool.begin
    interval = spec.flush_interval.seconds
    flush = (
        length == 0
        or length > spec.length
        or (roll_to not in (0, spool.begin))
        or (
            interval >= 1
            and first_append_s is not None
            and first_append_s // interval != now // interval
        )
    )
    if not flush:
        return spool
    begin = roll_to or spool.end
    assert begin >= spool.end, "a spool is never rolled back behind its end"
    return pb.Fragment(
        journal=spool.journal,
        begin=begin,
        end=begin,
        sum=pb.SHA1Sum(),
        compression_codec=spec.compression_codec,
    )


# ---------------------------------------------------------- the client's stream


class ContentState(enum.Enum):
    """Where the client's stream stands."""

    __hash__ = object.__hash__

    OPEN = enum.auto()
    """Content may follow."""
    INTENT = enum.auto()
    """The empty message was seen: only the end of the stream may follow."""
    DONE = enum.auto()
    """Decided."""


class ContentInput(enum.Enum):
    """What the client's stream brings."""

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
    """What an event of the client's stream leads to."""

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
    """The entry of :data:`CONTENT`.

    Raises:
        UnexpectedInputError: the stream was decided already.
    """
    found = CONTENT.get((state, given))
    if found is None:
        raise UnexpectedInputError(f"{given.name} after the append was decided")
    return found
