"""Receipts: journal and offsets of published messages, once they are acknowledged."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from gazette_sdk.errors import DeadlineExceededError, GazetteError
from gazette_sdk.transport.append.queue import PendingAppend


class ReceiptTimeoutError(DeadlineExceededError, TimeoutError):
    """No acknowledgement arrived in time. The publisher still tries to append the message.

    Remedy: wait for the receipt again, or check the brokers with ``gazctl journals list``.
    """


class Receipt:
    """Receipt of one message: :meth:`Publisher.publish` returns it at once.

    Plain code waits with ``receipt.result(timeout=10)``, a coroutine with ``await receipt``.

    Attributes:
        append: the append that carries the message.
        first: position of the message's frame in the append.
        last: end of the frame there.
    """

    __slots__ = ("append", "first", "last")

    def __init__(self, append: PendingAppend, first: int, last: int) -> None:
        self.append = append
        self.first = first
        self.last = last

    @property
    def length_bytes(self) -> int:
        """Length of the message's frame."""
        return self.last - self.first

    @property
    def journal(self) -> str:
        """Name of the journal.

        Raises:
            GazetteError: the message's journal is not known yet.
        """
        if not self.append.journal:
            raise GazetteError("the message is not mapped yet; wait for its receipt: `await` it")
        return self.append.journal

    @property
    def begin(self) -> int:
        """Offset of the message's first byte.

        Raises:
            GazetteError: it is not acknowledged yet, or the append failed.
        """
        return self._ended().result().commit.begin + self.first

    @property
    def end(self) -> int:
        """Offset after the message's last byte. Raises as :attr:`begin` does."""
        return self._ended().result().commit.begin + self.last

    @property
    def total_chunks(self) -> int:
        """Chunks of content of the append, which other messages shared.

        Raises:
            GazetteError: it is not acknowledged yet, or the append failed.
        """
        return self._ended().result().total_chunks

    @property
    def delayed_chunks(self) -> int:
        """Chunks which the broker delayed, to keep to the journal's rate.

        More than a few say that less should be published. Raises as :attr:`total_chunks` does.
        """
        return self._ended().result().delayed_chunks

    def done(self) -> bool:
        """Return True if the append has ended, well or badly."""
        return self.append.poll()

    def result(self, timeout: float | None = None) -> Receipt:
        """Wait until the message is acknowledged; returns the receipt itself.

        Args:
            timeout: seconds to wait; ``None`` waits until the append ends.

        Raises:
            ReceiptTimeoutError: no acknowledgement came in time (also a ``TimeoutError``).
            GazetteError: the append failed, and why.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        append = self.append
        while append.outcome is None:
            _wait(append, deadline, timeout)
            append = self.append  # a placeholder was replaced
        append.result()
        return self

    def __await__(self) -> Generator[Any, None, Receipt]:
        append = self.append
        while not append.done():
            yield from append.ended().__await__()
            append = self.append  # a placeholder was replaced
        append.result()
        return self

    def follow(self, receipt: Receipt) -> None:
        """Become the receipt of the same message, which is now mapped."""
        self.first, self.last = receipt.first, receipt.last
        self.append = receipt.append

    def _ended(self) -> PendingAppend:
        if not self.append.done():
            raise GazetteError(
                f"{self.append.journal}: the message is not acknowledged yet; wait for it by"
                " receipt.result(timeout=...) or `await receipt`",
                journal=self.append.journal or None,
            )
        return self.append

    def __repr__(self) -> str:
        append = self.append
        if not append.done():
            return f"<Receipt {append.journal or '(not mapped)'}: pending>"
        if append.exception() is not None:
            return f"<Receipt {append.journal or '(not mapped)'}: failed>"
        return f"<Receipt {self.journal}: [{self.begin}, {self.end})>"


@dataclass(frozen=True, slots=True)
class Landing:
    """Offsets of the messages of a batch in one journal.

    Attributes:
        begin: offset of the first one's first byte.
        end: offset after the last one's last byte. Others' messages may stand between.
        count: number of messages.
    """

    begin: int
    end: int
    count: int


class BatchReceipt:
    """Receipt of many messages: :meth:`Publisher.publish_batch` returns it at once.

    Plain code waits with ``receipt.result(timeout=10)``, a coroutine with ``await receipt``.

    Args:
        placeholder: future of messages that are not mapped yet.
        count: their number.
    """

    __slots__ = ("_parts", "_placeholder")

    def __init__(self, placeholder: PendingAppend | None = None, count: int = 0) -> None:
        if placeholder is not None:
            placeholder.count = count
        self._parts: list[tuple[PendingAppend, int, int, int]] = []
        self._placeholder = placeholder

    def add(self, append: PendingAppend, begin: int, end: int, count: int) -> None:
        """Note messages whose frames stand in ``append`` at ``begin`` to ``end``."""
        self._parts.append((append, begin, end, count))

    @property
    def appends(self) -> list[PendingAppend]:
        """The appends that carry the messages."""
        if self._placeholder is not None:
            return [self._placeholder]
        return list(dict.fromkeys(part[0] for part in self._parts))

    @property
    def count(self) -> int:
        """Number of messages."""
        if self._placeholder is not None:
            return self._placeholder.count
        return sum(part[3] for part in self._parts)

    @property
    def length_bytes(self) -> int:
        """Length of their frames."""
        return sum(end - begin for _, begin, end, _ in self._parts)

    @property
    def journals(self) -> tuple[str, ...]:
        """The journals of the messages, by name."""
        return tuple(sorted({part[0].journal for part in self._parts}))

    @property
    def landed(self) -> dict[str, Landing]:
        """Offsets of the messages, by journal.

        Raises:
            GazetteError: not all are acknowledged yet, or an append failed.
        """
        self._raise_unless_ended()
        found: dict[str, Landing] = {}
        for append, begin, end, count in self._parts:
            base = append.result().commit.begin
            known = found.get(append.journal, Landing(base + begin, 0, 0))
            found[append.journal] = Landing(known.begin, base + end, known.count + count)
        return dict(sorted(found.items()))

    @property
    def total_chunks(self) -> int:
        """Chunks of content of all appends. Raises as :attr:`landed` does."""
        self._raise_unless_ended()
        return sum(each.result().total_chunks for each in self.appends)

    @property
    def delayed_chunks(self) -> int:
        """Chunks which brokers delayed, to keep to the rates of journals.

        More than a few say that less should be published. Raises as :attr:`landed` does.
        """
        self._raise_unless_ended()
        return sum(each.result().delayed_chunks for each in self.appends)

    def done(self) -> bool:
        """Return True if all appends have ended, well or badly."""
        return all(append.poll() for append in self.appends)

    def result(self, timeout: float | None = None) -> BatchReceipt:
        """Wait until all messages are acknowledged; returns the receipt itself.

        Args:
            timeout: seconds to wait; ``None`` waits until the appends end.

        Raises:
            ReceiptTimeoutError: not all were acknowledged in time (also a ``TimeoutError``).
            GazetteError: an append failed, and why; messages of other journals may have been
                acknowledged.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._is_done():
            for append in self.appends:
                _wait(append, deadline, timeout)
        self._raise_failure()
        return self

    def __await__(self) -> Generator[Any, None, BatchReceipt]:
        while not self._is_done():
            for append in self.appends:
                yield from append.ended().__await__()
        self._raise_failure()
        return self

    def follow(self, receipt: BatchReceipt) -> None:
        """Become the receipt of the same messages, which are now mapped."""
        self._parts, self._placeholder = receipt._parts, None

    def _is_done(self) -> bool:
        return all(append.done() for append in self.appends)

    def _raise_failure(self) -> None:
        for append in self.appends:
            append.result()

    def _raise_unless_ended(self) -> None:
        if not self._is_done():
            raise GazetteError(
                "the batch is not acknowledged yet; wait for it by receipt.result(timeout=...) or"
                " `await receipt`"
            )
        self._raise_failure()

    def __repr__(self) -> str:
        what = f"{self.count} messages, {', '.join(self.journals) or 'no journal'}"
        if not self._is_done():
            return f"<BatchReceipt {what}: pending>"
        failed = any(append.exception() is not None for append in self.appends)
        return f"<BatchReceipt {what}: {'failed' if failed else 'acknowledged'}>"


def _wait(append: PendingAppend, deadline: float | None, timeout: float | None) -> None:
    """Wait for the end of an append.

    Raises:
        ReceiptTimeoutError: it did not end before the deadline.
    """
    left = None if deadline is None else deadline - time.monotonic()
    if append.wait(left) or timeout is None:
        return
    reason = "look at the brokers, or wait longer"
    if append.last_error is not None:
        reason = f"the last attempt failed: {append.last_error}"
    raise ReceiptTimeoutError(
        f"{append.journal or 'a message'}: no acknowledgement within {timeout:g} s, and still"
        f" trying; {reason}",
        journal=append.journal or None,
    )
