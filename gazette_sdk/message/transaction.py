"""Transactions: messages of several journals which become visible together, or not at all.

Messages are written when they are published, but stay invisible to committed readers until an
acknowledgement follows in their journal. The order in which a transaction ends is what makes it
atomic (message section 11): all messages are durable, then the acknowledgements are built and, if
that is wanted, stored, and only then they are written. From the moment they are stored the
transaction is decided, whatever happens to this process.

A transaction ends in steps that yield what they wait for. They are the same for plain code, which
blocks (:func:`run_steps`), and for coroutines, which await (:func:`arun_steps`).
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar

from gazette_sdk.errors import ClosedError, ConfigurationError, GazetteError, check_number
from gazette_sdk.message.bulk import publish_batch
from gazette_sdk.message.mapping import Mapping as JournalMapping
from gazette_sdk.message.receipt import BatchReceipt, Receipt, ReceiptTimeoutError
from gazette_sdk.message.sender import AckIntents, Sender, Sequences, ended_error
from gazette_sdk.transport.append.queue import PendingAppend, all_ended
from gazette_sdk.user_code import acontained, call, check_done

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


class TransactionInDoubtError(GazetteError):
    """A transaction is decided, or may be, but is not acknowledged in every journal.

    Remedy: if its ``intents`` were saved, or need not be, give them to ``publisher.acknowledge()``,
    which completes the transaction. Otherwise do nothing: no committed reader delivers it.

    Attributes:
        intents: its acknowledgements. Writing them again, with
            :meth:`~gazette_sdk.message.publisher.Publisher.acknowledge`, completes it.
    """

    def __init__(self, message: str, intents: AckIntents, *, journal: str | None = None) -> None:
        super().__init__(message, journal=journal)
        self.intents = intents


class Transaction:
    """All or nothing, for committed readers. Made by :meth:`Publisher.transaction`.

    ::

        with publisher.transaction() as txn:
            txn.publish(Order("ada", 250))
            txn.publish(Order("bob", 100))

    The block's end waits until the transaction is acknowledged; an exception within the block
    rolls it back. May be used from several threads, and several may be open at once: each is
    isolated from the others.

    Attributes:
        intents: its acknowledgements, once it is prepared or the block has ended well; empty
            before.
    """

    def __init__(
        self,
        sender: Sender,
        mapping: JournalMapping | None,
        save: Callable[[AckIntents], object] | None,
        timeout_s: float | None,
    ) -> None:
        if timeout_s is not None:
            check_number("timeout", timeout_s)
        if save is not None and not callable(save):
            raise ConfigurationError(f"save={save!r} is no function of the intents")
        self.intents = AckIntents()
        self._sender = sender
        self._mapping = mapping
        self._save = save
        self._timeout_s = timeout_s
        self._sequences: Sequences | None = None
        self._is_prepared = False

    @property
    def journals(self) -> tuple[str, ...]:
        """The journals it has published to, in the order of first use."""
        return () if self._sequences is None else tuple(self._sequences.parts)

    def publish(self, message: Any, *, mapping: JournalMapping | None = None) -> Receipt:
        """Publish a message as part of the transaction. See :meth:`Publisher.publish`.

        Its receipt resolves when it is durable; it is visible only once the block has ended.

        Raises:
            ClosedError: the transaction has ended, or the publisher is closed.
            Exception: as :meth:`Publisher.publish`; or what failed before in the same journal.
        """
        return self._sender.publish(
            message, self._mapping if mapping is None else mapping, self._open()
        )

    def publish_batch(
        self, messages: Any, *, mapping: JournalMapping | None = None
    ) -> BatchReceipt:
        """Publish many messages as part of the transaction. See :meth:`Publisher.publish_batch`.

        Raises:
            ClosedError: the transaction has ended, or the publisher is closed.
            Exception: as :meth:`Publisher.publish_batch`; or what failed before.
        """
        return publish_batch(
            self._sender, messages, self._mapping if mapping is None else mapping, self._open()
        )

    def prepare(self) -> PreparedTransaction:
        """End the transaction without an acknowledgement, once all its messages are durable.

        For transactions over which another process decides: it stores the intents, and writes
        them. The block's end does nothing more. ``Publisher.settle`` returns the producer.

        Raises:
            ConfigurationError: the transaction has a ``save``.
            ClosedError: it has ended, or the publisher is closed.
            ReceiptTimeoutError: not in time; rolled back.
            GazetteError: an append failed; rolled back.
        """
        if self._sender.is_on_loop:
            raise GazetteError(
                "preparing a transaction here would block the publisher's event loop:"
                " `await txn.aprepare()`"
            )
        return run_steps(self._prepare())

    async def aprepare(self) -> PreparedTransaction:
        """As :meth:`prepare`, in a coroutine."""
        return await arun_steps(self._prepare())

    def _open(self) -> Sequences:
        sequences = self._sequences
        if sequences is None:
            raise ClosedError("a transaction begins with its block: `with … as txn:`")
        if self._sender.is_forked:
            raise self._sender.closed_error()
        if sequences.is_ended:
            raise ended_error()
        return sequences

    # ------------------------------------------------------------- the block

    def __enter__(self) -> Self:
        if self._sender.is_on_loop:
            raise GazetteError(
                "ending a transaction here would block the publisher's event loop: `async with`"
            )
        self._begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        run_steps(self._end(error))

    async def __aenter__(self) -> Self:
        self._begin()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await arun_steps(self._end(error))

    def _begin(self) -> None:
        if self._sequences is not None:
            raise ended_error()
        self._sequences = Sequences(self._sender)

    # --------------------------------------------------------------- its end

    def _end(self, error: BaseException | None) -> Steps[None]:
        """The steps of the block's end."""
        if self._is_prepared:
            return
        yield from self._commit() if error is None else self._give_up(error)

    def _prepare(self) -> Steps[PreparedTransaction]:
        """The steps of an end without acknowledgements."""
        if self._save is not None:
            raise ConfigurationError(
                "save= belongs to a transaction that its block's end acknowledges: leave it out,"
                " and store the intents of what prepare() returns"
            )
        sequences = self._open()
        self._is_prepared = True  # its block's end has nothing left to do
        try:
            intents = yield from self._durable(sequences, self._deadline(), always=True)
        except BaseException as error:
            yield from self._give_up(error)
            raise
        self.intents = intents
        return PreparedTransaction(self._sender, sequences, intents)

    def _deadline(self) -> float | None:
        return None if self._timeout_s is None else time.monotonic() + self._timeout_s

    def _commit(self) -> Steps[None]:
        """The steps of a good end. Each yields what it waits for."""
        sequences = self._sequences
        assert sequences is not None
        if self._sender.is_forked:
            raise self._sender.closed_error()
        deadline = self._deadline()
        always = self._save is not None
        try:
            intents = yield from self._durable(sequences, deadline, always=always)
        except BaseException as error:
            yield from self._give_up(error)
            raise
        # From here on its producer is used again only if all goes well.
        if intents and self._save is not None:
            saved = call(self._save, intents)
            if inspect.isawaitable(saved):
                yield saved
            else:
                check_done(saved, self._save)
        try:
            appends = sequences.acknowledge(intents) if intents else []
        except ClosedError as error:
            if self._save is None:
                raise  # nothing of it is visible
            raise TransactionInDoubtError(
                "the transaction is decided, but its publisher was closed before it was"
                " acknowledged; write its intents again with another publisher's acknowledge()",
                intents,
            ) from error
        if appends is None:
            failed = [part.failed for part in sequences.parts.values()]
            failure = next(each.failure for each in failed if each is not None)
            assert failure is not None
            yield from self._give_up(failure)
            raise failure
        yield from self._acknowledged(sequences, intents, appends, deadline)
        self.intents = intents
        # A failed attempt may yet write an acknowledgement again: readers would take that for the
        # roll-back of what the producer has open by then.
        if all(append.last_error is None for append in appends):
            sequences.reuse_producer(is_acknowledged=True)

    def _durable(
        self, sequences: Sequences, deadline: float | None, *, always: bool
    ) -> Steps[AckIntents]:
        """Wait until all messages are durable, if that must be so before the acknowledgements."""
        if sequences.deferred:
            if not (yield sequences.deferred, seconds_left(deadline)):
                raise self._late("its journals are not listed")
            for future in sequences.deferred:
                future.result()
        intents = sequences.end()
        # In one journal alone what was published before is written before.
        if len(intents) > 1 or always:
            appends = [append for part in sequences.parts.values() for append in part.appends]
            if not (yield appends, seconds_left(deadline)):
                raise self._late("not all of its messages are acknowledged")
            for append in appends:
                append.result()
        return intents

    def _acknowledged(
        self,
        sequences: Sequences,
        intents: AckIntents,
        appends: list[PendingAppend],
        deadline: float | None,
    ) -> Steps[None]:
        try:
            in_time = yield appends, seconds_left(deadline)
        except BaseException as interruption:
            interruption.add_note(_UNDECIDED)
            raise
        late = [] if in_time else [append for append in appends if not append.done()]
        failed = [append for append in appends if append.exception() is not None]
        if not late and not failed:
            return
        lost = [part.failed for part in sequences.parts.values()]
        if len(intents) == 1 and self._save is None and lost[0] is not None:
            # The acknowledgement was after the messages, and is lost with them.
            error = lost[0].failure
            assert error is not None
            error.add_note(
                "The transaction was not acknowledged."
                if not lost[0].last_error
                else "An earlier attempt may have written the transaction as a whole."
            )
            raise error
        first = [*failed, *late][0]
        cause = first.exception() if failed else None
        why = cause or f"no answer within {self._timeout_s:g} s, and still trying"
        where = ", ".join(append.journal for append in [*failed, *late])
        if len(intents) == 1 and self._save is None and not failed:
            text = (
                f"{where}: whether the transaction is committed is not known yet ({why}): the"
                " receipts of its messages will tell"
            )
        else:
            text = (
                f"the transaction is decided, but not acknowledged everywhere: {where} ({why});"
                " committed readers of these journals do not see it yet; write its intents again"
                " with publisher.acknowledge(error.intents), or those that were saved"
            )
        raise TransactionInDoubtError(text, intents, journal=first.journal) from cause

    def _give_up(self, error: BaseException) -> Steps[None]:
        """The steps of a bad end: roll back, as far as that can be done."""
        sequences = self._sequences
        assert sequences is not None
        if self._sender.is_forked:
            return
        if not isinstance(error, Exception):
            with suppress(ClosedError):  # its publisher was closed before
                sequences.roll_back()  # an interrupted program does not wait
            return
        timeout_s = min(ROLLBACK_TIMEOUT_S, self._timeout_s or ROLLBACK_TIMEOUT_S)
        is_rolled_back, _ = yield from roll_back(sequences, timeout_s)
        if not is_rolled_back:
            error.add_note(
                "The transaction could not be rolled back everywhere. Committed readers never see"
                " its messages; they forget them in time."
            )

    def _late(self, what: str) -> ReceiptTimeoutError:
        return ReceiptTimeoutError(
            f"the transaction could not be committed within {self._timeout_s:g} s: {what}; it was"
            " rolled back: look at the brokers, or allow more time"
        )


_UNDECIDED = "The transaction was being acknowledged: it is visible, or will be soon."
