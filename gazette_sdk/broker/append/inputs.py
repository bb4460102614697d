"""Inputs of the append machine, derived from facts (broker sections 5 and 9).

The functions are pure: they do not await, read a clock or touch a stream. The driver of the machine
and the function for the common case share them.
"""

from __future__ import annotations

from typing import NamedTuple

from gazette_sdk.broker.append.machine import Input
from gazette_sdk.broker.fragments.index import Summary
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.journal_spec import may_write
from gazette_sdk.protocol.labels import matches, subtract, union

__all__ = [
    "FLUSHED_AGE_S",
    "Suspension",
    "Terms",
    "Verdict",
    "changed_registers",
    "changes_registers",
    "is_dirty",
    "judge_preconditions",
    "judge_replicas",
    "judge_resolution",
    "judge_suspension",
    "may_carry_content",
    "next_proposal",
]


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


def judge_replicas(members: int, desired: int, *, is_local: bool) -> Input:
    """Return the input for a route's number of members, given the number required now."""
    if members > desired:
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


class Verdict(NamedTuple):
    """Result of the preconditions.

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


_AGREED = Verdict(Input.AGREED)


def judge_preconditions(  # noqa: PLR0911 - one per precondition
    request: pb.AppendRequest,
    terms: Terms,
    registers: pb.LabelSet,
    spool: pb.Fragment,
    index: Summary,
    *,
    now: float,
    is_followed: bool = False,
) -> Verdict:
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
            the index has every byte from there to its own end. Nobody has acknowledged those: the
            journal goes on behind them, as it would behind a former primary's last bytes. Our
            brokers store bytes before all replicas have them in two cases. One that stops while
            no other broker is there stores all that it has. And a recovered spool is used where
            nobody can tell that others went on before its end (`Quarantine`). Brokers of other
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
        return Verdict(Input.REFUSED, pb.REGISTER_MISMATCH)
    if head < terms.suspended_at:
        return Verdict(Input.ROLL, roll_to=terms.suspended_at)
    if head != head_max and offset == 0 and terms.may_write:
        if is_followed:
            return Verdict(Input.ROLL, roll_to=head_max)
        return Verdict(Input.REFUSED, pb.INDEX_HAS_GREATER_OFFSET)
    if offset not in (0, head_max):
        return Verdict(Input.REFUSED, pb.WRONG_APPEND_OFFSET)
    if offset != 0 and head != head_max:
        # By the explicit offset the operator states that no broker holds unstored content.
        return Verdict(Input.ROLL, roll_to=head_max)

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
        return Verdict(Input.SUSPENSION, roll_to=roll_to, suspend=suspension.write)
    if suspension.refused:
        return Verdict(Input.REFUSED, pb.SUSPENDED)

    # The journal's first fragment is closed early, so that its store soon is visibly not empty:
    # the loss of every broker must not look like a journal that is new.
    roll_to = head if spool.begin == index_begin else 0
    status = pb.SUSPENDED if suspension.is_suspended else pb.OK
    return Verdict(Input.AGREED, status, roll_to) if roll_to or status else _AGREED


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
    assert begin >= end, "a spool is never rolled back behind its end"
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
        is_suspended: the append goes on, and answers SUSPENDED in the end.
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
