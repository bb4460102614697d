"""Writes: tasks publish messages that no one sees, and the driver's commit makes them visible.

A task prepares a transaction and returns its intents. The commit decides over all of them at once,
in the transaction log of the writer, and writes them. Whatever is not decided is never visible:
there is nothing to undo, and ``abort`` may come after a commit that failed half way.

Readers keep a state for each producer, so a worker uses its producers again. A producer whose last
transaction may yet be acknowledged, or acknowledged once more, must not be used: readers would
commit or roll back what it has open by then. So the transactions that were prepared stay in their
:class:`WorkerPublisher` until the log of their writer decides about them; where it does not, the
producer is never used again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import functions as sf
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.pandas.functions import arrow_udf

from gazette_sdk import Publisher
from gazette_sdk.errors import (
    ConfigurationError,
    DeadlineExceededError,
    GazetteError,
    JournalNotFoundError,
    MappingError,
    ValidationError,
)
from gazette_sdk.framing.base import framing_for
from gazette_sdk.message import CsvRecord, PreparedTransaction, mapping
from gazette_sdk.message.kinds.json import KEY
from gazette_sdk.message.mapping import Partitions, SelectorMapping
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.labels import CONTENT_TYPE, value_of
from gazette_sdk.transport import Transport
from gazette_sdk.transport import loop as sdk_loop
from gazette_sdk.transport.listing import NO_ANSWER, list_journals
from gazette_spark.options import clear_errors, load_message, open_transport
from gazette_spark.planning import STOPPING, list_patiently, patiently
from gazette_spark.transaction_log import (
    Commit,
    Fate,
    TransactionLog,
    WriterKind,
    fate_of,
    intents_of,
    intents_text,
)
from gazette_spark.write_options import UNNAMED, WriteOptions, check_key, log_name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True, slots=True)
class RowForm:
    """Form of the messages of a write.

    Attributes:
        messages: makes the messages of a record batch, for ``publish_batch``.
        mapping: which journal a message goes to.
    """

    messages: Callable[[pa.RecordBatch], Any]
    mapping: SelectorMapping


async def row_form(transport: Transport, options: WriteOptions) -> RowForm:
    """Return the form of messages that the journals of a write hold.

    Raises:
        JournalNotFoundError: no journal matches.
        ConfigurationError: the journals hold different forms, or one that needs a class.
    """
    listing = await list_journals(transport, options.journals)
    if not listing.journals:
        raise JournalNotFoundError(
            f"no journal matches {options.journals!r} at {options.url}; create one with"
            " `Journals().create` or `gazctl journals create`"
        )
    specs = [journal.spec for journal in listing.journals]
    types = {value_of(spec.labels, CONTENT_TYPE): spec.name for spec in specs}
    if len(types) > 1:
        texts = ", ".join(f"{name} holds {kind or 'bytes'}" for kind, name in types.items())
        raise ConfigurationError(
            f"gazette: journals of {options.journals!r} have different content types ({texts});"
            " write them one by one"
        )
    [(content_type, journal)] = types.items()
    form = framing_for(content_type).form
    if form == "json":
        if KEY in options.columns:
            raise ConfigurationError(
                f"gazette: the column {KEY!r} cannot be written to {journal}, as each message has"
                " its own UUID there; rename or drop the column"
            )
        return RowForm(lambda batch: batch.select(options.columns), _by_key(options, itemgetter))
    if form == "csv":
        return RowForm(
            lambda batch: _csv_records(batch.select(options.columns)),
            _by_key(options, lambda key: itemgetter(1 + options.columns.index(key))),
        )
    if not options.message:
        raise ConfigurationError(
            f"gazette: {journal} holds {content_type}; give the option message=module:Class"
        )
    message_type = load_message(options.message)
    return RowForm(
        lambda batch: _objects(batch.select(options.columns), message_type),
        _by_key(options, attrgetter),
    )


def _by_key(
    options: WriteOptions, getter: Callable[[str], Callable[[Any], Any]]
) -> SelectorMapping:
    if not options.key:
        return mapping.random(options.journals)
    return mapping.modulo(options.journals, key=getter(options.key))


def _csv_records(batch: pa.RecordBatch) -> list[CsvRecord]:
    """Return rows as records whose first field is left for the UUID.

    Raises:
        ValidationError: a column's values have no text.
    """
    for field in batch.schema:
        if pa.types.is_nested(field.type) or pa.types.is_binary(field.type):
            raise ValidationError(
                f"gazette: column {field.name!r} cannot be written to a CSV journal: it is"
                f" {field.type}; write base64() of binary columns, and to_json() of nested ones"
            )
    columns = [
        ["" if value is None else str(value) for value in column.to_pylist()]
        for column in batch.columns
    ]
    return [CsvRecord(["", *fields]) for fields in zip(*columns, strict=True)]


def _objects(batch: pa.RecordBatch, message_type: Callable[..., Any]) -> list[Any]:
    """Return rows as objects of a protobuf class, whose fields are named as the columns.

    Raises:
        ValidationError: a row does not fit the class.
    """
    objects = []
    for row in batch.to_pylist(maps_as_pydicts="strict"):
        try:
            objects.append(message_type(**_without_nulls(row)))
        except (ValueError, TypeError, AttributeError) as error:
            name = getattr(message_type, "__qualname__", message_type)
            raise ValidationError(
                f"gazette: a row does not fit {name}: {error}; select its fields, with their types"
            ) from error
    return objects


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    return value


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


_INDEX = "_journal_index"


def partition_by_journal(
    df: DataFrame, journals: str, key: str, *, address: str | None = None
) -> DataFrame:
    """Return the rows in one partition for each journal that they will be written to.

    One task then writes a journal, and not all tasks write all journals: committed readers take
    its messages as they come, and need not read the journal again for each task.

    Args:
        df: a DataFrame, batch or streaming.
        journals: the option ``journals`` of the write.
        key: the option ``key`` of the write.
        address: URL of a broker; by default that of ``GAZETTE_ADDRESS``.

    Raises:
        ConfigurationError: the key is no column, or of a type that is no key.
        JournalNotFoundError: no journal matches.
        GazetteError: the journals cannot be listed.
    """

    async def names() -> list[str]:
        async with open_transport(address) as transport:
            listing = await list_patiently(transport, journals)
            return [journal.spec.name for journal in listing.journals]

    if _INDEX in df.columns:
        raise ConfigurationError(f"gazette: the DataFrame has a column {_INDEX!r}; rename it")
    with clear_errors():
        check_key(key, df.columns, df.schema)
        found = sdk_loop.run(names())
        if not found:
            raise JournalNotFoundError(f"no journal matches {journals!r}")

    def indexes(keys: pa.Array) -> pa.Array:
        """Return the index of the journal of each key."""
        partitions = Partitions(pb.JournalSpec(name=name) for name in found)
        by_key = mapping.modulo(journals, key=itemgetter(0))
        values = keys.to_pylist()
        picked = by_key.pick_many([(value,) for value in values], partitions, values)
        return pa.array(list(picked), type=pa.int32())

    index_of: Any = arrow_udf(indexes, "int")  # type: ignore[call-overload]  # Spark's enum is untyped
    return (
        df.withColumn(_INDEX, index_of(sf.col(key)))
        .repartitionById(len(found), sf.col(_INDEX))
        .drop(_INDEX)
    )


# ------------------------------------------------------------------ producers of a worker

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
