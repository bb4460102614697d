"""The phase *publish*: as many messages as will go, each acknowledged."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeAlias

from gazette_sdk.cli.bench.content import Messages
from gazette_sdk.cli.bench.display import Display
from gazette_sdk.cli.bench.report import Throughput
from gazette_sdk.cli.bench.settings import BenchSettings
from gazette_sdk.cli.bench.site import Site
from gazette_sdk.cli.bench.verify import Ledger, journal_of
from gazette_sdk.errors import GazetteError
from gazette_sdk.message import Publisher
from gazette_sdk.message.publishing.receipt import BatchReceipt, Receipt

__all__ = ["Sending", "open_publisher", "publish"]

BLOCK_MESSAGES = 1000
"""Messages between two looks at receipts and at the clock."""

PENDING_BYTES = 32 << 20
"""Messages of so many bytes may wait for their acknowledgement. The publisher would take more;
here it is never full, so that every wait is a wait for a receipt, which has a bound."""

FRAME_BYTES = 64
"""What a message's UUID adds to its length, roughly."""

ACKNOWLEDGED_TIMEOUT_S = 30.0
"""A message that is not acknowledged for so long ends the run."""

CLOSE_TIMEOUT_S = 1.0

_Receipts: TypeAlias = Sequence[Receipt] | BatchReceipt


def publish(settings: BenchSettings, site: Site, ledger: Ledger, display: Display) -> Throughput:
    """Publish, until all is acknowledged.

    Raises:
        GazetteError: a message could not be published, or was not acknowledged in time.
    """
    length_before = ledger.length_bytes
    size = settings.batch if settings.mode == "publish_batch" else BLOCK_MESSAGES
    begin, end = ledger.next_number, ledger.next_number + settings.messages
    display.begin("Publishing", settings.messages)
    with open_publisher(site) as publisher:
        sending = Sending(publisher, ledger, Messages(settings.size), settings.size)
        send = sending.batch if settings.mode == "publish_batch" else sending.each
        begun = time.perf_counter()
        while (left := end - ledger.next_number) > 0:
            send(ledger.take(min(size, left)))
            display.advance(ledger.acknowledged - begin)
        sending.finish()
        took = time.perf_counter() - begun
    display.advance(settings.messages)
    return Throughput(settings.messages, ledger.length_bytes - length_before, took)


@contextmanager
def open_publisher(site: Site) -> Iterator[Publisher]:
    """A publisher of messages to their journals."""
    journals = site.journals
    publisher = Publisher(
        lambda message: journal_of(message["n"], journals), transport=site.transport
    )
    try:
        yield publisher
    except BaseException:
        # What is told of is why it ends, and not what else fails for that reason.
        with suppress(GazetteError):
            publisher.close(timeout=CLOSE_TIMEOUT_S)
        raise
    publisher.close(timeout=ACKNOWLEDGED_TIMEOUT_S)


class Sending:
    """Messages on their way, in the order of their numbers.

    Args:
        publisher: where they go.
        ledger: told of acknowledgements.
        messages: what they hold.
        size: bytes of a message.
    """

    def __init__(self, publisher: Publisher, ledger: Ledger, messages: Messages, size: int) -> None:
        self._publisher = publisher
        self._ledger = ledger
        self._message = messages.message
        self._pending_max = max(PENDING_BYTES // (size + FRAME_BYTES), 1)
        self._pending_count = 0
        self._pending: deque[tuple[range, _Receipts]] = deque()

    def each(self, numbers: range) -> None:
        """Publish messages one by one. May wait for earlier ones."""
        publish = self._publisher.publish
        self._note(numbers, [publish(message) for message in map(self._message, numbers)])

    def batch(self, numbers: range) -> None:
        """Publish messages as a batch. May wait for earlier ones."""
        self._note(numbers, self._publisher.publish_batch(list(map(self._message, numbers))))

    def _note(self, numbers: range, receipts: _Receipts) -> None:
        self._pending.append((numbers, receipts))
        self._pending_count += len(numbers)
        while self._pending and (
            self._pending_count > self._pending_max or _is_done(self._pending[0][1])
        ):
            self._settle()

    def finish(self) -> None:
        """Wait until all is acknowledged.

        Raises:
            GazetteError: the first failure, or a wait that took too long.
        """
        while self._pending:
            self._settle()
        self._publisher.flush(ACKNOWLEDGED_TIMEOUT_S)

    def _settle(self) -> None:
        """Wait for the oldest ones."""
        numbers, receipts = self._pending.popleft()
        self._pending_count -= len(numbers)
        if isinstance(receipts, BatchReceipt):
            landed = receipts.result(ACKNOWLEDGED_TIMEOUT_S).landed
            ends = [(journal, landing.end) for journal, landing in landed.items()]
        else:
            # Those of one journal are acknowledged in order: its last one stands for all.
            last = receipts[-len(self._ledger.journals) :]
            for receipt in last:
                receipt.result(ACKNOWLEDGED_TIMEOUT_S)
            ends = [(receipt.journal, receipt.end) for receipt in last]
        self._ledger.acknowledge(numbers, ends)


def _is_done(receipts: _Receipts) -> bool:
    if isinstance(receipts, BatchReceipt):
        return receipts.done()
    return receipts[-1].done()
