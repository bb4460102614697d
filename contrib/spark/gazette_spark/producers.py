"""Publishers of a Python worker, and the producers that they lend to its tasks.

Readers keep a state for each producer, so a worker uses its producers again. A producer whose last
transaction may yet be acknowledged, or acknowledged once more, must not be used: readers would
commit or roll back what it has open by then. So the transactions that were prepared stay here until
the log of their writer decides about them; where it does not, the producer is never used again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from gazette_sdk import Publisher
from gazette_sdk.errors import GazetteError, JournalNotFoundError
from gazette_sdk.message import PreparedTransaction
from gazette_sdk.transport import Transport
from gazette_sdk.transport import loop as sdk_loop
from gazette_spark.content import open_transport
from gazette_spark.transaction_log import Fate, TransactionLog, fate_of, intents_text

PREPARED_MAX = 256
"""Prepared transactions whose fate a worker waits for; producers of older ones are given up."""

SEARCH_BYTES_MAX = 4 << 20
"""Bound of a task's search of a log for fates; producers of transactions before it are given up."""

CLOSE_TIMEOUT_S = 5.0
"""Bound of the wait for what the publisher of a failed task has not sent."""


@dataclass(frozen=True, slots=True)
class TaskTransaction:
    """Transaction of which a task's messages are a part.

    Attributes:
        log: name of its writer's log.
        number: its number; None if its commit takes the next one.
        job: id of its commit; empty where the number does.
    """

    log: str
    number: int | None
    job: str


class WorkerPublisher:
    """Publisher of a worker process. One task uses it at a time.

    Args:
        url: URL of the broker.

    Attributes:
        publisher: the publisher.
        transport: its transport.
    """

    def __init__(self, url: str) -> None:
        self.transport: Transport = open_transport(url)
        self.publisher = Publisher(transport=self.transport)
        self._prepared: list[tuple[TaskTransaction, PreparedTransaction]] = []

    def keep(self, transaction: TaskTransaction, prepared: PreparedTransaction) -> None:
        """Keep a prepared transaction until its fate is known."""
        if prepared.intents:
            self._prepared = [*self._prepared, (transaction, prepared)][-PREPARED_MAX:]
        else:
            self.publisher.settle(prepared, acknowledged=True)

    def settle(self, current: TaskTransaction) -> bool:
        """Settle the earlier transactions of a writer, as far as their fate is known.

        Args:
            current: the transaction that begins.

        Returns:
            True if the writer's log has reached its number already: it is written once more.

        Raises:
            GazetteError: the writer's log cannot be read.
        """
        past = [each for each in self._prepared if each[0].log == current.log != ""]
        past = [each for each in past if each[0] != current]
        if not past and current.number is None:
            return False
        self._prepared = [each for each in self._prepared if each not in past]
        numbers = [number for each, _ in past if (number := each.number) is not None]
        log = TransactionLog(self.transport, current.log, "")
        try:
            oldest = min(numbers, default=None)
            tail = sdk_loop.run(log.read(oldest, bytes_max=SEARCH_BYTES_MAX))
        except JournalNotFoundError:  # nothing was ever decided
            return False
        for transaction, prepared in past:
            text = intents_text(prepared.intents)
            fate = fate_of(tail, transaction.number, transaction.job, text)
            if fate is not Fate.UNKNOWN:
                self.publisher.settle(prepared, acknowledged=fate is Fate.ACKNOWLEDGED)
        return tail.has_reached(current.number)

    def close(self) -> None:
        """Close the publisher; what it has not sent is given up."""
        with suppress(GazetteError):  # the task's own error is raised
            self.publisher.close(CLOSE_TIMEOUT_S)
        sdk_loop.run(self.transport.aclose())


_idle: dict[str, WorkerPublisher] = {}
"""Publishers of this process which no task uses, by URL."""


@contextmanager
def lend_publisher(url: str) -> Iterator[WorkerPublisher]:
    """Lend the worker's publisher to a task. After a failure the next task has another one."""
    lent = _idle.pop(url, None) or WorkerPublisher(url)
    try:
        yield lent
    except BaseException:
        lent.close()
        raise
    _idle[url] = lent
