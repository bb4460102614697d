"""State machine of recovery, as two tables: one for a journal's head, one for a recovered spool.

Nothing here reads a file or awaits. The other modules of this package, and the spool directory,
perform the effects and report what happened: `spools` verifies files, `etcd_history` checks heads,
`quarantine` decides about verified spools.

The *head* is the committed offset at which this broker may continue a journal:

==========  ==============================  =================================  ==========
state       input                           effect                             next state
==========  ==============================  =================================  ==========
absent      a file states an offset         adopt the greatest offset          known
absent      an unverified head is found     adopt the greatest offset          unverified
absent      the head file is damaged        rename to head.damaged             absent
absent      the head is of another cluster  none                               absent
absent      a fragment is closed            write the head file                known
absent      its spools are all in use       write the head file                known
absent      others continued the journal    contest the spools                 absent
absent      Etcd lacks the history          contest the spools                 absent
absent      the journal is deleted          none                               absent
unverified  a fragment is closed            write the head file                known
unverified  no one has bytes after it       write the head file                known
unverified  others continued the journal    remove it; contest the spools      absent
unverified  Etcd lacks the history          none                               unverified
unverified  the journal is deleted          remove it; contest the spools      absent
known       a file states an offset         adopt the greatest offset          known
known       a fragment is closed            write the head file                known
known       its spools are all in use       write the head file                known
known       others continued the journal    remove it; contest the spools      absent
known       Etcd lacks the history          keep it aside; contest the spools  unverified
known       the journal is deleted          remove it; contest the spools      absent
==========  ==============================  =================================  ==========

A *recovered spool* holds bytes that an earlier process committed. *Others continued* a journal
when Etcd has a synchronized route of it which this broker is not a member of, and which has as many
members as the journal requires; the spools written before are *contested* from then on, over
restarts too (the file ``forgotten`` records it). While a spool is uncontested or contested it is in
*quarantine*: it is in no index and not uploaded. A replica of the journal begins its own spool only
when nothing of the journal is in quarantine but contested spools which others have, or which only
brokers that are away can judge. A head that was removed is written again when all contested spools
are in use, each of them whole, and this broker is a member of the last route known (`routes`).
For want of a history a head becomes *unverified*, also at the end of a replica whose mirror of Etcd
may be old: it is used only if no one else has bytes after it, too. Until that is known it is in
quarantine, as a spool is, also without any spool.

===========  ==========================================  ==============================  ===========
state        input                                       effect                          next state
===========  ==========================================  ==============================  ===========
found        the content matches its last commit         quarantine                      uncontested
found        bytes follow the last commit                truncate; quarantine            uncontested
found        only a beginning matches a commit           keep *.damaged; copy beginning  uncontested
found        no commit matches, or the log is lost       rename to *.damaged             damaged
found        the log has no commit                       remove the files                removed
found        the log names another Etcd cluster          leave the files alone           ignored
found        a file cannot be read or replaced           leave the files alone           ignored
uncontested  others continued the journal                quarantine                      contested
uncontested  the journal is assigned to this broker      add to the index; upload        in use
uncontested  the journal is deleted                      drop it                         removed
uncontested  a peer, a store or the disk fails           ask again after a pause         uncontested
uncontested  no one else has its bytes; or it is stored  add to the index; upload        in use
uncontested  others have bytes from an offset within     ask again after a pause         uncontested
uncontested  others have bytes from its begin            ask again after a pause         uncontested
uncontested  it closes a gap after bytes of others       ask again after a pause         uncontested
contested    the journal is assigned to this broker      quarantine                      contested
contested    the journal is deleted                      drop it                         removed
contested    a peer, a store or the disk fails           ask again after a pause         contested
contested    no one else has its bytes; or it is stored  add to the index; upload        in use
contested    others have bytes from an offset within     truncate it at that offset      truncating
contested    others have bytes from its begin            read the span from the primary  comparing
comparing    readers get the same bytes                  add to the index; upload        in use
comparing    readers get other bytes, or not all         rename to *.superseded          renaming
comparing    a peer, a store or the disk fails           ask again after a pause         contested
contested    it closes a gap after bytes of others       read what others have, too      closing
closing      no one else has its bytes; or it is stored  add to the index; upload        in use
closing      others have bytes from an offset within     truncate it at that offset      truncating
closing      readers get other bytes, or not all         rename to *.superseded          renaming
closing      a peer, a store or the disk fails           ask again after a pause         contested
truncating   done                                        add to the index; upload        in use
truncating   a peer, a store or the disk fails           ask again after a pause         contested
renaming     done                                        none                            superseded
renaming     a peer, a store or the disk fails           ask again after a pause         contested
===========  ==========================================  ==============================  ===========

Every pair that is not listed cannot happen.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

# ------------------------------------------------------------------ the head


class HeadState(enum.Enum):
    """Knowledge of a journal's head."""

    ABSENT = "absent"
    UNVERIFIED = "unverified"
    KNOWN = "known"


class HeadInput(enum.Enum):
    """An event that concerns a journal's head."""

    READ = "a file states an offset"
    READ_UNVERIFIED = "an unverified head is found"
    DAMAGED = "the head file is damaged"
    OTHER_CLUSTER = "the head is of another cluster"
    COMMITTED = "a fragment is closed"
    SPOOLS_IN_USE = "its spools are all in use"
    VERIFIED = "no one has bytes after it"
    CONTINUED_BY_OTHERS = "others continued the journal"
    HISTORY_LOST = "Etcd lacks the history"
    JOURNAL_DELETED = "the journal is deleted"


class HeadEffect(enum.Enum):
    """The work that a transition of a head requires."""

    NOTHING = "none"
    ADOPT = "adopt the greatest offset"
    WRITE = "write the head file"
    SET_ASIDE = "rename to head.damaged"
    FORGET = "remove it; contest the spools"
    DOUBT = "keep it aside; contest the spools"
    CONTEST = "contest the spools"


HEAD: Mapping[tuple[HeadState, HeadInput], tuple[HeadEffect, HeadState]] = {
    (HeadState.ABSENT, HeadInput.READ): (HeadEffect.ADOPT, HeadState.KNOWN),
    (HeadState.ABSENT, HeadInput.READ_UNVERIFIED): (HeadEffect.ADOPT, HeadState.UNVERIFIED),
    (HeadState.ABSENT, HeadInput.DAMAGED): (HeadEffect.SET_ASIDE, HeadState.ABSENT),
    (HeadState.ABSENT, HeadInput.OTHER_CLUSTER): (HeadEffect.NOTHING, HeadState.ABSENT),
    (HeadState.ABSENT, HeadInput.COMMITTED): (HeadEffect.WRITE, HeadState.KNOWN),
    (HeadState.ABSENT, HeadInput.SPOOLS_IN_USE): (HeadEffect.WRITE, HeadState.KNOWN),
    (HeadState.ABSENT, HeadInput.CONTINUED_BY_OTHERS): (HeadEffect.CONTEST, HeadState.ABSENT),
    (HeadState.ABSENT, HeadInput.HISTORY_LOST): (HeadEffect.CONTEST, HeadState.ABSENT),
    (HeadState.ABSENT, HeadInput.JOURNAL_DELETED): (HeadEffect.NOTHING, HeadState.ABSENT),
    (HeadState.UNVERIFIED, HeadInput.COMMITTED): (HeadEffect.WRITE, HeadState.KNOWN),
    (HeadState.UNVERIFIED, HeadInput.VERIFIED): (HeadEffect.WRITE, HeadState.KNOWN),
    (HeadState.UNVERIFIED, HeadInput.CONTINUED_BY_OTHERS): (HeadEffect.FORGET, HeadState.ABSENT),
    (HeadState.UNVERIFIED, HeadInput.HISTORY_LOST): (HeadEffect.NOTHING, HeadState.UNVERIFIED),
    (HeadState.UNVERIFIED, HeadInput.JOURNAL_DELETED): (HeadEffect.FORGET, HeadState.ABSENT),
    (HeadState.KNOWN, HeadInput.READ): (HeadEffect.ADOPT, HeadState.KNOWN),
    (HeadState.KNOWN, HeadInput.COMMITTED): (HeadEffect.WRITE, HeadState.KNOWN),
    (HeadState.KNOWN, HeadInput.SPOOLS_IN_USE): (HeadEffect.WRITE, HeadState.KNOWN),
    (HeadState.KNOWN, HeadInput.CONTINUED_BY_OTHERS): (HeadEffect.FORGET, HeadState.ABSENT),
    (HeadState.KNOWN, HeadInput.HISTORY_LOST): (HeadEffect.DOUBT, HeadState.UNVERIFIED),
    (HeadState.KNOWN, HeadInput.JOURNAL_DELETED): (HeadEffect.FORGET, HeadState.ABSENT),
}
"""(state, input) → (effect, next state) of a journal's head."""


def head_step(state: HeadState, given: HeadInput) -> tuple[HeadEffect, HeadState]:
    """Return the effect and the next state of :data:`HEAD`.

    Raises:
        AssertionError: the input cannot happen in this state, a bug of the caller.
    """
    assert (state, given) in HEAD, f"{given.name} cannot happen to a head in {state.name}"
    return HEAD[state, given]


# ------------------------------------------------------------ recovered spools


class SpoolState(enum.Enum):
    """Condition of a recovered spool."""

    FOUND = "found"
    UNCONTESTED = "uncontested"
    CONTESTED = "contested"
    COMPARING = "comparing"
    CLOSING = "closing"
    TRUNCATING = "truncating"
    RENAMING = "renaming"
    IN_USE = "in use"
    SUPERSEDED = "superseded"
    DAMAGED = "damaged"
    REMOVED = "removed"
    IGNORED = "ignored"


SPOOL_ENDS = frozenset(
    {
        SpoolState.IN_USE,
        SpoolState.SUPERSEDED,
        SpoolState.DAMAGED,
        SpoolState.REMOVED,
        SpoolState.IGNORED,
    }
)
"""States in which recovery of a spool has ended."""


class SpoolInput(enum.Enum):
    """An event that concerns a recovered spool."""

    INTACT = "the content matches its last commit"
    UNCOMMITTED_TAIL = "bytes follow the last commit"
    DAMAGED_TAIL = "only a beginning matches a commit"
    DAMAGED = "no commit matches, or the log is lost"
    NOTHING_COMMITTED = "the log has no commit"
    OTHER_CLUSTER = "the log names another Etcd cluster"
    UNREADABLE = "a file cannot be read or replaced"
    CONTINUED_BY_OTHERS = "others continued the journal"
    ASSIGNED = "the journal is assigned to this broker"
    JOURNAL_DELETED = "the journal is deleted"
    FAILED = "a peer, a store or the disk fails"
    NOT_HELD = "no one else has its bytes; or it is stored"
    HELD_FROM_WITHIN = "others have bytes from an offset within"
    HELD_FROM_BEGIN = "others have bytes from its begin"
    CLOSES_GAP = "it closes a gap after bytes of others"
    SAME_BYTES = "readers get the same bytes"
    OTHER_BYTES = "readers get other bytes, or not all"
    DONE = "done"


class SpoolEffect(enum.Enum):
    """The work that a transition of a recovered spool requires."""

    QUARANTINE = "quarantine"
    CUT_TAIL = "truncate; quarantine"
    COPY_BEGINNING = "keep *.damaged; copy beginning"
    SET_DAMAGED_ASIDE = "rename to *.damaged"
    REMOVE = "remove the files"
    IGNORE = "leave the files alone"
    CONTINUE_WAITING = "ask again after a pause"
    USE = "add to the index; upload"
    DROP = "drop it"
    COMPARE = "read the span from the primary"
    COMPARE_SHARED = "read what others have, too"
    TRUNCATE = "truncate it at that offset"
    SET_SUPERSEDED_ASIDE = "rename to *.superseded"
    NOTHING = "none"


SPOOL: Mapping[tuple[SpoolState, SpoolInput], tuple[SpoolEffect, SpoolState]] = {
    (SpoolState.FOUND, SpoolInput.INTACT): (SpoolEffect.QUARANTINE, SpoolState.UNCONTESTED),
    (SpoolState.FOUND, SpoolInput.UNCOMMITTED_TAIL): (SpoolEffect.CUT_TAIL, SpoolState.UNCONTESTED),
    (SpoolState.FOUND, SpoolInput.DAMAGED_TAIL): (
        SpoolEffect.COPY_BEGINNING,
        SpoolState.UNCONTESTED,
    ),
    (SpoolState.FOUND, SpoolInput.DAMAGED): (SpoolEffect.SET_DAMAGED_ASIDE, SpoolState.DAMAGED),
    (SpoolState.FOUND, SpoolInput.NOTHING_COMMITTED): (SpoolEffect.REMOVE, SpoolState.REMOVED),
    (SpoolState.FOUND, SpoolInput.OTHER_CLUSTER): (SpoolEffect.IGNORE, SpoolState.IGNORED),
    (SpoolState.FOUND, SpoolInput.UNREADABLE): (SpoolEffect.IGNORE, SpoolState.IGNORED),
    (SpoolState.UNCONTESTED, SpoolInput.CONTINUED_BY_OTHERS): (
        SpoolEffect.QUARANTINE,
        SpoolState.CONTESTED,
    ),
    (SpoolState.UNCONTESTED, SpoolInput.ASSIGNED): (SpoolEffect.USE, SpoolState.IN_USE),
    (SpoolState.UNCONTESTED, SpoolInput.JOURNAL_DELETED): (SpoolEffect.DROP, SpoolState.REMOVED),
    (SpoolState.UNCONTESTED, SpoolInput.FAILED): (
        SpoolEffect.CONTINUE_WAITING,
        SpoolState.UNCONTESTED,
    ),
    (SpoolState.UNCONTESTED, SpoolInput.NOT_HELD): (SpoolEffect.USE, SpoolState.IN_USE),
    (SpoolState.UNCONTESTED, SpoolInput.HELD_FROM_WITHIN): (
        SpoolEffect.CONTINUE_WAITING,
        SpoolState.UNCONTESTED,
    ),
    (SpoolState.UNCONTESTED, SpoolInput.HELD_FROM_BEGIN): (
        SpoolEffect.CONTINUE_WAITING,
        SpoolState.UNCONTESTED,
    ),
    (SpoolState.UNCONTESTED, SpoolInput.CLOSES_GAP): (
        SpoolEffect.CONTINUE_WAITING,
        SpoolState.UNCONTESTED,
    ),
    (SpoolState.CONTESTED, SpoolInput.ASSIGNED): (SpoolEffect.QUARANTINE, SpoolState.CONTESTED),
    (SpoolState.CONTESTED, SpoolInput.JOURNAL_DELETED): (SpoolEffect.DROP, SpoolState.REMOVED),
    (SpoolState.CONTESTED, SpoolInput.FAILED): (SpoolEffect.CONTINUE_WAITING, SpoolState.CONTESTED),
    (SpoolState.CONTESTED, SpoolInput.NOT_HELD): (SpoolEffect.USE, SpoolState.IN_USE),
    (SpoolState.CONTESTED, SpoolInput.HELD_FROM_WITHIN): (
        SpoolEffect.TRUNCATE,
        SpoolState.TRUNCATING,
    ),
    (SpoolState.CONTESTED, SpoolInput.HELD_FROM_BEGIN): (SpoolEffect.COMPARE, SpoolState.COMPARING),
    (SpoolState.COMPARING, SpoolInput.SAME_BYTES): (SpoolEffect.USE, SpoolState.IN_USE),
    (SpoolState.COMPARING, SpoolInput.OTHER_BYTES): (
        SpoolEffect.SET_SUPERSEDED_ASIDE,
        SpoolState.RENAMING,
    ),
    (SpoolState.COMPARING, SpoolInput.FAILED): (SpoolEffect.CONTINUE_WAITING, SpoolState.CONTESTED),
    (SpoolState.CONTESTED, SpoolInput.CLOSES_GAP): (
        SpoolEffect.COMPARE_SHARED,
        SpoolState.CLOSING,
    ),
    (SpoolState.CLOSING, SpoolInput.NOT_HELD): (SpoolEffect.USE, SpoolState.IN_USE),
    (SpoolState.CLOSING, SpoolInput.HELD_FROM_WITHIN): (
        SpoolEffect.TRUNCATE,
        SpoolState.TRUNCATING,
    ),
    (SpoolState.CLOSING, SpoolInput.OTHER_BYTES): (
        SpoolEffect.SET_SUPERSEDED_ASIDE,
        SpoolState.RENAMING,
    ),
    (SpoolState.CLOSING, SpoolInput.FAILED): (
        SpoolEffect.CONTINUE_WAITING,
        SpoolState.CONTESTED,
    ),
    (SpoolState.TRUNCATING, SpoolInput.DONE): (SpoolEffect.USE, SpoolState.IN_USE),
    (SpoolState.TRUNCATING, SpoolInput.FAILED): (
        SpoolEffect.CONTINUE_WAITING,
        SpoolState.CONTESTED,
    ),
    (SpoolState.RENAMING, SpoolInput.DONE): (SpoolEffect.NOTHING, SpoolState.SUPERSEDED),
    (SpoolState.RENAMING, SpoolInput.FAILED): (SpoolEffect.CONTINUE_WAITING, SpoolState.CONTESTED),
}
"""(state, input) → (effect, next state) of a recovered spool."""


def spool_step(state: SpoolState, given: SpoolInput) -> tuple[SpoolEffect, SpoolState]:
    """Return the effect and the next state of :data:`SPOOL`.

    Raises:
        AssertionError: the input cannot happen in this state, a bug of the caller.
    """
    assert (state, given) in SPOOL, f"{given.name} cannot happen to a spool in {state.name}"
    return SPOOL[state, given]
