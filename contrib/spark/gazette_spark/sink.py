"""Writes: tasks publish messages that nobody sees, and the driver's commit makes them visible.

A task prepares a transaction and returns its intents. The commit decides over all of them at once,
in the transaction log of the writer, and writes them. Whatever is not decided is never visible:
there is nothing to undo, and ``abort`` may come behind a commit that failed half way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from gazette_sdk.errors import (
    ConfigurationError,
    DeadlineExceededError,
    GazetteError,
    MappingError,
)
from gazette_sdk.transport import Transport
from gazette_sdk.transport import loop as sdk_loop
from gazette_sdk.transport.listing import NO_ANSWER
from gazette_spark.connection import STOPPING, open_transport, patiently
from gazette_spark.failure import clear_errors
from gazette_spark.producers import TaskTransaction, lend_publisher
from gazette_spark.rows import RowForm, row_form
from gazette_spark.transaction_log import TransactionLog, intents_of, intents_text
from gazette_spark.transaction_records import Commit, WriterKind
from gazette_spark.write_options import UNNAMED, WriteOptions, log_name

__all__ = ["GazetteBatchWriter", "GazetteStreamWriter", "PreparedCommit"]

logger = logging.getLogger(__name__)

ANSWER_MAX_S = 10.0
"""Bound of a listing of journals. It is made again for half a minute."""

PRODUCERS_WARN = 4
"""With more producers in one journal, committed readers read it several times."""

BYTES_WARN = 1 << 30
"""Readers hold back, or read again, the messages of a transaction until its end."""


@dataclass(frozen=True)
class PreparedCommit(WriterCommitMessage):
    """Part of a transaction that one task wrote: durable, and not decided yet.

    Attributes:
        transaction: the transaction.
        intents: text of the acknowledgement intents.
        rows: number of messages.
        length_bytes: size of the rows in memory.
        is_repeated: the log had reached the transaction's number when the task began.
    """

    transaction: TaskTransaction
    intents: str
    rows: int
    length_bytes: int
    is_repeated: bool


class GazetteBatchWriter(DataSourceArrowWriter):
    """Writer of a batch. Pickled once for all tasks, and for the commit.

    Args:
        options: options of the write.

    Raises:
        GazetteError: the journals cannot be written as the options say.
    """

    def __init__(self, options: WriteOptions) -> None:
        self._options = options
        self._job = uuid.uuid4().hex
        log = log_name(options.transaction_log, options.app or UNNAMED)
        self._transaction = TaskTransaction(log, options.version, self._job)

        async def check() -> None:
            async with open_transport(options.url) as transport:
                await _form(transport, options, is_patient=False)

        with clear_errors():
            sdk_loop.run(check())

    def write(self, iterator: Iterator[pa.RecordBatch]) -> PreparedCommit:
        """Publish the rows of a task. Runs in a worker of an executor."""
        return _write(self._options, self._transaction, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Make the messages of all tasks visible. Runs on the driver."""
        kind = WriterKind.APPLICATION if self._options.app else WriterKind.UNNAMED
        _commit(self._options, kind, self._transaction, messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Do nothing: what is decided stays so, and what is not was never visible."""


class GazetteStreamWriter(DataSourceStreamArrowWriter):
    """Writer of the micro-batches of a query. The commit has another object than the tasks.

    Args:
        options: options of the write.
    """

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> PreparedCommit:
        """Publish the rows of a task. Runs in a worker of an executor."""
        with clear_errors():
            query, batch = _property("sql.streaming.queryId"), _property("streaming.sql.batchId")
            log = log_name(self._options.transaction_log, query)
        return _write(self._options, TaskTransaction(log, int(batch), ""), iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Make the messages of a micro-batch visible. Runs on the driver."""
        transactions = {each.transaction for each in _parts(messages)}
        if {each.number for each in transactions} != {batchId} or len(transactions) > 1:
            raise GazetteError(f"micro-batch {batchId} has tasks of others: {transactions}")
        [transaction] = transactions
        own = replace(transaction, job=uuid.uuid4().hex)
        _commit(self._options, WriterKind.STREAM, own, messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Do nothing: what is decided stays so, and what is not was never visible."""


def _property(name: str) -> str:
    context = TaskContext.get()
    value = context and context.getLocalProperty(name)
    if not value:
        raise ConfigurationError(
            f"gazette: the task does not know {name}, which Spark sets for streaming queries"
        )
    return str(value)


def _write(
    options: WriteOptions, transaction: TaskTransaction, batches: Iterator[pa.RecordBatch]
) -> PreparedCommit:
    rows = length_bytes = 0
    with clear_errors(), lend_publisher(options.url) as lent:
        form = sdk_loop.run(_form(lent.transport, options, is_patient=True))
        is_repeated = lent.settle(transaction)
        with lent.publisher.transaction(mapping=form.mapping) as txn:
            for batch in batches:
                if batch.num_rows:
                    with _naming_key(batch, options.key):
                        txn.publish_batch(form.messages(batch))
                    rows += batch.num_rows
                    length_bytes += batch.nbytes
            prepared = txn.prepare()
        lent.keep(transaction, prepared)
    return PreparedCommit(
        transaction, intents_text(prepared.intents), rows, length_bytes, is_repeated
    )


@contextlib.contextmanager
def _naming_key(batch: pa.RecordBatch, column: str) -> Iterator[None]:
    """Let the error of a row without a key name the column."""
    try:
        yield
    except MappingError as error:
        if column and batch.column(column).null_count:
            error.add_note(f"the key is the column {column!r}: fill its nulls, or filter them out")
        raise


async def _form(transport: Transport, options: WriteOptions, *, is_patient: bool) -> RowForm:
    """Return the form of messages.

    Args:
        transport: how to reach the journals.
        options: options of the write.
        is_patient: wait for brokers that are started again.

    Raises:
        GazetteError: no broker answered in time, or the journals cannot be written.
    """

    async def form() -> RowForm:
        try:
            async with asyncio.timeout(ANSWER_MAX_S):
                return await row_form(transport, options)
        except TimeoutError:
            raise DeadlineExceededError(
                f"{options.url} did not answer within {ANSWER_MAX_S:g} s; check the broker and its"
                " log"
            ) from None

    return await patiently(form, NO_ANSWER if is_patient else STOPPING)


def _commit(
    options: WriteOptions,
    kind: WriterKind,
    transaction: TaskTransaction,
    messages: Sequence[WriterCommitMessage | None],
) -> None:
    parts = _parts(messages)
    log = transaction.log
    _warn(log, parts)
    is_repeated = all(part.is_repeated for part in parts)
    commit = Commit(kind, transaction.number, transaction.job, is_repeated=is_repeated)

    async def work() -> None:
        async with open_transport(options.url) as transport:
            await TransactionLog(transport, log, options.journals).commit(
                commit,
                [part.intents for part in parts if part.rows],
                sum(part.rows for part in parts),
            )

    with clear_errors():
        sdk_loop.run(work())


def _parts(messages: Sequence[WriterCommitMessage | None]) -> list[PreparedCommit]:
    """Return the parts of all tasks.

    Raises:
        GazetteError: one is missing. Spark commits only what all tasks have written.
    """
    parts = [each for each in messages if isinstance(each, PreparedCommit)]
    if not parts or len(parts) != len(messages):
        raise GazetteError("Spark commits a job of which tasks have failed; write it again")
    return parts


def _warn(log: str, parts: Sequence[PreparedCommit]) -> None:
    """Warn of transactions which make readers slow."""
    counts = Counter(journal for part in parts for journal in intents_of(part.intents))
    journal, producers = max(counts.items(), key=lambda item: item[1], default=("", 0))
    if producers > PRODUCERS_WARN:
        logger.warning(
            "%d tasks wrote %s in one transaction of %s, and committed readers read the journal"
            " up to as many times; let one task write it:"
            " gazette_spark.partition_by_journal(df, journals, key)",
            producers,
            journal,
            log,
        )
    length_bytes = sum(part.length_bytes for part in parts)
    if length_bytes > BYTES_WARN:
        logger.warning(
            "a transaction of %s has %d MiB, and committed readers wait for its end; write"
            " transactions of less than 1 GiB, each with its txnVersion",
            log,
            length_bytes >> 20,
        )
