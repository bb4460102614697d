"""Ends of transactions, as steps which yield what they wait for.

The steps are the same for plain code, which blocks, and for coroutines, which await.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar

from gazette_sdk.errors import ClosedError, ConfigurationError
from gazette_sdk.message.publishing.intents import AckIntents
from gazette_sdk.message.publishing.producer import Sequences
from gazette_sdk.message.publishing.sender import Sender
from gazette_sdk.transport.append.queue import PendingAppend, all_ended
from gazette_sdk.user_code import acontained

__all__ = [
    "ROLLBACK_TIMEOUT_S",
    "PreparedTransaction",
    "Steps",
    "arun_steps",
    "roll_back",
    "run_steps",
    "seconds_left",
    "settle",
]

T = TypeVar("T")

ROLLBACK_TIMEOUT_S = 10.0
"""Bound of the wait for a roll-back. Readers are right without it: what is not acknowledged is
never visible. It lets them forget pending messages sooner."""

_Wait: TypeAlias = tuple[list[PendingAppend], float | None] | Awaitable[object]
"""Wait for appends, with a bound in seconds, or for the result of ``save``."""

Steps: TypeAlias = Generator[_Wait, Any, T]
"""Steps with a result. The outcome of a wait for appends is True if all have ended in time."""


class PreparedTransaction:
    """Transaction whose messages are durable. It is neither acknowledged nor rolled back.

    Made by :meth:`Transaction.prepare`. Whoever decides over it stores its ``intents`` and writes
    them, with :meth:`Publisher.acknowledge` of any publisher. Then, or when it is decided that it
    is not to be, its own publisher may :meth:`~Publisher.settle` it.

    Args:
        sender: its publisher's.
        sequences: its open sequences.
        intents: its acknowledgements.

    Attributes:
        intents: its acknowledgements; empty if it has no message.
        sender: its publisher's.
        sequences: its open sequences; None once it is settled.
    """

    __slots__ = ("intents", "sender", "sequences")

    def __init__(self, sender: Sender, sequences: Sequences, intents: AckIntents) -> None:
        self.sender = sender
        self.sequences: Sequences | None = sequences
        self.intents = intents


def settle(sender: Sender, prepared: PreparedTransaction, *, acknowledged: bool) -> Steps[bool]:
    """Return the producer of a prepared transaction to its publisher.

    See :meth:`Publisher.settle`.
    """
    sequences = prepared.sequences
    if prepared.sender is not sender:
        raise ConfigurationError(
            "the transaction was prepared by another publisher, to which its producer belongs;"
            " settle it there"
        )
    if sequences is None:
        raise ClosedError("the transaction is settled already: a producer is returned once")
    if sender.is_closed:
        raise sender.closed_error()
    prepared.sequences = None
    if acknowledged:
        sequences.reuse_producer(is_acknowledged=True)
        return True
    _, is_reused = yield from roll_back(sequences, ROLLBACK_TIMEOUT_S)
    return is_reused


def roll_back(sequences: Sequences, timeout_s: float) -> Steps[tuple[bool, bool]]:
    """Roll open sequences back, and reuse their producer if nothing of it is in doubt.

    Args:
        sequences: the sequences.
        timeout_s: bound of the wait for brokers.

    Returns:
        True if no frame of the roll-back is missing in any journal; True if the producer is reused.
    """
    appends: list[PendingAppend] = []
    with suppress(ClosedError):  # what its publisher had not sent was given up by then
        appends = sequences.roll_back()
    in_time = yield appends, timeout_s
    if not in_time or any(append.exception() is not None for append in appends):
        return False, False
    parts = sequences.parts.values()
    # A failed attempt may yet write its messages, which another transaction must not commit, or
    # this roll-back, which must not roll back another transaction.
    was_retried = any(append.last_error is not None for append in appends)
    if len(appends) < len(parts) or was_retried or any(part.is_in_doubt for part in parts):
        return True, False
    sequences.reuse_producer(is_acknowledged=False)
    return True, True


def seconds_left(deadline: float | None) -> float | None:
    """Return the time until a deadline in monotonic seconds; None for no deadline."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def run_steps(steps: Steps[T]) -> T:
    """Run steps in plain code, which blocks at each wait."""
    try:
        _run(steps, _blocked).send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("steps that block never suspend")


async def arun_steps(steps: Steps[T]) -> T:
    """Run steps in a coroutine, which awaits each wait."""
    return await _run(steps, _awaited)


async def _run(steps: Steps[T], wait_for: Callable[[_Wait], Awaitable[bool]]) -> T:
    try:
        wait = next(steps)
        while True:
            try:
                outcome = await wait_for(wait)
            except BaseException as interruption:  # noqa: BLE001 - the steps raise it on
                wait = steps.throw(interruption)
            else:
                wait = steps.send(outcome)
    except StopIteration as end:
        result: T = end.value
        return result


async def _blocked(wait: _Wait) -> bool:
    """Block until a wait ends. It never suspends, so that plain code can run it."""
    if isinstance(wait, tuple):
        appends, timeout_s = wait
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for append in appends:
            append.wait(seconds_left(deadline))
        return all(append.done() for append in appends)
    if inspect.iscoroutine(wait):
        wait.close()
    raise ConfigurationError(
        "save returned an awaitable, which nobody awaits here: use `async with"
        " publisher.transaction(...)`, or a plain function"
    )


async def _awaited(wait: _Wait) -> bool:
    if isinstance(wait, tuple):
        return await all_ended(*wait)
    await acontained(_result, wait)
    return True


async def _result(awaitable: Awaitable[object]) -> object:
    """Await what ``save`` returned."""
    return await awaitable
