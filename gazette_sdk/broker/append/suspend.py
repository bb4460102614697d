"""When a journal is suspended, and when it is resumed (broker section 9)."""

from __future__ import annotations

from typing import NamedTuple

from gazette_sdk.protocol import broker_pb2 as pb

__all__ = ["FLUSHED_AGE_S", "Suspension", "is_dirty", "judge_suspension", "may_carry_content"]

FLUSHED_AGE_S = 24 * 60 * 60
"""A journal without a flush interval counts as idle when its last fragment is older than this."""

_Level = pb.JournalSpec.Suspend
_Mode = pb.AppendRequest


class Suspension(NamedTuple):
    """What an append does to a journal's suspension.

    Attributes:
        write: what has to be written into the spec first; ``None`` to leave it.
        close_fragment: whether the spool has to be closed once that is written.
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
        index_is_empty: whether the journal has no fragment at all.
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
    """Whether the journal's last fragment is not stored, or was stored only lately."""
    age_s = spec.fragment.flush_interval.seconds or FLUSHED_AGE_S
    return index_mod_time == 0 or index_mod_time > now - age_s


def may_carry_content(mode: int) -> bool:
    """Whether an append of this ``AppendRequest.Suspend`` may have content."""
    return mode in (_Mode.SUSPEND_RESUME, _Mode.SUSPEND_NO_RESUME)
