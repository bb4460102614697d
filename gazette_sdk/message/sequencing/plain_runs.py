"""Plain runs: messages that need no sequencing, found by operations on arrays.

Most messages of journals are plain: messages outside of transactions in the order of their
clocks, and transactions without messages of other producers between. The
:class:`~gazette_sdk.message.sequencing.sequencer.Sequencer` commits such runs at once. All
functions here are pure.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from gazette_sdk.message.flags import ACK_TXN, CONTINUE_TXN, OUTSIDE_TXN
from gazette_sdk.message.sequencing.state import Outcome

__all__ = ["BLOCKED", "count_outcomes", "last_clocks", "plain_prefix"]

Producers = npt.NDArray[np.uint64]
Clocks = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.uint16]
Mask = npt.NDArray[np.bool_]

BLOCKED = 1 << 64
"""Floor of a producer none of whose messages is plain: clocks have 64 bits."""


def plain_prefix(
    producers: Producers,
    clocks: Clocks,
    flags: Flags,
    floor_of: Callable[[int], int],
    *,
    more: bool = False,
) -> int:
    """Return the number of messages, from the first on, that are plain.

    Plain are messages without UUID and messages outside of transactions (unknown flags count as
    such), and complete transactions without messages of other producers between; each producer's
    clocks must ascend.

    Args:
        producers: their producers.
        clocks: their clocks; 0 where a message has no UUID.
        flags: their flags.
        floor_of: returns the clock that a producer's next message must exceed; -1 if there is
            none, :data:`BLOCKED` if it has an open sequence.
        more: other messages follow. All are counted if only the end of a transaction is missing.

    Returns:
        The number of messages up to a boundary: never within a transaction.
    """
    count = len(clocks)
    if not count:
        return 0
    if not flags.any():
        return _ascending_prefix(producers, clocks, floor_of)
    named = clocks != 0
    continues = (flags == CONTINUE_TXN) & named
    # A message of a transaction must be followed by one of the same transaction.
    joined = (continues | ((flags == ACK_TXN) & named))[1:] & (producers[1:] == producers[:-1])
    torn = continues.copy()
    torn[:-1] &= ~joined
    torn[-1] &= not more
    cut = _first(torn)
    cut = min(cut, _ascending_prefix(producers[:cut], clocks[:cut], floor_of))
    return cut if cut == count else _begin_of_transaction(continues, cut)


def last_clocks(producers: Producers, clocks: Clocks) -> list[tuple[int, int]]:
    """Return each producer and its last clock, of messages whose clocks ascend per producer.

    Messages without UUID are ignored.
    """
    if not clocks.all():
        named = clocks.nonzero()[0]
        producers, clocks = producers[named], clocks[named]
    if not len(clocks):
        return []
    if _is_single(producers):
        return [(int(producers[0]), int(clocks[-1]))]
    order = producers.argsort(kind="stable")
    grouped = producers[order]
    last = np.append((grouped[1:] != grouped[:-1]).nonzero()[0], len(order) - 1)
    found = order[last]
    return list(zip(producers[found].tolist(), clocks[found].tolist(), strict=True))


def count_outcomes(clocks: Clocks, flags: Flags) -> list[tuple[int, Outcome, int]]:
    """Return the outcomes of plain messages: flags, outcome, and number of messages."""
    if not flags.any():
        return [(OUTSIDE_TXN, Outcome.OUTSIDE_COMMIT, len(flags))]
    flags = np.where(clocks == 0, np.uint16(OUTSIDE_TXN), flags)
    continues = flags == CONTINUE_TXN
    acknowledges = flags == ACK_TXN
    extends = int((continues[1:] & continues[:-1]).sum())
    commits = int((acknowledges[1:] & continues[:-1]).sum())
    counted = [
        (CONTINUE_TXN, Outcome.CONTINUE_BEGIN_SPAN, int(continues.sum()) - extends),
        (CONTINUE_TXN, Outcome.CONTINUE_EXTEND_SPAN, extends),
        (ACK_TXN, Outcome.ACK_COMMIT_RING, commits),
        (ACK_TXN, Outcome.ACK_EMPTY, int(acknowledges.sum()) - commits),
    ]
    values, counts = np.unique(flags[~(continues | acknowledges)], return_counts=True)
    for value, count in zip(values.tolist(), counts.tolist(), strict=True):
        counted.append((value, Outcome.OUTSIDE_COMMIT, count))
    return [row for row in counted if row[2]]


def _ascending_prefix(producers: Producers, clocks: Clocks, floor_of: Callable[[int], int]) -> int:
    """Return the number of messages, from the first on, whose clocks ascend per producer."""
    if not clocks.all():
        named = clocks.nonzero()[0]
        cut = _ascending_prefix(producers[named], clocks[named], floor_of) if len(named) else 0
        return int(named[cut]) if cut < len(named) else len(clocks)
    if not len(clocks):
        return 0
    if _is_single(producers):
        if int(clocks[0]) <= floor_of(int(producers[0])):
            return 0
        return _first(clocks[1:] <= clocks[:-1]) + 1
    order = producers.argsort(kind="stable")
    producers, clocks = producers[order], clocks[order]
    heads = np.empty(len(order), np.bool_)
    heads[0] = True
    np.not_equal(producers[1:], producers[:-1], out=heads[1:])
    bad = np.zeros(len(order), np.bool_)
    np.less_equal(clocks[1:], clocks[:-1], out=bad[1:])
    bad &= ~heads
    at = heads.nonzero()[0]
    for position, producer, clock in zip(
        at.tolist(), producers[at].tolist(), clocks[at].tolist(), strict=True
    ):
        if clock <= floor_of(producer):
            bad[position] = True
    return int(order[bad].min()) if bad.any() else len(order)


def _begin_of_transaction(continues: Mask, index: int) -> int:
    """Return the begin of the transaction to which the message at ``index`` would belong."""
    others = (~continues[:index]).nonzero()[0]
    return int(others[-1]) + 1 if len(others) else 0


def _first(mask: Mask) -> int:
    """Return the index of the first that is true; the length, if none is."""
    if not len(mask):
        return 0
    index = int(mask.argmax())
    return index if mask[index] else len(mask)


def _is_single(producers: Producers) -> bool:
    return bool(producers[0] == producers[-1] and (producers == producers[0]).all())
