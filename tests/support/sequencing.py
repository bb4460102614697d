"""Drives sequencers over journals that are held in memory, as a reader would."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from gazette_sdk.message.checkpoint import Checkpoint
from gazette_sdk.message.runs import Message, Run
from gazette_sdk.message.sequencer import ReplayRange, Sequencer
from gazette_sdk.message.uuid import ACK_TXN, CONTINUE_TXN, OUTSIDE_TXN

T = TypeVar("T")

Journals = Mapping[str, Sequence[Message[T]]]


J = "a/journal"
O, C, A = OUTSIDE_TXN, CONTINUE_TXN, ACK_TXN  # noqa: E741 - as tables write them
P, Q = 0x010000000001, 0x010000000002
UNKNOWN = 0x3


def at(index: int, clock: int, flags: int, producer: int = P, journal: str = J) -> Message[str]:
    """The message in the index'th hundred of bytes of a journal."""
    item = f"{index}"
    return Message(journal, index * 100, index * 100 + 100, producer, clock, flags, item)


def history(*stamps: tuple[Any, ...]) -> list[Message[str]]:
    """Messages from (clock, flags) or (clock, flags, producer), one behind the other."""
    return [at(index, *stamp) for index, stamp in enumerate(stamps)]


def items(delivered: Any) -> list[str]:
    return [message.item for message in delivered]


def content(journals: Journals[T], wanted: ReplayRange) -> list[Message[T]]:
    """The messages of a range, read again."""
    return [
        message
        for message in journals[wanted.journal]
        if wanted.begin <= message.begin and message.end <= wanted.end
    ]


def deliveries(sequencer: Sequencer[T], journals: Journals[T]) -> Iterator[Message[T]]:
    """What is delivered after a message was queued."""
    wanted = sequencer.replay
    if wanted is not None:
        for message in content(journals, wanted):
            if sequencer.offer(message):
                yield message
        sequencer.end_replay()
    while (ready := sequencer.step()) is not None:
        yield ready


def feed(
    sequencer: Sequencer[T], journals: Journals[T], messages: Iterable[Message[T]]
) -> Iterator[Message[T]]:
    """What is delivered of messages, queued one by one."""
    for message in messages:
        sequencer.queue(message)
        yield from deliveries(sequencer, journals)


def unread(checkpoint: Checkpoint, journals: Journals[T]) -> list[Message[T]]:
    """The messages behind a checkpoint's offsets, journal by journal."""
    return [
        message
        for name, listed in journals.items()
        for message in listed
        if message.begin >= checkpoint.offsets.get(name, 0)
    ]


def states(checkpoint: Checkpoint) -> set[tuple[str, bytes, int, int]]:
    """A checkpoint's producers, in no order."""
    listed = {tuple(state) for state in checkpoint.producers}
    assert len(listed) == len(checkpoint.producers)
    return listed


def with_open(
    expected: set[tuple[str, bytes, int, int]], before: Checkpoint
) -> set[tuple[str, bytes, int, int]]:
    """Producers as the reference keeps them, and those with an open transaction before.

    The reference forgets them with age, and loses their transactions; here they are kept.
    """
    known = {state[:2] for state in expected}
    return expected | {s for s in states(before) if s[3] != -1 and s[:2] not in known}


def run_of(messages: Sequence[Message[T]]) -> Run[T]:
    """A run of one journal's messages, which are at least one."""
    assert len({message.journal for message in messages}) == 1
    return Run(
        messages[0].journal,
        np.array([message.begin for message in messages], np.int64),
        np.array([message.end for message in messages], np.int64),
        np.array([message.producer for message in messages], np.uint64),
        np.array([message.clock for message in messages], np.uint64),
        np.array([message.flags for message in messages], np.uint16),
        [message.item for message in messages],
    )
