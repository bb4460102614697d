"""Transactions: messages of several journals which become visible together, or not at all.

Messages are written when they are published, but stay invisible to committed readers until an
acknowledgement follows in their journal. The order in which a transaction ends is what makes it
atomic (message section 11): all messages are durable, then the acknowledgements are built and,
if that is wanted, stored, and only then they are written. From the moment they are stored the
transaction is decided, whatever happens to this process.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeAlias

from gazette_sdk.errors import ClosedError, ConfigurationError, GazetteError
from gazette_sdk.message.publishing.bulk import publish_batch
from gazette_sdk.message.publishing.intents import AckIntents
from gazette_sdk.message.publishing.producer import Sequences, ended_error
from gazette_sdk.message.publishing.receipt import BatchReceipt, Receipt, ReceiptTimeoutError
from gazette_sdk.message.publishing.sender import AnyMapping, Sender
from gazette_sdk.transport.append.pending import PendingAppend, all_ended

__all__ = ["Transaction", "TransactionInDoubtError"]

ROLLBACK_TIMEOUT_S = 10.0
"""Bound of the wait for the roll-back at the end of a failed block. Readers are right without it:
what is not acknowledged is never visible. It lets them forget pending messages sooner."""

_Wait: TypeAlias = tuple[list[PendingAppend], float | None] | Awaitable[object]
"""Wait of the end of a transaction: for appends, txn a time; or for the result of ``save``."""


class TransactionInDoubtError(GazetteError):
    """A transaction is decided, or may be, but is not acknowledged in every journal.

    Remedy: if its ``intents`` were saved, or need not be, give them to ``publisher.acknowledge()``,
    which completes the transaction. Otherwise do nothing: no committed reader delivers it.

    Attributes:
        intents: its acknowledgements. Writing them again, with
            :meth:`~gazette_sdk.message.publishing.publisher.Publisher.acknowledge`, completes it.
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
        intents: its acknowledgements, once the block has ended well; empty before.
    """

    def __init__(
        self,
        sender: Sender,
        mapping: AnyMapping | None,
        save: Callable[[AckIntents], object] | None,
        timeout_s: float | None,
    ) -> None:
        self.intents = AckIntents()
        self._sender = sender
        self._mapping = mapping
        self._save = save
        self._timeout_s = timeout_s
        self._sequences: Sequences | None = None

    @property
    def journals(self) -> tuple[str, ...]:
        """The journals it has published to, in the order of first use."""
        return () if self._sequences is None else tuple(self._sequences.parts)

    def publish(self, message: Any, *, mapping: AnyMapping | None = None) -> Receipt:
        """Publish a message as part of the transaction. See :meth:`Publisher.publish`.

        Its receipt tells when it is durable; it is visible only once the block has ended.

        Raises:
            ClosedError: the transaction has ended, or the publisher is closed.
            Exception: as :meth:`Publisher.publish`; or what failed before in the same journal.
        """
        return self._sender.publish(
            message, self._mapping if mapping is None else mapping, self._open()
        )

    def publish_batch(self, messages: Any, *, mapping: AnyMapping | None = None) -> BatchReceipt:
        """Publish many messages as part of the transaction. See :meth:`Publisher.publish_batch`.

        Raises:
            ClosedError: the transaction has ended, or the publisher is closed.
            Exception: as :meth:`Publisher.publish_batch`; or what failed before.
        """
        return publish_batch(
            self._sender, messages, self._mapping if mapping is None else mapping, self._open()
        )

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
        steps = self._commit() if error is None else self._give_up(error)
        try:
            wait = next(steps)
            while True:
                try:
                    outcome = _wait(wait)
                except BaseException as interruption:  # noqa: BLE001 - the steps raise it on
                    wait = steps.throw(interruption)
                else:
                    wait = steps.send(outcome)
        except StopIteration:
            pass

    async def __aenter__(self) -> Self:
        self._begin()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        steps = self._commit() if error is None else self._give_up(error)
        try:
            wait = next(steps)
            while True:
                try:
                    outcome = await _awaited(wait)
                except BaseException as interruption:  # noqa: BLE001 - the steps raise it on
                    wait = steps.throw(interruption)
                else:
                    wait = steps.send(outcome)
        except StopIteration:
            pass

    def _begin(self) -> None:
        if self._sequences is not None:
            raise ended_error()
        self._sequences = Sequences(self._sender)

    # --------------------------------------------------------------- its end

    def _commit(self) -> Generator[_Wait, Any, None]:
        """The steps of a good end. Each yields what it waits for."""
        sequences = self._sequences
        assert sequences is not None
        if self._sender.is_forked:
            raise self._sender.closed_error()
        deadline = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        try:
            intents = yield from self._durable(sequences, deadline)
        except BaseException as error:
            yield from self._give_up(error)
            raise
        # From here on its producer is used again only if all goes well.
        if intents and self._save is not None:
            saved = self._save(intents)
            if inspect.isawaitable(saved):
                yield saved
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
        sequences.reuse_producer(is_acknowledged=True)

    def _durable(
        self, sequences: Sequences, deadline: float | None
    ) -> Generator[_Wait, Any, AckIntents]:
        """See that all messages are durable, if that must be so before the acknowledgements."""
        if sequences.deferred:
            if not (yield sequences.deferred, _left(deadline)):
                raise self._late("its journals are not listed")
            for future in sequences.deferred:
                future.result()
        intents = sequences.end()
        # In one journal alone what was published before is written before.
        if len(intents) > 1 or self._save is not None:
            appends = [append for part in sequences.parts.values() for append in part.appends]
            if not (yield appends, _left(deadline)):
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
    ) -> Generator[_Wait, Any, None]:
        try:
            in_time = yield appends, _left(deadline)
        except BaseException as interruption:
            interruption.add_note(_UNDECIDED)
            raise
        late = [] if in_time else [append for append in appends if not append.done()]
        failed = [append for append in appends if append.exception() is not None]
        if not late and not failed:
            return
        lost = [part.failed for part in sequences.parts.values()]
        if len(intents) == 1 and self._save is None and lost[0] is not None:
            # The acknowledgement was behind the messages, and is lost with them.
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

    def _give_up(self, error: BaseException) -> Generator[_Wait, Any, None]:
        """The steps of a bad end: roll back, as far as that can be done."""
        sequences = self._sequences
        assert sequences is not None
        if self._sender.is_forked:
            return
        appends: list[PendingAppend] = []
        with suppress(ClosedError):  # what it had not sent was given up by then
            appends = sequences.roll_back()
        if not isinstance(error, Exception):
            return  # an interrupted program does not wait
        timeout_s = min(ROLLBACK_TIMEOUT_S, self._timeout_s or ROLLBACK_TIMEOUT_S)
        in_time = yield appends, timeout_s
        parts = sequences.parts.values()
        if not in_time or any(append.exception() is not None for append in appends):
            error.add_note(
                "The transaction could not be rolled back everywhere. Committed readers never see"
                " its messages; they forget them in time."
            )
            return
        # A failed attempt may yet write its messages, which another transaction must not commit.
        if len(appends) == len(parts) and not any(part.is_in_doubt for part in parts):
            sequences.reuse_producer(is_acknowledged=False)

    def _late(self, what: str) -> ReceiptTimeoutError:
        return ReceiptTimeoutError(
            f"the transaction could not be committed within {self._timeout_s:g} s: {what}; it was"
            " rolled back: look at the brokers, or allow more time"
        )


_UNDECIDED = "The transaction was being acknowledged: it is visible, or will be soon."


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _wait(wait: _Wait) -> bool:
    if isinstance(wait, tuple):
        appends, timeout_s = wait
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for append in appends:
            append.wait(_left(deadline))
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
    await asyncio.ensure_future(wait) if not inspect.iscoroutine(wait) else await wait
    return True
