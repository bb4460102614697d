"""Phase *publish*: publish messages as fast as possible."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeAlias

from gazette_sdk.cli.bench.report import Throughput
from gazette_sdk.cli.bench.site import Messages, Site
from gazette_sdk.cli.bench.verify import Ledger, journal_of
from gazette_sdk.cli.formats import Progress
from gazette_sdk.cli.settings import BenchSettings
from gazette_sdk.errors import GazetteError
from gazette_sdk.message import Publisher
from gazette_sdk.message.receipt import BatchReceipt, Receipt

BLOCK_MESSAGES = 1000
"""Number of messages between two checks of receipts."""

PENDING_BYTES = 32 << 20
"""Limit of unacknowledged bytes. It is below the publisher's own, so that this program waits for
receipts, with a timeout, and never for the publisher."""

FRAME_BYTES = 64
"""Approximate length of a message's UUID in its journal."""

ACKNOWLEDGED_TIMEOUT_S = 30.0
"""A message without an acknowledgement for this long ends the run."""

CLOSE_TIMEOUT_S = 1.0

_Receipts: TypeAlias = Sequence[Receipt] | BatchReceipt


def publish(settings: BenchSettings, site: Site, ledger: Ledger, progress: Progress) -> Throughput:
    """Publish messages, and wait until all are acknowledged.

    Raises:
        GazetteError: a message could not be published, or was not acknowledged in time.
    """
    length_before = ledger.length_bytes
    size = settings.batch if settings.mode == "publish_batch" else BLOCK_MESSAGES
    begin, end = ledger.next_number, ledger.next_number + settings.messages
    progress.begin("Publishing", settings.messages)
    with open_publisher(site) as publisher:
        sending = Sending(publisher, ledger, Messages(settings.size), settings.size)
        send = sending.batch if settings.mode == "publish_batch" else sending.each
        begun = time.perf_counter()
        while (left := end - ledger.next_number) > 0:
            send(ledger.take(min(size, left)))
            progress.advance(ledger.acknowledged - begin)
        sending.finish()
        took = time.perf_counter() - begun
    progress.advance(settings.messages)
    return Throughput(settings.messages, ledger.length_bytes - length_before, took)


@contextmanager
def open_publisher(site: Site) -> Iterator[Publisher]:
    """Open a publisher of messages to their journals."""
    journals = site.journals
    publisher = Publisher(
        lambda message: journal_of(message["n"], journals), transport=site.transport
    )
    try:
        yield publisher
    except BaseException:
        # Report the first error, and not the failures that follow from it.
        with suppress(GazetteError):
            publisher.close(timeout=CLOSE_TIMEOUT_S)
        raise
    publisher.close(timeout=ACKNOWLEDGED_TIMEOUT_S)


class Sending:
    """Unacknowledged messages, in the order of their numbers.

    Args:
        publisher: publishes the messages.
        ledger: records acknowledgements.
        messages: content of the messages.
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
        self._add(numbers, [publish(message) for message in map(self._message, numbers)])

    def batch(self, numbers: range) -> None:
        """Publish messages as a batch. May wait for earlier ones."""
        self._add(numbers, self._publisher.publish_batch(list(map(self._message, numbers))))

    def _add(self, numbers: range, receipts: _Receipts) -> None:
        self._pending.append((numbers, receipts))
        self._pending_count += len(numbers)
        while self._pending and (
            self._pending_count > self._pending_max or _is_done(self._pending[0][1])
        ):
            self._settle()

    def finish(self) -> None:
        """Wait until all messages are acknowledged.

        Raises:
            GazetteError: the first failure, or a wait that took too long.
        """
        while self._pending:
            self._settle()
        self._publisher.flush(ACKNOWLEDGED_TIMEOUT_S)

    def _settle(self) -> None:
        """Wait for the acknowledgement of the oldest messages."""
        numbers, receipts = self._pending.popleft()
        self._pending_count -= len(numbers)
        if isinstance(receipts, BatchReceipt):
            landed = receipts.result(ACKNOWLEDGED_TIMEOUT_S).landed
            ends = [(journal, landing.end) for journal, landing in landed.items()]
        else:
            # Messages of one journal are acknowledged in order: wait for its last one.
            last = receipts[-len(self._ledger.journals) :]
            for receipt in last:
                receipt.result(ACKNOWLEDGED_TIMEOUT_S)
            ends = [(receipt.journal, receipt.end) for receipt in last]
        self._ledger.acknowledge(numbers, ends)


def _is_done(receipts: _Receipts) -> bool:
    if isinstance(receipts, BatchReceipt):
        return receipts.done()
    return receipts[-1].done()
