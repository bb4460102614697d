"""Care of transaction logs, for operators: which there are, and what becomes of them.

Each function has an asynchronous form, whose name begins with ``a``.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from gazette_sdk.errors import GazetteError
from gazette_sdk.journals import Journals
from gazette_sdk.protocol.labels import MANAGED_BY
from gazette_sdk.transport import Transport
from gazette_sdk.transport import loop as sdk_loop
from gazette_sdk.transport.listing import list_journals
from gazette_sdk.transport.loop import for_each
from gazette_spark.options import open_transport
from gazette_spark.transaction_log import MANAGER, LogTail, TransactionLog
from gazette_spark.write_options import TRANSACTION_LOG, log_name

READ_AT_ONCE = 16
"""Logs that are read at the same time."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LogState:
    """State of the transaction log of a writer.

    Attributes:
        writer: id of a query, ``txnAppId``, or ``batch``.
        log: name of the log.
        state: ``empty``, or what is said of the last transaction: ``decided``, ``completing`` or
            ``done``; ``unreadable`` for a log that cannot be read.
        transaction: its number; None if there is none.
        messages: number of its messages; None if the log does not tell.
    """

    writer: str
    log: str
    state: str
    transaction: int | None
    messages: int | None

    @property
    def is_open(self) -> bool:
        """Return True if the last transaction is decided, and not acknowledged everywhere."""
        return self.state in {"decided", "completing"}

    @classmethod
    def of(cls, writer: str, log: str, tail: LogTail) -> LogState:
        """Return the state that the last lines of a log tell."""
        record = None if tail.number is None else tail.records.get(tail.number)
        return cls(
            writer,
            log,
            "empty" if tail.number is None else tail.last_line.name.lower(),
            tail.number,
            None if record is None else record.rows,
        )


def list_logs(
    *, address: str | None = None, transaction_log: str = TRANSACTION_LOG
) -> list[LogState]:
    """Return the states of all logs with a prefix, in the order of their names.

    Args:
        address: URL of a broker; by default that of ``GAZETTE_ADDRESS``.
        transaction_log: the writers' option ``transactionLog``.

    Raises:
        GazetteError: a call failed.
    """
    return sdk_loop.run(alist_logs(address=address, transaction_log=transaction_log))


async def alist_logs(
    *, address: str | None = None, transaction_log: str = TRANSACTION_LOG
) -> list[LogState]:
    """Return the states of logs, see :func:`list_logs`."""
    prefix = f"{transaction_log.rstrip('/')}/"

    async with open_transport(address) as transport:

        async def read(log: str) -> LogState:
            writer = log.removeprefix(prefix)
            try:
                tail = await TransactionLog(transport, log, "").read()
            except GazetteError as error:
                if error.journal != log:
                    raise
                _log.warning("the log of %s cannot be read: %s", writer, error)
                return LogState(writer, log, "unreadable", None, None)
            return LogState.of(writer, log, tail)

        listing = await list_journals(transport, f"prefix={prefix},{MANAGED_BY}={MANAGER}")
        return await for_each([each.spec.name for each in listing.journals], read, READ_AT_ONCE)


async def astate(
    writer: str, *, address: str | None = None, transaction_log: str = TRANSACTION_LOG
) -> LogState:
    """Return the state of the log of a writer. Arguments and errors are those of `complete`."""
    async with _open_log(writer, address, transaction_log) as (_, log):
        return LogState.of(writer, log.journal, await log.read())


def create(
    writer: str,
    journals: str,
    *,
    after: int,
    address: str | None = None,
    transaction_log: str = TRANSACTION_LOG,
) -> None:
    """Create the log of a streaming query that is lost, or which the query never had.

    Args:
        writer: id of the query.
        journals: label selector of the journals that it writes.
        after: number of the last micro-batch whose messages are all written.
        address: URL of a broker; by default that of ``GAZETTE_ADDRESS``.
        transaction_log: the query's option ``transactionLog``.

    Raises:
        ConfigurationError: the log has records.
        GazetteError: a call failed.
    """
    sdk_loop.run(
        acreate(writer, journals, after=after, address=address, transaction_log=transaction_log)
    )


async def acreate(
    writer: str,
    journals: str,
    *,
    after: int,
    address: str | None = None,
    transaction_log: str = TRANSACTION_LOG,
) -> None:
    """Create the log of a streaming query, see :func:`create`."""
    async with _open_log(writer, address, transaction_log, journals) as (_, log):
        await log.create(after)


def complete(
    writer: str, *, address: str | None = None, transaction_log: str = TRANSACTION_LOG
) -> int | None:
    """Complete the last transaction of a writer, if it is decided and not done.

    The next write of the same writer does so, too.

    Args:
        writer: id of the query, ``txnAppId``, or ``batch`` for writes without one.
        address: URL of a broker; by default that of ``GAZETTE_ADDRESS``.
        transaction_log: the writer's option ``transactionLog``.

    Returns:
        The transaction's number; None if there was nothing to complete.

    Raises:
        JournalNotFoundError: the writer has no log.
        GazetteError: a call failed.
    """
    return sdk_loop.run(acomplete(writer, address=address, transaction_log=transaction_log))


async def acomplete(
    writer: str, *, address: str | None = None, transaction_log: str = TRANSACTION_LOG
) -> int | None:
    """Complete the last transaction of a writer, see :func:`complete`."""
    async with _open_log(writer, address, transaction_log) as (_, log):
        return await log.complete()


def delete(
    writer: str,
    *,
    gives_up_open: bool = False,
    address: str | None = None,
    transaction_log: str = TRANSACTION_LOG,
) -> None:
    """Delete the log of a writer that does not come back.

    Arguments and errors are those of :func:`complete`. A writer that comes back has lost what it
    knew: a streaming query stops, and a batch write of an earlier ``txnVersion`` is written again.

    Args:
        writer: id of the query, ``txnAppId``, or ``batch`` for writes without one.
        gives_up_open: delete the log also if its last transaction is decided and not done. Its
            messages are lost where they are not acknowledged.
        address: URL of a broker; by default that of ``GAZETTE_ADDRESS``.
        transaction_log: the writer's option ``transactionLog``.

    Raises:
        JournalNotFoundError: the writer has no log.
        GazetteError: its last transaction is open; or a call failed.
    """
    sdk_loop.run(
        adelete(
            writer, gives_up_open=gives_up_open, address=address, transaction_log=transaction_log
        )
    )


async def adelete(
    writer: str,
    *,
    gives_up_open: bool = False,
    address: str | None = None,
    transaction_log: str = TRANSACTION_LOG,
) -> None:
    """Delete the log of a writer, see :func:`delete`."""
    async with _open_log(writer, address, transaction_log) as (transport, log):
        found = LogState.of(writer, log.journal, await log.read())
        if found.is_open and not gives_up_open:
            raise GazetteError(
                f"{found.log}: transaction {found.transaction} is {found.state} and not done, and"
                " is lost where it is not acknowledged; complete it first, with `gazette spark"
                f" transactions complete {writer}`",
                journal=found.log,
            )
        await Journals(transport).adelete([found.log])


@asynccontextmanager
async def _open_log(
    writer: str, address: str | None, prefix: str, journals: str = ""
) -> AsyncIterator[tuple[Transport, TransactionLog]]:
    name = log_name(prefix, writer)
    async with open_transport(address) as transport:
        await list_journals(transport, f"name={name}")  # fails at once, if no broker is there
        yield transport, TransactionLog(transport, name, journals)
