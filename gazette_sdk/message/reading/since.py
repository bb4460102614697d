"""Selection of messages since a time, for readers that begin at a time. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeVar

import numpy as np

from gazette_sdk.message.flags import ACK_TXN
from gazette_sdk.message.reading.content_queue import Opened
from gazette_sdk.message.reading.delivery import Select
from gazette_sdk.message.reading.journal_decoder import ContentDecoder
from gazette_sdk.message.sequencing.run import Run, ShortRun

__all__ = ["decoders_since", "messages_since"]

T = TypeVar("T")


def decoders_since(
    new_decoder: Callable[[Opened], ContentDecoder[T]],
    clock: int,
    *,
    exempt: Collection[str],
    select: Select[T],
    keeps_acknowledgements: bool,
) -> Callable[[Opened], ContentDecoder[T]]:
    """Return a function that makes decoders which leave out messages of an earlier clock.

    Args:
        new_decoder: makes decoders of all messages, which parse UUIDs.
        clock: least clock of messages that are decoded.
        exempt: journals whose decoders decode all messages.
        select: returns chosen items of a run.
        keeps_acknowledgements: see :func:`messages_since`.
    """

    def new(opened: Opened) -> ContentDecoder[T]:
        decoder = new_decoder(opened)
        if opened.journal not in exempt:
            decoder.select_run = lambda run: messages_since(
                run, clock, select, keeps_acknowledgements=keeps_acknowledgements
            )
        return decoder

    return new


def messages_since(
    run: Run[T], clock: int, select: Select[T], *, keeps_acknowledgements: bool
) -> Run[T]:
    """Return the messages of a run that do not have an earlier clock.

    Messages without UUID have no time, and are kept.

    Args:
        run: messages with their UUIDs' parts.
        clock: least clock of the messages to keep.
        select: returns chosen items of the run.
        keeps_acknowledgements: keep all acknowledgements of transactions. One that rolls back has
            the clock of an earlier message; without it, later messages of the transaction would
            be committed by the next one.
    """
    if not len(run):
        return run
    kept = (run.clocks >= np.uint64(clock)) | (run.clocks == 0)
    if keeps_acknowledgements:
        kept |= run.flags == ACK_TXN
    if kept.all():
        return run
    indices = np.flatnonzero(kept)
    if type(run) is ShortRun and len(indices):
        messages = run.messages()
        return ShortRun(run.journal, [messages[index] for index in indices])
    return Run(
        run.journal,
        run.begins[indices],
        run.ends[indices],
        run.producers[indices],
        run.clocks[indices],
        run.flags[indices],
        select(run.items, indices),
    )
