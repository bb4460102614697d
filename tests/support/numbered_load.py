"""Numbered messages that are published, read as they come, and counted afterwards."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from operator import itemgetter

from gazette_sdk import Publisher, Reader, mapping
from gazette_sdk.errors import ClosedError, GazetteError, OffsetNotYetAvailableError

TIMEOUT_S = 90.0

BYTES_PER_S = 20_000_000
MESSAGE_BYTES = 10_000


class Load:
    """Numbered messages to the partitions of a topic, at a rate or as fast as they are taken.

    Args:
        transport: of its publisher.
        bytes_per_s: the rate.

    Attributes:
        published: number of messages.
        seconds: for which they were published.
    """

    def __init__(self, transport, bytes_per_s: int = BYTES_PER_S) -> None:
        self.published = 0
        self.seconds = 0.0
        self.error: GazetteError | None = None
        self._transport = transport
        self._bytes_per_s = bytes_per_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._publish)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Publish no more, and wait until all is acknowledged or has failed."""
        self._stopping.set()
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()

    def wait_for(self, more: int) -> None:
        """Wait until so many more messages are published. Bounded."""
        wanted, deadline = self.published + more, time.monotonic() + TIMEOUT_S
        while self.published < wanted and self.error is None:
            assert time.monotonic() < deadline
            self._stopping.wait(0.01)

    def _publish(self) -> None:
        text = "x" * MESSAGE_BYTES
        by_number = mapping.modulo("topic=load", key=itemgetter("n"))
        begin = time.monotonic()
        try:
            with Publisher(mapping=by_number, transport=self._transport) as publisher:
                while not self._stopping.wait(0.01):
                    due = (time.monotonic() - begin) * self._bytes_per_s / MESSAGE_BYTES
                    last = None
                    while self.published < due and not self._stopping.is_set():
                        last = publisher.publish({"n": self.published, "text": text})
                        self.published += 1
                    if last is not None:
                        last.result(timeout=TIMEOUT_S)
        except GazetteError as error:
            self.error = error
        self.seconds = time.monotonic() - begin

    def __str__(self) -> str:
        rate = self.published * MESSAGE_BYTES / max(self.seconds, 1e-9) / 1e6
        return f"{self.published} messages in {self.seconds:.1f} s, {rate:.1f} MB/s"


class Tail:
    """Reader in a thread, which follows the write heads of the topic.

    Attributes:
        counts: how often each number was read.
    """

    def __init__(self, transport) -> None:
        self.counts: Counter[int] = Counter()
        self.error: GazetteError | None = None
        self._reader = Reader(dict, "topic=load", transport=transport, block=True)
        self._has_more = threading.Condition()
        self._thread = threading.Thread(target=self._read)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()

    def wait_for(self, count: int) -> None:
        """Wait until so many messages were read. Bounded."""
        with self._has_more:
            assert self._has_more.wait_for(
                lambda: self.error is not None or self.counts.total() >= count, TIMEOUT_S
            ), f"{self.counts.total()} of {count} messages were read"

    def _read(self) -> None:
        try:
            for envelope in self._reader:
                with self._has_more:
                    self.counts[envelope.message["n"]] += 1
                    self._has_more.notify()
        except ClosedError:
            pass
        except GazetteError as error:
            with self._has_more:
                self.error = error
                self._has_more.notify()


def numbers_of(transport, count: int) -> Sequence[int]:
    """Return the numbers of the messages in the topic, in order, once there are so many.

    A reader that does not wait may miss what a broker stored while it drained, until the others
    have listed it.
    """
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        missing = ""
        try:
            found = numbers_now(transport)
        except OffsetNotYetAvailableError as error:
            found, missing = (), f": {error}"
        if len(found) >= count or time.monotonic() > deadline:
            return sorted(found)
        print(f"{len(found)} of {count} messages are available yet{missing}")


def numbers_now(transport) -> Sequence[int]:
    """Return the numbers that are available now; those of each partition must be in order."""
    found: dict[str, list[int]] = {}
    for envelope in Reader(dict, "topic=load", transport=transport, block=False):
        found.setdefault(envelope.journal, []).append(envelope.message["n"])
    assert all(numbers == sorted(numbers) for numbers in found.values())
    return [number for numbers in found.values() for number in numbers]
