"""Receipts: where published messages landed, once they have."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from gazette_sdk.errors import GazetteError
from gazette_sdk.message.publishing.batch import (
    Batch,
    ReceiptTimeoutError,
    ended,
    wait_for,
)

__all__ = ["Batch", "BatchReceipt", "Landing", "Receipt", "ReceiptTimeoutError"]


class Receipt:
    """What :meth:`Publisher.publish` returns at once; tells later where the message landed.

    Plain code waits with ``receipt.result(timeout=10)``, a coroutine with ``await receipt``.

    Attributes:
        batch: the batch that carries the message.
        first: where the message's frame begins in the batch.
        last: where it ends there.
    """

    __slots__ = ("batch", "first", "last")

    def __init__(self, batch: Batch, first: int, last: int) -> None:
        self.batch = batch
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
        if not self.batch.journal:
            raise GazetteError("the message is not mapped yet; wait for its receipt: `await` it")
        return self.batch.journal

    @property
    def begin(self) -> int:
        """Offset of the message's first byte.

        Raises:
            GazetteError: it is not acknowledged yet, or the append failed.
        """
        return self._base() + self.first

    @property
    def end(self) -> int:
        """Offset behind the message's last byte. Raises as :attr:`begin` does."""
        return self._base() + self.last

    @property
    def total_chunks(self) -> int:
        """How many chunks of content the append had, which other messages shared.

        Raises:
            GazetteError: it is not acknowledged yet, or the append failed.
        """
        self._base()
        return self.batch.total_chunks

    @property
    def delayed_chunks(self) -> int:
        """How many of these the broker held back, to keep to the journal's rate.

        More than a few say that less should be published. Raises as :attr:`total_chunks` does.
        """
        self._base()
        return self.batch.delayed_chunks

    def done(self) -> bool:
        """Whether the append has ended, well or badly."""
        batch = self.batch
        if batch.outcome is None and (claim := batch.claim) is not None:
            claim.call_in()
        return batch.outcome is not None

    def result(self, timeout: float | None = None) -> Receipt:
        """Wait until the message is acknowledged; returns the receipt itself.

        Args:
            timeout: seconds to wait; ``None`` waits until the append ends.

        Raises:
            ReceiptTimeoutError: no acknowledgement came in time (also a ``TimeoutError``).
            GazetteError: the append failed, and why.
        """
        batch = self.batch
        if batch.outcome is None:
            deadline = None if timeout is None else time.monotonic() + timeout
            claim = batch.claim
            if claim is not None:
                claim.wait(batch, timeout)
            while self.batch.outcome is None:
                wait_for(self.batch, deadline, timeout)
        self.batch.result()
        return self

    def __await__(self) -> Generator[Any, None, Receipt]:
        while self.batch.outcome is None:
            claim = self.batch.claim
            if claim is not None:
                claim.call_in()
            # Shielded: a coroutine that gives up waiting takes nothing from others.
            yield from asyncio.shield(asyncio.wrap_future(self.batch.done)).__await__()
        self.batch.result()
        return self

    def follow(self, receipt: Receipt) -> None:
        """Become the receipt of the same message, which is now mapped."""
        placeholder = self.batch
        self.first, self.last = receipt.first, receipt.last
        self.batch = receipt.batch
        placeholder.settle(0)

    def fail(self, error: BaseException) -> None:
        """The message could not be mapped or encoded."""
        self.batch.settle(error)

    def _base(self) -> int:
        if self.batch.outcome is None:
            raise GazetteError(
                f"{self.batch.journal}: the message is not acknowledged yet; wait for it by"
                " receipt.result(timeout=...) or `await receipt`",
                journal=self.batch.journal or None,
            )
        return self.batch.result()

    def __repr__(self) -> str:
        if not self.batch.is_done:
            return f"<Receipt {self.batch.journal or '(not mapped)'}: pending>"
        if self.batch.error is not None:
            return f"<Receipt {self.batch.journal or '(not mapped)'}: failed>"
        return f"<Receipt {self.journal}: [{self.begin}, {self.end})>"


@dataclass(frozen=True, slots=True)
class Landing:
    """Where the messages of a batch landed in one journal.

    Attributes:
        begin: offset of the first one's first byte.
        end: offset behind the last one's last byte. Others' messages may stand between.
        count: how many there are.
    """

    begin: int
    end: int
    count: int


class BatchReceipt:
    """What :meth:`Publisher.publish_batch` returns: one receipt for all its messages.

    Plain code waits with ``receipt.result(timeout=10)``, a coroutine with ``await receipt``.
    """

    __slots__ = ("_parts", "_placeholder")

    def __init__(self) -> None:
        self._parts: list[tuple[Batch, int, int, int]] = []
        self._placeholder: Batch | None = None

    def add(self, batch: Batch, begin: int, end: int, count: int) -> None:
        """Note a part: messages which stand in ``batch`` at ``begin`` to ``end``."""
        self._parts.append((batch, begin, end, count))

    @property
    def batches(self) -> list[Batch]:
        """The batches that carry the messages."""
        if self._placeholder is not None:
            return [self._placeholder]
        return list(dict.fromkeys(part[0] for part in self._parts))

    @property
    def count(self) -> int:
        """How many messages there are."""
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
        """Where the messages landed, by journal.

        Raises:
            GazetteError: not all are acknowledged yet, or an append failed.
        """
        self._raise_unless_ended()
        found: dict[str, Landing] = {}
        for batch, begin, end, count in self._parts:
            base = batch.result()
            known = found.get(batch.journal, Landing(base + begin, 0, 0))
            found[batch.journal] = Landing(known.begin, base + end, known.count + count)
        return dict(sorted(found.items()))

    @property
    def total_chunks(self) -> int:
        """How many chunks of content all their appends had. Raises as :attr:`landed` does."""
        self._raise_unless_ended()
        return sum(batch.total_chunks for batch in self.batches)

    @property
    def delayed_chunks(self) -> int:
        """How many of these brokers held back, to keep to the rates of journals.

        More than a few say that less should be published. Raises as :attr:`landed` does.
        """
        self._raise_unless_ended()
        return sum(batch.delayed_chunks for batch in self.batches)

    def done(self) -> bool:
        """Whether all appends have ended, well or badly."""
        return all(batch.is_done for batch in self.batches)

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
        while not self.done():
            for batch in self.batches:
                if not batch.is_done:
                    wait_for(batch, deadline, timeout)
        self._raise_failure()
        return self

    def __await__(self) -> Generator[Any, None, BatchReceipt]:
        while not self.done():
            for batch in self.batches:
                if not batch.is_done:
                    yield from ended(batch.done).__await__()
        self._raise_failure()
        return self

    def hold(self, count: int) -> Batch:
        """The messages are not mapped yet: a batch which stands for theirs till then."""
        self._placeholder = Batch("")
        self._placeholder.count = count
        return self._placeholder

    def follow(self, receipt: BatchReceipt) -> None:
        """Become the receipt of the same messages, which are now mapped."""
        placeholder = self._placeholder
        assert placeholder is not None
        self._parts, self._placeholder = receipt._parts, None
        placeholder.settle(0)

    def fail(self, error: BaseException) -> None:
        """The messages could not be mapped or encoded."""
        assert self._placeholder is not None
        self._placeholder.settle(error)

    def _raise_failure(self) -> None:
        for batch in self.batches:
            batch.result()

    def _raise_unless_ended(self) -> None:
        if not self.done():
            raise GazetteError(
                "the batch is not acknowledged yet; wait for it by receipt.result(timeout=...) or"
                " `await receipt`"
            )
        self._raise_failure()

    def __repr__(self) -> str:
        what = f"{self.count} messages, {', '.join(self.journals) or 'no journal'}"
        if not self.done():
            return f"<BatchReceipt {what}: pending>"
        failed = any(batch.error is not None for batch in self.batches)
        return f"<BatchReceipt {what}: {'failed' if failed else 'acknowledged'}>"
