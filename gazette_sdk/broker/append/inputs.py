"""What facts mean for an append: the inputs of its machine (broker section 5).

Functions of values only: nothing here awaits, reads a clock or touches a stream.
"""

from __future__ import annotations

from typing import NamedTuple

from gazette_sdk.broker.append.machine import Input
from gazette_sdk.broker.append.suspend import judge_suspension
from gazette_sdk.broker.fragments.index import Summary
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.journal_spec import may_write
from gazette_sdk.protocol.selectors import matches

__all__ = [
    "Terms",
    "Verdict",
    "judge_preconditions",
    "judge_replicas",
    "judge_resolution",
    "next_proposal",
]


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


class Terms:
    """What a journal's spec says to appends: plain values, since every append asks for them.

    Args:
        spec: the journal's, which nobody changes.

    Attributes:
        spec: the same.
        may_write: whether its flags allow content.
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


_AGREED = Verdict(Input.AGREED)


def judge_preconditions(  # noqa: PLR0911 - one per precondition
    request: pb.AppendRequest,
    terms: Terms,
    registers: pb.LabelSet,
    spool: pb.Fragment,
    index: Summary,
    *,
    now: float,
) -> Verdict:
    """Preconditions 2 to 9 of broker section 5.1, in their order.

    The first, a refreshed index and a healthy store, is a wait and stands in the shell.

    Args:
        request: the append's opening request.
        terms: the journal's.
        registers: the journal's registers.
        spool: the spool's fragment. Its end is the next byte's offset, if the index agrees.
        index: what the fragment index covers.
        now: Unix time, in seconds.
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
        return Verdict(Input.REFUSED, pb.INDEX_HAS_GREATER_OFFSET)
    if offset not in (0, head_max):
        return Verdict(Input.REFUSED, pb.WRONG_APPEND_OFFSET)
    if offset != 0 and head != head_max:
        # The explicit offset is the operator's word that nobody holds unstored content.
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
    """The roll decision (broker section 5.2): what to propose for the spool.

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
    interval = terms.flush_interval_s
    if not flush and first_append_s is not None and interval >= 1:
        flush = first_append_s // interval != now // interval
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
