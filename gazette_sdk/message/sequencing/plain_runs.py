"""Plain runs: messages that are delivered as they stand, found by operations on arrays.

Most of what journals hold needs no sequencing at all: messages outside of transactions in the
order of their clocks, and transactions nobody else wrote into. The
:class:`~gazette_sdk.message.sequencing.sequencer.Sequencer` passes over such runs at once. All
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
"""The floor of a producer none of whose messages is plain: its clocks have 64 bits."""


def plain_prefix(
    producers: Producers,
    clocks: Clocks,
    flags: Flags,
    floor_of: Callable[[int], int],
    *,
    more: bool = False,
) -> int:
    """How many messages, from the first on, are plain: delivered all, in order, by themselves.

    Plain are messages without UUID and messages outside of transactions (unknown flags count as
    such), and complete transactions nobody else's message stands in; each producer's clocks must
    ascend.

    Args:
        producers: their producers.
        clocks: their clocks; 0 where a message has no UUID.
        flags: their flags.
        floor_of: of a producer: the clock its next message must exceed; -1 if any will do,
            :data:`BLOCKED` if it has an open sequence.
        more: other messages follow. All are counted if but the end of a transaction is missing.

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
    """Each producer and its last clock, of messages whose clocks ascend per producer.

    Messages without UUID are passed over.
    """
    if not clocks.all():
        named = clocks.nonzero()[0]
        producers, clocks = producers[named], clocks[named]
    if not len(clocks):
        return []
    if _is_single(producers):
        return [(int(producers[0]), int(clocks[-1]))]
    order = _by_producer(producers)
    grouped = producers[order]
    last = np.append((grouped[1:] != grouped[:-1]).nonzero()[0], len(order) - 1)
    found = order[last]
    return list(zip(producers[found].tolist(), clocks[found].tolist(), strict=True))


def count_outcomes(clocks: Clocks, flags: Flags) -> list[tuple[int, Outcome, int]]:
    """What becomes of plain messages: flags, outcome, and how many messages."""
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
    """How many messages, from the first on, have clocks that ascend per producer."""
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
    order = _by_producer(producers)
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
    """Where the transaction begins which the message at ``index`` would belong to."""
    others = (~continues[:index]).nonzero()[0]
    return int(others[-1]) + 1 if len(others) else 0


def _first(mask: Mask) -> int:
    """Index of the first that is true; the length, if none is."""
    if not len(mask):
        return 0
    index = int(mask.argmax())
    return index if mask[index] else len(mask)


def _is_single(producers: Producers) -> bool:
    return bool(producers[0] == producers[-1] and (producers == producers[0]).all())


_HASH = np.uint64(0x9E37_79B9_7F4A_7C15)


def _by_producer(producers: Producers) -> npt.NDArray[np.intp]:
    """The order that brings each producer's messages together, each in their own order.

    Sorts by 16 bits of a hash, which numpy does by counting, unless two producers share them.
    """
    hashes = ((producers * _HASH) >> np.uint64(48)).astype(np.uint16)
    order = hashes.argsort(kind="stable")
    changes = producers[order[1:]] != producers[order[:-1]]
    if bool((changes & (hashes[order[1:]] == hashes[order[:-1]])).any()):
        return producers.argsort(kind="stable")
    return order
