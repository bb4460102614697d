"""The append state machine, as tables (broker section 5).

Two small machines cover everything that can happen to an append:

* :data:`APPEND`: from its resolution to its end. The driver (`append`) performs the action of the
  current state, reports the result as one :class:`Input`, performs the effects of the table's
  entry, and goes to the next state.
* :data:`CONTENT`: the effect of each event of the client's stream while content is streamed.

The machines are pure, so that every pair of state and input can be tested. The functions that
derive inputs from facts (broker sections 5 and 9) are pure, too: they do not await, read a clock or
touch a stream. The driver of the machine and the function for the common case share them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NamedTuple

from gazette_sdk.broker.fragments.index import Summary
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.journal_spec import may_write
from gazette_sdk.protocol.labels import matches, subtract, union

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
    # The last broker left with all content stored: the journal continues after it.
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


def judge_resolution(status: int, suspend: int, *, is_local: bool, holds_pipeline: bool) -> Input:
    """Return the input that a resolution stands for.

    Args:
        status: the resolution's status.
        suspend: the request's ``AppendRequest.Suspend``.
        is_local: True if we are the process responsible.
        holds_pipeline: True if the append holds the pipeline's slot.
    """
    if status == pb.SUSPENDED and suspend == pb.AppendRequest.SUSPEND_RESUME:
        return Input.SUSPENSION
    if status != pb.OK:
        return Input.REFUSED
    if not is_local:
        return Input.REMOTE
    return Input.HELD if holds_pipeline else Input.LOCAL


def judge_replicas(
    members: int, desired: int, *, is_local: bool, is_consistent: bool = True
) -> Input:
    """Return the input for a route's number of members.

    Args:
        members: the number.
        desired: the number that is required now.
        is_local: True if we are the primary.
        is_consistent: True if the primary has synchronized them. The allocator removes none
            before, so that a wait for it would not end: the primary is asked.
    """
    if members > desired and (is_local or is_consistent):
        return Input.LATER
    if members < desired:
        return Input.TOO_FEW
    return Input.LOCAL if is_local else Input.REMOTE


class Terms:
    """Plain values of a journal's spec that every append needs.

    Args:
        spec: the journal's; it is not changed.

    Attributes:
        spec: the same.
        may_write: True if its flags allow content.
        max_append_rate: in bytes per second, 0 for no bound.
        suspended_at: offset at which it was suspended, 0 if it was not.
        store: URL of the first fragment store; ``None`` where it has none.
        fragment_length: at which a fragment is closed, in bytes.
        flush_interval_s: at whose multiples a fragment is closed, 0 for never.
        codec: compression codec of its fragments.
    """

    __slots__ = ("codec", "flush_interval_s", "fragment_length", "max_append_rate", "may_write",
                 "spec", "store", "suspended_at")  # fmt: skip

    def __init__(self, spec: pb.JournalSpec) -> None:
        fragment = spec.fragment
        self.spec = spec
        self.may_write = may_write(spec)
        self.max_append_rate = spec.max_append_rate
        self.suspended_at = spec.suspend.offset
        self.store = fragment.stores[0] if fragment.stores else None
        self.fragment_length = fragment.length
        self.flush_interval_s = fragment.flush_interval.seconds
        self.codec = fragment.compression_codec


class Checked(NamedTuple):
    """Result of the preconditions.

    Attributes:
        input: AGREED, ROLL, SUSPENSION or REFUSED.
        status: of the answer. SUSPENDED with AGREED: an append without content which continues,
            to prove that all replicas are in sync, and then answers so.
        roll_to: offset at which spools should begin, 0 for no roll.
        suspend: what to write into the spec, with SUSPENSION.
    """

    input: Input
    status: pb.Status = pb.OK
    roll_to: int = 0
    suspend: pb.JournalSpec.Suspend | None = None


_AGREED = Checked(Input.AGREED)


def judge_preconditions(  # noqa: PLR0911 - one per precondition
    request: pb.AppendRequest,
    terms: Terms,
    registers: pb.LabelSet,
    spool: pb.Fragment,
    index: Summary,
    *,
    now: float,
    is_followed: bool = False,
) -> Checked:
    """Preconditions 2 to 9 of broker section 5.1, in their order.

    The first, a refreshed index and a healthy store, has to be awaited: see `store_health`.

    Args:
        request: the append's opening request.
        terms: the journal's.
        registers: the journal's registers.
        spool: the spool's fragment. Its end is the next byte's offset, if the index agrees.
        index: what the fragment index covers.
        now: Unix time, in seconds.
        is_followed: True if all acknowledged bytes are known to lie before the spool's end, and
            the index has every byte from there to its own end. No one has acknowledged those: the
            journal continues after them, as it would after a former primary's last bytes. Our
            brokers store bytes before all replicas have them in two cases. One that stops while
            no other broker is there stores all that it has. And a recovered spool is used where
            no one can tell that others continued before its end (`Quarantine`). Brokers of other
            implementations store whatever they have committed.
    """
    index_begin, index_end, index_mod_time = index
    head = spool.end
    head_max = max(head, index_end)
    offset = request.offset

    if (
        request.HasField("check_registers")
        and registers.labels
        and not matches(request.check_registers, registers)
    ):
        return Checked(Input.REFUSED, pb.REGISTER_MISMATCH)
    if head < terms.suspended_at:
        return Checked(Input.ROLL, roll_to=terms.suspended_at)
    if head != head_max and offset == 0 and terms.may_write:
        if is_followed:
            return Checked(Input.ROLL, roll_to=head_max)
        return Checked(Input.REFUSED, pb.INDEX_HAS_GREATER_OFFSET)
    if offset not in (0, head_max):
        return Checked(Input.REFUSED, pb.WRONG_APPEND_OFFSET)
    if offset != 0 and head != head_max:
        # By the explicit offset the operator states that no broker holds unstored content.
        return Checked(Input.ROLL, roll_to=head_max)

    suspension = judge_suspension(
        terms.spec,
        request.suspend,
        head=head,
        index_is_empty=index_begin == index_end,
        index_mod_time=index_mod_time,
        now=now,
    )
    if suspension.write is not None:
        roll_to = head if suspension.close_fragment else 0
        return Checked(Input.SUSPENSION, roll_to=roll_to, suspend=suspension.write)
    if suspension.refused:
        return Checked(Input.REFUSED, pb.SUSPENDED)

    # The journal's first fragment is closed early, so that its store soon is visibly not empty:
    # the loss of every broker must not look like a journal that is new.
    roll_to = head if spool.begin == index_begin else 0
    status = pb.SUSPENDED if suspension.is_suspended else pb.OK
    return Checked(Input.AGREED, status, roll_to) if roll_to or status else _AGREED


def next_proposal(
    spool: pb.Fragment,
    first_append_s: float | None,
    terms: Terms,
    *,
    roll_to: int,
    now: float,
) -> pb.Fragment:
    """Return the proposal for the spool: the roll decision (broker section 5.2).

    Args:
        spool: the spool's fragment.
        first_append_s: when it got its first content, in seconds of any epoch that is aligned
            with the flush interval; ``None`` where it has none.
        terms: the journal's.
        roll_to: offset at which the fragment should begin; 0 for wherever it is.
        now: in seconds of the same epoch.

    Returns:
        the fragment itself, or an empty one which begins at ``roll_to`` or at its end.
    """
    begin, end = spool.begin, spool.end
    length = end - begin
    flush = length == 0 or length > terms.fragment_length or (roll_to not in (0, begin))
    interval_s = terms.flush_interval_s
    if not flush and first_append_s is not None and interval_s >= 1:
        flush = first_append_s // interval_s != now // interval_s
    if not flush:
        return spool
    begin = roll_to or end
    assert begin >= end, "a spool is never rolled back to after its end"
    return pb.Fragment(
        journal=spool.journal,
        begin=begin,
        end=begin,
        sum=pb.SHA1Sum(),
        compression_codec=terms.codec,
    )


def changed_registers(request: pb.AppendRequest, registers: pb.LabelSet) -> pb.LabelSet:
    """Return the registers after an append with content; the same object if nothing changes."""
    if not changes_registers(request):
        return registers
    return union(request.union_registers, subtract(registers, request.subtract_registers))


def changes_registers(request: pb.AppendRequest) -> bool:
    """Return True if an append has labels to add or to remove, also empty ones."""
    return request.HasField("union_registers") or request.HasField("subtract_registers")


# ----------------------------------------------------------- suspension (broker section 9)

FLUSHED_AGE_S = 24 * 60 * 60
"""A journal without a flush interval counts as idle when its last fragment is older than this."""

_Level = pb.JournalSpec.Suspend
_Mode = pb.AppendRequest


class Suspension(NamedTuple):
    """Effect of an append on its journal's suspension.

    Attributes:
        write: what has to be written into the spec first; ``None`` to leave it.
        close_fragment: True if the spool has to be closed after that write.
        refused: the journal is suspended and the request may not resume it.
        is_suspended: the append continues, and answers SUSPENDED in the end.
    """

    write: pb.JournalSpec.Suspend | None = None
    close_fragment: bool = False
    refused: bool = False
    is_suspended: bool = False


_NONE = Suspension()


def judge_suspension(  # noqa: PLR0911 - one per rule of the table
    spec: pb.JournalSpec,
    mode: int,
    *,
    head: int,
    index_is_empty: bool,
    index_mod_time: int,
    now: float,
) -> Suspension:
    """Step 8 of an append's preconditions.

    Args:
        spec: the journal's spec.
        mode: the request's ``AppendRequest.Suspend``.
        head: offset of the next byte.
        index_is_empty: True if the journal has no fragment.
        index_mod_time: when the last fragment was stored, in Unix seconds; 0 if it was not.
        now: Unix time, in seconds.
    """
    level = spec.suspend.level
    if mode == _Mode.SUSPEND_RESUME:
        if level != _Level.NONE:
            return Suspension(write=_Level(level=_Level.NONE, offset=head))
        return _NONE
    if mode == _Mode.SUSPEND_NO_RESUME:
        return Suspension(refused=level != _Level.NONE)
    if mode == _Mode.SUSPEND_KEEP:
        return Suspension()

    if level != _Level.FULL and index_is_empty:
        return Suspension(write=_Level(level=_Level.FULL, offset=head))
    if level == _Level.NONE:
        if mode == _Mode.SUSPEND_NOW or not is_dirty(spec, index_mod_time, now):
            return Suspension(write=_Level(level=_Level.PARTIAL, offset=head), close_fragment=True)
        return Suspension()
    return Suspension(is_suspended=True)


def is_dirty(spec: pb.JournalSpec, index_mod_time: int, now: float) -> bool:
    """Return True if the journal's last fragment is not stored, or was stored only recently."""
    age_s = spec.fragment.flush_interval.seconds or FLUSHED_AGE_S
    return index_mod_time == 0 or index_mod_time > now - age_s


def may_carry_content(mode: int) -> bool:
    """Return True if an append of this ``AppendRequest.Suspend`` may have content."""
    return mode in (_Mode.SUSPEND_RESUME, _Mode.SUSPEND_NO_RESUME)
